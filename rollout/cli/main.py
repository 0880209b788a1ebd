"""The command line: `python -m rollout CartPole-v1` collects with the random policy.

It collects a number of steps or exactly N episodes, and prints their statistics and the
speed; options save the trajectory, plot the episodes, or profile one more batch.
`--gif` draws one episode instead, and `--inspect` reports how the steps would run on an
accelerator.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from rollout import envs
from rollout.cli import figure, interrupts, runs, table
from rollout.cli.arguments import XLA_CPU_LOOP, Run, make_parser, parse
from rollout.cli.files import write_file
from rollout.cli.interrupts import aside
from rollout.cli.random_collector import start_devices

_OTHER_IDS = "gymnasium:ID and envpool:ID, such as gymnasium:CartPole-v1"
_PIPE_STATUS = 141  # as a shell counts SIGPIPE
_JaxError = jax.errors.JaxRuntimeError
_ERRORS = (ValueError, ImportError, MemoryError, envs.EnvFault, _JaxError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, with the arguments of the process if `argv` is None.

    Returns:
        The exit status: 0; 130 after Ctrl-C and 141 if the reader of stdout is gone, as
            a shell counts signals; 2 after an error, with one line on stderr.
    """
    parser, run = make_parser(), None
    with interrupts.raising():
        try:
            try:
                run = parse(parser, argv)
                for lines in _run(run):
                    _print(*lines)
            finally:
                _print()  # flushes the output of the parser
            return 0
        except KeyboardInterrupt:
            print(interrupts.line(), end="", file=sys.stderr)
            return interrupts.STATUS
        except BrokenPipeError:
            return _PIPE_STATUS
        except _ERRORS as error:
            parser.error(str(error).partition("\n")[0])
        except Exception as error:
            if run is None or not run.params:
                raise
            # A wrong value fails wherever the environment first uses it.
            parser.error(f"{run.env} with {run.params} fails: {error}")


def run_and_exit() -> NoReturn:
    """Runs the command line as a process, and ends the process."""
    status = main()
    if status == interrupts.STATUS:
        os._exit(status)  # another thread may be in XLA, which must not be torn down
    sys.exit(status)


def _run(run: Run) -> Iterator[Iterable[object]]:
    """Executes a run, and yields groups of lines to print.

    Each group is printed at once, so that Ctrl-C does not split it.
    """
    if run.xla_cpu_loop:  # before gymnax is imported, which starts the backend
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} {XLA_CPU_LOOP}".strip()
    if run.list_envs:
        yield *envs.env_ids("installed"), _OTHER_IDS
    elif run.inspect:
        accelerator = run.inspect
        inspected = aside(lambda: runs.inspect_steps(run, accelerator))
        yield *table.inspection(run), inspected
    elif run.gif:
        gif, episodes = aside(lambda: runs.draw(run))
        write_file(run.gif, lambda file: file.write(gif))
        rows = table.environment(run), *table.device(1), *table.one_episode(episodes)
        num_frames = int(episodes.episode_length[0]) + 1
        yield *rows, table.line("gif", f"{run.gif} ({num_frames} frames)")
    else:
        yield from _collect(run)


def _collect(run: Run) -> Iterator[Iterable[object]]:
    """Collects steps or exactly N episodes."""
    num_devices, num_episodes = aside(lambda: start_devices(run)), run.num_episodes
    if num_episodes:
        result = aside(lambda: runs.play(run, num_episodes, num_devices))
    else:
        result = runs.collect(run, num_devices)
    device = table.device(num_devices)
    yield table.environment(run), *device, *table.collected(run, result)
    if result.is_interrupted:
        raise KeyboardInterrupt
    rows: Any = result.rows
    if run.save:
        write_file(run.save, lambda file: np.savez(file, **rows))
        yield (table.line("saved", run.save),)
    if run.profile:
        folder = run.profile
        seconds, trace = aside(lambda: runs.profile(run, folder, num_devices))
        yield *table.parts(seconds), table.line("profile", trace)
    if run.plot:
        if not result.stats.num_episodes:
            raise ValueError("argument --plot: no episode ended, nothing to draw")
        title = f"{run.env}: random policy in {run.num_envs:,} envs"
        order, kind = "started" if num_episodes else "ended", run.plot.suffix[1:]
        episodes = result.episodes or runs.ended(rows)
        agents, kind = result.agent_returns, kind.lower()
        image = aside(lambda: figure.draw(title, order, episodes, kind, agents))
        write_file(run.plot, lambda file: file.write(image))
        yield (table.line("plot", run.plot),)


def _print(*lines: object) -> None:
    """Prints lines, and flushes stdout.

    Raises:
        BrokenPipeError: if the reader is gone (`| head`).
        ValueError: if stdout is closed or full.
    """
    if sys.stdout is None:
        raise ValueError("stdout is closed")
    try:
        print(*(f"{line}\n" for line in lines), sep="", end="", flush=True)
    except OSError as error:
        # Python would try again at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        reason = error.strerror or error
        raise ValueError(f"stdout could not be written: {reason}") from error

"""The command line: `python -m rollout CartPole-v1` collects with the random policy.

It prints what the episodes were like and how fast they came, of a number of steps or of
exactly N episodes; on demand it saves the trajectory, draws the episodes, or profiles
one more chunk. `--gif` draws one episode instead, and `--inspect` says what the steps
would do on an accelerator.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import jax
import numpy as np

import envs
from buffers.io import whole_file
from rollout.cli import devices, episodes, figure, inspection, report, steps
from rollout.cli.arguments import (
    XLA_CPU_LOOP,
    InputError,
    check,
    make_parser,
    with_defaults,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OTHER_IDS = "gymnasium:ID and envpool:ID, such as gymnasium:CartPole-v1"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, with the arguments of the process if `argv` is None.

    Returns:
        The exit status: 0; 1 if `--plot` found no episode to draw; 130 after Ctrl-C
            and 141 if the reader of stdout is gone, as a shell counts signals. What
            cannot be done exits with 2, after one line on stderr.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        with _one_interrupt():
            status = _main(args)
        sys.stdout.flush()
        return status
    except InputError as error:
        parser.error(str(error))
    except (MemoryError, envs.EnvFault, jax.errors.JaxRuntimeError) as error:
        parser.error(str(error).partition("\n")[0])
    except BrokenPipeError:
        # The reader of stdout is gone (`| head`); Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        sys.stdout.flush()  # the table so far
        # On a terminal the cursor stands after the ^C that was typed.
        start = "\r" if sys.stderr.isatty() else ""
        print(f"{start}{parser.prog}: interrupted", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """Lets the first Ctrl-C raise, and those after it be: they would lose the table."""
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not own or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _main(args: argparse.Namespace) -> int:
    if args.xla_cpu_loop:  # before gymnax is imported, which starts the backend
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} {XLA_CPU_LOOP}".strip()
    if args.list_envs:
        print(*envs.env_ids("installed"), _OTHER_IDS, sep="\n")
        return 0
    check(args)
    args = with_defaults(args)
    if args.gif:
        return _run_gif(args)
    if args.inspect:
        report.print_inspection(args, inspection.run(args))
        return 0
    args.devices = devices.start(args)
    return _run_episodes(args) if args.num_episodes else _run_steps(args)


def _run_steps(args: argparse.Namespace) -> int:
    result = steps.collect(args)
    report.print_steps(args, result)
    if result.is_interrupted:
        raise KeyboardInterrupt
    if args.save:
        arrays: dict[str, Any] = result.trajectory
        _write(args.save, lambda file: np.savez(file, **arrays))
        report.print_row("saved", args.save)
    if args.profile:
        seconds, trace = steps.profile(args)
        report.print_profile(seconds)
        report.print_row("profile", trace)
    if args.plot and not result.ended.step.size:
        reason = "no episode ended in this window, nothing to draw"
        print(f"python -m rollout: error: argument --plot: {reason}", file=sys.stderr)
        return 1
    if args.plot:
        _plot(args.plot, figure.draw_steps(args.env, args.num_envs, result.ended))
    return 0


def _run_episodes(args: argparse.Namespace) -> int:
    played = episodes.play(args)
    report.print_episodes(args, played)
    if args.plot:
        _plot(args.plot, figure.draw_episodes(args.env, args.num_envs, played))
    return 0


def _run_gif(args: argparse.Namespace) -> int:
    recorded = episodes.record(args)
    gif = envs.render_gif(recorded.env, recorded.states, recorded.rewards)
    _write(args.gif, lambda file: file.write(gif))
    report.print_episode(args, recorded.episodes)
    report.print_row("gif", f"{args.gif} ({recorded.rewards.size + 1} frames)")
    return 0


def _plot(path: Path, figure: "Figure") -> None:
    _write(path, lambda file: figure.savefig(file, format=path.suffix[1:].lower()))
    report.print_row("plot", path)


def _write(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    try:
        with whole_file(path) as file:
            write(file)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{path} could not be written: {reason}") from error

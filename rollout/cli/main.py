"""The command line: `python -m rollout CartPole-v1` collects with the random policy.

It collects a number of steps or exactly N episodes, and prints their statistics and the
speed; options save the trajectory, plot the episodes, or profile one more batch.
`--gif` draws one episode instead, and `--inspect` reports how the steps would run on an
accelerator.
"""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import jax
import numpy as np

from rollout import envs
from rollout.cli import runs, table
from rollout.cli.arguments import make_parser, parse
from rollout.cli.figure import make_figure
from rollout.host import ctrl_c

_XLA_CPU_LOOP = (
    "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
)
_OTHER_IDS = "gymnasium:ID and envpool:ID, such as gymnasium:CartPole-v1"
_INTERRUPTED, _PIPE_CLOSED = 130, 141  # as a shell counts SIGINT and SIGPIPE
_JaxError = jax.errors.JaxRuntimeError
_ERRORS = (ValueError, ImportError, MemoryError, OSError, envs.EnvFault, _JaxError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, with the arguments of the process if `argv` is None.

    Returns:
        The exit status: 0; 130 after Ctrl-C and 141 if the reader of stdout is gone, as
            a shell counts signals; 2 after an error, with one line on stderr.
    """
    parser, run = make_parser(), None
    try:
        try:
            run = parse(parser, argv)
            _execute(run)
        finally:
            _print()  # flushes the output of the parser
        return 0
    except KeyboardInterrupt:
        _end_line()
        print("python -m rollout: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        return _PIPE_CLOSED
    except _ERRORS as error:
        parser.error(str(error).partition("\n")[0])
    except Exception as error:
        if run is None or not run.env_param:
            raise
        # A wrong value fails wherever the environment first uses it.
        parser.error(f"{run.title} fails: {error}")


def run_and_exit() -> NoReturn:
    """Runs the command line as a process, and ends the process."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one loses the table
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    status = main()
    if status == _INTERRUPTED:
        os._exit(status)  # another thread may be in XLA, which must not be torn down
    sys.exit(status)


def _execute(run: Namespace) -> None:
    """Executes a run, and prints each part of its table at once."""
    if not os.path.exists("/dev/nvidiactl"):
        # With a GPU's compiler and no GPU jax would print a traceback.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if run.xla_cpu_loop:  # before gymnax is imported, which starts the backend
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} {_XLA_CPU_LOOP}".strip()
    if run.list_envs:
        _print(*envs.env_ids("installed"), _OTHER_IDS)
    elif run.inspect:
        sizes = {"envs": run.num_envs, "steps": run.num_envs * run.num_steps}
        rows = (table.line(name, f"{size:,}") for name, size in sizes.items())
        _print(table.line("environment", run.title), *rows, _aside(runs.inspect, run))
    elif run.gif:
        rows = table.episodes(_aside(runs.draw, run), None)
        _print(*table.head(run, 1), *rows, table.line("gif", run.gif))
    else:
        _collect(run)


def _collect(run: Namespace) -> None:
    """Collects steps or exactly N episodes."""
    num_devices = _aside(runs.start_devices, run)
    head = table.head(run, num_devices)
    if run.num_episodes:
        result = _aside(runs.play, run, num_devices)
    else:
        batches: runs.Batches = []
        try:
            _aside(runs.collect, run, num_devices, batches)
        except KeyboardInterrupt:
            if batches:
                _end_line()
                _print(*head, *table.collected(run, runs.join(batches[:])))
            raise
        result = runs.join(batches)
    _print(*head, *table.collected(run, result))
    if run.save:
        with run.save.open("wb") as file:
            np.savez(file, **result.saved)
        _print(table.line("saved", run.save))
    if run.profile:
        found = _aside(runs.profile, run, num_devices)
        _print(found, table.line("profile", run.profile))
    if run.plot:
        if not result.stats.num_episodes:
            raise ValueError("argument --plot: no episode ended, nothing to draw")
        make_figure(run.title, result.drawn).savefig(run.plot)
        _print(table.line("plot", run.plot))


def _aside(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls `fn` in a thread, while the main one only waits.

    So Ctrl-C raises here, at once, and never inside jax, which compiles for seconds
    without checking signals, and turns exceptions in callbacks into other errors.
    """
    return ctrl_c.result(ctrl_c.submit(ThreadPoolExecutor(1), fn, *args))


def _end_line() -> None:
    """Begins a line below the `^C` or the progress bar of a terminal."""
    if sys.stderr and sys.stderr.isatty():
        print("\n\r", end="", file=sys.stderr, flush=True)


def _print(*lines: object) -> None:
    """Prints lines, and flushes stdout, which may be closed or full."""
    if sys.stdout is None:
        raise ValueError("stdout is closed")
    try:
        print(*(f"{line}\n" for line in lines), sep="", end="", flush=True)
    except OSError:
        # Python would try again at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise

"""The command line: `python -m rollout CartPole-v1` collects with the random policy.

It collects a number of steps or exactly N episodes, and prints their statistics and the
speed. Other options draw one episode, time the parts of a batch, or report how the
steps would run on an accelerator.
"""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

import jax

from rollout import envs
from rollout.cli import runs, table
from rollout.cli.arguments import make_parser, parse

_OTHER_IDS = "gymnasium:ID and envpool:ID, such as gymnasium:CartPole-v1"
_PIPE_CLOSED = 141  # as a shell counts SIGPIPE
_JaxError = jax.errors.JaxRuntimeError
_ERRORS = (ValueError, ImportError, MemoryError, OSError, envs.EnvFault, _JaxError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, with the arguments of the process if `argv` is None.

    Returns:
        The exit status: 0; 141 if the reader of stdout is gone, as a shell counts the
            signal; 2 after an error, with one line on stderr.
    """
    parser = make_parser()
    run = parse(parser, argv)
    try:
        _execute(run)
        return 0
    except BrokenPipeError:
        return _PIPE_CLOSED
    except _ERRORS as error:
        parser.error(str(error).partition("\n")[0])
    except Exception as error:
        if not run.env_param:
            raise
        # A wrong value fails wherever the environment first uses it.
        parser.error(f"{run.title} fails: {error}")


def run_and_exit() -> NoReturn:
    """Runs the command line as a process, and ends the process."""
    # Ctrl-C ends it at once: XLA compiles for seconds without looking at Python's.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())


def _execute(run: Namespace) -> None:
    """Executes a run, and prints its table."""
    if run.list_envs:
        _print(*envs.env_ids("installed"), _OTHER_IDS)
    elif run.inspect:
        if not os.path.exists("/dev/nvidiactl"):
            # With a GPU's compiler and no GPU jax would print a traceback.
            os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        sizes = {"envs": run.num_envs, "steps": run.num_envs * run.num_steps}
        rows = [table.line(name, f"{size:,}") for name, size in sizes.items()]
        _print(table.line("environment", run.title), *rows, runs.inspect(run))
    elif run.gif:
        _print(*table.head(run), *table.episodes(runs.draw(run), None))
    elif run.profile:
        _print(*table.head(run), runs.profile(run))
    else:
        result = runs.play(run) if run.num_episodes else runs.collect(run)
        _print(*table.head(run), *table.collected(run, result))


def _print(*lines: object) -> None:
    """Prints lines, and flushes stdout, which may be closed or full."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        # Python would try again at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise

"""The parser of all commands, and the functions that run a command."""

import os
import runpy
import signal
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from rollout.cli import speed
from rollout.cli.arguments import Parser, add_count, add_env_arguments
from rollout.envs.host.types import EnvFault
from rollout.envs.registry import env_ids
from rollout.inspection.compilation import NAMES

ALGORITHMS = ("ppo", "recurrent_ppo", "dqn", "pqn", "sac", "td3")

_OTHER_IDS = "gymnasium:ID and envpool:ID, such as gymnasium:CartPole-v1"
_PIPE_CLOSED = 141  # as a shell counts SIGPIPE
_JaxError = jax.errors.JaxRuntimeError
_ERRORS = (ValueError, ImportError, MemoryError, OSError, EnvFault, _JaxError)


def make_parser() -> Parser:
    """Makes the parser; `run` of its result is the function of the command."""
    text = "Trains agents, and measures and renders environments."
    parser = Parser("rollout", description=text, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add_command(
        name: str, run: Callable[[Namespace], Iterable[Any]], text: str
    ) -> ArgumentParser:
        description = f"{text[0].upper()}{text[1:]}."
        command = commands.add_parser(
            name, help=text, description=description, allow_abbrev=False
        )
        command.set_defaults(run=run, parser=command)
        return command

    command = add_command("train", train, "train an agent of rollout.recipes")
    command.usage = "rollout train ALGORITHM ENV [options]"
    command.epilog = "`rollout train ppo --help` lists the options of PPO."
    command.add_argument("algorithm", choices=ALGORITHMS)
    command.add_argument("arguments", nargs=REMAINDER, metavar="ENV [options]")

    text = "collect with the random policy, and report returns and speed"
    command = add_command("speed", speed.measure, text)
    add_env_arguments(command)
    text = "parallel environments (1024, of gymnasium: and envpool: 16)"
    add_count(command, "--num-envs", text)
    mode = command.add_mutually_exclusive_group()
    add_count(mode, "--num-steps", "steps of every environment", default=1000)
    add_count(mode, "--num-episodes", "play exactly so many episodes")
    text = "time the parts of a batch, and write a trace to this folder"
    mode.add_argument("--profile", type=Path, metavar="FOLDER", help=text)
    text = "longest episode, with --num-episodes (1000000)"
    add_count(command, "--max-episode-steps", text)

    text = "play one episode with a trained agent or the random policy, and render it"
    command = add_command("render", speed.render, text)
    add_env_arguments(command)
    command.add_argument("file", type=Path, metavar="FILE", help="path, ends in .gif")
    text = "folder of a run of `rollout train` (the random policy)"
    command.add_argument("--run", type=Path, metavar="FOLDER", help=text, dest="folder")
    add_count(command, "--max-episode-steps", "longest episode", default=1000)
    add_count(command, "--height", "pixels of a frame; the file is smaller")
    add_count(command, "--every", "steps between two frames", default=1)
    text = "frames per second (20 for classic control, 10 for other environments)"
    command.add_argument("--fps", type=float, metavar="FLOAT", help=text)

    text = "report how the steps would run on an accelerator, without the device"
    command = add_command("inspect", speed.inspect, text)
    add_env_arguments(command)
    text = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
    command.add_argument("accelerator", choices=NAMES, metavar="ACCELERATOR", help=text)
    add_count(command, "--num-envs", "parallel environments", default=1024)
    add_count(command, "--num-steps", "steps of every environment", default=1000)

    add_command("envs", list_envs, "print the ids of the installed environments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, with the arguments of the process if `argv` is None.

    Returns:
        The exit status: 0; 141 if the reader of stdout has closed the pipe, as a shell
            counts the signal; 2 after an error, with one line on stderr.
    """
    return execute(make_parser(), argv)


def run_and_exit() -> NoReturn:
    """Runs a command and exits the process with its status."""
    end_on_interrupt()
    sys.exit(main())


def end_on_interrupt() -> None:
    """Lets Ctrl-C end the process: XLA compiles for seconds without checking signals.

    A handler of the caller, or a parent that ignores the signal, has precedence.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def execute(parser: Parser, argv: Sequence[str] | None) -> int:
    """Parses arguments, runs their command and prints its lines; see `main`."""
    options, unknown = parser.parse_known_args(argv)
    parser = options.parser
    parser.check_options(unknown)
    try:
        print_lines(options.run(options))
        return 0
    except BrokenPipeError:
        return _PIPE_CLOSED
    except _ERRORS as error:
        parser.error(str(error).partition("\n")[0])
    except Exception as error:
        # A bug in this library or in the environment: show the traceback.
        if not vars(options).get("env_param"):
            raise
        # An invalid parameter can raise any error in the environment.
        parser.error(f"{options.env} fails with these parameters: {error}")


def print_lines(lines: Iterable[Any]) -> None:
    """Prints lines and flushes stdout, which may be closed or full."""
    lines = list(lines)  # stdout stays empty if the command raises
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        # Python would flush stdout again at exit and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def train(options: Namespace) -> Iterable[str]:
    """Runs a recipe as a program: its last lines call `rollout.cli.train.main`."""
    sys.argv[1:] = options.arguments
    module = f"rollout.recipes.{options.algorithm}"
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return ()


def list_envs(options: Namespace) -> Iterable[str]:
    """Returns the ids of all installed suites."""
    return *env_ids("installed"), _OTHER_IDS

"""The arguments of `python -m rollout`: the parser, what it refuses, the defaults."""

import argparse
import ast
import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from rollout.inspection.accelerators import NAMES

XLA_CPU_LOOP = (
    "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
)

_MAX_STEPS = 1_000_000  # so that a run ends even if an episode never does
_MAX_STEPS_DRAWN = 500  # a frame takes about a tenth of a second
_INT32_MAX = 2**31 - 1  # lanes and steps are counted in int32
_SEED_MAX = 2**32 - 1  # jax takes a longer one and drops its upper bits
_MAX_DEVICES = 1024  # jax starts a thread for each device of a CPU
_NUM_ENVS, _NUM_STEPS = 1024, 1000
_NUM_HOST_ENVS = 16  # where a loop in Python steps them
_HOST_SUITES = ("gymnasium", "envpool")
_AGENT_SUITES = ("jaxmarl", "pgx")  # of which all agents are played
_FIGURE_KINDS = (".pdf", ".png", ".svg")


_USAGE = """%(prog)s ENV [--num-envs N] [--devices N] [--seed N]
    [--env-param NAME=VALUE] [--xla-cpu-loop] and one of
        [--num-steps N] [--save FILE] [--plot FILE] [--profile DIR]
        --num-episodes N [--max-steps N] [--plot FILE]
        --gif FILE [--max-steps N], without --num-envs and --devices
        --inspect ACCELERATOR [--num-steps N], without --devices and --xla-cpu-loop
       %(prog)s --list-envs"""


class InputError(Exception):
    """Raised for a command line that cannot be run; the message says why."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser; what depends on the kind of run has no default here."""
    parser = _Parser(
        prog="python -m rollout",
        usage=_USAGE,
        description="Collects experience with the random policy and reports on it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    env_help = (
        "id of the environment, such as CartPole-v1, jumanji:Snake-v1, "
        "pgx:tic_tac_toe or gymnasium:CartPole-v1"
    )
    add("env", nargs="?", help=env_help)
    _add_kinds_of_run(parser)
    add(
        "--seed",
        type=_int_within(0, _SEED_MAX),
        default=0,
        help="decides all that is random (0)",
    )
    add(
        "--env-param",
        type=_parse_parameter,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="parameter of the environment, VALUE a Python literal; repeatable",
    )
    add("--save", type=Path, metavar="FILE", help="write the trajectory as .npz")
    add("--plot", type=Path, metavar="FILE", help="draw the episodes as .png")
    add(
        "--profile",
        type=Path,
        metavar="DIR",
        help="say where the time of a batch goes, and trace one more to DIR",
    )
    inspect_help = (
        "run nothing, but say what the steps do on an accelerator that may be absent: "
        f"{', '.join(NAMES)}"
    )
    add("--inspect", choices=NAMES, metavar="ACCELERATOR", help=inspect_help)
    add("--list-envs", action="store_true", help="print the known ids and exit")
    add(
        "--xla-cpu-loop",
        action="store_true",
        help="let XLA:CPU compile the whole loop to one kernel, which often pays for "
        f"few envs; adds {XLA_CPU_LOOP} to XLA_FLAGS",
    )
    return parser


def check(args: argparse.Namespace) -> None:
    """Checks all arguments before anything is collected."""
    if args.env is None:
        raise InputError("the environment is missing; --list-envs prints the ids")
    _check_combination(args)
    if is_on_host(args.env):
        _check_host(args)
    if args.gif and has_agents(args.env):
        reason = "environments of several agents are not drawn"
        raise InputError(f"argument --gif: {reason}, got {args.env}")
    files = {"--save": args.save, "--plot": args.plot, "--gif": args.gif}
    for option, path in files.items():
        problem = path and _problem_with(path)
        if problem:
            raise InputError(f"argument {option}: {problem}")
    if args.gif and args.gif.suffix.lower() != ".gif":
        raise InputError(f"argument --gif: must end in .gif, got {args.gif}")
    if args.plot and args.plot.suffix.lower() not in _FIGURE_KINDS:
        kinds = ", ".join(_FIGURE_KINDS)
        raise InputError(f"argument --plot: must end in {kinds}, got {args.plot}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise InputError("argument --plot: matplotlib is not installed")
    try:
        if args.profile:
            args.profile.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{args.profile}: {error.strerror}"
        raise InputError(f"argument --profile: {reason}") from error


def has_agents(env_id: str) -> bool:
    """Tells whether an id is played by `envs.make_agents`, as pgx:tic_tac_toe is."""
    return env_id.partition(":")[0] in _AGENT_SUITES and ":" in env_id


def is_on_host(env_id: str) -> bool:
    """Tells whether an id is one of an environment that is not JAX."""
    return env_id.partition(":")[0] in _HOST_SUITES and ":" in env_id


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Fills in the defaults of the kind of run that was asked for."""
    most_envs = _NUM_HOST_ENVS if is_on_host(args.env) else _NUM_ENVS
    most_envs = min(most_envs, args.num_episodes or most_envs)  # more would idle
    limit = _MAX_STEPS_DRAWN if args.gif else _MAX_STEPS
    defaults = {"num_envs": most_envs, "num_steps": _NUM_STEPS, "max_steps": limit}
    if is_on_host(args.env) or args.inspect:
        defaults["devices"] = 1
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**{**vars(args), **defaults, **given})


@contextlib.contextmanager
def naming_parameters(args: argparse.Namespace) -> Iterator[None]:
    """Makes an error of the environment an `InputError` that names its parameters."""
    params = dict(args.env_param)
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error
    except Exception as error:
        if not params:
            raise
        # A wrong value breaks whatever in the environment first meets it.
        given = ", ".join(f"{name}={value!r}" for name, value in params.items())
        raise InputError(f"{args.env} with {given} fails: {error}") from error


def _add_kinds_of_run(parser: argparse.ArgumentParser) -> None:
    """Adds what to collect, and how much of it."""
    add, count = parser.add_argument, _int_within(1, _INT32_MAX)
    envs_help = (
        f"lanes side by side ({_NUM_ENVS}, of gymnasium: and envpool: "
        f"{_NUM_HOST_ENVS}; at most --num-episodes)"
    )
    add("--num-envs", type=count, help=envs_help)
    add(
        "--devices",
        type=_parse_devices,
        metavar="N",
        help="devices that the lanes are spread over, or all (on a CPU what is fastest "
        "for so many lanes; else 1)",
    )
    add_run = parser.add_mutually_exclusive_group().add_argument
    add_run("--num-steps", type=count, help=f"steps of every lane ({_NUM_STEPS})")
    add_run("--num-episodes", type=count, help="play exactly so many episodes instead")
    gif_help = "play one episode and draw it as .gif"
    add_run("--gif", type=Path, metavar="FILE", help=gif_help)
    steps_help = (
        f"steps after which an episode is cut ({_MAX_STEPS}; for --gif "
        f"{_MAX_STEPS_DRAWN})"
    )
    add("--max-steps", type=count, help=steps_help)


def _int_within(low: int, high: int) -> Callable[[str], int]:
    """Makes the parser of an int from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be an int from {low} to {high}, got {text!r}"
            )
        return value

    return parse


def _parse_devices(text: str) -> int | str:
    try:
        return text if text == "all" else _int_within(1, _MAX_DEVICES)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or all") from None


def _parse_parameter(text: str) -> tuple[str, Any]:
    name, equals, literal = text.partition("=")
    if not name.isidentifier() or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise argparse.ArgumentTypeError(
            f"VALUE must be a Python literal, got {text!r}"
        ) from None


def _check_combination(args: argparse.Namespace) -> None:
    """Raises for an option that has no meaning in this kind of run."""
    if args.inspect:
        reason = "not allowed with argument --inspect"
        refused = {"num-episodes": args.num_episodes, "gif": args.gif}
        refused |= {"save": args.save, "plot": args.plot, "profile": args.profile}
        refused |= {"max-steps": args.max_steps, "devices": args.devices}
        refused |= {"xla-cpu-loop": args.xla_cpu_loop or None}
    elif args.gif:
        reason = "not allowed with argument --gif"
        refused = {"num-envs": args.num_envs, "save": args.save, "plot": args.plot}
        refused |= {"profile": args.profile, "devices": args.devices}
    elif args.num_episodes:
        reason = "not allowed with argument --num-episodes"
        refused = {"save": args.save, "profile": args.profile}
    else:
        reason = "only allowed with argument --num-episodes or --gif"
        refused = {"max-steps": args.max_steps}
    for option, value in refused.items():
        if value is not None:
            raise InputError(f"argument --{option}: {reason}")


def _check_host(args: argparse.Namespace) -> None:
    """Raises for an option that host environments do not support."""
    refused = {"gif": args.gif, "profile": args.profile, "inspect": args.inspect}
    refused["devices"] = args.devices not in (None, 1)
    for option, value in refused.items():
        if value:
            reason = f"only for environments in JAX, got {args.env}"
            raise InputError(f"argument --{option}: {reason}")


def _problem_with(path: Path) -> str | None:
    """Says why no file can be written there, if none can."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.exists() and not path.is_file():
        return f"{path} is not a regular file"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"the folder {path.parent} is not writable"
    return None

"""The arguments of `python -m rollout`: parses and checks them into a `Run`."""

import argparse
import ast
import contextlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rollout.inspection.accelerators import NAMES

XLA_CPU_LOOP = (
    "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
)

_MAX_STEPS = 1_000_000  # so that a run ends even if an episode never does
_MAX_STEPS_DRAWN = 500  # drawing a frame is slow
_INT32_MAX = 2**31 - 1  # lanes and steps are counted in int32
_SEED_MAX = 2**32 - 1  # jax drops the upper bits of a larger one
_MAX_DEVICES = 1024  # jax starts a thread for each device of a CPU
_NUM_ENVS, _NUM_STEPS = 1024, 1000
_NUM_HOST_ENVS = 16  # where a loop in Python steps them
# The errors of `ast.literal_eval`.
_NOT_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
_SUFFIXES = {"save": (), "plot": (".pdf", ".png", ".svg"), "gif": (".gif",)}
_EXCLUDED = {  # options that do not go with the option that sets the kind of run
    "inspect": "num_episodes gif save plot profile max_steps devices xla_cpu_loop",
    "gif": "num_envs save plot profile devices",
    "num_episodes": "save profile",
}
_USAGE = """%(prog)s ENV [--num-envs N] [--devices N] [--seed N]
    [--env-param NAME=VALUE] [--xla-cpu-loop] and one of
        [--num-steps N] [--save FILE] [--plot FILE] [--profile DIR]
        --num-episodes N [--max-steps N] [--plot FILE]
        --gif FILE [--max-steps N], without --num-envs and --devices
        --inspect ACCELERATOR [--num-steps N], without --devices and --xla-cpu-loop
       %(prog)s --list-envs"""


class Run(NamedTuple):
    """The checked options of a run, with the defaults of its kind."""

    env: str
    num_envs: int
    devices: int | str | None  # a number, "all", or None for the fastest number
    num_steps: int
    num_episodes: int | None
    gif: Path | None
    max_steps: int
    seed: int
    env_param: list[tuple[str, Any]]
    save: Path | None
    plot: Path | None
    profile: Path | None
    inspect: str | None
    list_envs: bool
    xla_cpu_loop: bool

    @property
    def params(self) -> str:
        """The parameters of the environment as text."""
        return ", ".join(f"{name}={value!r}" for name, value in self.env_param)

    @property
    def is_on_host(self) -> bool:
        """True if the environments are not JAX."""
        return self.env.startswith(("gymnasium:", "envpool:"))

    @property
    def has_agents(self) -> bool:
        """True if the environments have several agents."""
        return self.env.startswith(("jaxmarl:", "pgx:"))


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser; defaults that depend on the kind of run come later."""
    text = "Collects experience with the random policy and reports on it."
    parser = _Parser("python -m rollout", _USAGE, text, allow_abbrev=False)
    add, count = parser.add_argument, _int_within(1, _INT32_MAX)
    add("env", nargs="?", help="id, such as CartPole-v1, jumanji:Snake-v1, pgx:chess")
    text = f"lanes ({_NUM_ENVS}, of gymnasium: and envpool: {_NUM_HOST_ENVS})"
    add("--num-envs", type=count, help=text)
    devices = _int_within(1, _MAX_DEVICES, "all")
    add("--devices", type=devices, help="devices for the lanes, or all (the fastest)")
    kind = parser.add_mutually_exclusive_group().add_argument
    kind("--num-steps", type=count, help=f"steps of every lane ({_NUM_STEPS})")
    kind("--num-episodes", type=count, help="play exactly N episodes instead")
    kind("--gif", type=Path, help="play one episode and draw it as .gif")
    text = f"cut episodes after N steps ({_MAX_STEPS}; for --gif {_MAX_STEPS_DRAWN})"
    add("--max-steps", type=count, help=text)
    seed = _int_within(0, _SEED_MAX)
    add("--seed", type=seed, default=0, help="seed of everything random (0)")
    text = "NAME=VALUE of the environment, VALUE a Python literal; repeatable"
    add("--env-param", type=_parameter, action="append", default=[], help=text)
    add("--save", type=Path, help="write the trajectory as .npz")
    add("--plot", type=Path, help="draw the episodes as .png, .svg or .pdf")
    add("--profile", type=Path, help="time parts of a batch, trace one to this folder")
    text = "run nothing; report how the steps run on an accelerator, even if absent"
    add("--inspect", choices=NAMES, help=text)
    add("--list-envs", action="store_true", help="print the known ids and exit")
    text = "compile the whole loop to one kernel on a CPU, often faster for few envs"
    add("--xla-cpu-loop", action="store_true", help=text)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> Run:
    """Parses and checks the arguments; raises `ValueError` for an impossible run."""
    run = Run(**vars(parser.parse_args(argv)))
    if run.list_envs:
        return run
    if run.env is None:
        raise ValueError("the environment is missing; --list-envs prints the ids")
    _check_combination(run)
    _check_files(run)
    most_envs = _NUM_HOST_ENVS if run.is_on_host else _NUM_ENVS
    most_envs = min(most_envs, run.num_episodes or most_envs)  # more would idle
    return run._replace(
        num_envs=run.num_envs or most_envs,
        num_steps=run.num_steps or _NUM_STEPS,
        max_steps=run.max_steps or (_MAX_STEPS_DRAWN if run.gif else _MAX_STEPS),
        devices=1 if run.is_on_host else run.devices,
    )


def _check_combination(run: Run) -> None:
    """Raises if an option does not go with this kind of run."""
    kind = next((name for name in _EXCLUDED if getattr(run, name)), "")
    for name in _EXCLUDED.get(kind, "").split():
        if getattr(run, name):
            _fail(name, f"not allowed with argument --{kind.replace('_', '-')}")
    if run.max_steps and not kind:
        _fail("max-steps", "only allowed with argument --num-episodes or --gif")
    for name in ("gif", "profile", "inspect", "devices"):
        if run.is_on_host and getattr(run, name) not in (None, 1):
            _fail(name, f"only for environments in JAX, got {run.env}")
    if run.gif and run.has_agents:
        _fail("gif", f"environments of several agents are not drawn, got {run.env}")


def _check_files(run: Run) -> None:
    """Raises if a file cannot be written; makes the folder of a profile."""
    for name, suffixes in _SUFFIXES.items():
        path: Path | None = getattr(run, name)
        if path is None:
            continue
        if not path.parent.is_dir():
            _fail(name, f"there is no folder {path.parent}")
        if path.exists() and not path.is_file():
            _fail(name, f"{path} is not a regular file")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            _fail(name, f"the folder {path.parent} is not writable")
        if suffixes and path.suffix.lower() not in suffixes:
            _fail(name, f"must end in {', '.join(suffixes)}, got {path}")
    if run.plot and importlib.util.find_spec("matplotlib") is None:
        _fail("plot", "matplotlib is not installed")
    try:
        if run.profile:
            run.profile.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail("profile", f"{run.profile}: {error.strerror}")


def _fail(name: str, reason: str) -> NoReturn:
    raise ValueError(f"argument --{name.replace('_', '-')}: {reason}")


def _int_within(low: int, high: int, *words: str) -> Callable[[str], int | str]:
    """Makes the parser of an int from `low` to `high`, or of one of `words`."""

    def parse(text: str) -> int | str:
        with contextlib.suppress(ValueError):
            if text in words or low <= int(text) <= high:
                return text if text in words else int(text)
        kinds = ", or ".join([f"an int from {low} to {high}", *words])
        raise argparse.ArgumentTypeError(f"must be {kinds}, got {text!r}")

    return parse


def _parameter(text: str) -> tuple[str, Any]:
    name, _, literal = text.partition("=")
    with contextlib.suppress(*_NOT_LITERAL):
        if name.isidentifier():
            return name, ast.literal_eval(literal)
    must = "must be NAME=VALUE, VALUE a Python literal"
    raise argparse.ArgumentTypeError(f"{must}, got {text!r}")

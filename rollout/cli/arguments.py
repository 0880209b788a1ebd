"""The arguments of `python -m rollout`: parses and checks them."""

import ast
import importlib.util
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rollout.inspection.accelerators import NAMES

_EXCLUDED = {  # options that do not go with the option that sets the kind of run
    "inspect": (
        "num_episodes gif save plot profile max_episode_steps devices xla_cpu_loop"
    ),
    "gif": "num_envs save plot profile devices",
    "num_episodes": "save profile",
    "num_steps": "max_episode_steps",  # the kind by default
}


class _Parser(ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def make_parser() -> ArgumentParser:
    """Makes the parser; defaults that depend on the kind of run come later."""
    text = "Collects experience with the random policy and reports on it."
    parser = _Parser("python -m rollout", description=text, allow_abbrev=False)
    add = parser.add_argument
    text = "id, such as CartPole-v1, jumanji:Snake-v1, pgx:chess; or your own, "
    add("env", nargs="?", help=f"{text}module:Class or file.py:function")
    add("--num-envs", type=count, help="lanes (1024, of gymnasium: and envpool: 16)")
    add("--devices", type=count_or_all, help="devices for them, or all (the fastest)")
    kind = parser.add_mutually_exclusive_group().add_argument
    kind("--num-steps", type=count, default=1000, help="steps of every lane (1000)")
    kind("--num-episodes", type=count, help="play exactly so many episodes instead")
    kind("--gif", type=file_path, help="play one episode and draw it as .gif")
    text = "longest episode (1000000; for --gif 500)"
    add("--max-episode-steps", type=count, help=text)
    add("--seed", type=int, default=0, help="seed of everything random (0)")
    text = "NAME=VALUE of the environment, VALUE a Python literal; repeatable"
    add("--env-param", type=parameter, action="append", default=[], help=text)
    add("--save", type=file_path, help="write the trajectory as .npz")
    add("--plot", type=file_path, help="draw the episodes as .png, .svg or .pdf")
    text = "time parts of a batch, trace one to this folder"
    add("--profile", type=file_path, help=text)
    add("--inspect", choices=NAMES, help="report on an accelerator, run nothing")
    add("--list-envs", action="store_true", help="print the known ids and exit")
    add("--xla-cpu-loop", action="store_true", help="make the loop one CPU kernel")
    return parser


def parse(parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """Parses and checks the arguments, and sets the defaults of their kind of run.

    Returns:
        The arguments; also `is_on_host`, whether the environments are not JAX, and
        their `title`.
    """
    run = parser.parse_args(argv)
    given = ", ".join(f"{name}={value!r}" for name, value in run.env_param)
    run.title = f"{run.env} ({given})" if given else run.env
    if run.list_envs:
        return run

    def fail(name: str, reason: str) -> NoReturn:
        parser.error(f"argument --{name.replace('_', '-')}: {reason}")

    if run.env is None:
        parser.error("the environment is missing; --list-envs prints the ids")
    run.is_on_host = run.env.startswith(("gymnasium:", "envpool:"))
    kind = next((name for name in _EXCLUDED if getattr(run, name)), "num_steps")
    for name in _EXCLUDED[kind].split():
        if getattr(run, name):
            fail(name, f"not allowed with argument --{kind.replace('_', '-')}")
    for name in ("gif", "inspect", "devices"):
        if run.is_on_host and getattr(run, name) not in (None, 1):
            fail(name, f"only for environments in JAX, got {run.env}")
    for name in ("save", "plot", "gif"):
        path = getattr(run, name)
        if path and not path.parent.is_dir():
            fail(name, f"there is no folder {path.parent}")
        if path and path.is_dir():
            fail(name, f"must be a file, got the folder {path}")
    if run.gif and run.gif.suffix.lower() != ".gif":
        fail("gif", f"must end in .gif, got {run.gif}")
    if run.plot and importlib.util.find_spec("matplotlib") is None:
        fail("plot", "matplotlib is not installed")
    most_envs = 16 if run.is_on_host else 1024
    run.num_envs = run.num_envs or min(most_envs, run.num_episodes or most_envs)
    run.max_episode_steps = run.max_episode_steps or (500 if run.gif else 1_000_000)
    return run


def count(text: str) -> int:
    """Parses an int of at least 1; argparse says "invalid count value" of others."""
    if int(text) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def count_or_all(text: str) -> int | str:
    """Parses a count or "all"."""
    return text if text == "all" else count(text)


def file_path(text: str) -> Path:
    """Parses a path that the system accepts."""
    if not text:
        raise ArgumentTypeError("must be a path, got ''")
    try:
        os.stat(text)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise ArgumentTypeError(f"must be a path, got {text[:40]!r}: {why}") from None
    return Path(text)


def parameter(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE."""
    name, _, literal = text.partition("=")
    try:
        if name.isidentifier():
            return name, ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    must = "must be NAME=VALUE, VALUE a Python literal"
    raise ArgumentTypeError(f"{must}, got {text!r}")

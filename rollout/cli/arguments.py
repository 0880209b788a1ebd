"""The arguments of `python -m rollout`: parses and checks them."""

import ast
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rollout.inspection.accelerators import NAMES


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
    kind = parser.add_mutually_exclusive_group().add_argument
    kind("--num-steps", type=count, default=1000, help="steps of every lane (1000)")
    kind("--num-episodes", type=count, help="play exactly so many episodes instead")
    kind("--gif", type=Path, help="play one episode and draw it as .gif")
    text = "time the parts of a batch, and trace one to this folder"
    kind("--profile", type=Path, help=text)
    kind("--inspect", choices=NAMES, help="report on an accelerator, run nothing")
    text = "longest episode, with --num-episodes (1000000) or --gif (1000)"
    add("--max-episode-steps", type=count, help=text)
    add("--seed", type=seed, default=0, help="seed of everything random (0)")
    text = "NAME=VALUE of the environment, VALUE a Python literal; repeatable"
    add("--env-param", type=parameter, action="append", default=[], help=text)
    add("--list-envs", action="store_true", help="print the known ids and exit")
    return parser


def parse(parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """Parses and checks the arguments, and sets the defaults of their kind of run.

    Returns:
        The arguments; also `is_on_host`, whether the environments are not JAX, and
        their `title`.
    """
    run = parser.parse_args(argv)
    if run.list_envs:
        return run
    if run.env is None:
        parser.error("the environment is missing; --list-envs prints the ids")
    if run.max_episode_steps and not (run.num_episodes or run.gif):
        parser.error("--max-episode-steps needs --num-episodes or --gif")
    given = ", ".join(f"{name}={value!r}" for name, value in run.env_param)
    run.title = f"{run.env} ({given})" if given else run.env
    run.is_on_host = run.env.startswith(("gymnasium:", "envpool:"))
    most_envs = 16 if run.is_on_host else 1024
    num_episodes = 1 if run.gif else run.num_episodes
    run.num_envs = run.num_envs or min(most_envs, num_episodes or most_envs)
    run.max_episode_steps = run.max_episode_steps or (1000 if run.gif else 1_000_000)
    return run


def seed(text: str) -> int:
    """Parses a seed; `jax.random.key` would truncate one of more than 32 bits."""
    if not 0 <= int(text) < 2**32:
        raise ArgumentTypeError(f"must be from 0 to 2^32 - 1, got {text}")
    return int(text)


def count(text: str) -> int:
    """Parses an int of at least 1; argparse says "invalid count value" of others."""
    if int(text) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


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

"""Parses and checks the arguments of `python -m rollout`."""

import ast
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rollout.inspection.accelerators import NAMES


class _Parser(ArgumentParser):
    """A parser that prints errors as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def make_parser() -> ArgumentParser:
    """Makes the parser. `parse` sets the defaults that depend on the type of run."""
    text = "Collects experience with the random policy and reports on it."
    parser = _Parser("python -m rollout", description=text, allow_abbrev=False)
    add = parser.add_argument
    text = "id, such as CartPole-v1, jumanji:Snake-v1, pgx:chess; or your own, "
    add("env", nargs="?", help=f"{text}module:Class or file.py:function")
    add("--num-envs", type=count, help="lanes (1024, of gymnasium: and envpool: 16)")
    mode = parser.add_mutually_exclusive_group().add_argument
    mode("--num-steps", type=count, default=1000, help="steps of every lane (1000)")
    mode("--num-episodes", type=count, help="play exactly so many episodes instead")
    mode("--gif", type=Path, help="play one episode and draw it as .gif")
    text = "time the parts of a batch, and trace one to this folder"
    mode("--profile", type=Path, help=text)
    mode("--inspect", choices=NAMES, help="report on an accelerator, run nothing")
    text = "longest episode, with --num-episodes (1000000) or --gif (1000)"
    add("--max-episode-steps", type=count, help=text)
    add("--seed", type=seed, default=0, help="seed of everything random (0)")
    text = "NAME=VALUE of the environment, VALUE a Python literal; repeatable"
    add("--env-param", type=parameter, action="append", default=[], help=text)
    add("--list-envs", action="store_true", help="print the known ids and exit")
    return parser


def parse(parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """Parses and checks the arguments, and sets defaults for the type of run.

    Returns:
        The arguments, with two more attributes: `is_on_host`, True if Python steps the
        environments, and `title`, the environment with its parameters.
    """
    run = parser.parse_args(argv)
    if run.list_envs:
        return run
    if run.env is None:
        parser.error("the environment is missing; --list-envs prints the ids")
    if run.max_episode_steps and not (run.num_episodes or run.gif):
        parser.error("--max-episode-steps needs --num-episodes or --gif")
    params = ", ".join(f"{name}={value!r}" for name, value in run.env_param)
    run.title = f"{run.env} ({params})" if params else run.env
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
    """Parses an int of at least 1; argparse prints "invalid count value" on errors."""
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
    message = "must be NAME=VALUE, VALUE a Python literal"
    raise ArgumentTypeError(f"{message}, got {text!r}")

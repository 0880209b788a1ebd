"""Arguments of the commands: the parser, types of values, and environments."""

import ast
import contextlib
import functools
import importlib
import runpy
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from rollout.base.checks import import_optional
from rollout.base.names import field_hint
from rollout.envs.host.envpool import from_envpool
from rollout.envs.host.gymnasium import from_gymnasium
from rollout.envs.host.pettingzoo import from_pettingzoo
from rollout.envs.registry import SUITES, make
from rollout.envs.suites import from_gymnax
from rollout.envs.vectorize import vectorize

_ENV_HELP = (
    "id, such as CartPole-v1, jumanji:Snake-v1 or gymnasium:CartPole-v1; or your own "
    "environment, module:Class or file.py:function"
)


class Parser(ArgumentParser):
    """A parser that prints an error as one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

    def check_options(self, unknown: Sequence[str]) -> None:
        """Exits if there are unknown arguments, with a hint for a misspelled option."""
        if not unknown:
            return
        options = [x for x in unknown if x.startswith("-")]
        argument = (options or unknown)[0].partition("=")[0]
        names = [_field_of(x) for x in self._option_string_actions]
        show = lambda name: f"--{name.replace('_', '-')}"  # noqa: E731
        hint = field_hint(_field_of(argument), names, show) or "See --help."
        self.error(f"unknown argument {argument}. {hint}")


def _field_of(option: str) -> str:
    """Returns the name of the field of an option: `num_steps` of `--num-steps`."""
    return option.lstrip("-").replace("-", "_")


def parse_count(text: str) -> int:
    """Parses an int of at least 1."""
    with contextlib.suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise ArgumentTypeError(f"must be an int of at least 1, got {text}")


def parse_seed(text: str) -> int:
    """Parses a seed; `jax.random.key` would truncate a seed of more than 32 bits."""
    with contextlib.suppress(ValueError):
        if 0 <= int(text) < 2**32:
            return int(text)
    raise ArgumentTypeError(f"must be an int from 0 to 2^32 - 1, got {text}")


def parse_env_param(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE."""
    name, _, literal = text.partition("=")
    try:
        if name.isidentifier():
            return name, ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    message = "must be NAME=VALUE, VALUE a Python literal, got"
    # A shell removes one pair of quotes.
    hint = """Pass a string as "name='text'", a bool as name=True"""
    raise ArgumentTypeError(f"{message} {text!r}. {hint}")


def add_count(parser: Any, name: str, text: str, default: int | None = None) -> None:
    """Adds an option whose value is an int of at least 1."""
    text = f"{text} ({default})" if default else text
    parser.add_argument(
        name, type=parse_count, default=default, metavar="INT", help=text
    )


def add_env_arguments(parser: ArgumentParser) -> None:
    """Adds the arguments that `make_env` reads, except `--num-envs`."""
    add = parser.add_argument
    add("env", metavar="ENV", help=_ENV_HELP)
    text = "seed of everything random (0)"
    add("--seed", type=parse_seed, default=0, metavar="INT", help=text)
    add(
        "--env-param",
        type=parse_env_param,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="parameter of the environment, a Python literal; repeatable",
    )


def env_title(options: Namespace) -> str:
    """Returns the environment with its parameters."""
    params = ", ".join(f"{name}={value!r}" for name, value in options.env_param)
    return f"{options.env} ({params})" if params else options.env


def is_host_env(options: Namespace) -> bool:
    """Returns whether the environments are not written in JAX."""
    return options.env.startswith(("gymnasium:", "envpool:", "pettingzoo:"))


def make_env(options: Namespace, num_envs: int, is_rendered: bool = False) -> Any:
    """Makes the parallel environments of `options.env`.

    Args:
        options: the environment, `env`, its parameters, `env_param`, and `seed`.
        num_envs: number of parallel environments.
        is_rendered: whether Gymnasium environments are created for rendering.

    Returns:
        A `VectorEnv` or a `HostVectorEnv`. If the `info` of a Gymnasium or a parallel
        PettingZoo environment has an `action_mask`, the mask is part of the
        observations.

    Raises:
        ValueError: if there is no such environment.
    """
    suite, _, name = options.env.partition(":")
    params = dict(options.env_param)
    if is_host_env(options):
        if suite == "envpool":
            return from_envpool(name, num_envs, seed=options.seed, **params)
        is_zoo = suite == "pettingzoo"
        make_envs = make_pettingzoo_envs if is_zoo else make_gymnasium_envs
        return make_envs(name, num_envs, is_rendered, params)
    is_id = not name or suite in SUITES
    make_fn = functools.partial(make, options.env) if is_id else load(options.env)
    env = make_fn(**params)
    # Adapt custom environments with gymnax's interface.
    return vectorize(from_gymnax(env) if hasattr(env, "step_env") else env, num_envs)


def make_gymnasium_envs(
    name: str, num_envs: int, is_rendered: bool, params: dict[str, Any]
) -> Any:
    """Makes Gymnasium environments of an id or of `file.py:function`."""
    gymnasium = import_optional("gymnasium")
    is_file = ".py:" in name
    make_fn = load(name) if is_file else functools.partial(gymnasium.make, name)
    make_fn, result = try_env(f"gymnasium:{name}", make_fn, is_rendered, params)
    return from_gymnasium(make_fn, num_envs, observe_info=find_masks(result[1]))


def make_pettingzoo_envs(
    name: str, num_envs: int, is_rendered: bool, params: dict[str, Any]
) -> Any:
    """Makes PettingZoo environments of `module:function` or `file.py:function`."""
    title = f"pettingzoo:{name}"
    make_fn, result = try_env(title, load(name), is_rendered, params)
    infos = result[1] if isinstance(result, tuple) else {}
    masks = find_masks(next(iter(infos.values()), {}))
    return from_pettingzoo(make_fn, num_envs, observe_info=masks)


def try_env(
    title: str, make_fn: Callable[..., Any], is_rendered: bool, params: dict[str, Any]
) -> tuple[Callable[[], Any], Any]:
    """Makes and resets one environment; returns its function and the result."""
    if is_rendered and _accepts(make_fn, "render_mode"):
        params = {"render_mode": "rgb_array"} | params
    make_fn = functools.partial(make_fn, **params)
    try:
        env = make_fn()
    except Exception as error:
        raise ValueError(f"{title} fails: {error}") from error
    result = env.reset(seed=0)
    env.close()
    return make_fn, result


def find_masks(info: Any) -> dict[str, Any] | None:
    """Returns the entry `action_mask` of an info, or None."""
    return {"action_mask": info["action_mask"]} if "action_mask" in info else None


def load(text: str) -> Callable[..., Any]:
    """Loads the function or class of `module:Class` or `file.py:function`."""
    path, _, name = text.rpartition(":")
    is_file = path.endswith(".py")
    sys.path.insert(0, str(Path(path).parent) if is_file else "")
    try:
        names = runpy.run_path(path) if is_file else vars(importlib.import_module(path))
        return names[name]
    except (ImportError, OSError, KeyError) as error:
        raise ValueError(
            "ENV must be an id of `rollout envs`, module:Class or file.py:function, "
            f"got {text}: {error}"
        ) from error


def _accepts(fn: Callable[..., Any], name: str) -> bool:
    """Returns whether a function accepts a keyword argument."""
    params = signature(fn).parameters
    return name in params or any(x.kind is x.VAR_KEYWORD for x in params.values())

"""Environments by name: `make`, `make_vec`, `make_agents` and the list of ids."""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import io
import numbers
import sys
import urllib.error
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.multi_agent import MultiAgentEnv
from envs.suites.gymnax import from_gymnax
from envs.suites.jaxmarl import from_jaxmarl
from envs.suites.pgx import from_pgx
from envs.types import Env, VectorEnv
from envs.vectorize import vectorize

# By suite: what adapts an environment of it, and what lists its ids.
_SUITES = {
    "jaxmarl": (from_jaxmarl, lambda suite: suite.registered_envs),
    "pgx": (from_pgx, lambda suite: suite.available_envs()),
}


def env_ids() -> tuple[str, ...]:
    """Lists the ids that `make` knows, in gymnax's order."""
    return tuple(_gymnax().registered_envs)


def make(env_id: str, **env_params: Any) -> Env:
    """Makes the gymnax environment `env_id`.

    Args:
        env_id: an id of `env_ids()`.
        **env_params: fields of the environment's parameters (`max_steps_in_episode`)
            or arguments of its constructor (`use_minimal_action_set`), by name. What
            gymnax derives from a parameter when it builds the environment
            (`total_mass` from `masspole`) is not computed again.

    Returns:
        An `Env` whose leaves are the environment's parameters.

    Raises:
        ValueError: if the id is unknown (the message names the nearest ids), if a
            parameter is unknown (it names the valid ones), or if the environment cannot
            be built here.
    """
    ids = env_ids()
    if env_id not in ids:
        raise ValueError(
            f"`env_id` must be one of the {len(ids)} ids of `envs.env_ids()`, got "
            f"{env_id!r}.{_nearest(env_id, ids)}"
        )
    env, params = _build(env_id)
    arguments = _constructor_arguments(env)
    chosen = {name: env_params[name] for name in env_params if name in arguments}
    if chosen:
        env, params = _build(env_id, **chosen)
    fields = [field.name for field in dataclasses.fields(params)]
    unknown = sorted(set(env_params) - set(fields) - set(arguments))
    if unknown:
        raise ValueError(
            f"The parameters of {env_id} are {', '.join([*fields, *arguments])}; got "
            f"{', '.join(unknown)}."
        )
    changes = {name: env_params[name] for name in env_params if name not in chosen}
    for name, value in changes.items():
        _check_parameter(name, value, getattr(params, name))
    return from_gymnax(env, params.replace(**changes))


def make_vec(
    env_id: str, num_envs: int, *, auto_reset: str = "compact", **env_params: Any
) -> VectorEnv:
    """Makes `num_envs` environments `env_id` side by side.

    Short for `vectorize(make(env_id, **env_params), num_envs, auto_reset=auto_reset)`.
    """
    return vectorize(make(env_id, **env_params), num_envs, auto_reset=auto_reset)


def make_agents(env_id: str, **options: Any) -> MultiAgentEnv:
    """Makes an environment of several agents, of a suite that is installed.

    Args:
        env_id: the suite, a colon, and the suite's own id:
            "jaxmarl:MPE_simple_spread_v3", "pgx:tic_tac_toe".
        **options: arguments of `jaxmarl.make`, by name. pgx has none.

    Returns:
        A `MultiAgentEnv`, as `from_jaxmarl` and `from_pgx` make it.

    Raises:
        ValueError: if the suite is unknown or not installed (the message names the
            extra), if it has no such id (it names the nearest), or if the environment
            cannot be made here.
    """
    suite_name, _, name = env_id.partition(":")
    if suite_name not in _SUITES:
        begin = " or ".join(f"{suite}:" for suite in _SUITES)
        raise ValueError(f"`env_id` must begin with {begin}, got {env_id!r}.")
    suite, (adapt, list_ids) = _import(suite_name), _SUITES[suite_name]
    ids = list_ids(suite)
    if name not in ids:
        raise ValueError(
            f"`env_id` must be {suite_name}: and one of its {len(ids)} ids, got "
            f"{env_id!r}.{_nearest(name, ids)}"
        )
    try:
        return adapt(suite.make(name, **options))
    except (ImportError, OSError) as error:  # it needs another package, or a download
        raise ValueError(f"{env_id} cannot be made here: {error}") from error


def _import(suite: str) -> ModuleType:
    """Imports a suite only when it is needed."""
    try:
        with _quiet():
            return importlib.import_module(suite)
    except ModuleNotFoundError as error:
        if error.name != suite:
            raise
        raise ValueError(
            f'{suite} is not installed: pip install "rollout[{suite}]"'
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what an import prints.

    JaxMARL's sets `sys.stdout` and `sys.stderr` to what they were when Python started,
    prints there, and leaves them so: in a notebook nothing would be shown any more.
    """
    names = ("stdout", "stderr", "__stdout__")
    before = {name: getattr(sys, name) for name in names}
    sys.stdout = sys.__stdout__ = io.StringIO()
    try:
        yield
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)


def _nearest(env_id: str, ids: Sequence[str]) -> str:
    near = difflib.get_close_matches(env_id, ids, n=3, cutoff=0.4)
    return f" The nearest are {', '.join(near)}." if near else ""


def _gymnax() -> Any:
    """Imports gymnax only when it is needed, since that takes seconds."""
    import gymnax

    return gymnax


def _constructor_arguments(env: Any) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(type(env)).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds)


def _build(env_id: str, **arguments: Any) -> tuple[Any, Any]:
    """Builds the gymnax environment; the same object again for the same arguments.

    It is a static part of every trace: with a second object all is traced again.
    """
    try:
        return _build_once(env_id, **arguments)
    except TypeError:  # an argument that cannot be hashed, or is unknown
        return _make(env_id, **arguments)
    except (urllib.error.URLError, OSError) as error:
        raise ValueError(
            f"{env_id} must download its data set when it is made, got: {error}."
        ) from error


@functools.cache
def _build_once(env_id: str, **arguments: Any) -> tuple[Any, Any]:
    return _make(env_id, **arguments)


def _make(env_id: str, **arguments: Any) -> tuple[Any, Any]:
    env, params = _gymnax().make(env_id, **arguments)
    # gymnax stops the gradients of its differentiable environments by default.
    if getattr(env, "supports_transition_gradients", False):
        env = env.with_transition_gradients()
    return env, params


def _check_parameter(name: str, value: Any, default: Any) -> None:
    """Refuses a parameter of another kind or shape than its default has."""
    kinds: Any = numbers.Real | np.ndarray | np.generic | jax.Array
    if not isinstance(value, kinds):
        raise ValueError(f"`{name}` must be a number or array, got {value!r}.")
    if jnp.shape(value) != jnp.shape(default):
        raise ValueError(
            f"`{name}` must have shape {jnp.shape(default)}, got {jnp.shape(value)}."
        )
    kinds = [jnp.result_type(x) for x in (value, default)]
    if jnp.issubdtype(kinds[1], jnp.integer) and jnp.issubdtype(kinds[0], jnp.inexact):
        raise ValueError(f"`{name}` must be an integer, got {value!r}.")

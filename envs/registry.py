"""Environments by name: `make`, `make_vec`, `make_agents` and the list of ids."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import itertools
import numbers
import sys
import urllib.error
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.multi_agent import MultiAgentEnv
from envs.suites import (
    brax,
    craftax,
    jaxmarl,
    jumanji,
    navix,
    pgx,
    playground,
    xminigrid,
)
from envs.suites.gymnax import from_gymnax
from envs.types import Env, VectorEnv
from envs.vectorize import vectorize

_GYMNAX = "gymnax"
_INSTALLED = "installed"
# Each has `ids`, and `make_one`, `make_agents` or both.
_SUITES = {
    "brax": brax,
    "craftax": craftax,
    "jaxmarl": jaxmarl,
    "jumanji": jumanji,
    "navix": navix,
    "pgx": pgx,
    "playground": playground,
    "xminigrid": xminigrid,
}


def env_ids(suite: str = _GYMNAX) -> tuple[str, ...]:
    """Lists ids that `make` and `make_agents` know.

    Args:
        suite: whose, in its own order: "gymnax", whose ids have no prefix, or one of
            those in the table of the docs. "installed": those of every suite that is
            installed; that imports them all, which takes seconds.

    Returns:
        The ids, those of other suites as "suite:id".

    Raises:
        ValueError: if there is no such suite, or if it is not installed.
    """
    if suite == _INSTALLED:
        return tuple(itertools.chain(env_ids(), *map(_ids_if_installed, _SUITES)))
    if suite == _GYMNAX:
        return tuple(_gymnax().registered_envs)
    if suite not in _SUITES:
        known = ", ".join((_INSTALLED, _GYMNAX, *_SUITES))
        raise ValueError(f"`suite` must be one of {known}, got {suite!r}.")
    return tuple(f"{suite}:{name}" for name in _ids(suite))


def make(env_id: str, **env_params: Any) -> Env:
    """Makes the environment `env_id` of gymnax, or of a suite that is installed.

    Args:
        env_id: an id of `env_ids()`, or the suite, a colon, and the suite's own id:
            "brax:ant", "jumanji:Snake-v1", "navix:Navix-Empty-8x8-v0". Of pgx it is
            one player's part, against the others.
        **env_params: of gymnax, fields of the environment's parameters
            (`max_steps_in_episode`) or arguments of its constructor
            (`use_minimal_action_set`), by name. What gymnax derives from a parameter
            when it builds the environment (`total_mass` from `masspole`) is not
            computed again. Of another suite, what its own `make` takes.

    Returns:
        An `Env` whose leaves are the environment's parameters.

    Raises:
        ValueError: if the id is unknown (the message names the nearest ids), if a
            parameter is unknown, if the suite is not installed (it names the extra), if
            the environment has several agents, or if it cannot be built here.
    """
    suite, _, name = env_id.rpartition(":")
    if suite not in ("", _GYMNAX):
        return _make_of_suite("make_one", env_id, env_params)
    ids, env_id = env_ids(), name
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
    env_id: str, num_envs: int, *, auto_reset: str = "auto", **env_params: Any
) -> VectorEnv:
    """Makes `num_envs` environments `env_id` side by side.

    Short for `vectorize(make(env_id, **env_params), num_envs, auto_reset=auto_reset)`.
    """
    return vectorize(make(env_id, **env_params), num_envs, auto_reset=auto_reset)


def make_agents(env_id: str, **options: Any) -> MultiAgentEnv:
    """Makes an environment of several agents, of a suite that is installed.

    Args:
        env_id: the suite, a colon, and the suite's own id:
            "jaxmarl:MPE_simple_spread_v3", "jumanji:Connector-v3", "pgx:tic_tac_toe".
        **options: what the suite's own `make` takes, by name.

    Returns:
        A `MultiAgentEnv`, as `from_jaxmarl`, `from_jumanji_agents` and `from_pgx` make
        it.

    Raises:
        ValueError: if the suite is unknown or not installed (the message names the
            extra), if it has no such id (it names the nearest), if an option is
            unknown, or if the environment has one agent or cannot be made here.
    """
    return _make_of_suite("make_agents", env_id, options)


def _make_of_suite(how: str, env_id: str, options: dict[str, Any]) -> Any:
    """Makes an environment by `how`, `make_one` or `make_agents`, of its suite."""
    suite, _, name = env_id.rpartition(":")
    able = [x for x, module in _SUITES.items() if hasattr(module, how)]
    if suite not in able:
        *first, last = (f"{x}:" for x in able)
        other = ", whose environments have several agents" if suite in _SUITES else ""
        raise ValueError(
            f"`env_id` must begin with {', '.join(first)} or {last}, got "
            f"{env_id!r}{other}."
        )
    ids = _ids(suite)
    if name not in ids:
        raise ValueError(
            f"`env_id` must be {suite}: and one of its {len(ids)} ids, got "
            f"{env_id!r}.{_nearest(name, ids)}"
        )
    try:
        return _make_once(how, suite, name, **options)
    except (ImportError, OSError) as error:  # it needs another package, or a download
        raise ValueError(f"{env_id} cannot be made here: {error}") from error
    except TypeError:  # an option that cannot be hashed, or is unknown
        try:
            return getattr(_SUITES[suite], how)(name, **options)
        except TypeError as error:
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise ValueError(f"{env_id} with {given} fails: {error}") from error


@functools.cache
def _make_once(how: str, suite: str, name: str, /, **options: Any) -> Any:
    """The same object again for the same options: see `_build`."""
    return getattr(_SUITES[suite], how)(name, **options)


def _ids(suite: str) -> tuple[str, ...]:
    """The suite's own ids; it is imported only when it is needed."""
    try:
        with _quiet():
            return _SUITES[suite].ids()
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{suite} needs {error.name}, which is not installed: "
            f'pip install ".[{suite}]"'
        ) from error


def _ids_if_installed(suite: str) -> tuple[str, ...]:
    try:
        return env_ids(suite)
    except ValueError:
        return ()


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
    """Checks that a parameter has the kind and shape of its default."""
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

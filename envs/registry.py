"""Environments by id: `make`, `make_vec`, `make_agents` and the list `env_ids`."""

import contextlib
import difflib
import functools
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rollout.envs.multi_agent import MultiAgentEnv
from rollout.envs.suites import (
    brax,
    craftax,
    gymnax,
    jaxmarl,
    jumanji,
    navix,
    pgx,
    playground,
    xminigrid,
)
from rollout.envs.types import Env, VectorEnv
from rollout.envs.vectorize import vectorize

_GYMNAX = "gymnax"
_INSTALLED = "installed"
# Each has `ids`, and `make_one`, `make_agents` or both.
SUITES = {
    "gymnax": gymnax,
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
        suite: "gymnax", whose ids have no prefix, or another suite in the table of the
            docs; ids are in the suite's own order. "installed" lists those of every
            installed suite, and imports them all, which takes seconds.

    Returns:
        The ids; those of suites other than gymnax are "suite:id".

    Raises:
        ValueError: if there is no such suite, or it is not installed.
    """
    if suite == _INSTALLED:
        found: list[str] = []
        for name in SUITES:
            with contextlib.suppress(ValueError):
                found += env_ids(name)
        return tuple(found)
    if suite not in SUITES:
        known = ", ".join((_INSTALLED, *SUITES))
        raise ValueError(f"`suite` must be one of {known}, got {suite!r}.")
    prefix = "" if suite == _GYMNAX else f"{suite}:"
    return tuple(prefix + name for name in _ids(suite))


def make(env_id: str, **env_params: Any) -> Env:
    """Makes the environment `env_id` of gymnax, or of another installed suite.

    Args:
        env_id: an id of `env_ids()`, or the suite, a colon, and the suite's own id:
            "brax:ant", "jumanji:Snake-v1", "navix:Navix-Empty-8x8-v0". An id of pgx is
            one player's seat, against the others.
        **env_params: for gymnax, fields of the environment's parameters
            (`max_steps_in_episode`) or arguments of its constructor
            (`use_minimal_action_set`), by name. Values that gymnax derives from a
            parameter when it builds the environment (`total_mass` from `masspole`) are
            not computed again. For another suite, arguments of its own `make`.

    Returns:
        An `Env` whose leaves are the environment's parameters.

    Raises:
        ValueError: if the id is unknown (the message names the nearest ids), if a
            parameter is unknown, if the suite is not installed (the message names the
            extra), if the environment has several agents, or if it cannot be built
            here.
    """
    return _make("make_one", env_id, env_params)


def make_vec(
    env_id: str, num_envs: int, *, auto_reset: str = "auto", **env_params: Any
) -> VectorEnv:
    """Makes `num_envs` environments `env_id` side by side.

    Short for `vectorize(make(env_id, **env_params), num_envs, auto_reset=auto_reset)`.
    """
    return vectorize(make(env_id, **env_params), num_envs, auto_reset=auto_reset)


def make_agents(env_id: str, **options: Any) -> MultiAgentEnv:
    """Makes an environment of several agents, of an installed suite.

    Args:
        env_id: the suite, a colon, and the suite's own id:
            "jaxmarl:MPE_simple_spread_v3", "jumanji:Connector-v3", "pgx:tic_tac_toe".
        **options: arguments of the suite's own `make`, by name.

    Returns:
        A `MultiAgentEnv` of `from_jaxmarl`, `from_jumanji_agents` or `from_pgx`.

    Raises:
        ValueError: if the suite is unknown or not installed (the message names the
            extra), if it has no such id (the message names the nearest), if an option
            is unknown, or if the environment has one agent or cannot be made here.
    """
    return _make("make_agents", env_id, options)


def _make(how: str, env_id: str, options: dict[str, Any]) -> Any:
    """Makes an environment by `how`, `make_one` or `make_agents`, of its suite."""
    if not isinstance(env_id, str):
        raise ValueError(
            "`env_id` must be an id, text such as those of `rollout.envs.env_ids()`, "
            f"got {type(env_id).__name__}."
        )
    *prefix, name = env_id.rsplit(":", 1)
    suite = prefix[0] if prefix else _GYMNAX
    able = [x for x, module in SUITES.items() if hasattr(module, how)]
    if suite not in able:
        *first, last = (f"{x}:" for x in able)
        number = "several agents" if how == "make_one" else "one agent"
        other = f", whose environments have {number}" if suite in SUITES else ""
        raise ValueError(
            f"`env_id` must begin with {', '.join(first)} or {last}, got "
            f"{env_id!r}{other}."
        )
    ids = _ids(suite)
    if name not in ids:
        near = difflib.get_close_matches(name, ids, n=3, cutoff=0.4)
        nearest = f" The nearest are {', '.join(near)}." if near else ""
        raise ValueError(
            f"`env_id` must be one of the {len(ids)} ids of "
            f"`rollout.envs.env_ids({suite!r})`, got {env_id!r}.{nearest}"
        )
    make_fn = getattr(SUITES[suite], how)
    try:
        return _once(make_fn, name, **options)
    except (ImportError, OSError) as error:  # it needs another package, or a download
        raise ValueError(f"{env_id} cannot be made here: {error}.") from error
    except TypeError:  # an option that cannot be hashed, or is unknown
        try:
            return make_fn(name, **options)
        except TypeError as error:
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise ValueError(f"{env_id} with {given} fails: {error}") from error


@functools.lru_cache(maxsize=1024, typed=True)
def _once(make_fn: Callable[..., Any], name: str, /, **options: Any) -> Any:
    """Returns the same object again for the same options.

    Most of it is a static part of every trace: another object is traced again.
    """
    return make_fn(name, **options)


def _ids(suite: str) -> tuple[str, ...]:
    """Returns the suite's own ids, and imports it for that."""
    try:
        with _quiet():
            return SUITES[suite].ids()
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops the output of an import.

    JaxMARL's import sets `sys.stdout` and `sys.stderr` to the streams that Python
    started with, prints there, and leaves them so: a notebook would show no more
    output.
    """
    names = ("stdout", "stderr", "__stdout__")
    before = {name: getattr(sys, name) for name in names}
    sys.stdout = sys.__stdout__ = io.StringIO()
    try:
        yield
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)

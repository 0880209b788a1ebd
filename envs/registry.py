"""Environments by id: `make`, `make_vec` and the list `env_ids`."""

import contextlib
import difflib
import io
import re
import sys
from collections.abc import Iterator
from typing import Any

from rollout import checks, programs
from rollout.envs import suites
from rollout.envs.suites import gymnax
from rollout.envs.types import VectorEnv
from rollout.envs.vectorize import vectorize
from rollout.envs.wrappers.endings import TimeLimit

_GYMNAX = "gymnax"
_INSTALLED = "installed"
_OTHERS = (
    " Other suites' ids begin with the suite, as brax:ant does; `from_gymnasium` makes "
    "those of Gymnasium, for a `HostCollector`."
)
# The modules of `suites` that list ids and make environments; gymnax comes first.
SUITES: dict[str, Any] = {_GYMNAX: gymnax}
SUITES |= {name: x for name, x in vars(suites).items() if hasattr(x, "ids")}


def env_ids(suite: str = _GYMNAX) -> tuple[str, ...]:
    """Lists ids that `make` knows.

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


def make(
    env_id: str, *, max_episode_steps: int | None = None, **env_params: Any
) -> Any:
    """Makes the environment `env_id` of gymnax, or of another installed suite.

    Args:
        env_id: an id of `env_ids()`, or the suite, a colon, and the suite's own id:
            "brax:ant", "jumanji:Snake-v1", "jaxmarl:MPE_simple_spread_v3". A game of
            pgx is one for all of its players; with an `opponent`, the seat of one.
        max_episode_steps: steps after which `TimeLimit` truncates an episode. It
            replaces the limit of brax (1,000) and of MuJoCo Playground
            (`episode_length`). Where the environment itself has a limit, the shorter
            one holds: to lengthen its episodes, set its own parameter.
        **env_params: for gymnax, fields of the environment's parameters
            (`max_steps_in_episode`) or arguments of its constructor
            (`use_minimal_action_set`), by name. Values that gymnax derives from a
            parameter when it builds the environment (`total_mass` from `masspole`) are
            not computed again. For another suite, arguments of its own `make`; for
            pgx, `opponent` and `opponent_params` of `from_pgx_seat`.

    Returns:
        An `Env` whose leaves are the environment's parameters; a `MultiAgentEnv` if it
        has several agents.

    Raises:
        ValueError: if the id is unknown (the message names the nearest ids), if a
            parameter is unknown, if `max_episode_steps` is not an int of at least 1, if
            the suite is not installed (the message names the extra), or if the
            environment cannot be built here.
    """
    if not isinstance(env_id, str):
        raise ValueError(
            "`env_id` must be an id, text such as those of `rollout.envs.env_ids()`, "
            f"got {type(env_id).__name__}."
        )
    *prefix, name = env_id.rsplit(":", 1)
    suite = prefix[0] if prefix else _GYMNAX
    if suite not in SUITES:
        *first, last = (f"{x}:" for x in SUITES)
        raise ValueError(
            f"`env_id` must begin with {', '.join(first)} or {last}, got "
            f"{env_id!r}.{_OTHERS if suite == 'gymnasium' else ''}"
        )
    ids = _ids(suite)
    if name not in ids:
        near = difflib.get_close_matches(name, ids, n=3, cutoff=0.4)
        nearest = f" The nearest are {', '.join(near)}." if near else ""
        nearest += "" if prefix else _OTHERS
        raise ValueError(
            f"`env_id` must be one of the {len(ids)} ids of "
            f"`rollout.envs.env_ids({suite!r})`, got {env_id!r}.{nearest}"
        )
    env = _build(suite, name, env_params)
    if max_episode_steps is None:
        return env
    # The `make` of brax and of Playground puts a limit on, which this one replaces.
    limit = checks.int_between("max_episode_steps", max_episode_steps)
    return TimeLimit(env.env if isinstance(env, TimeLimit) else env, limit)


def make_vec(
    env_id: str,
    num_envs: int,
    *,
    auto_reset: str = "auto",
    max_episode_steps: int | None = None,
    **env_params: Any,
) -> VectorEnv:
    """Makes `num_envs` environments `env_id` side by side.

    Short for `vectorize(make(env_id, ...), num_envs, auto_reset=auto_reset)`, with the
    other arguments those of `make`.
    """
    env = make(env_id, max_episode_steps=max_episode_steps, **env_params)
    return vectorize(env, num_envs, auto_reset=auto_reset)


@programs.shared  # most of it is a static part of every trace
def _build(suite: str, name: str, options: dict[str, Any]) -> Any:
    """Calls a suite, and explains why it made nothing."""
    env_id = name if suite == _GYMNAX else f"{suite}:{name}"
    try:
        return SUITES[suite].make(name, **options)
    except (ImportError, OSError) as error:  # it needs another package, or a download
        raise ValueError(f"{env_id} cannot be made here: {error}.") from error
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        is_limit = any(re.search("step|limit|length", key) for key in options)
        hint = " (`max_episode_steps` limits episodes)" if is_limit else ""
        raise ValueError(f"{env_id} with {given} fails{hint}: {error}") from error


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
    before = sys.stdout, sys.stderr, sys.__stdout__
    # Both: what is printed after JaxMARL has reset the stream goes nowhere, too.
    sys.stdout = sys.__stdout__ = io.StringIO()
    try:
        yield
    finally:
        sys.stdout, sys.stderr, sys.__stdout__ = before

"""Creates environments by id: `make`, `make_vec` and the list of ids `env_ids`."""

import contextlib
import difflib
import io
import re
import sys
from collections.abc import Iterator
from typing import Any

from rollout.base import checks, programs
from rollout.envs import suites
from rollout.envs.suites import gymnax
from rollout.envs.types import VectorEnv
from rollout.envs.vectorize import vectorize
from rollout.envs.wrappers.endings import TimeLimit

_GYMNAX = "gymnax"
_INSTALLED = "installed"
_HINT = (
    " Ids of other suites begin with the suite name, for example brax:ant. Create "
    "Gymnasium environments with `rollout.envs.from_gymnasium` and a `HostCollector`."
)
# The modules of `suites` that list ids and create environments; gymnax comes first.
SUITES: dict[str, Any] = {_GYMNAX: gymnax}
SUITES |= {name: x for name, x in vars(suites).items() if hasattr(x, "ids")}


def env_ids(suite: str = _GYMNAX) -> tuple[str, ...]:
    """Lists the environment ids that `make` accepts.

    Args:
        suite: "gymnax", or another suite in the table of the docs. "installed" lists
            the ids of all installed suites; it imports every suite, which takes
            seconds.

    Returns:
        The ids, in the order of the suite. Ids of suites other than gymnax have the
        form "suite:id".

    Raises:
        ValueError: if the suite is unknown or not installed.
    """
    if suite == _INSTALLED:
        ids: list[str] = []
        for name in SUITES:
            with contextlib.suppress(ValueError):
                ids += env_ids(name)
        return tuple(ids)
    checks.check_choice("suite", suite, (_INSTALLED, *SUITES))
    prefix = "" if suite == _GYMNAX else f"{suite}:"
    return tuple(prefix + name for name in _ids(suite))


def make(
    env_id: str, *, max_episode_steps: int | None = None, **env_params: Any
) -> Any:
    """Creates an environment by id, from gymnax or another installed suite.

    Args:
        env_id: id from `env_ids()`. An id of another suite consists of the suite name,
            a colon and the id within the suite: "brax:ant", "jumanji:Snake-v1",
            "jaxmarl:MPE_simple_spread_v3". A game of pgx is a multi-agent environment
            of all players; if `opponent` is set, it is the environment of one player.
        max_episode_steps: number of steps after which `TimeLimit` truncates an episode.
            It replaces the limit of brax (1,000) and of MuJoCo Playground
            (`episode_length`). If the environment itself also has a limit, the shorter
            limit applies; to lengthen episodes, set the environment's parameter.
        **env_params: options of the environment. For gymnax, fields of the environment
            parameters (`max_steps_in_episode`) or arguments of the constructor
            (`use_minimal_action_set`), by name. Values that gymnax derives from a
            parameter in the constructor (`total_mass` from `masspole`) are not
            recomputed. For another suite, arguments of the suite's `make`; for pgx,
            `opponent` and `opponent_params` of `from_pgx_seat`.

    Returns:
        An `Env` whose leaves are the environment's parameters; a `MultiAgentEnv` if the
        environment has several agents.

    Raises:
        ValueError: if the id is unknown (the message names the nearest ids), if a
            parameter is unknown, if `max_episode_steps` is not an int of at least 1, if
            the suite is not installed (the message names the extra), or if the
            constructor fails on this machine.
    """
    if not isinstance(env_id, str):
        raise ValueError(
            "`env_id` must be an id from `rollout.envs.env_ids()`, a string, got "
            f"{type(env_id).__name__}. For an environment of your own, call "
            "`rollout.envs.vectorize(env, num_envs)`."
        )
    *prefix, name = env_id.rsplit(":", 1)
    suite = prefix[0] if prefix else _GYMNAX
    if suite not in SUITES:
        *first, last = (f"{x}:" for x in SUITES)
        raise ValueError(
            f"`env_id` must begin with {', '.join(first)} or {last}, got "
            f"{env_id!r}.{_HINT if suite == 'gymnasium' else ''}"
        )
    ids = _ids(suite)
    if name not in ids:
        matches = difflib.get_close_matches(name, ids, n=3, cutoff=0.4)
        hint = f" The nearest are {', '.join(matches)}." if matches else ""
        hint += "" if prefix else _HINT
        raise ValueError(
            f"`env_id` must be one of the {len(ids)} ids of "
            f"`rollout.envs.env_ids({suite!r})`, got {env_id!r}.{hint}"
        )
    env = _build(suite, name, env_params)
    if max_episode_steps is None:
        return env
    # Replace the `TimeLimit` that `make` of brax and of Playground applies.
    limit = checks.check_int("max_episode_steps", max_episode_steps)
    return TimeLimit(env.env if isinstance(env, TimeLimit) else env, limit)


def make_vec(
    env_id: str,
    num_envs: int,
    *,
    auto_reset: str = "auto",
    max_episode_steps: int | None = None,
    **env_params: Any,
) -> VectorEnv:
    """Creates `num_envs` parallel environments by id.

    Equivalent to `vectorize(make(env_id, ...), num_envs, auto_reset=auto_reset)`. The
    remaining arguments are passed to `make`.
    """
    env = make(env_id, max_episode_steps=max_episode_steps, **env_params)
    return vectorize(env, num_envs, auto_reset=auto_reset)


@programs.shared  # equal environments share jit cache entries
def _build(suite: str, name: str, options: dict[str, Any]) -> Any:
    """Creates an environment of a suite, and explains errors."""
    env_id = name if suite == _GYMNAX else f"{suite}:{name}"
    try:
        return SUITES[suite].make(name, **options)
    except (ImportError, OSError) as error:  # a missing package, or a failed download
        raise ValueError(f"{env_id} cannot be created here: {error}.") from error
    except TypeError as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
        is_limit = any(re.search("step|limit|length", key) for key in options)
        hint = " (`max_episode_steps` limits episodes)" if is_limit else ""
        raise ValueError(f"{env_id} with {arguments} fails{hint}: {error}") from error


def _ids(suite: str) -> tuple[str, ...]:
    """Imports a suite and returns its ids, without the prefix."""
    try:
        with _quiet():
            return SUITES[suite].ids()
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discards the output of an import, and restores the streams.

    Importing JaxMARL sets `sys.stdout` and `sys.stderr` to the original streams of
    Python, prints to them and does not restore the previous streams. A notebook would
    show no further output.
    """
    streams = sys.stdout, sys.stderr, sys.__stdout__
    # Replace both streams, to also discard output after JaxMARL resets `sys.stdout`.
    sys.stdout = sys.__stdout__ = io.StringIO()
    try:
        yield
    finally:
        sys.stdout, sys.stderr, sys.__stdout__ = streams

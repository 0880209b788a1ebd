"""`from_gymnasium`: adapts Gymnasium environments to `HostVectorEnv`.

Functions in this module import gymnasium when they are called.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rollout.base import checks
from rollout.base.checks import import_optional
from rollout.envs.host import env_checks as host_checks
from rollout.envs.host.arrays import (
    SpaceLeaves,
    StepArrays,
    assign,
    batched_action,
    leaf_at,
    make_layout,
    narrowed,
    place_rows,
    space_like,
)
from rollout.envs.host.local_envs import LocalEnvs
from rollout.envs.host.types import HostStep, HostVectorEnv
from rollout.envs.host.worker_envs import make_worker_envs
from rollout.envs.spaces import as_space
from rollout.envs.types import ArrayTree

_MODES = ("DISABLED", "NEXT_STEP", "SAME_STEP")
_FINAL_OBS = ("final_obs", "final_observation")


def from_gymnasium(
    env: Any,
    num_envs: int | None = None,
    *,
    num_workers: int | None = None,
    max_episode_steps: int | None = None,
    observe_info: Mapping[str, Any] | None = None,
    record_info: Mapping[str, Any] | None = None,
    **options: Any,
) -> HostVectorEnv:
    """Adapts Gymnasium environments to `HostVectorEnv`.

    A vector environment may have any autoreset mode, which it states in
    `metadata["autoreset_mode"]`. In the mode NEXT_STEP, environments reset
    automatically in an extra step for which `HostStep.mask` is False. In the mode
    SAME_STEP, environments reset in the last step of an episode, and
    `info["final_obs"]` or `info["final_observation"]` must contain the true successors:
    observations `[B, ...]`, or an array with one observation per environment. In both
    modes a `reset` of some environments ignores their seeds, and a `reset` of all
    environments takes effect. An exception in a vector environment is raised to the
    caller, because the failed environment is unknown.

    Args:
        env: an id for `gymnasium.make`, a function that creates an environment, or a
            vector environment. If `num_envs` is None, the function must create a vector
            environment.
        num_envs: number of environments, B; None for a vector environment.
        num_workers: number of worker processes, as in `make_worker_envs`. None steps
            the environments in this process.
        max_episode_steps: number of steps after which an episode is truncated. For an
            id, it is the argument of `gymnasium.make`. A function receives it if it has
            an argument of this name. Otherwise `gymnasium.wrappers.TimeLimit` wraps the
            environments.
        observe_info: keys of `info` to include in the observation, each with an
            example value, as in `LocalEnvs`.
        record_info: keys of `info` to record in `HostStep.info`, each with an example
            value.
        **options: arguments of `gymnasium.make` or of the function.

    Returns:
        A `LocalEnvs`, or a `WorkerEnvs` if `num_workers` is set. Both report which
        environment failed and support `rebuild` and `save`. The adapter of a vector
        environment supports neither.

    Raises:
        EnvFault: if an environment cannot be created.
        ModuleNotFoundError: if gymnasium is not installed.
        ValueError: if `env`, `num_envs` or `num_workers` is invalid, the autoreset mode
            is unknown, or a space does not consist of arrays.
    """
    gymnasium = import_optional("gymnasium")
    checks.check_not_pettingzoo(env)
    info: Any = {"observe_info": observe_info, "record_info": record_info}
    limit = max_episode_steps
    if limit is not None:
        limit = checks.check_int("max_episode_steps", limit)
        is_vector = isinstance(env, gymnasium.vector.VectorEnv)
        if is_vector or isinstance(env, str) or _has_argument(env, "max_episode_steps"):
            options, limit = {**options, "max_episode_steps": limit}, None
    if isinstance(env, gymnasium.vector.VectorEnv):
        if num_envs is not None or num_workers is not None or options:
            raise ValueError(
                "`num_envs`, `num_workers` and options must be omitted for a vector "
                f"environment, got num_envs={num_envs}, num_workers={num_workers}, "
                f"options={options}."
            )
        return _GymnasiumEnvs(env, **info)
    if isinstance(env, str):
        make = functools.partial(gymnasium.make, env, **options)
    elif callable(env):
        make = functools.partial(env, **options) if options else env
    else:
        raise ValueError(
            "`env` must be an id, a function that creates an environment or a "
            f"gymnasium vector environment, got {type(env).__name__}."
        )
    if limit is not None:
        make = functools.partial(_make_limited, make, limit)
    if num_envs is not None:
        make_fns = [make] * checks.check_int("num_envs", num_envs)
        if num_workers is None:
            return LocalEnvs(make_fns, **info)
        return make_worker_envs(make_fns, num_workers, **info)
    result = None if isinstance(env, str) else make()
    if num_workers is not None or not isinstance(result, gymnasium.vector.VectorEnv):
        raise ValueError(
            "`num_envs` must be given, except for a vector environment, got None for "
            f"{env!r}."
        )
    return _GymnasiumEnvs(result, **info)


class _GymnasiumEnvs(HostVectorEnv):
    """A `HostVectorEnv` over a Gymnasium vector environment."""

    def __init__(
        self,
        env: Any,
        observe_info: Mapping[str, Any] | None,
        record_info: Mapping[str, Any] | None,
    ) -> None:
        self._mode = _mode(env)
        # These two classes accept a list of seeds; other classes accept a single seed.
        vector = import_optional("gymnasium").vector
        list_types = vector.SyncVectorEnv | vector.AsyncVectorEnv
        self._accepts_seeds = isinstance(env.unwrapped, list_types)
        for single_env in getattr(env.unwrapped, "envs", ()):
            if host_checks.find_method(single_env, "at_episode"):
                raise ValueError(
                    "`env` must not be a vector environment if its environments have "
                    f"`at_episode`, got {type(env).__name__}. Pass a function that "
                    "creates one environment, and `num_envs`."
                )
        self._env, self.num_envs, self._is_closed = env, env.num_envs, False
        self.source = getattr(env, "spec", None)
        spaces = env.single_observation_space, env.single_action_space
        self._layout = make_layout(spaces, observe_info, record_info)
        self.observation_space = self._layout.obs.space
        self.action_space = self._layout.action.space
        self._env_obs = SpaceLeaves(as_space(spaces[0]), "obs")
        self._batch = batched_action(spaces[1])
        arrays = StepArrays(self._layout, self.num_envs)
        # The leaves of "info" precede the leaves of "obs" in an observation.
        info = SpaceLeaves(space_like(observe_info or {}), "info")
        self._observed = list(zip(info.paths, arrays.obs, strict=False))
        self._recorded = list(zip(self._layout.info.paths, arrays.info, strict=True))
        self.info = arrays.info_tree
        self._all = np.ones(self.num_envs, bool)
        self._ended = self._all.copy()
        self._obs: ArrayTree = None
        # Observations after the resets in SAME_STEP mode, `[B, ...]`.
        self._first_obs: ArrayTree = None

    @property
    def pending_reset(self) -> np.ndarray | None:
        """Environments whose next step only resets them; see `HostVectorEnv`."""
        # The step after an episode resets and ignores the action in NEXT_STEP mode.
        return self._ended if self._mode == "NEXT_STEP" else None

    def draw(self, number: int) -> np.ndarray:
        """Renders the current state of one environment, `[H, W, 3]` uint8."""
        host_checks.check_open(self._is_closed)
        return host_checks.render_frame(self._env, number)

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts episodes; see `HostVectorEnv.reset`."""
        host_checks.check_open(self._is_closed)
        env_ids, is_all = np.flatnonzero(mask), bool(np.all(mask))
        if self._mode != "DISABLED" and not is_all:
            unfinished = np.flatnonzero(mask & ~self._ended)
            if unfinished.size:
                raise ValueError(
                    "`mask` must be True only where the episode has ended, got "
                    f"environment {unfinished[0]}: the autoreset mode {self._mode} "
                    "cannot reset during an episode. Use DISABLED instead."
                )
            # In NEXT_STEP mode, the next `step` resets these environments and returns
            # the observations.
            if self._mode == "SAME_STEP":
                rows = jax.tree.map(lambda x: x[mask], self._first_obs)
                place_rows(self._obs, mask, rows)
                self._ended = self._ended & ~mask
            return self._obs
        # A single seed is the seed of the first environment in `mask`, so a reset of
        # the same environments with the same seeds starts the same episodes.
        seed = seeds.tolist() if self._accepts_seeds else int(seeds[env_ids[0]])
        options = {} if is_all else {"options": {"reset_mask": np.array(mask)}}
        obs, info = self._env.reset(seed=seed, **options)
        self._ended = self._ended & ~mask
        return self._observe(obs, info, mask)

    def step(self, action: ArrayTree) -> HostStep:
        """Steps all environments; see `HostVectorEnv.step`."""
        host_checks.check_open(self._is_closed)
        mask, action = None, self._batch(action)
        obs, reward, *flags, info = self._env.step(action)
        terminated, truncated = map(np.asarray, flags)
        # After the end of an episode, a step in NEXT_STEP mode only resets.
        if self._mode == "NEXT_STEP" and np.count_nonzero(self._ended):
            mask = ~self._ended
        self._ended = terminated | truncated
        obs, final_info = self._observe(obs, info, self._all), {}
        has_reset = self._mode == "SAME_STEP" and np.count_nonzero(self._ended)
        if has_reset:
            obs, final_info = self._observe_final(info), info.get("final_info", {})
        is_reset = self._ended if has_reset else ~self._all
        for path, array in self._recorded:
            is_present = _read(array, info, path, ~is_reset)
            is_present |= _read(array, final_info, path, is_reset)
            # Set missing values to zero: the array still holds the previous step.
            array[~is_present] = 0
        return HostStep(
            obs=obs,
            reward=np.asarray(reward).astype(np.float32, copy=False),
            terminated=terminated,
            truncated=truncated,
            faulty=~self._all,
            info=self.info,
            mask=mask,
        )

    def close(self) -> None:
        """Closes the environments."""
        if not self._is_closed:
            self._env.close()
        self._is_closed = True

    def _observe(
        self, obs: ArrayTree, info: Mapping[str, Any], mask: np.ndarray
    ) -> ArrayTree:
        """Casts an observation and adds the arrays of `observe_info`."""
        for path, array in self._observed:
            self._check_present(path, mask & ~_read(array, info, path, mask))
        pairs = zip(self._env_obs.flatten(obs), self._env_obs.spaces, strict=True)
        leaves = [narrowed(np.asarray(x), space.dtype, "obs") for x, space in pairs]
        infos = [array for _, array in self._observed]
        self._obs = self._layout.obs.unflatten([*infos, *leaves])
        return self._obs

    def _observe_final(self, info: Mapping[str, Any]) -> ArrayTree:
        """Replaces first observations by the final ones of the previous episodes."""
        final_obs = next((info[name] for name in _FINAL_OBS if name in info), None)
        if final_obs is None:
            raise ValueError(
                f"`info` must have `{_FINAL_OBS[0]}` at the end of an episode in the "
                "autoreset mode SAME_STEP, the observations before the reset, got only "
                f"{', '.join(sorted(info)) or 'no keys'}."
            )
        ended, self._first_obs = self._ended, jax.tree.map(np.array, self._obs)
        if isinstance(final_obs, np.ndarray) and final_obs.dtype == object:
            rows = [self._env_obs.flatten(x) for x in final_obs[ended]]
            leaves = [np.stack(column) for column in zip(*rows, strict=True)]
        else:
            leaves = [np.asarray(x)[ended] for x in self._env_obs.flatten(final_obs)]
        self._obs = jax.tree.map(np.array, self._obs)
        arrays = self._layout.obs.flatten(self._obs)
        final_info = info.get("final_info", {})
        for (path, _), array in zip(self._observed, arrays, strict=False):
            self._check_present(path, ended & ~_read(array, final_info, path, ended))
        for array, leaf in zip(arrays[len(self._observed) :], leaves, strict=True):
            assign(
                [array], ended, [narrowed(leaf, array.dtype, "final_obs")], "final_obs"
            )
        return self._obs

    def _check_present(self, path: Sequence[str], is_missing: np.ndarray) -> None:
        """Raises if an environment does not return a key of `observe_info`."""
        if np.count_nonzero(is_missing):
            raise ValueError(
                "`observe_info` must have keys that exist in every `info`, got one "
                f"without {path[0]!r} from environment {np.argmax(is_missing)}."
            )


def _has_argument(fn: Any, name: str) -> bool:
    """Returns whether a function or class names an argument in its signature."""
    try:
        return name in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # not callable, or without a signature
        return False


def _make_limited(make: Callable[[], Any], max_episode_steps: int) -> Any:
    """Creates an environment with a time limit."""
    gymnasium, env = import_optional("gymnasium"), make()
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise ValueError(
            "`max_episode_steps` must be omitted for a vector environment, got "
            f"{max_episode_steps}. Limit the environments inside it."
        )
    return gymnasium.wrappers.TimeLimit(env, max_episode_steps)


def _mode(env: Any) -> str:
    """Returns the autoreset mode, DISABLED, NEXT_STEP or SAME_STEP."""
    mode = (env.metadata or {}).get("autoreset_mode")
    name = getattr(mode, "name", mode)
    if name not in _MODES:
        raise ValueError(
            f'`env.metadata["autoreset_mode"]` must be {", ".join(_MODES[:-1])} or '
            f"{_MODES[-1]} of gymnasium.vector.AutoresetMode, got {name}. Set it, "
            "in the class or in `env`, to the time of the resets: DISABLED if `reset` "
            'receives `options["reset_mask"]`, NEXT_STEP in the step after an episode, '
            "or SAME_STEP in the last step of an episode."
        )
    return name


def _read(
    array: np.ndarray, info: Mapping[str, Any], path: Sequence[str], mask: np.ndarray
) -> np.ndarray:
    """Copies one leaf of `info` into `array` for the environments that return it.

    In the info of a vector environment, `_key` marks the environments that return
    `key`. If `_key` is absent, all environments return it.

    Returns:
        `[B]` bool, the environments in `mask` that return the leaf.
    """
    key = path[0]
    is_present = mask & np.asarray(info.get(f"_{key}", key in info))
    if is_present.any():
        values = np.asarray(leaf_at(info, path))[is_present]
        if values.dtype == object:  # gymnasium collects unknown types as objects
            values = np.stack([np.asarray(value) for value in values])
        name = "info" + "".join(f"[{key!r}]" for key in path)
        assign([array], is_present, [narrowed(values, array.dtype, name)], name)
    return is_present

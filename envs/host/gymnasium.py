"""`from_gymnasium`: adapts environments of Gymnasium to `HostVectorEnv`.

gymnasium is imported only when a function here is called.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout import checks
from rollout.envs.host import request_checks as host_checks
from rollout.envs.host.arrays import (
    Parts,
    StepArrays,
    assign,
    leaf_at,
    make_layout,
    narrowed,
    space_like,
)
from rollout.envs.host.gymnasium_actions import batched_action
from rollout.envs.host.local_envs import LocalEnvs
from rollout.envs.host.types import HostStep, HostVectorEnv
from rollout.envs.host.worker_envs import make_worker_envs
from rollout.envs.optional_import import load
from rollout.envs.spaces import as_space
from rollout.envs.types import ArrayTree


def from_gymnasium(
    env: Any,
    num_envs: int | None = None,
    *,
    num_workers: int | None = None,
    observe_info: Mapping[str, Any] | None = None,
    record_info: Mapping[str, Any] | None = None,
    **options: Any,
) -> HostVectorEnv:
    """Makes a `HostVectorEnv` of environments of Gymnasium.

    A vector environment must have the autoreset mode DISABLED or NEXT_STEP. With
    NEXT_STEP each environment resets itself in an extra step, where `HostStep.mask` is
    False: a `reset` of some environments does nothing, and their seeds are not used. A
    `reset` of all environments resets them in both modes. An exception in a vector
    environment is raised, because nobody knows which of its environments failed.

    Args:
        env: an id, for `num_envs` environments of `gymnasium.make`; a function that
            makes one environment, or a vector environment if `num_envs` is None; or a
            vector environment.
        num_envs: B; None for a vector environment.
        num_workers: number of processes for the environments, as in
            `make_worker_envs`; None for this process.
        observe_info: keys of `info` that become part of the observation, each with an
            example, as in `LocalEnvs`.
        record_info: keys of `info` that `HostStep.info` has, each with an example.
        **options: for `gymnasium.make`, or for the function.

    Returns:
        A `LocalEnvs`, or with `num_workers` a `WorkerEnvs`, which says which
        environment failed, and can rebuild and save each. For a vector environment one
        that can neither rebuild nor save.

    Raises:
        EnvFault: if an environment could not be made.
        ModuleNotFoundError: if gymnasium is not installed.
        ValueError: if `env`, `num_envs` or `num_workers` is not as above, the autoreset
            mode is another one, or a space has no arrays.
    """
    gymnasium = load("gymnasium")
    info: Any = {"observe_info": observe_info, "record_info": record_info}
    if isinstance(env, gymnasium.vector.VectorEnv):
        if num_envs is not None or num_workers is not None or options:
            raise ValueError(
                "`num_envs`, `num_workers` and options must be left out for a vector "
                f"environment, got num_envs={num_envs}, num_workers={num_workers}, "
                f"options={options}."
            )
        return _VectorEnv(env, **info)
    if isinstance(env, str):
        make = functools.partial(gymnasium.make, env, **options)
    elif callable(env):
        make = functools.partial(env, **options) if options else env
    else:
        raise ValueError(
            "`env` must be an id, a function that makes an environment or a vector "
            f"environment of gymnasium, got {type(env).__name__}."
        )
    if num_envs is not None:
        make_fns = [make] * checks.int_between("num_envs", num_envs)
        if num_workers is None:
            return LocalEnvs(make_fns, **info)
        return make_worker_envs(make_fns, num_workers, **info)
    made = None if isinstance(env, str) else make()
    if num_workers is not None or not isinstance(made, gymnasium.vector.VectorEnv):
        raise ValueError(
            "`num_envs` must be given, except for a vector environment, got None for "
            f"{env!r}."
        )
    return _VectorEnv(made, **info)


class _VectorEnv(HostVectorEnv):
    """A `HostVectorEnv` over a vector environment of gymnasium."""

    def __init__(
        self,
        env: Any,
        observe_info: Mapping[str, Any] | None,
        record_info: Mapping[str, Any] | None,
    ) -> None:
        # In NEXT_STEP the step after an ending resets, and ignores its action.
        self._resets_itself = _mode(env) == "NEXT_STEP"
        # `reset` of these takes a list of seeds, that of others one seed for all.
        vector = load("gymnasium").vector
        lists = vector.SyncVectorEnv | vector.AsyncVectorEnv
        self._seeds_each = isinstance(env.unwrapped, lists)
        self._env, self.num_envs, self._is_closed = env, env.num_envs, False
        spaces = env.single_observation_space, env.single_action_space
        self._layout = make_layout(spaces, observe_info, record_info)
        self.observation_space = self._layout.obs.space
        self.action_space = self._layout.action.space
        self._own = Parts(as_space(spaces[0]), "obs")
        self._batch = batched_action(spaces[1])
        arrays = StepArrays(self._layout, self.num_envs)
        # In an observation "info" comes before "obs".
        shown = Parts(space_like(observe_info or {}), "info")
        self._observed = list(zip(shown.paths, arrays.obs, strict=False))
        self._recorded = list(zip(self._layout.info.paths, arrays.info, strict=True))
        self.info = arrays.info_tree
        self._every = np.ones(self.num_envs, bool)
        self._ended = self._every.copy()
        self._obs: ArrayTree = None

    def draw(self, number: int) -> np.ndarray:
        """Draws one environment as it is now, `[H, W, 3]` uint8."""
        host_checks.closed(self._is_closed)
        return host_checks.drawn(self._env, number)

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        host_checks.closed(self._is_closed)
        which, every = np.flatnonzero(mask), bool(np.all(mask))
        if self._resets_itself and not every:
            # The next `step` resets these, and returns their first observations.
            going = np.flatnonzero(mask & ~self._ended)
            if going.size:
                raise ValueError(
                    "`mask` must be True only where the episode is over, got "
                    f"environment {going[0]}: the autoreset mode NEXT_STEP cannot cut "
                    "an episode short, DISABLED can."
                )
            return self._obs
        # One seed for all is that of the first lane to reset: with the same lanes to
        # reset the same episodes begin.
        seed = seeds.tolist() if self._seeds_each else int(seeds[which[0]])
        options = {} if every else {"options": {"reset_mask": np.array(mask)}}
        obs, info = self._env.reset(seed=seed, **options)
        self._ended = self._ended & ~mask
        return self._observe(obs, info, mask)

    def step(self, action: ArrayTree) -> HostStep:
        host_checks.closed(self._is_closed)
        mask, action = None, self._batch(action)
        obs, reward, terminated, truncated, info = self._env.step(action)
        if self._resets_itself:
            # Where the step before was an ending, this one was only the reset.
            if np.count_nonzero(self._ended):
                mask = ~self._ended
            self._ended = terminated | truncated
        # What no environment returns is zero, and not what it was a step before.
        for path, array in self._recorded:
            array[~_read(array, info, path, self._every)] = 0
        return HostStep(
            obs=self._observe(obs, info, self._every),
            reward=np.asarray(reward).astype(np.float32, copy=False),
            terminated=terminated,
            truncated=truncated,
            faulty=~self._every,
            info=self.info,
            mask=mask,
        )

    def close(self) -> None:
        if not self._is_closed:
            self._env.close()
        self._is_closed = True

    def _observe(
        self, obs: ArrayTree, info: Mapping[str, Any], mask: np.ndarray
    ) -> ArrayTree:
        """Casts an observation, and puts the arrays of info next to it."""
        for path, array in self._observed:
            missing = np.flatnonzero(mask & ~_read(array, info, path, mask))
            if missing.size:
                raise ValueError(
                    "`observe_info` must have keys of every `info`, got no "
                    f"{path[0]!r} from environment {missing[0]}."
                )
        pairs = zip(self._own.flatten(obs), self._own.spaces, strict=True)
        own = [narrowed(np.asarray(x), space.dtype, "obs") for x, space in pairs]
        shown = [array for _, array in self._observed]
        self._obs = self._layout.obs.unflatten([*shown, *own])
        return self._obs


def _mode(env: Any) -> str:
    """Returns the autoreset mode, DISABLED or NEXT_STEP."""
    mode = (env.metadata or {}).get("autoreset_mode")
    name = getattr(mode, "name", None)
    if name not in ("DISABLED", "NEXT_STEP"):
        raise ValueError(
            "`env` must have the autoreset mode DISABLED or NEXT_STEP, got "
            f"{name or mode}: pass its class, or `vector_kwargs` of `gymnasium."
            "make_vec`, autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED."
        )
    return name


def _read(
    array: np.ndarray, info: Mapping[str, Any], path: Sequence[str], mask: np.ndarray
) -> np.ndarray:
    """Copies one array of info where `mask`; returns `[B]` bool, who has it of these.

    In a vector environment's info `_key` says who has `key`; all if it is absent.
    """
    key = path[0]
    have = mask & np.asarray(info.get(f"_{key}", key in info))
    if have.any():
        values = np.asarray(leaf_at(info, path))[have]
        if values.dtype == object:  # gymnasium collects unknown types so
            values = np.stack([np.asarray(value) for value in values])
        name = "info" + "".join(f"[{key!r}]" for key in path)
        assign([array], have, [narrowed(values, array.dtype, name)], name)
    return have

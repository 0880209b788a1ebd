"""`from_envpool`: adapts an EnvPool to `AsyncHostVectorEnv`.

EnvPool resets environments automatically: the result after the end of an episode is the
first observation of the next episode. Such a result is not a step, so `HostStep.mask`
is False there. The adapter recognizes these results by the flags of the previous
result, because EnvPool's `elapsed_step` is not reset after the loss of a life.
"""

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from rollout.base import checks
from rollout.base.checks import import_optional
from rollout.envs.host.arrays import SpaceLeaves, narrowed, place_rows
from rollout.envs.host.types import AsyncHostVectorEnv, HostStep
from rollout.envs.spaces import as_space, narrow
from rollout.envs.types import ArrayTree


def from_envpool(
    env: str,
    num_envs: int,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    record_info: Iterable[str] = (),
    **options: Any,
) -> AsyncHostVectorEnv:
    """Creates an EnvPool and adapts it to `AsyncHostVectorEnv`.

    EnvPool seeds its generators only once: `reset` ignores its seeds, and states cannot
    be saved. The first `reset` must include all environments. If the episodes of all
    selected environments have just ended, a later `reset` does nothing, because EnvPool
    resets them in its next result. Any other `reset` starts episodes immediately; with
    a `batch_size` below B it must include all environments, and discards the steps in
    flight.

    EnvPool waits until exactly `batch_size` environments are ready: `num_ready` must
    equal `batch_size`, and `timeout` has no effect. An episode that ends at the time
    limit counts as truncated only. 64-bit numbers are converted to 32 bits.

    Args:
        env: id of the environment, for example "CartPole-v1".
        num_envs: number of environments, B.
        batch_size: number of environments that `receive` returns, from 1 to B. The
            default is B, which `step` requires.
        seed: seed for all random number generators.
        record_info: names of EnvPool's info to record, for example "lives".
        **options: arguments of `envpool.make`, for example `num_threads` or
            `max_episode_steps`.

    Raises:
        ModuleNotFoundError: if EnvPool is not installed.
        ValueError: if the id or a name in `record_info` does not exist, an option is
            invalid, or the environment has several players.
    """
    num_envs = checks.check_int("num_envs", num_envs)
    batch_size = num_envs if batch_size is None else batch_size
    counts = {
        "num_envs": num_envs,
        "batch_size": checks.check_int("batch_size", batch_size, most=num_envs),
        "seed": seed,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gymnasium warns about bounds of its spaces
        try:
            make = import_optional("envpool").make
            pool = make(env, env_type="gymnasium", **counts, **options)
        except (AssertionError, TypeError) as error:
            raise ValueError(f"{env} cannot be created: {error}") from error
        envs = _EnvPool(pool, _names(pool, record_info))
    envs.source = (env, options)
    return envs


class _EnvPool(AsyncHostVectorEnv):
    """An `AsyncHostVectorEnv` over an EnvPool, which returns fixed-size batches."""

    def __init__(self, env: Any, names: tuple[str, ...]) -> None:
        self.num_envs = int(env.config["num_envs"])
        self.batch_size: int = int(env.config["batch_size"])
        self._env: Any = env
        self._names = names
        specs, self.info = env.spec.state_array_spec, {}
        for name in names:
            spec = specs.get(f"info:{name}") or specs[name]
            shape = [size for size in spec.shape if size >= 0]  # -1: the player axis
            self.info[name] = _narrow(np.zeros((self.num_envs, *shape), spec.dtype))
        self.observation_space = as_space(env.observation_space)
        self.action_space = as_space(env.action_space)
        self._parts = SpaceLeaves(self.observation_space, "obs")
        self._action = SpaceLeaves(self.action_space, "action")
        self._all = np.arange(self.num_envs, dtype=np.int32)
        self._obs: ArrayTree = None  # [B, ...], None before the first reset
        self._ended = np.ones(self.num_envs, bool)  # the next result is a reset
        self._in_flight = np.zeros(self.num_envs, bool)

    @property
    def pending_reset(self) -> np.ndarray | None:
        """Environments whose next step only resets them; see `HostVectorEnv`."""
        return self._ended

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        del seeds  # EnvPool is seeded once, at construction
        if self._obs is None:
            shape = (self.num_envs,)
            blank = [np.empty(shape + x.shape, x.dtype) for x in self._parts.spaces]
            self._obs = self._parts.unflatten(blank)
        elif self._ended[mask].all() and not self._in_flight[mask].any():
            return self._obs  # the next results of these environments are resets
        # Copy: the caller may still hold the previous array.
        self._obs = self._parts.map(np.array, self._obs)
        self._reset_lanes(np.flatnonzero(mask).astype(np.int32))
        return self._obs

    def step(self, action: ArrayTree) -> HostStep:
        if self.batch_size != self.num_envs:
            raise ValueError(
                "`batch_size` must be `num_envs` to step all environments, got "
                f"{self.batch_size} of {self.num_envs}. Collect with `num_ready`."
            )
        self.send(action, self._all)
        return self.receive(self.batch_size)[0]

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        self._in_flight[env_id] = True
        self._env.send(self._action.map(np.asarray, action), env_id)

    def receive(
        self, num_ready: int, timeout: float | None = None
    ) -> tuple[HostStep, np.ndarray]:
        del num_ready, timeout  # EnvPool always waits for `batch_size` environments
        obs, reward, terminated, truncated, info = self._env.recv()
        env_id = info["env_id"]
        index = slice(None) if len(env_id) == self.num_envs else env_id
        # A result is a reset if and only if the previous result ended an episode. The
        # reward and flags of a reset do not belong to any step.
        mask = ~self._ended[index]
        step = HostStep(
            obs=self._parts.map(_narrow, obs),
            reward=reward * mask,
            terminated=terminated & mask,
            truncated=truncated & mask,
            faulty=np.zeros(mask.shape, bool),
            info={name: _narrow(info[name]) for name in self._names},
            mask=mask,
        )
        self._ended[index] = step.terminated | step.truncated
        self._in_flight[index] = False
        self._write(step.obs, env_id)
        return step, env_id

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None  # the destructor ends EnvPool's threads

    def _reset_lanes(self, env_id: np.ndarray) -> None:
        """Resets these environments, `[K]` int32, immediately."""
        is_all = env_id.size == self.num_envs
        # Receive and discard all steps in flight before the reset.
        while is_all and (num := np.count_nonzero(self._in_flight)):
            # EnvPool returns only full batches: reset idle environments to fill them.
            idle = self._all[~self._in_flight][: max(self.batch_size - num, 0)]
            *_, info = self._env.reset(idle) if idle.size else self._env.recv()
            self._in_flight[idle] = True
            self._in_flight[info["env_id"]] = False
        if self.batch_size == self.num_envs and not self._in_flight.any():
            batches = [env_id]
        elif is_all:
            # Batches must be full: the last batch wraps around and resets some
            # environments twice.
            starts = range(0, self.num_envs, self.batch_size)
            batches = [np.roll(self._all, -x)[: self.batch_size] for x in starts]
        else:
            raise ValueError(
                "`mask` must be True everywhere, or only where an episode just ended, "
                f"got {env_id.size} of {self.num_envs} environments. EnvPool with a "
                "`batch_size` below `num_envs` can reset only all of them."
            )
        for batch in batches:
            obs, info = self._env.reset(batch)
            self._write(self._parts.map(_narrow, obs), info["env_id"])
        self._ended[env_id] = False

    def _write(self, obs: ArrayTree, env_id: np.ndarray) -> None:
        if len(env_id) == self.num_envs:  # in order, so no copy is needed
            self._obs = obs
            return
        place_rows(self._obs, env_id, obs)


def _names(env: Any, record_info: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of info to record; raises if EnvPool lacks one of them."""
    if env.config.get("max_num_players", 1) > 1:
        raise ValueError(
            "`env` must have one player per environment, got up to "
            f"{env.config['max_num_players']} players."
        )
    parts = [x.partition("info:") for x in env.spec.state_array_spec]
    fields = {name for _, _, name in parts if name and "." not in name}
    names, fields = tuple(record_info), sorted(fields | {"elapsed_step"})
    for name in names:
        if name not in fields:
            raise ValueError(f"`record_info` must be names of {fields}, got {name!r}.")
    return names


_narrow_dtype = functools.cache(narrow)


def _narrow(x: np.ndarray) -> np.ndarray:
    """Converts 64-bit numbers to 32 bits, like JAX."""
    return narrowed(x, _narrow_dtype(x.dtype), "an array of EnvPool")

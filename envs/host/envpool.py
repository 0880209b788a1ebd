"""`from_envpool`: adapts an EnvPool to `AsyncHostVectorEnv`.

EnvPool resets by itself: the answer after an ending is the first observation of the
next episode. Such an answer is no step, so `HostStep.mask` is False there. The flags of
the answer before say where: EnvPool's `elapsed_step` goes on where a life was lost.
"""

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from rollout import checks
from rollout.envs.host.arrays import Parts, narrowed, place_rows
from rollout.envs.host.types import AsyncHostVectorEnv, HostStep
from rollout.envs.optional_import import load
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
    """Makes an `AsyncHostVectorEnv` of an EnvPool.

    EnvPool seeds its generators once: `reset` ignores its seeds, and there is no state
    to save. The first `reset` must be of all environments. A later `reset` of
    environments whose episodes have all just ended leaves them to EnvPool, whose next
    answer begins their episodes; any other `reset` starts episodes at once. With a
    `batch_size` below B it must be of all environments, and drops answers in flight.

    EnvPool returns exactly `batch_size` answers at a time, and waits for them:
    `num_ready` must equal it, and `timeout` does nothing. An ending at the time limit
    counts as truncation only. 64-bit numbers become 32-bit ones.

    Args:
        env: an id such as "CartPole-v1".
        num_envs: B.
        batch_size: number of answers returned at a time, from 1 to B, by default B,
            which `step` needs.
        seed: of all randomness.
        record_info: names of EnvPool's info to keep, such as "lives".
        **options: for `envpool.make`, such as `num_threads` or `max_episode_steps`.

    Raises:
        ModuleNotFoundError: if EnvPool is not installed.
        ValueError: if there is no such id or info, an option does not fit, or the
            environment has several players.
    """
    num_envs = checks.int_between("num_envs", num_envs)
    batch_size = num_envs if batch_size is None else batch_size
    counts = {
        "num_envs": num_envs,
        "batch_size": checks.int_between("batch_size", batch_size, most=num_envs),
        "seed": checks.integer("seed", seed),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gymnasium warns of its own bounds
        try:
            make = load("envpool").make
            pool = make(env, env_type="gymnasium", **counts, **options)
        except (AssertionError, TypeError) as error:
            raise ValueError(f"{env} cannot be made: {error}") from error
        return _EnvPool(pool, _names(pool, record_info))


class _EnvPool(AsyncHostVectorEnv):
    """An EnvPool, which returns `batch_size` answers at a time."""

    def __init__(self, env: Any, names: tuple[str, ...]) -> None:
        self.num_envs = int(env.config["num_envs"])
        self.batch_size = int(env.config["batch_size"])
        self._env: Any = env
        self._names = names
        specs, self.info = env.spec.state_array_spec, {}
        for name in names:
            spec = specs.get(f"info:{name}") or specs[name]
            shape = [size for size in spec.shape if size >= 0]  # -1: of the one player
            self.info[name] = _narrow(np.zeros((self.num_envs, *shape), spec.dtype))
        self.observation_space = as_space(env.observation_space)
        self.action_space = as_space(env.action_space)
        self._parts = Parts(self.observation_space, "obs")
        self._action = Parts(self.action_space, "action")
        self._all = np.arange(self.num_envs, dtype=np.int32)
        self._obs: ArrayTree = None  # [B, ...], None before the first reset
        self._ended = np.ones(self.num_envs, bool)  # EnvPool resets these next
        self._in_flight = np.zeros(self.num_envs, bool)

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        del seeds  # EnvPool is seeded once, when it is made
        if self._obs is None:
            shape = (self.num_envs,)
            blank = [np.empty(shape + x.shape, x.dtype) for x in self._parts.spaces]
            self._obs = self._parts.unflatten(blank)
        elif self._ended[mask].all() and not self._in_flight[mask].any():
            return self._obs  # the next answers of these are resets anyway
        self._obs = self._parts.map(np.array, self._obs)  # the caller has the old one
        self._restart(np.flatnonzero(mask).astype(np.int32))
        return self._obs

    def step(self, action: ArrayTree) -> HostStep:
        if self.batch_size != self.num_envs:
            raise ValueError(
                "`batch_size` must be `num_envs` for a step of all environments, got "
                f"{self.batch_size} of {self.num_envs}: collect with `num_ready`."
            )
        self.send(action, self._all)
        return self.receive(self.batch_size)[0]

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        self._in_flight[env_id] = True
        self._env.send(self._action.map(np.asarray, action), env_id)

    def receive(
        self, num_ready: int, timeout: float | None = None
    ) -> tuple[HostStep, np.ndarray]:
        del num_ready, timeout  # EnvPool has its `batch_size`, and waits
        obs, reward, terminated, truncated, info = self._env.recv()
        env_id = info["env_id"]
        at = slice(None) if len(env_id) == self.num_envs else env_id
        # An answer is a reset exactly if the one before it was an ending. Its reward
        # and its flags belong to no step.
        mask = ~self._ended[at]
        step = HostStep(
            obs=self._parts.map(_narrow, obs),
            reward=reward * mask,
            terminated=terminated & mask,
            truncated=truncated & mask,
            faulty=np.zeros(mask.shape, bool),
            info={name: _narrow(info[name]) for name in self._names},
            mask=mask,
        )
        self._ended[at] = step.terminated | step.truncated
        self._in_flight[at] = False
        self._write(step.obs, env_id)
        return step, env_id

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None  # its threads end with it

    def _restart(self, env_id: np.ndarray) -> None:
        """Resets these environments, `[K]` int32, at once."""
        is_all = env_id.size == self.num_envs
        # All restart once those in flight have answered; their answers are dropped.
        while is_all and (num := np.count_nonzero(self._in_flight)):
            # EnvPool returns nothing before a batch is full: idle ones fill it.
            more = self._all[~self._in_flight][: max(self.batch_size - num, 0)]
            *_, info = self._env.reset(more) if more.size else self._env.recv()
            self._in_flight[more] = True
            self._in_flight[info["env_id"]] = False
        if self.batch_size == self.num_envs and not self._in_flight.any():
            batches = [env_id]
        elif is_all:
            # Batches are full: the last one wraps around, and resets some twice.
            starts = range(0, self.num_envs, self.batch_size)
            batches = [np.roll(self._all, -x)[: self.batch_size] for x in starts]
        else:
            raise ValueError(
                "`mask` must be True everywhere or only where an episode just ended, "
                "since EnvPool with a `batch_size` restarts all environments or none, "
                f"got {env_id.size} of {self.num_envs}."
            )
        for batch in batches:
            obs, info = self._env.reset(batch)
            self._write(self._parts.map(_narrow, obs), info["env_id"])
        self._ended[env_id] = False

    def _write(self, obs: ArrayTree, env_id: np.ndarray) -> None:
        if len(env_id) == self.num_envs:  # they are in order, so need no copy
            self._obs = obs
            return
        place_rows(self._obs, env_id, obs)


def _names(env: Any, record_info: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of info to keep; raises if EnvPool does not have one."""
    if env.config.get("max_num_players", 1) > 1:
        raise ValueError(
            "`env` must have one player in each environment, got up to "
            f"{env.config['max_num_players']}."
        )
    parts = [x.partition("info:") for x in env.spec.state_array_spec]
    known = {name for _, _, name in parts if name and "." not in name}
    names, known = tuple(record_info), sorted(known | {"elapsed_step"})
    for name in names:
        if name not in known:
            raise ValueError(f"`record_info` must be names of {known}, got {name!r}.")
    return names


_narrow_dtype = functools.cache(narrow)


def _narrow(x: np.ndarray) -> np.ndarray:
    """Makes 64-bit numbers 32-bit ones, as JAX does."""
    return narrowed(x, _narrow_dtype(x.dtype), "an array of EnvPool")

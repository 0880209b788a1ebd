"""`from_envpool`: adapts an EnvPool to `HostVectorEnv` or `AsyncHostVectorEnv`.

EnvPool resets by itself: the answer after an ending is the first observation of the
next episode. Such an answer is no step, so `HostStep.mask` is False there. The flags of
the answer before say where: EnvPool's `elapsed_step` goes on where a life was lost.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from rollout import checks
from rollout.envs.host.arrays import Parts, narrowed
from rollout.envs.host.types import AsyncHostVectorEnv, HostStep, HostVectorEnv
from rollout.envs.optional_import import load
from rollout.envs.spaces import as_space
from rollout.envs.types import ArrayTree

_NEEDED = ("async_reset", "config", "recv", "send", "spec", "observation_space")
_NARROW = {
    np.dtype(np.float64): np.float32,
    np.dtype(np.int64): np.int32,
    np.dtype(np.uint64): np.uint32,
}


def from_envpool(
    env: Any,
    num_envs: int | None = None,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    record_info: Iterable[str] = (),
    **options: Any,
) -> HostVectorEnv | AsyncHostVectorEnv:
    """Makes a `HostVectorEnv` of an EnvPool, or an asynchronous one.

    EnvPool seeds its generators once: `reset` ignores its seeds, and there is no state
    to save. The first `reset` must be of all environments. A later `reset` of
    environments whose episodes have all just ended leaves them to EnvPool, whose next
    answer begins their episodes; any other `reset` starts episodes at once. With a
    `batch_size` below B it must be of all environments, and drops answers in flight.

    EnvPool returns exactly `batch_size` answers at a time, and waits for them:
    `num_ready` must equal it, and `timeout` does nothing. An ending at the time limit
    counts as truncation only. 64-bit numbers become 32-bit ones.

    Args:
        env: an id such as "CartPole-v1", or a new environment of `envpool.make` with
            the type "gymnasium", which nothing else uses.
        num_envs: B; for an id only.
        batch_size: number of answers returned at a time, from 1 to B; for an id
            only, by default B. Below B the result is an `AsyncHostVectorEnv`; its
            `step` needs a `batch_size` that divides B.
        seed: of all randomness; for an id only.
        record_info: names of EnvPool's info to keep, such as "lives".
        **options: for `envpool.make`, such as `num_threads` or `max_episode_steps`; for
            an id only.

    Raises:
        ModuleNotFoundError: if EnvPool is not installed.
        ValueError: if there is no such id or info, an option does not fit, or the
            environment has several players.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gymnasium warns of its own bounds
        if isinstance(env, str):
            env = _make(env, num_envs, batch_size, seed, options)
        else:
            _check(env, num_envs=num_envs, batch_size=batch_size, **options)
        names = _names(env, record_info)
        return (_AsyncEnvPool if env.is_async else _EnvPool)(env, names)


class _EnvPool:
    """An EnvPool whose environments all step together."""

    def __init__(self, env: Any, names: tuple[str, ...]) -> None:
        self.num_envs = int(env.config["num_envs"])
        self._env: Any = env
        self._names = names
        self.observation_space = as_space(env.observation_space)
        self.action_space = as_space(env.action_space)
        self._parts = Parts(self.observation_space, "obs")
        self._action = Parts(self.action_space, "action")
        self._all = np.arange(self.num_envs, dtype=np.int32)
        self._obs = None  # [B, ...], None before the first reset
        self._ended = np.ones(self.num_envs, bool)  # EnvPool resets these next

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        del seeds  # EnvPool is seeded once, when it is made
        first = self._obs is None
        if first and not mask.all():
            raise ValueError(
                "`mask` must be True everywhere at the first `reset`, got "
                f"{np.count_nonzero(mask)} of {self.num_envs}."
            )
        # Where all have just ended, EnvPool's next answer is a reset anyway.
        if first or not self._resets_itself(mask):
            self._restart(np.flatnonzero(mask).astype(np.int32))
        return self._obs

    def step(self, action: ArrayTree) -> HostStep:
        self._env.send(self._action.map(np.asarray, action), self._all)
        step = self._to_step(self._env.recv(), ~self._ended)
        self._obs = step.obs
        self._ended = step.terminated | step.truncated
        return step

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None  # its threads end with it

    def _resets_itself(self, mask: np.ndarray) -> bool:
        """Returns whether the next answer of each of these is a reset."""
        return bool(self._ended[mask].all())

    def _restart(self, env_id: np.ndarray) -> None:
        """Resets these environments, `[K]` int32, at once."""
        obs, info = self._env.reset(env_id)
        if self._obs is None:
            self._obs = self._parts.map(
                lambda x: np.stack([_narrow(x[0])] * self.num_envs), obs
            )
        # A copy, for the caller may hold the old one.
        self._obs = self._parts.map(np.array, self._obs)
        self._write(obs, info["env_id"])
        self._ended[env_id] = False

    def _write(self, obs: ArrayTree, env_id: np.ndarray) -> None:
        trees = self._obs, obs
        for old, new in zip(*map(self._parts.flatten, trees), strict=True):
            old[env_id] = new

    def _to_step(self, answers: tuple, mask: np.ndarray) -> HostStep:
        """Converts EnvPool's answer; `mask` is False where the answer is a reset."""
        obs, reward, terminated, truncated, info = answers
        return HostStep(
            obs=self._parts.map(_narrow, obs),
            reward=reward * mask,
            terminated=terminated & mask,
            truncated=truncated & mask,
            faulty=np.zeros(mask.shape, bool),
            info={name: _narrow(info[name]) for name in self._names},
            mask=mask,
        )


class _AsyncEnvPool(_EnvPool):
    """An EnvPool that returns `batch_size` answers at a time."""

    def __init__(self, env: Any, names: tuple[str, ...]) -> None:
        super().__init__(env, names)
        self.batch_size = int(env.config["batch_size"])
        self._in_flight = np.zeros(self.num_envs, bool)

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        env_id = np.asarray(env_id, np.int32)
        if self._in_flight[env_id].any():
            busy = env_id[self._in_flight[env_id]].tolist()
            raise ValueError(
                "`env_id` must leave out environments that are in flight, got "
                f"{busy}: `receive` them first."
            )
        self._in_flight[env_id] = True
        self._env.send(self._action.map(np.asarray, action), env_id)

    def receive(
        self, num_ready: int, timeout: float | None = None
    ) -> tuple[HostStep, np.ndarray]:
        del timeout  # EnvPool waits
        size, num = self.batch_size, np.count_nonzero(self._in_flight)
        if num_ready != size:
            raise ValueError(
                f"`num_ready` must be the `batch_size` of EnvPool, got {num_ready} and "
                f"{size}."
            )
        if num < size:
            raise ValueError(
                f"`num_ready` must be at most the number in flight, got {num_ready} "
                f"and {num}."
            )
        answers = self._env.recv()
        env_id = answers[-1]["env_id"]
        # An answer is a reset exactly if the one before it was an ending.
        step = self._to_step(answers, ~self._ended[env_id])
        self._ended[env_id] = step.terminated | step.truncated
        self._in_flight[env_id] = False
        self._write(step.obs, env_id)
        return step, env_id

    def step(self, action: ArrayTree) -> HostStep:
        if self.num_envs % self.batch_size:
            raise ValueError(
                "`batch_size` must divide `num_envs` for a step of all environments, "
                f"got {self.batch_size} and {self.num_envs}."
            )
        self.send(action, self._all)
        num_batches = self.num_envs // self.batch_size
        batches = [self.receive(self.batch_size) for _ in range(num_batches)]
        steps, env_id = zip(*batches, strict=True)
        order = np.argsort(np.concatenate(env_id))
        return jax.tree.map(lambda *x: np.concatenate(x)[order], *steps)

    def _resets_itself(self, mask: np.ndarray) -> bool:
        return super()._resets_itself(mask) and not self._in_flight[mask].any()

    def _restart(self, env_id: np.ndarray) -> None:
        if env_id.size < self.num_envs:
            raise ValueError(
                "`mask` must be True everywhere or only where an episode just ended, "
                "since EnvPool with a `batch_size` restarts all environments or none, "
                f"got {env_id.size} of {self.num_envs}."
            )
        self._drain()
        size = self.batch_size
        for start in range(0, self.num_envs, size):
            # EnvPool returns full batches only: the last one wraps around, and resets
            # some a second time.
            super()._restart(np.roll(self._all, -start)[:size])

    def _drain(self) -> None:
        """Waits for all environments in flight, and drops their answers."""
        while num := np.count_nonzero(self._in_flight):
            num_more = max(self.batch_size - num, 0)
            # EnvPool returns nothing before a batch is full: idle ones fill it.
            more = self._all[~self._in_flight][:num_more]
            *_, info = self._env.reset(more) if num_more else self._env.recv()
            self._in_flight[more] = True
            self._in_flight[info["env_id"]] = False


def _make(
    env_id: str,
    num_envs: int | None,
    batch_size: int | None,
    seed: int,
    options: dict[str, Any],
) -> Any:
    """Makes an EnvPool by its id."""
    num_envs = checks.int_between("num_envs", num_envs)
    batch_size = checks.int_between(
        "batch_size", num_envs if batch_size is None else batch_size
    )
    seed = checks.integer("seed", seed)
    if batch_size > num_envs:
        raise ValueError(
            f"`batch_size` must be at most `num_envs`, got {batch_size} and {num_envs}."
        )
    envpool = load("envpool")
    counts = {"num_envs": num_envs, "batch_size": batch_size, "seed": seed}
    try:
        return envpool.make(env_id, env_type="gymnasium", **counts, **options)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"{env_id} cannot be made: {error}") from error


def _check(env: Any, **options: Any) -> None:
    """Checks that `env` is an EnvPool of gymnasium's type, without options for ids."""
    missing = [name for name in _NEEDED if not hasattr(env, name)]
    if missing:
        raise ValueError(
            "`env` must be an id or an environment of `envpool.make` with "
            f'env_type="gymnasium", got {type(env).__name__} without {missing[0]}.'
        )
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(
            f"`{given[0]}` must be left out if `env` is no id, got "
            f"{options[given[0]]!r}: give it to `envpool.make`."
        )


def _names(env: Any, record_info: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of info to keep; raises if EnvPool does not have one."""
    if env.config.get("max_num_players", 1) > 1:
        raise ValueError(
            "`env` must have one player in each environment, got up to "
            f"{env.config['max_num_players']}."
        )
    keys = env.spec.state_array_spec
    known = {x.removeprefix("info:") for x in keys if x.startswith("info:")}
    known = {x for x in known if "." not in x} | {"elapsed_step"}
    names = (record_info,) if isinstance(record_info, str) else tuple(record_info)
    for name in names:
        if name not in known:
            raise ValueError(
                f"`record_info` must be names of {sorted(known)}, got {name!r}."
            )
    return names


def _narrow(x: np.ndarray) -> np.ndarray:
    """Makes 64-bit numbers 32-bit ones, as JAX does."""
    dtype = _NARROW.get(x.dtype)
    return x if dtype is None else narrowed(x, dtype, "an array of EnvPool")

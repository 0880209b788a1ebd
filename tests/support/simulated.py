"""`simulate_latency`: a JAX environment that answers after a latency.

Time is virtual: nothing waits, and the clock jumps to the next
answer, so the effect of latencies on a collector is measured at once and repeatably.
"""

from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout.envs import prng
from rollout.envs.host.types import AsyncHostVectorEnv, HostStep
from rollout.envs.types import RESET, AnySpace, ArrayTree, Env, VectorEnv
from rollout.envs.vectorize import vectorize


class LatencyFn(Protocol):
    """Draws how long a step of an environment takes."""

    def __call__(self, rng: np.random.Generator, env_id: int, number: int) -> float:
        """Returns the seconds of a step, at least 0.

        Args:
            rng: the generator of this environment; nothing else draws from it.
            env_id: number of the environment.
            number: of the step, from 0, counted over all episodes of the environment.
        """
        ...


class _Lanes(NamedTuple):
    """`B` environments, each somewhere in an episode."""

    episode_key: chex.PRNGKey  # [B]
    number: jax.Array  # [B] int32, steps since the reset
    state: ArrayTree  # [B, ...]
    obs: ArrayTree  # [B, ...]


def simulate_latency(
    env: Env, num_envs: int, *, latency_fn: LatencyFn | None = None, seed: int = 0
) -> AsyncHostVectorEnv:
    """Makes an `AsyncHostVectorEnv` of a JAX environment, in virtual time.

    The result has a clock, `now`, in seconds from 0.0. `send` begins steps now;
    `receive` moves the clock to the last of its answers, or raises `TimeoutError` once
    `timeout` of these seconds are over. Answers at the same time come in the order of
    sending. A reset takes no time; a step of that environment in flight is dropped.

    The key of an episode is `jax.random.key` of its seed. With equal keys, the rows are
    those of `vectorize(env, num_envs)`.

    Args:
        env: the environment.
        num_envs: B, at least 1.
        latency_fn: draws the seconds of a step; by default steps take no time.
        seed: of the generators, at least 0; environment i has
            `numpy.random.default_rng((seed, i))`.
    """
    return _Simulated(vectorize(env, num_envs), latency_fn, seed)


class _Simulated:
    """Steps all environments in one program, and keeps the results of those sent.

    The results are known when an action is sent; only their time of arrival is drawn.
    """

    def __init__(self, env: VectorEnv, latency_fn: LatencyFn | None, seed: int) -> None:
        self.num_envs = env.num_envs
        self.now = 0.0
        self._env = env
        self._latency_fn = latency_fn
        self._rngs = [np.random.default_rng((seed, i)) for i in range(self.num_envs)]
        self._num_steps = [0] * self.num_envs
        self._num_sent = 0
        self._in_flight = []  # (time of the answer, number sent before, env_id)
        shapes = jax.eval_shape(_first_step, env, np.zeros(self.num_envs, np.uint32))
        self._state = prng.blank(shapes)  # lanes, their last answers

    @property
    def observation_space(self) -> AnySpace:
        return self._env.observation_space

    @property
    def action_space(self) -> AnySpace:
        return self._env.action_space

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        self._in_flight = [item for item in self._in_flight if not mask[item[-1]]]
        lanes, answers = self._state
        lanes = _reset(self._env, lanes, seeds, mask)
        self._state = lanes, answers
        return jax.device_get(lanes.obs)

    def step(self, action: ArrayTree) -> HostStep:
        self.send(action, np.arange(self.num_envs))
        self.receive(self.num_envs)
        return jax.device_get(self._state[1])

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        env_id = np.asarray(env_id, np.int32)
        busy = {item[-1] for item in self._in_flight}.intersection(env_id.tolist())
        if busy:
            raise ValueError(
                "`env_id` must leave out environments that are in flight, got "
                f"{sorted(busy)}: `receive` them first."
            )
        latencies = [self._latency(number) for number in env_id.tolist()]
        for number, latency in zip(env_id.tolist(), latencies, strict=True):
            self._in_flight.append((self.now + latency, self._num_sent, number))
            self._num_steps[number] += 1
            self._num_sent += 1

        # All lanes step, whatever was sent: one program serves any set of environments.
        def scatter(x: np.ndarray) -> np.ndarray:
            whole = np.zeros((self.num_envs, *np.shape(x)[1:]), x.dtype)
            whole[env_id] = x
            return whole

        sent = np.isin(np.arange(self.num_envs), env_id)
        self._state = _step(self._env, self._state, jax.tree.map(scatter, action), sent)

    def receive(
        self, num_ready: int, timeout: float | None = None
    ) -> tuple[HostStep, np.ndarray]:
        if not 1 <= num_ready <= len(self._in_flight):
            raise ValueError(
                "`num_ready` must be from 1 to the number in flight, got "
                f"{num_ready} and {len(self._in_flight)}."
            )
        self._in_flight.sort()  # by time, then in the order of sending
        first, rest = self._in_flight[:num_ready], self._in_flight[num_ready:]
        when, _, _ = first[-1]
        if timeout is not None and when > self.now + timeout:
            self.now += timeout
            raise TimeoutError(f"fewer than {num_ready} answered in {timeout} seconds")
        self._in_flight = rest
        self.now = max(self.now, when)
        env_id = np.array([number for _, _, number in first], np.int32)
        return jax.tree.map(lambda x: np.asarray(x)[env_id], self._state[1]), env_id

    def close(self) -> None:
        """Does nothing."""

    def _latency(self, number: int) -> float:
        """Draws the seconds that the next step of this environment takes."""
        if self._latency_fn is None:
            return 0.0
        return self._latency_fn(self._rngs[number], number, self._num_steps[number])


def _start(env: VectorEnv, seeds: jax.Array) -> _Lanes:
    episode_key = jax.vmap(jax.random.key)(seeds)
    state, obs = env.reset(prng.fold_in(episode_key, RESET))
    number = jnp.zeros(env.num_envs, jnp.int32)
    return _Lanes(episode_key=episode_key, number=number, state=state, obs=obs)


def _advance(
    env: VectorEnv, lanes: _Lanes, action: ArrayTree
) -> tuple[_Lanes, HostStep]:
    number = lanes.number + 1
    step_keys = prng.fold_in(lanes.episode_key, number)
    result: Any = env.step(step_keys, lanes.state, action)
    faulty: Any = jnp.zeros_like(result.terminated)
    answers = HostStep(
        obs=result.obs,
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        faulty=faulty,
        info=result.info,
    )
    lanes = lanes._replace(number=number, state=result.state, obs=result.obs)
    return lanes, answers


def _first_step(env: VectorEnv, seeds: jax.Array) -> tuple[_Lanes, HostStep]:
    lanes = _start(env, seeds)
    return _advance(env, lanes, jax.vmap(env.action_space.sample)(lanes.episode_key))


@jax.jit
def _reset(env: VectorEnv, lanes: _Lanes, seeds: jax.Array, mask: jax.Array) -> _Lanes:
    return prng.select(mask, _start(env, seeds), lanes)


@jax.jit
def _step(
    env: VectorEnv,
    now: tuple[_Lanes, HostStep],
    action: ArrayTree,
    sent: jax.Array,
) -> tuple[_Lanes, HostStep]:
    lanes, _ = now
    return prng.select(sent, _advance(env, lanes, action), now)

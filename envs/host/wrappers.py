"""`HostWrapper`, the base class of host wrappers, and `NormalizeHostEnv`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from rollout.base import checks
from rollout.envs.host.arrays import place_rows
from rollout.envs.host.types import (
    AsyncHostVectorEnv,
    HostStep,
    HostVectorEnv,
    check_host_env,
)
from rollout.envs.multi_agent import has_agents
from rollout.envs.spaces import as_space
from rollout.envs.types import ArrayTree, Shared
from rollout.envs.wrappers import normalize
from rollout.envs.wrappers.normalize import (
    NOT_FROZEN,
    NormalizeState,
    Statistics,
    outermost,
)


class HostWrapper(AsyncHostVectorEnv):
    """Base class of wrappers of a `HostVectorEnv`; forwards all optional members.

    A subclass defines `reset` and `step`, and also `freeze` if the wrapped environments
    may update running statistics.

    Args:
        env: the wrapped `B` environments.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.num_envs, self.info = env.num_envs, env.info
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.is_async, self.can_rebuild = env.is_async, env.can_rebuild
        self.can_load, self.learns = env.can_load, env.learns
        self.batch_size = env.batch_size if env.is_async else None

    @property
    def shared(self) -> ArrayTree:
        """Running statistics over all environments; see `HostVectorEnv`."""
        return self.env.shared

    @property
    def pending_reset(self) -> np.ndarray | None:
        """Environments whose next step only resets them; see `HostVectorEnv`."""
        return self.env.pending_reset

    def at_episodes(self, numbers: np.ndarray) -> None:
        """Announces the numbers of the next episodes; see `HostVectorEnv`."""
        self.env.at_episodes(numbers)

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        """Starts a step in some environments; see `AsyncHostVectorEnv`."""
        self.env.send(action, env_id)

    def receive(self, num_ready: int, timeout: float | None = None) -> Any:
        """Waits until some environments are ready; see `AsyncHostVectorEnv`."""
        return self.env.receive(num_ready, timeout)

    def rebuild(self, mask: np.ndarray) -> None:
        """Replaces environments by new ones; see `HostVectorEnv`."""
        self.env.rebuild(mask)

    def save(self) -> list[bytes] | None:
        """Saves the state of every environment; see `HostVectorEnv`."""
        return self.env.save()

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        """Restores the state of every environment; see `HostVectorEnv`."""
        self.env.load(saved, obs)

    def normalize_obs(self, obs: ArrayTree) -> ArrayTree:
        """Normalizes raw observations; see `BaseVectorEnv.normalize_obs`."""
        return self.env.normalize_obs(obs)

    def load_shared(self, shared: ArrayTree) -> None:
        """Restores the running statistics; see `HostVectorEnv`."""
        self.env.load_shared(shared)

    def draw(self, number: int) -> np.ndarray:
        """Renders the current state of one environment, `[H, W, 3]` uint8."""
        return self.env.draw(number)

    def close(self) -> None:
        """Closes the environments."""
        self.env.close()


@dataclasses.dataclass(eq=False)
class NormalizeHostEnv(HostWrapper):
    """Normalizes observations and rewards of a `HostVectorEnv`.

    Equivalent to `NormalizeReward` and `NormalizeObs` for JAX environments. All
    environments share one set of statistics, in this process or in workers. The
    statistics are part of `carry.env_state`, so they are saved and restored with a
    carry or a stream. For evaluation, fix the statistics with
    `HostCollector.freeze(carry)`.

    Rows of faulty environments do not update the statistics. Bounds of the wrapped
    observation space are not checked. Non-finite values are faults.

    Attributes:
        env: `B` parallel host environments.
        gamma: discount per environment step, in [0, 1], for the scale of the rewards.
            None disables the normalization of rewards.
        only: names of the parts of the observation to normalize; see `NormalizeObs`.
            None for floats and images, `()` for no parts.
        epsilon: constant added to the variance, above 0.
        statistics: fixed statistics, set by `freeze`; None for running statistics.
        learns: whether the wrapper updates the statistics of observations.

    Raises:
        ValueError: if an argument is invalid.

    Source:
        See `NormalizeObs` and `NormalizeReward`.
    """

    env: HostVectorEnv
    _: dataclasses.KW_ONLY
    gamma: float | None = 0.99
    only: Sequence[str] | None = None
    epsilon: float = 1e-8
    statistics: tuple[Statistics, Statistics] | None = None

    def __post_init__(self) -> None:
        check_host_env(self.env)
        if has_agents(self.env):
            raise ValueError(
                "`env` must have one agent, got several agents. To normalize their "
                "observations, set `normalize_observations=True` in the `Config` of an "
                "agent of `rollout.recipes`."
            )
        super().__init__(self.env)
        checks.check_positive("epsilon", self.epsilon)
        if self.gamma is not None:
            checks.check_fraction("gamma", self.gamma)
        self.only = normalize.names("only", self.only)
        self.learns = self.statistics is None and self.only != ()
        self._space = as_space(self.env.observation_space, "env.observation_space")
        self._raw: ArrayTree = jax.tree.map(
            lambda x: np.zeros((self.num_envs, *x.shape), x.dtype),
            jax.eval_shape(self._space.sample, jax.random.key(0)),
        )
        self._discounted = np.zeros(self.num_envs, np.float32)
        self.load_shared(None)
        self._obs = jax.tree.map(np.array, self._normalize(self._raw))
        # Normalized parts of the observation are unbounded.
        mean = self._statistics[0].mean
        self.observation_space = normalize.normalized_space(
            self._space, mean, self._obs
        )

    def freeze(self, env_state: ArrayTree) -> Self:
        """Fixes the statistics; see `HostCollector.freeze`."""
        new = outermost(env_state).statistics.value
        text = "`env_state` must have statistics of the same wrapper"
        checks.check_same_types(text, self._prior(), new)
        return dataclasses.replace(self, statistics=new)

    def normalize_obs(self, obs: ArrayTree) -> ArrayTree:
        """Normalizes raw observations in JAX; see `NormalizeObs.normalize_obs`."""
        if self.statistics is None:
            raise ValueError(NOT_FROZEN)
        raw = jax.tree.map(jnp.asarray, obs)
        return self.statistics[0].normalize(raw, self.epsilon)

    @property
    def shared(self) -> NormalizeState:
        """Statistics, and discounted sums of rewards, `[B]`; see `load_shared`."""
        return NormalizeState((), self._discounted.copy(), Shared(self._statistics))

    def load_shared(self, shared: NormalizeState | None) -> None:
        """Restores the running statistics from `shared`, or resets them if None."""
        statistics = self._prior() if shared is None else shared.statistics.value
        self._statistics = self.statistics or statistics
        self._discounted[:] = 0.0 if shared is None else shared.memory

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts an episode in some environments; see `HostVectorEnv`."""
        raw = self.env.reset(seeds, mask)
        # The statistics already include the final observation of pending environments.
        pending = self.env.pending_reset
        is_first = mask if pending is None else mask & ~pending
        if is_first.any():
            self._update(jax.tree.map(lambda x: x[is_first], raw), None)
        raw = jax.tree.map(lambda x: x[mask], raw)
        place_rows(self._obs, mask, self._normalize(raw))
        self._discounted[mask] = 0
        return self._obs

    def step(self, action: ArrayTree) -> HostStep:
        """Steps every environment with its action, `[B, ...]`, without resets."""
        return self._normalize_step(self.env.step(action), slice(None))

    def receive(self, num_ready: int, timeout: float | None = None) -> Any:
        """Waits until some environments are ready; see `AsyncHostVectorEnv`."""
        result, env_id = super().receive(num_ready, timeout)
        return self._normalize_step(result, env_id), env_id

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        """Restores the state of every environment; see `HostVectorEnv`."""
        super().load(saved, self._raw)  # raw observations are read only after a reset
        self._obs = jax.tree.map(np.array, obs)

    def _normalize_step(self, result: HostStep, index: Any) -> HostStep:
        """Updates the statistics with a step of some environments and normalizes it."""
        # A faulty lane has no observation. A lane that only reset has no reward.
        has_obs = ~result.faulty
        valid = has_obs if result.mask is None else has_obs & result.mask
        discounted_sum = self._discounted[index]
        discounted = (self.gamma or 0.0) * discounted_sum + result.reward
        self._discounted[index] = np.where(valid, discounted, discounted_sum)
        if has_obs.any():
            raw = jax.tree.map(lambda x: x[has_obs], result.obs)
            self._update(raw, discounted[valid] if valid.any() else None)
        # The statistics include this step, as in Gymnasium's wrappers.
        obs, reward = self._normalize(result.obs), result.reward
        place_rows(self._obs, index, obs)
        if self.gamma is not None:
            reward = reward / np.sqrt(self._statistics[1].var + self.epsilon)
        return result._replace(obs=obs, reward=reward, raw_reward=result.total_reward)

    def _update(self, raw: ArrayTree, discounted: np.ndarray | None) -> None:
        """Updates the statistics, unless they are fixed."""
        if self.statistics is not None:
            return
        obs_stats, reward_stats = self._statistics
        with np.errstate(all="ignore"):  # non-finite entries are ignored
            obs_stats = normalize.updated(obs_stats, raw, xp=np)
            if discounted is not None:
                reward_stats = normalize.updated(reward_stats, discounted, xp=np)
        self._statistics = obs_stats, reward_stats

    def _normalize(self, raw: ArrayTree) -> ArrayTree:
        obs_stats = self._statistics[0]
        with np.errstate(all="ignore"):
            return obs_stats.normalize(raw, self.epsilon, xp=np)

    def _prior(self) -> tuple[Statistics, Statistics]:
        obs_stats = normalize.prior(self._raw, space=self._space, only=self.only, xp=np)
        return obs_stats, normalize.prior(self._discounted, xp=np)

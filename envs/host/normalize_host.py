"""`NormalizeHostEnv`: normalizes host environments by running statistics."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from rollout import checks
from rollout.envs.host.arrays import place_rows
from rollout.envs.host.host_wrapper import HostWrapper
from rollout.envs.host.types import HostStep, HostVectorEnv, check_host_env
from rollout.envs.spaces import as_space
from rollout.envs.types import ArrayTree, Shared
from rollout.envs.wrappers import running_stats
from rollout.envs.wrappers.normalize import NOT_FROZEN, NormalizeState, outermost
from rollout.envs.wrappers.running_stats import Statistics


@dataclasses.dataclass(eq=False)
class NormalizeHostEnv(HostWrapper):
    """Normalizes observations and rewards of a `HostVectorEnv`.

    It does what `NormalizeReward` and `NormalizeObs` do in JAX, with one set of
    statistics for all environments, in this process or in workers. The statistics are
    in `carry.env_state`, so a carry or a stream that is saved and restored goes on with
    them. `HostCollector.freeze(carry)` fixes them, to evaluate.

    Rows of faulty environments do not count. Bounds of the wrapped observation space
    are not checked; a value that is not finite is a fault.

    Attributes:
        env: `B` environments side by side.
        gamma: the learner's discount per step, in [0, 1], for the scale of the rewards;
            None leaves rewards as they are.
        only: names of the parts of the observation to normalize, as `NormalizeObs` has
            it; None for floats and images, `()` for none.
        epsilon: added to variances, above 0.
        statistics: fixed statistics, set by `freeze`; None if they are learnt.
        learns: whether observations depend on statistics that are not fixed yet.

    Raises:
        ValueError: if an argument is not as above.

    Source:
        As `NormalizeObs` and `NormalizeReward`.
    """

    env: HostVectorEnv
    _: dataclasses.KW_ONLY
    gamma: float | None = 0.99
    only: Sequence[str] | None = None
    epsilon: float = 1e-8
    statistics: tuple[Statistics, Statistics] | None = None

    def __post_init__(self) -> None:
        check_host_env(self.env)
        super().__init__(self.env)
        checks.positive("epsilon", self.epsilon)
        if self.gamma is not None:
            checks.fraction("gamma", self.gamma)
        self.learns = self.statistics is None
        self.only = running_stats.names("only", self.only)
        self._space = as_space(self.env.observation_space, "env.observation_space")
        self._raw: ArrayTree = jax.tree.map(
            lambda x: np.zeros((self.num_envs, *x.shape), x.dtype),
            jax.eval_shape(self._space.sample, jax.random.key(0)),
        )
        self._discounted = np.zeros(self.num_envs, np.float32)
        self.restart(None)
        self._obs = jax.tree.map(np.array, self._normalize(self._raw))
        # Unbounded where it is normalized.
        mean = self._statistics[0].mean
        self.observation_space = running_stats.normalized_space(
            self._space, mean, self._obs
        )

    def freeze(self, env_state: ArrayTree) -> Self:
        """Fixes the statistics; see `HostCollector.freeze`."""
        new = outermost(env_state).statistics.value
        what = "`env_state` must have statistics of the same wrapper"
        checks.same(what, self._prior(), new)
        return dataclasses.replace(self, statistics=new)

    def normalize_obs(self, obs: ArrayTree) -> ArrayTree:
        """Normalizes raw observations, in JAX; see `NormalizeObs.normalize_obs`."""
        if self.statistics is None:
            raise ValueError(NOT_FROZEN)
        raw = jax.tree.map(jnp.asarray, obs)
        return self.statistics[0].normalize(raw, self.epsilon)

    @property
    def shared(self) -> NormalizeState:
        """The statistics, and the discounted sums `[B]` of rewards; see `restart`."""
        return NormalizeState((), self._discounted.copy(), Shared(self._statistics))

    def restart(self, shared: NormalizeState | None) -> None:
        """Goes on with what `shared` was, or from the start if it is None."""
        learnt = self._prior() if shared is None else shared.statistics.value
        self._statistics = self.statistics or learnt
        self._discounted[:] = 0.0 if shared is None else shared.memory

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts an episode in some environments; see `HostVectorEnv`."""
        raw = self.env.reset(seeds, mask)
        raw = jax.tree.map(lambda x: x[mask], raw)
        self._update(raw, None)
        place_rows(self._obs, mask, self._normalize(raw))
        self._discounted[mask] = 0
        return self._obs

    def step(self, action: ArrayTree) -> HostStep:
        """Takes one step in every environment, `[B, ...]`, and resets none."""
        return self._take(self.env.step(action), slice(None))

    def receive(self, num_ready: int, timeout: float | None = None) -> Any:
        """Waits for the first environments that answer; see `AsyncHostVectorEnv`."""
        result, env_id = super().receive(num_ready, timeout)
        return self._take(result, env_id), env_id

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        """Puts every environment where it was at `save`; see `HostVectorEnv`."""
        super().load(saved, self._raw)  # raw observations are read only after a reset
        self._obs = jax.tree.map(np.array, obs)

    def _take(self, result: HostStep, at: Any) -> HostStep:
        """Learns from a step of the environments `at`, and normalizes it."""
        # A lane that failed has no observation, one that reset itself no reward.
        counts = ~result.faulty
        if result.mask is not None:
            counts &= result.mask
        before = self._discounted[at]
        discounted = (self.gamma or 0.0) * before + result.reward
        self._discounted[at] = np.where(counts, discounted, before)
        if counts.any():
            raw = jax.tree.map(lambda x: x[counts], result.obs)
            self._update(raw, discounted[counts])
        # By statistics that have this step in them, as Gymnasium's wrappers have it.
        obs, reward = self._normalize(result.obs), result.reward
        place_rows(self._obs, at, obs)
        if self.gamma is not None:
            reward = reward / np.sqrt(self._statistics[1].var + self.epsilon)
        return result._replace(obs=obs, reward=reward, raw_reward=result.total_reward)

    def _update(self, raw: ArrayTree, discounted: np.ndarray | None) -> None:
        """Updates the statistics, unless they are fixed."""
        if not self.learns:
            return
        of_obs, of_rewards = self._statistics
        with np.errstate(all="ignore"):  # what is not finite does not count
            of_obs = running_stats.updated(of_obs, raw, xp=np)
            if discounted is not None:
                of_rewards = running_stats.updated(of_rewards, discounted, xp=np)
        self._statistics = of_obs, of_rewards

    def _normalize(self, raw: ArrayTree) -> ArrayTree:
        of_obs = self._statistics[0]
        with np.errstate(all="ignore"):
            return of_obs.normalize(raw, self.epsilon, xp=np)

    def _prior(self) -> tuple[Statistics, Statistics]:
        of_obs = running_stats.prior(
            self._raw, space=self._space, only=self.only, xp=np
        )
        return of_obs, running_stats.prior(self._discounted, xp=np)

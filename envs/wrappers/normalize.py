"""`NormalizeObs`, `NormalizeReward`: normalise by running statistics of all lanes."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs import trees
from rollout.envs.multi_agent import has_agents
from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree, EnvStep, LaneIndex, Lanes, Shared
from rollout.envs.wrappers import running_stats
from rollout.envs.wrappers.running_stats import Statistics
from rollout.envs.wrappers.wrapper import VectorWrapper, with_names

NOT_FROZEN = (
    "`normalize_obs` needs fixed statistics, which `collector.freeze(carry).env` has."
)


class NormalizeState(struct.PyTreeNode):
    """State of `NormalizeObs` or `NormalizeReward`.

    Attributes:
        env_state: `[B, ...]`, state of the wrapped environment.
        memory: of `NormalizeObs`, `[B, ...]`, the wrapped environment's observation
            that the next action will be chosen from; of `NormalizeReward`, `[B]`
            float32, the discounted sum of the episode's rewards so far.
        statistics: the `Statistics` of observations or of these sums, of all lanes.
    """

    env_state: ArrayTree  # [B, ...]
    memory: ArrayTree  # [B, ...]
    statistics: Shared


class _Normalizer(VectorWrapper, kw_only=True):
    """Base of both: learns the statistics, or uses fixed ones."""

    epsilon: float = struct.field(pytree_node=False, default=1e-8)
    statistics: Statistics | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("epsilon", self.epsilon)

    def freeze(self, env_state: ArrayTree) -> Self:
        """Fixes the statistics, also those of wrappers inside; see `Collector.freeze`.

        Raises:
            ValueError: if `env_state` is not that of the same wrappers in the same
                order, around environments of the same observations.
        """
        state = outermost(env_state)
        new = state.statistics.value
        # Traced only: the wrapped environments may be many.
        own = self._shapes()[0].statistics.value
        what = "`env_state` must have statistics of the same wrappers in the same order"
        checks.same(what, own, new)
        inner = super().freeze(state.env_state)
        # Leaves: environments frozen at other times run the same program.
        return inner.replace(statistics=new)

    def _shapes(self) -> tuple[Any, Any]:
        """Returns the shapes and dtypes of a reset: `(state, obs)`."""
        return jax.eval_shape(
            lambda: self.reset(jax.random.split(jax.random.key(0), self.num_envs))
        )


def outermost(env_state: ArrayTree) -> NormalizeState:
    """Finds the state of the outermost normalising wrapper."""
    is_state = lambda x: isinstance(x, NormalizeState)  # noqa: E731
    for state in jax.tree.leaves(env_state, is_leaf=is_state):
        if is_state(state):
            return state
    raise ValueError(
        "`env_state` must be the `carry.env_state` of a collector whose environments "
        "are wrapped as these, got one without statistics."
    )


class NormalizeObs(_Normalizer):
    """Normalises observations by the mean and variance of all observations so far.

        obs = (raw - mean) / sqrt(var + epsilon)

    One mean and one variance serve all lanes. Every observation counts exactly once,
    before it is normalized: the true successors at each step, and the first
    observations of episodes at their reset. A reset changes no observation of another
    lane, so within an episode `next_obs` is the next row's `obs`, bit for bit.

    The statistics are shared, so the normalised observations of a lane depend on the
    observations and the number of the other lanes. Its raw observations do not, nor,
    under the same actions, do its dynamics. Every step of every lane counts, also in
    masked-out rows. To evaluate, fix them by `Collector.freeze`.

    If an entry of a batch is NaN or infinite, or beyond 1.8e19, whose square is no
    float32, the statistics of that entry do not change. `info` must be a dict, and
    gains `raw_obs` and `raw_next_obs`, the observation the action was chosen from and
    the true successor, not normalised. Inside `jit` they cost nothing if they are not
    read.

    Attributes:
        env: `B` environments side by side, made by `vectorize`. Observations may be a
            pytree: its floats and images are normalised, to float32 from integers.
            Other integers are if `only` names them, or if they are all there is.
            Flags, `Discrete`, `MultiDiscrete`, `MultiBinary` and an entry `action_mask`
            stay as they are. All agents of a group share their statistics;
            they must be simultaneous.
        only: names of the parts of the observation to normalise, such as
            `("position", "sensors/speed")`; None for floats and images. The others
            stay as they are.
        epsilon: added to the variance, above 0, in squared units of the observation.
        statistics: fixed statistics, set by `freeze`; None if they are learnt.

    Raises:
        ValueError: if `env` is a single environment or one of agents that take turns,
            or `epsilon` is not above 0; while tracing, if `only` names no part of the
            observation that is a number, or if `info` is not a dict or already has one
            of the names.

    Source:
        "Updating formulae and a pairwise algorithm for computing sample variances"
        (Chan et al., 1979), eq. 2.1; prior of mean 0, variance 1 and count 1e-4 as in
        Gymnasium's `NormalizeObservation`.
    """

    only: Sequence[str] | None = struct.field(pytree_node=False, default=None)

    for_agents = "simultaneous"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "only", running_stats.names("only", self.only))

    @property
    def observation_space(self) -> AnySpace:
        """Space of one lane's observation: unbounded where it is normalised."""
        state, obs = self._shapes()
        space, mean = as_space(self.env.observation_space), state.statistics.value.mean
        return running_stats.normalized_space(space, mean, obs)

    @property
    def observation_spaces(self) -> dict[str, AnySpace]:
        """Space of one agent's observation, by group: unbounded where normalised."""
        state, obs = self._shapes()
        mean = state.statistics.value.mean
        return {
            name: running_stats.normalized_space(space, mean[name], obs[name], 2)
            for name, space in super().observation_spaces.items()
        }

    @property
    def learns(self) -> bool:
        """Whether observations depend on statistics that are not fixed yet."""
        return self.statistics is None or super().learns

    def reset(self, keys: chex.PRNGKey) -> tuple[NormalizeState, ArrayTree]:
        """Starts an episode in every lane, and the statistics: `(state, obs)`."""
        env_state, raw_obs = self.env.reset(keys)
        space = as_space(self.env.observation_space)
        prior = running_stats.prior(
            raw_obs, self._num_axes, space=space, only=self.only
        )
        statistics = self._update(prior, raw_obs)
        state = NormalizeState(env_state, raw_obs, Shared(statistics))
        return state, self._normalize(statistics, raw_obs)

    def step(
        self, keys: chex.PRNGKey, state: NormalizeState, action: ArrayTree
    ) -> EnvStep:
        """Takes one step in every lane, without auto-reset."""
        result = self.env.step(keys, state.env_state, action)
        # Update before normalizing: `next_obs` must be the next row's `obs`, bit for
        # bit.
        statistics = self._update(state.statistics.value, result.obs)
        raw, info = {"raw_obs": state.memory, "raw_next_obs": result.obs}, result.info
        if has_agents(self.env):
            info = info.replace(env=with_names(info.env, raw))
        else:
            info = with_names(info, raw)
        return result.replace(
            state=NormalizeState(result.state, result.obs, Shared(statistics)),
            obs=self._normalize(statistics, result.obs),
            info=info,
        )

    def reset_done(
        self, key_fn: Callable[[LaneIndex], chex.PRNGKey], done: jax.Array, lanes: Lanes
    ) -> Lanes:
        """Starts a new episode in the lanes whose episode is over."""
        state = lanes.state
        # The environment inside knows raw observations only.
        inner = lanes._replace(state=state.env_state, obs=state.memory)
        inner = self.env.reset_done(key_fn, done, inner)
        statistics = self._update(state.statistics.value, inner.obs, done)
        initial_obs = self._normalize(statistics, inner.obs)
        return inner._replace(
            state=NormalizeState(inner.state, inner.obs, Shared(statistics)),
            # Other lanes keep their bits: their observations were normalized before.
            obs=trees.select(done, initial_obs, lanes.obs),
        )

    @property
    def _num_axes(self) -> int:
        """Leading axes that share statistics: lanes, and the agents of a group."""
        return 2 if has_agents(self.env) else 1

    def normalize_obs(self, obs: ArrayTree) -> ArrayTree:
        """Normalises raw observations of frozen environments, such as one of a robot.

        Args:
            obs: one observation of the wrapped environment, or a batch of them.

        Raises:
            ValueError: if the statistics are not fixed, or `obs` has another shape.
        """
        if self.statistics is None:
            raise ValueError(NOT_FROZEN)
        raw = jax.tree.map(jnp.asarray, super().normalize_obs(obs))
        return self._normalize(self.statistics, raw)

    def _update(self, old: Statistics, raw: ArrayTree, flag: Any = None) -> Statistics:
        """Updates the statistics with the lanes in `flag`, unless they are fixed."""
        num_axes = self._num_axes
        return self.statistics or running_stats.updated(old, raw, num_axes, flag=flag)

    def _normalize(self, statistics: Statistics, raw: ArrayTree) -> ArrayTree:
        return statistics.normalize(raw, self.epsilon)


class NormalizeReward(_Normalizer):
    """Divides rewards by the standard deviation of the discounted returns seen so far.

        reward = raw / sqrt(var(R) + epsilon),   R_t = γ R_{t-1} + raw_t

    within an episode. The mean is not subtracted, so the sign of a reward stays.
    `episode_return`, and with it all statistics, are those of raw rewards. The
    statistics are shared as in `NormalizeObs`. `info` must be a dict, and gains
    `raw_reward`, `[B]` float32.

    Attributes:
        env: `B` environments side by side, made by `vectorize`.
        gamma: γ, the learner's discount per step, in [0, 1].
        epsilon: added to the variance, above 0, in squared reward.
        statistics: fixed statistics, set by `freeze`; None if they are learnt.

    Raises:
        ValueError: if `env` is a single environment, if `gamma` is outside [0, 1] or
            `epsilon` not above 0; while tracing, if `info` is not a dict or already has
            a `raw_reward`.

    Source:
        "Implementation Matters in Deep Policy Gradients" (Engstrom et al.), section 3,
        arXiv:2005.12729; prior as in Gymnasium's `NormalizeReward`.
    """

    gamma: float = struct.field(pytree_node=False, default=0.99)

    for_agents = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction("gamma", self.gamma)

    def reset(self, keys: chex.PRNGKey) -> tuple[NormalizeState, ArrayTree]:
        """Starts an episode in every lane, and the statistics: `(state, obs)`."""
        env_state, obs = self.env.reset(keys)
        discounted = jnp.zeros((self.num_envs,), jnp.float32)
        statistics = self.statistics or running_stats.prior(discounted)
        return NormalizeState(env_state, discounted, Shared(statistics)), obs

    def step(
        self, keys: chex.PRNGKey, state: NormalizeState, action: ArrayTree
    ) -> EnvStep:
        """Takes one step in every lane, without auto-reset."""
        result = self.env.step(keys, state.env_state, action)
        # The return so far, not the one to come, which nobody knows at this step.
        discounted = self.gamma * state.memory + result.reward
        old = state.statistics.value
        statistics = self.statistics or running_stats.updated(old, discounted)
        # What a wrapper inside scaled is not the raw reward.
        raw = result.reward if result.raw_reward is None else result.raw_reward
        return result.replace(
            state=NormalizeState(result.state, discounted, Shared(statistics)),
            reward=result.reward / jnp.sqrt(statistics.var + self.epsilon),
            raw_reward=raw,
            info=with_names(result.info, {"raw_reward": raw}),
        )

    def reset_done(
        self, key_fn: Callable[[LaneIndex], chex.PRNGKey], done: jax.Array, lanes: Lanes
    ) -> Lanes:
        """Starts a new episode in the lanes whose episode is over."""
        state = lanes.state
        inner = self.env.reset_done(key_fn, done, lanes._replace(state=state.env_state))
        # The sum belongs to the episode, the statistics to all of them.
        discounted = jnp.where(done, 0.0, state.memory)
        return inner._replace(
            state=state.replace(env_state=inner.state, memory=discounted)
        )

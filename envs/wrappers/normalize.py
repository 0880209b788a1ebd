"""`NormalizeObs`, `NormalizeReward`: normalize by running statistics of all lanes.

`NormalizeHostEnv` also uses `Statistics`, the running mean and variance.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.base import checks, trees
from rollout.envs.multi_agent import has_agents
from rollout.envs.spaces import (
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    as_space,
    is_mask,
    one_of,
    space_of,
)
from rollout.envs.types import AnySpace, ArrayTree, EnvStep, LaneIndex, Lanes, Shared
from rollout.envs.wrappers.wrapper import VectorWrapper, with_names

_PRIOR_COUNT = 1e-4  # as in Gymnasium's `RunningMeanStd`
NOT_FROZEN = (
    "`normalize_obs` needs fixed statistics: call it on `collector.freeze(carry).env`."
)


class Statistics(struct.PyTreeNode, kw_only=True):
    """Mean and variance of every entry of a value, without a lane axis.

    Attributes:
        mean: `[...]` float, mean, in the structure of one lane's value.
        var: `[...]` float, population variance, in the same structure.
        count: `()` float32, number of values. The count saturates after 2^24 batches;
            new batches then have a slightly larger weight than old batches.
    """

    mean: ArrayTree
    var: ArrayTree
    count: jax.Array  # ()

    def normalize(
        self, raw: ArrayTree, epsilon: float = 1e-8, xp: Any = jnp
    ) -> ArrayTree:
        """Normalizes values; leaves without statistics are unchanged.

        Args:
            raw: one value, or a batch with any number of leading axes.
            epsilon: constant added to the variance.
            xp: array module: `jnp`, or NumPy for NumPy statistics.

        Returns:
            `(raw - mean) / sqrt(var + epsilon)`, with the dtypes of `NormalizeObs`.

        Raises:
            ValueError: if the last axes of a leaf differ from the shape of its mean.
        """

        def normalize(mean: jax.Array, var: jax.Array, x: jax.Array) -> jax.Array:
            if mean is None:
                return x
            axes = tuple(range(x.ndim - mean.ndim))
            if x.shape[len(axes) :] != mean.shape:
                raise ValueError(
                    f"`raw` must have the shape {mean.shape} of the mean in the last "
                    f"axes, got {x.shape}."
                )
            centered = x.astype(mean.dtype) - xp.expand_dims(mean, axes)
            scale = xp.expand_dims(xp.sqrt(var + epsilon), axes)
            return (centered / scale).astype(float_dtype(x))

        trees = self.mean, self.var, raw
        return jax.tree.map(normalize, *trees, is_leaf=lambda x: x is None)


def names(name: str, value: Any) -> tuple[str, ...] | None:
    """Validates an option with names of parts of a tree; None stands for all parts."""
    if value is None:
        return None
    if isinstance(value, str) or not all(isinstance(x, str) for x in value):
        raise ValueError(
            f'`{name}` must be names, such as ("position", "speed"), got {value!r}.'
        )
    return tuple(value)


def prior(
    value: ArrayTree,
    num_axes: int = 1,
    *,
    space: AnySpace | None = None,
    only: Collection[str] | None = None,
    xp: Any = jnp,
) -> Statistics:
    """Returns the initial statistics for values like `value`, `[B, ...]`.

    Leaves without normalization have statistics None. Bools, `Discrete`,
    `MultiDiscrete`, `MultiBinary` and an `action_mask` never have statistics, because
    they are labels rather than quantities. Other integers have statistics if they are
    an image, if `only` names them, or if the value has a single leaf.

    Args:
        value: any pytree of batches.
        num_axes: number of leading batch axes.
        space: space of one entry of the batch; None for floats.
        only: names of the parts that have statistics; None for floats and images.
        xp: array module: `jnp`, or NumPy for NumPy statistics.

    Raises:
        ValueError: if `only` contains a name for which no leaf can have statistics.
    """
    leaves, structure = jax.tree.flatten_with_path(value)
    spaces = _spaces(space, len(leaves))
    numeric, shapes = [], []
    for (path, x), part in zip(leaves, spaces, strict=True):
        name, part = (
            jax.tree_util.keystr(path, simple=True, separator="/"),
            one_of(part),
        )
        is_wanted = len(leaves) == 1 or _is_float(x) or _is_image(part)
        if only is not None:
            # A name selects its whole subtree; "speed/" does not match "speeds/".
            is_wanted = f"{name}/".startswith(tuple(f"{x}/" for x in only))
        # Labels and flags are not quantities, so they are not normalized.
        is_label = isinstance(part, Discrete | MultiDiscrete | MultiBinary)
        is_number = x.dtype != bool and not is_label and not is_mask(path)
        numeric += [name] if is_number else []
        # Half precision is not precise enough for statistics.
        dtype = jnp.promote_types(float_dtype(x), jnp.float32)
        shapes.append((x.shape[num_axes:], dtype) if is_number and is_wanted else None)
    for name in only or ():
        if not any(f"{path}/".startswith(f"{name}/") for path in numeric):
            raise ValueError(
                "`only` must name numeric parts of the observation "
                f"({', '.join(numeric) or 'none'}), got {name}."
            )
    mean, var = (
        structure.unflatten([leaf and xp.full(leaf[0], x, leaf[1]) for leaf in shapes])
        for x in (0.0, 1.0)
    )
    return Statistics(mean=mean, var=var, count=xp.float32(_PRIOR_COUNT))


def updated(
    old: Statistics,
    value: ArrayTree,
    num_axes: int = 1,
    xp: Any = jnp,
    *,
    flag: Any = None,
) -> Statistics:
    """Updates the statistics with the batch `value`, `[B, ...]`.

    The count grows by the number of rows B, even if the batch has more axes. The mean
    and variance of an entry are unchanged if a value of the batch is not finite.

    Args:
        old: current statistics.
        value: any pytree of batches.
        num_axes: number of leading batch axes.
        xp: array module: `jnp`, or NumPy for NumPy statistics.
        flag: `[B]` bool, True for the lanes to include; None for all lanes.
    """
    num_new: Any = jax.tree.leaves(value)[0].shape[0]
    if flag is not None:
        num_new = xp.sum(flag, dtype=np.float32)
    count = old.count + num_new
    # Use weights in [0, 1], since sums would grow with the count.
    w_old, w_new = old.count / count, num_new / count

    def update(mean: Any, var: Any, x: Any) -> tuple[Any, Any]:
        if mean is None:
            return None, None
        x, axes = x.astype(mean.dtype), tuple(range(num_axes))
        if flag is None:
            delta, batch_var = xp.mean(x, axes) - mean, xp.var(x, axes)
        else:
            # Deviations from the old mean, which is close, need only one pass.
            is_counted = flag.reshape(-1, *[1] * (x.ndim - 1))
            x = xp.where(is_counted, x - xp.expand_dims(mean, axes), 0)
            num_values = xp.maximum(num_new, 1) * math.prod(x.shape[1:num_axes])
            delta = xp.sum(x, axes) / num_values
            batch_var = xp.sum(xp.square(x), axes) / num_values - xp.square(delta)
        new_var = w_old * var + w_new * batch_var + xp.square(delta) * w_old * w_new
        new_mean = mean + delta * w_new
        # A single non-finite value makes the variance NaN or infinite.
        is_finite = xp.isfinite(new_var)
        return xp.where(is_finite, new_mean, mean), xp.where(is_finite, new_var, var)

    means, structure = jax.tree.flatten(old.mean, is_leaf=lambda x: x is None)
    trees = structure.flatten_up_to(old.var), structure.flatten_up_to(value)
    pairs = [update(*x) for x in zip(means, *trees, strict=True)]
    mean, var = (structure.unflatten(x) for x in zip(*pairs, strict=True))
    return Statistics(mean=mean, var=var, count=count)


def normalized_space(
    space: AnySpace, mean: ArrayTree, obs: ArrayTree, num_axes: int = 1
) -> AnySpace:
    """Returns the space of normalized observations.

    The space of a leaf without a mean is unchanged.

    Args:
        space: space of one raw observation.
        mean: `mean` of the `Statistics` of the observations.
        obs: `[B, ...]`, normalized observations, or their shapes and dtypes.
        num_axes: number of leading batch axes.
    """
    leaves, structure = jax.tree.flatten(obs)
    means = structure.flatten_up_to(mean)
    parts = [
        jax.ShapeDtypeStruct(x.shape[num_axes:], x.dtype)
        if mean is not None or part is None
        else part
        for x, mean, part in zip(
            leaves, means, _spaces(space, len(leaves)), strict=True
        )
    ]
    return space_of(structure.unflatten(parts))


def _spaces(space: AnySpace | None, num_leaves: int) -> list[AnySpace | None]:
    """Returns the space of each leaf; None if the space is unknown."""
    spaces = [] if space is None else space.leaves()
    # A custom space may not define `leaves`.
    return spaces if len(spaces) == num_leaves else [None] * num_leaves


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _is_image(space: AnySpace | None) -> bool:
    if not isinstance(space, Box):
        return False
    return np.dtype(space.dtype) == np.uint8 and len(space.shape) >= 2


def float_dtype(x: jax.Array) -> jnp.dtype:
    """Returns the dtype of a normalized leaf."""
    return x.dtype if _is_float(x) else jnp.dtype(jnp.float32)


class NormalizeState(struct.PyTreeNode):
    """State of `NormalizeObs` or `NormalizeReward`.

    Attributes:
        env_state: `[B, ...]`, state of the wrapped environment.
        memory: for `NormalizeObs`, `[B, ...]`, the current raw observation; for
            `NormalizeReward`, `[B]` float32, the discounted sum of rewards in the
            episode so far.
        statistics: `Statistics` of the observations or discounted sums of all lanes.
    """

    env_state: ArrayTree  # [B, ...]
    memory: ArrayTree  # [B, ...]
    statistics: Shared


class _Normalizer(VectorWrapper, kw_only=True):
    """Base class of both wrappers, with running or fixed statistics."""

    epsilon: float = struct.field(pytree_node=False, default=1e-8)
    statistics: Statistics | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_positive("epsilon", self.epsilon)

    def freeze(self, env_state: ArrayTree) -> Self:
        """Fixes the statistics of this and all inner wrappers; see `Collector.freeze`.

        Raises:
            ValueError: if `env_state` does not belong to the same wrappers in the same
                order, around environments with the same observations.
        """
        state = outermost(env_state)
        new = state.statistics.value
        # Trace the reset without running it, since there may be many environments.
        old = self._shapes()[0].statistics.value
        text = "`env_state` must have statistics of the same wrappers in the same order"
        checks.check_same_types(text, old, new)
        inner = super().freeze(state.env_state)
        # The statistics are leaves, so every frozen environment runs the same program.
        return inner.replace(statistics=new)

    def _shapes(self) -> tuple[Any, Any]:
        """Returns the shapes and dtypes of `(state, obs)` of a reset."""
        return jax.eval_shape(
            lambda: self.reset(jax.random.split(jax.random.key(0), self.num_envs))
        )


def outermost(env_state: ArrayTree) -> NormalizeState:
    """Returns the state of the outermost normalizing wrapper."""
    is_state = lambda x: isinstance(x, NormalizeState)  # noqa: E731
    for state in jax.tree.leaves(env_state, is_leaf=is_state):
        if is_state(state):
            return state
    raise ValueError(
        "`env_state` must be the `carry.env_state` of a collector with the same "
        "wrappers, got a state without statistics."
    )


class NormalizeObs(_Normalizer):
    """Normalizes observations by the mean and variance of all observations so far.

        obs = (raw - mean) / sqrt(var + epsilon)

    All lanes share one mean and one variance. Every observation updates the statistics
    exactly once, before it is normalized: the true successors at each step, and the
    first observations of episodes at their reset. A reset does not change any other
    lane, so within an episode `next_obs` equals the next row's `obs`, bit for bit.

    Normalized observations of a lane depend on the observations and the number of all
    lanes, because the statistics are shared. Raw observations, and the dynamics under
    the same actions, are independent of other lanes. Every step of every lane updates
    the statistics, even if its row is masked out. For evaluation, fix the statistics
    with `Collector.freeze`.

    If an entry of a batch is NaN, infinite or beyond 1.8e19, whose square overflows
    float32, the statistics of that entry do not change. `info` must be a dict. The
    wrapper adds the entries `raw_obs` and `raw_next_obs`: the current observation and
    the true successor before normalization. They cost nothing inside `jit` if they are
    not read.

    Attributes:
        env: `B` parallel environments from `vectorize`. Observations may be a pytree:
            floats and images are normalized, and integers become float32. Other
            integers are normalized if `only` names them, or if the observation has a
            single leaf. Bools, `Discrete`, `MultiDiscrete`, `MultiBinary` and an entry
            `action_mask` are unchanged. Several agents must be simultaneous; all agents
            of a group share the statistics.
        only: names of the parts of the observation to normalize, for example
            `("position", "sensors/speed")`; None for floats and images. All remaining
            parts are unchanged.
        epsilon: constant added to the variance, above 0, in squared units of the
            observation.
        statistics: fixed statistics, set by `freeze`; None for running statistics.

    Raises:
        ValueError: if `env` is a single environment or has turn-based agents, or if
            `epsilon` is not above 0; while tracing, if `only` contains a name that does
            not belong to a numeric part, or if `info` is not a dict or already contains
            an added entry.

    Source:
        "Updating formulae and a pairwise algorithm for computing sample variances"
        (Chan et al., 1979), eq. 2.1; prior of mean 0, variance 1 and count 1e-4 as in
        Gymnasium's `NormalizeObservation`.
    """

    only: Sequence[str] | None = struct.field(pytree_node=False, default=None)

    for_agents = "simultaneous"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "only", names("only", self.only))

    @property
    def observation_space(self) -> AnySpace:
        """Space of one lane's observation; normalized parts are unbounded."""
        state, obs = self._shapes()
        space, mean = as_space(self.env.observation_space), state.statistics.value.mean
        return normalized_space(space, mean, obs)

    @property
    def observation_spaces(self) -> dict[str, AnySpace]:
        """Space of one agent's observation, by group; unbounded if normalized."""
        state, obs = self._shapes()
        mean = state.statistics.value.mean
        return {
            name: normalized_space(space, mean[name], obs[name], 2)
            for name, space in super().observation_spaces.items()
        }

    @property
    def learns(self) -> bool:
        """Whether observations depend on running (not fixed) statistics."""
        return self.statistics is None or super().learns

    def reset(self, keys: chex.PRNGKey) -> tuple[NormalizeState, ArrayTree]:
        """Starts an episode in every lane and initializes the statistics."""
        env_state, raw_obs = self.env.reset(keys)
        space = as_space(self.env.observation_space)
        initial = prior(raw_obs, self._num_axes, space=space, only=self.only)
        statistics = self._update(initial, raw_obs)
        state = NormalizeState(env_state, raw_obs, Shared(statistics))
        return state, self._normalize(statistics, raw_obs)

    def step(
        self, keys: chex.PRNGKey, state: NormalizeState, action: ArrayTree
    ) -> EnvStep:
        """Takes one step in every lane, without auto-reset."""
        result = self.env.step(keys, state.env_state, action)
        # Update the statistics before normalizing: `next_obs` must equal the next row's
        # `obs`, bit for bit.
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
        """Starts new episodes in the done lanes."""
        state = lanes.state
        # The wrapped environment takes raw observations.
        inner = lanes._replace(state=state.env_state, obs=state.memory)
        inner = self.env.reset_done(key_fn, done, inner)
        statistics = self._update(state.statistics.value, inner.obs, done)
        initial_obs = self._normalize(statistics, inner.obs)
        return inner._replace(
            state=NormalizeState(inner.state, inner.obs, Shared(statistics)),
            # Keep the normalized observations of all other lanes, bit for bit.
            obs=trees.select(done, initial_obs, lanes.obs),
        )

    @property
    def _num_axes(self) -> int:
        """Number of leading axes that share statistics: lanes and agents of a group."""
        return 2 if has_agents(self.env) else 1

    def normalize_obs(self, obs: ArrayTree) -> ArrayTree:
        """Normalizes raw observations with fixed statistics.

        Use it for observations from another source, for example a real robot.

        Args:
            obs: an observation of the wrapped environment, or a batch of observations.

        Raises:
            ValueError: if the statistics are not fixed, or if `obs` has a wrong shape.
        """
        if self.statistics is None:
            raise ValueError(NOT_FROZEN)
        raw = jax.tree.map(jnp.asarray, super().normalize_obs(obs))
        return self._normalize(self.statistics, raw)

    def _update(self, old: Statistics, raw: ArrayTree, flag: Any = None) -> Statistics:
        """Updates the statistics with the lanes in `flag`, unless they are fixed."""
        num_axes = self._num_axes
        return self.statistics or updated(old, raw, num_axes, flag=flag)

    def _normalize(self, statistics: Statistics, raw: ArrayTree) -> ArrayTree:
        return statistics.normalize(raw, self.epsilon)


class NormalizeReward(_Normalizer):
    """Divides rewards by the standard deviation of the discounted sums of rewards.

        reward = raw / sqrt(var(R) + epsilon),   R_t = γ R_{t-1} + raw_t

    The sum R is reset at the start of each episode. The mean is not subtracted, so
    rewards keep their sign. `episode_return` and all episode statistics are sums of raw
    rewards. All lanes share the variance, as in `NormalizeObs`. `info` must be a dict.
    The wrapper adds the entry `raw_reward`, `[B]` float32.

    Attributes:
        env: `B` parallel environments from `vectorize`.
        gamma: γ, discount per step of the learner, in [0, 1].
        epsilon: constant added to the variance, above 0, in squared reward.
        statistics: fixed statistics, set by `freeze`; None for running statistics.

    Raises:
        ValueError: if `env` is a single environment, if `gamma` is outside [0, 1], or
            if `epsilon` is not above 0; while tracing, if `info` is not a dict or
            already contains `raw_reward`.

    Source:
        "Implementation Matters in Deep Policy Gradients" (Engstrom et al.), section 3,
        arXiv:2005.12729; prior as in Gymnasium's `NormalizeReward`.
    """

    gamma: float = struct.field(pytree_node=False, default=0.99)

    for_agents = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_fraction("gamma", self.gamma)

    def reset(self, keys: chex.PRNGKey) -> tuple[NormalizeState, ArrayTree]:
        """Starts an episode in every lane and initializes the statistics."""
        env_state, obs = self.env.reset(keys)
        discounted = jnp.zeros((self.num_envs,), jnp.float32)
        statistics = self.statistics or prior(discounted)
        return NormalizeState(env_state, discounted, Shared(statistics)), obs

    def step(
        self, keys: chex.PRNGKey, state: NormalizeState, action: ArrayTree
    ) -> EnvStep:
        """Takes one step in every lane, without auto-reset."""
        result = self.env.step(keys, state.env_state, action)
        # Accumulate past rewards: the return of future rewards is not available yet.
        discounted = self.gamma * state.memory + result.reward
        old = state.statistics.value
        statistics = self.statistics or updated(old, discounted)
        # If a wrapped environment scales rewards, `raw_reward` has the raw reward.
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
        """Starts new episodes in the done lanes."""
        state = lanes.state
        inner = self.env.reset_done(key_fn, done, lanes._replace(state=state.env_state))
        # Reset the sum at episode boundaries, but keep the statistics.
        discounted = jnp.where(done, 0.0, state.memory)
        return inner._replace(
            state=state.replace(env_state=inner.state, memory=discounted)
        )

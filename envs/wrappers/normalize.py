"""Observations on a common scale: running mean and variance over all lanes."""

from collections.abc import Callable
from typing import Self

import chex
import jax
import jax.numpy as jnp
from flax import struct

from envs import keys as env_keys
from envs.types import EnvStep, Lanes, Space, VectorEnv
from envs.wrappers.spaces import unbounded

_PRIOR_COUNT = 1e-4  # as Gymnasium's RunningMeanStd


@struct.dataclass(kw_only=True)
class ObsStatistics:
    """Mean and variance of every entry of an observation; no lane axis.

    Attributes:
        mean: `[...]` float, in the structure of one observation.
        var: `[...]` float, population variance, in the same structure.
        count: `()` float32, observations seen. After 2^24 batches it no longer grows,
            and the newest batches weigh a little more than the old ones.
    """

    mean: chex.ArrayTree
    var: chex.ArrayTree
    count: jax.Array  # ()


@struct.dataclass(kw_only=True)
class NormalizeState:
    """State of `NormalizeObs`.

    Attributes:
        env_state: `[B, ...]`, state of the wrapped environment.
        raw_obs: `[B, ...]`, observation that the next action will be chosen from, as
            the wrapped environment gave it.
        statistics: shared by all lanes, so its leaves have no lane axis: the one
            exception in an environment state.
    """

    env_state: chex.ArrayTree  # [B, ...]
    raw_obs: chex.ArrayTree  # [B, ...]
    statistics: ObsStatistics


@struct.dataclass
class NormalizeObs:
    """Normalises observations with the mean and variance of all those seen so far.

        obs = (raw - mean) / sqrt(var + epsilon)

    One mean and one variance serve all lanes. They are updated with the first
    observations at `reset`, and at each step with the true successors, which are then
    normalised with the new statistics. The observation of an auto-reset is normalised
    with the current statistics and not counted, and no other lane changes. So within an
    episode `next_obs` is the next row's `obs`, bit for bit.

    The statistics are shared, so the normalised observations of a lane depend on what
    the other lanes saw, and on how many there are. Its raw observations do not, nor,
    under the same actions, do its dynamics. Every step of every lane counts, even where
    the row is void (`mask` False). To evaluate, `freeze` first.

    `info` must be a dict, and gains `raw_obs` and `raw_next_obs`, the observation the
    action was chosen from and the true successor, not normalised. Inside `jit`
    they cost nothing if they are not read.

    Attributes:
        env: `B` environments side by side, as `vectorize` makes them. Observations may
            be a pytree; a leaf that is not of floats becomes float32.
        epsilon: added to the variance, above 0, in squared units of the observation.
        statistics: fixed statistics, as `freeze` sets them; None if they are learnt.

    Raises:
        ValueError: if `env` is a single environment or `epsilon` is not above 0; while
            tracing, if `info` is not a dict or already has one of the two names.

    Source:
        "Updating formulae and a pairwise algorithm for computing sample variances"
        (Chan et al., 1979), eq. 2.1; prior of mean 0, variance 1 and count 1e-4 as in
        Gymnasium's `NormalizeObservation`.
    """

    env: VectorEnv
    epsilon: float = struct.field(pytree_node=False, default=1e-8)
    statistics: ObsStatistics | None = None

    def __post_init__(self) -> None:
        # A placeholder that jax builds pytrees with has no `step`.
        if hasattr(self.env, "step") and not hasattr(self.env, "num_envs"):
            raise ValueError(
                "`env` must be a `VectorEnv` as `envs.vectorize` makes it, got "
                f"{type(self.env).__name__} without `num_envs`."
            )
        if not self.epsilon > 0:
            raise ValueError(f"`epsilon` must be above 0, got {self.epsilon!r}.")

    @property
    def num_envs(self) -> int:
        """B, the number of lanes."""
        return self.env.num_envs

    @property
    def observation_space(self) -> Space:
        """Space of one lane's observation: unbounded."""
        lane = jnp.arange(self.num_envs)
        obs = jax.eval_shape(
            lambda: self.env.reset(env_keys.fold_in(jax.random.key(0), lane))[1]
        )
        return unbounded(
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], _float_dtype(x)), obs
            )
        )

    @property
    def action_space(self) -> Space:
        """Space of one lane's action."""
        return self.env.action_space

    def freeze(self, env_state: NormalizeState) -> Self:
        """Fixes the statistics, to evaluate with those of training.

        Args:
            env_state: state of this environment, `carry.env_state`.

        Returns:
            The same environment, which uses the statistics of `env_state` and never
            changes them, also after a `reset`. A carry of this one works with it.
        """
        return self.replace(statistics=env_state.statistics)

    def reset(self, keys: chex.PRNGKey) -> tuple[NormalizeState, chex.ArrayTree]:
        """Starts an episode in every lane, and the statistics: `(state, obs)`."""
        env_state, raw_obs = self.env.reset(keys)
        statistics = self._take_in(_prior(raw_obs), raw_obs)
        state = NormalizeState(
            env_state=env_state, raw_obs=raw_obs, statistics=statistics
        )
        return state, self._normalize(statistics, raw_obs)

    def step(
        self, keys: chex.PRNGKey, state: NormalizeState, action: chex.ArrayTree
    ) -> EnvStep:
        """Takes one step in every lane, without auto-reset."""
        result = self.env.step(keys, state.env_state, action)
        statistics = self._take_in(state.statistics, result.obs)
        raw = {"raw_obs": state.raw_obs, "raw_next_obs": result.obs}
        return result.replace(
            state=NormalizeState(
                env_state=result.state, raw_obs=result.obs, statistics=statistics
            ),
            obs=self._normalize(statistics, result.obs),
            info=_merge(raw, result.info),
        )

    def reset_done(
        self, key_fn: Callable[[jax.Array], chex.PRNGKey], done: jax.Array, lanes: Lanes
    ) -> Lanes:
        """Starts a new episode in the lanes whose episode is over."""
        state = lanes.state
        inner = Lanes(
            episode_key=lanes.episode_key, state=state.env_state, obs=state.raw_obs
        )
        inner = self.env.reset_done(key_fn, done, inner)
        fresh = self._normalize(state.statistics, inner.obs)
        return Lanes(
            episode_key=inner.episode_key,
            state=state.replace(env_state=inner.state, raw_obs=inner.obs),
            obs=env_keys.select(done, fresh, lanes.obs),
        )

    def _take_in(self, old: ObsStatistics, raw: chex.ArrayTree) -> ObsStatistics:
        return _updated(old, raw) if self.statistics is None else self.statistics

    def _normalize(
        self, statistics: ObsStatistics, raw: chex.ArrayTree
    ) -> chex.ArrayTree:
        def normalize(x: jax.Array, mean: jax.Array, var: jax.Array) -> jax.Array:
            centred = x.astype(mean.dtype) - mean[None]
            scale = jnp.sqrt(var + self.epsilon)[None]
            return (centred / scale).astype(_float_dtype(x))

        return jax.tree.map(normalize, raw, statistics.mean, statistics.var)


def _prior(raw: chex.ArrayTree) -> ObsStatistics:
    def full(value: float) -> chex.ArrayTree:
        return jax.tree.map(
            lambda x: jnp.full(x.shape[1:], value, _accumulator_dtype(x)), raw
        )

    return ObsStatistics(mean=full(0.0), var=full(1.0), count=jnp.float32(_PRIOR_COUNT))


def _updated(old: ObsStatistics, raw: chex.ArrayTree) -> ObsStatistics:
    """Updates the statistics with the batch `raw`, `[B, ...]`."""
    num_new = jax.tree.leaves(raw)[0].shape[0]
    count = old.count + num_new
    # As weights, so that nothing grows with the count.
    kept, new = old.count / count, num_new / count

    def update(
        x: jax.Array, mean: jax.Array, var: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x = x.astype(mean.dtype)
        delta = jnp.mean(x, axis=0) - mean
        spread = kept * var + new * jnp.var(x, axis=0)
        return mean + delta * new, spread + jnp.square(delta) * kept * new

    pairs = jax.tree.map(update, raw, old.mean, old.var)
    mean, var = jax.tree.transpose(
        jax.tree.structure(raw), jax.tree.structure((0, 0)), pairs
    )
    return ObsStatistics(mean=mean, var=var, count=count)


def _merge(raw: dict[str, chex.ArrayTree], info: chex.ArrayTree) -> chex.ArrayTree:
    if not isinstance(info, dict):
        raise ValueError(f"`info` must be a dict, got {type(info).__name__}.")
    clash = sorted(raw.keys() & info.keys())
    if clash:
        raise ValueError(
            f"`info` must not have the names {', '.join(raw)}, got {', '.join(clash)}."
        )
    return {**raw, **info}


def _float_dtype(x: jax.Array) -> jnp.dtype:
    """Dtype of a normalised leaf."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.dtype(jnp.float32)


def _accumulator_dtype(x: jax.Array) -> jnp.dtype:
    """Dtype of the statistics of a leaf: half precision cannot hold a running mean."""
    return jnp.promote_types(_float_dtype(x), jnp.float32)

"""Running statistics of observations, as a part of an agent's parameters.

The recipes use these functions for `Config(normalize_observations=True)`. The entry
`obs_stats` of the parameters contains the statistics, so evaluation, `predict`,
checkpoints and exported agents use them without a wrapper. Without this entry, every
function returns its input. Replay buffers store raw observations.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout.envs.spaces import Box, as_space, is_mask, one_of
from rollout.envs.types import AnySpace, ArrayTree
from rollout.networks import image_axes, is_bytes

OBS_STATS = "obs_stats"
MAX_NORMALIZED = 10.0  # normalized observations are clipped, as by VecNormalize
_EPSILON = 1e-8  # added to the variance


def init_obs_stats(space: AnySpace, cnn: bool | None = None) -> dict[str, Any]:
    """Initializes the statistics: mean 0, variance 1, count 0.

    `Box` parts have statistics. Images, flags, integers of `Discrete` and
    `MultiDiscrete`, uint8 from 0 to 255 and an `action_mask` have none.

    Args:
        space: space of a single observation.
        cnn: option of `rollout.networks.Encoder`, which decides which parts are images.

    Returns:
        `{"obs_stats": {"mean", "var", "count"}}`: `mean` and `var` have the structure
        of an observation, with None for parts without statistics; `count` is `()`.
    """
    space = as_space(space)
    obs = jax.eval_shape(space.sample, jax.random.key(0))
    leaves, structure = jax.tree.flatten_with_path(obs)

    def init(path: Any, part: AnySpace, value: float) -> jax.Array | None:
        box = one_of(part)
        has_stats = isinstance(box, Box) and np.dtype(box.dtype) != bool
        if not has_stats or is_mask(path) or is_bytes(box) or image_axes(box, cnn):
            return None
        return jnp.full(part.shape, value, jnp.float32)

    pairs = list(zip(leaves, space.leaves(), strict=True))
    mean, var = (
        structure.unflatten([init(path, part, value) for (path, _), part in pairs])
        for value in (0.0, 1.0)
    )
    return {OBS_STATS: {"mean": mean, "var": var, "count": jnp.zeros(())}}


def split_obs_stats(params: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Separates the trainable parameters from the statistics.

    Returns:
        The parameters without the entry `obs_stats`, and a dict with only this entry,
        which is empty without normalization. `params | obs_stats` joins them.
    """
    obs_stats = {key: x for key, x in params.items() if key == OBS_STATS}
    return {key: x for key, x in params.items() if key != OBS_STATS}, obs_stats


def normalize_obs(params: Mapping[str, Any], obs: ArrayTree) -> ArrayTree:
    """Normalizes raw observations by the statistics in `params`.

        clip((obs - mean) / sqrt(var + 1e-8), -10, 10)

    Args:
        params: parameters of an agent, or the statistics of `split_obs_stats`.
        obs: `[..., *shape]`, raw observations. Entries of a dict may be missing.

    Returns:
        `[..., *shape]` float32; parts without statistics are unchanged.
    """
    if OBS_STATS not in params:
        return obs
    stats = params[OBS_STATS]

    def normalize(mean: Any, var: Any, x: Any) -> Any:
        if mean is None:
            return x
        axes = tuple(range(jnp.ndim(x) - mean.ndim))
        scale = jnp.expand_dims(jax.lax.rsqrt(var + _EPSILON), axes)
        normalized = (x - jnp.expand_dims(mean, axes)) * scale
        return jnp.clip(normalized, -MAX_NORMALIZED, MAX_NORMALIZED)

    mean, var = (_like(stats[name], obs) for name in ("mean", "var"))
    return jax.tree.map(normalize, mean, var, obs, is_leaf=lambda x: x is None)


def update_obs_stats(
    obs_stats: Mapping[str, Any], obs: ArrayTree, mask: jax.Array
) -> dict[str, Any]:
    """Updates the statistics with the valid rows of a trajectory.

    The result is the mean and variance of all valid rows so far, up to rounding. If a
    value of a batch is not finite, the statistics of its entry do not change.

    Args:
        obs_stats: statistics of `split_obs_stats`.
        obs: `[T, B, *shape]`, raw observations.
        mask: `[T, B]` bool, which rows are valid.

    Source:
        "Updating formulae and a pairwise algorithm for computing sample variances"
        (Chan et al., 1979), eq. 2.1.
    """
    if OBS_STATS not in obs_stats:
        return dict(obs_stats)
    stats, axes = obs_stats[OBS_STATS], tuple(range(mask.ndim))
    num_rows = mask.sum(dtype=jnp.float32)
    count = stats["count"] + num_rows
    # Weights in [0, 1] instead of sums, which would grow with the count.
    weight = num_rows / jnp.maximum(count, 1.0)

    def update(mean: Any, var: Any, x: Any) -> tuple[Any, Any]:
        if mean is None:
            return None, None
        is_valid = mask.reshape(*mask.shape, *[1] * mean.ndim)

        def batch_mean(x: jax.Array) -> jax.Array:
            total = jnp.where(is_valid, x, 0.0).sum(axes, dtype=jnp.float32)
            return total / jnp.maximum(num_rows, 1.0)

        # Two passes: the first batch may lie far from the initial mean of 0.
        new_mean = batch_mean(x)
        new_var = batch_mean((x - jnp.expand_dims(new_mean, axes)) ** 2)
        delta = new_mean - mean
        new_var = (1 - weight) * (var + weight * delta**2) + weight * new_var
        new_mean = mean + weight * delta
        is_finite = jnp.isfinite(new_var)
        return jnp.where(is_finite, new_mean, mean), jnp.where(is_finite, new_var, var)

    means, structure = jax.tree.flatten(stats["mean"], is_leaf=lambda x: x is None)
    trees = structure.flatten_up_to(stats["var"]), structure.flatten_up_to(obs)
    pairs = [update(*x) for x in zip(means, *trees, strict=True)]
    mean, var = (structure.unflatten(x) for x in zip(*pairs, strict=True))
    return {OBS_STATS: {"mean": mean, "var": var, "count": count}}


def _like(tree: ArrayTree, obs: ArrayTree) -> ArrayTree:
    """Selects the entries of a dict that the observation has."""
    is_dict = isinstance(tree, Mapping) and isinstance(obs, Mapping)
    return {key: tree[key] for key in obs} if is_dict else tree

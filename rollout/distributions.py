"""Parametric distributions over the actions of any space.

A network outputs an array of parameters, `[..., num_params]`. `ActionDistribution`
turns it into actions, log-probabilities and entropies. Use it in a policy and in the
loss of a custom agent:

    distribution = ActionDistribution(env.action_space)
    outputs = network.apply(params, obs)  # [B, distribution.num_params]
    raw_action = distribution.sample(outputs, key)
    log_prob = distribution.log_prob(outputs, raw_action)
    action = distribution.postprocess(raw_action)

`TanhNormal` is the squashed Gaussian of SAC, for boxes.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout.envs.spaces import as_space
from rollout.envs.types import AnySpace, ArrayTree

_MASKED_LOGIT = -1e9
_MAX_VALUES = 2**24  # of an integer


@dataclasses.dataclass(frozen=True)
class ActionDistribution:
    """Independent categorical and Gaussian distributions for the parts of an action.

    Every integer of an action has a categorical distribution, and every float a
    Gaussian. Composite spaces, such as a `Dict`, have independent parts. A raw action
    has the structure of an action, but its integers count from 0 and its floats are
    unbounded; `postprocess` converts it to an action of the space. Probabilities refer
    to the raw action, so record the raw action for the loss.

    The parameters of all parts are concatenated: first logits and means in the order of
    `jax.tree.leaves`, then `num_log_stds` logarithms of standard deviations. A network
    may output these logarithms, or append them from a parameter that does not depend on
    the observation.

    Attributes:
        action_space: action space of a single environment, from `rollout.envs`,
            Gymnasium or gymnax. An integer has at most 2**24 values. A bound equal to
            the largest float of its dtype counts as infinite.

    Raises:
        ValueError: if `action_space` is not a space, if a part has no bounds, or if an
            integer has too many values.
    """

    action_space: AnySpace

    def __post_init__(self) -> None:
        space = as_space(self.action_space, "action_space")
        object.__setattr__(self, "action_space", space)
        _ = self._parts  # raises if a part has no bounds

    @functools.cached_property
    def _parts(self) -> "list[_Part]":
        return [_describe_part(part) for part in self.action_space.leaves()]

    @functools.cached_property
    def _structure(self) -> Any:
        """Structure of an action."""
        sample = lambda: self.action_space.sample(jax.random.key(0))  # noqa: E731
        return jax.tree.structure(jax.eval_shape(sample))

    @property
    def num_params(self) -> int:
        """Number of parameters: size of the last axis of the network's output."""
        return sum(part.num_outputs for part in self._parts) + self.num_log_stds

    @property
    def num_log_stds(self) -> int:
        """Number of log standard deviations, the last entries of the parameters."""
        return sum(part.num_outputs for part in self._parts if part.is_float)

    @property
    def num_mask_flags(self) -> int:
        """Number of flags of an `action_mask`: one per value of every integer."""
        return sum(int(part.num_values.sum()) for part in self._parts)

    def sample(
        self,
        params: jax.Array,
        key: chex.PRNGKey,
        action_mask: jax.Array | None = None,
    ) -> ArrayTree:
        """Samples a raw action.

        Args:
            params: `[..., num_params]` float, output of a network.
            key: one typed key.
            action_mask: `[..., num_mask_flags]` bool or int, or any shape with as many
                entries: True if a value of an integer is valid. The flags of all
                integers are concatenated. If an integer has no valid value, it is
                sampled from all values. None if all values are valid.

        Returns:
            The raw action, a pytree of `[..., *shape]` in the structure of an action.

        Raises:
            ValueError: if `params` or `action_mask` has the wrong size.
        """
        leaves = self._split(params, action_mask)
        keys = jax.random.split(key, len(leaves)) if len(leaves) > 1 else [key]
        raw_leaves = []
        for part, leaf, part_key in zip(self._parts, leaves, keys, strict=True):
            if part.is_float:
                noise = jax.random.normal(part_key, leaf.mean.shape)
                raw_leaves.append(leaf.mean + jnp.exp(leaf.log_std) * noise)
            else:
                index = jax.random.categorical(part_key, leaf.logits)
                raw_leaves.append(index.astype(jnp.int32))
        return self._structure.unflatten(raw_leaves)

    def mode(
        self, params: jax.Array, action_mask: jax.Array | None = None
    ) -> ArrayTree:
        """Returns the most likely raw action; arguments as in `sample`."""
        leaves = self._split(params, action_mask)
        pairs = zip(self._parts, leaves, strict=True)
        return self._structure.unflatten(
            [
                leaf.mean if part.is_float else jnp.argmax(leaf.logits, -1)
                for part, leaf in pairs
            ]
        )

    def log_prob(
        self,
        params: jax.Array,
        raw_action: ArrayTree,
        action_mask: jax.Array | None = None,
    ) -> jax.Array:
        """Computes the log-probability of a raw action, summed over its parts.

        Args:
            params: `[..., num_params]` float, output of a network.
            raw_action: `[..., *shape]`, result of `sample`.
            action_mask: mask with which the action was sampled.

        Returns:
            `[...]` float: a log-density if the action has floats.
        """
        leaves, total = self._split(params, action_mask), jnp.zeros(())
        raw_leaves = self._structure.flatten_up_to(raw_action)
        for part, leaf, raw in zip(self._parts, leaves, raw_leaves, strict=True):
            if part.is_float:
                std = jnp.exp(leaf.log_std)
                log_probs = jax.scipy.stats.norm.logpdf(raw, leaf.mean, std)
            else:
                logit = jnp.take_along_axis(leaf.logits, raw[..., None], -1)[..., 0]
                log_probs = logit - jax.nn.logsumexp(leaf.logits, axis=-1)
            total += _sum_entries(log_probs, part)
        return total

    def entropy(
        self, params: jax.Array, action_mask: jax.Array | None = None
    ) -> jax.Array:
        """Computes the entropy in nats, `[...]`; arguments as in `sample`."""
        leaves, total = self._split(params, action_mask), jnp.zeros(())
        for part, leaf in zip(self._parts, leaves, strict=True):
            if part.is_float:
                entropy = leaf.log_std + 0.5 * math.log(2 * math.pi * math.e)
            else:
                log_probs = jax.nn.log_softmax(leaf.logits)
                entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
            total += _sum_entries(entropy, part)
        return total

    def postprocess(self, raw_action: ArrayTree) -> ArrayTree:
        """Converts a raw action to an action of the space.

        Integers are shifted to the lower bound of the space. Floats with two finite
        bounds are scaled from [-1, 1] to the bounds, and clipped. Floats with a single
        finite bound are shifted, so that -1 becomes the lower bound or 1 the upper
        bound, and clipped. Floats without bounds do not change.

        Args:
            raw_action: `[..., *shape]`, result of `sample` or `mode`.

        Returns:
            The action, `[..., *shape]`, in the dtypes of the space.
        """
        raw_leaves = self._structure.flatten_up_to(raw_action)
        actions = []
        for part, raw in zip(self._parts, raw_leaves, strict=True):
            if part.is_float:
                scale, offset, low, high = (
                    _expand(x, jnp.ndim(raw))
                    for x in (part.scale, part.offset, part.low, part.high)
                )
                action = raw * scale + offset
                if np.isfinite([low, high]).any():
                    action = jnp.clip(action, low, high)
            else:
                action = raw + _expand(part.low, jnp.ndim(raw))
            actions.append(action.astype(part.dtype))
        return self._structure.unflatten(actions)

    def _split(self, params: jax.Array, action_mask: jax.Array | None) -> "list[_Leaf]":
        """Splits the parameters into the parts of an action."""
        if params.shape[-1] != self.num_params:
            raise ValueError(
                f"`params` must have shape [..., {self.num_params}] for "
                f"{self.action_space!r}, got {params.shape}. Give the last layer of "
                "the network `num_params` outputs."
            )
        lanes = params.shape[:-1]
        mask = self._flat_mask(action_mask, lanes)
        # A logit of -inf in float16 would make the entropy NaN.
        masked_logit = max(_MASKED_LOGIT, float(jnp.finfo(params.dtype).min) / 2)
        start, start_std, start_flag = 0, self.num_params - self.num_log_stds, 0
        leaves = []
        for part in self._parts:
            values = _slice(params, start, part.num_outputs)
            start += part.num_outputs
            if part.is_float:
                log_std = _slice(params, start_std, part.num_outputs)
                start_std += part.num_outputs
                mean, log_std = (
                    x.reshape((*lanes, *part.shape)) for x in (values, log_std)
                )
                leaves.append(_Leaf(mean=mean, log_std=log_std))
                continue
            logits = values.reshape(*lanes, *part.shape, -1)
            # Entries with fewer values have extra logits, which are never valid.
            is_value = np.arange(logits.shape[-1]) < part.num_values[..., None]
            valid = _expand(is_value, logits.ndim)
            if mask is not None:
                flag = start_flag + np.cumsum(is_value).reshape(is_value.shape) - 1
                is_valid = mask[..., flag] & valid
                # If no value is valid, ignore the mask, since sampling needs a value.
                is_valid |= valid & ~is_valid.any(-1, keepdims=True)
                logits = jnp.where(is_valid, logits, masked_logit)
            elif not is_value.all():
                logits = jnp.where(valid, logits, masked_logit)
            start_flag += int(part.num_values.sum())
            leaves.append(_Leaf(logits=logits))
        return leaves

    def _flat_mask(
        self, action_mask: jax.Array | None, lanes: tuple[int, ...]
    ) -> jax.Array | None:
        """Returns the mask as `[..., num_mask_flags]` bool, or None."""
        if action_mask is None:
            return None
        num_flags = np.size(action_mask) // max(math.prod(lanes), 1)
        if num_flags != self.num_mask_flags:
            raise ValueError(
                f"`action_mask` must have {self.num_mask_flags} flags, one for each "
                f"value of {self.action_space!r}, got {num_flags}."
            )
        return jnp.asarray(action_mask, bool).reshape(*lanes, num_flags)


@dataclasses.dataclass(frozen=True)
class TanhNormal:
    """The squashed Gaussian of SAC, over the floats of a box.

    Attributes:
        action_space: a `Box` of floats, from `rollout.envs`, Gymnasium or gymnax.

    Raises:
        ValueError: if `action_space` is not a `Box` of floats.

    Source:
        "Soft Actor-Critic Algorithms and Applications", appendix C, arXiv:1812.05905.
    """

    action_space: AnySpace

    def __post_init__(self) -> None:
        space = as_space(self.action_space, "action_space")
        is_float = jnp.issubdtype(space.dtype or int, jnp.floating)
        if not is_float or space.shape is None:
            raise ValueError(
                f"`action_space` must be a Box of floats, got {space!r}. Use DQN for a "
                "`Discrete`, or PPO for any space."
            )
        object.__setattr__(self, "action_space", space)

    @functools.cached_property
    def _part(self) -> "_Part":
        return _describe_part(self.action_space)

    @property
    def is_bounded(self) -> bool:
        """Whether all floats of an action have two finite bounds."""
        return bool(np.isfinite([self._part.low, self._part.high]).all())

    @property
    def size(self) -> int:
        """Number of floats of an action, half the number of parameters."""
        return math.prod(self.action_space.shape)

    @property
    def num_params(self) -> int:
        """Number of parameters: means, then log standard deviations."""
        return 2 * self.size

    def sample(self, params: jax.Array, key: chex.PRNGKey) -> jax.Array:
        """Samples unsquashed actions, `[..., size]`, by the reparametrization trick.

        Args:
            params: `[..., num_params]` float, output of a network. Log standard
                deviations are clipped to [-5, 2].
            key: one typed key.
        """
        mean, _ = self._mean_and_log_std(params)
        return self.transform_noise(params, jax.random.normal(key, mean.shape))

    def transform_noise(self, params: jax.Array, noise: jax.Array) -> jax.Array:
        """Transforms standard normal noise to unsquashed actions, as `sample` does.

        Args:
            params: `[..., num_params]` float, output of a network.
            noise: `[..., size]` float, independent standard normal numbers.
        """
        mean, log_std = self._mean_and_log_std(params)
        return mean + jnp.exp(log_std) * noise

    def mode(self, params: jax.Array) -> jax.Array:
        """Returns the means, `[..., size]`, as actions before squashing."""
        return self._mean_and_log_std(params)[0]

    def log_prob(self, params: jax.Array, raw_action: jax.Array) -> jax.Array:
        """Computes the log-density of the squashed action, `[...]`.

        The density refers to `squash(raw_action)`, before scaling to the space.

        Args:
            params: `[..., num_params]` float, output of a network.
            raw_action: `[..., size]` float, result of `sample`.
        """
        mean, log_std = self._mean_and_log_std(params)
        log_probs = jax.scipy.stats.norm.logpdf(raw_action, mean, jnp.exp(log_std))
        # log(1 - tanh(x)^2), in a form without cancellation.
        log_slope = 2 * (math.log(2) - raw_action - jax.nn.softplus(-2 * raw_action))
        has_low, has_high = self._has_bounds(raw_action.ndim)
        if not (has_low & has_high).all():
            # Log slopes of `from_low` and `to_high` in `squash`: log sigmoids.
            half_open = -jax.nn.softplus(jnp.where(has_low, -raw_action, raw_action))
            log_slope = jnp.where(has_low ^ has_high, half_open, log_slope)
            log_slope = jnp.where(has_low | has_high, log_slope, 0.0)
        return (log_probs - log_slope).sum(-1)

    def squash(self, raw_action: jax.Array) -> jax.Array:
        """Squashes raw actions to the normalized actions that a critic takes.

        Args:
            raw_action: `[..., size]` float.

        Returns:
            `[..., size]` float: in [-1, 1] between two finite bounds, at least -1 or at
            most 1 for one finite bound, and any number without bounds.
        """
        has_low, has_high = self._has_bounds(raw_action.ndim)
        squashed = jnp.tanh(raw_action)
        if not (has_low & has_high).all():
            from_low = jax.nn.softplus(raw_action) - 1
            to_high = 1 - jax.nn.softplus(-raw_action)
            half_open = jnp.where(has_low, from_low, to_high)
            squashed = jnp.where(has_low ^ has_high, half_open, squashed)
            squashed = jnp.where(has_low | has_high, squashed, raw_action)
        return squashed

    def clip(self, normalized_action: jax.Array) -> jax.Array:
        """Clips normalized actions, `[..., size]`, to the range of `squash`."""
        has_low, has_high = self._has_bounds(normalized_action.ndim)
        low = np.where(has_low, -1.0, -np.inf).astype(np.float32)
        high = np.where(has_high, 1.0, np.inf).astype(np.float32)
        return jnp.clip(normalized_action, low, high)

    def postprocess(self, normalized_action: jax.Array) -> jax.Array:
        """Scales normalized actions, `[..., size]`, to the space, `[..., *shape]`."""
        part, lanes = self._part, normalized_action.shape[:-1]
        action = normalized_action.reshape((*lanes, *part.shape))
        low, high, scale, offset = (
            _expand(x, action.ndim)
            for x in (part.low, part.high, part.scale, part.offset)
        )
        return jnp.clip(action * scale + offset, low, high).astype(part.dtype)

    def normalize(self, action: jax.Array) -> jax.Array:
        """Inverts `postprocess`: from `[..., *shape]` to `[..., size]`."""
        part, lanes = self._part, action.shape[: action.ndim - len(self._part.shape)]
        scale, offset = (_expand(x, action.ndim) for x in (part.scale, part.offset))
        return ((action - offset) / scale).reshape(*lanes, self.size)

    def _mean_and_log_std(self, params: jax.Array) -> tuple[jax.Array, jax.Array]:
        if params.shape[-1] != self.num_params:
            raise ValueError(
                f"`params` must have shape [..., {self.num_params}], got "
                f"{params.shape}."
            )
        mean, log_std = jnp.split(params, 2, axis=-1)
        return mean, jnp.clip(log_std, -5, 2)

    def _has_bounds(self, ndim: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns bool arrays of `ndim` axes, the last axis of size `size`."""
        has_low = np.isfinite(self._part.low).ravel()
        has_high = np.isfinite(self._part.high).ravel()
        return _expand(has_low, ndim), _expand(has_high, ndim)


class _Leaf(NamedTuple):
    """Parameters of one leaf of an action: logits, or means and log deviations."""

    logits: Any = None  # [..., *shape, largest number of values]
    mean: Any = None  # [..., *shape]
    log_std: Any = None  # [..., *shape]


class _Part(NamedTuple):
    """Static description of one leaf of an action space."""

    is_float: bool
    shape: tuple[int, ...]
    dtype: Any
    low: np.ndarray  # [*shape]
    high: np.ndarray  # [*shape]
    num_values: np.ndarray  # [*shape] int, 0 for floats
    scale: np.ndarray  # [*shape], 1 for integers
    offset: np.ndarray  # [*shape], 0 for integers

    @property
    def num_outputs(self) -> int:
        """Number of logits, or of means."""
        return int(self.num_values.size * max(1, self.num_values.max(initial=0)))


def _describe_part(space: AnySpace) -> _Part:
    """Describes one leaf of an action space."""
    is_float = space.dtype is not None and jnp.issubdtype(space.dtype, jnp.floating)
    # Actions of `RescaleAction(env, bound="tanh")` are floats without bounds.
    bounds = (-np.inf, np.inf) if space.bounds is None and is_float else space.bounds
    if bounds is None or space.shape is None:
        raise ValueError(
            "`action_space` must have bounds in all parts, got a part without "
            f"bounds: {space!r}."
        )
    low, high = (np.broadcast_to(np.asarray(x), space.shape) for x in bounds)
    if not is_float:
        num_values = high.astype(np.int64) - low.astype(np.int64) + 1
        if num_values.max(initial=0) > _MAX_VALUES:
            raise ValueError(
                f"`action_space` must have at most {_MAX_VALUES:,} values per integer, "
                f"because every value has a logit, got {space!r}. Let the policy act "
                "in a Box of floats and round its actions in `env.step`."
            )
        # Large numbers of uint32 wrap around, and `postprocess` inverts this.
        low, high = low.astype(np.int32), high.astype(np.int32)
        ones, zeros = np.ones(space.shape), np.zeros(space.shape)
        return _Part(
            False, space.shape, space.dtype, low, high, num_values, ones, zeros
        )
    # The largest float stands for no bound, as in environments of Gymnasium.
    limit = np.float32(jnp.finfo(space.dtype).max)
    low, high = low.astype(np.float32), high.astype(np.float32)
    low = np.where(low <= -limit, -np.inf, low)
    high = np.where(high >= limit, np.inf, high)
    has_low, has_high = np.isfinite(low), np.isfinite(high)
    # Map -1 and 1 to the bounds; place a missing bound at distance 2 from the other.
    first = np.where(has_low, low, np.where(has_high, high - 2, -1.0))
    last = np.where(has_high, high, np.where(has_low, low + 2, 1.0))
    # Halve first: the difference may overflow.
    scale = np.where(first < last, last / 2 - first / 2, 1.0).astype(np.float32)
    offset = (first / 2 + last / 2).astype(np.float32)
    num_values = np.zeros(space.shape, int)
    return _Part(True, space.shape, space.dtype, low, high, num_values, scale, offset)


def _slice(params: jax.Array, start: int, size: int) -> jax.Array:
    """Returns `size` parameters from `start` on, without a slice of the whole axis."""
    if params.shape[-1] == size:
        return params
    return params[..., start : start + size]


def _expand(x: np.ndarray, ndim: int) -> np.ndarray:
    """Prepends axes of size 1 to avoid rank promotion."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def _sum_entries(x: jax.Array, part: _Part) -> jax.Array:
    """Sums over the entries of an action, the last axes."""
    return x.sum(tuple(range(-len(part.shape), 0)))

"""Distributions over actions of every space, a part of an action at a time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct


class Categorical(struct.PyTreeNode):
    """Integers, each with the logits of its values."""

    logits: jax.Array  # [..., *shape, number of values]
    start: Any = struct.field(pytree_node=False, default=0)  # of each entry, in turn
    shape: tuple = struct.field(pytree_node=False, default=())  # of an action
    dtype: Any = struct.field(pytree_node=False, default=jnp.int32)

    def sample(self, key):
        drawn = self.low() + jax.random.categorical(key, self.logits)
        return drawn.astype(self.dtype)

    def mode(self):
        return (self.low() + self.logits.argmax(-1)).astype(self.dtype)

    def log_prob(self, action):
        cost = optax.softmax_cross_entropy_with_integer_labels
        return total(-cost(self.logits, action - self.low()), self.shape)

    def bounded(self, drawn):
        return drawn

    def low(self):
        low = np.reshape(self.start, self.shape).astype(np.int32)
        return jnp.broadcast_to(low, self.logits.shape[:-1])

    def entropy(self):
        log_probs = jax.nn.log_softmax(self.logits)
        return total(-(jnp.exp(log_probs) * log_probs).sum(-1), self.shape)


class Gaussian(struct.PyTreeNode):
    """Real numbers, of which `bounded` makes those that the environment takes.

    The probability stays that of the number that was drawn.
    """

    mean: jax.Array  # [..., *shape]
    log_std: jax.Array
    # Bounds of each entry, in turn: all lower ones, and all upper ones.
    bounds: Any = struct.field(pytree_node=False)
    shape: tuple = struct.field(pytree_node=False, default=(1,))  # of an action

    def sample(self, key):
        noise = jax.random.normal(key, self.mean.shape)
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self):
        return self.mean

    def log_prob(self, action):
        logpdf = jax.scipy.stats.norm.logpdf
        log_probs = logpdf(action, self.mean, jnp.exp(self.log_std))
        return total(log_probs, self.shape)

    def bounded(self, drawn):
        low, high = (np.reshape(x, self.shape) for x in self.bounds)
        return bounded(drawn, low, high)

    def entropy(self):
        each = self.log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e)
        return total(each, self.shape)


class Joint(NamedTuple):
    """Independent parts of an action of several, such as of a `Dict`."""

    parts: list  # distributions of the leaves of an action
    structure: Any  # of an action

    def sample(self, key):
        pairs = zip(self.parts, jax.random.split(key, len(self.parts)), strict=True)
        return self.structure.unflatten([part.sample(key) for part, key in pairs])

    def mode(self):
        return self.structure.unflatten([part.mode() for part in self.parts])

    def log_prob(self, action):
        pairs = zip(self.parts, jax.tree.leaves(action), strict=True)
        return sum(part.log_prob(x) for part, x in pairs)

    def bounded(self, drawn):
        leaves = jax.tree.leaves(drawn)
        pairs = zip(self.parts, leaves, strict=True)
        actions = [part.bounded(x) for part, x in pairs]
        is_changed = any(x is not y for x, y in zip(actions, leaves, strict=True))
        return self.structure.unflatten(actions) if is_changed else drawn

    def entropy(self):
        return sum(part.entropy() for part in self.parts)


def bounded(x, low, high):
    """Maps [-1, 1] to the bounds of an action, and clips what is outside.

    Where a bound is infinite, numbers stay what they are, within the other one.
    """
    if np.isinf(low).all() and np.isinf(high).all():
        return x
    low, high, middle, half = each(x, low, high, *ranges(low, high))
    return jnp.clip(x * half + middle, low, high)


def unbounded(action, low, high):
    """Maps actions back to [-1, 1] where both bounds are finite; see `bounded`."""
    middle, half = each(action, *ranges(low, high))
    return (action - middle) / half


def each(x, *values):
    """Repeats values of an action for all in `x`, in its dtype."""
    return [jnp.broadcast_to(jnp.asarray(y, x.dtype), x.shape) for y in values]


def ranges(low, high):
    """Returns the middle between bounds, and half of their distance.

    They are 0 and 1 where a bound is infinite.
    """
    is_range = np.isfinite(low) & np.isfinite(high)
    low, high = np.where(is_range, low, -1.0), np.where(is_range, high, 1.0)
    return (low + high) / 2, np.where(low < high, (high - low) / 2, 1.0)


def total(x, shape):
    """Sums over the entries of an action, the last axes."""
    return x.sum(tuple(range(-len(shape), 0)))


def in_turn(bound, shape):
    """Returns a bound of each entry of an action, as static data."""
    return tuple(np.broadcast_to(bound, shape).ravel().tolist())


def num_values(part):
    """Returns of a space how many values each entry has, 0 of real numbers."""
    if part.bounds is None or part.shape is None:
        raise ValueError(f"`action_space` must have bounds in all parts: {part!r}.")
    if jnp.issubdtype(part.dtype, jnp.floating):
        return np.zeros(part.shape, int)
    low, high = (np.broadcast_to(x, part.shape).astype(int) for x in part.bounds)
    return high - low + 1

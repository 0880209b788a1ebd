"""`Joint`, a distribution over any space of actions, entry by entry."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout.envs.spaces import as_space


class Joint:
    """Independent entries of an action: integers by logits, floats by a Gaussian.

    Floats are drawn over the reals: clip or rescale them in the environment, so that
    the probability stays that of the action that was drawn.

    Args:
        space: of one action: Discrete, MultiDiscrete, MultiBinary, Box, or Dict and
            Tuple of these.
        outputs: `[..., num_outputs]` of a network; None to ask how many it needs.
        log_std: `[..., num_reals]`, logarithms of the standard deviations.
        mask: a flag for each logit, True where the value is allowed; None for all.

    Attributes:
        num_outputs: outputs that a network needs: a logit for each value of an integer,
            a mean for each float.
        num_reals: entries that are floats.
    """

    def __init__(
        self, space: Any, outputs: Any = None, log_std: Any = None, mask: Any = None
    ) -> None:
        space = as_space(space, "action_space")
        key = jax.eval_shape(jax.random.key, 0)
        self._structure = jax.tree.structure(jax.eval_shape(space.sample, key))
        self._parts = space.leaves()
        sizes = np.concatenate([_sizes(part) for part in self._parts])
        ends = np.cumsum(np.maximum(sizes, 1))
        first, reals = ends - np.maximum(sizes, 1), np.flatnonzero(sizes == 0)
        self.num_outputs, self.num_reals = int(ends[-1]), len(reals)
        self._means, self._log_std = first[reals], log_std
        # Entries with equally many values are drawn together, `[k, n]` logits.
        numbers = np.unique(sizes[sizes > 0]).tolist()
        entries = [np.flatnonzero(sizes == n) for n in numbers]
        self._logits = [
            first[at][:, None] + np.arange(n)
            for at, n in zip(entries, numbers, strict=True)
        ]
        self._entries = np.concatenate([reals, *entries])  # reals, then group by group
        if mask is not None:
            columns = np.sort(np.concatenate([np.ravel(x) for x in self._logits]))
            flags = mask.astype(bool).reshape(*outputs.shape[:-1], -1)
            if flags.shape[-1] != len(columns):
                raise ValueError(
                    f"`action_mask` must have {len(columns)} flags, one for each "
                    f"logit, got shape {mask.shape}."
                )
            every = jnp.ones(outputs.shape, bool).at[..., columns].set(flags)
            outputs = jnp.where(every, outputs, -1e9)
        self._outputs = outputs

    def sample(self, key: jax.Array) -> Any:
        """Draws actions."""
        real_key, key = jax.random.split(key)
        mean = self._outputs[..., self._means]
        noise = jax.random.normal(real_key, mean.shape)
        drawn = [mean + jnp.exp(self._log_std) * noise]
        for number, logits in enumerate(self._logits):
            group_key = jax.random.fold_in(key, number)
            drawn.append(jax.random.categorical(group_key, self._outputs[..., logits]))
        return self._actions(drawn)

    def mode(self) -> Any:
        """Returns the most likely actions."""
        modes = [self._outputs[..., logits].argmax(-1) for logits in self._logits]
        return self._actions([self._outputs[..., self._means], *modes])

    def log_prob(self, action: Any) -> jax.Array:
        """Returns the log-probability of actions, `[...]`."""
        lead, columns = self._outputs.shape[:-1], []
        for part, x in zip(self._parts, jax.tree.leaves(action), strict=True):
            if not jnp.issubdtype(part.dtype, jnp.floating):
                x = x.astype(jnp.int32) - _low(part, x)
            columns.append(x.reshape(*lead, -1).astype(jnp.float32))
        entries = jnp.concatenate(columns, axis=-1)[..., self._entries]
        mean, end = self._outputs[..., self._means], self.num_reals
        logpdf = jax.scipy.stats.norm.logpdf
        total = logpdf(entries[..., :end], mean, jnp.exp(self._log_std)).sum(-1)
        for logits in self._logits:
            first, end = end, end + len(logits)
            index = entries[..., first:end, None].astype(jnp.int32)
            log_probs = jax.nn.log_softmax(self._outputs[..., logits])
            total += jnp.take_along_axis(log_probs, index, axis=-1).sum((-2, -1))
        return total

    def entropy(self) -> jax.Array:
        """Returns the entropy, `[...]`, in nats."""
        total = (self._log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e)).sum(-1)
        for logits in self._logits:
            log_probs = jax.nn.log_softmax(self._outputs[..., logits])
            total -= (jnp.exp(log_probs) * log_probs).sum((-2, -1))
        return total

    def _actions(self, drawn: list[jax.Array]) -> Any:
        """Makes actions of reals and of indices, group by group."""
        columns = jnp.concatenate([x.astype(jnp.float32) for x in drawn], axis=-1)
        columns, end, parts = columns[..., np.argsort(self._entries)], 0, []
        for part in self._parts:
            first, end = end, end + int(np.prod(part.shape, dtype=int))
            x = columns[..., first:end].reshape(*columns.shape[:-1], *part.shape)
            if not jnp.issubdtype(part.dtype, jnp.floating):
                x = x.astype(jnp.int32) + _low(part, x)
            parts.append(x.astype(part.dtype))
        return jax.tree.unflatten(self._structure, parts)


def _low(part: Any, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(part.bounds[0], jnp.int32), x.shape)


def _sizes(part: Any) -> np.ndarray:
    """Returns the number of values of each entry, 0 for floats."""
    if part.bounds is None or part.shape is None:
        raise ValueError(
            f"`action_space` must be made of spaces with bounds: {part!r}."
        )
    if jnp.issubdtype(part.dtype, jnp.floating):
        return np.zeros(int(np.prod(part.shape, dtype=int)), int)
    low, high = (np.broadcast_to(x, part.shape).astype(int) for x in part.bounds)
    return (high - low + 1).reshape(-1)

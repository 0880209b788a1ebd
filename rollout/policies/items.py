"""Chooses items to recommend, by their scores and a mask of allowed ones.

An item that is not allowed is never chosen, whatever its score: its score becomes minus
infinity, not zero, which would win against negative scores. Where nothing is allowed,
an item is chosen among all, since one must be sent, and `extras["no_valid_action"]` is
True.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs.spaces import Discrete, get_action_mask
from rollout.envs.types import ArrayTree
from rollout.policies import masks
from rollout.policies.masks import ActionMaskFn
from rollout.types import Policy, PolicyStep

ScoreFn = Callable[[Any, ArrayTree], Any]


class ItemPolicy(Policy):
    """The policy that `item_policy` makes."""

    fn: ScoreFn = struct.field(pytree_node=False)
    sample: bool = struct.field(pytree_node=False, default=False)
    items: Any = None  # [I, F]
    start: int = struct.field(pytree_node=False, default=0)
    action_mask_fn: ActionMaskFn = struct.field(
        pytree_node=False, default=get_action_mask
    )
    value_fn: Callable[[Any, Any], Any] | None = struct.field(
        pytree_node=False, default=None
    )

    def apply(self, params: Any, obs: Any, state: Any, key: chex.PRNGKey) -> PolicyStep:
        """Samples items, or chooses those of the highest score."""
        return self._choose(params, obs, state, key if self.sample else None)

    def mode(self, params: Any, obs: Any, state: Any, key: chex.PRNGKey) -> PolicyStep:
        """Chooses the items of the highest score."""
        del key  # unused
        return self._choose(params, obs, state, None)

    def value(self, params: Any, obs: Any, state: Any) -> ArrayTree:
        """Calls `value_fn`."""
        if self.value_fn is None:
            return super().value(params, obs, state)
        return self.value_fn(params, obs)

    @property
    def has_value(self) -> bool:
        """Whether there is a `value_fn`."""
        return self.value_fn is not None

    def _choose(
        self, params: Any, obs: Any, state: Any, key: chex.PRNGKey | None
    ) -> PolicyStep:
        # `[B, I]` scores, or with `items` points `[B, F]`.
        result = self.fn(params, obs)
        scores, extras = result if isinstance(result, tuple) else (result, {})
        if self.items is not None:
            # The nearest item has the highest score: minus the squared distance, up to
            # a constant per lane.
            point, table = scores, jnp.asarray(self.items, scores.dtype)
            scores = 2.0 * point @ table.T - jnp.sum(table**2, axis=-1)[None]
            extras = {**extras, "point": point}
        space = Discrete(scores.shape[-1])
        action_mask = masks.read(self.action_mask_fn, obs, space)[:, 0]
        action, more = choose_items(scores, action_mask, key)
        return PolicyStep(self.start + action, state, {**extras, **more})


def item_policy(
    fn: ScoreFn,
    *,
    sample: bool = False,
    items: jax.typing.ArrayLike | None = None,
    start: int = 0,
    action_mask_fn: ActionMaskFn = get_action_mask,
    value_fn: Callable[[Any, Any], Any] | None = None,
) -> Policy:
    """Makes a policy from a function that scores items.

    Args:
        fn: `(params, obs)` to scores, `[B, I]`, or to `(scores, extras)` with a dict of
            extras; batched, `[B, ...]`. With `items`, to points `[B, F]` instead.
        sample: whether to draw items by the softmax of their scores, instead of taking
            the highest score. `Greedy` takes the highest in both cases.
        items: `[I, F]`, a point for each item: the allowed item nearest to the point of
            `fn` is chosen, which turns a continuous action into an item. Not with
            `sample`.
        start: the action of the first item, that of the `Discrete` space.
        action_mask_fn: `obs`, `[B, ...]`, to `[B, I]` bool, the allowed items; by
            default the `action_mask` in `obs`.
        value_fn: the critic, as `stateless_policy` takes it.

    Returns:
        A policy without state. Its extras are those of `fn` and of `choose_items`; with
        `items` also `point`, `[B, F]`.

    Raises:
        ValueError: if an argument is not as above, or if `sample` is True with `items`;
            while tracing, if the mask is not `[B, I]` bool.

    Source:
        Masks: "A Closer Look at Invalid Action Masking in Policy Gradient Algorithms",
        arXiv:2006.14171. The nearest item: "Deep Reinforcement Learning in Large
        Discrete Action Spaces", arXiv:1512.07679, with one neighbour.
    """
    checks.function("fn", fn)
    checks.function("action_mask_fn", action_mask_fn)
    checks.boolean("sample", sample)
    start = checks.integer("start", start)
    if value_fn is not None:
        checks.function("value_fn", value_fn, "params", "obs")
    if sample and items is not None:
        raise ValueError("`sample` must be False where `items` are given, got True.")
    items = None if items is None else jnp.asarray(items)
    return ItemPolicy(fn, sample, items, start, action_mask_fn, value_fn)


def choose_items(
    scores: jax.Array, allowed: jax.Array, key: chex.PRNGKey | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Chooses an allowed item in every lane, for custom policies.

    Args:
        scores: `[B, I]` float32, of any sign.
        allowed: `[B, I]` bool, the allowed items.
        key: one typed key, to draw by the softmax of the scores of allowed items; None
            takes the highest score, the first of equals.

    Returns:
        Items, `[B]` int32; and a dict of `no_valid_action` and `log_prob`, `[B]` bool
        and float32. `log_prob` is that of the softmax, also without a key.
        Inside `jit` an entry that you do not read costs nothing.

    Raises:
        ValueError: if `allowed` is not bool of the shape of `scores`.
    """
    scores, allowed = jnp.asarray(scores), jnp.asarray(allowed)
    if scores.ndim != 2 or (allowed.shape, allowed.dtype) != (scores.shape, jnp.bool_):
        raise ValueError(
            "`allowed` must be bool of the shape [B, I] of `scores`, got "
            f"{checks.describe(allowed)} and {checks.describe(scores)}."
        )
    no_valid_action = ~allowed.any(axis=-1)
    # An allowed -inf becomes the lowest finite score, and beats items not allowed.
    lowest = jnp.finfo(scores.dtype).min
    scores = jnp.maximum(scores, lowest)
    scores = jnp.where(allowed | no_valid_action[:, None], scores, -jnp.inf)
    log_probs = jax.nn.log_softmax(scores)
    if key is None:
        action = jnp.argmax(scores, axis=-1)
    else:
        action = jax.random.categorical(key, log_probs)
    log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=-1)[:, 0]
    extras = {"no_valid_action": no_valid_action, "log_prob": log_prob}
    return action.astype(jnp.int32), extras

"""Chooses items to recommend, by their scores and a mask of valid items.

An invalid item is never chosen: its score becomes minus infinity, because a score of
zero would exceed negative scores. If no item is valid, an item is chosen among all of
them, and `extras["no_valid_action"]` is True.
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
    """Policy that scores items; made by `item_policy`."""

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
        """Samples items, or chooses the items of the highest score."""
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
        """Whether `value_fn` is given."""
        return self.value_fn is not None

    def _choose(
        self, params: Any, obs: Any, state: Any, key: chex.PRNGKey | None
    ) -> PolicyStep:
        # `[B, I]` scores, or `[B, F]` points if `items` are given.
        result = self.fn(params, obs)
        scores, extras = result if isinstance(result, tuple) else (result, {})
        if self.items is not None:
            # Score items by the negative squared distance, up to a constant per lane:
            # the nearest item has the highest score.
            point, table = scores, jnp.asarray(self.items, scores.dtype)
            scores = 2.0 * point @ table.T - jnp.sum(table**2, axis=-1)[None]
            extras = {**extras, "point": point}
        space = Discrete(scores.shape[-1])
        action_mask = masks.read(self.action_mask_fn, obs, space)[:, 0]
        action, choice_extras = choose_items(scores, action_mask, key)
        return PolicyStep(self.start + action, state, {**extras, **choice_extras})


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
        fn: function `(params, obs)` that returns scores, `[B, I]`, or `(scores,
            extras)` with a dict of extras; all are batched, `[B, ...]`. If `items` are
            given, it returns points, `[B, F]`, instead of scores.
        sample: True samples items from the softmax of their scores, False takes the
            item of the highest score. `Greedy` takes the highest score in both cases.
        items: `[I, F]`, one point per item. The policy chooses the valid item nearest
            to the point that `fn` returns, which maps a continuous action to an item.
            `sample` must be False.
        start: action of the first item: the `start` of the `Discrete` space.
        action_mask_fn: function of `obs`, `[B, ...]`, that returns the valid items,
            `[B, I]` bool; by default it reads `action_mask` in `obs`.
        value_fn: critic, as in `stateless_policy`.

    Returns:
        A policy without state. Its extras are the extras of `fn` and of `choose_items`,
        and `point`, `[B, F]`, if `items` are given.

    Raises:
        ValueError: if an argument has a wrong type; if `sample` is True with `items`;
            while tracing, if the mask is not `[B, I]` bool.

    Source:
        "A Closer Look at Invalid Action Masking in Policy Gradient Algorithms",
        arXiv:2006.14171, for masks. "Deep Reinforcement Learning in Large Discrete
        Action Spaces", arXiv:1512.07679, for the nearest item, with one neighbor.
    """
    checks.function("fn", fn)
    checks.function("action_mask_fn", action_mask_fn)
    checks.boolean("sample", sample)
    start = checks.integer("start", start)
    if value_fn is not None:
        checks.function("value_fn", value_fn, "params", "obs")
    if sample and items is not None:
        raise ValueError("`sample` must be False if `items` are given, got True.")
    items = None if items is None else jnp.asarray(items)
    return ItemPolicy(fn, sample, items, start, action_mask_fn, value_fn)


def choose_items(
    scores: jax.Array, action_mask: jax.Array, key: chex.PRNGKey | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Chooses a valid item in every lane, for custom policies.

    Args:
        scores: `[B, I]` float32, of any sign.
        action_mask: `[B, I]` bool or numbers, True or not 0 for valid items.
        key: one typed key to sample from the softmax of the scores of valid items. None
            takes the highest score; the first item wins ties.

    Returns:
        Items, `[B]` int32, and a dict with `no_valid_action`, `[B]` bool, and
        `log_prob`, `[B]` float32. `log_prob` is the log-probability of the item under
        the softmax, also without a key. Inside `jit`, unused entries cost nothing.

    Raises:
        ValueError: if `action_mask` does not have the shape of `scores`.
    """
    scores, action_mask = jnp.asarray(scores), jnp.asarray(action_mask, bool)
    if scores.ndim != 2 or action_mask.shape != scores.shape:
        raise ValueError(
            "`action_mask` must have the shape [B, I] of `scores`, got "
            f"{checks.describe(action_mask)} and {checks.describe(scores)}."
        )
    no_valid_action = ~action_mask.any(axis=-1)
    # Clip -inf to the lowest finite score: valid items stay above invalid ones.
    scores = jnp.maximum(scores, jnp.finfo(scores.dtype).min)
    scores = jnp.where(action_mask | no_valid_action[:, None], scores, -jnp.inf)
    log_probs = jax.nn.log_softmax(scores)
    if key is None:
        action = jnp.argmax(scores, axis=-1)
    else:
        action = jax.random.categorical(key, log_probs)
    log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=-1)[:, 0]
    extras = {"no_valid_action": no_valid_action, "log_prob": log_prob}
    return action.astype(jnp.int32), extras

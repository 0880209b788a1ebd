"""`RecommendationEnv`: recommends items to a user, one by one, until the user leaves.

A user is drawn, the policy recommends items, and the reward is the user's feedback on
each. Users leave when the items become monotonous; `LeaveByCategory` and
`LeaveByDistance` are the rules of the field. The wrappers `NoRepeat`, `FixedLength` and
`History`, and `rollout.recommendation`, do the rest.

Source:
    "EasyRL4Rec: An Easy-to-use Library for Reinforcement Learning Based Recommender
    Systems", arXiv:2402.15164, section 3.2, without the faults of its environments.
"""

from collections.abc import Callable
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout import checks
from rollout.envs import prng
from rollout.envs.spaces import Box, Dict, Discrete
from rollout.envs.types import AnySpace, ArrayTree, EnvStep

FeedbackFn = Callable[[jax.Array, jax.Array], jax.Array]  # user, item: () to () float32


class LeaveRule(Protocol):
    """Decides when users leave; a pytree."""

    window: int  # W, number of earlier items that the rule reads

    def leaves(self, item: jax.Array, last: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns whether the user leaves after an item, `()` bool.

        Args:
            item: `()` int32.
            last: `[W]` int32, the items before it, in any order.
            mask: `[W]` bool, False for missing ones at the start.
        """
        ...


class LeaveByCategory(struct.PyTreeNode):
    """A user leaves if too many of the last items share a category of the item.

    Categories count separately: the user leaves if more than `threshold` of the
    `window` items before the item have the same one of its categories.

    Attributes:
        categories: `[I, C]` bool, the categories of each item.
        window: W, items that count, an int of at least 1.
        threshold: number of them that may share a category with the item, an int.

    Raises:
        ValueError: if an argument is not as above.

    Source:
        The environments KuaiRec and KuaiRand of EasyRL4Rec, arXiv:2402.15164, as
        published; not the leave model of KuaiSim, where bad feedback uses up patience.
    """

    categories: Any  # [I, C]
    window: int = struct.field(pytree_node=False)
    threshold: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        checks.int_between("window", self.window)
        checks.integer("threshold", self.threshold)
        if _is_table(self.categories):
            _check_table("categories", self.categories, "[I, C] bool", "b")
            object.__setattr__(self, "categories", jnp.asarray(self.categories))

    @property
    def num_items(self) -> int:
        """I, the number of items that the rule knows."""
        return self.categories.shape[0]

    def leaves(self, item: jax.Array, last: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns whether the user leaves after an item, `()` bool."""
        counts = jnp.sum(self.categories[last] & mask[:, None], axis=0, dtype=jnp.int32)
        return jnp.any(self.categories[item] & (counts > self.threshold))


class LeaveByDistance(struct.PyTreeNode):
    """A user leaves if the item is too close to one of the last items.

    That is, if the Euclidean distance of their features is below `threshold` for one of
    the `window` items before it.

    Attributes:
        features: `[I, F]` float32, finite, the features of each item.
        window: W, items that count, an int of at least 1.
        threshold: in the units of the features, a number.

    Raises:
        ValueError: if an argument is not as above.

    Source:
        The environments Coat and Yahoo! R3 of EasyRL4Rec, arXiv:2402.15164.
    """

    features: Any  # [I, F]
    window: int = struct.field(pytree_node=False)
    threshold: jax.typing.ArrayLike

    def __post_init__(self) -> None:
        checks.int_between("window", self.window)
        if _is_table(self.features):
            _check_table("features", self.features, "[I, F] of floats", "f")
            if not np.isfinite(np.asarray(self.features)).all():
                raise ValueError(
                    "`features` must be finite, since nobody would leave because of "
                    f"such an item, got {self.features}."
                )
            object.__setattr__(self, "features", jnp.asarray(self.features))

    @property
    def num_items(self) -> int:
        """I, the number of items that the rule knows."""
        return self.features.shape[0]

    def leaves(self, item: jax.Array, last: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns whether the user leaves after an item, `()` bool."""
        difference = self.features[last] - self.features[item][None]
        distance = jnp.sqrt(jnp.sum(difference**2, axis=-1))
        return jnp.any(mask & (distance < self.threshold))


class RecommendationState(struct.PyTreeNode, kw_only=True):
    """State of one user's session.

    Attributes:
        user: `()` int32.
        last: `[W]` int32, the last items, which the rule reads: that of turn t at
            index t modulo W.
        turn: `()` int32, number of items recommended so far.
    """

    user: jax.Array  # ()
    last: jax.Array  # [W]
    turn: jax.Array  # ()


class RecommendationEnv(struct.PyTreeNode):
    """Users, one drawn for each episode, who rate the items they are shown.

    The action is an item; the reward is the feedback of the user. The observation is
    `{"user": () int32, "item": () int32, "action_mask": [I] bool}`: the user, the last
    item, and the items that may be recommended: all, or those whose feedback is
    `known`. Before the first item, `item` is the number I, which is no item. An episode
    terminates when the user leaves and is truncated after `max_turn` items. The mask is
    advice: an item outside it may be recommended, and its feedback counts.

    An action that is no item has the reward NaN, which `num_nonfinite` counts; outside
    `jit` it raises an error.

    Attributes:
        feedback: `[U, I]` float32, each user's feedback on each item; or a pure
            function of user and item, `()` int32 each, that returns it, `()` float32.
        leave: decides when users leave; None if they never do.
        max_turn: items after which an episode is truncated, an int of at least 1.
        random_first: whether the first `item` is random. No rule counts it.
        num_users: U, needed if `feedback` is a function.
        num_items: I, needed if `feedback` is a function.
        known: `[U, I]` bool, the items in the mask of each user; None for all.

    Raises:
        ValueError: if `feedback` is not `[U, I]` of finite floats, or an argument is
            not as above; if `leave` is for another number of items.
    """

    feedback: Any  # [U, I], or a FeedbackFn
    leave: LeaveRule | None = None
    max_turn: int = struct.field(pytree_node=False, default=100)
    random_first: bool = struct.field(pytree_node=False, default=False)
    # Ints: None is replaced by the sizes of `feedback`.
    num_users: Any = struct.field(pytree_node=False, default=None)
    num_items: Any = struct.field(pytree_node=False, default=None)
    known: Any = None  # [U, I]

    def __post_init__(self) -> None:
        checks.int_between("max_turn", self.max_turn)
        checks.boolean("random_first", self.random_first)
        if callable(self.feedback):
            checks.int_between("num_users", self.num_users)
            checks.int_between("num_items", self.num_items)
            if not isinstance(self.feedback, jax.tree_util.Partial):
                # A function is no array: it becomes part of the structure.
                self._set("feedback", jax.tree_util.Partial(self.feedback))
        elif _is_table(self.feedback):
            _check_table("feedback", self.feedback, "[U, I] of numbers", "biuf")
            if not np.isfinite(np.asarray(self.feedback, np.float32)).all():
                raise ValueError(
                    "`feedback` must be finite, got some that is not: "
                    "`rollout.envs.ratings.from_interactions` completes missing "
                    "feedback."
                )
            self._set("feedback", jnp.asarray(self.feedback, jnp.float32))
            sizes, given = self.feedback.shape[-2:], (self.num_users, self.num_items)
            if given not in ((None, None), sizes):
                raise ValueError(
                    "`num_users` and `num_items` must be left out where `feedback` is "
                    f"an array, got {given}."
                )
            self._set("num_users", sizes[0])
            self._set("num_items", sizes[1])
        # The tables of `from_interactions`, whole.
        elif hasattr(self.feedback, "feedback"):
            raise ValueError(
                "`feedback` must be an array [U, I] or a function, got "
                f"{type(self.feedback).__name__}: pass its `feedback`."
            )
        else:
            return  # a placeholder that jax builds pytrees with
        if _is_table(self.known):
            sizes = self.num_users, self.num_items
            _check_table("known", self.known, f"bool of shape {sizes}", "b", sizes)
            self._set("known", jnp.asarray(self.known))
        if self.leave is not None and not hasattr(self.leave, "window"):
            raise ValueError(
                "`leave` must be a rule with `window` and `leaves`, such as "
                f"`LeaveByCategory`, got {type(self.leave).__name__}."
            )
        of_rule = getattr(self.leave, "num_items", self.num_items)
        if of_rule != self.num_items:
            raise ValueError(
                f"`leave` must be for the {self.num_items} items of `feedback`, got "
                f"{of_rule}."
            )

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`."""
        return Dict(
            {
                "user": Discrete(self.num_users),
                "item": Discrete(self.num_items + 1),
                "action_mask": Box(False, True, (self.num_items,), jnp.dtype(bool)),
            }
        )

    @property
    def action_space(self) -> Discrete:
        """Space of `action`: the items."""
        return Discrete(self.num_items)

    def reset(self, key: chex.PRNGKey) -> tuple[RecommendationState, ArrayTree]:
        """Draws a user: `(state, obs)`."""
        user = _draw(prng.fold_in(key, 0), self.num_users)
        item = jnp.int32(self.num_items)
        if self.random_first:
            item = _draw(prng.fold_in(key, 1), self.num_items)
        # Without a rule there is one slot, since a ring of none cannot be written.
        window = 1 if self.leave is None else self.leave.window
        state = RecommendationState(
            user=user, last=jnp.zeros(window, jnp.int32), turn=jnp.zeros((), jnp.int32)
        )
        return state, self._observe(user, item)

    def step(
        self, key: chex.PRNGKey, state: RecommendationState, action: jax.Array
    ) -> EnvStep:
        """Recommends an item.

        Raises:
            ValueError: outside `jit`, if `action` is no item.
        """
        del key  # unused: only the user is drawn
        is_item = (action >= 0) & (action < self.num_items)
        if checks.is_known(is_item) and not np.all(is_item):
            raise ValueError(
                f"`action` must be an item, from 0 to {self.num_items - 1}, got "
                f"{action}."
            )
        item = jnp.asarray(action, jnp.int32)
        window = state.last.shape[0]
        leaves = jnp.bool_(False)
        if self.leave is not None:
            # `last` is a ring: until it is full, its first `turn` slots are filled.
            is_there = jnp.arange(window) < state.turn
            leaves = self.leave.leaves(item, state.last, is_there)
        turn = state.turn + 1
        new = state.replace(
            last=state.last.at[state.turn % window].set(item), turn=turn
        )
        if callable(self.feedback):
            feedback = jnp.asarray(self.feedback(state.user, item))
        else:
            feedback = self.feedback[state.user, item]
        # Inside `jit` an action that is no item cannot raise: its reward shows it.
        reward = jnp.where(is_item, feedback, jnp.nan)
        return EnvStep(
            state=new,
            obs=self._observe(state.user, item),
            reward=reward.astype(jnp.float32),
            terminated=leaves,
            truncated=turn >= self.max_turn,
            info={},
        )

    def _observe(self, user: jax.Array, item: jax.Array) -> dict[str, jax.Array]:
        every = jnp.ones(self.num_items, bool)
        mask = every if self.known is None else self.known[user]
        return {"user": user, "item": item, "action_mask": mask}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _draw(key: chex.PRNGKey, num: int) -> jax.Array:
    return prng.draw(key, 0, num - 1, (), jnp.int32)


def _is_table(x: Any) -> bool:
    """Returns whether `x` is an array of values; jax also puts numbers there."""
    return checks.is_known(x) and np.ndim(x) > 0


def _check_table(
    name: str, table: Any, what: str, kinds: str, sizes: Any = None
) -> None:
    # Tables stacked for `vmap` over environments have one axis more.
    table = np.asarray(table)
    fits = table.ndim >= 2 and 0 not in table.shape and table.dtype.kind in kinds
    if not fits or table.shape[-2:] != (sizes or table.shape[-2:]):
        raise ValueError(f"`{name}` must be {what}, got {checks.describe(table)}.")

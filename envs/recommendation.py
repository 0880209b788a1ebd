"""`RecommendationEnv`: recommends items to a simulated user until the user leaves.

`reset` samples a user, the policy recommends items one by one, and the reward is the
user's feedback on the item. Users leave when the items become monotonous;
`LeaveByCategory` and `LeaveByDistance` implement rules from the literature. Related
features are in the wrappers `NoRepeat`, `FixedLength` and `History`, and in
`rollout.recommendation`.

Source:
    "EasyRL4Rec: An Easy-to-use Library for Reinforcement Learning Based Recommender
    Systems", arXiv:2402.15164, section 3.2, with known bugs of EasyRL4Rec fixed.
"""

from collections.abc import Callable
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.base import checks, prng
from rollout.envs.ratings import Interactions
from rollout.envs.spaces import Box, Dict, Discrete
from rollout.envs.types import AnySpace, ArrayTree, EnvStep

FeedbackFn = Callable[[jax.Array, jax.Array], jax.Array]  # user, item: () to () float32


class LeaveRule(Protocol):
    """Determines when users leave. An implementation is a pytree."""

    window: int  # W, number of previous items that the rule reads

    def leaves(self, item: jax.Array, last: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns whether the user leaves after an item, `()` bool.

        Args:
            item: `()` int32, the recommended item.
            last: `[W]` int32, the previous items, in any order.
            mask: `[W]` bool, False for unfilled entries of `last`.
        """
        ...


class LeaveByCategory(struct.PyTreeNode):
    """Makes users leave if too many previous items share a category with the item.

    Categories are counted separately. The user leaves if, for any category of the
    item, more than `threshold` of the `window` previous items have that category.

    Attributes:
        categories: `[I, C]` bool, the categories of each item.
        window: W, number of previous items to compare with, an int of at least 1.
        threshold: number of previous items that may share a category, an int.

    Raises:
        ValueError: if an argument is invalid.

    Source:
        The published environments KuaiRec and KuaiRand of EasyRL4Rec, arXiv:2402.15164.
        The leave model of KuaiSim differs: bad feedback uses up the user's patience.
    """

    categories: Any  # [I, C]
    window: int = struct.field(pytree_node=False)
    threshold: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        checks.check_int("window", self.window)
        if _is_table(self.categories):
            _check_table("categories", self.categories, "[I, C] bool", "b")
            object.__setattr__(self, "categories", jnp.asarray(self.categories))

    @property
    def num_items(self) -> int:
        """I, the number of items in `categories`."""
        return self.categories.shape[0]

    def leaves(self, item: jax.Array, last: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns whether the user leaves after an item, `()` bool."""
        counts = jnp.sum(self.categories[last] & mask[:, None], axis=0, dtype=jnp.int32)
        return jnp.any(self.categories[item] & (counts > self.threshold))


class LeaveByDistance(struct.PyTreeNode):
    """Makes users leave if the item is too similar to a previous item.

    The user leaves if the Euclidean distance between the features of the item and of
    any of the `window` previous items is below `threshold`.

    Attributes:
        features: `[I, F]` float32, finite, the features of each item.
        window: W, number of previous items to compare with, an int of at least 1.
        threshold: minimum distance, a number in the units of the features.

    Raises:
        ValueError: if an argument is invalid.

    Source:
        The environments Coat and Yahoo! R3 of EasyRL4Rec, arXiv:2402.15164.
    """

    features: Any  # [I, F]
    window: int = struct.field(pytree_node=False)
    threshold: jax.typing.ArrayLike

    def __post_init__(self) -> None:
        checks.check_int("window", self.window)
        if _is_table(self.features):
            _check_table("features", self.features, "[I, F] of floats", "f")
            if not np.isfinite(np.asarray(self.features)).all():
                raise ValueError(
                    "`features` must be finite, got NaN or infinite entries. No user "
                    "would ever leave because of such an item."
                )
            object.__setattr__(self, "features", jnp.asarray(self.features))

    @property
    def num_items(self) -> int:
        """I, the number of items in `features`."""
        return self.features.shape[0]

    def leaves(self, item: jax.Array, last: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns whether the user leaves after an item, `()` bool."""
        difference = self.features[last] - self.features[item][None]
        distance = jnp.sqrt(jnp.sum(difference**2, axis=-1))
        return jnp.any(mask & (distance < self.threshold))


class RecommendationState(struct.PyTreeNode, kw_only=True):
    """State of one user's session.

    Attributes:
        user: `()` int32, the user.
        last: `[W]` int32, the last W items for the leave rule, a ring: the item of turn
            t is at index t modulo W.
        turn: `()` int32, number of items recommended so far.
    """

    user: jax.Array  # ()
    last: jax.Array  # [W]
    turn: jax.Array  # ()


class RecommendationEnv(struct.PyTreeNode):
    """An environment in which a simulated user rates recommended items.

    `reset` samples a user for the episode. The action is an item; the reward is the
    user's feedback on it. The observation is
    `{"user": () int32, "item": () int32, "action_mask": [I] bool}`: the user, the last
    item, and the items that may be recommended. The mask contains all items, or the
    items with `known` feedback. Before the first recommendation `item` is I, which is
    not a valid item. An episode terminates when the user leaves and is truncated after
    `max_turn` items. The environment does not enforce the mask: the policy may
    recommend an item outside the mask and receives its feedback.

    An invalid item has the reward NaN, which `num_nonfinite` counts. Outside `jit` it
    raises an error.

    Attributes:
        feedback: `[U, I]` float32, feedback of each user on each item; or a pure
            function that maps user and item, both `()` int32, to `()` float32.
        leave: rule that determines when users leave; None if users never leave.
        max_turn: number of items after which an episode is truncated, an int of at
            least 1.
        random_first: whether the first `item` is random. Leave rules ignore it.
        num_users: U, required if `feedback` is a function.
        num_items: I, required if `feedback` is a function.
        known: `[U, I]` bool, the items in the mask of each user; None for all items.

    Raises:
        ValueError: if `feedback` is not `[U, I]` of finite floats, if `leave` has
            another number of items, or if another argument is invalid.
    """

    feedback: Any  # [U, I], or a FeedbackFn
    leave: LeaveRule | None = None
    max_turn: int = struct.field(pytree_node=False, default=100)
    random_first: bool = struct.field(pytree_node=False, default=False)
    # Ints: the sizes of `feedback` replace None.
    num_users: Any = struct.field(pytree_node=False, default=None)
    num_items: Any = struct.field(pytree_node=False, default=None)
    known: Any = None  # [U, I]

    def __post_init__(self) -> None:
        checks.check_int("max_turn", self.max_turn)
        if callable(self.feedback):
            checks.check_int("num_users", self.num_users)
            checks.check_int("num_items", self.num_items)
            if not isinstance(self.feedback, jax.tree_util.Partial):
                # A function is not an array, so it becomes part of the tree structure.
                self._set("feedback", jax.tree_util.Partial(self.feedback))
        elif _is_table(self.feedback):
            _check_table("feedback", self.feedback, "[U, I] of numbers", "biuf")
            if not np.isfinite(np.asarray(self.feedback, np.float32)).all():
                raise ValueError(
                    "`feedback` must be finite, got NaN or infinite entries. Fill in "
                    "missing feedback with `rollout.envs.ratings.from_interactions`."
                )
            self._set("feedback", jnp.asarray(self.feedback, jnp.float32))
            sizes, options = self.feedback.shape[-2:], (self.num_users, self.num_items)
            if options not in ((None, None), sizes):
                raise ValueError(
                    "`num_users` and `num_items` must be omitted if `feedback` is an "
                    f"array, got {options}."
                )
            self._set("num_users", sizes[0])
            self._set("num_items", sizes[1])
        # The user passed the result of `from_interactions` instead of one table.
        elif isinstance(self.feedback, Interactions):
            raise ValueError(
                "`feedback` must be an array [U, I] or a function, got "
                f"{type(self.feedback).__name__}. Pass the attribute `feedback`."
            )
        else:
            return  # jax builds pytrees with placeholders
        if _is_table(self.known):
            sizes = self.num_users, self.num_items
            _check_table("known", self.known, f"bool of shape {sizes}", "b", sizes)
            self._set("known", jnp.asarray(self.known))
        num_items = getattr(self.leave, "num_items", self.num_items)
        if num_items != self.num_items:
            raise ValueError(
                f"`leave` must be for the {self.num_items} items of `feedback`, got "
                f"{num_items} items."
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
        """Samples a user and starts an episode; returns `(state, obs)`."""
        user = _sample(prng.fold_in(key, 0), self.num_users)
        item = jnp.int32(self.num_items)
        if self.random_first:
            item = _sample(prng.fold_in(key, 1), self.num_items)
        # The ring has one slot if there is no rule, since `step` always writes an item.
        window = 1 if self.leave is None else self.leave.window
        state = RecommendationState(
            user=user, last=jnp.zeros(window, jnp.int32), turn=jnp.zeros((), jnp.int32)
        )
        return state, self._observe(user, item)

    def step(
        self, key: chex.PRNGKey, state: RecommendationState, action: jax.Array
    ) -> EnvStep:
        """Recommends an item to the user.

        Raises:
            ValueError: outside `jit`, if `action` is not a valid item.
        """
        del key  # steps are deterministic: only `reset` samples
        is_item = (action >= 0) & (action < self.num_items)
        if checks.is_concrete(is_item) and not np.all(is_item):
            raise ValueError(
                f"`action` must be an item, from 0 to {self.num_items - 1}, got "
                f"{action}."
            )
        item = jnp.asarray(action, jnp.int32)
        window = state.last.shape[0]
        leaves = jnp.bool_(False)
        if self.leave is not None:
            # The ring `last` fills from the front: the first `turn` slots are valid.
            mask = jnp.arange(window) < state.turn
            leaves = self.leave.leaves(item, state.last, mask)
        turn = state.turn + 1
        new = state.replace(
            last=state.last.at[state.turn % window].set(item), turn=turn
        )
        if callable(self.feedback):
            feedback = jnp.asarray(self.feedback(state.user, item))
        else:
            feedback = self.feedback[state.user, item]
        # An invalid item cannot raise an error inside `jit`, so the reward becomes NaN.
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
        all_items = jnp.ones(self.num_items, bool)
        mask = all_items if self.known is None else self.known[user]
        return {"user": user, "item": item, "action_mask": mask}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _sample(key: chex.PRNGKey, num: int) -> jax.Array:
    return prng.sample_uniform(key, 0, num - 1, (), jnp.int32)


def _is_table(x: Any) -> bool:
    """Returns whether `x` is an array with values; jax may also store numbers there."""
    return checks.is_concrete(x) and np.ndim(x) > 0


def _check_table(
    name: str, table: Any, expected: str, dtypes: str, sizes: Any = None
) -> None:
    # Tables stacked for `vmap` over environments have an additional axis.
    table = np.asarray(table)
    fits = table.ndim >= 2 and 0 not in table.shape and table.dtype.kind in dtypes
    if not fits or table.shape[-2:] != (sizes or table.shape[-2:]):
        raise ValueError(f"`{name}` must be {expected}, got {checks.describe(table)}.")

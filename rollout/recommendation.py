"""Policies that recommend items, and standard metrics of recommendation.

`item_policy` makes a policy from scores of items, and `choose_items` chooses among the
valid items. Each setting of an evaluation is a `Collector`. The settings share a policy
and differ in whether items may be repeated and whether users may leave. Metrics are
folds over every step of exactly N episodes.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.base import checks
from rollout.collector import Collector
from rollout.envs.spaces import Discrete, get_action_mask
from rollout.envs.types import ArrayTree, Env
from rollout.envs.wrappers import FixedLength, NoRepeat
from rollout.policies import masks
from rollout.policies.masks import ActionMaskFn
from rollout.stats import CollectStats, summarize
from rollout.types import Policy, PolicyStep, Transition

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
        """Samples items, or chooses the items with the highest score."""
        return self._choose(params, obs, state, key if self.sample else None)

    def mode(self, params: Any, obs: Any, state: Any, key: chex.PRNGKey) -> PolicyStep:
        """Chooses the items with the highest score."""
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
        sample: True samples items from the softmax of their scores; False takes the
            item with the highest score. `Greedy` takes the highest score in both cases.
        items: `[I, F]`, one point per item. The policy chooses the valid item nearest
            to the point that `fn` returns, to map a continuous action to an item.
            `sample` must be False.
        start: action of the first item: the `start` of the `Discrete` space.
        action_mask_fn: function of `obs`, `[B, ...]`, that returns the valid items,
            `[B, I]` bool; by default it reads `action_mask` in `obs`.
        value_fn: critic, as in `stateless_policy`.

    Returns:
        A policy without state. Its extras are the extras of `fn` and of `choose_items`,
        and `point`, `[B, F]`, if `items` are given.

    Raises:
        ValueError: if `value_fn` has other arguments; if `sample` is True with `items`;
            while tracing, if the mask is not `[B, I]` bool.

    Source:
        "A Closer Look at Invalid Action Masking in Policy Gradient Algorithms",
        arXiv:2006.14171, for masks. "Deep Reinforcement Learning in Large Discrete
        Action Spaces", arXiv:1512.07679, for the nearest item, with one neighbor.
    """
    if value_fn is not None:
        checks.check_function("value_fn", value_fn, "params", "obs")
    if sample and items is not None:
        raise ValueError("`sample` must be False if `items` are given, got True.")
    items = None if items is None else jnp.asarray(items)
    return ItemPolicy(
        fn, sample, items, operator.index(start), action_mask_fn, value_fn
    )


def choose_items(
    scores: jax.Array, action_mask: jax.Array, key: chex.PRNGKey | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Chooses a valid item in every lane, for custom policies.

    Args:
        scores: `[B, I]` float32, of any sign.
        action_mask: `[B, I]` bool or numbers, True or nonzero for valid items.
        key: one typed key to sample from the softmax of the scores of valid items. None
            takes the highest score, and the first item in a tie.

    Returns:
        Items, `[B]` int32, and a dict with `no_valid_action`, `[B]` bool, and
        `log_prob`, `[B]` float32. `log_prob` is the log-probability of the item under
        the softmax, also without a key. Inside `jit`, XLA removes unused entries.

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


class Catalog(struct.PyTreeNode, kw_only=True):
    """Properties of the items, for the metrics; None if unknown.

    Attributes:
        features: `[I, F]` float32, features of each item, for the diversity.
        popularity: `[I]` float32, the fraction of users who know an item, above 0 and
            at most 1, for the novelty.
        dominated: `[I]` bool, whether an item has a value that dominates a feature,
            such as the most frequent category.
    """

    features: Any = None  # [I, F]
    popularity: Any = None  # [I]
    dominated: Any = None  # [I]


class RecommendationStats(struct.PyTreeNode, kw_only=True):
    """Metrics of exactly N episodes of recommendation.

    Each metric is `()` float32, or None if the `Catalog` lacks the table for it.

    Attributes:
        episodes: statistics of the episodes, as `summarize` returns them.
        click_through_rate: mean reward of a recommendation.
        coverage: fraction of the items that was recommended at least once.
        coverage_per_turn: number of different items divided by number of
            recommendations.
        diversity: 1 minus the cosine of the features of two items, averaged over all
            pairs in an episode, then over episodes; 1 for an episode of one item.
        novelty: minus the natural logarithm of the popularity, averaged over
            recommendations: the self-information in nats.
        dominated_share: fraction of recommendations of `dominated` items.
        no_valid_action_share: fraction of recommendations without a valid item.

    Source:
        Click-through rate, coverages, dominated share: "EasyRL4Rec", arXiv:2402.15164,
        section 3.4. Diversity: "Improving recommendation lists through topic
        diversification" (Ziegler et al., 2005), the intra-list similarity. Novelty:
        "Solving the apparent diversity-accuracy dilemma of recommender systems" (Zhou
        et al., 2010), the surprisal, here in nats.
    """

    episodes: CollectStats
    click_through_rate: jax.Array  # ()
    coverage: jax.Array  # ()
    coverage_per_turn: jax.Array  # ()
    diversity: jax.Array | None  # ()
    novelty: jax.Array | None  # ()
    dominated_share: jax.Array | None  # ()
    no_valid_action_share: jax.Array  # ()


class _Sums(struct.PyTreeNode, kw_only=True):
    """Accumulated counts and sums of recommendations.

    Attributes:
        counts: `[I]` int32, number of recommendations of each item.
        no_valid_action: `()` int32, number of recommendations without a valid item.
        total: `[B, F]`, sum of the unit feature vectors in the current episode.
        squares: `[B]`, sum of the squared lengths of these vectors.
        diversity: `()` float32, sum of the diversities of the episodes that ended.
    """

    counts: jax.Array  # [I]
    no_valid_action: jax.Array  # ()
    total: jax.Array  # [B, F]
    squares: jax.Array  # [B]
    diversity: jax.Array  # ()


def recommendation_settings(env: Env, force_length: int = 10) -> dict[str, Env]:
    """Makes the three settings of "EasyRL4Rec" from one environment.

    Args:
        env: an environment whose users may leave, such as
            `rollout.envs.recommendation.RecommendationEnv`.
        force_length: X, recommendations per episode in the third setting.

    Returns:
        "FB": items may be repeated, users leave (free browsing); "NX_0": no repeats,
        users leave; "NX_X" (with the number): no repeats, exactly X recommendations.

    Raises:
        ValueError: if `force_length` is not an int of at least 1, or if the actions are
            not discrete.

    Source:
        "EasyRL4Rec", arXiv:2402.15164, section 3.4.
    """
    force_length = checks.check_int("force_length", force_length)
    no_repeat = NoRepeat(env)
    return {
        "FB": env,
        "NX_0": no_repeat,
        f"NX_{force_length}": FixedLength(no_repeat, force_length),
    }


def evaluate_settings(
    settings: Mapping[str, Collector],
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    *,
    catalog: Catalog | None = None,
    max_episode_steps: int = checks.MAX_EPISODE_STEPS,
) -> dict[str, RecommendationStats]:
    """Plays exactly `num_episodes` in each setting, in one jitted program.

    All settings use the same key, so episode k has the same user in every setting.

    Args:
        settings: one collector per setting, by name; their actions are items, from 0.
        params: parameters of the policies.
        key: one typed key: the source of all randomness.
        num_episodes: N, at least 1. Static: one trace per value.
        catalog: properties of the items.
        max_episode_steps: steps after which an episode is truncated, at least 1.

    Returns:
        Statistics by setting; `log_stats` flattens them for loggers, with setting names
        as prefixes.

    Raises:
        ValueError: if an argument does not match the description above.
    """
    checks.check_key(key)
    num_episodes = checks.check_int("num_episodes", num_episodes)
    max_episode_steps = checks.check_max_episode_steps(max_episode_steps)
    catalog = Catalog() if catalog is None else catalog
    checks.check_type("`catalog` must be a `Catalog`", catalog, Catalog)
    for name, collector in settings.items():
        # Check lengths: JAX reads beyond the end of a table without an error.
        _check(name, collector, catalog)
    catalog = jax.tree.map(jnp.asarray, catalog, is_leaf=lambda x: isinstance(x, list))
    return _evaluate(
        dict(settings), params, key, num_episodes, catalog, max_episode_steps
    )


@functools.partial(jax.jit, static_argnames=("num_episodes", "max_episode_steps"))
def _evaluate(
    settings: dict[str, Collector],
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    catalog: Catalog,
    max_episode_steps: int,
) -> dict[str, RecommendationStats]:
    directions = jnp.zeros((1, 0))
    if catalog.features is not None:  # a zero vector stays zero
        length = jnp.linalg.norm(catalog.features, axis=1, keepdims=True)
        directions = catalog.features / jnp.where(length > 0.0, length, 1.0)

    def measure(collector: Collector) -> RecommendationStats:
        num_envs, num_items = collector.env.num_envs, collector.env.action_space.n
        num, per_env = checks.check_num_episodes(
            "num_episodes", num_episodes, collector.env
        )
        zeros = _Sums(
            counts=jnp.zeros(num_items, jnp.int32),
            no_valid_action=jnp.zeros((), jnp.int32),
            total=jnp.zeros((num_envs, directions.shape[1])),
            squares=jnp.zeros(num_envs),
            diversity=jnp.zeros(()),
        )
        _, sums, episodes = collector.fold_episodes(
            collector.init(key),
            params,
            lambda sums, row: _add(sums, row, directions),
            zeros,
            num_episodes=num,
            max_episode_steps=max_episode_steps,
            per_env=per_env,
        )
        num_shown, num_different = jnp.sum(sums.counts), jnp.sum(sums.counts > 0)

        def mean(table: jax.Array | None) -> jax.Array | None:
            """Averages a table over the recommendations."""
            return None if table is None else jnp.sum(table * sums.counts) / num_shown

        popularity, has_features = catalog.popularity, catalog.features is not None
        return RecommendationStats(
            episodes=summarize(episodes),
            click_through_rate=jnp.sum(episodes.episode_return) / num_shown,
            coverage=num_different / num_items,
            coverage_per_turn=num_different / num_shown,
            diversity=sums.diversity / episodes.mask.size if has_features else None,
            novelty=mean(None if popularity is None else -jnp.log(popularity)),
            dominated_share=mean(catalog.dominated),
            no_valid_action_share=sums.no_valid_action / num_shown,
        )

    return {name: measure(collector) for name, collector in settings.items()}


def _add(sums: _Sums, row: Transition, directions: jax.Array) -> _Sums:
    """Adds one recommendation of each lane."""
    item, direction = row.action, directions[row.action]
    total = jnp.where(row.first[:, None], 0.0, sums.total) + direction
    squares = jnp.where(row.first, 0.0, sums.squares) + jnp.sum(direction**2, axis=1)
    # The squared length of the sum of unit vectors contains the cosines of all pairs.
    num = row.episode_length.astype(jnp.float32)
    cosine = (jnp.sum(total**2, axis=1) - squares) / jnp.maximum(num * (num - 1), 1)
    diversity = jnp.where(row.done & row.mask, 1.0 - cosine, 0.0)
    no_valid_action = jnp.zeros_like(row.mask)
    if (action_mask := get_action_mask(row.obs)) is not None:
        no_valid_action = ~jnp.any(action_mask, axis=-1)
    return sums.replace(
        counts=sums.counts.at[item].add(row.mask),
        no_valid_action=sums.no_valid_action + jnp.sum(no_valid_action & row.mask),
        total=total,
        squares=squares,
        diversity=sums.diversity + jnp.sum(diversity),
    )


def _check(name: str, collector: Collector, catalog: Catalog) -> None:
    """Checks that actions are items, and that the tables cover these items."""
    checks.check_jax_collector(collector)
    space = collector.env.action_space
    rule = f"`settings[{name!r}]` must have items as actions, a `Discrete` space"
    if not isinstance(space, Discrete):
        raise ValueError(f"{rule}, got {type(space).__name__}.")
    for field, table in vars(catalog).items():
        if table is not None and np.shape(table)[:1] != (space.n,):
            raise ValueError(
                f"`catalog.{field}` must have one entry for each of {space.n} items, "
                f"got shape {np.shape(table)}."
            )

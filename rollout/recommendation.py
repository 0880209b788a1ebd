"""Evaluates recommendation policies in several settings, with the field's metrics.

A setting is a `Collector`. The settings share a policy, and differ in whether items may
be repeated and whether users leave. Metrics are folds over every step of exactly N
episodes.
"""

import functools
from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout import checks
from rollout.collector import Collector
from rollout.envs.spaces import Discrete, get_action_mask
from rollout.envs.types import Env
from rollout.envs.wrappers import FixedLength, NoRepeat
from rollout.policies.items import choose_items as choose_items
from rollout.policies.items import item_policy as item_policy
from rollout.stats import CollectStats, summarize
from rollout.types import Transition


class Catalogue(struct.PyTreeNode, kw_only=True):
    """Tables about the items, for the metrics; None if unknown.

    Attributes:
        features: `[I, F]` float32, features of each item, for the diversity.
        popularity: `[I]` float32, the share of users who know an item, above 0 and at
            most 1, for the novelty.
        dominated: `[I]` bool, whether an item has a value that dominates a feature,
            such as the most frequent category.
    """

    features: Any = None  # [I, F]
    popularity: Any = None  # [I]
    dominated: Any = None  # [I]


class RecommendationStats(struct.PyTreeNode, kw_only=True):
    """Metrics of exactly N episodes of recommendation.

    Each metric is `()` float32, or None if the `Catalogue` lacks the table for it.

    Attributes:
        episodes: statistics of the episodes, as `summarize` returns them.
        click_through_rate: mean reward of a recommendation.
        coverage: share of the catalogue that was recommended at least once.
        coverage_per_turn: number of different items over number of recommendations.
        diversity: 1 minus the cosine of the features of two items, averaged over all
            pairs in an episode, then over episodes; 1 for an episode of one item.
        novelty: minus the natural logarithm of the popularity, averaged over
            recommendations: the self-information in nats.
        dominated_share: share of recommendations of `dominated` items.
        no_valid_action_share: share of recommendations made when no item was left.

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
        no_valid_action: `()` int32, number of recommendations when no item was left.
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
    """Makes the three usual settings from one environment.

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
    force_length = checks.int_between("force_length", force_length)
    without = NoRepeat(env)
    return {
        "FB": env,
        "NX_0": without,
        f"NX_{force_length}": FixedLength(without, force_length),
    }


def evaluate_settings(
    settings: Mapping[str, Collector],
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    *,
    catalogue: Catalogue | None = None,
    max_episode_steps: int = checks.MAX_EPISODE_STEPS,
) -> dict[str, RecommendationStats]:
    """Plays exactly `num_episodes` in each setting. Jitted, as one program.

    All settings use the same key, so episode k has the same user in every setting.

    Args:
        settings: one collector per setting, by name; their actions are items, from 0.
        params: parameters of the policies.
        key: one typed key: the source of all randomness.
        num_episodes: N, at least 1. Static: one trace per value.
        catalogue: tables about the items.
        max_episode_steps: steps after which an episode is truncated, at least 1.

    Returns:
        Statistics by setting; `log_stats` flattens them for loggers, with setting names
        as prefixes.

    Raises:
        ValueError: if an argument does not match the description above.
    """
    checks.typed_key(key)
    num_episodes = checks.int_between("num_episodes", num_episodes)
    max_episode_steps = checks.max_episode_steps(max_episode_steps)
    catalogue = Catalogue() if catalogue is None else catalogue
    checks.kind("`settings` must be a dict", settings, Mapping)
    checks.kind("`catalogue` must be a `Catalogue`", catalogue, Catalogue)
    for name, collector in settings.items():
        # Check lengths: jax reads beyond the end of a table without an error.
        _check(name, collector, catalogue)
    catalogue = jax.tree.map(
        jnp.asarray, catalogue, is_leaf=lambda x: isinstance(x, list)
    )
    return _evaluate(
        dict(settings), params, key, num_episodes, catalogue, max_episode_steps
    )


@functools.partial(jax.jit, static_argnames=("num_episodes", "max_episode_steps"))
def _evaluate(
    settings: dict[str, Collector],
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    catalogue: Catalogue,
    max_episode_steps: int,
) -> dict[str, RecommendationStats]:
    directions = jnp.zeros((1, 0))
    if catalogue.features is not None:  # a zero vector stays zero
        length = jnp.linalg.norm(catalogue.features, axis=1, keepdims=True)
        directions = catalogue.features / jnp.where(length > 0.0, length, 1.0)

    def measure(collector: Collector) -> RecommendationStats:
        num_envs, num_items = collector.env.num_envs, collector.env.action_space.n
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
            num_episodes=num_episodes,
            max_episode_steps=max_episode_steps,
        )
        num_shown, num_different = jnp.sum(sums.counts), jnp.sum(sums.counts > 0)

        def mean(table: jax.Array | None) -> jax.Array | None:
            """Averages a table over the recommendations."""
            return None if table is None else jnp.sum(table * sums.counts) / num_shown

        popularity, has_features = catalogue.popularity, catalogue.features is not None
        return RecommendationStats(
            episodes=summarize(episodes),
            click_through_rate=jnp.sum(episodes.episode_return) / num_shown,
            coverage=num_different / num_items,
            coverage_per_turn=num_different / num_shown,
            diversity=sums.diversity / episodes.mask.size if has_features else None,
            novelty=mean(None if popularity is None else -jnp.log(popularity)),
            dominated_share=mean(catalogue.dominated),
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


def _check(name: str, collector: Collector, catalogue: Catalogue) -> None:
    """Checks that actions are items, and that the tables cover these items."""
    checks.collects_in_jax(collector)
    space = collector.env.action_space
    rule = f"`settings[{name!r}]` must have items as actions, a `Discrete` space"
    if not isinstance(space, Discrete):
        raise ValueError(f"{rule}, got {type(space).__name__}.")
    for field, table in vars(catalogue).items():
        if table is not None and np.shape(table)[:1] != (space.n,):
            raise ValueError(
                f"`catalogue.{field}` must have one entry for each of {space.n} items, "
                f"got shape {np.shape(table)}."
            )

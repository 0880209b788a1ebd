"""`evaluate`: statistics of exactly N episodes, in one line."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from rollout import checks
from rollout.collector import Collector
from rollout.host.host_collector import HostCollector
from rollout.nonfinite import count_nonfinite
from rollout.stats import CollectStats, summarize
from rollout.types import ParamsT, Transition


def evaluate(
    collector: Collector[ParamsT] | HostCollector[ParamsT],
    params: ParamsT,
    key: chex.PRNGKey,
    num_episodes: int,
    *,
    max_episode_steps: int = checks.MAX_EPISODE_STEPS,
) -> CollectStats:
    """Plays exactly `num_episodes` and summarizes them. Jitted for a `Collector`.

    Which episodes count is settled before any of them ends, so the mean return is
    unbiased and its confidence interval holds.

    An episode that a `HostCollector` with `on_fault="restart"` loses to a fault is one
    of the N, and not in the statistics: `num_episodes` is then smaller, and the mean
    biased, since long episodes fail more often.

    The policy starts from its initial state: an `EpsilonGreedy` at the first value of
    its schedule, a `RandomWarmup` with random actions. To evaluate without exploration,
    wrap the policy in `rollout.policies.Greedy`.

    Lanes take episodes from one queue, the first ones first, so that N below `num_envs`
    leaves lanes out. Where lanes differ, as those of `rollout.envs.vectorize_each`,
    summarize `collect_episodes(per_env=True)`, which plays equally many in each.

    With several agents the return is that of the team, and 0 in a zero-sum game:
    `rollout.agents.evaluate_agents` has that of each agent and policy.

    Returns are those of raw rewards, also under `NormalizeReward`. Statistics of
    `NormalizeObs` must be fixed, as by `collector.freeze(carry)`.

    Args:
        collector: policy and environments; fastest with `num_envs` near
            `num_episodes`.
        params: parameters of the policy.
        key: one typed key: the source of all randomness.
        num_episodes: N, at least 1. Static: one trace per value.
        max_episode_steps: steps of an episode after which it is cut, at least 1; cut
            episodes count, and `num_unfinished` is their number.

    Returns:
        Statistics of the N episodes, each `()`.

    Raises:
        ValueError: if `key` is not one typed key, if `num_episodes` or
            `max_episode_steps` is not an int of at least 1, if the environments learn
            statistics, or as `Collector.step` does.
    """
    checks.typed_key(key)
    checks.collects(collector)
    checks.statistics_are_fixed(collector)
    num_episodes = checks.int_between("num_episodes", num_episodes)
    run = _evaluate if collector.is_host else _evaluate_jitted
    return run(collector, params, key, num_episodes, max_episode_steps)


def _evaluate(
    collector: Collector | HostCollector,
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    max_episode_steps: int,
) -> CollectStats:
    _, num_nonfinite, played = collector.fold_episodes(
        collector.init(key),
        params,
        _count,
        jnp.zeros((), jnp.int32),
        num_episodes=num_episodes,
        max_episode_steps=max_episode_steps,
    )
    return summarize(played).replace(num_nonfinite=num_nonfinite)


# Here, and not inside: another function object would compile the fold again.
def _count(num_nonfinite: jax.Array, row: Transition) -> jax.Array:
    return num_nonfinite + count_nonfinite(row)


_evaluate_jitted = jax.jit(
    _evaluate, static_argnames=("num_episodes", "max_episode_steps")
)

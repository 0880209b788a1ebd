"""`evaluate`: computes statistics of a policy over exactly N episodes."""

from typing import Any, overload

import chex
import jax
import jax.numpy as jnp

from rollout.base import checks
from rollout.collector import Collector
from rollout.host.host_collector import HostCollector
from rollout.stats import CollectStats, count_nonfinite, summarize
from rollout.types import HasEvalCollector, ParamsT, Transition, choose_collector


@overload
def evaluate(
    collector: Collector[ParamsT] | HostCollector[ParamsT],
    params: ParamsT,
    key: chex.PRNGKey,
    num_episodes: int,
    *,
    max_episode_steps: int = ...,
) -> CollectStats: ...


@overload
def evaluate(
    collector: HasEvalCollector,
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    *,
    max_episode_steps: int = ...,
) -> CollectStats: ...


def evaluate(
    collector: Any,
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    *,
    max_episode_steps: int = checks.MAX_EPISODE_STEPS,
) -> CollectStats:
    """Plays exactly `num_episodes` and summarizes them. Jitted for a `Collector`.

    The N episodes are the first to start, so the mean return is unbiased and the
    confidence interval holds.

    A `HostCollector` with `on_fault="restart"` may lose some of the N episodes to
    faults. The statistics then omit them: `num_episodes` is smaller, and the mean is
    biased, since long episodes fail more often.

    To evaluate an agent of `rollout.recipes`, pass the agent and its state. The agent
    takes the most likely action:

        rollout.evaluate(agent, state, key, num_episodes=100)

    A collector runs its policy from the initial state: `EpsilonGreedy` uses the first
    value of the schedule, and `RandomWarmup` samples random actions. To evaluate
    without exploration, wrap the policy in `rollout.policies.Greedy`.

    Lanes take episodes from one queue in order, so some lanes play no episode if N is
    below `num_envs`. If lanes differ, as in `rollout.envs.vectorize_each`, every lane
    plays N / B episodes instead.

    With several agents the return is the team return, which is 0 in a zero-sum game:
    `rollout.agents.evaluate_agents` returns statistics of each agent and policy.

    Returns are sums of raw rewards, even with `NormalizeReward`. Fix the statistics of
    `NormalizeObs` first, for example by `collector.freeze(carry)`.

    Args:
        collector: policy and environments; or an agent. Evaluation is fastest if
            `num_envs` is near `num_episodes`. Host environments are stepped, which ends
            the episodes of a training: pass `agent.replace(env=eval_env)`.
        params: parameters of the policy; for an agent, its training state or the state
            of `rollout.recipes.load`.
        key: one typed key: the source of all randomness.
        num_episodes: N, at least 1. Static: one trace per value. If lanes differ, a
            multiple of `num_envs`.
        max_episode_steps: steps after which an episode is truncated, at least 1.
            Statistics include these episodes; `num_unfinished` is their number.

    Returns:
        Statistics of the N episodes, each `()`.

    Raises:
        ValueError: if `key` is not one typed key, if `num_episodes` or
            `max_episode_steps` is not an int of at least 1, if lanes differ and
            `num_episodes` is not a multiple of `num_envs`, if `params` is not the state
            of an agent, if the environments update statistics, or as `Collector.step`
            does.
    """
    checks.check_key(key)
    collector, params = choose_collector(collector, params)
    checks.check_collector(collector)
    checks.check_frozen(collector)
    num_episodes, per_env = checks.check_num_episodes(
        "num_episodes", num_episodes, collector.env
    )
    run = _evaluate if collector.is_host else _evaluate_jitted
    return run(collector, params, key, num_episodes, per_env, max_episode_steps)


def _evaluate(
    collector: Collector | HostCollector,
    params: Any,
    key: chex.PRNGKey,
    num_episodes: int,
    per_env: bool,
    max_episode_steps: int,
) -> CollectStats:
    _, num_nonfinite, episodes = collector.fold_episodes(
        collector.init(key),
        params,
        _count,
        jnp.zeros((), jnp.int32),
        num_episodes=num_episodes,
        max_episode_steps=max_episode_steps,
        per_env=per_env,
    )
    return summarize(episodes).replace(num_nonfinite=num_nonfinite)


# At module level: a new function object per call would compile the fold again.
def _count(num_nonfinite: jax.Array, row: Transition) -> jax.Array:
    return num_nonfinite + count_nonfinite(row)


_evaluate_jitted = jax.jit(
    _evaluate, static_argnames=("num_episodes", "per_env", "max_episode_steps")
)

"""One step of every lane, as a pure function. A rollout is a fold of `step` over time.

`init` creates the first carry. In `step`, `advance` applies the policy and steps the
environments, and `restart` starts new episodes in the finished lanes.
"""

import chex
import jax
import jax.numpy as jnp

from rollout.base import prng, trees
from rollout.envs.types import RESET, ArrayTree, EnvStep, Lanes, place
from rollout.kernel import keys
from rollout.kernel.isolation import is_endless, step_once
from rollout.kernel.keys import Roots, Start
from rollout.kernel.state import (
    accumulate,
    accumulate_nothing,
    check_env_step,
    final_value,
    init_policy_state,
    record,
    reset_policy_state,
)
from rollout.policies import base
from rollout.types import (
    Carry,
    Episode,
    FlagFn,
    KernelSpec,
    Params,
    PolicyStep,
    Transition,
)


def init(spec: KernelSpec, key: chex.PRNGKey) -> Carry:
    """Starts the first episode of every lane; see `Collector.init`."""
    num_envs = spec.env.num_envs
    first_keys = prng.fold_in(keys.roots(key, num_envs).lane, 0)
    env_state, obs = trees.barrier(spec.env).reset(prng.fold_in(first_keys, RESET))
    carry = Carry(
        key=key,
        step=jnp.zeros((), jnp.int32),
        next_episode=jnp.zeros((), jnp.int32),
        env_state=env_state,
        obs=obs,
        policy_state=init_policy_state(spec.policy, first_keys),
        episode=_begin(spec, first_keys, jnp.arange(num_envs, dtype=jnp.int32)),
    )
    return place(spec.env, carry)


def step(
    spec: KernelSpec,
    carry: Carry,
    params: Params,
    roots: Roots,
    *,
    policy_key: chex.PRNGKey | None = None,
    cut_fn: FlagFn | None = None,
) -> tuple[Carry, Transition]:
    """Takes a step in every lane, resets finished lanes, and records the transition.

    Args:
        spec: environments, policy, accumulators and `record_fn`.
        carry: the carry of `init` or of an earlier step.
        params: parameters of the policy.
        roots: root keys of the call, the same at every step.
        policy_key: the policy's key at this step; None derives it from `roots`.
        cut_fn: returns the lanes to truncate, for example at a time limit.
    """
    if policy_key is None:
        policy_key = keys.at_step(roots.policy, carry.step)
    next_carry, transition, _ = advance(spec, carry, params, policy_key, cut_fn)
    recorded = record(spec.record_fn, transition)
    if is_endless(transition):
        return next_carry, recorded
    start = keys.next_episodes(spec.env, next_carry, roots)
    return restart(spec, next_carry, transition.done, start), recorded


def advance(
    spec: KernelSpec,
    carry: Carry,
    params: Params,
    policy_key: chex.PRNGKey,
    cut_fn: FlagFn | None = None,
) -> tuple[Carry, Transition, jax.Array]:
    """Steps without resets; also returns the lanes that only `cut_fn` truncated."""
    episode = carry.episode
    with jax.named_scope("policy"):
        decision = act(spec, carry, params, policy_key)
    with jax.named_scope("env_step"):
        result = step_env(spec, carry, decision.action)
    with jax.named_scope("bookkeeping"):
        raw_reward = result.reward if result.raw_reward is None else result.raw_reward
        transition = Transition(
            obs=carry.obs,
            action=decision.action,
            reward=result.reward,
            terminated=result.terminated,
            truncated=result.truncated,
            next_obs=result.obs,
            mask=jnp.ones((spec.env.num_envs,), bool),
            episode_id=episode.episode_id,
            episode_return=episode.episode_return + raw_reward,
            episode_length=episode.episode_length + 1,
            extras=decision.extras,
            info=result.info,
        )
        is_forced = jnp.zeros_like(result.truncated)
        if cut_fn is not None:
            truncate = cut_fn(transition)
            is_forced = truncate & ~result.truncated
            transition = transition.replace(truncated=result.truncated | truncate)
        # Accumulate last, so that accumulators observe the final flags.
        transition = accumulate(spec.accumulators, episode.accumulated, transition)
        next_carry = carry.replace(
            step=carry.step + 1,
            env_state=result.state,
            obs=result.obs,
            policy_state=decision.state,
            episode=episode.replace(
                episode_return=transition.episode_return,
                episode_length=transition.episode_length,
                accumulated=transition.accumulated,
            ),
        )
    # No lane is reset yet, so the new carry contains the true successors.
    value = final_value(spec, next_carry, params, transition)
    return next_carry, transition.replace(final_value=value), is_forced


def act(
    spec: KernelSpec, carry: Carry, params: Params, key: chex.PRNGKey
) -> PolicyStep:
    """Applies the policy to the carry's observations, and validates the output."""
    sharding = spec.env.sharding
    with prng.in_parts(sharding.num_devices if sharding else 1):
        args = params, carry.obs, carry.policy_state, key
        return base.act(spec.policy, spec.env.action_space, spec.env.num_envs, *args)


def step_env(spec: KernelSpec, carry: Carry, action: ArrayTree) -> EnvStep:
    """Steps the environments without resets."""
    # Without the barrier XLA would fold closed-over parameters and round differently.
    env, episode = trees.barrier(spec.env), carry.episode

    def checked_step(*args: ArrayTree) -> EnvStep:
        return check_env_step(carry, env.step(*args))

    step_keys = prng.fold_in(episode.key, episode.episode_length + 1)
    args = step_keys, carry.env_state, action
    if env.sharding:  # it calls `step_once` on every device
        return checked_step(*args)
    return step_once(checked_step, *args, counter=carry.step)


def restart(spec: KernelSpec, carry: Carry, restarts: jax.Array, start: Start) -> Carry:
    """Starts the episodes of `start` in the lanes with `restarts`, `[B]` bool."""
    env, episode = spec.env, carry.episode
    with jax.named_scope("auto_reset"):
        # `start` maps lane indices to keys, so only restarted lanes derive keys.
        old = Lanes(episode_key=episode.key, state=carry.env_state, obs=carry.obs)
        new = trees.barrier(env).reset_done(start, restarts, old)
    with jax.named_scope("bookkeeping"):
        key, state = new.episode_key, carry.policy_state
        state = reset_policy_state(spec.policy, state, restarts, key)
        new_episode = _begin(spec, key, start.episode_id)
        episode = trees.select(restarts, new_episode, episode.replace(key=key))
        carry = carry.replace(
            env_state=new.state, obs=new.obs, policy_state=state, episode=episode
        )
        return place(env, carry)


def _begin(spec: KernelSpec, key: chex.PRNGKey, episode_id: jax.Array) -> Episode:
    return Episode(
        key=key,
        episode_return=jnp.zeros(key.shape, jnp.float32),
        episode_length=jnp.zeros(key.shape, jnp.int32),
        episode_id=episode_id,
        accumulated=accumulate_nothing(spec.accumulators, spec.env.num_envs),
    )

"""The kernel: `init` and `step`, one batched transition, nothing else.

Randomness comes from counters. Under the root key hang two streams: `_POLICY`, folded
with the step number for the policy's key, and `_ENV`, folded with the lane and the
number of its episode for the episode key. So nothing is drawn that is not read, a
lane's stream does not depend on the number of lanes, and the key is not carried.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from envs import keys
from envs.types import RESET, EnvStep, Lanes, VectorEnv
from rollout import checks, fence
from rollout.types import Carry, Episode, Policy, PolicyStep, Transition

_POLICY, _ENV = 0, 1


def init(env: VectorEnv, policy: Policy, key: chex.PRNGKey) -> Carry:
    """Starts the first episode of every lane; see `Collector.init`."""
    env = keys.barrier(env)  # see `step`
    lane = jnp.arange(env.num_envs, dtype=jnp.int32)
    episode_key = keys.fold_in(keys.fold_in(keys.fold_in(key, _ENV), lane), 0)
    env_state, obs = env.reset(keys.fold_in(episode_key, RESET))
    return Carry(
        key=key,
        step=jnp.zeros((), jnp.int32),
        env_state=env_state,
        obs=obs,
        policy_state=_initial_policy_state(policy, env.num_envs),
        episode=Episode(
            key=episode_key,
            episode_return=jnp.zeros(lane.shape, jnp.float32),
            episode_length=jnp.zeros(lane.shape, jnp.int32),
            episode_id=lane,
        ),
    )


def step(
    env: VectorEnv, policy: Policy, carry: Carry, params: Any
) -> tuple[Carry, Transition]:
    """Takes one step in every lane; see `Collector.step`."""
    # Parameters of a collector that is closed over are constants to XLA, which folds
    # them and then rounds otherwise than where the collector is an argument.
    env = keys.barrier(env)
    with jax.named_scope("policy"):
        decision = _act(env, policy, carry, params)
    with jax.named_scope("env_step"):
        result = _step_env(env, carry, decision.action)
    with jax.named_scope("bookkeeping"):
        transition = _record(env, carry, decision, result)
    with jax.named_scope("auto_reset"):
        lanes = _reset_done(env, carry, result, transition.done)
    with jax.named_scope("bookkeeping"):
        return _advance(env, policy, carry, decision, transition, lanes), transition


def _act(env: VectorEnv, policy: Policy, carry: Carry, params: Any) -> PolicyStep:
    policy_key = keys.fold_in(keys.fold_in(carry.key, _POLICY), carry.step)
    decision = policy.apply(params, carry.obs, carry.policy_state, policy_key)
    checks.policy_step(decision, env, carry.policy_state)
    return decision


def _step_env(env: VectorEnv, carry: Carry, action: chex.ArrayTree) -> EnvStep:
    def step(*args: chex.ArrayTree) -> EnvStep:
        result = env.step(*args)
        checks.env_step(result, env.num_envs, carry.env_state, carry.obs)
        return result

    step_keys = keys.fold_in(carry.episode.key, carry.episode.episode_length + 1)
    return fence.step_once(step, step_keys, carry.env_state, action, counter=carry.step)


def _record(
    env: VectorEnv, carry: Carry, decision: PolicyStep, result: EnvStep
) -> Transition:
    episode = carry.episode
    return Transition(
        obs=carry.obs,
        action=decision.action,
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        next_obs=result.obs,
        mask=jnp.ones((env.num_envs,), bool),
        episode_id=episode.episode_id,
        episode_return=episode.episode_return + result.reward,
        episode_length=episode.episode_length + 1,
        extras=decision.extras,
        info=result.info,
    )


def _reset_done(
    env: VectorEnv, carry: Carry, result: EnvStep, done: jax.Array
) -> Lanes:
    env_key = keys.fold_in(carry.key, _ENV)

    def next_episode_key(lane: jax.Array) -> chex.PRNGKey:
        number = carry.episode.episode_id[lane] // env.num_envs + 1
        return keys.fold_in(keys.fold_in(env_key, lane), number)

    lanes = Lanes(episode_key=carry.episode.key, state=result.state, obs=result.obs)
    return env.reset_done(next_episode_key, done, lanes)


def _advance(
    env: VectorEnv,
    policy: Policy,
    carry: Carry,
    decision: PolicyStep,
    transition: Transition,
    lanes: Lanes,
) -> Carry:
    """The carry of the next step: what belongs to an episode starts anew with it."""
    done = transition.done
    episode = Episode(
        key=lanes.episode_key,
        episode_return=jnp.where(done, 0.0, transition.episode_return),
        episode_length=jnp.where(done, 0, transition.episode_length),
        episode_id=jnp.where(
            done, transition.episode_id + env.num_envs, transition.episode_id
        ),
    )
    fresh = _initial_policy_state(policy, env.num_envs)
    return carry.replace(
        step=carry.step + 1,
        env_state=lanes.state,
        obs=lanes.obs,
        policy_state=keys.select(done, fresh, decision.state),
        episode=episode,
    )


def _initial_policy_state(policy: Policy, num_envs: int) -> chex.ArrayTree:
    state = jax.tree.map(jnp.asarray, policy.init(num_envs))
    checks.policy_init(state, num_envs)
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), state)

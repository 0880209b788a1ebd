"""The kernel: `init` and `step`, one batched transition, nothing else.

`step` is `advance`, which resets nothing, then `restart` of the lanes that are done.

Randomness comes from counters. Under the root key hang three streams: `_POLICY`, folded
with the step number for the policy's key; `_ENV`, folded with the lane and the number
of its episode for the episode key; `_QUEUE`, folded with the position of an episode in
the queue that `collect_episodes` serves. So nothing is drawn that is not read, a lane's
stream does not depend on the number of lanes, and the key is not carried.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from envs import keys
from envs.types import RESET, EnvStep, Lanes, VectorEnv
from rollout import checks
from rollout.kernel import fence
from rollout.types import (
    Carry,
    Episode,
    Persistent,
    Policy,
    PolicyStep,
    Transition,
)

_POLICY, _ENV, _QUEUE = 0, 1, 2


class Start(NamedTuple):
    """The episodes that lanes start next: lane numbers to keys, and `[B]` their ids."""

    key_fn: Callable[[jax.Array], chex.PRNGKey]
    episode_id: jax.Array  # [B]


def init(env: VectorEnv, policy: Policy, key: chex.PRNGKey) -> Carry:
    """Starts the first episode of every lane; see `Collector.init`."""
    env = keys.barrier(env)  # see `step`
    lane = jnp.arange(env.num_envs, dtype=jnp.int32)
    episode_key = _own_key(env_key=keys.fold_in(key, _ENV), lane=lane, number=0)
    env_state, obs = env.reset(keys.fold_in(episode_key, RESET))
    return Carry(
        key=key,
        step=jnp.zeros((), jnp.int32),
        next_episode=jnp.zeros((), jnp.int32),
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
    carry, transition = advance(env, policy, carry, params)
    start = own_episodes(carry.key, carry.episode.episode_id, ahead=1)
    return restart(env, policy, carry, transition.done, start), transition


def advance(
    env: VectorEnv, policy: Policy, carry: Carry, params: Any
) -> tuple[Carry, Transition]:
    """Takes one step in every lane and resets none: the next carry is that of step t+1.

    A lane whose episode ended must be given to `restart` before it is stepped again.
    """
    with jax.named_scope("policy"):
        decision = act(env, policy, carry, params)
    with jax.named_scope("env_step"):
        result = step_env(env, carry, decision.action)
    with jax.named_scope("bookkeeping"):
        transition = _record(env, carry, decision, result)
        carry = carry.replace(
            step=carry.step + 1,
            env_state=result.state,
            obs=result.obs,
            policy_state=decision.state,
            episode=carry.episode.replace(
                episode_return=transition.episode_return,
                episode_length=transition.episode_length,
            ),
        )
    return carry, transition


def restart(
    env: VectorEnv, policy: Policy, carry: Carry, over: jax.Array, start: Start
) -> Carry:
    """Starts new episodes in the lanes where `over`, `[B]` bool."""
    episode = carry.episode
    with jax.named_scope("auto_reset"):
        lanes = Lanes(episode_key=episode.key, state=carry.env_state, obs=carry.obs)
        lanes = env.reset_done(start.key_fn, over, lanes)
    with jax.named_scope("bookkeeping"):
        return carry.replace(
            env_state=lanes.state,
            obs=lanes.obs,
            policy_state=_restart_policy(policy, carry.policy_state, over),
            episode=Episode(
                key=lanes.episode_key,
                episode_return=jnp.where(over, 0.0, episode.episode_return),
                episode_length=jnp.where(over, 0, episode.episode_length),
                episode_id=jnp.where(over, start.episode_id, episode.episode_id),
            ),
        )


def record(
    record_fn: Callable[[Transition], Transition] | None, transition: Transition
) -> Transition:
    """What is handed out of a transition; see `Collector.record_fn`."""
    if record_fn is None:
        return transition
    recorded = record_fn(transition)
    checks.recorded(transition, recorded)
    return recorded


def own_episodes(key: chex.PRNGKey, episode_id: jax.Array, *, ahead: int = 0) -> Start:
    """Those of the lanes' own streams that come `ahead` after `episode_id`, `[B]`."""
    env_key, num_envs = keys.fold_in(key, _ENV), episode_id.shape[0]

    def key_fn(lane: jax.Array) -> chex.PRNGKey:
        return _own_key(env_key, lane, episode_id[lane] // num_envs + ahead)

    return Start(key_fn, episode_id + ahead * num_envs)


def queued_episodes(key: chex.PRNGKey, position: jax.Array) -> Start:
    """The episodes at `position`, `[B]` int32, of the queue that all lanes serve."""
    queue_key = keys.fold_in(key, _QUEUE)

    def key_fn(lane: jax.Array) -> chex.PRNGKey:
        return keys.fold_in(queue_key, position[lane])

    return Start(key_fn, -1 - position)


def _own_key(
    env_key: chex.PRNGKey, lane: jax.Array, number: jax.typing.ArrayLike
) -> chex.PRNGKey:
    """The key of a lane's how-many-eth episode, from 0."""
    return keys.fold_in(keys.fold_in(env_key, lane), number)


def act(env: VectorEnv, policy: Policy, carry: Carry, params: Any) -> PolicyStep:
    """Asks the policy what to do at the carry's step."""
    policy_key = keys.fold_in(keys.fold_in(carry.key, _POLICY), carry.step)
    decision = policy.apply(params, carry.obs, carry.policy_state, policy_key)
    checks.policy_step(decision, env, carry.policy_state)
    return decision


def step_env(env: VectorEnv, carry: Carry, action: chex.ArrayTree) -> EnvStep:
    """Steps the environments, and resets none."""

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


def _restart_policy(
    policy: Policy, state: chex.ArrayTree, over: jax.Array
) -> chex.ArrayTree:
    """Puts the lanes where `over` back to the initial state, but what is persistent."""

    def choose(fresh: chex.ArrayTree, state: chex.ArrayTree) -> chex.ArrayTree:
        return state if _is_persistent(state) else keys.select(over, fresh, state)

    fresh = _initial_policy_state(policy, over.shape[0])
    return jax.tree.map(choose, fresh, state, is_leaf=_is_persistent)


def _is_persistent(state: Any) -> bool:
    return isinstance(state, Persistent)


def _initial_policy_state(policy: Policy, num_envs: int) -> chex.ArrayTree:
    state = jax.tree.map(jnp.asarray, policy.init(num_envs))
    checks.policy_init(state, num_envs)
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), state)

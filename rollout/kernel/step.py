"""The pure step of every collector: `advance` all lanes, then `restart` those done.

Every fold over time folds `step`, which does everything else: it steps the environment
by `platform.step_once`, derives the keys and applies the limit. The functions take the
collector, and read its environment, policy and accumulators.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from rollout import checks, platform
from rollout.envs import masked_update, prng
from rollout.envs.multi_agent import AgentInfo
from rollout.envs.types import (
    RESET,
    ArrayTree,
    EnvStep,
    LaneIndex,
    Lanes,
    VectorEnv,
    sharding_of,
    strong,
)
from rollout.kernel import episode_keys
from rollout.kernel.episode_keys import POLICY_EPISODE, Roots, Start
from rollout.types import (
    Accumulators,
    Carry,
    Episode,
    EpisodeKey,
    Persistent,
    Policy,
    PolicyStep,
    Transition,
    ValueFn,
)

_Tree = TypeVar("_Tree", bound=ArrayTree)


def init(collector: Any, key: chex.PRNGKey) -> Carry:
    """Starts the first episode of every lane; see `Collector.init`."""
    env, policy = collector.env, collector.policy
    lanes = episode_keys.all_lanes(env.num_envs)
    episode = Episode(
        key=prng.fold_in(episode_keys.roots(key, lanes).lane, 0),
        episode_return=jnp.zeros((env.num_envs,), jnp.float32),
        episode_length=jnp.zeros((env.num_envs,), jnp.int32),
        episode_id=lanes.number,
        accumulated=accumulate_nothing(collector.accumulators, env.num_envs),
    )
    env_state, obs = prng.barrier(env).reset(prng.fold_in(episode.key, RESET))
    carry = Carry(
        key=key,
        step=jnp.zeros((), jnp.int32),
        next_episode=jnp.zeros((), jnp.int32),
        env_state=env_state,
        obs=obs,
        policy_state=initial_policy_state(policy, env, episode.key),
        episode=episode,
    )
    return _place(env, carry)


def step(
    collector: Any,
    carry: Carry,
    params: Any,
    *,
    roots: Roots | None = None,
    policy_key: chex.PRNGKey | None = None,
    limit: int | None = None,
    cut: jax.Array | None = None,
    drop_fn: Callable[[Transition], jax.Array] | None = None,
) -> tuple[Carry, Transition]:
    """Takes one step in every lane, and starts new episodes where the old ones ended.

    Returns the next carry, and the recorded transition.

    Args:
        collector: environments, policy and accumulators.
        carry: the carry of `init` or of an earlier step.
        params: parameters of the policy.
        roots: the keys that others derive from, hashed once per call; None hashes them
            here.
        policy_key: the policy's key at this step; None hashes it here.
        limit: steps after which an episode is truncated.
        cut: `()` bool, whether to truncate every episode that this step does not end.
        drop_fn: the recorded transition to `[B]` bool, True where to give the episode
            up.
    """
    roots = roots or roots_of(collector, carry)
    stepped, transition, _ = advance(
        collector,
        carry,
        params,
        roots=roots,
        policy_key=policy_key,
        limit=limit,
        cut=cut,
    )
    recorded = apply_record_fn(collector.record_fn, transition)
    if drop_fn is None and _never_set(transition.terminated, transition.truncated):
        return stepped, recorded
    over = transition.done
    if drop_fn is not None:
        over |= drop_fn(recorded)
    start = next_episodes(collector.env, stepped, roots)
    return restart(collector, stepped, over, start), recorded


def advance(
    collector: Any,
    carry: Carry,
    params: Any,
    *,
    roots: Roots,
    policy_key: chex.PRNGKey | None = None,
    limit: int | None = None,
    cut: jax.Array | None = None,
) -> tuple[Carry, Transition, jax.Array]:
    """Takes one step in every lane and resets none.

    Pass lanes whose episode ended to `restart` before the next step.

    Returns:
        The carry of step t + 1, the transition, and `[B]` bool, True where only `limit`
        truncated.
    """
    env, policy = collector.env, collector.policy
    with jax.named_scope("policy"):
        policy_key = _policy_key(roots, carry.step, policy_key)
        decision = act(env, policy, carry, params, policy_key)
    with jax.named_scope("env_step"):
        result = step_env(env, carry, decision.action)
    with jax.named_scope("bookkeeping"):
        transition = _make_transition(env, carry, decision, result)
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
        by_limit = jnp.zeros_like(transition.truncated)
        # Both come before the accumulators, which must see the final flags.
        if limit is not None:
            at_limit = transition.episode_length >= limit
            by_limit = at_limit & ~transition.truncated
            transition = transition.replace(truncated=transition.truncated | at_limit)
        if cut is not None:
            goes_on = cut & ~transition.done
            transition = transition.replace(truncated=transition.truncated | goes_on)
        if collector.accumulators:
            accumulated = accumulate(
                collector.accumulators, carry.episode.accumulated, transition
            )
            transition = transition.replace(accumulated=accumulated)
            carry = carry.replace(
                episode=carry.episode.replace(accumulated=accumulated)
            )
    if policy.value is not None:
        # Nothing is reset yet, so the new carry has the true successor.
        with jax.named_scope("final_value"):
            goes_on = transition.truncated & ~transition.terminated
            agents = getattr(transition.info, "agents", None)
            if isinstance(agents, AgentInfo):  # one of them may be cut alone
                goes_on |= jnp.any(agents.truncated, axis=-1)
            value = values_where(
                env, policy.value, params, carry.obs, carry.policy_state, goes_on
            )
            transition = transition.replace(final_value=value)
    return carry, transition, by_limit


def restart(collector: Any, carry: Carry, over: jax.Array, start: Start) -> Carry:
    """Starts the episodes of `start` in the lanes where `over`, `[B]` bool."""
    env, episode = collector.env, carry.episode
    # `start` is a function of lanes: the environment derives keys only for those that
    # it resets. The barrier is that of `step_env`.
    with jax.named_scope("auto_reset"):
        old = Lanes(episode_key=episode.key, state=carry.env_state, obs=carry.obs)
        new = prng.barrier(env).reset_done(start, over, old)
    with jax.named_scope("bookkeeping"):
        fresh = carry.replace(
            env_state=new.state,
            obs=new.obs,
            policy_state=restart_policy(
                collector.policy, env, carry.policy_state, over, new.episode_key
            ),
            episode=Episode(
                key=new.episode_key,
                episode_return=jnp.where(over, 0.0, episode.episode_return),
                episode_length=jnp.where(over, 0, episode.episode_length),
                episode_id=jnp.where(over, start.episode_id, episode.episode_id),
                accumulated=prng.select(
                    over,
                    accumulate_nothing(collector.accumulators, env.num_envs),
                    episode.accumulated,
                ),
            ),
        )
        return _place(env, fresh)


def roots_of(collector: Any, carry: Carry) -> Roots:
    """Checks a carry, and hashes the keys from which those of all its steps derive."""
    checks.carry(carry, collector)
    lanes = episode_keys.all_lanes(collector.env.num_envs)
    return _place(collector.env, episode_keys.roots(carry.key, lanes))


def policy_keys(roots: Roots, carry: Carry, num_steps: int) -> chex.PRNGKey:
    """Hashes the policy's keys of the next steps, `[num_steps]`."""
    steps = carry.step + jnp.arange(num_steps, dtype=jnp.int32)
    return episode_keys.at_step(roots.policy, steps)


def next_episodes(env: VectorEnv, carry: Carry, roots: Roots) -> Start:
    """Returns the lanes' own next episodes."""
    return Start(roots.lane, carry.episode.episode_id + env.num_envs, env.num_envs)


def act(
    env: VectorEnv,
    policy: Policy,
    carry: Carry,
    params: Any,
    policy_key: chex.PRNGKey,
) -> PolicyStep:
    """Applies the policy to the carry's observations, and checks its output."""
    sharding = sharding_of(env)
    with prng.in_parts(sharding.num_devices if sharding else 1):
        decision = policy.apply(params, carry.obs, carry.policy_state, policy_key)
    return checks.policy_step(decision, env, carry.policy_state)


def step_env(env: VectorEnv, carry: Carry, action: ArrayTree) -> EnvStep:
    """Steps the environments, and resets none."""
    # If the user's function closes over the collector, XLA folds its parameters as
    # constants, and rounds differently than for a collector that is an argument.
    env = prng.barrier(env)

    def step(*args: ArrayTree) -> EnvStep:
        result = env.step(*args)
        checks.env_step(result, env.num_envs, carry.env_state, carry.obs)
        return result

    episode = carry.episode
    step_keys = prng.fold_in(episode.key, episode.episode_length + 1)
    if sharding_of(env):  # it calls `step_once` itself, on every device
        return step(step_keys, carry.env_state, action)
    return platform.step_once(
        step, step_keys, carry.env_state, action, counter=carry.step
    )


def values_where(
    env: VectorEnv,
    value_fn: ValueFn,
    params: Any,
    obs: ArrayTree,
    policy_state: ArrayTree,
    flag: jax.Array,
) -> ArrayTree:
    """Computes the values of observations where a flag is set; 0 elsewhere.

    Truncations are rare, so a CPU computes `K` lanes at a time, mostly none, and a GPU
    all lanes if a value is cheap, else none, `K` or all: `masked_update.by_platform`
    has the rule, which is that of resets. Sharded lanes are computed on their devices.
    No derivative passes through.

    Args:
        env: the environments.
        value_fn: see `Policy.value`.
        params: parameters of the policy.
        obs: `[B, ...]`.
        policy_state: `[B, ...]`, state of the policy when it sees `obs`.
        flag: `[B]` bool.

    Returns:
        `[B]`, or by group `[B, A_g]`, of the dtype of the values.
    """
    compute = functools.partial(_values_where, value_fn)
    if (sharding := sharding_of(env)) is not None:
        compute = functools.partial(sharding.map, compute)
    fixed = *lax.stop_gradient((params, (obs, policy_state))), flag
    # `value_fn` may also close over what is differentiated.
    compute, closed_over = jax.closure_convert(compute, *fixed)
    return compute(*fixed, *lax.stop_gradient(closed_over))


def _values_where(
    value_fn: ValueFn, params: Any, inputs: tuple[ArrayTree, ArrayTree], flag: jax.Array
) -> ArrayTree:
    # Jitted, so that the ways below trace it once for each number of lanes.
    @jax.jit
    def evaluate(params: Any, inputs: tuple[ArrayTree, ArrayTree]) -> ArrayTree:
        try:
            values = value_fn(params, *inputs)
        except Exception as error:
            checks.own_values(error, inputs[0], flag.size)
            raise
        checks.values(values, inputs[0])
        return values

    def fn(at: LaneIndex) -> ArrayTree:
        return evaluate(params, jax.tree.map(lambda x: x[at], inputs))

    nothing = prng.blank(jax.eval_shape(evaluate, params, inputs))
    return masked_update.by_platform(flag, fn, nothing)


def apply_record_fn(
    record_fn: Callable[[Transition], Transition] | None, transition: Transition
) -> Transition:
    """Applies `record_fn` to a transition; see `Collector.record_fn`."""
    if record_fn is None:
        return transition
    recorded = record_fn(transition)
    checks.recorded(transition, recorded)
    return recorded


def mask_out(transition: Transition) -> Transition:
    """Zeroes the masked-out lanes, whose `mask` is False."""
    return prng.select(transition.mask, transition, prng.blank(transition))


def pack(transition: Transition) -> tuple[Transition, jax.Array]:
    """Packs a transition for stacking: both flags in one array, and no mask.

    XLA:CPU pays for every array that a step writes, and the caller knows the mask.
    """
    flags = pack_flags(transition.terminated, transition.truncated)
    return transition.replace(terminated=(), truncated=(), mask=()), flags


def writable_in_cuda_graph(row: _Tree, counter: jax.Array) -> _Tree:
    """Lets a CUDA graph write the row; `counter` is any `()` int32 of the loop.

    XLA writes an unchanged array, such as an observation, by a copy. On a GPU a copy
    cannot be part of a CUDA graph, and splits the step into separate launches. A select
    can; its predicate is always true, which XLA cannot know.
    """
    return platform.choose(
        lambda row: row,
        lambda row: prng.select((counter | 1) != 0, row, prng.blank(row)),
        row,
    )


def unpack(packed: tuple[Transition, jax.Array]) -> Transition:
    """Undoes `pack`, over any leading axes, for lanes of which none is idle."""
    rows, flags = packed
    terminated, truncated = unpack_flags(flags, 2)
    mask = jnp.ones(flags.shape, bool)
    return rows.replace(terminated=terminated, truncated=truncated, mask=mask)


def pack_flags(*flags: jax.Array) -> jax.Array:
    """Packs up to eight flags into one uint8 array."""
    shifted = (flag.astype(jnp.uint8) << bit for bit, flag in enumerate(flags))
    return functools.reduce(operator.add, shifted)


def unpack_flags(packed: jax.Array, num_flags: int) -> tuple[jax.Array, ...]:
    """Undoes `pack_flags`."""
    return tuple((packed & (1 << bit)) != 0 for bit in range(num_flags))


def _policy_key(
    roots: Roots, step: jax.Array, hashed: chex.PRNGKey | None
) -> chex.PRNGKey:
    """Returns the policy's key at a step: hashed before the loop, except on a CPU."""

    def hash_now() -> chex.PRNGKey:
        return episode_keys.at_step(roots.policy, step)

    if hashed is None:
        return hash_now()
    # A CPU hashes a key in the loop faster than it reads one from memory. Elsewhere the
    # keys of all steps are hashed at once, before the loop, which saves launches.
    return lax.platform_dependent(
        hashed, cpu=lambda _: hash_now(), default=lambda hashed: hashed
    )


def _make_transition(
    env: VectorEnv, carry: Carry, decision: PolicyStep, result: EnvStep
) -> Transition:
    episode = carry.episode
    raw_reward = result.reward if result.raw_reward is None else result.raw_reward
    return Transition(
        obs=carry.obs,
        action=decision.action,
        reward=result.reward,
        terminated=result.terminated,
        truncated=result.truncated,
        next_obs=result.obs,
        mask=jnp.ones((env.num_envs,), bool),
        episode_id=episode.episode_id,
        episode_return=episode.episode_return + raw_reward,
        episode_length=episode.episode_length + 1,
        extras=decision.extras,
        info=result.info,
    )


def _never_set(*flags: jax.Array) -> bool:
    """Returns whether flags are known to be False when tracing; see `step_once`."""
    return not any(isinstance(x, Tracer) or np.asarray(x).any() for x in flags)


def accumulate_nothing(accumulators: Accumulators, num_envs: int) -> ArrayTree:
    """Initializes the accumulators for the start of an episode, `[B, ...]`."""
    accumulated = {name: x.init(num_envs) for name, x in accumulators}
    return strong(accumulated or ())


def accumulate(
    accumulators: Accumulators, accumulated: ArrayTree, transition: Transition
) -> ArrayTree:
    """Updates the accumulators with a step."""
    updated = {
        name: x.update(accumulated[name], transition) for name, x in accumulators
    }
    for name, _ in accumulators:
        what = f"The accumulator `{name}` must return the kind of value it takes"
        checks.same(what, accumulated[name], updated[name])
    return strong(updated)


def _place(env: VectorEnv, tree: _Tree) -> _Tree:
    """Keeps the lanes on their devices, if they are sharded."""
    sharding = sharding_of(env)
    return tree if sharding is None else sharding.place(tree)


def restart_policy(
    policy: Policy,
    env: VectorEnv,
    state: ArrayTree,
    over: jax.Array,
    episode_key: chex.PRNGKey,
) -> ArrayTree:
    """Resets the policy state where `over`, except for its `Persistent` parts."""

    def choose(fresh: ArrayTree, state: ArrayTree) -> ArrayTree:
        if isinstance(state, Persistent):
            return state
        return prng.select(over, fresh, state)

    fresh = initial_policy_state(policy, env, episode_key)
    return jax.tree.map(
        choose, fresh, state, is_leaf=lambda x: isinstance(x, Persistent)
    )


def initial_policy_state(
    policy: Policy, env: VectorEnv, episode_key: chex.PRNGKey
) -> ArrayTree:
    """Makes the policy state at the start of the episodes with these keys, `[B]`."""

    def make(x: Any) -> ArrayTree:
        if isinstance(x, EpisodeKey):
            return EpisodeKey(prng.fold_in(episode_key, POLICY_EPISODE))
        return jnp.asarray(x, jnp.result_type(x))

    state = jax.tree.map(
        make, policy.init(env.num_envs), is_leaf=lambda x: isinstance(x, EpisodeKey)
    )
    checks.of_lanes("`policy.init` must return leaves", state, (env.num_envs,))
    return state

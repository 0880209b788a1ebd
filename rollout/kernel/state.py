"""Functions of a step for the carry, the policy state, the critic and recording.

`roots_of` validates a carry. `init_policy_state` and `reset_policy_state` reset the
policy's recurrent state at episode boundaries. `final_value` evaluates the critic at
truncations. `record` and `accumulate` compute the recorded fields of a transition.
"""

import functools
import operator
from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from rollout.base import checks, prng, trees
from rollout.envs import auto_reset
from rollout.envs.multi_agent import MultiAgentInfo
from rollout.envs.types import ArrayTree, EnvStep, LaneIndex, VectorEnv, place, strong
from rollout.kernel import keys
from rollout.kernel.keys import POLICY_EPISODE, Roots
from rollout.policies.base import select_initial
from rollout.types import (
    Accumulator,
    Accumulators,
    Carry,
    EpisodeKey,
    KernelSpec,
    Policy,
    RecordFn,
    Transition,
    check_carry,
    check_policy,
)

# Fields that a `record_fn` must not change, since statistics and episodes read them.
_BOOKKEEPING = (
    *("terminated", "truncated", "mask", "episode_id"),
    *("episode_return", "episode_length", "accumulated"),
)


def roots_of(spec: KernelSpec, carry: Carry) -> Roots:
    """Validates a carry, and hashes the root keys from which step keys derive."""
    check_fits(spec, carry)
    return place(spec.env, keys.roots(carry.key, spec.env.num_envs))


def check_fits(spec: KernelSpec, carry: Carry) -> None:
    """Checks that a carry matches the output of this collector's `init`."""
    check_carry(carry)
    # The type of an array inside `shard_map` names the axes over which it varies.
    avals = map(jax.typeof, jax.tree.leaves(carry))
    if varying := frozenset[str]().union(*(x.mat.varying for x in avals)):
        raise ValueError(
            "A collector inside `jax.shard_map` needs `check_vma=False`, got a carry "
            f"that varies over {', '.join(map(repr, sorted(varying)))}: the branches "
            "for different platforms vary over different axes, and fail the check."
        )
    template = jax.eval_shape(spec.init, carry.key)  # from the cache after an `init`
    for name, expected in vars(template).items():
        message = f"`carry.{name}` must match the output of this collector's `init`"
        checks.check_same_types(message, expected, vars(carry)[name])


def check_env_step(carry: Carry, result: EnvStep) -> EnvStep:
    """Checks that a step returns the structure, shapes and dtypes of a reset."""
    checks.check_type(
        "`env.step` must return a `rollout.envs.EnvStep`", result, EnvStep
    )
    arrays = [
        ("reward", result.reward, jnp.float32),
        ("terminated", result.terminated, jnp.bool_),
        ("truncated", result.truncated, jnp.bool_),
    ]
    if result.raw_reward is not None:
        arrays.append(("raw_reward", result.raw_reward, jnp.float32))
    lanes = carry.episode.episode_id.shape
    for name, array, dtype in arrays:
        checks.check_shape(f"`env.step` must return `{name}` as", array, lanes, dtype)
    message = "`env.step` must return the state as `env.reset` does"
    checks.check_same_types(message, carry.env_state, result.state)
    message = "`env.step` must return `obs` as `env.reset` does"
    checks.check_same_types(message, carry.obs, result.obs)
    return result


def init_policy_state(policy: Policy, episode_key: chex.PRNGKey) -> ArrayTree:
    """Returns the policy's state at the start of the episodes with these `[B]` keys."""

    def make(x: Any) -> ArrayTree:
        if isinstance(x, EpisodeKey):
            return EpisodeKey(prng.fold_in(episode_key, POLICY_EPISODE))
        # Use strong types, like the policy's outputs: otherwise the second call would
        # trace again.
        return jnp.asarray(x, jnp.result_type(x))

    initial = policy.init(episode_key.size)
    state = jax.tree.map(make, initial, is_leaf=lambda x: isinstance(x, EpisodeKey))
    checks.check_leading_axes(
        "`policy.init` must return leaves", state, episode_key.shape
    )
    return state


def reset_policy_state(
    policy: Policy, state: ArrayTree, restarts: jax.Array, episode_key: chex.PRNGKey
) -> ArrayTree:
    """Resets the state in the lanes with `restarts`, except for `Persistent` parts."""
    return select_initial(restarts, init_policy_state(policy, episode_key), state)


def final_value(
    spec: KernelSpec, carry: Carry, params: Any, transition: Transition
) -> ArrayTree:
    """Returns `Transition.final_value`; `carry` must hold the true successors."""
    if not spec.policy.has_value:
        return ()
    with jax.named_scope("final_value"):
        bootstraps = transition.truncated & ~transition.terminated
        if isinstance(transition.info, MultiAgentInfo):  # an agent may truncate alone
            bootstraps |= jnp.any(transition.info.agents.truncated, axis=-1)
        inputs = carry.obs, carry.policy_state
        return values_where(spec.env, spec.policy, params, *inputs, bootstraps)


def values_where(
    env: VectorEnv,
    policy: Policy,
    params: Any,
    obs: ArrayTree,
    policy_state: ArrayTree,
    flag: jax.Array,
) -> ArrayTree:
    """Evaluates the critic at the observations with a True flag; 0 elsewhere.

    Truncations are rare, so a CPU evaluates `K` lanes at a time, and usually none. A
    GPU evaluates all lanes if the critic is cheap, else none, `K` or all lanes.
    `auto_reset.masked_update` implements this rule, also for resets. Each device
    evaluates its lanes. Gradients are stopped.

    Args:
        env: the environments.
        policy: a policy with a critic.
        params: parameters of the policy.
        obs: `[B, ...]`.
        policy_state: `[B, ...]`, state of the policy when it observes `obs`.
        flag: `[B]` bool.

    Returns:
        `[B]`, or by group `[B, A_g]`, in the dtype of the critic's output.
    """
    compute = _values_where
    if (sharding := env.sharding) is not None:
        compute = functools.partial(sharding.map, compute)
    # Stop gradients: bootstrapped values are targets.
    inputs = obs, policy_state
    fixed = *lax.stop_gradient(((policy, params), inputs)), flag
    # The critic may also close over differentiated values.
    compute, closed_over = jax.closure_convert(compute, *fixed)
    return compute(*fixed, *lax.stop_gradient(closed_over))


def check_values(value: Any, obs: ArrayTree) -> None:
    """Checks that there is one float per observation, or one per agent by group."""
    # The value of a single-agent critic has no group: name it "".
    expected = {"": jax.tree.leaves(obs)[0].shape[:1]}
    if isinstance(value, Mapping):
        groups = obs if isinstance(obs, Mapping) else {}
        expected = {name: jax.tree.leaves(x)[0].shape[:2] for name, x in groups.items()}
    for name, x in value.items() if isinstance(value, Mapping) else [("", value)]:
        is_float = checks.has_dtype(x, jnp.floating)
        if not is_float or x.shape != expected.get(name):
            group = f" for the group {name!r}" if name else ""
            raise ValueError(
                "A critic must return one float per observation, of shape "
                f"{expected.get(name, 'none')}{group}, got {checks.describe(x)}. "
                "Collectors call it with any number of observations."
            )


def _values_where(
    critic: tuple[Policy, Any], inputs: tuple[ArrayTree, ArrayTree], flag: jax.Array
) -> ArrayTree:
    # Jitted, so that the branches below trace it only once per number of lanes.
    @jax.jit
    def evaluate(
        critic: tuple[Policy, Any], inputs: tuple[ArrayTree, ArrayTree]
    ) -> ArrayTree:
        policy, params = critic
        values = policy.value(params, *inputs)
        check_values(values, inputs[0])
        return values

    def fn(lane_index: LaneIndex) -> ArrayTree:
        return evaluate(critic, jax.tree.map(lambda x: x[lane_index], inputs))

    zeros = trees.blank(jax.eval_shape(evaluate, critic, inputs))
    return auto_reset.masked_update(flag, fn, zeros)


def checked_accumulators(collector: Any) -> Accumulators:
    """Validates the options of a collector; returns the accumulators as a tuple."""
    check_policy(collector.policy)
    if collector.record_fn is not None:
        checks.check_function("record_fn", collector.record_fn, "transition")
    value = collector.accumulators
    rule = "`accumulators` must map names to `Accumulator`s"
    # A static field of a pytree must be hashable: store a tuple, not a dict.
    items = tuple(value.items()) if isinstance(value, Mapping) else value
    if isinstance(items, Accumulator) or not isinstance(items, tuple):
        raise ValueError(f"{rule}, got {checks.describe(value)}.")
    for name, accumulator in items:
        if not isinstance(name, str) or not isinstance(accumulator, Accumulator):
            raise ValueError(f"{rule}, got {name!r}: {checks.describe(accumulator)}.")
    return items


def accumulate_nothing(accumulators: Accumulators, num_envs: int) -> ArrayTree:
    """Returns the accumulated values before an episode's first step, `[B, ...]`."""
    return strong({name: x.init(num_envs) for name, x in accumulators} or ())


def accumulate(
    accumulators: Accumulators, accumulated: ArrayTree, transition: Transition
) -> Transition:
    """Adds the accumulated values after a step to its transition."""
    values = {name: x.update(accumulated[name], transition) for name, x in accumulators}
    for name, value in values.items():
        message = f"The accumulator `{name}` must return a value like its input"
        checks.check_same_types(message, accumulated[name], value)
    # Use strong types, as before the first step: otherwise the carry's types change.
    return transition.replace(accumulated=strong(values or ()))


def record(record_fn: RecordFn | None, transition: Transition) -> Transition:
    """Applies `record_fn`, which must not change lanes or bookkeeping fields."""
    if record_fn is None:
        return transition
    recorded = record_fn(transition)
    checks.check_type("`record_fn` must return a `Transition`", recorded, Transition)
    for name, field in vars(recorded).items():
        original = vars(transition)[name]
        # Compare identities: tracers have no values to compare.
        if name in _BOOKKEEPING and field is not original:
            raise ValueError(
                f"`record_fn` must leave `{name}` as it is, since statistics read it. "
                "Store derived values in `extras`."
            )
        if field is None and original is not None:
            raise ValueError(
                f"`record_fn` must set a dropped field to `()`, got `{name}=None`."
            )
    lanes = transition.mask.shape
    checks.check_leading_axes("`record_fn` must return leaves", recorded, lanes)
    return recorded


def pack(row: Transition) -> tuple[Transition, jax.Array]:
    """Packs a transition for stacking: both flags in one array, and no mask.

    On a CPU every array that a step writes has a cost. The mask would be True in all
    rows, since no lane is idle.
    """
    flags = pack_flags(row.terminated, row.truncated)
    return row.replace(terminated=(), truncated=(), mask=()), flags


def pack_flags(*flags: jax.Array) -> jax.Array:
    """Packs up to eight flags into one uint8 array."""
    shifted = (flag.astype(jnp.uint8) << bit for bit, flag in enumerate(flags))
    return functools.reduce(operator.add, shifted)


def unpack_flags(packed: jax.Array, num_flags: int) -> tuple[jax.Array, ...]:
    """Inverts `pack_flags`."""
    return tuple((packed & (1 << bit)) != 0 for bit in range(num_flags))


def mask_out(transition: Transition) -> Transition:
    """Zeroes the lanes whose `mask` is False."""
    return trees.select(transition.mask, transition, trees.blank(transition))

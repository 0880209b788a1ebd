"""Builds exploring wrappers: applies the wrapped policy, and counts steps per lane."""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs import prng
from rollout.envs.types import AnySpace, ArrayTree
from rollout.policies.uniform import num_lanes
from rollout.types import (
    Key,
    Obs,
    Params,
    Persistent,
    Policy,
    PolicyFn,
    PolicyStep,
    ValueFn,
)

Schedule = Callable[[jax.Array], jax.Array]  # steps taken, `()` int32, to `()` float

_Init = Callable[[int], ArrayTree]
_Apply = Callable[..., PolicyStep]  # a `PolicyFn`, or one that first takes the steps
_Act = Callable[..., PolicyStep]  # first takes the wrapped policy and a value


class Counted(struct.PyTreeNode, kw_only=True):
    """State of a policy that counts the steps of each lane."""

    inner: ArrayTree  # [B, ...]
    step: Persistent  # [B] int32, steps taken so far


def counted(
    init: _Init, apply: _Apply, mode: _Apply | None, value: ValueFn | None
) -> Policy:
    """Makes a policy from functions of which two first take the `[B]` step count."""

    def counted_init(num_envs: int) -> Counted:
        step = jnp.zeros((num_envs,), jnp.int32)
        return Counted(inner=init(num_envs), step=Persistent(step))

    def count(
        apply: _Apply, params: Params, obs: Obs, state: Counted, key: Key
    ) -> PolicyStep:
        step = state.step.value
        decision = apply(step, params, obs, state.inner, key)
        # The count stays at the largest integer, so that no schedule restarts.
        step = step + (step < jnp.iinfo(jnp.int32).max).astype(jnp.int32)
        state = Counted(inner=decision.state, step=Persistent(step))
        return decision._replace(state=state)

    return Policy(
        init=counted_init,
        apply=functools.partial(count, apply),
        mode=mode and functools.partial(count, mode),
        value=of_inner(value),
    )


def of_inner(value_fn: ValueFn | None) -> ValueFn | None:
    """Makes a critic take the `inner` part of a wrapper's state."""

    def value(params: Params, obs: Obs, state: Any) -> ArrayTree:
        assert value_fn is not None
        return value_fn(params, obs, state.inner)

    return value if value_fn else None


def scheduled(
    value: float | Schedule,
    policy: Policy,
    act: _Act,
    init: _Init,
    value_fn: ValueFn | None,
) -> Policy:
    """Makes a policy from an `act` that first takes the wrapped policy and the value.

    The value is a Python float, or `[B]` float32 from a schedule. The mode is that of
    the wrapped policy, acting with a value of 0.0.
    """
    mode = act_by_mode(policy, act, 0.0)
    if not callable(value):
        apply = functools.partial(act, policy, float(value))
        return Policy(init, apply, mode, value_fn)

    def apply_schedule(
        step: jax.Array, params: Params, obs: Obs, state: ArrayTree, key: Key
    ) -> PolicyStep:
        now = jax.vmap(value)(step).astype(jnp.float32)
        return act(policy, now, params, obs, state, key)

    if mode is None:
        return counted(init, apply_schedule, None, value_fn)

    def counted_mode(
        step: jax.Array, params: Params, obs: Obs, state: ArrayTree, key: Key
    ) -> PolicyStep:
        del step  # unused
        return mode(params, obs, state, key)

    return counted(init, apply_schedule, counted_mode, value_fn)


def act_by_mode(policy: Policy, act: _Act, value: float) -> PolicyFn | None:
    """Makes `act` apply the wrapped policy's mode; None if it has none."""
    if policy.mode is None:
        return None
    return functools.partial(act, policy._replace(apply=policy.mode), value)


def check_scheduled(
    name: str, value: float | Schedule, *, highest: float = math.inf
) -> None:
    """Checks a number in [0, highest], or a schedule of such scalars."""
    if callable(value):
        _check_schedule(name, value)
    elif not is_number(value) or not 0.0 <= value <= highest:
        bounded = f"in [0, {highest:g}]"
        what = "at least 0 and finite" if highest == math.inf else bounded
        raise ValueError(f"`{name}` must be {what}, or a schedule, got {value!r}.")


def is_number(value: Any) -> bool:
    """Returns whether `value` is a finite Python or NumPy number."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and math.isfinite(value)


def derive(key: chex.PRNGKey, num: int) -> tuple[chex.PRNGKey, ...]:
    """Derives the keys of a step: the wrapped policy's, and one per draw."""
    return tuple(prng.fold_in(key, jnp.arange(num, dtype=jnp.int32)))


def decide(
    policy: Policy,
    space: AnySpace,
    params: Params,
    obs: Obs,
    state: ArrayTree,
    key: Key,
) -> PolicyStep:
    """Applies the wrapped policy, and checks that its action fits the space."""
    decision = policy.apply(params, obs, state, key)
    who = "The wrapped `policy.apply`"
    return checks.decision(who, decision, space, num_lanes(obs))


def _check_schedule(name: str, schedule: Schedule) -> None:
    step = jax.ShapeDtypeStruct((), jnp.int32)
    value = jax.eval_shape(schedule, step)
    shape = getattr(value, "shape", type(value).__name__)
    if shape != ():
        what = f"shape {shape}" if isinstance(shape, tuple) else shape
        raise ValueError(f"`{name}` must return a scalar, got {what}.")
    if not any(jnp.issubdtype(value.dtype, x) for x in (jnp.floating, jnp.integer)):
        raise ValueError(f"`{name}` must return a real scalar, got {value.dtype}.")

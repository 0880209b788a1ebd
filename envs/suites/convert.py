"""Validates objects of environment suites and converts their arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from rollout.base.programs import hash_of_types
from rollout.envs.multi_agent import has_agents
from rollout.envs.spaces import Repeated, as_space
from rollout.envs.types import ArrayTree, strong


def check_methods(env: Any, suite: str, methods: Sequence[str]) -> None:
    """Raises if an object lacks required methods or attributes of a suite."""
    missing = [name for name in methods if not hasattr(env, name)]
    if missing:
        raise TypeError(
            f"`env` must have {', '.join(methods)} of {suite}, got "
            f"{type(env).__name__} without {', '.join(missing)}."
        )


def check_no_reset(env: Any) -> None:
    """Raises if `env` is inside an auto-reset wrapper of a suite."""
    while env is not None:
        if "AutoReset" in type(env).__name__:
            raise ValueError(
                f"`env` must not reset itself, got {type(env).__name__}. Remove this "
                "wrapper: it discards the last observation of every episode."
            )
        # Wrappers of these suites store the wrapped environment in `_env`.
        env = getattr(env, "_env", None)


def promote(
    env: Any,
    key: chex.PRNGKey,
    state: ArrayTree,
    obs: ArrayTree,
    step_fn: Callable[..., Any] | None = None,
) -> tuple[ArrayTree, ArrayTree]:
    """Promotes the results of a reset to the dtypes that every step preserves.

    In many environments, a leaf of the state is the integer 0 after a reset, and a
    float after a step. A loop in Python promotes the integer. A scan needs the promoted
    dtype from the start.

    Args:
        env: the adapter, whose `step` is traced once.
        key: key of the reset, of which only the type is used.
        state: state after a reset.
        obs: observation after a reset.
        step_fn: function `(env, key, state, action)` to trace, by default the `step` of
            the class of `env`.

    Returns:
        The state and the observation, without weak types. If a step returns another
        structure or shape, no leaf is promoted, and the kernel reports the difference.
    """
    carry = strong((state, obs))
    # A key that a step uses twice is reported for the step, not for the reset.
    with jax.debug_key_reuse(False):
        step_fn = step_fn or type(env).step
        target = _promote.eval_shape(step_fn, hash_of_types(env), env, key, carry)
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), carry, target)


def keep_dtypes(new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Casts leaves of `new` to the dtypes of `old` if these are at least as wide.

    All other leaves remain, as does a tree with another structure than `old`: the
    kernel reports them.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new

    def cast(x: Any, y: Any) -> jax.Array:
        dtype = _common_dtype(x, y)
        return jnp.asarray(x, dtype if dtype == jnp.result_type(y) else None)

    return jax.tree.map(cast, new, old)


def shapes_of_reset(env: Any) -> ArrayTree:
    """Returns the shapes and dtypes of `env.reset(key)`. It is traced only once."""
    key = jax.eval_shape(jax.random.key, 0)
    with jax.debug_key_reuse(False):
        return _reset.eval_shape(hash_of_types(env), env, key)


# `jit` caches the traces of `eval_shape`. For `types` see `hash_of_types`.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _promote(
    step_fn: Callable[..., Any],
    types: int,
    env: Any,
    key: chex.PRNGKey,
    carry: tuple[ArrayTree, ArrayTree],
) -> tuple[ArrayTree, ArrayTree]:
    del types  # only part of the cache key
    action = _sample_action(env, key)
    while True:
        result = jax.eval_shape(step_fn, env, key, carry[0], action)
        outputs = result.state, result.obs
        if not _have_equal_shapes(outputs, carry):
            return carry
        old_dtypes = [x.dtype for x in jax.tree.leaves(carry)]
        carry = jax.tree.map(lambda x, y: x.astype(_common_dtype(x, y)), carry, outputs)
        # A promoted leaf may promote other leaves in the next step.
        if [x.dtype for x in jax.tree.leaves(carry)] == old_dtypes:
            return carry


@functools.partial(jax.jit, static_argnums=0)
def _reset(types: int, env: Any, key: chex.PRNGKey) -> ArrayTree:
    del types  # only part of the cache key
    return env.reset(key)


def _have_equal_shapes(a: ArrayTree, b: ArrayTree) -> bool:
    shapes = [list(map(jnp.shape, jax.tree.leaves(x))) for x in (a, b)]
    return jax.tree.structure(a) == jax.tree.structure(b) and shapes[0] == shapes[1]


def _common_dtype(x: Any, y: Any) -> Any:
    """Returns the dtype to which jax promotes both dtypes."""
    dtypes = jnp.result_type(x), jnp.result_type(y)
    if dtypes[0] == dtypes[1] or jnp.issubdtype(dtypes[0], jax.dtypes.extended):
        return dtypes[0]
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(*dtypes)


def _sample_action(env: Any, key: chex.PRNGKey) -> ArrayTree:
    if not has_agents(env):
        return as_space(env.action_space).sample(key)
    return {
        group: Repeated(as_space(space), len(env.groups[group])).sample(key)
        for group, space in env.action_spaces.items()
    }


class Held:
    """Holds an object as a static part of a pytree; compares by identity.

    Some environments are not hashable, because they contain arrays.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

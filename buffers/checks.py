"""Checks the arguments of buffers while tracing, at no cost at run time."""

import numbers
import operator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout.buffers import fields
from rollout.buffers.types import ArrayTree, RingState

_REAL: Any = numbers.Real  # `Any`: type checkers do not know that it has an order
FLAGS = ("terminated", "truncated")
_MOST_ROWS = 2**30  # so that row numbers up to one lap ahead fit int32


def positive_int(name: str, value: Any) -> int:
    """Checks an integer of at least 1; returns it as a Python int."""
    is_int = not isinstance(value, bool | jax.Array) and hasattr(value, "__index__")
    if not is_int or operator.index(value) < 1:
        raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}.")
    return operator.index(value)


def fraction(name: str, value: Any) -> None:
    """Checks a number in [0, 1]; a traced one is not checked."""
    if np.shape(value) != ():
        raise ValueError(f"`{name}` must be one number, got shape {np.shape(value)}.")
    if isinstance(value, _REAL) and not isinstance(value, bool):
        is_wrong = not 0 <= value <= 1
    else:  # an array, whose value may not be known
        dtype = getattr(value, "dtype", jnp.bool_)
        is_wrong = not jnp.issubdtype(dtype, jnp.number)
    if is_wrong:
        raise ValueError(f"`{name}` must be a number in [0, 1], got {value!r}.")


def state(value: Any, num_slots: int, num_envs: int) -> None:
    """Checks that it is the state of a buffer with these numbers of slots and lanes."""
    ring = getattr(value, "ring", None)
    if not isinstance(ring, RingState):
        raise ValueError(
            "`state` must be what `init` or `add` of a buffer returned, got "
            f"{type(value).__name__}."
        )
    got = (ring.num_slots, *ring.size.shape)
    if got != (num_slots, num_envs):
        raise ValueError(
            f"`state` must be of a buffer like this one, {num_slots} slots in each of "
            f"num_envs={num_envs} lanes, got (slots, lanes)={got}; `merge` takes rows "
            "from one of another capacity."
        )


def key(value: Any) -> None:
    """Checks that it is one typed key."""
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )
    if not is_key or value.shape:
        got = getattr(value, "shape", None)
        got = repr(value) if got is None else f"{value.dtype} of shape {got}"
        raise ValueError(
            "`key` must be one typed key as `jax.random.key(seed)` makes it, got "
            f"{got}."
        )


def indices(value: Any) -> jax.Array:
    """Checks that they are row numbers; returns them as an array."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"`indices` must be integers, got {value.dtype}.")
    return value


def priorities(value: Any, indices: jax.Array) -> jax.Array:
    """Checks that there is a number for each of `indices`, `[S]`."""
    value = jnp.asarray(value)
    is_number = jnp.issubdtype(value.dtype, jnp.number)
    if indices.ndim != 1 or value.shape != indices.shape or not is_number:
        raise ValueError(
            "`indices` and `priorities` must be `[S]`, one number for each row, got "
            f"shape {indices.shape} and {value.dtype} of shape {value.shape}."
        )
    return value


def capacity(capacity: Any, num_envs: Any) -> None:
    """Checks that a capacity holds one step of all lanes, and at most 2**30 rows."""
    positive_int("capacity", capacity)
    positive_int("num_envs", num_envs)
    if capacity < num_envs:
        raise ValueError(
            f"`capacity` must hold one step of all lanes, num_envs={num_envs}, got "
            f"{capacity}."
        )
    if capacity > _MOST_ROWS:
        raise ValueError(f"`capacity` must be at most 2**30, got {capacity}.")


def next_obs(next_obs: Any, final_obs_capacity: Any, num_envs: int) -> None:
    """Checks the option `next_obs`, and that `final_obs_capacity` fits it."""
    if next_obs not in ("stored", "shared"):
        raise ValueError(f'`next_obs` must be "stored" or "shared", got {next_obs!r}.')
    if final_obs_capacity is None:
        return
    positive_int("final_obs_capacity", final_obs_capacity)
    if next_obs == "stored":
        raise ValueError(
            '`final_obs_capacity` goes with next_obs="shared", got '
            f'{final_obs_capacity} with "stored".'
        )
    if final_obs_capacity < num_envs:
        raise ValueError(
            "`final_obs_capacity` must hold one step of all lanes, num_envs="
            f"{num_envs}, got {final_obs_capacity}."
        )


def row(tree: ArrayTree, num_envs: int) -> None:
    """Checks that a transition has leaves, each with the lane axis."""
    leaves = jax.tree.leaves_with_path(tree)
    if not leaves:
        raise ValueError("`transition` must have at least one array, got none.")
    arrays("transition", tree)
    for path, leaf in leaves:
        if leaf.shape[:1] != (num_envs,):
            raise ValueError(
                f"`transition` must have the leading axis num_envs={num_envs}, got "
                f"shape {leaf.shape}{at(path)}."
            )
    for name in FLAGS:
        flag = fields.get(tree, name)
        if flag is not None and flag.dtype != bool:
            raise ValueError(f"`{name}` must be bool, got {flag.dtype}.")


def arrays(name: str, tree: ArrayTree) -> None:
    """Checks that every leaf of a tree is an array."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            got = type(leaf).__name__
            raise ValueError(f"`{name}` must hold arrays, got {got}{at(path)}.")


def relabelling(
    ring: RingState, relabel_fn: Any, horizon: Any, other: int | None
) -> None:
    """Raises if later rows of episodes cannot be drawn."""
    if relabel_fn is None:
        return
    positive_int("horizon", horizon)
    if not callable(relabel_fn):
        raise ValueError(f"`relabel_fn` must be a function, got {relabel_fn!r}.")
    if other is not None:
        raise ValueError("`relabel_fn` must not be given with `n_step` or `stack`.")
    fields.need(ring.experience, FLAGS, "`relabel_fn`")


def can_share(transition: ArrayTree) -> None:
    """Raises if a transition's successor cannot be read from the next row."""
    needed = ("obs", "next_obs", "terminated", "truncated")
    obs, next_obs = fields.need(transition, needed, 'next_obs="shared"')[:2]
    chex.assert_trees_all_equal_shapes_and_dtypes(obs, next_obs)


def like_init(rows: ArrayTree, ring: RingState) -> bool:
    """Checks rows against those of `init`; returns whether they are one step."""
    kept = ring.experience
    if ring.final_obs:  # rows come with `next_obs`, which the ring does not keep
        kept = fields.replace(kept, next_obs=fields.get(kept, "obs"))
    arrays("trajectory", rows)
    structures = jax.tree.structure(kept), jax.tree.structure(rows)
    if structures[0] != structures[1]:
        raise ValueError(
            f"`trajectory` must have the structure of `init`, {structures[0]}, got "
            f"{structures[1]}."
        )
    old, new = jax.tree.leaves_with_path(kept), jax.tree.leaves(rows)
    is_step = new[0].ndim == old[0][1].ndim - 1
    length = () if is_step else new[0].shape[:1]
    if length == (0,):
        raise ValueError("`trajectory` must have at least one row, got none.")
    for (path, memory), leaf in zip(old, new, strict=True):
        want = (*length, *memory.shape[1:])
        if (leaf.shape, leaf.dtype) != (want, memory.dtype):
            raise ValueError(
                f"`trajectory` must be {memory.dtype} of shape {want}{at(path)}, got "
                f"{leaf.dtype} of shape {leaf.shape}."
            )
    return is_step


def mask(mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Checks that a mask has one bool per row."""
    if mask.dtype != bool or mask.shape != shape:
        raise ValueError(
            f"`mask` must be bool of shape {shape}, got {mask.dtype} of shape "
            f"{mask.shape}."
        )
    return jnp.asarray(mask)


def targets(ring: RingState, n_step: Any, gamma: Any, stack: Any) -> None:
    """Raises if `sample` cannot compute these targets from the rows."""
    if (n_step is None) != (gamma is None):
        raise ValueError(
            f"`n_step` and `gamma` go together, got n_step={n_step}, gamma={gamma}."
        )
    if n_step is not None:
        positive_int("n_step", n_step)
        fraction("gamma", gamma)
        fields.need(ring.experience, ("reward", *FLAGS), "`n_step`")
    if stack is not None:
        positive_int("stack", stack)
        fields.need(ring.experience, ("obs", *FLAGS), "`stack`")


def sequence(ring: RingState, length: Any) -> None:
    """Checks a length of at least 1, and that rows have the flags of endings."""
    positive_int("length", length)
    fields.need(ring.experience, FLAGS, "A sample of sequences")


def at(path: tuple[Any, ...]) -> str:
    """Returns the place of a leaf in its tree, for the end of a message."""
    return f" at {jax.tree_util.keystr(path)}" if path else ""

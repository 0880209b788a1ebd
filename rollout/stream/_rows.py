"""The rows of a batch while they are filled, and what is made of them.

The rows lie in arrays that one compiled call hands to the next. Both flags of an ending
go into one array and the mask is computed, since XLA:CPU pays for every array that a
step writes; and what neither the statistics nor a `postprocess` read has no array.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from envs import keys
from rollout.collector import Collector
from rollout.stats import summarize
from rollout.types import Carry, Transition

Postprocess = Callable[[Transition], chex.ArrayTree]

_TERMINATED, _TRUNCATED, _FAULTY = 1, 2, 4
_FLAGS = ("terminated", "truncated", "mask")


@struct.dataclass(kw_only=True)
class Rows:
    """The rows of a batch; typed keys as their words."""

    fields: tuple[jax.Array | None, ...]  # [T, B, ...], None for what nobody reads
    flags: jax.Array  # [T, B] uint8


class Layout(NamedTuple):
    """How a trajectory is made of `Rows`."""

    shapes: tuple[jax.ShapeDtypeStruct, ...]  # of one row, words for keys
    example: Transition  # a typed key where there are keys, zeros elsewhere
    is_read: tuple[bool, ...]


def lay_out(
    collector: Collector,
    carry: Carry,
    params: Any,
    *,
    postprocess: Postprocess | None,
    num_rows: int,
) -> Layout:
    """Finds out what a row is, and which of its leaves are read."""
    row = jax.eval_shape(collector.step, carry, params)[1]
    row = row.replace(**dict.fromkeys(_FLAGS, ()))
    words = jax.eval_shape(
        lambda: keys.words(_map(lambda x: keys.blank(x.shape, x, carry.key), row))
    )
    example = _map(lambda x: keys.blank((), x, carry.key), row)
    shapes = tuple(jax.tree.leaves(words))
    layout = Layout(shapes, example, (True,) * len(shapes))
    if postprocess is None:
        return layout
    num_envs = carry.episode.episode_id.shape[0]
    whole = jax.eval_shape(lambda: blank(layout, num_rows, num_envs))

    def read(fields: tuple[jax.Array, ...]) -> Any:
        flags = dict.fromkeys(_FLAGS, jnp.zeros((num_rows, num_envs), bool))
        trajectory = make_trajectory(layout, Rows(fields=fields, flags=None), flags)
        # A fault is told by its episode.
        return postprocess(trajectory), summarize(trajectory), trajectory.episode_id

    program = jax.make_jaxpr(read)(whole.fields).jaxpr
    used = {id(x) for equation in program.eqns for x in equation.invars}
    used |= {id(x) for x in program.outvars}
    return layout._replace(is_read=tuple(id(x) in used for x in program.invars))


def blank(layout: Layout, num_rows: int, num_envs: int) -> Rows:
    """Makes rows to fill, all zero."""
    return Rows(
        fields=tuple(
            jnp.zeros((num_rows, *x.shape), x.dtype) if is_read else None
            for x, is_read in zip(layout.shapes, layout.is_read, strict=True)
        ),
        flags=jnp.zeros((num_rows, num_envs), jnp.uint8),
    )


def write(rows: Rows, row: jax.Array, transition: Transition, bad: jax.Array) -> Rows:
    """Writes one row; where `mask` is False it is void, all zero."""
    flags = (
        transition.terminated * _TERMINATED
        + transition.truncated.astype(jnp.uint8) * _TRUNCATED
        + bad.astype(jnp.uint8) * _FAULTY
    ).astype(jnp.uint8)
    fields = jax.tree.leaves(
        keys.words(transition.replace(**dict.fromkeys(_FLAGS, ())))
    )
    new = Rows(
        fields=tuple(
            None if old is None else field
            for old, field in zip(rows.fields, fields, strict=True)
        ),
        flags=flags,
    )
    return _write(rows, row, new)


def void(rows: Rows, mask: jax.Array, first: jax.Array) -> Rows:
    """Zeroes what is void from row `first` on: where `mask`, `[T, B]`, is False."""
    num_rows = mask.shape[0]

    def clear(state: tuple[jax.Array, Rows]) -> tuple[jax.Array, Rows]:
        row, rows = state
        kept = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row, 0, False), rows)
        zeros = jax.tree.map(jnp.zeros_like, kept)
        is_step = lax.dynamic_index_in_dim(mask, row, 0, False)
        return row + 1, _write(rows, row, keys.select(is_step, kept, zeros))

    return lax.while_loop(lambda state: state[0] < num_rows, clear, (first, rows))[1]


def cut(rows: Rows, lanes: jax.Array, last_row: jax.Array) -> Rows:
    """Truncates, in the `lanes`, `[B]` bool, at their `last_row`, `[B]` int32."""
    number = jnp.arange(rows.flags.shape[0], dtype=jnp.int32)
    here = lanes[None] & (number[:, None] == last_row[None])
    flags = rows.flags | jnp.where(here, _TRUNCATED, 0).astype(jnp.uint8)
    return rows.replace(flags=flags)


def faulty(rows: Rows) -> jax.Array:
    """`[T, B]` bool, an episode ended here because something was not finite."""
    return (rows.flags & _FAULTY) != 0


def read_flags(rows: Rows, mask: jax.Array) -> dict[str, jax.Array]:
    """The fields of a trajectory that are not in the rows' own."""
    return {
        "terminated": (rows.flags & _TERMINATED) != 0,
        "truncated": (rows.flags & _TRUNCATED) != 0,
        "mask": mask,
    }


def make_trajectory(
    layout: Layout, rows: Rows, flags: dict[str, jax.Array]
) -> Transition:
    """Puts the rows together; a field that nobody reads is zero."""
    num_rows = flags["mask"].shape[0]
    leaves = [
        jnp.zeros((num_rows, *x.shape), x.dtype) if field is None else field
        for x, field in zip(layout.shapes, rows.fields, strict=True)
    ]
    rest = jax.tree.unflatten(jax.tree.structure(layout.example), leaves)
    return keys.like(rest, layout.example).replace(**flags)


def _write(rows: Rows, row: jax.Array, new: Rows) -> Rows:
    return jax.tree.map(
        lambda old, x: lax.dynamic_update_index_in_dim(old, x, row, 0), rows, new
    )


def _map(fn: Callable[[Any], Any], row: Transition) -> Transition:
    return jax.tree.map(fn, row)

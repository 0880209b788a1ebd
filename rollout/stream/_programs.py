"""The compiled programs of a stream, made once per kind of stream."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from envs import keys
from rollout.collector import Collector
from rollout.stats import CollectStats
from rollout.stream import _fill, _finite
from rollout.stream._fill_episodes import blank_episodes, fill_episodes
from rollout.stream._rows import Layout, Rows
from rollout.stream._window import Spec, Window
from rollout.stream.stats import pack
from rollout.types import Carry, Transition

_MAX_KEPT = 64
_DONATED = (3, 4, 5)  # of the arguments of `fill`: what is only written to
# What a user may set for a `with` block, and what a compiled program depends on.
_SETTINGS = (
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)

_kept: dict[Any, "Programs"] = {}


class Programs(NamedTuple):
    """Ahead of time, so that no thread traces: settings of jax belong to a thread."""

    fill: Callable[..., _fill.Filled]
    describe: Callable[[_fill.Filled], tuple[CollectStats, jax.Array]]
    blank_rows: Callable[[], Rows]
    blank_output: Callable[[], chex.ArrayTree]
    copy: Callable[[Carry], Carry]
    structure: jax.tree_util.PyTreeDef  # of a trajectory
    example: Transition | None  # where there are typed keys, None if there are none
    recycles: bool  # `fill` takes an old output
    checks: bool  # `fill` says where something is not finite
    counts_steps: bool  # only `fill` knows how many steps a batch has


def make(
    spec: Spec, collector: Collector, carry: Carry, params: Any, *, recycle: bool
) -> Programs:
    """Compiles, or takes what was compiled for a stream of the same kind."""
    arguments = collector, carry, params
    leaves, structure = jax.tree.flatten(arguments)
    kinds = kinds_of(leaves)
    settings = tuple(getattr(jax.config, name) for name in _SETTINGS)
    kind = (spec, recycle, structure, kinds, settings)
    if kind not in _kept:
        while len(_kept) >= _MAX_KEPT:
            _kept.pop(next(iter(_kept)), None)
        _kept[kind] = _compile(spec, *arguments, recycle)
    return _kept[kind]


def kinds_of(tree: chex.ArrayTree) -> tuple[Any, ...]:
    """What of the leaves of a tree a compiled program depends on."""
    leaves = jax.tree.leaves(tree)
    return tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)


def copy(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Copies a tree that may hold typed keys: what jit passes on is not a copy."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _copy_leaves(leaves))


# Of a list, for the cache of `jit` may take one dataclass for another.
@jax.jit
def _copy_leaves(leaves: list[chex.Array]) -> list[chex.Array]:
    return keys.like(jax.tree.map(jnp.copy, keys.words(leaves)), leaves)


def _compile_describe(
    layout: Layout, filled: _fill.Filled
) -> Callable[[_fill.Filled], tuple[CollectStats, jax.Array]]:
    """Statistics apart from `fill`: they are made while the batch is handed over."""

    @jax.jit
    def describe(
        rows: Rows,
        flags: dict[str, jax.Array],
        stats: CollectStats | None,
        num_faulty: jax.Array,
    ) -> tuple[CollectStats, jax.Array]:
        if stats is None:
            stats = _fill.describe(layout, rows, flags)
        return stats, pack(stats, num_faulty)

    def arguments(filled: _fill.Filled) -> tuple[Any, ...]:
        return filled.rows, filled.flags, filled.stats, filled.num_faulty

    compiled = describe.lower(*arguments(filled)).compile()
    return lambda filled: compiled(*arguments(filled))


def _compile(
    spec: Spec, collector: Collector, carry: Carry, params: Any, recycle: bool
) -> Programs:
    if spec.check_finite:
        spec = spec._replace(proved=_finite.proved(collector, carry, params))
    fill, blank = _fill.fill, _fill.blank
    if spec.num_episodes is not None:
        fill, blank = fill_episodes, blank_episodes
    rows, output = jax.eval_shape(
        lambda *args: blank(spec, *args), collector, carry, params
    )
    output = output if recycle else ()
    window = jax.ShapeDtypeStruct((len(Window._fields),), jnp.int32)
    fill = jax.jit(fill, static_argnums=0, donate_argnums=_DONATED, keep_unused=True)
    fill = fill.lower(spec, collector, carry, carry, rows, output, params, window)
    layout = _fill.lay_out(spec, collector, carry, params)
    example = layout.example
    leaves, structure = jax.tree.flatten(carry)
    copy_leaves = _copy_leaves.lower(leaves).compile()

    def zeros(shapes: chex.ArrayTree) -> Callable[[], chex.ArrayTree]:
        make = lambda x: keys.blank(x.shape, x, carry.key)  # noqa: E731
        return jax.jit(lambda: jax.tree.map(make, shapes)).lower().compile()

    return Programs(
        fill=fill.compile(),
        describe=_compile_describe(layout, fill.out_info),
        blank_rows=zeros(rows),
        blank_output=zeros(output),
        copy=lambda carry: jax.tree.unflatten(
            structure, copy_leaves(jax.tree.leaves(carry))
        ),
        structure=jax.tree.structure(example),
        example=example if keys.has_keys(example) else None,
        recycles=recycle,
        checks=spec.check_finite,
        counts_steps=spec.num_episodes is not None,
    )

"""The compiled part of a stream: fills the rows of one batch, some at a time.

One program serves every batch of a stream: how many rows to fill, how many steps the
batch has, and where the warm-up ends are numbers that it reads. The rows lie in arrays
that are donated, so a batch that is filled in several calls is written in place.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from envs import keys
from rollout import kernel
from rollout.collector import Collector
from rollout.stats import CollectStats, summarize
from rollout.stream import _faults, _rows
from rollout.stream._fill_row import make_step
from rollout.stream._rows import Layout, Rows
from rollout.stream._window import Spec, Window, indices
from rollout.types import Carry


class Filled(NamedTuple):
    """What `fill` returns."""

    carry: Carry
    rows: Rows
    flags: dict[str, jax.Array]  # of the trajectory
    output: chex.ArrayTree  # of `postprocess`, zero unless the batch is complete
    fault: jax.Array  # () int32, the first step with a fault, or `_faults.NONE`
    num_faulty: jax.Array  # () int32, episodes that ended as faulty so far
    num_steps: jax.Array  # () int32, of the batch
    stats: CollectStats | None = None  # None where `describe` makes them


def lay_out(spec: Spec, collector: Collector, carry: Carry, params: Any) -> Layout:
    """Finds out what the rows are; see `_rows.lay_out`."""
    limits = {"postprocess": spec.postprocess, "num_rows": spec.num_rows}
    return _rows.lay_out(collector, carry, params, **limits)


def blank(
    spec: Spec, collector: Collector, carry: Carry, params: Any
) -> tuple[Rows, chex.ArrayTree]:
    """Makes rows to fill and an output to overwrite, all zero."""
    layout = lay_out(spec, collector, carry, params)
    rows = _rows.blank(layout, spec.num_rows, collector.env.num_envs)
    mask = jnp.zeros(rows.flags.shape, bool)
    return rows, _blank_output(spec, layout, rows, mask, carry.key)


def fill(
    spec: Spec,
    collector: Collector,
    carry: Carry,
    old_carry: Carry,
    rows: Rows,
    old_output: chex.ArrayTree,
    params: Any,
    window: jax.Array,
) -> Filled:
    """Takes the steps of some rows.

    Args:
        spec: what is settled when compiling.
        collector: policy and environments.
        carry: the carry of the call before.
        old_carry: one that is no longer needed, donated and not read.
        rows: the rows so far, donated. Those that are filled now are not read.
        old_output: an output of `postprocess` that is no longer needed, or (); donated
            and not read.
        params: parameters of the policy.
        window: a `Window` as `[7]` int32.

    Returns:
        What goes into the next call, and what was made of the rows.
    """
    del old_carry, old_output  # unread: their memory takes the new ones
    layout = lay_out(spec, collector, carry, params)
    window = Window(*window)
    is_last = window.is_last != 0
    if spec.reset_each_batch:
        carry = _restart_all(collector, carry, window.first_row == 0)
    step = make_step(spec, collector, params, window)
    num_faults = collector.env.num_envs if spec.check_finite else 1
    fault = jnp.full((num_faults,), _faults.NONE, jnp.int32)
    state = window.first_row, carry, rows, fault
    _, carry, rows, fault = lax.while_loop(
        lambda state: state[0] < window.stop_row, step, state
    )
    index = indices(rows.flags.shape, window)
    if spec.truncate_at_batch_end:
        underway = is_last & (carry.episode.episode_length > 0)
        num_steps = jnp.sum(index < window.num_steps, axis=0, dtype=jnp.int32)
        rows = _rows.cut(rows, underway, num_steps - 1)
        carry = _restart_all(collector, carry, is_last)
    rows, mask, num_faulty = _void(spec, layout, rows, index, window)
    blank_output = _blank_output(spec, layout, rows, mask, carry.key)
    output = lax.cond(
        is_last,
        lambda: _make_output(spec, layout, rows, mask),
        lambda: blank_output,
    )
    flags = _rows.read_flags(rows, mask)
    first = fault.min()
    return Filled(carry, rows, flags, output, first, num_faulty, window.num_steps)


def describe(layout: Layout, rows: Rows, flags: dict[str, jax.Array]) -> CollectStats:
    """Makes the statistics of a batch that is complete."""
    return summarize(_rows.make_trajectory(layout, rows, flags))


def _restart_all(collector: Collector, carry: Carry, flag: jax.Array) -> Carry:
    """Starts a new episode in every lane that is within one, if `flag`."""
    over = flag & (carry.episode.episode_length > 0)
    start = kernel.own_episodes(carry.key, carry.episode.episode_id, ahead=1)
    env = keys.barrier(collector.env)
    return kernel.restart(env, collector.policy, carry, over, start)


def _void(
    spec: Spec, layout: Layout, rows: Rows, index: jax.Array, window: Window
) -> tuple[Rows, jax.Array, jax.Array]:
    """Zeroes what is void when the batch is complete; `(rows, mask, num_faulty)`."""
    mask, num_rows = index < window.num_steps, index.shape[0]
    first, num_faulty = window.stop_row, jnp.int32(0)
    if spec.drop_faulty:
        is_step = index < window.stop_row * index.shape[1]  # older rows lie behind
        faulty = _rows.faulty(rows) & is_step
        episode_id = _rows.make_trajectory(
            layout, rows, _rows.read_flags(rows, mask)
        ).episode_id
        mask &= ~_faults.of_same_episode(faulty, episode_id)
        num_faulty = jnp.sum(faulty, dtype=jnp.int32)
        first = jnp.where(num_faulty > 0, 0, first)
    first = jnp.where(window.is_last != 0, first, num_rows)
    return _rows.void(rows, mask, first), mask, num_faulty


def _make_output(
    spec: Spec, layout: Layout, rows: Rows, mask: jax.Array
) -> chex.ArrayTree:
    if spec.postprocess is None:
        return ()
    flags = _rows.read_flags(rows, mask)
    return spec.postprocess(_rows.make_trajectory(layout, rows, flags))


def _blank_output(
    spec: Spec, layout: Layout, rows: Rows, mask: jax.Array, key: chex.PRNGKey
) -> chex.ArrayTree:
    shapes = jax.eval_shape(
        lambda rows, mask: _make_output(spec, layout, rows, mask), rows, mask
    )
    return jax.tree.map(lambda x: keys.blank(x.shape, x, key), shapes)

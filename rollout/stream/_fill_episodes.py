"""The compiled part of a stream of whole episodes: all rows of a batch in one call."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from envs import keys
from rollout.collector import Collector
from rollout.stats import count_nonfinite, summarize
from rollout.stream import _faults
from rollout.stream._fill import Filled
from rollout.stream._window import Spec
from rollout.types import Carry, Transition


def blank_episodes(
    spec: Spec, collector: Collector, carry: Carry, params: Any
) -> tuple[tuple[()], chex.ArrayTree]:
    """Makes an output to overwrite, all zero; there are no rows to fill."""
    shapes = jax.eval_shape(
        lambda *args: fill_episodes(spec, *args, (), (), (), params, None).output,
        collector,
        carry,
    )
    return (), jax.tree.map(lambda x: keys.blank(x.shape, x, carry.key), shapes)


def fill_episodes(
    spec: Spec,
    collector: Collector,
    carry: Carry,
    old_carry: Carry,
    rows: tuple[()],
    old_output: chex.ArrayTree,
    params: Any,
    window: jax.Array,
) -> Filled:
    """Plays the episodes of one batch; the arguments are those of `_fill.fill`.

    Returns:
        What goes into the next call; the output is the trajectory, `[L, N, ...]`, or
        what `postprocess` made of it, and the `Episodes`.
    """
    del old_carry, old_output, window  # unread
    carry, trajectory, episodes = collector.collect_padded_episodes(
        carry, params, spec.num_episodes, max_length=spec.num_rows
    )
    output: chex.ArrayTree = trajectory
    if spec.postprocess is not None:
        output = spec.postprocess(trajectory)
    stats = summarize(episodes).replace(num_nonfinite=count_nonfinite(trajectory))
    fault = jnp.int32(_faults.NONE)
    if spec.check_finite:
        fault = _first_fault(trajectory, spec.proved)
    return Filled(
        carry=carry,
        rows=rows,
        flags={},
        output=(output, episodes),
        fault=fault,
        num_faulty=jnp.int32(0),
        num_steps=episodes.num_steps,
        stats=stats,
    )


def _first_fault(trajectory: Transition, proved: frozenset[str]) -> jax.Array:
    """The first step of an episode, t * N + k, at which something is not finite."""
    one_by_one = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), trajectory)
    bad = _faults.not_finite(one_by_one, proved) & one_by_one.mask
    return _faults.numbers(bad, jnp.arange(bad.size, dtype=jnp.int32)).min()

"""The compiled part of a stream: fills the rows of one batch, some at a time.

One program serves every batch of a stream: how many rows to fill, how many steps the
batch has, and where the warm-up ends are numbers that it reads. The rows lie in arrays
that are donated, so a batch that is filled in several calls is written in place.

Of the `B` lanes, the one that steps first in a batch is `first_lane`, and the order
goes round: step number k of the batch is row `k // B` of lane `first_lane + k % B`. A
lane without a step in the last row stands still, and is among the next ones to step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from envs import keys
from rollout import _draws, _faults, _rows, _wrapped, kernel
from rollout._rows import Layout, Postprocess, Result, Rows
from rollout.collector import Collector
from rollout.types import Carry, Policy, PolicyStep, Transition

_WARMUP = 3  # the stream of the keys of random actions; 0 to 2 are the kernel's


class Spec(NamedTuple):
    """What is settled when the program is compiled."""

    num_rows: int  # T
    has_idle_lanes: bool  # in some row not every lane steps
    has_warmup: bool
    reset_each_batch: bool
    truncate_at_batch_end: bool
    check_finite: bool
    drop_faulty: bool
    postprocess: Postprocess | None
    num_episodes: int | None  # of a batch of whole episodes


class Window(NamedTuple):
    """Which rows to fill, and of what batch; in the program `()` int32 each."""

    first_row: int
    stop_row: int
    is_last: int  # 1 if the batch is complete with this
    num_steps: int  # of the batch
    first_lane: int
    num_random: int  # of the steps of the batch, the first ones
    max_episode_steps: int


class Filled(NamedTuple):
    """What `fill` returns."""

    carry: Carry
    rows: Rows
    flags: dict[str, jax.Array]  # of the trajectory, {} with a `postprocess`
    result: Result  # zero unless the batch is complete
    fault: jax.Array  # () int32, the first step with a fault, or `_faults.NONE`
    num_faulty: jax.Array  # () int32, episodes that ended as faulty so far
    num_steps: jax.Array  # () int32, of the batch


def lay_out(spec: Spec, collector: Collector, carry: Carry, params: Any) -> Layout:
    """Finds out what the rows are; see `_rows.lay_out`."""
    limits = {"postprocess": spec.postprocess, "num_rows": spec.num_rows}
    return _rows.lay_out(collector, carry, params, **limits)


def blank(
    spec: Spec, collector: Collector, carry: Carry, params: Any
) -> tuple[Rows, chex.ArrayTree]:
    """Makes rows to fill and an output to overwrite, all zero."""
    if spec.num_episodes is not None:
        return (), ()
    layout = lay_out(spec, collector, carry, params)
    rows = _rows.blank(layout, spec.num_rows, collector.env.num_envs)
    mask = jnp.zeros(rows.flags.shape, bool)
    result = _blank_result(spec, layout, rows, mask, carry.key)
    return rows, result.output


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
    step = _make_step(spec, collector, params, window)
    state = window.first_row, carry, rows, jnp.int32(_faults.NONE)
    _, carry, rows, fault = lax.while_loop(
        lambda state: state[0] < window.stop_row, step, state
    )
    index = _indices(rows.flags.shape, window)
    if spec.truncate_at_batch_end:
        underway = is_last & (carry.episode.episode_length > 0)
        num_steps = jnp.sum(index < window.num_steps, axis=0, dtype=jnp.int32)
        rows = _rows.cut(rows, underway, num_steps - 1)
        carry = _restart_all(collector, carry, is_last)
    rows, mask, num_faulty = _void(spec, layout, rows, index, window)
    blank_result = _blank_result(spec, layout, rows, mask, carry.key)
    result = lax.cond(
        is_last,
        lambda: _make_result(spec, layout, rows, mask),
        lambda: blank_result,
    )
    flags = {} if spec.postprocess else _rows.read_flags(rows, mask)
    return Filled(carry, rows, flags, result, fault, num_faulty, window.num_steps)


def _make_step(
    spec: Spec, collector: Collector, params: Any, window: Window
) -> Callable[[tuple], tuple]:
    """Makes the body of the loop: one row."""
    env, record_fn = keys.barrier(collector.env), collector.record_fn  # `kernel.step`
    (order,) = _indices((1, env.num_envs), window)

    def step(state: tuple) -> tuple:
        row, old, rows, fault = state
        index = row * env.num_envs + order
        active = index < window.num_steps
        policy = collector.policy
        if spec.has_warmup:
            is_random = index < window.num_random
            policy = _warming(policy, env.action_space, old, is_random)
        carry, transition = kernel.advance(env, policy, old, params)
        limit = transition.episode_length >= window.max_episode_steps
        transition = transition.replace(truncated=transition.truncated | limit)
        bad = jnp.zeros_like(active)
        if spec.check_finite:
            bad = _faults.not_finite(transition)
            bad &= active if spec.has_idle_lanes else True
            fault = jnp.minimum(fault, _faults.first(bad, index))
        drop = bad if spec.drop_faulty else jnp.zeros_like(bad)
        over = transition.done | drop
        if spec.has_idle_lanes:
            over &= active
            transition = transition.replace(mask=active)
        start = kernel.own_episodes(carry.key, carry.episode.episode_id, ahead=1)
        fresh = kernel.restart(env, policy, carry, over, start)
        seen = kernel.record(record_fn, transition)
        if spec.has_idle_lanes:
            fresh = _stand_still(active, old, carry, fresh)
            seen = _clear(active, seen)
        return row + 1, fresh, _rows.write(rows, row, seen, drop), fault

    return step


def _warming(policy: Policy, space: Any, carry: Carry, is_random: jax.Array) -> Policy:
    """Makes the policy that acts at random in the lanes where `is_random`."""
    draw = _draws.uniform(space)

    def apply(
        params: Any, obs: chex.ArrayTree, state: chex.ArrayTree, key: chex.PRNGKey
    ) -> PolicyStep:
        decision = _wrapped.decide(policy, space, params, obs, state, key)
        warm_key = keys.fold_in(keys.fold_in(carry.key, _WARMUP), carry.step)

        def replace(action: chex.ArrayTree) -> chex.ArrayTree:
            drawn = draw(is_random.shape[0], warm_key)
            return keys.select(is_random, drawn, action)

        # Once the warm-up is over nothing is drawn.
        action = lax.cond(
            jnp.any(is_random), replace, lambda action: action, decision.action
        )
        return decision._replace(action=action)

    return Policy(init=policy.init, apply=apply)


def _stand_still(active: jax.Array, old: Carry, stepped: Carry, fresh: Carry) -> Carry:
    """Gives the lanes that are not `active` back what they had."""
    paths = zip(
        jax.tree.leaves(old.env_state),
        jax.tree.leaves(stepped.env_state),
        jax.tree.leaves(fresh.env_state),
        strict=True,
    )
    # What an auto-reset passes on as it is belongs to all lanes together, as the
    # statistics of `NormalizeObs` do: their new value stands.
    env_state = [
        new if new is before else keys.select(active, new, was)
        for was, before, new in paths
    ]
    structure = jax.tree.structure(old.env_state)
    return fresh.replace(
        env_state=jax.tree.unflatten(structure, env_state),
        obs=keys.select(active, fresh.obs, old.obs),
        policy_state=keys.select(active, fresh.policy_state, old.policy_state),
        episode=keys.select(active, fresh.episode, old.episode),
    )


def _clear(active: jax.Array, transition: Transition) -> Transition:
    """Zeroes the lanes that are not `active`."""
    words = keys.words(transition)
    zeros = jax.tree.map(jnp.zeros_like, words)
    return keys.like(keys.select(active, words, zeros), transition)


def _restart_all(collector: Collector, carry: Carry, flag: jax.Array) -> Carry:
    """Starts a new episode in every lane that is within one, if `flag`."""
    over = flag & (carry.episode.episode_length > 0)
    start = kernel.own_episodes(carry.key, carry.episode.episode_id, ahead=1)
    env = keys.barrier(collector.env)
    return kernel.restart(env, collector.policy, carry, over, start)


def _indices(shape: tuple[int, int], window: Window) -> jax.Array:
    """Which step of the batch stands in each row and lane; `[T, B]` int32."""
    lane = jnp.arange(shape[1], dtype=jnp.int32) - window.first_lane
    order = jnp.where(lane < 0, lane + shape[1], lane)
    row = jnp.arange(shape[0], dtype=jnp.int32)
    return row[:, None] * shape[1] + order[None]


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


def _make_result(spec: Spec, layout: Layout, rows: Rows, mask: jax.Array) -> Result:
    flags = _rows.read_flags(rows, mask)
    trajectory = _rows.make_trajectory(layout, rows, flags)
    return _rows.make_result(trajectory, spec.postprocess)


def _blank_result(
    spec: Spec, layout: Layout, rows: Rows, mask: jax.Array, key: chex.PRNGKey
) -> Result:
    shapes = jax.eval_shape(
        lambda rows, mask: _make_result(spec, layout, rows, mask), rows, mask
    )
    return jax.tree.map(lambda x: keys.blank(x.shape, x, key), shapes)

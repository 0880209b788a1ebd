"""Makes a batch of a stream: steps the lanes, sums up episodes, and finds faults.

One program makes every batch: the number of steps, the first lane and the number of
random steps are inputs. `memory`, an earlier `output` that is no longer needed, is
donated: XLA writes the batch there rather than to fresh memory, which is slow to touch
for the first time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rollout import checks, kernel, nonfinite, platform
from rollout.collector import Collector
from rollout.envs import prng
from rollout.envs.types import ArrayTree, sharding_of
from rollout.kernel import episode_keys
from rollout.policies.exploration import random_where
from rollout.stats import CollectStats, newest, summarize
from rollout.stream import stream_stats
from rollout.stream.types import BatchSpec, Options
from rollout.types import Carry, Episodes, Transition

NO_FAULT = 2**31 - 1  # no step of a batch has this number


class BatchResult(NamedTuple):
    """A batch as the program returns it."""

    carry: Carry  # after the batch
    output: ArrayTree  # the trajectory, or the result of `postprocess`
    episodes: Episodes | None
    stats: CollectStats
    counted: jax.Array  # for `stream_stats.add`
    recent: jax.Array  # for `stream_stats.slide`
    # For each checked field, the first step that is not finite, or `NO_FAULT`.
    faults: dict[str, jax.Array]  # () int32


def make_batch(
    options: Options,
    collector: Collector,
    carry: Carry,
    params: Any,
    spec: jax.Array,
    memory: ArrayTree,
) -> BatchResult:
    """Makes one batch; `spec` is a `BatchSpec` as `[3]` int32."""
    batch, episodes = BatchSpec(*spec), None
    if options.episodes_per_batch is None:
        carry, trajectory = _fill_rows(options, collector, carry, params, batch, memory)
        number = numbers(trajectory.mask.shape, batch)
        num_steps = batch.num_steps
    else:
        carry, trajectory, episodes = collector.collect_padded_episodes(
            carry,
            params,
            options.episodes_per_batch,
            max_length=options.max_episode_steps,
        )
        number = numbers_of_episodes(trajectory.mask.shape)
        num_steps = episodes.num_steps
    num_faulty = jnp.int32(0)
    if options.on_fault == "drop":
        trajectory, num_faulty = _drop(trajectory)
    result = finish(options, carry, trajectory, episodes, number, num_steps, num_faulty)
    sharding = sharding_of(collector.env)
    if sharding is None:
        return result
    # Placed as `memory` is, so that a later batch can be written there.
    output = sharding.place(result.output, collector.env.num_envs, lane_axis=1)
    return result._replace(output=output)


def finish(
    options: Options,
    carry: Any,
    trajectory: Transition,
    episodes: Episodes | None,
    number: jax.Array,
    num_steps: jax.Array,
    num_faulty: jax.Array,
) -> BatchResult:
    """Finishes a batch; `number`, `[T, B]` int32, has the number of each step."""
    faults = {}
    if options.check_finite and options.on_fault != "drop":
        faults = {
            name: jnp.where(bad & trajectory.mask, number, NO_FAULT).min()
            for name, bad in nonfinite.nonfinite(trajectory).items()
        }
    stats = _summarize(trajectory, episodes)
    return BatchResult(
        carry=carry,
        output=options.postprocess(trajectory) if options.postprocess else trajectory,
        episodes=episodes,
        stats=stats,
        counted=stream_stats.totals_of(stats, num_faulty, num_steps),
        recent=newest(episodes or trajectory, options.window_episodes),
        faults=faults,
    )


def _fill_rows(
    options: Options,
    collector: Collector,
    carry: Carry,
    params: Any,
    spec: BatchSpec,
    memory: ArrayTree,
) -> tuple[Carry, Transition]:
    """Takes the steps of a batch; masked-out rows are zero."""
    setup, env = kernel.setup_of(collector), collector.env
    num_envs = env.num_envs
    shape = -(-options.steps_per_batch // num_envs), num_envs
    number = numbers(shape, spec)
    # Known while tracing: where every batch fills its rows, no masks are computed.
    counts = (options.steps_per_batch, options.total_steps or 0)
    idle = any(count % num_envs for count in counts)  # lanes stand still in a last row
    limit = None
    if options.max_episode_steps is not None:
        limit = checks.max_steps(options.max_episode_steps)
    if options.at_batch_end == "reset":
        carry = _restart_all(collector, carry)

    roots = kernel.roots_of(env, carry)
    policy_keys = kernel.policy_keys(roots, carry, shape[0])
    # As words: jax's key reuse checker raises if a loop draws from keys made outside.
    policy_words = prng.words(policy_keys)

    def step(state: tuple, go: jax.Array) -> tuple:
        row, carry, rows = state
        here = lax.dynamic_index_in_dim(number, row, keepdims=False)
        active = here < spec.num_steps if idle else None
        acting = setup
        if options.warmup_steps:
            key = episode_keys.at_step(roots.warmup, carry.step)
            is_random = here < spec.num_random
            acting = setup._replace(
                policy=random_where(
                    setup.policy, env.action_space, is_random, key, options.mask_fn
                )
            )
        # In a last row, lanes that are not `active` keep their state.
        after, transition = kernel.step(
            acting,
            carry,
            params,
            roots=roots,
            policy_key=prng.like(policy_words[row], policy_keys),
            limit=limit,
            active=active,
            drop_fn=_faulty if options.on_fault == "drop" else None,
        )
        seen = kernel.apply_record_fn(collector.record_fn, transition)
        seen = kernel.mask_out(seen) if idle else seen
        new = kernel.writable_in_cuda_graph(prng.words(kernel.pack(seen)), row)
        # Beyond the end, where `go` is False, `row` may exceed the memory: indices are
        # clamped to its last row, which is then written back as it was.
        new = platform.hold(go, new, _read(rows, row))
        return row + 1, platform.hold(go, after, carry), _write(rows, row, new)

    def _faulty(transition: Transition) -> jax.Array:
        return nonfinite.is_nonfinite(
            kernel.apply_record_fn(collector.record_fn, transition)
        )

    # The shapes of a packed row, traced without a computation, make the zero rows.
    row = jax.eval_shape(lambda: kernel.pack(collector.step(carry, params)[1]))
    rows = prng.blank(row, carry.key, shape[:1])
    stop = -(-spec.num_steps // num_envs)  # rows from here on have no step
    words = prng.words(rows)
    # After a `postprocess` the memory has other arrays than the rows.
    if isinstance(memory, Transition) and options.postprocess is None:
        words = _reuse(memory, rows[1], stop)
    state = jnp.int32(0), carry, words
    _, carry, words = platform.steps_while(lambda state: state[0] < stop, step, state)
    mask = number < spec.num_steps  # packed rows have none
    written, flags = prng.like(words, rows)
    trajectory = kernel.unpack(written, flags, mask)
    if options.at_batch_end == "truncate":  # marked before the restart clears lengths
        trajectory = _truncate(collector, trajectory, carry, params)
        carry = _restart_all(collector, carry)
    return carry, trajectory


def _reuse(memory: Transition, flags: jax.Array, stop: jax.Array) -> ArrayTree:
    """Returns the words of an earlier batch, zero from row `stop` on.

    The rows before `stop` need no zeros, since the batch overwrites them all.
    """
    words = prng.words((kernel.pack(memory)[0], flags))
    zero = jax.tree.map(lambda x: jnp.zeros_like(x[0]), words)
    return lax.fori_loop(
        stop, flags.shape[0], lambda row, words: _write(words, row, zero), words
    )


def numbers(shape: tuple[int, ...], spec: BatchSpec) -> jax.Array:
    """Numbers the steps of the batch by row and lane; `[T, B]` int32."""
    # Row by row; within a row from `first_lane` on, and around.
    lane = jnp.arange(shape[1], dtype=jnp.int32) - spec.first_lane
    order = jnp.where(lane < 0, lane + shape[1], lane)
    row = jnp.arange(shape[0], dtype=jnp.int32)
    return row[:, None] * shape[1] + order[None]


def numbers_of_episodes(shape: tuple[int, ...]) -> jax.Array:
    """Numbers the steps of a batch with one episode per column; `[L, N]` int32."""
    return jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)


def _write(rows: ArrayTree, row: jax.Array, new: ArrayTree) -> ArrayTree:
    return jax.tree.map(
        lambda old, x: lax.dynamic_update_index_in_dim(old, x, row, 0), rows, new
    )


def _read(rows: ArrayTree, row: jax.Array) -> ArrayTree:
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, row, keepdims=False), rows
    )


def _restart_all(collector: Collector, carry: Carry) -> Carry:
    """Starts a new episode in every lane that is inside one."""
    over, env = carry.episode.episode_length > 0, collector.env
    start = kernel.next_episodes(env, carry, kernel.roots_of(env, carry))
    return kernel.restart(kernel.setup_of(collector), carry, over, start)


def _truncate(
    collector: Collector, trajectory: Transition, carry: Carry, params: Any
) -> Transition:
    """Marks the last step of every episode that goes on in `carry`."""
    num_steps = jnp.sum(trajectory.mask, axis=0, dtype=jnp.int32)
    row = jnp.arange(trajectory.mask.shape[0], dtype=jnp.int32)
    goes_on = carry.episode.episode_length > 0
    here = goes_on[None] & (row[:, None] == num_steps[None] - 1)
    value_fn = collector.value_fn
    if value_fn is not None and not isinstance(trajectory.final_value, tuple):
        value = kernel.values_where(
            collector.env, value_fn, params, carry.obs, carry.policy_state, goes_on
        )
        recorded = trajectory.final_value  # perhaps in another dtype
        value = jnp.where(here, value.astype(recorded.dtype), recorded)
        trajectory = trajectory.replace(final_value=value)
    return trajectory.replace(truncated=trajectory.truncated | here)


def _drop(trajectory: Transition) -> tuple[Transition, jax.Array]:
    """Masks out faulty episodes; returns the trajectory, and the number of them.

    A faulty episode ends at the row that is not finite, so its rows in the batch are
    that row and those before with the same id.
    """
    faulty = nonfinite.is_nonfinite(trajectory) & trajectory.mask

    # From the last row to the first: a fault spreads to earlier rows of the same id.
    def mark(later: tuple, row: tuple) -> tuple[tuple, jax.Array]:
        faulty, episode_id = row
        faulty = faulty | (later[0] & (later[1] == episode_id))
        return (faulty, episode_id), faulty

    rows = faulty, trajectory.episode_id
    start = jnp.zeros_like(faulty[0]), trajectory.episode_id[-1]
    dropped = lax.scan(mark, start, rows, reverse=True)[1]
    kept = trajectory.replace(mask=trajectory.mask & ~dropped)
    return kernel.mask_out(kept), jnp.sum(faulty, dtype=jnp.int32)


def _summarize(trajectory: Transition, episodes: Episodes | None) -> CollectStats:
    if episodes is None:
        return summarize(trajectory)
    return summarize(episodes).replace(
        num_nonfinite=nonfinite.count_nonfinite(trajectory)
    )

"""`Stream`: batches for a training loop in Python.

A stream calls `collect_steps` or `collect_episodes` of its collector, summarizes every
batch and adds its episodes to an `EpisodeWindow`. For environments in JAX `make_batch`
is one compiled program. Host environments are stepped in a thread.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.base import checks, programs
from rollout.base.trees import has_keys
from rollout.collector import Collector
from rollout.envs.types import ArrayTree, strong
from rollout.host import ctrl_c
from rollout.host.host_collector import HostCollector
from rollout.logs import EpisodeWindow
from rollout.stats import CollectStats, count_nonfinite, merge, summarize
from rollout.types import Carry, Episodes, ParamsT, Transition

Destination = str | jax.Device | jax.sharding.Sharding | None  # "host"
_NEWEST = -1  # version, if the batch reads the parameters when it starts
_NUM_UNMERGED = 16  # batches whose statistics are merged in one call


class StreamBatch(struct.PyTreeNode, kw_only=True):
    """A batch of a stream.

    Attributes:
        trajectory: `[T, B, ...]`, zero in rows whose `mask` is False; with
            `postprocess`, the result of that function.
        stats: statistics of the episodes that ended in the batch.
        steps: environment steps of the batch over all lanes.
        params_version: version of the parameters that collected the batch: 0 for the
            parameters of the constructor, n for the n-th `set_params`.
        episodes: `[N]` episodes with `episodes_per_batch`, else None.
    """

    trajectory: Any  # [T, B, ...]
    stats: CollectStats
    steps: int
    params_version: int = 0
    episodes: Episodes | None = None  # [N]


class StreamStats(NamedTuple):
    """Statistics of a stream since its start, or since `reset_stats`.

    With `at_batch_end="reset"` all means are biased toward short episodes, because long
    episodes are discarded more often.

    Attributes:
        collected: statistics of all completed episodes.
        window: moving window over the last 100 episodes.
        batches: number of returned batches.
        steps: environment steps over all lanes.
        seconds: total time from the start of each batch until `next` received it,
            without compilation. With `prefetch=1` it includes the training code.
    """

    collected: CollectStats
    window: EpisodeWindow
    batches: int = 0
    steps: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Formats the window, the steps and the speed."""
        rate = self.seconds and f", {self.steps / self.seconds:,.0f} per second"
        return f"{self.window}, {self.steps:,} steps{rate or ''}"


class BatchSpec(NamedTuple):
    """The options that the program of a batch depends on; `Stream` documents them."""

    num_rows: int | None  # T
    num_episodes: int | None  # N, instead of T
    max_episode_steps: int | None
    at_batch_end: str
    postprocess: Callable[[Transition], ArrayTree] | None


class _Pending(NamedTuple):
    """The next batch: its parameters, and its result once it has started."""

    params: Any
    version: int
    result: Any = None  # of `make_batch`, for host environments in a `Future`
    start_time: float = 0.0  # s
    rows: tuple[Transition, ...] = ()  # of host environments, before an error


class _State(NamedTuple):
    """A stream after the last batch that `next` returned."""

    carry: Carry
    stats: StreamStats
    unmerged: tuple[CollectStats, ...] = ()  # statistics of the latest batches
    steps: int = 0  # not reset by `reset_stats`
    output: ArrayTree | None = None  # of the last batch, for `reuse_memory`
    pending: tuple[_Pending, ...] = ()  # the next batches, at most two


class Stream(Iterator[StreamBatch], Generic[ParamsT]):
    """An iterator over batches with an exact number of environment steps.

        with Stream(collector, key=key, params=params, steps_per_batch=4096,
                    total_steps=1_000_000) as stream:
            for batch in stream:
                params = update(params, batch.trajectory)
                stream.set_params(params)

    A batch is `[T, B, ...]` with T = `steps_per_batch / num_envs` rows, bitwise equal
    to the rows of `collector.collect_steps`. Episodes continue in the next batch, and
    every `episode_id` is unique. Streams with equal collectors and options share
    compiled programs.

    If an error or Ctrl-C interrupts `next`, the following `next` continues. A batch of
    host environments then keeps the rows before the error and its parameters.

    Args:
        collector: collector with the policy and the environments.
        key: one typed key, the only source of randomness.
        params: parameters of the policy. The stream copies them, so that an update may
            donate the original.
        steps_per_batch: environment steps of a batch over all lanes, T * B; must be a
            multiple of `num_envs`.
        episodes_per_batch: N, number of complete episodes per batch, instead of
            `steps_per_batch`. A batch has the episodes of `Collector.collect_episodes`
            and the trajectory `[L, N, ...]` with L = `max_episode_steps`, which is
            required. Every batch starts and completes new episodes.
        total_steps: total number of environment steps of the stream; None for an
            infinite stream. With `steps_per_batch` it must be a multiple of `num_envs`,
            and the last batch may be shorter. With `episodes_per_batch` the last batch
            is the one that reaches this number.
        max_episode_steps: time limit of an episode in steps, counted across batches;
            see `Collector.collect_steps`.
        at_batch_end: "continue", "reset" or "truncate", the treatment of unfinished
            episodes; see `Collector.collect_steps`.
        postprocess: pure function from the `Transition`, `[T, B, ...]`, to any pytree
            of arrays. The stream compiles it into the program of the batch and does not
            store fields that it does not read.
        device: destination of the trajectory: a `jax.Device`, a
            `jax.sharding.Sharding` of `[T, B, ...]`, or "host" for NumPy arrays (not
            supported if lanes are sharded over several processes). None does not move
            the trajectory. The statistics are never moved.
        prefetch: number of batches collected in advance, 0 or 1. With 1, the next batch
            starts before the current batch is returned, with the current parameters, so
            `params_version` lags by one. With 0, the batch starts in `next`, which is
            strictly on-policy. Must be 0 if lanes are sharded over several processes.
        reuse_memory: if True, donates the memory of each batch to a later batch, for
            environments in JAX. The next `next` deletes the arrays of the earlier
            batch: copy the values that you keep. A NumPy view of an array remains valid
            but prevents the reuse. The option speeds up large batches, for example
            images, because the first write to newly allocated memory is slow.
        progress: if True, displays a progress bar on stderr with the steps, the speed,
            the remaining time, and the mean return of the last 100 episodes. `close`
            ends it.

    Raises:
        ValueError: if an option is invalid, or incompatible with another option.
    """

    def __init__(
        self,
        collector: Collector[ParamsT] | HostCollector[ParamsT],
        *,
        key: chex.PRNGKey,
        params: ParamsT | None = None,
        steps_per_batch: int | None = None,
        episodes_per_batch: int | None = None,
        total_steps: int | None = None,
        max_episode_steps: int | None = None,
        at_batch_end: str = "continue",
        postprocess: Callable[[Transition], ArrayTree] | None = None,
        device: Destination = None,
        prefetch: int = 0,
        reuse_memory: bool = False,
        progress: bool = False,
    ) -> None:
        checks.check_collector(collector)
        checks.check_outside_jit("Stream")
        num_envs, num_rows = collector.env.num_envs, None
        if (steps_per_batch is None) == (episodes_per_batch is None):
            names = "`steps_per_batch` and `episodes_per_batch`"
            raise ValueError(f"Exactly one of {names} must be given.")
        if total_steps is not None:
            total_steps = checks.check_int("total_steps", total_steps, most=None)
        if steps_per_batch is not None:
            label = f"num_envs={num_envs}"
            steps_per_batch = checks.check_int("steps_per_batch", steps_per_batch)
            checks.check_multiple("steps_per_batch", steps_per_batch, num_envs, label)
            checks.check_multiple("total_steps", total_steps or 0, num_envs, label)
            num_rows = steps_per_batch // num_envs
        checks.check_max_episode_steps(max_episode_steps, num_rows is None)
        checks.check_choice("prefetch", prefetch, (0, 1))
        self._spec = BatchSpec(
            num_rows, episodes_per_batch, max_episode_steps, at_batch_end, postprocess
        )
        self._collector: Any = collector
        self._num_envs, self._total_steps = num_envs, total_steps
        self._device, self._prefetch, self._reuses = device, prefetch, reuse_memory
        self._params = _copied(params), 0  # and their version
        sharding = collector.env.sharding
        if sharding is not None and sharding.mesh.is_multi_process:
            programs.compare_processes("stream", {"options": self._spec[:4]})
            if prefetch:
                # All processes must run their programs in the same order.
                raise ValueError("`prefetch` must be 0 with several processes.")
        carry = collector.init(key)
        window = EpisodeWindow.init(100)
        if sharding is not None:
            window = jax.jit(sharding.replicate)(window)
        self._initial_stats = StreamStats(CollectStats.init(carry.episode), window)
        # Signal handlers and other threads read the state at any time, so each
        # assignment replaces it completely.
        self._state = _State(carry, self._initial_stats)
        self._calls, self._compiled = ctrl_c.Calls(), set()
        self._bar, self._must_stop, self._is_closed = None, False, False
        if progress:
            from tqdm import tqdm  # slow to import

            self._bar = tqdm(total=total_steps, unit="step", unit_scale=True)
        # Reentrant, since a signal handler may call `next` or `set_params`.
        self._next_lock, self._params_lock = threading.RLock(), threading.RLock()

    def __enter__(self) -> Self:
        """Returns the stream, which is closed at the end of the `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the stream."""
        self.close()

    def __next__(self) -> StreamBatch:
        """Returns the next batch. Other threads wait while a thread calls `next`.

        Raises:
            StopIteration: after the last batch, and once after a `stop`.
            RuntimeError: if the stream is closed.
        """
        with self._next_lock:
            if self._is_closed:
                raise RuntimeError("The stream is closed.")
            if self._must_stop or self._spec_after(self.steps) is None:
                self._must_stop = False
                raise StopIteration
            return self._next_batch()

    def __len__(self) -> int:
        """Returns the total number of batches, not counting a `stop`."""
        if self._total_steps is None or self._spec.num_rows is None:
            raise TypeError("A stream of steps with `total_steps` has a length.")
        return -(-self._total_steps // (self._spec.num_rows * self._num_envs))

    @property
    def params(self) -> Any:
        """Parameters of the last `set_params`, or of the constructor."""
        return self._params[0]

    @property
    def carry(self) -> Carry:
        """Carry after the last batch, for example for `collector.freeze`."""
        return self._state.carry

    @property
    def steps(self) -> int:
        """Environment steps of all batches so far, including those before `restore`."""
        return self._state.steps

    @property
    def stats(self) -> StreamStats:
        """Statistics of the batches since `reset_stats`."""
        state = self._state
        return _merged(state.stats, state.unmerged)

    def reset_stats(self) -> None:
        """Resets the statistics except the window, `steps` and episode ids."""
        state = self._state
        stats = self._initial_stats._replace(window=state.stats.window)
        self._state = state._replace(stats=stats, unmerged=())

    def set_params(self, params: ParamsT) -> None:
        """Sets the parameters of all batches that start later, from any thread.

        Args:
            params: new parameters with the structure, shapes and dtypes of the previous
                parameters. The stream copies them.

        Raises:
            ValueError: if the structure, a shape or a dtype differs.
        """
        text, new = "`params` must keep structure, shapes and dtypes", _copied(params)
        # The lock gives concurrent calls of several threads different versions.
        with self._params_lock:
            checks.check_same_types(text, self.params, new)
            self._params = new, self._params[1] + 1

    def stop(self) -> None:
        """Stops the iteration after the current batch, which is still returned.

        Any thread or signal handler may call this method. A new loop over the stream
        resumes the iteration.
        """
        self._must_stop = True

    def close(self) -> None:
        """Closes the stream after the pending batch; later calls of `next` raise."""
        self._is_closed = True
        if self._bar is not None:
            self._bar.close()
        self._calls.wait()

    def state(self) -> dict[str, Any]:
        """Returns the state of the stream, from which `restore` resumes.

        The state is a pytree of arrays for `checkpoint.save`. It contains the
        parameters and the position after the last batch that `next` returned, even if
        the next batch has already started.

        The state includes the states of host environments if no batch is pending and
        if all of these environments implement `save_state`.
        """
        state, (params, version) = self._state, self._params
        pending = state.pending[0] if state.pending else _Pending(params, _NEWEST)
        saved = {
            "carry": state.carry,
            # Use 64 bits: the steps of all lanes exceed 2^31 within hours.
            "counts": np.array((state.steps, version, pending.version), np.int64),
            "params": params,
            "stats": jax.tree.map(np.asarray, _merged(state.stats, state.unmerged)),
        }
        if self._prefetch:  # the next batch may have older parameters
            saved["next_params"] = pending.params
        if self._collector.is_host:
            # Empty bytes mark an unknown state: `restore` starts a new episode.
            unknown, is_known = [b""] * self._num_envs, pending.result is None
            saved["envs"] = self._collector.save(state.carry) if is_known else unknown
        return saved

    def restore(self, state: dict[str, Any]) -> None:
        """Resumes from a saved state, bitwise equal to an uninterrupted stream.

        If the state of host environments could not be saved, a warning is issued and
        their unfinished episodes restart with their original seeds.

        Args:
            state: state of a stream with the same collector and the same `prefetch`.
                All other options, for example `total_steps`, and the parameters of the
                environments are taken from this stream.

        Raises:
            ValueError: if the structure, a shape or a dtype of `state` differs, or if
                the environments do not implement `load_state`.
        """
        text = "`state` must be the state of a stream of the same kind"
        checks.check_same_types(text, self.state(), state)
        steps, version, next_version = (int(x) for x in state["counts"])
        carry = _copied(state["carry"])
        if self._collector.is_host:
            self._calls.wait()
            carry = self._collector.restore(carry, state["envs"])
        # Copy instead of viewing `state`, and convert `[]` arrays to scalars.
        stats = jax.tree.map(lambda x: np.array(x)[()], state["stats"])
        pending = ()
        if self._prefetch and next_version != _NEWEST:
            pending = (_Pending(_copied(state["next_params"]), next_version),)
        self._params = _copied(state["params"]), version
        self._state = _State(carry, stats, steps=steps, pending=pending)

    def _next_batch(self) -> StreamBatch:
        """Waits for the next batch, and starts the batch after it with `prefetch`."""
        state = self._state
        if not state.pending or state.pending[0].result is None:
            with (
                ctrl_c.delay_ctrl_c()
            ):  # an interrupt must not lose a batch that started
                pending = self._start(state, state.output)
                state = self._state = state._replace(pending=(pending,))
        pending, old = state.pending[0], state.stats
        result, version = pending.result, pending.version
        try:
            if isinstance(result, Future):
                result = ctrl_c.result(result)
            carry, batch, window = result
            jax.block_until_ready((batch.trajectory, batch.steps))
        except Exception:  # after Ctrl-C the batch is still pending
            failed = (pending._replace(result=None),) if self._collector.is_host else ()
            self._state = state._replace(pending=failed)
            raise
        seconds = old.seconds + time.perf_counter() - pending.start_time
        unmerged = (*state.unmerged, batch.stats)
        steps = int(np.asarray(batch.steps))  # faster than `int` of a JAX array
        stats = StreamStats(
            old.collected, window, old.batches + 1, old.steps + steps, seconds
        )
        if len(unmerged) == _NUM_UNMERGED:
            stats, unmerged = _merged(stats, unmerged), ()
        output = batch.trajectory
        memory = output if self._reuses else None
        next_state = _State(carry, stats, unmerged, state.steps + steps, memory)
        if self._device == "host":  # NumPy has no typed keys
            output = jax.tree.map(lambda x: x if has_keys(x) else np.array(x), output)
        elif self._device is not None:
            output = jax.device_put(output, self._device)
        has_next = self._spec_after(next_state.steps) and not self._must_stop
        if has_next and self._prefetch and len(state.pending) == 1:
            with ctrl_c.delay_ctrl_c():
                batches = pending, self._start(next_state, state.output)
                state = self._state = state._replace(pending=batches)
        if self._bar is not None:
            self._bar.set_postfix_str(str(window), refresh=False)
            self._bar.update(next_state.steps - self._bar.n)
        self._state = next_state._replace(pending=state.pending[1:])
        return batch.replace(trajectory=output, steps=steps, params_version=version)

    def _spec_after(self, steps: int) -> BatchSpec | None:
        """Returns the options of the batch after `steps` steps; None after the last."""
        spec, num_left = self._spec, (self._total_steps or float("inf")) - steps
        if spec.num_rows is not None and 0 < num_left < spec.num_rows * self._num_envs:
            return spec._replace(num_rows=num_left // self._num_envs)
        return spec if num_left > 0 else None

    def _start(self, state: _State, memory: ArrayTree | None) -> _Pending:
        """Starts the batch after `state`; continues it in host environments."""
        collector, spec = self._collector, self._spec_after(state.steps)
        pending = state.pending[0] if state.pending else _Pending(*self._params)
        carry, params, window = state.carry, pending.params, state.stats.window
        if spec != self._spec or any(x.is_deleted() for x in jax.tree.leaves(memory)):
            memory = None  # for the shorter last batch, or after an error
        is_compiled = (spec, memory is None) in self._compiled
        self._compiled.add((spec, memory is None))
        if collector.is_host:
            if not is_compiled:  # now, so that `seconds` excludes it
                collector.compile(carry, params)
            start_time = time.perf_counter()
            # After an error the collector continues from its latest step.
            carry, recovered = collector.recover(None if state.pending else carry)
            rows = pending.rows + (() if recovered is None else (recovered,))
            args = spec, collector, carry, params, window, None, rows
            result = self._calls.submit(_make_batch, *args)
            return pending._replace(result=result, start_time=start_time, rows=rows)
        if not is_compiled:  # the call below finds the program in the jit cache
            make_batch.lower(spec, collector, carry, params, window, memory).compile()
        start_time = time.perf_counter()
        result = make_batch(spec, collector, carry, params, window, memory)
        return pending._replace(result=result, start_time=start_time)


def _make_batch(
    spec: BatchSpec,
    collector: Any,
    carry: Carry,
    params: Any,
    window: EpisodeWindow,
    memory: ArrayTree | None,
    rows: tuple[Transition, ...] = (),
) -> tuple[Carry, StreamBatch, EpisodeWindow]:
    """Collects and summarizes a batch.

    `memory` is an obsolete output of an earlier batch. It is donated but not read, so
    that XLA reuses its memory for the new output. `rows` are the first rows of the
    batch if an error of a host environment has interrupted it.
    """
    del memory
    num_rows, num_episodes, limit, at_end, postprocess = spec
    if num_rows is None:
        carry, episodes = collector.collect_episodes(
            carry, params, num_episodes, max_episode_steps=limit, return_trajectory=True
        )
        trajectory, episodes = episodes.trajectory, episodes.replace(trajectory=())
        stats = summarize(episodes).replace(num_nonfinite=count_nonfinite(trajectory))
        steps: Any = stats.num_steps
    else:
        if rows and at_end == "reset":
            at_end = "continue"  # the first rows have already reset the episodes
        if num_left := num_rows - sum(len(x.mask) for x in rows):
            carry, trajectory = collector.collect_steps(
                carry, params, num_left, max_episode_steps=limit, at_batch_end=at_end
            )
            rows = *rows, trajectory
        trajectory, episodes = rows[0], None
        if len(rows) > 1:
            trajectory = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
        stats, steps = summarize(trajectory), trajectory.mask.size
    window = window.add(trajectory if episodes is None else episodes)
    if sharding := collector.env.sharding:
        window = sharding.replicate(window)  # each process reads it
    output = trajectory if postprocess is None else jax.jit(postprocess)(trajectory)
    batch = StreamBatch(trajectory=output, stats=stats, steps=steps, episodes=episodes)
    return carry, batch, window


make_batch = jax.jit(_make_batch, static_argnums=0, donate_argnums=5, keep_unused=True)


def _merged(stats: StreamStats, unmerged: tuple[CollectStats, ...]) -> StreamStats:
    return stats._replace(collected=merge([stats.collected, *unmerged]))


def _copied(tree: Any) -> Any:
    """Copies the leaves of a tree, and converts numbers to arrays."""
    leaves, structure = jax.tree.flatten(strong(tree))
    return jax.tree.unflatten(structure, _copied_leaves(leaves))


# Pass a list of leaves: the jit cache may treat different dataclasses as equal.
_copied_leaves = jax.jit(lambda leaves: [jnp.copy(x) for x in leaves])

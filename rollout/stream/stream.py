"""`Stream`: an iterator over batches, for training loops in Python."""

import numbers
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Self

import chex
import jax
import numpy as np
from flax import struct

from rollout.base import checks, programs, trees
from rollout.collector import Collector
from rollout.envs.types import ArrayTree, strong
from rollout.host.host_collector import HostCollector
from rollout.stats import CollectStats, merge
from rollout.stream.batch import (
    NO_FAULT,
    BatchResult,
    Destination,
    HostBatches,
    JaxBatches,
    Options,
    State,
    StreamStats,
    VersionedParams,
    Wait,
    copied,
)
from rollout.types import Carry, Episodes, ParamsT, Transition

_NEWEST = -1  # version of parameters to be read when the batch starts


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
    params_version: int
    episodes: Episodes | None = None  # [N]


class _Pending(NamedTuple):
    """The next batch, with fixed parameters."""

    params: VersionedParams
    wait: Wait | None = None  # waits for the batch, if it has started


class Stream(Generic[ParamsT]):
    """An iterator over batches with an exact number of environment steps.

        with Stream(collector, key=key, params=params, steps_per_batch=4096,
                    total_steps=1_000_000) as stream:
            for batch in stream:
                params = update(params, batch.trajectory)
                stream.set_params(params)

    A batch is `[T, B, ...]` with T = `steps_per_batch / num_envs` rows. The rows are
    bitwise equal to the rows of `Collector.collect_steps`, unless an option changes
    them. Episodes continue in the next batch, and every `episode_id` is unique. Streams
    with equal collectors and options share compiled programs.

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
            required. Every batch starts and completes new episodes, and the stream is
            infinite. Not supported with `total_steps` or `on_fault="drop"`.
        total_steps: total number of environment steps of the stream, a multiple of
            `num_envs`; None for an infinite stream. The last batch may be shorter.
        max_episode_steps: time limit of an episode in steps, counted across batches.
            The last step is marked as `truncated`. If the environment terminates at
            the same step, both flags are set.
        at_batch_end: treatment of unfinished episodes. `"continue"` continues them in
            the next batch. `"reset"` discards them without setting a flag and starts
            new episodes in every batch. `"truncate"` also starts new episodes, but
            marks the last step of unfinished episodes as `truncated`. `record_fn` and
            the accumulators observe this flag, `info` does not. `next_obs` is the true
            successor.
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
        reuse_memory: if True, writes each batch to the memory of an earlier batch.
            `next` deletes the arrays of the earlier batch, and reading them raises.
            Copy all values that you keep. A NumPy view of an array remains valid but
            prevents the reuse. The option speeds up large batches, for example images,
            because the first write to newly allocated memory is slow.
        check_finite: if True, raises `FloatingPointError` for a nonfinite recorded
            value. Negative infinity is allowed in extras, for example in logits. The
            error resets the stream to its position before the batch.
        on_fault: reaction to a nonfinite value, "raise" or "drop". "drop" ends the
            episode at this value, masks out and zeroes its rows in the batch, resets
            the lane, and continues. `steps` includes the masked-out rows, and
            `stats.faulty_episodes` counts the dropped episodes.
        progress: if True, displays a progress bar on stderr with the steps, the speed,
            the remaining time, and the mean return of the last 100 episodes.

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
        check_finite: bool = False,
        on_fault: str = "raise",
        progress: bool = False,
    ) -> None:
        checks.check_collector(collector)
        checks.check_bool("progress", progress)
        checks.check_outside_jit("Stream")
        self._options = options = Options(
            num_envs=collector.env.num_envs,
            steps_per_batch=steps_per_batch,
            episodes_per_batch=episodes_per_batch,
            total_steps=total_steps,
            max_episode_steps=max_episode_steps,
            at_batch_end=at_batch_end,
            postprocess=postprocess,
            device=device,
            prefetch=prefetch,
            reuse_memory=reuse_memory,
            check_finite=check_finite,
            on_fault=on_fault,
        ).checked(collector)
        batches: Any = HostBatches if collector.is_host else JaxBatches
        self._batches: JaxBatches | HostBatches = batches(collector, options)
        carry = collector.init(key)
        # The state after the last batch, and the batch in flight. One assignment sets
        # both, because a signal handler may raise between two assignments.
        self._position: tuple[State, _Pending | None]
        self._position = State(carry, StreamStats.init(carry)), None
        self._params: VersionedParams = _copy_params(params), 0
        self._must_stop, self._is_closed = False, False
        self._next_lock, self._params_lock = threading.RLock(), threading.Lock()
        self._has_bar, self._bar = progress, None

    def __enter__(self) -> Self:
        """Returns the stream, which is closed at the end of the `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the stream."""
        self.close()

    def __iter__(self) -> Iterator[StreamBatch]:
        """Returns the stream, which yields the remaining batches."""
        return self

    def __next__(self) -> StreamBatch:
        """Returns the next batch.

        Raises:
            StopIteration: after the last batch, and once after a `stop`.
            FloatingPointError: if `check_finite` detects a nonfinite value.
            RuntimeError: if the stream is closed, or another thread runs `next`.
        """
        # The lock protects `_position` from other threads. It is reentrant, because a
        # signal handler in this thread may call `next`.
        if not self._next_lock.acquire(blocking=False):
            raise RuntimeError(
                "`next` must be called by one thread at a time, got a second thread."
            )
        try:
            if self._is_closed:
                raise RuntimeError("The stream is closed.")
            if self._must_stop:
                self._must_stop = False
                raise StopIteration
            # If this call raises, the next call continues with `_position`, which has
            # the batch in flight.
            state, pending = self._position
            pending = self._begin(state, pending, state.output)
            if pending is None or pending.wait is None:
                raise StopIteration
            self._position = state, pending
            batch, next_state = self._receive(state, pending.wait)
            next_pending = None
            if self._options.prefetch and not self._must_stop:
                next_pending = self._begin(next_state, None, state.output)
            self._show_bar(next_state)
            self._position = next_state, next_pending
        except BaseException:
            self._close_bar()
            raise
        finally:
            self._next_lock.release()
        return batch

    def __len__(self) -> int:
        """Returns the total number of batches, not counting a `stop`."""
        options = self._options
        if options.total_steps is None:
            raise TypeError("A stream without `total_steps` has no length.")
        assert options.steps_per_batch is not None  # validated by `Options.checked`
        return -(-options.total_steps // options.steps_per_batch)

    @property
    def params(self) -> Any:
        """Parameters of the last `set_params`, or of the constructor."""
        return self._params[0]

    @property
    def carry(self) -> Carry:
        """Carry after the last batch, for example for `collector.freeze`."""
        return self._position[0].carry

    @property
    def steps(self) -> int:
        """Environment steps of all batches so far, including those before `restore`."""
        return self._position[0].steps

    @property
    def stats(self) -> StreamStats:
        """Statistics of the batches since `reset_stats`."""
        return self._position[0].stats

    def reset_stats(self) -> None:
        """Resets the statistics except the window, `steps` and episode ids."""
        state, pending = self._position
        stats = StreamStats.init(state.carry)._replace(window=state.stats.window)
        self._position = state._replace(stats=stats), pending

    def compile(self) -> None:
        """Compiles the program in advance; otherwise the first batch compiles it."""
        self._batches.compile(self._position[0], self._params[0])

    def set_params(self, params: ParamsT) -> None:
        """Sets the parameters of all batches that start later, from any thread.

        Args:
            params: new parameters with the structure, shapes and dtypes of the previous
                parameters. The stream copies them.

        Raises:
            ValueError: if the structure, a shape or a dtype differs.
        """
        new = _copy_params(params)
        # The lock gives concurrent calls of several threads different versions.
        with self._params_lock:
            old, version = self._params
            checks.check_same_types(
                "`params` must keep structure, shapes and dtypes", old, new
            )
            self._params = new, version + 1

    def stop(self) -> None:
        """Stops the iteration after the current batch, which is still returned.

        Any thread or signal handler may call this method. A new loop over the stream
        resumes the iteration.
        """
        self._must_stop = True

    def close(self) -> None:
        """Closes the stream after the pending batch; later calls of `next` raise."""
        self._is_closed = True
        self._close_bar()
        self._batches.close()

    def state(self) -> dict[str, Any]:
        """Returns the state of the stream, from which `restore` resumes.

        The state is a pytree of arrays for `checkpoint.save`. It contains the
        parameters and the position after the last batch that `next` returned, even if
        the next batch has already started.

        The state includes the states of host environments if no batch is pending and
        if all of these environments implement `save_state`.
        """
        (state, pending), (params, version) = self._position, self._params
        next_params, next_version = pending.params if pending else (params, _NEWEST)
        saved = {
            "carry": state.carry,
            # Use 64 bits: the steps of all lanes exceed 2^31 within hours.
            "counts": np.array((state.steps, version, next_version), np.int64),
            "params": params,
            "stats": jax.tree.map(np.asarray, state.stats),
        }
        saved |= self._batches.save(state.carry)
        # A prefetched batch can have older parameters.
        return saved | ({"next_params": next_params} if self._options.prefetch else {})

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
        message = "`state` must be the state of a stream of the same kind"
        checks.check_same_types(message, self.state(), state)
        steps, version, next_version = (int(x) for x in state["counts"])
        pending = None
        if self._options.prefetch and next_version != _NEWEST:
            pending = _Pending((_copy_params(state["next_params"]), next_version))
        carry = self._batches.restore(state, self._position[0].carry)
        # Copy instead of viewing `state`, and convert `[]` arrays to scalars.
        stats = jax.tree.map(lambda x: np.array(x)[()], state["stats"])
        self._params = _copy_params(state["params"]), version
        self._position = State(carry, stats, steps), pending

    def _begin(
        self, state: State, pending: _Pending | None, memory: ArrayTree | None
    ) -> _Pending | None:
        """Starts the batch after `state` if necessary; returns None after the end."""
        if not self._options.num_rows(state.steps):
            return None
        if pending is not None and pending.wait is not None:
            return pending
        params = self._params if pending is None else pending.params
        return _Pending(params, self._batches.begin(state, params, memory))

    def _receive(self, state: State, wait: Wait) -> tuple[StreamBatch, State]:
        """Waits for the batch after `state`; returns the batch and the next state."""
        options, old = self._options, state.stats
        try:
            result, seconds, version = wait()
            window = jax.tree.map(programs.gather, result.window)
            # Copy the statistics to the host in one transfer, but not the trajectory.
            small = result._replace(carry=(), output=(), episodes=None, window=window)
            small = jax.device_get(small)
            _raise_fault(options, small, version)
            output = _placed(result.output, options.device)
        except Exception:  # after Ctrl-C the batch is still pending
            self._position = state, None
            raise
        num_steps = int(small.stats.num_steps)
        if options.episodes_per_batch is None:
            # Count the steps of dropped episodes as well.
            num_steps = options.num_rows(state.steps) * options.num_envs
        batch = StreamBatch(
            trajectory=output,
            stats=result.stats,
            steps=num_steps,
            params_version=version,
            episodes=result.episodes,
        )
        stats = StreamStats(
            collected=merge([old.collected, small.stats]),
            window=small.window,
            batches=old.batches + 1,
            steps=old.steps + num_steps,
            seconds=old.seconds + seconds,
            faulty_episodes=old.faulty_episodes + int(small.num_faulty),
        )
        memory = output if options.reuse_memory else None
        return batch, State(result.carry, stats, state.steps + num_steps, memory)

    def _show_bar(self, state: State) -> None:
        """Displays the number of steps and the mean return of recent episodes."""
        if not self._has_bar:
            return
        if self._bar is None:
            from tqdm import tqdm  # slow to import

            total = self._options.total_steps
            self._bar = tqdm(
                total=total, unit="step", unit_scale=True, dynamic_ncols=True
            )
        self._bar.set_postfix_str(str(state.stats.window), refresh=False)
        self._bar.update(state.steps - self._bar.n)

    def _close_bar(self) -> None:
        """Closes the bar and its line; the next `_show_bar` creates a new bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _raise_fault(options: Options, result: BatchResult, version: int) -> None:
    """Raises if a checked field is not finite."""
    faults: dict[str, Any] = result.faults
    first = min(faults.values(), default=NO_FAULT)
    if first == NO_FAULT:
        return
    names = [f"`{name}`" for name, entry in faults.items() if entry == first]
    # Entries are numbered along `[T, B]`, or `[L, N]` for complete episodes.
    column = first % (options.episodes_per_batch or options.num_envs)
    label = "episode" if options.episodes_per_batch else "an episode in lane"
    raise FloatingPointError(
        f"{' and '.join(names)} must be finite with `check_finite`, got a nonfinite "
        f"value, first at step {result.fault_step} of {label} {column}, in a batch "
        f"with `params_version` {version}."
    )


def _copy_params(params: Any) -> Any:
    """Copies parameters, and converts numbers to arrays."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not hasattr(leaf, "__array__") and not isinstance(leaf, numbers.Number):
            raise ValueError(
                f"`params` must hold arrays and numbers only, got "
                f"{checks.describe(leaf)} at {jax.tree_util.keystr(path) or 'the root'}"
                ". Keep functions and text in the policy, for example the static part "
                "of `equinox.partition`."
            )
    return copied(strong(params))


def _placed(tree: ArrayTree, device: Destination) -> ArrayTree:
    """Copies a batch to `device`, unless it is None."""
    if isinstance(device, jax.Device | jax.sharding.Sharding):
        return jax.block_until_ready(jax.device_put(tree, device))
    if device == "host":  # NumPy has no typed keys
        return jax.tree.map(lambda x: x if trees.has_keys(x) else np.array(x), tree)
    return tree

"""`Stream`: yields batches to a training loop in Python."""

import numbers
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self

import chex
import jax
import numpy as np
from flax import struct

from rollout import checks, multihost
from rollout.collector import Collector
from rollout.envs import trees
from rollout.envs.types import ArrayTree, strong
from rollout.host.host_collector import HostCollector
from rollout.stats import CollectStats
from rollout.stream.batch import NO_FAULT
from rollout.stream.makers import HostMaker, JaxMaker, Position, Wait, copied
from rollout.stream.options import Destination, Options
from rollout.stream.progress import Bar
from rollout.stream.stream_stats import StreamStats
from rollout.types import Carry, Episodes, ParamsT, Transition

_NEWEST = -1  # version of parameters: those that are set when the batch begins


class StreamBatch(struct.PyTreeNode, kw_only=True):
    """A batch of a stream.

    Attributes:
        trajectory: `[T, B, ...]`, all zero where its `mask` is False; with a
            `postprocess`, its result.
        stats: statistics of the episodes that ended in the batch.
        steps: environment steps of the batch over all lanes.
        params_version: version of the parameters it was made with: 0 for those of the
            constructor, n for those of the n-th `set_params`.
        episodes: with `episodes_per_batch` the episodes, `[N]`, else None.
    """

    trajectory: Any  # [T, B, ...]
    stats: CollectStats
    steps: int
    params_version: int
    episodes: Episodes | None = None  # [N]


class Stream(Generic[ParamsT]):
    """Yields batches with an exact number of environment steps, one after the other.

        with Stream(collector, key=key, params=params, steps_per_batch=4096,
                    total_steps=1_000_000) as stream:
            for batch in stream:
                params = update(params, batch.trajectory)
                stream.set_params(params)

    A batch is `[T, B, ...]` with T = `steps_per_batch / num_envs` rows. The batches are
    bit for bit the rows of `Collector.collect_steps`, unless an option below changes
    them. Episodes continue from batch to batch, and an `episode_id` is never used
    again. Streams with equal collectors and options share what is compiled.

    Args:
        collector: policy and environments.
        key: one typed key; everything random derives from it.
        params: whatever the policy takes as its parameters. They are copied, so that an
            update may donate them.
        steps_per_batch: environment steps of a batch over all lanes, T * B: a multiple
            of `num_envs`.
        episodes_per_batch: N, whole episodes per batch instead of steps, as those of
            `Collector.collect_episodes`, with their rows: `[L, N, ...]` with L =
            `max_episode_steps`, which must be given. The stream is endless; every batch
            begins with new episodes and finishes them all. Not together with
            `total_steps` or `on_fault="drop"`.
        total_steps: steps after which the stream ends, a multiple of `num_envs`; None
            for an endless one. The last batch has the steps that are left.
        max_episode_steps: steps after which an episode is truncated, counted across
            batches. If the environment ends it at that very step, both flags are set.
        at_batch_end: `"continue"`: episodes go on in the next batch. `"reset"`: every
            batch starts new episodes, and unfinished ones are given up without a mark.
            `"truncate"`: the same, but the last step of every unfinished episode is
            marked as `truncated`, also for the accumulators and `record_fn`; its
            `next_obs` is the true successor. `info` does not see the mark.
        postprocess: pure function from the `Transition`, `[T, B, ...]`, to any pytree
            of arrays. It is compiled into the program, and fields that it does not read
            are not stored.
        device: destination of the trajectory: a `jax.Device`, a
            `jax.sharding.Sharding` of `[T, B, ...]`, or "host" (NumPy arrays; not if
            lanes are sharded over several processes). None leaves it where it was
            collected. The statistics are not moved.
        prefetch: 1 begins the next batch before this one is returned, with the
            parameters of that moment, so `params_version` lags by one; 0 begins it in
            `next`: strictly on-policy, and required where lanes are sharded over
            several processes.
        reuse_memory: writes each batch to the memory of an earlier one, whose arrays
            are deleted by the next call of `next`: reading them raises. Copy the values
            that you keep; a NumPy view of an array stays valid, but prevents the reuse.
            It pays for large batches, such as images: fresh memory is slow to touch for
            the first time.
        check_finite: raises `FloatingPointError` if a recorded value is not finite;
            minus infinity is allowed in extras such as logits. The stream then stands
            where it stood before that batch.
        on_fault: "raise", or "drop": the episode ends there, its rows in this batch are
            masked out and zero, the lane is reset, and the stream goes on. The masks
            then add up to less than `steps`, and `stats.faulty_episodes` counts the
            episodes.
        progress: shows a bar on stderr: steps, their speed, the time left, and the mean
            return of the last 100 episodes.

    Raises:
        ValueError: if an option is not as above, or clashes with another.
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
        checks.collects(collector)
        if isinstance(collector, HostCollector) and collector.num_ready is not None:
            raise ValueError(
                "`collector` must step all environments together, got "
                f"num_ready={collector.num_ready}: call `collect_steps` in your loop."
            )
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
        )
        checks.boolean("progress", progress)
        checks.outside_of_jit("Stream")
        make: Any = HostMaker if collector.is_host else JaxMaker
        self._maker: JaxMaker | HostMaker = make(collector, options)
        carry = collector.init(key)
        self._at = Position(carry, StreamStats.create(carry))
        self._params = _own(params), 0
        self._must_stop, self._is_closed = False, False
        self._inside, self._setting = threading.RLock(), threading.Lock()
        self._bar = Bar(total_steps, is_on=progress)

    def __enter__(self) -> Self:
        """Closes the stream at the end of the `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the stream."""
        self.close()

    def __iter__(self) -> Iterator[StreamBatch]:
        """Returns the stream itself, which yields the batches that are left."""
        return self

    def __next__(self) -> StreamBatch:
        """Collects the next batch, or waits for it.

        Raises:
            StopIteration: after the last batch, and once after a `stop`.
            FloatingPointError: with `check_finite`.
            RuntimeError: if the stream is closed, or another thread is in `next`.
        """
        # Another thread would read `_at` halfway through this call. The lock is
        # reentrant: a handler of a signal in this thread may call `next`.
        if not self._inside.acquire(blocking=False):
            raise RuntimeError(
                "`next` must be called by one thread at a time, got a second one."
            )
        try:
            if self._is_closed:
                raise RuntimeError("The stream is closed.")
            if self._must_stop:
                self._must_stop = False
                raise StopIteration
            # Whatever ends this call early: the next one goes on from `_at`, with the
            # batch that has begun.
            before = self._at = self._begin(self._at, self._at.memory)
            if before.pending is None:
                raise StopIteration
            batch, at = self._receive(before, before.pending)
            if self._options.prefetch and not self._must_stop:
                at = self._begin(at, before.memory)
            self._bar.show(at.steps, at.stats)
            self._at = at
        except BaseException:
            self._bar.close()
            raise
        finally:
            self._inside.release()
        return batch

    def __len__(self) -> int:
        """Returns the number of batches of the whole run, without a `stop`."""
        options = self._options
        if options.total_steps is None:
            raise TypeError("A stream without `total_steps` has no length.")
        assert options.steps_per_batch is not None  # `Options` has checked it
        return -(-options.total_steps // options.steps_per_batch)

    @property
    def params(self) -> Any:
        """The parameters of the last `set_params`."""
        return self._params[0]

    @property
    def carry(self) -> Carry:
        """The carry after the last batch, for `collector.freeze`."""
        return self._at.carry

    @property
    def steps(self) -> int:
        """Environment steps in all batches so far, also before a `restore`."""
        return self._at.steps

    @property
    def stats(self) -> StreamStats:
        """Statistics of the batches since `reset_stats`."""
        return self._at.stats

    def reset_stats(self) -> None:
        """Resets the statistics but for their window; ids and steps go on."""
        at = self._at
        stats = StreamStats.create(at.carry)._replace(window=at.stats.window)
        self._at = at._replace(stats=stats)

    def compile(self) -> None:
        """Compiles the program, which otherwise the first batch does."""
        at = self._at._replace(params=self._params, memory=None)
        self._maker.compile(self._num_rows(at), at)

    def set_params(self, params: ParamsT) -> None:
        """Sets the parameters for the batches that have not begun, from any thread.

        Args:
            params: of the structure, shapes and dtypes of those before; copied.

        Raises:
            ValueError: if structure, a shape or a dtype differs.
        """
        new, what = _own(params), "`params` must keep structure, shapes and dtypes"
        # Two threads that set at once must not give two parameters one version.
        with self._setting:
            old, version = self._params
            checks.same(what, old, new)
            self._params = new, version + 1

    def stop(self) -> None:
        """Ends the iteration after the current batch, which is still returned.

        Any thread or signal handler may call it. Iteration may continue afterwards.
        """
        self._must_stop = True

    def close(self) -> None:
        """Ends the stream, after the batch that has begun; there are no more."""
        self._is_closed = True
        self._bar.close()
        self._maker.close()

    def state(self) -> dict[str, Any]:
        """Returns the state from which `restore` goes on, as a pytree of arrays.

        It is the state after the last batch that `next` returned, also if the next one
        has begun, and contains the parameters. `checkpoint.save` writes it.

        The state of environments that are not JAX is in it if no other batch has begun
        and if all of them have `save_state`.
        """
        at, (params, version) = self._at, self._params
        next_params, next_version = at.params or (params, _NEWEST)
        state = {
            "carry": at.carry,
            # In 64 bits: steps of all lanes pass 2^31 within hours.
            "counts": np.array((at.steps, version, next_version), np.int64),
            "params": params,
            "stats": jax.tree.map(np.asarray, at.stats),
        }
        state |= self._maker.save(at.carry)
        # Only a batch that begins in advance may have older parameters.
        return state | ({"next_params": next_params} if self._options.prefetch else {})

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, with the same bits.

        Environments that are not JAX and whose state could not be saved restart the
        unfinished episodes, each with its own seed, and a warning says so.

        Args:
            state: from a stream with the same collector and the same `prefetch`.
                Other options, such as `total_steps`, and the environments' parameters
                are those of this stream.

        Raises:
            ValueError: if it is not from a stream of the same kind; if the environments
                have no `load_state`.
        """
        what = "`state` must be one of a stream of the same kind"
        checks.same(what, self.state(), state)
        steps, version, next_version = (int(x) for x in state["counts"])
        next_params = None
        if self._options.prefetch and next_version != _NEWEST:
            next_params = _own(state["next_params"]), next_version
        carry = self._maker.restore(state, self._at.carry)
        # Not views of `state`, and numbers instead of arrays `[]`.
        stats = jax.tree.map(lambda x: np.array(x)[()], state["stats"])
        self._params = _own(state["params"]), version
        self._at = Position(carry, stats, steps, params=next_params)

    def _begin(self, at: Position, memory: ArrayTree | None) -> Position:
        """Begins the batch after `at`, if there is one and it has not begun."""
        if at.pending is not None or not self._num_rows(at):
            return at
        at = at._replace(params=at.params or self._params)
        given = at._replace(memory=memory)
        return at._replace(pending=self._maker.begin(self._num_rows(at), given))

    def _receive(self, at: Position, wait: Wait) -> tuple[StreamBatch, Position]:
        """Waits for the batch that has begun; returns it, and the position after it."""
        options = self._options
        try:
            result, seconds, version = wait()
            window = jax.tree.map(multihost.gather, result.window)
            # One transfer for all that Python reads; the trajectory stays where it is.
            small = result.stats, window, result.num_faulty
            faults = result.faults, result.fault_step
            (stats, window, num_faulty), faults = jax.device_get((small, faults))
            self._raise_fault(faults[0], faults[1], version)
            output = _placed(result.output, options.device)
        except Exception:  # not Ctrl-C, after which the batch is still there
            self._at = at._replace(pending=None, params=None)
            raise
        num_steps = int(stats.num_steps)
        if options.episodes_per_batch is None:
            # Also those of dropped episodes.
            num_steps = self._num_rows(at) * options.num_envs
        batch = StreamBatch(
            trajectory=output,
            stats=result.stats,
            steps=num_steps,
            params_version=version,
            episodes=result.episodes,
        )
        after = Position(
            carry=result.carry,
            stats=at.stats.add(
                stats,
                window,
                steps=num_steps,
                seconds=seconds,
                num_faulty=int(num_faulty),
            ),
            steps=at.steps + num_steps,
            memory=output if options.reuse_memory else None,
        )
        return batch, after

    def _num_rows(self, at: Position) -> int:
        """Returns the number of rows of the batch after `at`, 0 after the last one."""
        options = self._options
        # Of whole episodes the number of steps is not known ahead: any will do.
        num_steps = options.steps_per_batch or options.num_envs
        if options.total_steps is not None:
            num_steps = min(num_steps, max(0, options.total_steps - at.steps))
        return num_steps // options.num_envs

    def _raise_fault(self, faults: dict[str, Any], step: Any, version: int) -> None:
        """Raises if a checked field is not finite."""
        first = min(faults.values(), default=NO_FAULT)
        if first == NO_FAULT:
            return
        options = self._options
        names = [f"`{name}`" for name, at in faults.items() if at == first]
        # The number counts along `[T, B]`, or `[L, N]` of whole episodes.
        column = first % (options.episodes_per_batch or options.num_envs)
        where = "episode" if options.episodes_per_batch else "an episode in lane"
        raise FloatingPointError(
            f"{' and '.join(names)} must be finite with `check_finite`, got a value "
            f"that is not, first at step {step} of {where} {column}, in a batch made "
            f"with `params_version` {version}."
        )


def _own(params: Any) -> Any:
    """Copies parameters, as arrays."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not hasattr(leaf, "__array__") and not isinstance(leaf, numbers.Number):
            raise ValueError(
                f"`params` must hold arrays and numbers only, got "
                f"{checks.describe(leaf)} at {jax.tree_util.keystr(path) or 'the root'}"
                "; keep functions and text in the policy, such as the second part of "
                "`equinox.partition`."
            )
    return copied(strong(params))


def _placed(tree: ArrayTree, device: Destination) -> ArrayTree:
    """Copies a batch to another device, if one is given."""
    if isinstance(device, jax.Device | jax.sharding.Sharding):
        return jax.block_until_ready(jax.device_put(tree, device))
    if device == "host":  # NumPy has no typed keys
        return jax.tree.map(lambda x: x if trees.has_keys(x) else np.array(x), tree)
    return tree

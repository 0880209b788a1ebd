"""`Stream`: yields batches to a training loop in Python."""

import functools
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout import checks, multihost
from rollout.collector import Collector
from rollout.envs import prng
from rollout.envs.types import ArrayTree, sharding_of
from rollout.host.host_collector import HostCollector
from rollout.policies.masks import MaskFn
from rollout.stream import batch_program as programs
from rollout.stream import host_batch, stream_stats
from rollout.stream import options as option_checks
from rollout.stream.batch import NO_FAULT, BatchResult
from rollout.stream.batch_thread import Job, Worker
from rollout.stream.progress import Bar
from rollout.stream.types import BatchSpec, Options, Placement, StreamBatch, StreamState
from rollout.types import ParamsT, Transition

_MOMENT = 1e-5  # s, between two looks at a batch that is just beginning
_NUMBERS = bool | int | float | complex
_NEWEST = -1  # version of parameters: those that are set when the batch begins


class Stream(Generic[ParamsT]):
    """Yields batches with an exact number of environment steps, one after the other.

        with Stream(collector, key=key, params=params, steps_per_batch=4096,
                    total_steps=1_000_000) as stream:
            for batch in stream:
                params = update(params, batch.trajectory)
                stream.set_params(params)

    A batch is `[T, B, ...]` with T = ceil(steps_per_batch / num_envs) rows. If
    `steps_per_batch` is a multiple of `num_envs`, the batches are bit for bit the rows
    of `Collector.collect_steps` (unless an option below changes them). Otherwise some
    lanes stand still in the last row, with a `mask` of False there: they keep their
    state, and step first in the next batch. So every step is collected once, and the
    masks add up to `total_steps` exactly. A multiple of `num_envs` is a little faster,
    since no lane stands still.

    Episodes continue from batch to batch, and an `episode_id` is never used again. One
    compiled program makes each batch, in a thread of its own: Ctrl-C raises in `next`
    at once, the thread finishes the batch, and the next call returns it.

    Args:
        collector: policy and environments.
        key: one typed key; everything random derives from it.
        params: whatever the policy takes as its parameters. With `prefetch` they are
            copied, so that an update may donate them.
        steps_per_batch: environment steps of a batch over all lanes, at least 1.
        episodes_per_batch: N, whole episodes per batch instead of steps, as those of
            `Collector.collect_padded_episodes`: `[L, N, ...]` with L =
            `max_episode_steps`, which must be given. The stream is endless; every batch
            begins with new episodes and leaves none unfinished. Not together with
            `total_steps`, `warmup_steps` (use `random_warmup`) or `on_fault="drop"`.
        total_steps: steps after which the stream ends, None for an endless one. The
            last batch has the steps that are left.
        warmup_steps: number of steps, from the first on, with actions drawn uniformly;
            exact, also in the middle of a batch. Within a row lanes count in the order
            in which they step. The policy is applied in these steps too, and the extras
            are those of the action that it would have taken.
        mask_fn: for the warm-up, observations to a mask of allowed actions, as
            `random_warmup` takes it; without it all are allowed.
        max_episode_steps: steps after which an episode is truncated, counted across
            batches. If the environment ends it at that very step, both flags are set.
        at_batch_end: `"continue"`: episodes go on in the next batch. `"reset"`: every
            batch starts new episodes, and unfinished ones are given up without a mark.
            `"truncate"`: the same, but the last step of every unfinished episode is
            marked as `truncated`; its `next_obs` is the true successor. A `record_fn`
            and `info` do not see the mark.
        postprocess: pure function from the `Transition`, `[T, B, ...]`, to any pytree
            of arrays. It is compiled into the program, and fields that it does not read
            are not stored.
        placement: where the trajectory lands: "device", "host" (NumPy arrays, copied;
            not where lanes are sharded over several processes), or a
            `jax.sharding.Sharding` of `[T, B, ...]`. The statistics are not moved.
        prefetch: 1 begins the next batch before this one is returned, with the
            parameters of that moment, so `params_version` lags by one; 0 begins it in
            `next`: strictly on-policy, and required where lanes are sharded over
            several processes.
        recycle: writes each batch to the memory of an earlier one, whose arrays are
            deleted by the next call of `next`: reading them raises. Copy the values
            that you keep; a NumPy view of an array stays valid, but prevents the
            reuse. It pays for large batches, such as images: fresh memory is slow to
            touch for the first time.
        check_finite: raises `FloatingPointError` if a recorded value is not finite (see
            `rollout.nonfinite`). The stream then stands where it stood before that
            batch.
        on_fault: "raise", or "drop": the episode ends there, its rows in this batch are
            masked out and zero, the lane is reset, and the stream goes on. The masks
            then add up to less than `steps`, and `stats.faulty_episodes` counts the
            episodes.
        window_episodes: K, the number of last episodes, over all batches, that
            `stats.window_return_mean` averages; 0 for none.
        progress: shows a bar on stderr, with steps per second, episodes and their mean
            return.

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
        warmup_steps: int = 0,
        mask_fn: MaskFn | None = None,
        max_episode_steps: int | None = None,
        at_batch_end: str = "continue",
        postprocess: Callable[[Transition], ArrayTree] | None = None,
        placement: Placement = "device",
        prefetch: int = 0,
        recycle: bool = False,
        check_finite: bool = False,
        on_fault: str = "raise",
        window_episodes: int = 0,
        progress: bool = False,
    ) -> None:
        self._options = Options(
            steps_per_batch=steps_per_batch,
            episodes_per_batch=episodes_per_batch,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            mask_fn=mask_fn,
            max_episode_steps=max_episode_steps,
            at_batch_end=at_batch_end,
            postprocess=postprocess,
            placement=placement,
            prefetch=prefetch,
            recycle=recycle,
            check_finite=check_finite,
            on_fault=on_fault,
            window_episodes=window_episodes,
        )
        self._options = option_checks.check(self._options)
        if not isinstance(collector, Collector | HostCollector):
            raise ValueError(
                "`collector` must be a `Collector` or a `HostCollector`, got "
                f"{type(collector).__name__}."
            )
        sharding = sharding_of(collector.env)
        if sharding is not None and sharding.mesh.is_multi_process:
            option_checks.check_processes(self._options)
        if isinstance(collector, HostCollector):
            host_batch.check(self._options, collector)
        checks.flag("progress", progress)
        checks.outside_of_jit("Stream")
        self._collector = collector
        self._worker = Worker()
        carry = collector.init(key)
        accumulated = carry.episode.accumulated
        self._names = stream_stats.names_of(accumulated, collector.env.num_envs)
        self._at = StreamState(
            carry=carry,
            totals=stream_stats.zero(self._names),
            recent=np.zeros((self._options.window_episodes, 2), np.float32),
        )
        self._params = self._own(params), 0
        self._program: programs.BatchProgram | None = None
        self._checked: int | None = None  # version of parameters that it fits
        self._must_stop = False
        self._inside: dict[str, int] = {}  # the thread that is in `next`
        self._setting = threading.Lock()
        self._env_checksum = _checksum(collector.env)
        self._bar = Bar(total_steps) if progress else None

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
        me = threading.get_ident()
        if self._inside.setdefault("next", me) != me:  # atomic
            raise RuntimeError(
                "`next` must be called by one thread at a time, got a second one."
            )
        # Ctrl-C may come before any line. `_at` alone says where the stream stands, and
        # only the last line moves it: until then the next call repeats everything.
        try:
            if (job := self._begin()) is None:
                raise StopIteration
            self._worker.wait(job)
            batch, at = self._yield_batch(job)
            if self._options.prefetch and not self._must_stop:
                at = self._run_ahead(job, at)
            if self._bar is not None:
                self._bar.show(
                    at.steps, stream_stats.read(at.totals, at.recent, self._names)
                )
        except BaseException:
            self._inside.clear()
            self._close_bar()
            raise
        self._inside.clear()
        self._at = at; return batch  # fmt: skip  # noqa: E702 (nothing in between)

    def __len__(self) -> int:
        """Returns the number of batches of the whole run, without a `stop`."""
        options = self._options
        if options.total_steps is None:
            raise TypeError("A stream without `total_steps` has no length.")
        return -(-options.total_steps // options.steps_per_batch)

    @property
    def params(self) -> Any:
        """The parameters of the last `set_params`."""
        return self._params[0]

    @property
    def steps(self) -> int:
        """Environment steps in all batches returned, also before a `restore`."""
        return self._at.steps

    @property
    def stats(self) -> stream_stats.StreamStats:
        """Statistics of the batches returned since `reset_stats`."""
        return stream_stats.read(self._at.totals, self._at.recent, self._names)

    def reset_stats(self) -> None:
        """Resets the statistics; ids, steps and the warm-up go on."""
        recent = np.zeros_like(self._at.recent)
        totals = stream_stats.zero(self._names)
        self._at = self._at._replace(totals=totals, recent=recent)

    def compile(self) -> None:
        """Compiles the program, which otherwise the first batch does."""
        self._compile(self._at.params or self._params)

    def set_params(self, params: ParamsT) -> None:
        """Sets the parameters for the batches that have not begun, from any thread.

        Args:
            params: of the structure, shapes and dtypes of those before.

        Raises:
            ValueError: if structure, a shape or a dtype differs.
        """
        new, rule = self._own(params), "`params` must keep structure, shapes and dtypes"
        with self._setting:  # two threads must not set the same version
            old, version = self._params
            checks.same(rule, old, new)
            self._params = new, version + 1

    def stop(self) -> None:
        """Ends the iteration after the current batch, which is still returned.

        Any thread or signal handler may call it. Iteration may continue afterwards.
        """
        self._must_stop = True

    def close(self) -> None:
        """Ends the thread, after the current batch; there are no more batches."""
        self._close_bar()
        self._worker.close()

    def state(self, *, allow_pickle: bool = False) -> dict[str, Any]:
        """Returns the state from which `restore` goes on, as a pytree of arrays.

        It is the state after the last batch that was returned, also while another one
        is running, and contains the parameters. `checkpoint.save` writes it.

        The state of environments that are not JAX is in it if no other batch is running
        and if they have `save_state`, or may be pickled.

        Args:
            allow_pickle: whether to pickle environments that are not JAX and have no
                `save_state`. `restore` must then allow it, too.
        """
        at, (params, version) = self._at, self._params
        next_params, next_version = at.params or (params, _NEWEST)
        counts = (at.steps, at.batches, at.first_lane, version, next_version)
        state = {
            "carry": at.carry,
            "counts": np.asarray(counts, np.int64),
            "env": np.uint32(self._env_checksum),
            "params": params,
            "recent": at.recent,
            "totals": at.totals,
        }
        if isinstance(self._collector, HostCollector):
            # A batch that is running in its thread moves the environments on.
            saved = b""
            if at.job is None:
                saved = self._collector.save(at.carry, allow_pickle=allow_pickle)
            state["saved_envs"] = saved
        # Only a batch made in advance may have older parameters.
        ahead = {"next_params": next_params} if self._options.prefetch else {}
        return state | ahead

    def restore(self, state: dict[str, Any], *, allow_pickle: bool = False) -> None:
        """Goes on where `state` was taken, with the same bits.

        If the state of environments that are not JAX could not be saved, their
        unfinished episodes restart, each with its own seed, and a warning says so.

        Args:
            state: from a stream with the same collector and the same `prefetch`.
                Other options, such as `total_steps`, are those of this stream.
            allow_pickle: whether to unpickle environments, which runs any code that
                `state` contains: allow it only for your own files. Otherwise their
                episodes restart.

        Raises:
            ValueError: if it is not from a stream of the same kind, with the same
                environment parameters, or has more steps than `total_steps`; if the
                pickled environments have other settings than these.
        """
        rule = "`state` must be one of a stream of the same kind"
        checks.same(rule, self.state(), state)
        if int(state["env"]) != self._env_checksum:
            raise ValueError(
                "`state` must be of the same environment parameters, got others."
            )
        counts = [int(x) for x in state["counts"]]
        total = self._options.total_steps
        if total is not None and counts[0] > total:
            raise ValueError(
                f"`state` must have at most `total_steps`={total} steps, got "
                f"{counts[0]}."
            )
        steps, batches, first_lane, version, next_version = counts
        next_params = None
        if self._options.prefetch and next_version != _NEWEST:
            next_params = self._own(state["next_params"]), next_version
        carry = _copy(state["carry"])
        if isinstance(self._collector, HostCollector):
            self._finish_jobs()  # which step the same environments
            carry = self._collector.restore(
                carry, state["saved_envs"], allow_pickle=allow_pickle
            )
        else:
            carry = _put_like(carry, self._at.carry)
        at = StreamState(
            carry=carry,
            totals=np.array(state["totals"], np.float64),
            recent=np.array(state["recent"], np.float32),
            steps=steps,
            batches=batches,
            first_lane=first_lane,
            params=next_params,
        )
        self._params, self._checked = (self._own(state["params"]), version), None
        self._at = at

    def _finish_jobs(self) -> None:
        """Waits for the batches that are running; they may be returned later."""
        job = self._at.job
        while job is not None:
            self._worker.wait(job)
            job = job.ahead.job if job.ahead else None

    def _begin(self) -> Job | None:
        """Returns the job of the next batch, new if need be; None if there is none."""
        if self._must_stop:
            self._must_stop = False
            return None
        # A job may be there already: begun ahead, or by a `next` that was interrupted.
        if self._at.job is None:
            self._at = self._with_job(self._at, self._at.memory)
        return self._at.job

    def _run_ahead(self, job: Job, at: StreamState) -> StreamState:
        """Begins the batch at `at`, which comes after that of `job`."""
        # The user is about to read the batch of `job`, so the next one is written to
        # the memory of the batch before, which `self._at` still has.
        memory = jax.tree.leaves(self._at.memory)
        # Kept with the job, so that an interrupt does not begin it a second time.
        job.ahead = job.ahead or self._with_job(at, self._at.memory)
        ahead = job.ahead
        if ahead.job is None:
            return at
        self._worker.start(ahead.job)
        while memory and not (ahead.job.is_done or any(x.is_deleted() for x in memory)):
            time.sleep(_MOMENT)  # so that reading the old batch raises from here on
        return at._replace(job=ahead.job, params=ahead.params)

    def _with_job(self, at: StreamState, memory: ArrayTree | None) -> StreamState:
        """Adds to `at` the job of its batch, which writes to `memory`; none at the end.

        The job keeps its inputs: a later `set_params` does not change them.
        """
        options = self._options
        # The number of steps of whole episodes is not used: any above 0 will do.
        num_steps = options.steps_per_batch or self._num_envs
        if options.total_steps is not None:
            num_steps = min(num_steps, options.total_steps - at.steps)
        if num_steps <= 0:
            return at
        params = at.params or self._params
        spec = BatchSpec(
            num_steps=num_steps,
            first_lane=at.first_lane,
            num_random=self._num_random(at, num_steps),
        )
        make = functools.partial(
            programs.run,
            self._compile(params),
            options,
            self._collector,
            at.carry,
            params[0],
            np.array(spec, np.int32),
            memory,
        )
        return at._replace(job=Job(make), params=params)

    def _yield_batch(self, job: Job) -> tuple[StreamBatch, StreamState]:
        """Returns the batch of a job that is done, and the state after it.

        It leaves `self._at` alone, so that an interrupted `next` can repeat it. Only a
        fault drops the job there, and the next call makes the batch again.
        """
        at, options = self._at, self._options
        result: Any = job.result
        version = at.params[1]
        problem = job.error or self._find_fault(result, at.first_lane, version)
        if problem is not None:
            self._at = at._replace(job=None, params=None)
            raise problem
        num_steps = int(result.counted[0])
        batch = StreamBatch(
            trajectory=result.output,
            stats=result.stats,
            steps=num_steps,
            warmup_steps=self._num_random(at, num_steps),
            params_version=version,
            episodes=result.episodes,
        )
        return batch, StreamState(
            carry=result.carry,
            totals=stream_stats.add(at.totals, result.counted, job.seconds),
            recent=stream_stats.slide(at.recent, result.recent),
            steps=at.steps + num_steps,
            batches=at.batches + 1,
            first_lane=(at.first_lane + num_steps) % self._num_envs,
            memory=result.output if options.recycle else None,
        )

    def _find_fault(
        self, result: BatchResult, first_lane: int, version: int
    ) -> FloatingPointError | None:
        first = min(result.faults.values(), default=NO_FAULT)
        if first == NO_FAULT:
            return None
        names = [f"`{name}`" for name, at in result.faults.items() if at == first]
        row, column = divmod(first, self._options.episodes_per_batch or self._num_envs)
        unit = "episode"
        if self._options.episodes_per_batch is None:
            unit, column = "lane", (first_lane + column) % self._num_envs
        return FloatingPointError(
            f"{' and '.join(names)} must be finite with `check_finite`, got a value "
            f"that is not, first at step {row} of {unit} {column} in a batch made with "
            f"`params_version` {version}."
        )

    def _compile(self, versioned: tuple[Any, int]) -> programs.BatchProgram:
        """Returns the program for parameters of this kind, compiled if it is new."""
        program = self._program
        params, version = versioned
        if program is not None and self._checked == version:
            return program
        if program is None or program.kinds != programs.kinds_of(params):
            options, carry = self._options, self._at.carry
            if isinstance(self._collector, HostCollector):
                self._collector.compile(carry, params)
                make_batch = functools.partial(host_batch.make_batch, options)
                kinds = programs.kinds_of(params)
                program = programs.BatchProgram(
                    make_batch, blank=lambda: (), kinds=kinds
                )
            else:
                program = programs.make(options, self._collector, carry, params)
            self._program = program
        self._checked = version
        return program

    def _own(self, params: Any) -> Any:
        """Converts parameters to arrays; with `prefetch` to copies of its own."""
        params = jax.tree.map(_strong, params)
        return _copy(params) if self._options.prefetch else params

    def _num_random(self, at: StreamState, num_steps: int) -> int:
        """Returns the number of warm-up steps in the batch at `at`."""
        return min(max(self._options.warmup_steps - at.steps, 0), num_steps)

    @property
    def _num_envs(self) -> int:
        return self._collector.env.num_envs

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _checksum(tree: Any) -> int:
    """Computes a checksum of a tree's bits, or of the spaces of a host environment."""
    if jax.tree_util.all_leaves([tree]):
        spaces = f"{tree.num_envs} {tree.observation_space} {tree.action_space}"
        return zlib.crc32(spaces.encode())
    # As arrays, which Python numbers become once the lanes are sharded.
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(prng.words(tree))]
    leaves = jax.device_get([multihost.gather(x) for x in leaves])
    return zlib.crc32(b"".join(np.asarray(x).tobytes() for x in leaves))


def _strong(x: Any) -> jax.Array:
    """Converts to an array that is not weakly typed, so that kinds can be compared."""
    if isinstance(x, jax.Array) and not getattr(x, "weak_type", False):
        return x
    if not hasattr(x, "__array__") and not isinstance(x, _NUMBERS):
        raise ValueError(
            "`params` must hold arrays and numbers only, got "
            f"{checks.describe(x)}; functions and text belong in the policy."
        )
    return jnp.asarray(x, jnp.result_type(x))


def _copy(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _copied(leaves))


def _put_like(tree: Any, like: Any) -> Any:
    """Moves arrays to the devices of others; saved ones may come from elsewhere."""

    def put(x: Any, old: jax.Array) -> jax.Array:
        if isinstance(x, jax.Array) and x.sharding == old.sharding:
            return x
        return jax.device_put(x, old.sharding)

    return jax.tree.map(put, tree, like)


# It takes a list, for the cache of `jit` may take one dataclass for another.
@jax.jit
def _copied(leaves: list[chex.Array]) -> list[chex.Array]:
    return prng.like(jax.tree.map(jnp.copy, prng.words(leaves)), leaves)

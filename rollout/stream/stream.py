"""The streaming collector: batches for a training loop that is driven by Python."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout.collector import Collector
from rollout.stream import _options, _programs
from rollout.stream._jobs import Job
from rollout.stream._maker import Batch, Handed, Maker, Position
from rollout.stream._options import Options
from rollout.stream._place import Placement
from rollout.stream._progress import Bar
from rollout.stream.stats import StreamStats, Totals
from rollout.types import Transition


class Stream:
    """Yields batches of exactly so many environment steps, one after the other.

        stream = Stream(collector, key=key, params=params, steps_per_batch=4096,
                        total_steps=1_000_000)
        for batch in stream:
            params = update(params, batch.trajectory)
            stream.set_params(params)

    A batch is `[T, B, ...]` with T = ceil(steps_per_batch / num_envs) rows. Where
    `steps_per_batch` is a multiple of `num_envs`, the batches are bit for bit the rows
    of `Collector.collect_steps` (but for `max_episode_steps` and what follows below).
    Otherwise some lanes stand still in the last row, whose `mask` is then False: they
    keep their state, and are the first to step in the next batch. So a step is
    collected once, and the masks add up to `total_steps` exactly. A multiple of
    `num_envs` is a little faster, since no lane has to be kept as it is.

    Episodes go on from batch to batch, and an `episode_id` is never used again, also
    after `reset_each_batch`. Batches are filled in a thread of their own, in parts of
    about 0.1 s, between which `stop` and Ctrl-C take effect.

    Where TorchRL's `SyncDataCollector` is approximate, this is exact: it rounds
    `frames_per_batch` up to a multiple of the environments and overshoots
    `total_frames`; rounds `init_random_frames` up to whole batches, and leaves zeros,
    or nothing, for the log-probability of random actions; keeps the trajectory id over
    `reset_at_each_iter`; leaves rows of an earlier batch behind an interruption, and
    counts them; pads with a real id; drops the last complete episodes; and does not
    save the running environments.

    Args:
        collector: policy and environments.
        key: one typed key; it decides all that is random.
        params: whatever the policy takes as its parameters. With `prefetch` they are
            copied, so that an update may donate them.
        steps_per_batch: environment steps of a batch over all lanes, at least 1.
        episodes_per_batch: N, whole episodes of a batch, instead of steps: those of
            `Collector.collect_padded_episodes`, `[L, N, ...]` with L =
            `max_episode_steps`, which must be given. Endless, and a batch is made in
            one part. Every batch begins with new episodes and leaves none under way,
            so `reset_each_batch` and `truncate_at_batch_end` change nothing.
            `total_steps`, `warmup_steps` (there is `random_warmup`) and
            `on_fault="drop"` do not go with it.
        total_steps: steps after which the stream ends, None for an endless one. The
            last batch has what is left.
        warmup_steps: exactly so many steps, the first ones, take actions drawn
            uniformly, also in the middle of a batch. Within a row lanes count in the
            order in which they step. The policy is applied there too, and the extras
            are its own, of the action that it would have taken.
        max_episode_steps: steps after which an episode is truncated, counted over
            batches. If the environment ends it at the same step, its flag is kept.
        reset_each_batch: starts every batch with new episodes. What was under way is
            given up without a mark.
        truncate_at_batch_end: as `reset_each_batch`, but marks the last step of every
            episode under way as `truncated`; its `next_obs` is the true successor. A
            `record_fn` and `info` do not see the mark.
        postprocess: `Transition`, `[T, B, ...]`, to any pytree of arrays, pure; it is
            compiled into the collection, and a field that it does not read is not
            stored. Pass the same function again to compile only once.
        deterministic: runs `Policy.mode`.
        placement: where the trajectory lands: "device", "host" (NumPy arrays, copied),
            or a `jax.sharding.Sharding` of `[T, B, ...]`. The statistics stay.
        prefetch: 1 begins the next batch before this one is handed over, with the
            parameters of then, so `params_version` lags by one; 0 begins it when it is
            asked for: strictly on-policy.
        recycle: writes each batch to the memory of an earlier one, whose arrays are
            deleted when the next batch is asked for: reading them raises. Keep what
            you need by copying; a NumPy view of an array stays as it is, and costs
            the reuse. It pays where batches are large, as observations that are images
            make them: fresh memory is slow to touch for the first time.
        check_finite: raises `FloatingPointError` at the first observation, reward,
            `log_prob`, `value` or `next_value` (of the extras) that is not finite. The
            stream then stands where it stood before that batch. What the program of a
            step makes finite in any case, such as an image of flags, costs nothing.
        on_fault: "raise", or "drop": the episode ends there, what of it is in this
            batch is masked and zero, the lane is reset, and the stream goes on. The
            masks then add up to less than `steps`, and `stats.faulty_episodes` counts.
        progress: shows a bar on stderr, with steps per second, episodes and their mean
            return.
        on_batch: functions that are called with every `Batch` before it is yielded.

    Raises:
        ValueError: if an option is not as above, or clashes with another.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        key: chex.PRNGKey,
        params: Any = None,
        steps_per_batch: int | None = None,
        episodes_per_batch: int | None = None,
        total_steps: int | None = None,
        warmup_steps: int = 0,
        max_episode_steps: int | None = None,
        reset_each_batch: bool = False,
        truncate_at_batch_end: bool = False,
        postprocess: Callable[[Transition], chex.ArrayTree] | None = None,
        deterministic: bool = False,
        placement: Placement = "device",
        prefetch: int = 0,
        recycle: bool = False,
        check_finite: bool = False,
        on_fault: str = "raise",
        progress: bool = False,
        on_batch: Sequence[Callable[[Batch], None]] = (),
    ) -> None:
        options = Options(
            steps_per_batch=steps_per_batch,
            episodes_per_batch=episodes_per_batch,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            max_episode_steps=max_episode_steps,
            reset_each_batch=reset_each_batch,
            truncate_at_batch_end=truncate_at_batch_end,
            postprocess=postprocess,
            placement=placement,
            prefetch=prefetch,
            recycle=recycle,
            check_finite=check_finite,
            on_fault=on_fault,
        )
        _options.check(options)
        collector = _options.with_mode(collector) if deterministic else collector
        self._maker = Maker(collector, options)
        self._at = Position(carry=_programs.copy(collector.init(key)))
        self._params = self._maker.own(params), 0
        self._next_params: tuple[Any, int] | None = None
        self._must_stop = False
        self._totals = Totals()
        self._bar = Bar(total_steps) if progress else None
        self._on_batch = tuple(on_batch)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches that are left."""
        try:
            while True:
                try:
                    batch = next(self)
                except StopIteration:
                    return
                yield batch
        finally:
            self._close_bar()

    def __next__(self) -> Batch:
        """Collects the next batch, or waits for it.

        On Ctrl-C the batch under way stands still, and the next call goes on with it.

        Raises:
            StopIteration: behind the last batch, and once after a `stop`.
            FloatingPointError: with `check_finite`.
        """
        try:
            batch = self._next()
        except BaseException:
            self._close_bar()
            raise
        if self._bar is not None:
            self._bar.show(self._at.steps, self.stats)
        for callback in self._on_batch:
            callback(batch)
        return batch

    def __len__(self) -> int:
        """The number of batches of a run that nobody stops, those behind included."""
        options = self._maker.options
        if options.total_steps is None:
            raise TypeError("A stream without `total_steps` has no length.")
        return -(-options.total_steps // options.steps_per_batch)

    @property
    def params(self) -> Any:
        """The parameters of the last `set_params`."""
        return self._params[0]

    @property
    def steps(self) -> int:
        """Environment steps in all batches handed over, also before a `restore`."""
        return self._at.steps

    @property
    def stats(self) -> StreamStats:
        """What was collected in the batches handed over since `reset_stats`."""
        return self._totals.read()

    def reset_stats(self) -> None:
        """Starts to count anew; ids, steps and the warm-up go on."""
        self._totals = Totals()

    def compile(self) -> None:
        """Compiles ahead of the first batch, which else does it."""
        made_with = self._next_params or self._params
        self._maker.compile(self._at, made_with[0])

    def set_params(self, params: Any) -> None:
        """Sets the parameters for the batches that are not under way yet.

        Args:
            params: of the structure, shapes and dtypes of those before.

        Raises:
            ValueError: if they are of another kind.
        """
        old, version = self._params
        new = self._maker.own(params)
        if not _options.same_kind(old, new):
            raise ValueError(
                "`params` must keep structure, shapes and dtypes: "
                f"{_options.describe_kind(old)}, got {_options.describe_kind(new)}."
            )
        self._params = new, version + 1

    def stop(self) -> None:
        """Ends the batch under way early, and with it the iteration.

        From any thread, or from a signal handler. What was collected is handed over,
        the rest of the batch is masked, and only real steps are counted. A loop, or
        `next`, may go on afterwards. If no batch is under way the iteration just ends;
        a batch of whole episodes is completed.
        """
        self._must_stop = True
        if (job := self._at.job) is not None:
            job.end()

    def state(self) -> dict[str, Any]:
        """All that the stream needs to go on, as a pytree of arrays.

        It is the state behind the last batch that was handed over, also while another
        one is under way, and parameters are part of it. `checkpoint.save` takes it.
        """
        at = self._at
        made_with = (at.job.params, at.job.params_version) if at.job else None
        next_params = made_with or self._next_params or self._params
        if not self._is_ahead:
            next_params = self._params
        counts = (at.steps, at.batches, at.first_lane, self._params[1], next_params[1])
        state = {
            "carry": _programs.copy(at.carry),  # its memory will take a later one
            "counts": np.asarray(counts, np.int64),
            "params": self._params[0],
            "totals": self._totals.save(),
        }
        # Only a batch made in advance may have older parameters.
        return state | ({"next_params": next_params[0]} if self._is_ahead else {})

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, with the same bits.

        Args:
            state: from a stream with the same collector and a `prefetch` as here.
                Other options, such as `total_steps`, are those of this stream.

        Raises:
            ValueError: if it is not from a stream of the same kind.
        """
        like = self.state()
        if not _options.same_kind(like, state):
            raise ValueError(
                "`state` must be one of a stream of the same kind: "
                f"{_options.describe_kind(like)}, got {_options.describe_kind(state)}."
            )
        if self._at.job is not None:
            self._at.job.pause()
            self._at.job.wait()
        counts = [int(x) for x in state["counts"]]
        steps, batches, first_lane, version, next_version = counts
        carry = _programs.copy(jax.tree.map(jnp.asarray, state["carry"]))
        self._at = Position(carry, steps, batches, first_lane)
        self._params = self._maker.own(state["params"]), version
        self._next_params = None
        if self._is_ahead:
            next_params = self._maker.own(state["next_params"])
            self._next_params = next_params, next_version
        self._totals.load(state["totals"])

    @property
    def _is_ahead(self) -> bool:
        return self._maker.options.prefetch > 0

    def _next(self) -> Batch:
        if self._at.job is None and not self._must_stop:
            self._at = self._begin(self._at, self._at.handed)
        job = self._at.job
        if job is None:
            self._must_stop = False
            raise StopIteration
        self._wait(job)
        problem = self._maker.problem(job)
        if problem is not None:
            self._at = self._at._replace(job=None)
            raise problem
        if not job.num_steps:  # ended before its first step
            self._at = self._at._replace(job=None)
            self._must_stop = False
            raise StopIteration
        batch, at = self._maker.hand_over(job, self._at)
        if self._is_ahead and not self._must_stop:
            at = self._begin(at, self._at.handed)
        self._at = at
        self._maker.free(job.start)
        if self._must_stop and at.job is not None:  # `stop` came meanwhile
            at.job.end()
        self._totals.add(batch.steps, job.seconds, job.counted)
        return batch

    def _begin(self, at: Position, handed: Handed | None) -> Position:
        """Starts on the batch behind `at`, in the memory of an earlier one."""
        made_with = self._next_params or self._params
        job = self._maker.make_job(at, handed, *made_with)
        if job is None:
            return at
        self._next_params = None
        if self._must_stop:
            job.end()
        self._maker.start(job, handed)
        return at._replace(job=job, handed=None if handed is at.handed else at.handed)

    def _wait(self, job: Job) -> None:
        """Waits for a job; on Ctrl-C it stands still until it is waited for again."""
        try:
            while not job.is_settled:
                job.go()
                job.wait()
        except BaseException:
            job.pause()
            raise

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()

"""The streaming collector: batches for a training loop that is driven by Python."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout import _options, _programs
from rollout._jobs import Job
from rollout._maker import Batch, Handed, Maker, Position
from rollout._options import Options
from rollout._place import Placement
from rollout._progress import Bar
from rollout.collector import Collector
from rollout.stream_stats import StreamStats, Totals
from rollout.types import Transition


class Stream:
    """Yields batches of exactly so many environment steps, one after the other.

        stream = Stream(collector, key=key, params=params, steps_per_batch=4096,
                        total_steps=1_000_000)
        for batch in stream:
            params = update(params, batch.trajectory)
            stream.set_params(params)
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
        """Collects the next batch, or waits for it."""
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

    def set_params(self, params: Any) -> None:
        """Sets the parameters for the batches that are not under way yet."""
        old, version = self._params
        new = self._maker.own(params)
        if not _options.same_kind(old, new):
            raise ValueError(
                "`params` must keep structure, shapes and dtypes: "
                f"{_options.describe_kind(old)}, got {_options.describe_kind(new)}."
            )
        self._params = new, version + 1

    def stop(self) -> None:
        """Ends the batch under way early, and with it the iteration."""
        self._must_stop = True
        if (job := self._at.job) is not None:
            job.end()

    def state(self) -> dict[str, Any]:
        """All that the stream needs to go on, as a pytree of arrays."""
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
        """Goes on where `state` was taken."""
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
        self._totals.add(batch.steps, job.seconds, batch.stats, job.filled.num_faulty)
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
        job.go()
        try:
            job.wait()
        except BaseException:
            job.pause()
            raise

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()

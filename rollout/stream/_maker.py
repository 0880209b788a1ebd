"""Makes the jobs of a stream, and batches of the jobs that are complete."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import struct

from envs import keys
from rollout.collector import Collector
from rollout.stats import CollectStats
from rollout.stream import _faults, _options, _place, _programs, _rows
from rollout.stream._fill import Filled
from rollout.stream._jobs import Job, Memory, Pace, Worker
from rollout.stream._options import Options
from rollout.stream._window import Window
from rollout.types import Carry, Episodes, Transition


@struct.dataclass(kw_only=True)
class Batch:
    """What a stream hands over.

    Attributes:
        trajectory: `[T, B, ...]`, all zero where its `mask` is False; with a
            `postprocess`, what that returned.
        stats: statistics of the episodes that ended in the batch.
        steps: environment steps of the batch over all lanes.
        warmup_steps: how many of them, the first ones, took random actions.
        params_version: with which parameters it was made: 0 for those of the
            constructor, n for those of the n-th `set_params`.
        episodes: with `episodes_per_batch` the episodes, `[N]`, else None.
    """

    trajectory: Transition | chex.ArrayTree  # [T, B, ...]
    stats: CollectStats
    steps: int
    warmup_steps: int
    params_version: int
    episodes: Episodes | None = None  # [N]


class Position(NamedTuple):
    """Where a stream stands: replaced as a whole, so that an interrupt tears nothing.

    `carry`, `steps`, `batches` and `first_lane` are those behind the last batch that
    was handed over, `job` is the batch under way, and `handed` what lies in the memory
    of the last batch.
    """

    carry: Carry
    steps: int = 0
    batches: int = 0
    first_lane: int = 0
    job: Job | None = None
    handed: "Handed | None" = None


class Handed(NamedTuple):
    """The memory of a batch, and the arrays by which the user knows it."""

    rows: _rows.Rows | None
    output: chex.ArrayTree
    trajectory: chex.ArrayTree


class Maker:
    """What is the same for all batches of a stream."""

    def __init__(self, collector: Collector, options: Options) -> None:
        self.collector, self.options = collector, options
        self.num_envs = collector.env.num_envs
        self._spec = _options.make_spec(options, self.num_envs)
        self._pace, self._worker = Pace(), Worker()
        self._free_carries: list[Carry] = []
        self._programs: _programs.Programs | None = None
        self._kinds: tuple[Any, ...] = ()
        self._free_rows: _rows.Rows | None = None

    def own(self, params: Any) -> Any:
        """Makes arrays of parameters; with `prefetch` copies, which nobody donates."""
        params = jax.tree.map(_strong, params)
        return _programs.copy(params) if self.options.prefetch else params

    def compile(self, at: Position, params: Any) -> None:
        """Makes the programs, unless they are there."""
        # Nothing else changes its kind, and the parameters only where they lie.
        kinds = _programs.kinds_of(params)
        if self._programs is None or kinds != self._kinds:
            options = {"recycle": self.options.recycle}
            self._programs = _programs.make(
                self._spec, self.collector, at.carry, params, **options
            )
            self._kinds = kinds

    def make_job(
        self, at: Position, handed: "Handed | None", params: Any, version: int
    ) -> Job | None:
        """Makes the job of the next batch; None if there is none."""
        options = self.options
        # A batch of whole episodes has as many steps as they turn out to have.
        num_steps = options.steps_per_batch or self.num_envs
        if options.total_steps is not None:
            num_steps = min(num_steps, options.total_steps - at.steps)
        if num_steps <= 0:
            return None
        self.compile(at, params)
        window = Window(
            first_row=0,
            stop_row=0,
            is_last=0,
            num_steps=num_steps,
            first_lane=at.first_lane,
            num_random=min(max(options.warmup_steps - at.steps, 0), num_steps),
            max_episode_steps=options.limit,
        )
        return Job(
            self._programs,
            self.collector,
            at.carry,
            params,
            window,
            params_version=version,
            worker=self._worker,
            pace=self._pace,
            memory=self._take_memory(handed),
            finish=self._finish,
        )

    def problem(self, job: Job) -> BaseException | None:
        """Says what went wrong in a job, if anything did."""
        if job.error is not None:
            return job.error
        if job.fault == _faults.NONE or self.options.on_fault == "drop":
            return None
        return FloatingPointError(
            f"`check_finite` found that {self._describe_fault(job)} in a batch made "
            f"with `params_version` {job.params_version}."
        )

    def hand_over(self, job: Job, at: Position) -> tuple[Batch, Position]:
        """Makes the batch of a complete job, and the position behind it."""
        filled, num_steps, options = job.filled, job.num_steps, self.options
        batch = Batch(
            trajectory=job.product,
            stats=job.stats,
            steps=num_steps,
            warmup_steps=min(job.window.num_random, num_steps),
            params_version=job.params_version,
        )
        if options.episodes_per_batch is not None:
            trajectory, episodes = job.product
            batch = batch.replace(trajectory=trajectory, episodes=episodes)
        handed = None
        if options.recycle:
            rows = None if self._has_own_rows else filled.rows
            handed = Handed(rows, filled.output, job.product)
        return batch, Position(
            carry=filled.carry,
            steps=at.steps + num_steps,
            batches=at.batches + 1,
            first_lane=(at.first_lane + num_steps) % self.num_envs,
            handed=handed,
        )

    def free(self, carry: Carry) -> None:
        """Takes back a carry behind which nothing will go any more."""
        self._free_carries.append(carry)

    def start(self, job: Job, handed: "Handed | None") -> None:
        """Starts a job, and deletes the batch whose memory it takes."""
        job.go()
        if handed is not None:
            job.wait_for_memory()
            _place.delete(handed.trajectory)

    @property
    def _has_own_rows(self) -> bool:
        """The rows never leave the stream: what is handed over is made of them."""
        options = self.options
        return options.postprocess is not None or options.placement != "device"

    def _take_memory(self, handed: Handed | None) -> Memory:
        rows = output = None
        if handed is not None:
            rows, output = handed.rows, handed.output
        if self._has_own_rows:
            rows, self._free_rows = self._free_rows, None
        # A job that was interrupted may have taken it.
        if any(x.is_deleted() for x in jax.tree.leaves((rows, output))):
            rows = output = None
        if rows is None and not self.options.prefetch:
            # Here, and not in the thread of the job: memory that the main thread frees
            # is found again there, and is not touched for the first time. A batch made
            # in advance must not keep the main thread, and takes its own.
            rows = self._programs.blank_rows()
        return Memory(self._free_carries, rows, output)

    def _finish(self, filled: Filled) -> chex.ArrayTree:
        """Makes what is handed over, in the thread of the job."""
        product, options = filled.output, self.options
        if options.postprocess is None and options.episodes_per_batch is None:
            product = self._trajectory(filled)
        product = _place.place(product, options.placement)
        if self._has_own_rows:
            self._free_rows = filled.rows
        return product

    def _trajectory(self, filled: Filled) -> Transition:
        programs = self._programs
        rest = jax.tree.unflatten(programs.structure, filled.rows.fields)
        if programs.example is not None:
            rest = keys.like(rest, programs.example)
        return rest.replace(**filled.flags)

    def _describe_fault(self, job: Job) -> str:
        trajectory = self._recorded(job.filled)
        num_episodes = self.options.episodes_per_batch
        if num_episodes is not None:
            row, column = divmod(job.fault, num_episodes)
            where = f"step {row} of episode {column}"
        else:
            row, order = divmod(job.fault, self.num_envs)
            column = (job.window.first_lane + order) % self.num_envs
            where = f"step {row} of lane {column}"
        what = "an observation, reward, log-probability or value"
        if trajectory is not None:
            what = _faults.describe(trajectory, row, column)
        return f"{what} must be finite and is not, first at {where}"

    def _recorded(self, filled: Filled) -> Transition | None:
        """The trajectory, None where a `postprocess` is all that sees it whole."""
        if self.options.episodes_per_batch is not None:
            return None if self.options.postprocess else filled.output[0]
        if any(field is None for field in filled.rows.fields):
            return None
        return self._trajectory(filled)


def _strong(x: Any) -> jax.Array:
    """An array that is not weakly typed, so that all parameters are of one kind."""
    if isinstance(x, jax.Array) and not getattr(x, "weak_type", False):
        return x
    return jnp.asarray(x, jnp.result_type(x))

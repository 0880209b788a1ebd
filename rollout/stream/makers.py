"""Collects the batches of a stream: `JaxMaker` and `HostMaker` share an interface.

`begin` starts a batch and returns a function that waits for the batch. A repeated call
with the same carry, for example after an interrupt, yields the same batch. `save` and
`restore` handle the collector's part of a stream's state, and `compile` compiles before
the first batch. Makers with equal collectors and options share compiled programs.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollout import platform, programs
from rollout.collector import Collector
from rollout.envs.types import ArrayTree
from rollout.host import ctrl_c
from rollout.stream.batch import BatchResult, complete, make_batch
from rollout.stream.options import Options
from rollout.stream.stream_stats import StreamStats
from rollout.types import Carry, Transition

# Returns a batch, its duration in seconds, and the version of its parameters.
Wait = Callable[[], tuple[BatchResult, float, int]]


class Position(NamedTuple):
    """Position of a stream: its state after the last batch returned by `next`."""

    carry: Carry
    stats: StreamStats
    steps: int = 0  # not reset by `reset_stats`
    pending: Wait | None = None  # waits for the next batch, if it has started
    # Parameters of the next batch and their version; None uses the newest parameters.
    params: Any = None
    memory: ArrayTree | None = None  # output of the last batch, for `reuse_memory`


class JaxMaker:
    """Collects the batches of a `Collector`, each with one compiled program."""

    def __init__(self, collector: Collector, options: Options) -> None:
        sharding = collector.env.sharding
        self._is_multi_process = sharding is not None and sharding.mesh.is_multi_process
        if self._is_multi_process:
            options.check_processes()
        self._collector, self._options = collector, options
        self._program = _jax_program(options.program_options())
        self._compiled: set[int] = set()  # row counts

    def begin(self, num_rows: int, start: Position) -> Wait:
        """Starts a batch; `reuse_memory` reuses the memory of an earlier batch."""
        memory, collector = self.compile(num_rows, start), self._collector
        carry, window, (params, version) = start.carry, start.stats.window, start.params
        start_time = time.perf_counter()
        with ctrl_c.held_back():  # an interrupt in jax's caches raises other errors
            result = self._program(num_rows, collector, carry, params, window, memory)
        for x in jax.tree.leaves(memory):
            if not x.is_deleted():  # a NumPy view prevented the donation
                x.delete()

        def wait() -> tuple[BatchResult, float, int]:
            jax.block_until_ready(result)
            return result, time.perf_counter() - start_time, version

        return wait

    def compile(self, num_rows: int, start: Position) -> ArrayTree:
        """Compiles the program before its first call, so that compilation is not timed.

        Returns:
            Memory for the batch, newly allocated unless `start.memory` fits.
        """
        options, collector, carry = self._options, self._collector, start.carry
        params, window, memory = start.params[0], start.stats.window, start.memory
        size = options.steps_per_batch
        if not options.reuse_memory or (size and num_rows * options.num_envs != size):
            memory = ()  # no reuse, or a shorter last batch
        # The first batch has no previous memory, and an interrupted batch may have
        # donated it.
        elif memory is None or any(x.is_deleted() for x in jax.tree.leaves(memory)):
            shapes = self._program.eval_shape(
                num_rows, collector, carry, params, window, ()
            )
            memory = _blank(shapes.output, collector)
        if num_rows in self._compiled:
            return memory
        if not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            if self._is_multi_process:
                flags = {"postprocess": options.postprocess is not None}
                types = [str(jax.typeof(x)) for x in jax.tree.leaves(params)]
                facts = {"options": vars(options) | flags, "`params` of": types}
                programs.compare_processes("stream", facts)
            # The following call finds the program in the jit cache.
            self._program.lower(
                num_rows, collector, carry, params, window, memory
            ).compile()
        self._compiled.add(num_rows)
        return memory

    def save(self, carry: Carry) -> dict[str, Any]:
        """Returns no entries: the carry is the complete state."""
        del carry  # unused
        return {}

    def restore(self, state: dict[str, Any], like: Carry) -> Carry:
        """Returns the carry of a state, on the devices of `like`."""

        def put(x: Any, old: jax.Array) -> jax.Array:  # `x` may be on other devices
            if isinstance(x, jax.Array) and x.sharding == old.sharding:
                return x
            return jax.device_put(x, old.sharding)

        return jax.tree.map(put, copied(state["carry"]), like)

    def close(self) -> None:
        """Does nothing."""


@dataclasses.dataclass
class _Job:
    """A batch of host environments that a thread collects.

    Attributes:
        num_rows: number of rows, unless the batch has complete episodes.
        start: position of the stream before the batch.
        latest: carry from which the collection resumes after an error.
        parts: rows collected before an error.
        made: the batch, its duration and its parameter version, once complete.
    """

    num_rows: int
    start: Position
    latest: Any
    parts: list[Transition] = dataclasses.field(default_factory=list)
    made: tuple[BatchResult, float, int] | None = None


class HostMaker:
    """Collects the batches of a `HostCollector` in a thread."""

    def __init__(self, collector: Any, options: Options) -> None:
        options.check_host()
        self._collector, self._options = collector, options
        self._complete = _host_program(options.program_options())
        self._calls = ctrl_c.Calls()
        self._job: _Job | None = None

    def begin(self, num_rows: int, start: Position) -> Wait:
        """Starts a batch in a thread."""
        # Host environments cannot repeat steps. After an interrupt, the same carry
        # returns the same job, which may still run. After an error, the job resumes
        # with its parameters.
        if self._job is None or self._job.start.carry is not start.carry:
            self._job = _Job(num_rows, start, start.carry)
        future = self._calls.submit(self._run, self._job)
        return functools.partial(ctrl_c.result, future)

    def compile(self, num_rows: int, start: Position) -> None:
        """Compiles the program of the policy, which the first batch otherwise does."""
        del num_rows  # unused
        self._collector.compile(start.carry, start.params[0])

    def save(self, carry: Carry) -> dict[str, Any]:
        """Returns the environment states, unless a batch has changed them."""
        # Empty bytes mark an unknown state: `restore` starts a new episode.
        saved = [b""] * self._options.num_envs
        if self._job is None or self._job.start.carry is not carry:
            saved = self._collector.save(carry)
        return {"saved_envs": saved}

    def restore(self, state: dict[str, Any], like: Carry) -> Carry:
        """Restores the environments from a state, and returns the carry."""
        del like  # unused
        self.close()
        return self._collector.restore(copied(state["carry"]), state["saved_envs"])

    def close(self) -> None:
        """Waits for the pending batch."""
        self._calls.wait()

    def _run(self, job: _Job) -> tuple[BatchResult, float, int]:
        """Collects the batch of a job, unless the job is complete."""
        if job.made is not None:
            return job.made
        start_time, window = time.perf_counter(), job.start.stats.window
        params, version = job.start.params
        options, collector = self._options, self._collector
        num_before, episodes = collector.fault_stats.faulty_episodes, None
        job.latest, rows = collector.recover(job.latest)  # after an error
        if options.episodes_per_batch is None:
            job.parts += [] if rows is None else [rows]
            at_end = options.at_batch_end
            if at_end == "reset" and job.parts:
                at_end = "continue"  # the first part has already reset the episodes
            # Keep the rows collected before an error: they cannot be collected again.
            if num_left := job.num_rows - sum(len(x.mask) for x in job.parts):
                job.latest, rows = collector.collect_steps(
                    job.latest,
                    params,
                    num_left,
                    max_episode_steps=options.max_episode_steps,
                    at_batch_end=at_end,
                )
                job.parts.append(rows)
            trajectory = job.parts[0]
            if len(job.parts) > 1:
                trajectory = jax.tree.map(lambda *x: jnp.concatenate(x), *job.parts)
        else:
            assert options.max_episode_steps is not None  # validated by `Options`
            job.latest, episodes = collector.collect_episodes(
                job.latest,
                params,
                options.episodes_per_batch,
                max_episode_steps=options.max_episode_steps,
                return_trajectory=True,
            )
            trajectory = episodes.trajectory
            episodes = episodes.replace(trajectory=())
        num_faulty = np.int32(collector.fault_stats.faulty_episodes - num_before)
        result = self._complete((), window, trajectory, episodes, num_faulty)
        result = jax.block_until_ready(result._replace(carry=job.latest))
        job.made = result, time.perf_counter() - start_time, version
        return job.made


@programs.shared
def _jax_program(options: Options) -> Any:
    """Jits `make_batch` with the options from `Options.program_options`."""
    make = functools.partial(make_batch, options)
    return jax.jit(make, static_argnums=0, donate_argnums=5, keep_unused=True)


@programs.shared
def _host_program(options: Options) -> Any:
    """Jits `complete` with the options from `Options.program_options`."""
    return jax.jit(functools.partial(complete, options))


def _blank(output: ArrayTree, collector: Collector) -> ArrayTree:
    """Allocates memory for the first batch from the shapes of its `output`."""
    sharding, shardings = collector.env.sharding, None
    if sharding and not isinstance(output, Transition):
        return ()  # XLA chooses the sharding of the result of `postprocess`
    if sharding:
        shardings = sharding.shardings(output, lane_axis=1)
    return platform.blank_on(output, shardings)


def copied(tree: Any) -> Any:
    """Copies the leaves of a tree, and converts numbers to arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _copied(leaves))


# Pass a list of leaves: the jit cache may treat different dataclasses as equal.
_copied = jax.jit(functools.partial(jax.tree.map, jnp.copy))

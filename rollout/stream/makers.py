"""Makes the batches of a stream: `JaxMaker` and `HostMaker` have one interface.

`begin` begins a batch, and what it returns waits for it; called again with the same
carry, as after an interrupt, it leads to the same batch. `save` and `restore` are the
part of a stream's state that is theirs, and `compile` compiles before the first batch.
Makers of equal collectors and options share programs.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollout import multihost, platform, programs
from rollout.collector import Collector
from rollout.envs.types import ArrayTree
from rollout.host import ctrl_c
from rollout.stream.batch import BatchResult, complete, make_batch
from rollout.stream.options import Options
from rollout.stream.stream_stats import StreamStats
from rollout.types import Carry, Transition

# Returns a batch, the seconds it took, and the version of its parameters.
Wait = Callable[[], tuple[BatchResult, float, int]]


class Position(NamedTuple):
    """Where a stream stands, after the last batch that `next` returned."""

    carry: Carry
    stats: StreamStats
    steps: int = 0  # also before a `reset_stats`
    pending: Wait | None = None  # for the next batch, once it has begun
    # Of the next batch, and their version; None: the newest when it begins.
    params: Any = None
    memory: ArrayTree | None = None  # of the last batch, for `reuse_memory`


class JaxMaker:
    """Makes the batches of a `Collector`, each by one program."""

    def __init__(self, collector: Collector, options: Options) -> None:
        sharding = collector.env.sharding
        self._is_multi_process = sharding is not None and sharding.mesh.is_multi_process
        if self._is_multi_process:
            options.check_processes()
        self._collector, self._options = collector, options
        self._program = _jax_program(options.of_program())
        self._compiled: set[int] = set()  # numbers of rows

    def begin(self, num_rows: int, at: Position) -> Wait:
        """Begins a batch, in the `memory` of an earlier one with `reuse_memory`."""
        memory, collector = self.compile(num_rows, at), self._collector
        carry, window, (params, version) = at.carry, at.stats.window, at.params
        begun = time.perf_counter()
        with ctrl_c.held_back():  # jax's caches make other errors of an interrupt
            result = self._program(num_rows, collector, carry, params, window, memory)
        for x in jax.tree.leaves(memory):
            if not x.is_deleted():  # a view prevented the donation, and stays valid
                x.delete()

        def wait() -> tuple[BatchResult, float, int]:
            jax.block_until_ready(result)
            return result, time.perf_counter() - begun, version

        return wait

    def compile(self, num_rows: int, at: Position) -> ArrayTree:
        """Compiles the program before it is first called, so that it is not timed.

        Returns:
            Memory for the batch: new, if that of `at` is gone or does not fit.
        """
        options, collector, carry = self._options, self._collector, at.carry
        params, window, memory = at.params[0], at.stats.window, at.memory
        size = options.steps_per_batch
        if not options.reuse_memory or (size and num_rows * options.num_envs != size):
            memory = ()  # also where the last batch is shorter
        # The first batch has none before it, and an interrupted one may have donated
        # it.
        elif memory is None or any(x.is_deleted() for x in jax.tree.leaves(memory)):
            shapes = self._program.eval_shape(
                num_rows, collector, carry, params, window, ()
            )
            memory = _blank(shapes.output, collector)
        if num_rows in self._compiled:
            return memory
        if not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            if self._is_multi_process:
                given = {"postprocess": options.postprocess is not None}
                kinds = [str(jax.typeof(x)) for x in jax.tree.leaves(params)]
                facts = {"options": vars(options) | given, "`params` of": kinds}
                multihost.compare("stream", facts)
            # The call that follows finds the program in the cache of jax.
            self._program.lower(
                num_rows, collector, carry, params, window, memory
            ).compile()
        self._compiled.add(num_rows)
        return memory

    def save(self, carry: Carry) -> dict[str, Any]:
        """Returns nothing: the carry is all there is."""
        del carry  # unused
        return {}

    def restore(self, state: dict[str, Any], like: Carry) -> Carry:
        """Returns the carry of a state, on the devices of `like`."""

        def put(x: Any, old: jax.Array) -> jax.Array:  # saved ones may be elsewhere
            if isinstance(x, jax.Array) and x.sharding == old.sharding:
                return x
            return jax.device_put(x, old.sharding)

        return jax.tree.map(put, copied(state["carry"]), like)

    def close(self) -> None:
        """Does nothing."""


@dataclasses.dataclass
class _Job:
    """A batch of host environments, which a thread makes.

    Attributes:
        num_rows: unless it has whole episodes.
        start: what the batch begins with.
        latest: the carry to go on with after an error.
        parts: the rows that were collected before.
        made: what is returned, once it is made.
    """

    num_rows: int
    start: Position
    latest: Any
    parts: list[Transition] = dataclasses.field(default_factory=list)
    made: tuple[BatchResult, float, int] | None = None


class HostMaker:
    """Makes the batches of a `HostCollector`, in a thread."""

    def __init__(self, collector: Any, options: Options) -> None:
        options.check_host()
        self._collector, self._options = collector, options
        self._complete = _host_program(options.of_program())
        self._calls = ctrl_c.Calls()
        self._job: _Job | None = None

    def begin(self, num_rows: int, at: Position) -> Wait:
        """Begins a batch."""
        # The environments move on only once: after an interrupt the same carry leads to
        # the same job, which may already run, and after an error the job goes on, with
        # the parameters that it has.
        if self._job is None or self._job.start.carry is not at.carry:
            self._job = _Job(num_rows, at, at.carry)
        future = self._calls.submit(self._run, self._job)
        return functools.partial(ctrl_c.result, future)

    def compile(self, num_rows: int, at: Position) -> None:
        """Compiles the program of the policy, which otherwise the first batch does."""
        del num_rows  # unused
        self._collector.compile(at.carry, at.params[0])

    def save(self, carry: Carry) -> dict[str, Any]:
        """Returns the state of the environments, unless a batch moves them on."""
        # Empty for an environment whose state is not known: its episode begins anew.
        saved = [b""] * self._options.num_envs
        if self._job is None or self._job.start.carry is not carry:
            saved = self._collector.save(carry)
        return {"saved_envs": saved}

    def restore(self, state: dict[str, Any], like: Carry) -> Carry:
        """Restores the environments of a state; returns the carry to go on with."""
        del like  # unused
        self.close()
        return self._collector.restore(copied(state["carry"]), state["saved_envs"])

    def close(self) -> None:
        """Waits for the batch that has begun."""
        self._calls.wait()

    def _run(self, job: _Job) -> tuple[BatchResult, float, int]:
        """Makes a batch, if it is not made yet."""
        if job.made is not None:
            return job.made
        begun, window = time.perf_counter(), job.start.stats.window
        params, version = job.start.params
        options, collector = self._options, self._collector
        before, episodes = collector.fault_stats.faulty_episodes, None
        job.latest, rows = collector.recover(job.latest)  # after an error
        if options.episodes_per_batch is None:
            job.parts += [] if rows is None else [rows]
            at_end = options.at_batch_end
            if at_end == "reset" and job.parts:
                at_end = "continue"  # the batch has begun with new episodes
            # Rows from before an error count: the environments have moved on.
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
            assert options.max_episode_steps is not None  # `Options` has checked it
            job.latest, episodes = collector.collect_episodes(
                job.latest,
                params,
                options.episodes_per_batch,
                max_episode_steps=options.max_episode_steps,
                return_trajectory=True,
            )
            trajectory = episodes.trajectory
            episodes = episodes.replace(trajectory=())
        num_faulty = np.int32(collector.fault_stats.faulty_episodes - before)
        result = self._complete((), window, trajectory, episodes, num_faulty)
        result = jax.block_until_ready(result._replace(carry=job.latest))
        job.made = result, time.perf_counter() - begun, version
        return job.made


@programs.shared
def _jax_program(options: Options) -> Any:
    """Jits `make_batch` for the options that it reads, those `of_program`."""
    make = functools.partial(make_batch, options)
    return jax.jit(make, static_argnums=0, donate_argnums=5, keep_unused=True)


@programs.shared
def _host_program(options: Options) -> Any:
    """Jits `complete` for the options that it reads, those `of_program`."""
    return jax.jit(functools.partial(complete, options))


def _blank(output: ArrayTree, collector: Collector) -> ArrayTree:
    """Makes memory for the first batch, whose `output` is known by its shapes."""
    sharding, where = collector.env.sharding, None
    if sharding and not isinstance(output, Transition):
        return ()  # where XLA puts the result of a `postprocess` is its choice
    if sharding:
        where = sharding.shardings(output, lane_axis=1)
    return platform.blank_on(output, where)


def copied(tree: Any) -> Any:
    """Copies arrays, and makes arrays of numbers."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _copied(leaves))


# It takes a list, for the cache of `jit` may take one dataclass for another.
_copied = jax.jit(functools.partial(jax.tree.map, jnp.copy))

"""Collects the batches of a stream, in JAX or from host environments.

`make_batch` collects a batch in JAX, and `complete` computes its statistics and output.
Both functions are pure. `JaxBatches` and `HostBatches` compile and run them for a
stream: `begin` starts the batch after a `State` and returns a function that waits for
it. A repeated call with the same carry, for example after an interrupt, yields the same
batch. Streams with equal collectors and options share compiled programs.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout.base import checks, platform, programs
from rollout.collector import Collector
from rollout.envs.types import ArrayTree
from rollout.host import ctrl_c
from rollout.host.host_collector import HostCollector
from rollout.kernel import keys, scan, step
from rollout.kernel.state import mask_out, roots_of
from rollout.logs import EpisodeWindow
from rollout.stats import (
    CollectStats,
    Moments,
    by_name,
    count_nonfinite,
    is_nonfinite,
    nonfinite,
    plural,
    summarize,
)
from rollout.types import Carry, Episodes, Transition

Destination = str | jax.Device | jax.sharding.Sharding | None  # "host"
NO_FAULT = 2**31 - 1  # larger than every entry number of a batch
_WINDOW = 100  # episodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a `Stream`, which documents them.

    Equal options share a program. The program does not depend on the fields with
    `compare=False`; the number of rows is an argument of the program.
    """

    num_envs: int
    steps_per_batch: int | None = dataclasses.field(compare=False)
    episodes_per_batch: int | None
    total_steps: int | None = dataclasses.field(compare=False)
    max_episode_steps: int | None
    at_batch_end: str
    postprocess: Callable[[Transition], ArrayTree] | None
    device: Destination = dataclasses.field(compare=False)
    prefetch: int = dataclasses.field(compare=False)
    reuse_memory: bool = dataclasses.field(compare=False)
    check_finite: bool
    on_fault: str

    def checked(self, collector: Collector | HostCollector) -> "Options":
        """Returns the options with Python ints.

        Raises:
            ValueError: if an option is invalid, incompatible with another option, or
                not supported by the environments of `collector`.
        """
        ints: dict[str, Any] = {}
        for name in ("steps_per_batch", "episodes_per_batch", "total_steps"):
            if (value := getattr(self, name)) is not None:
                limit = None if name == "total_steps" else checks.INT32_MAX
                ints[name] = value = checks.check_int(name, value, most=limit)
                if name != "episodes_per_batch":
                    label = f"num_envs={self.num_envs}"
                    checks.check_multiple(name, value, self.num_envs, label)
        if self.max_episode_steps is not None:
            limit = checks.check_max_episode_steps(self.max_episode_steps)
            ints["max_episode_steps"] = limit
        checks.check_bool("reuse_memory", self.reuse_memory)
        checks.check_bool("check_finite", self.check_finite)
        if self.postprocess is not None:
            checks.check_function("postprocess", self.postprocess)
        ends = "continue", "reset", "truncate"
        checks.check_choice("at_batch_end", self.at_batch_end, ends)
        checks.check_choice("on_fault", self.on_fault, ("raise", "drop"))
        checks.check_choice("prefetch", self.prefetch, (0, 1))
        self._check_rules(collector)
        return dataclasses.replace(self, **ints)

    def num_rows(self, steps: int) -> int:
        """Returns the rows of the batch after `steps` steps, 0 after the last batch."""
        # The number of steps of complete episodes is unknown: use any number above 0.
        num_steps = self.steps_per_batch or self.num_envs
        if self.total_steps is not None:
            num_steps = min(num_steps, max(0, self.total_steps - steps))
        return num_steps // self.num_envs

    def _check_rules(self, collector: Collector | HostCollector) -> None:
        """Raises if options are incompatible, or not supported by the collector."""
        device, drops = self.device, self.on_fault == "drop"
        is_device = isinstance(device, jax.Device | jax.sharding.Sharding)
        has_episodes = self.episodes_per_batch is not None
        num_ready = getattr(collector, "num_ready", None)  # of a host collector
        is_host, in_processes = collector.is_host, _is_multi_process(collector)
        # Message of each rule, and whether the options violate it.
        rules = {
            "`collector` must step all environments together, got "
            f"num_ready={num_ready}: call `collect_steps` in your loop.": num_ready,
            "Either `steps_per_batch` or `episodes_per_batch` must be given, got "
            f"{self.steps_per_batch} and {self.episodes_per_batch}.": (
                has_episodes == (self.steps_per_batch is not None)
            ),
            "`episodes_per_batch` needs `max_episode_steps`, got None.": (
                has_episodes and self.max_episode_steps is None
            ),
            "`total_steps` must not be given with `episodes_per_batch`, because the "
            f"length of episodes varies, got {self.total_steps}.": (
                has_episodes and self.total_steps
            ),
            '`on_fault="drop"` must not be given with `episodes_per_batch`, which '
            "returns an exact number of episodes.": has_episodes and drops,
            '`device` must be None, "host", a `jax.Device` or a '
            f"`jax.sharding.Sharding`, got {device!r}.": (
                not is_device and device not in (None, "host")
            ),
            "`reuse_memory=True` needs `device=None`, because a copy on another device "
            f"cannot reuse memory, got {device!r}.": self.reuse_memory and device,
            '`on_fault="drop"` needs environments in JAX. For host environments use '
            '`HostCollector(on_fault="restart")`.': is_host and drops,
            "`reuse_memory=True` needs environments in JAX: host environments write to "
            "host memory.": is_host and self.reuse_memory,
            "`prefetch` must be 0 with lanes in several processes, got "
            f"{self.prefetch}: all processes must run programs in the same order.": (
                in_processes and self.prefetch
            ),
            '`device` must not be "host" with lanes in several processes: no process '
            "has all lanes.": in_processes and device == "host",
        }
        for message, is_violated in rules.items():
            if is_violated:
                raise ValueError(message)


class StreamStats(NamedTuple):
    """Statistics of a stream since its start, or since `reset_stats`.

    With `at_batch_end="reset"` all means are biased toward short episodes, because long
    episodes are discarded more often.

    Attributes:
        collected: statistics of all completed episodes.
        window: moving window over the last 100 episodes.
        batches: number of returned batches.
        steps: environment steps over all lanes, including steps of dropped episodes.
        seconds: total time from the start of each batch until `next` received it,
            without compilation. With `prefetch=1` it includes the training code.
        faulty_episodes: number of episodes dropped by `on_fault="drop"`.
    """

    collected: CollectStats
    window: EpisodeWindow
    batches: int = 0
    steps: int = 0
    seconds: float = 0.0
    faulty_episodes: int = 0

    @classmethod
    def init(cls, carry: Carry) -> Self:
        """Returns the statistics before the first batch."""
        # Use the types that `merge` returns, so that a state saved before the first
        # batch has the structure of every later state.
        fields: Any = dataclasses.fields(CollectStats)
        counts: Any = {x.name: 0 for x in fields if x.name.startswith("num_")}
        sums: Any = dict.fromkeys(("total", "squared_deviations"), np.float64(0))
        sums |= {"count": np.int64(0), "low": np.float32(np.inf)}
        zero = Moments(**sums, high=-sums["low"])
        names = by_name(carry.episode.accumulated, carry.episode.episode_id.shape)
        collected = CollectStats(
            **counts, returns=zero, lengths=zero, accumulated=dict.fromkeys(names, zero)
        )
        return cls(collected, jax.device_get(EpisodeWindow.init(_WINDOW)))

    def __str__(self) -> str:
        """Formats the window, the steps, the speed and the dropped episodes."""
        text = f"{self.window}, {plural(self.steps, 'step')}"
        if self.seconds:
            text += f", {self.steps / self.seconds:,.0f} per second"
        if self.faulty_episodes:
            text += f", {plural(self.faulty_episodes, 'episode')} dropped"
        return text


class State(NamedTuple):
    """State of a stream after the last batch that `next` returned."""

    carry: Carry
    stats: StreamStats
    steps: int = 0  # not reset by `reset_stats`
    output: ArrayTree | None = None  # of the last batch, for `reuse_memory`


class BatchResult(NamedTuple):
    """Outputs of the compiled program for one batch."""

    carry: Any  # after the batch
    output: ArrayTree  # the trajectory, or the result of `postprocess`
    episodes: Episodes | None
    stats: CollectStats
    window: EpisodeWindow  # after the batch
    num_faulty: jax.Array  # () int32, number of dropped episodes
    # First nonfinite entry of each checked field, or `NO_FAULT`.
    faults: dict[str, jax.Array]  # () int32
    fault_step: Any  # () int32, episode step of the first fault, or () if unchecked


VersionedParams = tuple[Any, int]  # parameters and their version
# Returns a batch, its duration in seconds, and the version of its parameters.
Wait = Callable[[], tuple[BatchResult, float, int]]


def make_batch(
    options: Options,
    num_rows: int,
    collector: Any,  # a `Collector`
    carry: Carry,
    params: Any,
    window: EpisodeWindow,
    memory: ArrayTree,
) -> BatchResult:
    """Collects a batch of `num_rows` rows, or of complete episodes.

    `memory` is an obsolete `output` of an earlier batch. It is donated but not
    read, so that XLA reuses its memory for the new output: the first write to newly
    allocated memory is slow.
    """
    del memory  # donated, not read
    episodes, num_faulty, drops = None, jnp.int32(0), options.on_fault == "drop"
    if options.episodes_per_batch is None:
        if options.at_batch_end == "reset":
            # An episode without any step is already new: keep it.
            restarts = carry.episode.episode_length > 0
            roots = roots_of(collector, carry)
            start = keys.next_episodes(collector.env, carry, roots)
            carry = step.restart(collector, carry, restarts, start)
        carry, trajectory = scan.collect_steps(
            collector,
            carry,
            params,
            num_rows,
            limit=options.max_episode_steps,
            cut_last=options.at_batch_end == "truncate",
            drop_fn=is_nonfinite if drops else None,
        )
        if drops:
            trajectory, num_faulty = _drop(trajectory)
    else:
        carry, trajectory, episodes = _play(options, collector, carry, params)
    result = complete(options, carry, window, trajectory, episodes, num_faulty)
    if (sharding := collector.env.sharding) and options.postprocess is None:
        # Use the sharding of `memory`, so that a later batch can reuse the memory.
        result = result._replace(output=sharding.place(result.output, lane_axis=1))
    return result


def complete(
    options: Options,
    carry: Any,
    window: EpisodeWindow,
    trajectory: Transition,
    episodes: Episodes | None,
    num_faulty: jax.Array,
) -> BatchResult:
    """Detects faults, and computes the statistics and the output of a batch."""
    faults, fault_step = {}, ()
    if options.check_finite and options.on_fault != "drop":
        size = trajectory.mask.size
        # Number the entries row by row, so that the smallest number is the first fault.
        number = jnp.arange(size, dtype=jnp.int32).reshape(trajectory.mask.shape)
        faults = {
            name: jnp.where(bad & trajectory.mask, number, NO_FAULT).min()
            for name, bad in nonfinite(trajectory).items()
        }
        # Several fields can be nonfinite in one entry; the message names all of them.
        first: Any = functools.reduce(jnp.minimum, faults.values(), NO_FAULT)
        fault_step = jnp.max(
            trajectory.episode_length, where=number == first, initial=0
        )
    if episodes is None:
        stats = summarize(trajectory)
    else:
        num_nonfinite = count_nonfinite(trajectory)
        stats = summarize(episodes).replace(num_nonfinite=num_nonfinite)
    return BatchResult(
        carry=carry,
        output=options.postprocess(trajectory) if options.postprocess else trajectory,
        episodes=episodes,
        stats=stats,
        window=window.add(trajectory if episodes is None else episodes),
        num_faulty=num_faulty,
        faults=faults,
        fault_step=fault_step,
    )


def _play(
    options: Options, collector: Any, carry: Carry, params: Any
) -> tuple[Carry, Transition, Episodes]:
    """Collects complete episodes; returns their trajectory separately."""
    carry, episodes = collector.collect_episodes(
        carry,
        params,
        options.episodes_per_batch,
        max_episode_steps=options.max_episode_steps,
        return_trajectory=True,
    )
    return carry, episodes.trajectory, episodes.replace(trajectory=())


def _drop(trajectory: Transition) -> tuple[Transition, jax.Array]:
    """Masks out faulty episodes; returns the trajectory and the number of faults.

    A faulty episode ends at its nonfinite row. Its rows in the batch are this row and
    all earlier rows with the same id.
    """
    faulty = is_nonfinite(trajectory)

    # Scan backward in time: drop a row if the next row of its episode is dropped.
    def mark(carry: tuple, row: tuple) -> tuple[tuple, jax.Array]:
        faulty, episode_id = row
        faulty = faulty | (carry[0] & (carry[1] == episode_id))
        return (faulty, episode_id), faulty

    rows = faulty, trajectory.episode_id
    start = jnp.zeros_like(faulty[0]), trajectory.episode_id[-1]
    dropped = lax.scan(mark, start, rows, reverse=True)[1]
    masked = trajectory.replace(mask=~dropped)
    return mask_out(masked), jnp.sum(faulty, dtype=jnp.int32)


class JaxBatches:
    """Collects the batches of a `Collector`, each with one compiled program."""

    def __init__(self, collector: Collector, options: Options) -> None:
        self._collector, self._options = collector, options
        self._program = _jax_program(options)
        self._compiled: set[int] = set()  # row counts

    def begin(self, state: State, params: VersionedParams, memory: ArrayTree) -> Wait:
        """Starts the batch after `state`; `memory` is an earlier `output`, or None."""
        collector, num_rows = self._collector, self._options.num_rows(state.steps)
        carry, window, (params, version) = state.carry, state.stats.window, params
        memory = self.compile(state, params, memory)
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

    def compile(self, state: State, params: Any, memory: ArrayTree = None) -> ArrayTree:
        """Compiles the program before its first call, so that compilation is not timed.

        Returns:
            Memory for the batch, newly allocated unless `memory` fits.
        """
        options, collector, program = self._options, self._collector, self._program
        carry, window = state.carry, state.stats.window
        num_rows = options.num_rows(state.steps)
        if not options.reuse_memory or num_rows != options.num_rows(0):
            memory = ()  # no reuse, or a shorter last batch
        # The first batch has no previous memory, and an interrupted batch may have
        # donated it.
        elif memory is None or any(x.is_deleted() for x in jax.tree.leaves(memory)):
            shapes = program.eval_shape(num_rows, collector, carry, params, window, ())
            memory = _blank(shapes.output, collector)
        if num_rows in self._compiled:
            return memory
        if not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            if _is_multi_process(collector):
                flags = {"postprocess": options.postprocess is not None}
                types = [str(jax.typeof(x)) for x in jax.tree.leaves(params)]
                facts = {"options": vars(options) | flags, "`params` of": types}
                programs.compare_processes("stream", facts)
            # The following call finds the program in the jit cache.
            program.lower(num_rows, collector, carry, params, window, memory).compile()
        self._compiled.add(num_rows)
        return memory

    def save(self, carry: Carry) -> dict[str, Any]:
        """Returns no entries: the carry is the complete state."""
        del carry  # unused
        return {}

    def restore(self, state: dict[str, Any], like: Carry) -> Carry:
        """Returns the carry of a state, on the devices of `like`."""

        def put(x: jax.Array, old: jax.Array) -> jax.Array:
            if x.sharding == old.sharding:
                return x
            return jax.device_put(x, old.sharding)

        return jax.tree.map(put, copied(state["carry"]), like)

    def close(self) -> None:
        """Does nothing."""


class HostBatches:
    """Collects the batches of a `HostCollector` in a thread.

    Host environments cannot repeat steps. After an error, the collection of a batch
    continues with the same parameters and keeps the rows before the error.
    """

    def __init__(self, collector: HostCollector, options: Options) -> None:
        self._collector, self._options = collector, options
        self._program = _host_program(options)
        self._calls = ctrl_c.Calls()
        # The last batch that began: its start and parameters, the carry and the rows
        # of its collection so far, and its result once complete.
        self._start: State | None = None
        self._params: VersionedParams = (), 0
        self._carry: Any = None
        self._parts: list[Transition] = []
        self._result: tuple[BatchResult, float, int] | None = None

    def begin(self, state: State, params: VersionedParams, memory: ArrayTree) -> Wait:
        """Starts the batch after `state`, or continues it, in a thread."""
        del memory  # unused
        if not self._has_begun(state.carry):
            self._params, self._carry = params, state.carry
            self._parts, self._result = [], None
            self._start = state  # last: an interrupt may come between two assignments
        return functools.partial(ctrl_c.result, self._calls.submit(self._collect))

    def compile(self, state: State, params: Any) -> None:
        """Compiles the program of the policy, which the first batch otherwise does."""
        self._collector.compile(state.carry, params)

    def save(self, carry: Carry) -> dict[str, Any]:
        """Returns the environment states, unless a batch has changed them."""
        # Empty bytes mark an unknown state: `restore` starts a new episode.
        unknown = [b""] * self._options.num_envs
        has_begun = self._has_begun(carry)
        return {"saved_envs": unknown if has_begun else self._collector.save(carry)}

    def restore(self, state: dict[str, Any], like: Carry) -> Carry:
        """Restores the environments from a state, and returns the carry."""
        del like  # unused
        self.close()
        return self._collector.restore(copied(state["carry"]), state["saved_envs"])

    def close(self) -> None:
        """Waits for the pending batch."""
        self._calls.wait()

    def _has_begun(self, carry: Carry) -> bool:
        return self._start is not None and self._start.carry is carry

    def _collect(self) -> tuple[BatchResult, float, int]:
        """Collects the batch, unless it is complete."""
        if self._result is not None:
            return self._result
        assert self._start is not None  # set by `begin`
        start_time, (params, version) = time.perf_counter(), self._params
        options, collector, parts = self._options, self._collector, self._parts
        num_before, episodes = collector.fault_stats.faulty_episodes, None
        self._carry, rows = collector.recover(self._carry)  # after an error
        if options.episodes_per_batch is None:
            parts += [] if rows is None else [rows]
            at_end = options.at_batch_end
            if at_end == "reset" and parts:
                at_end = "continue"  # the first part has already reset the episodes
            num_rows = options.num_rows(self._start.steps)
            if num_left := num_rows - sum(len(x.mask) for x in parts):
                self._carry, rows = collector.collect_steps(
                    self._carry,
                    params,
                    num_left,
                    max_episode_steps=options.max_episode_steps,
                    at_batch_end=at_end,
                )
                parts.append(rows)
            trajectory = parts[0]
            if len(parts) > 1:
                trajectory = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        else:
            self._carry, trajectory, episodes = _play(
                options, collector, self._carry, params
            )
        num_faulty = np.int32(collector.fault_stats.faulty_episodes - num_before)
        window = self._start.stats.window
        result = self._program((), window, trajectory, episodes, num_faulty)
        result = jax.block_until_ready(result._replace(carry=self._carry))
        self._result = result, time.perf_counter() - start_time, version
        return self._result


@programs.shared
def _jax_program(options: Options) -> Any:
    """Jits `make_batch`, one program for equal options."""
    make = functools.partial(make_batch, options)
    return jax.jit(make, static_argnums=0, donate_argnums=5, keep_unused=True)


@programs.shared
def _host_program(options: Options) -> Any:
    """Jits `complete`, one program for equal options."""
    return jax.jit(functools.partial(complete, options))


def _is_multi_process(collector: Collector | HostCollector) -> bool:
    sharding = getattr(collector.env, "sharding", None)  # none of host environments
    return sharding is not None and sharding.mesh.is_multi_process


def _blank(output: ArrayTree, collector: Collector) -> ArrayTree:
    """Allocates memory for the first batch, with the shapes of its `output`."""
    sharding = collector.env.sharding
    if sharding and not isinstance(output, Transition):
        return ()  # XLA chooses the sharding of the result of `postprocess`
    shardings = sharding.shardings(output, lane_axis=1) if sharding else None
    return platform.blank_on(output, shardings)


def copied(tree: Any) -> Any:
    """Copies the leaves of a tree, and converts numbers to arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _copied(leaves))


# Pass a list of leaves: the jit cache may treat different dataclasses as equal.
_copied = jax.jit(functools.partial(jax.tree.map, jnp.copy))

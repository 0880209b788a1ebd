"""`Report`: launches, waits and memory of a program on an accelerator, as a table."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["program", "loop", "conditional", "branch"]
Cost = Literal[
    "graph_launches", "loose_launches", "cycles", "flops", "bytes_moved", "seconds"
]
_LABEL = 19  # characters, as in the tables of the command line
# The parts of a step, as named by `jax.named_scope` in the kernel.
_SCOPES = ("policy", "env_step", "auto_reset", "bookkeeping")


class Wait(NamedTuple):
    """A place where the accelerator waits for the host.

    Attributes:
        cause: "while_loop" or "cond", whose predicate the host must read, or the name
            of a callback, such as "pure_callback".
        file: the file of the calling line: in your code or an environment's if that
            calls it, else in this library. "" if XLA has lost it.
        line: the line in that file.
        count: number of waits, at least.
        per: "step" of a collector; "round" of a function's loop over time; "inner
            round" of a loop inside it with an unknown number of rounds; or "program",
            outside of the loop over time.
        per_round: whether each round of this loop waits, too.
    """

    cause: str
    file: str
    line: int
    count: float
    per: Literal["step", "round", "inner round", "program"]
    per_round: bool

    def __str__(self) -> str:
        more = " + 1 per round of it" if self.per_round else ""
        place = f"{_relative(self.file)}:{self.line}" if self.file else "(line unknown)"
        return f"{_number(self.count)} per {self.per}{more}   {place} {self.cause}"


class Memory(NamedTuple):
    """Bytes on one device.

    Attributes:
        arguments: bytes of the arguments.
        outputs: bytes of the results, including those in memory of donated arguments.
        aliased: bytes of the results in memory of donated arguments.
        temporaries: bytes that the program needs while it runs.
        capacity: bytes that the device has.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    capacity: int

    @property
    def total(self) -> int:
        """Bytes taken at most."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def fits(self) -> bool:
        """True if the device has enough memory."""
        return self.total <= self.capacity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A whole program, or a loop, conditional or branch in it.

    The costs are those of one run of the block's own operations, without the blocks in
    it. `total` adds those up.

    Attributes:
        kind: the kind of block.
        trips: number of rounds of a loop; None where that depends on data.
        asks_host: whether the host must read the predicate of the loop or conditional
            before the device can go on.
        cause: name of the jax function that made the loop or conditional.
        file: file of the line that called it.
        line: the line in that file.
        graph_launches: launches in CUDA graphs.
        graphs: number of these graphs.
        loose_launches: launches outside of CUDA graphs.
        cycles: a TPU's cycles, as its compiler estimates them.
        flops: arithmetic operations, also those on integers.
        bytes_moved: bytes read and written.
        seconds: XLA's estimate for the kernels, without the launches.
        collectives: names of exchanges between devices, such as "all-reduce".
        callbacks: calls back into Python: name, file, line.
        operations: every launch, or operation of a TPU: its name in jax, with the
            scopes around it, and 1 for the launch, or its cycles.
        blocks: the blocks in it, in the order in which they run.
    """

    kind: Kind
    trips: int | None = None
    asks_host: bool = False
    cause: str = ""
    file: str = ""
    line: int = 0
    graph_launches: int = 0
    graphs: int = 0
    loose_launches: int = 0
    cycles: int = 0
    flops: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0
    collectives: tuple[str, ...] = ()
    callbacks: tuple[tuple[str, str, int], ...] = ()
    operations: tuple[tuple[str, int], ...] = dataclasses.field(default=(), repr=False)
    blocks: tuple["Block", ...] = ()

    def total(self, cost: Cost) -> float:
        """Adds up a cost over one run of this block and the blocks in it.

        A conditional costs as much as its most expensive branch. An inner loop whose
        number of rounds depends on data adds nothing: its own `total` is per round.
        """
        below = [block.total(cost) * block.rounds for block in self.blocks]
        inner = max(below, default=0) if self.kind == "conditional" else sum(below)
        return getattr(self, cost) + inner

    @property
    def rounds(self) -> int:
        """Number of rounds, at least."""
        return (self.trips or 0) if self.kind == "loop" else 1

    @property
    def launches(self) -> int:
        """Launches in one run of this block, as `total` counts them."""
        return int(self.total("graph_launches") + self.total("loose_launches"))

    def walk(self) -> Iterator["Block"]:
        """Yields this block and all blocks in it."""
        yield self
        for block in self.blocks:
            yield from block.walk()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A program's behaviour on an accelerator; `print` shows it as a table.

    Attributes:
        accelerator: name of the accelerator.
        description: the maker's name of the device.
        num_devices: number of devices.
        jax_version: version of the compiling jax.
        compile_seconds: seconds taken to compile.
        memory: bytes on one device.
        program: the whole program, as a tree of blocks.
        loop: the loop over time, with the costs of one round: the outermost loop with
            the most launches, or cycles; the program if there is no loop.
        steps_per_round: steps of a collector in one round of `loop`; None for a
            function, whose costs are per round.
        waits: where the accelerator waits for the host; none is best.
    """

    accelerator: str
    description: str
    num_devices: int
    jax_version: str
    compile_seconds: float
    memory: Memory
    program: Block
    loop: Block
    steps_per_round: int | None
    waits: tuple[Wait, ...]

    def per_step(self, cost: Cost) -> float:
        """Returns a cost of the loop over time, per step (of a function, per round)."""
        return self.loop.total(cost) / (self.steps_per_round or 1)

    @property
    def launches_per_step(self) -> float:
        """Launches, in CUDA graphs and loose, per step (of a function, per round)."""
        return self.per_step("graph_launches") + self.per_step("loose_launches")

    @property
    def loose_per_step(self) -> float:
        """Launches outside of CUDA graphs, per step (of a function, per round)."""
        return self.per_step("loose_launches")

    @property
    def waits_per_step(self) -> float:
        """Waits for the host, at least, per step (of a function, per round)."""
        unit = _unit(self.program, self.loop, self.steps_per_round)
        return sum(wait.count for wait in self.waits if wait.per == unit)

    @property
    def cycles_per_step(self) -> float:
        """Estimated cycles of a TPU, per step (of a function, per round)."""
        return self.per_step("cycles")

    def by_scope(self) -> dict[str, float]:
        """Counts the launches per step, or a TPU's cycles, by part of the step.

        A kernel that computes for several parts counts for the part of its last
        operation. A loop whose number of rounds depends on data adds nothing.

        Returns:
            The count of each part, per step (of a function, per round): "policy",
            "env_step", "auto_reset", "bookkeeping", "writing" the rows, and "other".
            Your own function has these parts where it steps a collector, or where it
            calls `jax.named_scope` with them.
        """
        parts: list[str] = [*_SCOPES, "writing", "other"]
        counts = dict.fromkeys(parts, 0.0)
        for name, count in _operations(self.loop):
            parts = name.split("/")
            scopes = [part for part in parts if part in _SCOPES]
            writes = "writing" if parts[-1] == "dynamic_update_slice" else "other"
            counts[scopes[-1] if scopes else writes] += count
        steps = self.steps_per_round or 1
        return {part: count / steps for part, count in counts.items()}

    @property
    def collectives_per_round(self) -> tuple[str, ...]:
        """Collective operations in every round of the loop over time."""
        return tuple(name for x in self.loop.walk() for name in x.collectives)

    def __str__(self) -> str:
        return "\n".join(f"{label:<{_LABEL}} {text}" for label, text in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        count = f", {self.num_devices} devices" if self.num_devices > 1 else ""
        yield "accelerator", f"{self.accelerator} ({self.description}{count})"
        yield "jax", self.jax_version
        yield "compile time", f"{self.compile_seconds:.2f} s"
        yield "memory", _describe_memory(self.memory)
        unit = _unit(self.program, self.loop, self.steps_per_round)
        if unit != "program":
            yield f"per {unit}", _describe_costs(self.loop, self.steps_per_round or 1)
        dynamic = _outermost(self.loop, lambda x: x.trips is None)
        for number, inner in enumerate(dynamic):
            text = f"{_describe_costs(inner)}   {_place(inner)} {inner.cause}"
            yield "" if number else "  per inner round", text
        yield "in all", _describe_costs(self.program)
        for number, (depth, block) in enumerate(_walk_depth(self.program)):
            label = "program" if number == 0 else ""
            mark = self._mark() if block is self.loop else ""
            yield label, "  " * depth + _describe_block(block) + mark
        if self.num_devices > 1:
            names = _tally(self.collectives_per_round) or "none"
            yield "collectives", f"{names} per round"
        if not self.waits:
            yield "waits", "none"
        for number, wait in enumerate(self.waits):
            yield "" if number else "waits", str(wait)

    def _mark(self) -> str:
        """Marks the loop over time in the tree."""
        steps = self.steps_per_round
        if steps is None:
            return " <- round" if self.loop is not self.program else ""
        return " <- step" if steps == 1 else f" <- {steps} steps"


def find_loop(program: Block, num_steps: int | None = None) -> Block:
    """Finds the loop over time, see `Report.loop`; a collector's has known rounds."""
    outermost = _outermost(program)
    if num_steps is not None:
        outermost = (x for x in outermost if (x.trips or num_steps + 1) <= num_steps)
    return max(
        outermost,
        key=lambda x: (x.launches + x.total("cycles")) * (x.trips or 1),
        default=program,
    )


def find_waits(
    program: Block, loop: Block, steps_per_round: int | None
) -> tuple[Wait, ...]:
    """Finds the waits of a program on a GPU or a TPU; merges those of one line."""
    found: Counter[tuple[Any, ...]] = Counter()
    unit = _unit(program, loop, steps_per_round)

    # The block runs `count` times per unit `per`; blocks and callbacks in it count per
    # unit `inner`.
    def visit(block: Block, per: str, count: int) -> None:
        place, is_time = (block.cause, block.file, block.line), block is loop
        inner, times = per, count * (block.trips or 1)
        if block.kind == "loop" and block.trips is None:
            inner, times = (unit, 1) if is_time else ("inner round", 1)
            if block.asks_host and is_time:
                found[*place, unit, False] += 1
            elif block.asks_host:
                found[*place, per, True] += count
        elif is_time and block.kind == "loop":
            inner, times = unit, 1
        if block.kind == "conditional" and block.asks_host:
            found[*place, per, False] += count
        for callback in block.callbacks:
            found[*callback, inner, False] += times
        for child in block.blocks:
            visit(child, inner, times)

    visit(program, unit if program is loop else "program", 1)
    steps = {"step": steps_per_round or 1}
    waits = [
        Wait(cause, file, line, count / steps.get(per, 1), per, more)
        for (cause, file, line, per, more), count in found.items()
    ]
    order = ("step", "round", "inner round", "program")
    return tuple(sorted(waits, key=lambda x: order.index(x.per)))


def _unit(
    program: Block, loop: Block, steps_per_round: int | None
) -> Literal["step", "round", "program"]:
    """Returns the unit per which the loop over time is reported."""
    if steps_per_round is not None:
        return "step"
    return "program" if loop is program else "round"


def _describe_block(block: Block) -> str:
    """Writes one line of the tree."""
    known = "" if block.trips is None else f" x {block.trips:,}"
    name = f"{block.cause or block.kind}{known} {_place(block)}".rstrip()
    if block.kind == "loop" and block.trips is None:
        name += ", rounds not known"
    name += ", asks the host" * block.asks_host
    costs = "" if block.kind == "conditional" else f": {_describe_own(block)}"
    tally = _tally(block.collectives)
    return f"{name}{costs}{f', {tally}' if tally else ''}"


def _describe_costs(block: Block, num_steps: int = 1) -> str:
    """Describes the costs of one run of a block, per step if it takes several."""

    def read(cost: Cost) -> float:
        return block.total(cost) / num_steps

    parts = []
    if block.launches:
        in_graphs, loose = read("graph_launches"), read("loose_launches")
        parts.append(_describe_launches(in_graphs, loose))
    if cycles := read("cycles"):
        parts.append(f"{cycles:,.0f} cycles")
    parts.append(f"{_scaled(read('flops'))}flop")
    parts.append(f"{_scaled(read('bytes_moved'))}B moved")
    if seconds := read("seconds"):
        parts.append(f"{1e6 * seconds:,.1f} us in kernels")
    return ", ".join(parts)


def _outermost(
    block: Block, is_wanted: Callable[[Block], bool] = lambda _: True
) -> Iterator[Block]:
    """Yields the wanted loops in a block that are in no other of them."""
    for child in block.blocks:
        if child.kind == "loop" and is_wanted(child):
            yield child
        else:
            yield from _outermost(child, is_wanted)


def _operations(block: Block) -> Iterator[tuple[str, int]]:
    """Yields every operation of one run of a block, counted as by `Block.total`."""
    yield from block.operations
    inner = block.blocks
    if block.kind == "conditional" and inner:
        inner = (max(inner, key=lambda x: x.launches + x.total("cycles")),)
    for child in inner:
        for name, count in _operations(child):
            yield name, count * child.rounds


def _place(block: Block) -> str:
    return f"{Path(block.file).name}:{block.line}" if block.file else ""


def _relative(file: str) -> str:
    """Shortens a path below the working directory or this library to a relative one."""
    path = Path(file)
    for folder in (Path.cwd(), Path(__file__).parents[2]):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return file


def _describe_own(block: Block) -> str:
    """Describes the cycles or launches of a block itself."""
    if block.cycles:
        return f"{block.cycles:,} cycles"
    if block.graph_launches or block.loose_launches:
        return _describe_launches(block.graph_launches, block.loose_launches)
    return "0 launches"


def _describe_launches(in_graphs: float, loose: float) -> str:
    return (
        f"{_number(in_graphs + loose)} launches ({_number(in_graphs)} in graphs, "
        f"{_number(loose)} loose)"
    )


def _describe_memory(memory: Memory) -> str:
    fits = "" if memory.fits else ", DOES NOT FIT"
    parts = (
        f"arguments {_scaled(memory.arguments)}B, outputs {_scaled(memory.outputs)}B, "
        f"temporaries {_scaled(memory.temporaries)}B"
    )
    whole = f"{_scaled(memory.total)}B of {_scaled(memory.capacity)}B"
    return f"{whole}{fits} ({parts})"


def _walk_depth(block: Block, depth: int = 0) -> Iterator[tuple[int, Block]]:
    yield depth, block
    for child in block.blocks:
        yield from _walk_depth(child, depth + 1)


def _tally(names: tuple[str, ...]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


def _number(count: float) -> str:
    """Formats a count, or a mean of counts."""
    return f"{count:,.2f}".rstrip("0").rstrip(".")


def _scaled(value: float) -> str:
    """Formats a number with an SI prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or prefix == "T":
            break
        value /= 1000
    return f"{value:.3g} {prefix}" if value < 1000 else f"{value:,.0f} {prefix}"

"""`Report`: launches, waits and memory of a program on an accelerator, as a table."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["program", "loop", "conditional", "branch"]
Cost = Literal["launches", "graph_launches", "loose_launches", "cycles", "seconds"]
_LABEL = 19  # characters, as in the tables of the command line
# The parts of a step, as named by `jax.named_scope` in the kernel.
_SCOPES = ("policy", "env_step", "auto_reset", "bookkeeping")


class Wait(NamedTuple):
    """A line of code at which the accelerator waits for the host.

    Attributes:
        cause: "while_loop" or "cond" if the host must read the predicate, or the name
            of a callback, such as "pure_callback".
        file: file of the calling line: your code or an environment if it calls the
            function, else this library. "" if the file is unknown.
        line: line in the file.
        count: minimum number of waits.
        per: unit of `count`: "step" of a collector; "round" of a function's loop over
            time; "inner round" of an inner loop with an unknown number of rounds; or
            "program", outside of the loop over time.
        per_round: whether the accelerator also waits in each round of this loop.
    """

    cause: str
    file: str
    line: int
    count: float
    per: Literal["step", "round", "inner round", "program"]
    per_round: bool

    def __str__(self) -> str:
        suffix = " + 1 per round of it" if self.per_round else ""
        location = f"{self.file}:{self.line}" if self.file else "(line unknown)"
        return f"{self.count:g} per {self.per}{suffix}   {location} {self.cause}"


class Memory(NamedTuple):
    """Memory of a program on one device, in bytes.

    Attributes:
        arguments: bytes of the arguments.
        outputs: bytes of the results, including `aliased`.
        aliased: bytes of the results that reuse memory of donated arguments.
        temporaries: bytes that the program allocates while it runs.
        capacity: bytes of memory of the device.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    capacity: int

    @property
    def total(self) -> int:
        """Maximum number of bytes in use."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def fits(self) -> bool:
        """True if the device has enough memory."""
        return self.total <= self.capacity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A whole program, or a loop, conditional or branch in it.

    The costs are costs of one run of the operations directly in the block. `total` adds
    the costs of inner blocks.

    Attributes:
        kind: kind of block.
        trips: number of rounds of a loop; None if the number depends on data.
        asks_host: whether the host must read the predicate of the loop or conditional
            before the device can continue.
        cause: name of the JAX function that made the loop or conditional.
        file: file of the line that called the function.
        line: line in the file.
        graph_launches: number of launches in CUDA graphs.
        loose_launches: number of launches outside of CUDA graphs.
        cycles: cycles of a TPU, as the compiler estimates them.
        seconds: XLA's estimate of the time in kernels, without launches; 0 if there is
            no estimate.
        collectives: names of exchanges between devices, such as "all-reduce".
        callbacks: calls back into Python: name, file, line.
        operations: every launch of a GPU, or operation of a TPU: the name in JAX with
            its scopes, and the number of launches, 1, or of cycles.
        blocks: inner blocks, in the order in which they run.
    """

    kind: Kind
    trips: int | None = None
    asks_host: bool = False
    cause: str = ""
    file: str = ""
    line: int = 0
    graph_launches: int = 0
    loose_launches: int = 0
    cycles: int = 0
    seconds: float = 0.0
    collectives: tuple[str, ...] = ()
    callbacks: tuple[tuple[str, str, int], ...] = ()
    operations: tuple[tuple[str, int], ...] = dataclasses.field(default=(), repr=False)
    blocks: tuple["Block", ...] = ()

    def total(self, cost: Cost) -> float:
        """Sums a cost over one run of this block, including inner blocks.

        A conditional costs as much as its most expensive branch. An inner loop whose
        number of rounds depends on data adds nothing; call `total` of that loop for the
        cost per round.
        """
        below = [block.total(cost) * block.rounds for block in self.blocks]
        inner = max(below, default=0) if self.kind == "conditional" else sum(below)
        return getattr(self, cost) + inner

    @property
    def rounds(self) -> int:
        """Minimum number of rounds."""
        return (self.trips or 0) if self.kind == "loop" else 1

    @property
    def launches(self) -> int:
        """Number of launches in this block, without inner blocks."""
        return self.graph_launches + self.loose_launches

    def walk(self) -> Iterator["Block"]:
        """Yields this block and all inner blocks."""
        yield self
        for block in self.blocks:
            yield from block.walk()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A program's behavior on an accelerator. Print the report to show it as a table.

    Attributes:
        accelerator: name of the accelerator.
        description: the vendor's name of the device.
        num_devices: number of devices.
        jax_version: version of JAX that compiled the program.
        compile_seconds: seconds taken to compile.
        memory: bytes on one device.
        flops: XLA's count of arithmetic operations of one call, with one round of every
            loop. None if XLA does not count them, for example for an absent GPU.
        bytes_moved: XLA's count of bytes read and written, under the same conditions.
        program: whole program, as a tree of blocks.
        loop: loop over time, with the costs of one round: the outermost loop with the
            most launches or cycles. The program if there is no loop.
        steps_per_round: steps of a collector in one round of `loop`. None for a
            function, whose costs are per round.
    """

    accelerator: str
    description: str
    num_devices: int
    jax_version: str
    compile_seconds: float
    memory: Memory
    flops: float | None
    bytes_moved: float | None
    program: Block
    loop: Block
    steps_per_round: int | None

    def per_step(self, cost: Cost) -> float:
        """Returns a cost of the loop over time, per step, or per round of a function.

        Args:
            cost: "launches", the sum of "graph_launches" in CUDA graphs and
                "loose_launches" outside of CUDA graphs; "cycles" of a TPU, as the
                compiler estimates them; or "seconds" in kernels.
        """
        return self.loop.total(cost) / (self.steps_per_round or 1)

    @property
    def waits(self) -> tuple[Wait, ...]:
        """Waits of the accelerator for the host, one per line; ideally none."""
        counts: Counter[tuple[Any, ...]] = Counter()

        # The block runs `count` times per unit `per`.
        def visit(block: Block, per: str, count: int) -> None:
            is_inner_loop = block.kind == "loop" and block is not self.loop
            # Counts inside the loop over time are per round of the loop.
            if block is self.loop:
                per, count = self._unit, 1
            # The host reads the predicate once per run of the loop, and once per round.
            if block.asks_host:
                counts[block.cause, block.file, block.line, per, is_inner_loop] += count
            # The number of rounds is unknown: report waits per round of this loop.
            if is_inner_loop and block.trips is None:
                per, count = "inner round", 1
            elif is_inner_loop:
                count *= block.rounds
            for callback in block.callbacks:
                counts[*callback, per, False] += count
            for inner in block.blocks:
                visit(inner, per, count)

        visit(self.program, "program", 1)
        steps = {"step": self.steps_per_round or 1}
        waits = [
            Wait(cause, file, line, count / steps.get(per, 1), per, per_round)
            for (cause, file, line, per, per_round), count in counts.items()
        ]
        order = ("step", "round", "inner round", "program")
        return tuple(sorted(waits, key=lambda wait: order.index(wait.per)))

    def by_scope(self) -> dict[str, float]:
        """Counts launches of a GPU, or cycles of a TPU, per step and part of the step.

        A kernel that computes several parts is assigned to the part of its last
        operation. A loop whose number of rounds depends on data adds nothing.

        Returns:
            The count of each part, per step, or per round of a function: "policy",
            "env_step", "auto_reset", "bookkeeping", "writing" of rows, and "other". A
            function has these parts if it steps a collector, or if it calls
            `jax.named_scope` with their names.
        """
        parts: list[str] = [*_SCOPES, "writing", "other"]
        counts = dict.fromkeys(parts, 0.0)
        for name, count in _operations(self.loop):
            parts = name.split("/")
            scopes = [part for part in parts if part in _SCOPES]
            # The scan writes rows, outside of all scopes.
            writes = "writing" if parts[-1] == "dynamic_update_slice" else "other"
            counts[scopes[-1] if scopes else writes] += count
        steps = self.steps_per_round or 1
        return {part: count / steps for part, count in counts.items()}

    @property
    def collectives_per_round(self) -> tuple[str, ...]:
        """Names of collective operations in one round of the loop over time."""
        return tuple(name for x in self.loop.walk() for name in x.collectives)

    def __str__(self) -> str:
        is_multi_device = self.num_devices > 1
        count = f", {self.num_devices} devices" if is_multi_device else ""
        used, capacity = self.memory.total / 1e6, self.memory.capacity / 1e6
        fits = "" if self.memory.fits else ", DOES NOT FIT"
        rows = {
            "accelerator": [f"{self.accelerator} ({self.description}{count})"],
            "jax": [f"{self.jax_version}, compiled in {self.compile_seconds:.2f} s"],
            "memory": [f"{used:,.2f} MB of {capacity:,.0f} MB{fits}"],
        }
        if self.flops is not None and self.bytes_moved is not None:
            flops, moved = self.flops / 1e6, self.bytes_moved / 1e6
            text = f"{flops:,.2f} Mflop, {moved:,.2f} MB moved, one round of every loop"
            rows["work"] = [text]
        if self.steps_per_round or self.loop is not self.program:
            costs = _describe(self.loop, self.steps_per_round or 1)
            rows[f"per {self._unit}"] = [costs]
        rows["program"] = [*self._tree(self.program)]
        if is_multi_device:
            tally = Counter(self.collectives_per_round).items()
            names = ", ".join(f"{count} {name}" for name, count in tally) or "none"
            rows["collectives"] = [f"{names} per round"]
        rows["waits"] = [str(wait) for wait in self.waits] or ["none"]
        return "\n".join(
            f"{'' if number else label:<{_LABEL}} {text}"
            for label, texts in rows.items()
            for number, text in enumerate(texts)
        )

    @property
    def _unit(self) -> Literal["step", "round", "program"]:
        """Unit of the costs of the loop over time."""
        if self.steps_per_round is not None:
            return "step"
        return "program" if self.loop is self.program else "round"

    def _tree(self, block: Block, indent: str = "") -> Iterator[str]:
        """Yields one line per block, for a block and all inner blocks."""
        rounds = mark = ""
        if block.kind == "loop":
            rounds = " x ?" if block.trips is None else f" x {block.trips:,}"
        location = f" {Path(block.file).name}:{block.line}" if block.file else ""
        if block is self.loop and block is not self.program:
            steps = self.steps_per_round or 1
            mark = f" <- {steps} {self._unit}{'s' * (steps > 1)}"
        name = f"{indent}{block.cause or block.kind}{rounds}{location}"
        yield f"{name}: {_describe(block)}{mark}"
        for inner in block.blocks:
            yield from self._tree(inner, f"{indent}  ")


def find_loop(program: Block, num_steps: int | None = None) -> Block:
    """Finds the loop over time, `Report.loop`, of at most `num_steps` rounds."""

    def outermost(block: Block) -> Iterator[Block]:
        for inner in block.blocks:
            if inner.kind != "loop":
                yield from outermost(inner)
            elif num_steps is None or (inner.trips or num_steps + 1) <= num_steps:
                yield inner

    return max(
        outermost(program), key=lambda x: _size(x) * (x.trips or 1), default=program
    )


def _size(block: Block) -> float:
    """Returns the launches of a GPU, or the cycles of a TPU, in one run of a block."""
    return block.total("launches") + block.total("cycles")


def _operations(block: Block) -> Iterator[tuple[str, int]]:
    """Yields every operation of one run of a block, counted as in `Block.total`."""
    yield from block.operations
    inner = block.blocks
    if block.kind == "conditional" and inner:
        inner = (max(inner, key=_size),)
    for child in inner:
        for name, count in _operations(child):
            yield name, count * child.rounds


def _describe(block: Block, num_steps: int = 1) -> str:
    """Describes the costs of one run of a block, divided by `num_steps`."""
    # A TPU has cycles and no launches; a GPU has launches and no cycles.
    if cycles := block.total("cycles"):
        return f"{cycles / num_steps:,.0f} cycles"
    launches, loose = (
        f"{round(count / num_steps, 2):,.10g}"
        for count in (block.total("launches"), block.total("loose_launches"))
    )
    seconds = block.total("seconds") / num_steps
    time = f", {1e6 * seconds:,.1f} us in kernels" if seconds else ""
    return f"{launches} launches ({loose} loose){time}"

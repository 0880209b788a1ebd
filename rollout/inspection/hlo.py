"""Reads compiled programs: HLO instructions, and the launches of each loop."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rollout.inspection.report import Block, Kind

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^(ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\((.*)$")
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(
    r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE
)
_COLLECTIVES = {
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
}

_CONTAINERS = ("kCommandBuffer", "kSequential", "kConcurrent", "kAsyncStart")

_THUNK = re.compile(r"^( *)(\d+): (k\w+)")
_SECTION = re.compile(r"^( *)(condition|body|\w*branch\w*):\s*$")
_THUNK_NAME = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')
# The first match is the estimate of XLA's cost model; the second is a bound.
_MICROSECONDS = re.compile(r'"exec_time_us":([\d.e+\-]+)')

_ROLLOUT = f"{Path(__file__).parents[1]}/"
_INSPECTION = f"{Path(__file__).parent}/"
_JAX = tuple(f"{Path(jax.__file__).parents[1] / x}/" for x in ("jax", "jaxlib"))


class Frame(NamedTuple):
    """A line of Python."""

    file: str
    line: int


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    opcode: str
    operands: tuple[str, ...]
    text: str  # text after the first parenthesis
    is_root: bool
    computation: str  # name of the computation that contains it

    def attribute(self, name: str) -> str:
        """Returns the value of an attribute, a number or a name; "" if absent."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        return match[1] if match else ""

    @property
    def branches(self) -> list[str]:
        """Computations of a conditional, in the order of the predicate's values."""
        if names := re.search(r"branch_computations=\{([^}]*)\}", self.text):
            return [x.strip().lstrip("%") for x in names[1].split(",")]
        named = [self.attribute(f"{x}_computation") for x in ("false", "true")]
        return [name for name in named if name]

    @property
    def op_name(self) -> str:
        """Name of the operation in JAX, with its scopes."""
        match = re.search(r'op_name="([^"]*)"', self.text)
        return match[1] if match else ""


class Module:
    """A compiled program.

    Attributes:
        computations: instructions of each computation by name, in running order.
        instructions: instructions of all computations, by name.
        entry: name of the program's main computation.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.instructions: dict[str, Instruction] = {}
        self.entry, computation = "", ""
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                computation = match[2]
                self.computations[computation] = {}
                self.entry = computation if match[1] else self.entry
            elif match := _INSTRUCTION.match(line.strip()):
                root, name, opcode, rest = match.groups()
                # Stop at the parenthesis: attributes after it also contain names.
                operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
                is_root = root is not None
                x = Instruction(name, opcode, operands, rest, is_root, computation)
                self.computations[computation][name] = self.instructions[name] = x
        # In these tables, a frame has a line and the number of the calling frame.
        tables = text.partition("\nFunctionNames")
        files = dict(_FILE.findall(tables[0]))
        lines = {
            number: Frame(files.get(file, ""), int(line))
            for number, file, line in _LOCATION.findall(tables[2])
        }
        frames = _FRAME.findall(tables[2])
        # XLA adds 1 to the number of a parent, so outermost frames have parent 1.
        first = min((int(parent or 0) for _, _, parent in frames), default=0)
        self._frames = {
            int(number): (lines.get(location, Frame("", 0)), int(parent or 0) - first)
            for number, location, parent in frames
        }

    def frames(self, x: Instruction) -> list[Frame]:
        """Returns the source lines of an instruction, the innermost first."""
        frames, number = [], int(x.attribute("stack_frame_id") or 0)
        while number in self._frames and len(frames) < 1000:
            frame, number = self._frames[number]
            frames.append(frame)
        return frames

    def op_name(self, x: Instruction) -> str:
        """Returns JAX's name of an operation, or of the last operation in a fusion."""
        fused = self.computations.get(x.attribute("calls"), {})
        names = (y.op_name for y in reversed((*fused.values(), x)))
        return next(filter(None, names), "")

    def root(self, computation: str) -> Instruction | None:
        """Returns the instruction that computes the result of a computation."""
        lines = self.computations.get(computation, {}).values()
        return next((x for x in lines if x.is_root), None)


def read_gpu(text: str, sequence: str, metadata: str) -> Block:
    """Parses the launches of a GPU, in the order in which they run.

    Args:
        text: text of the compiled program.
        sequence: XLA's dump of the program's thunks, an indented list.
        metadata: XLA's dump that maps thunks to instructions.
    """
    module = Module(text)
    names = {int(number): name for name, number in _THUNK_NAME.findall(metadata)}

    def read(thunks: list[_Thunk], in_graph: bool) -> Iterator[dict[str, Any]]:
        for kind, number, _, sections in thunks:
            # The text may lack the instruction.
            x = module.instructions.get(names.get(number, ""))
            inner = [thunk for _, part in sections for thunk in part]
            if kind in _CONTAINERS:
                yield from read(inner, in_graph or kind == "kCommandBuffer")
            elif kind == "kConditional":
                branches = tuple(
                    _block("branch", read(part, in_graph)) for _, part in sections
                )
                parts, source = [{"blocks": branches}], _source(module, x, "cond")
                asks_host = not in_graph
                block = _block("conditional", parts, source, asks_host=asks_host)
                yield {"blocks": (block,)}
            elif kind == "kWhile":
                trips = _trips(module, x)
                if trips is not None:  # the predicate is never computed
                    inner = dict(sections)["body"]
                source = _source(module, x, "while_loop" if trips is None else "scan")
                asks_host = trips is None and not in_graph
                parts = read(inner, in_graph)
                yield {"blocks": (_block("loop", parts, source, trips, asks_host),)}
            elif not kind.endswith("Done"):
                # For example kAllReduceStart, which is all-reduce-start in the text.
                opcode = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind[1:]).lower()
                time = _MICROSECONDS.search(x.text) if x else None
                yield {
                    "graph_launches" if in_graph else "loose_launches": 1,
                    "seconds": 1e-6 * float(time[1]) if time else 0.0,
                    "collectives": _collectives(opcode),
                    "operations": ((module.op_name(x) if x else "", 1),),
                }

    return _block("program", read(_nest(sequence), in_graph=False))


def read_tpu(text: str) -> Block:
    """Parses the schedule of a TPU, with the compiler's estimates of cycles."""
    module = Module(text)

    def read(computation: str) -> Iterator[dict[str, Any]]:
        for x in module.computations.get(computation, {}).values():
            cycles = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', x.text)))
            if cycles:
                yield {"cycles": cycles, "operations": ((module.op_name(x), cycles),)}
            yield {"collectives": _collectives(x.opcode)}
            # Count the `send` only, not the `recv` that answers it.
            is_sent = x.opcode == "send" and "is_host_transfer=true" in x.text
            if is_sent or x.opcode in ("infeed", "outfeed"):
                yield {"callbacks": (_source(module, x, x.opcode),)}
            if x.opcode == "while":
                trips = _trips(module, x)
                source = _source(module, x, "while_loop" if trips is None else "scan")
                parts = read(x.attribute("body"))
                yield {"blocks": (_block("loop", parts, source, trips),)}
            elif x.opcode == "conditional":
                branches = tuple(_block("branch", read(name)) for name in x.branches)
                parts, source = [{"blocks": branches}], _source(module, x, "cond")
                yield {"blocks": (_block("conditional", parts, source),)}
            elif x.opcode == "call":
                yield from read(x.attribute("to_apply"))

    return _block("program", read(module.entry))


def find_source(frames: list[Frame]) -> Frame | None:
    """Finds the line of code that causes an operation, so that a user can change it.

    Usually this is the innermost line outside of JAX. If this line is in the library
    and was called by other code that the library called, for example an environment,
    the line in the other code is returned instead.
    """
    candidates = [x for x in frames if not x.file.startswith(_JAX)]
    for i, frame in enumerate(candidates):
        if frame.file.startswith(_ROLLOUT):
            continue
        outer = [x for x in candidates[i + 1 :] if not x.file.startswith(_INSPECTION)]
        if i == 0 or any(x.file.startswith(_ROLLOUT) for x in outer):
            return frame
        break
    return candidates[0] if candidates else None


class _Thunk(NamedTuple):
    """A unit of work of XLA's GPU runtime: a launch, or a container of thunks."""

    kind: str
    number: int
    indent: int
    # Thunks by section, such as "body"; a command buffer has one unnamed section.
    sections: list[tuple[str, list["_Thunk"]]]


def _nest(sequence: str) -> list[_Thunk]:
    """Parses an indented list of thunks to a tree."""
    root = _Thunk("", 0, -1, [("", [])])
    stack = [root]
    for line in sequence.splitlines():
        if match := _SECTION.match(line):
            # The header of a condition is not indented and directly follows the loop.
            if match[2] != "condition":
                while len(stack) > 1 and stack[-1].indent >= len(match[1]):
                    stack.pop()
            stack[-1].sections.append((match[2], []))
        elif match := _THUNK.match(line):
            indent = len(match[1])
            while stack[-1].indent >= indent:
                stack.pop()
            thunk = _Thunk(match[3], int(match[2]), indent, [])
            if not stack[-1].sections:
                stack[-1].sections.append(("", []))
            stack[-1].sections[-1][1].append(thunk)
            stack.append(thunk)
    return root.sections[0][1]


def _block(
    kind: Kind,
    parts: Iterable[dict[str, Any]],
    source: tuple[str, str, int] = ("", "", 0),
    trips: int | None = None,
    asks_host: bool = False,
) -> Block:
    """Makes a block that sums the costs, and concatenates the blocks, of its parts."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    cause, file, line = source
    return Block(
        kind=kind,
        trips=trips,
        asks_host=asks_host,
        cause=cause,
        file=file,
        line=line,
        **total,
    )


def _source(
    module: Module, x: Instruction | None, default: str
) -> tuple[str, str, int]:
    """Returns the JAX function that made an instruction, with its file and line."""
    if x is None:
        return default, "", 0
    name = x.op_name.rpartition("/")[2]
    frame = find_source(module.frames(x)) or Frame("", 0)
    # JAX compiles both loops and scans to `while`.
    return default if name in ("", "while") else name, frame.file, frame.line


def _collectives(opcode: str) -> tuple[str, ...]:
    name = opcode.removesuffix("-start")
    return (name,) if name in _COLLECTIVES else ()


def _trips(module: Module, x: Instruction | None) -> int | None:
    """Returns the number of rounds of a loop; None if it depends on data."""
    if x is None:
        return None
    if match := re.search(r'known_trip_count":\{"n":"(\d+)"', x.text):
        return int(match[1])
    # XLA may not state the number. Compute it if the condition is `counter < constant`,
    # and the counter is an item of the tuple that starts at a constant and grows by 1.
    init = module.instructions.get(x.operands[0])
    condition, body = (module.root(x.attribute(name)) for name in ("condition", "body"))
    if not (init and condition and body and condition.attribute("direction") == "LT"):
        return None
    if (init.opcode, condition.opcode, body.opcode) != ("tuple", "compare", "tuple"):
        return None
    (_, counter), (_, limit) = (_operand(module, condition, i) for i in (0, 1))
    if isinstance(counter, int) or not counter or not isinstance(limit, int):
        return None
    _, start = _operand(module, init, int(counter))
    sum_, _ = _operand(module, body, int(counter))
    if not isinstance(start, int) or sum_.opcode != "add":
        return None
    terms = {_operand(module, sum_, number)[1] for number in (0, 1)}
    return max(0, limit - start) if terms == {counter, 1} else None


def _operand(
    module: Module, x: Instruction, number: int
) -> tuple[Instruction, int | str]:
    """Returns an operand, and its value if constant, else its index in a tuple."""
    lines = module.computations[x.computation]
    y = lines[x.operands[number]]
    while y.opcode in ("copy", "bitcast"):
        y = lines[y.operands[0]]
    constant = re.match(r"(-?\d+)\)", y.text) if y.opcode == "constant" else None
    return y, int(constant[1]) if constant else y.attribute("index")

"""Parses XLA's compiled programs: instructions, their costs and source lines."""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}
_NO_TRAFFIC = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"),
    *("conditional", "call", "after-all", "partition-id", "replica-id", "iota"),
    *("optimization-barrier", "domain", "copy-done", "async-done"),
}
# One operation per item of the result.
_ARITHMETIC = {
    *("add", "subtract", "multiply", "divide", "remainder", "power", "maximum"),
    *("minimum", "and", "or", "xor", "not", "negate", "abs", "sign", "compare"),
    *("select", "clamp", "floor", "ceil", "round-nearest-afz", "round-nearest-even"),
    *("shift-left", "shift-right-logical", "shift-right-arithmetic", "popcnt"),
    *("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic"),
    *("tanh", "tan", "sine", "cosine", "sqrt", "rsqrt", "cbrt", "atan2", "erf"),
}
_READS_PART = {"dynamic-slice", "gather", "slice"}
_WRITES_PART = {"dynamic-update-slice": 1, "scatter": 2}  # the operand with the update

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")


class Frame(NamedTuple):
    """A line of Python."""

    file: str
    line: int


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str  # all after the first parenthesis
    is_root: bool
    home: str  # the computation that contains it

    def attribute(self, name: str) -> str | None:
        """Returns the computation that an attribute names."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        return found[1] if found else None

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional, in the order of the predicate's values."""
        if names := re.search(r"branch_computations=\{([^}]*)\}", self.text):
            return [x.strip().lstrip("%") for x in names[1].split(",")]
        named = [self.attribute(f"{x}_computation") for x in ("false", "true")]
        return [name for name in named if name]

    @property
    def op_name(self) -> str:
        """The name that jax gave the operation, with the scopes around it."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""


class Module:
    """A compiled program.

    Attributes:
        computations: the instructions of each computation by name, in running order.
        entry: the name of the computation that is the program.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        self._tables: dict[str, dict[int, str]] = {}
        self._read(text)
        parents = (_number(x, "parent_frame_id") for x in self._frames.values())
        # XLA adds one to the number of a parent, so the outermost frame has 1.
        self._first_parent = min(parents, default=0)

    def frames(self, instruction: Instruction) -> list[Frame]:
        """Returns the lines that an instruction comes from, the innermost first."""
        if plain := re.search(r'source_file="([^"]*)"', instruction.text):
            return [Frame(plain[1], _number(instruction.text, "source_line"))]
        found, number = [], _number(instruction.text, "stack_frame_id")
        while number in self._frames and len(found) < 1000:
            location = self._tables["FileLocations"].get(
                _number(self._frames[number], "file_location_id"), ""
            )
            name = self._tables["FileNames"].get(_number(location, "file_name_id"), "")
            found.append(Frame(name.strip('"'), _number(location, "line")))
            parent = _number(self._frames[number], "parent_frame_id")
            number = parent - self._first_parent
        return found

    def find(self, name: str) -> Instruction | None:
        """Returns the instruction of this name, in any computation."""
        return self._by_name.get(name)

    def op_name(self, x: Instruction) -> str:
        """Returns jax's name of an operation; of the last one in a nameless fusion."""
        fused = self.computations.get(x.attribute("calls") or "", {})
        names = (y.op_name for y in reversed((*fused.values(), x)))
        return next(filter(None, names), "")

    def flops(self, x: Instruction) -> int:
        """Counts the arithmetic operations of an instruction, on integers too."""
        shapes = self._operand_shapes(x)
        if x.opcode in ("fusion", "call", "async-start"):
            called = x.attribute("calls") or x.attribute("to_apply") or ""
            return sum(map(self.flops, self.computations.get(called, {}).values()))
        if x.opcode == "dot":
            return 2 * num_items(x.shape) * _contracted(x.text, shapes[0])
        if x.opcode == "custom-call" and "gemm" in x.text and shapes:
            result = x.shape.strip("(").partition("}")[0]  # without the workspace
            return 2 * num_items(result) * _contracted(x.text, shapes[0])
        if x.opcode == "convolution":
            labels = re.search(r"dim_labels=\w+_(\w+)->", x.text)
            kernel = _dimensions(shapes[1])
            outputs = kernel[labels[1].index("o")] if labels else 1
            return 2 * num_items(x.shape) * math.prod(kernel) // max(1, outputs)
        if x.opcode == "reduce":
            return num_items(shapes[0]) if shapes else 0
        return num_items(x.shape) if x.opcode in _ARITHMETIC else 0

    def bytes_moved(self, x: Instruction) -> int:
        """Counts the bytes that an instruction moves, of a slice only its part."""
        shapes = self._operand_shapes(x)
        if x.opcode in _NO_TRAFFIC:
            return 0
        if x.opcode in _READS_PART:
            return 2 * num_bytes(x.shape)
        if x.opcode in _WRITES_PART and len(shapes) > _WRITES_PART[x.opcode]:
            return 2 * num_bytes(shapes[_WRITES_PART[x.opcode]])
        body = self.computations.get(x.attribute("calls") or "", {})
        if x.opcode != "fusion" or not body:
            return num_bytes(x.shape) + sum(map(num_bytes, shapes))
        read = sum(_read_of(y, body) for y in body.values() if y.opcode == "parameter")
        return read + sum(_written_of(y, body) for y in _results(body))

    def _operand_shapes(self, x: Instruction) -> list[str]:
        around = self.computations[x.home]
        return [around[name].shape for name in x.operands if name in around]

    def _read(self, text: str) -> None:
        lines: dict[str, Instruction] = {}
        home = ""
        table: dict[int, str] | None = None
        for line in text.splitlines():
            stripped = line.strip()
            if found := _COMPUTATION.match(line):
                home = found[2]
                lines = self.computations[home] = {}
                self.entry = home if found[1] else self.entry
                table = None
            elif found := _INSTRUCTION.match(stripped):
                root, name, shape, opcode, rest = found.groups()
                operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
                args = name, shape, opcode, operands, rest, root is not None, home
                lines[name] = Instruction(*args)
            elif re.fullmatch(r"(File|Function|Stack)[A-Z]\w+", stripped):
                table = self._tables.setdefault(stripped, {})
            elif table is not None and (found := re.match(r"(\d+) (.*)", stripped)):
                table[int(found[1])] = found[2]

    @property
    def _frames(self) -> dict[int, str]:
        return self._tables.get("StackFrames", {})

    @functools.cached_property
    def _by_name(self) -> dict[str, Instruction]:
        return {k: x for lines in self.computations.values() for k, x in lines.items()}


def num_items(shape: str) -> int:
    """Counts the items of an array, or of all arrays of a tuple."""
    return sum(math.prod(_sizes(sizes)) for _, sizes in _ARRAY.findall(shape))


def num_bytes(shape: str) -> int:
    """Counts the bytes of an array, or of all arrays of a tuple."""
    bits = (
        math.prod(_sizes(sizes)) * _item_bits(dtype)
        for dtype, sizes in _ARRAY.findall(shape)
    )
    return sum(-(-x // 8) for x in bits)


def _item_bits(dtype: str) -> int:
    found = re.match(r"[a-z]+(\d+)", dtype)
    return _ITEM_BITS.get(dtype, int(found[1]) if found else 32)


def _sizes(text: str) -> list[int]:
    return [int(x.lstrip("<=")) for x in text.split(",") if x]


def _dimensions(shape: str) -> list[int]:
    found = _ARRAY.search(shape)
    return _sizes(found[2]) if found else []


def _contracted(text: str, shape: str) -> int:
    """Counts the items that a dot product sums, from the shape of its left operand."""
    found = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([^}\]]*)', text)
    axes = re.findall(r"\d+", found[1]) if found else []
    sizes = _dimensions(shape)
    return math.prod(sizes[int(i)] for i in axes if int(i) < len(sizes))


def _number(text: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", text)
    return int(found[1]) if found else 0


def _results(body: dict[str, Instruction]) -> Iterator[Instruction]:
    """Yields the instructions whose values a fusion returns."""
    root = next((x for x in body.values() if x.is_root), None)
    if root is None:
        return
    names = root.operands if root.opcode == "tuple" else (root.name,)
    for name in names:
        x = body[name]
        while x.opcode in ("bitcast", "copy") and x.operands[0] in body:
            x = body[x.operands[0]]
        yield x


def _read_of(parameter: Instruction, body: dict[str, Instruction]) -> int:
    """Counts the bytes that a fusion reads of an operand."""
    names, users = {parameter.name}, []
    for x in body.values():  # in the order in which they run
        if names & set(x.operands):
            if x.opcode == "bitcast":
                names.add(x.name)
            else:
                users.append(x)
    # Slices read only their part, and an update in place reads nothing of its target;
    # any other use reads the whole operand.
    read = 0
    for x in users:
        if x.opcode in _READS_PART and x.operands[0] in names:
            read += num_bytes(x.shape)
        elif x.opcode not in _WRITES_PART or x.operands[0] not in names:
            return num_bytes(parameter.shape)
    return read


def _written_of(result: Instruction, body: dict[str, Instruction]) -> int:
    """Counts the bytes that a fusion writes of a result."""
    if result.opcode in _WRITES_PART:
        update = result.operands[_WRITES_PART[result.opcode]]
        return num_bytes(body[update].shape)
    return num_bytes(result.shape)

"""Parses XLA's compiled programs: instructions, their names and source lines."""

import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^(ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\((.*)$")
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(
    r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE
)


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
    home: str  # name of the computation that contains it

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
        """Name of the operation in jax, with the scopes around it."""
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
        self.entry, home = "", ""
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                home = match[2]
                self.computations[home] = {}
                self.entry = home if match[1] else self.entry
            elif match := _INSTRUCTION.match(line.strip()):
                root, name, opcode, rest = match.groups()
                # Stop at the parenthesis: attributes after it also contain names.
                operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
                x = Instruction(name, opcode, operands, rest, root is not None, home)
                self.computations[home][name] = self.instructions[name] = x
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
        """Returns jax's name of an operation, or of the last operation in a fusion."""
        fused = self.computations.get(x.attribute("calls"), {})
        names = (y.op_name for y in reversed((*fused.values(), x)))
        return next(filter(None, names), "")

    def root(self, computation: str) -> Instruction | None:
        """Returns the instruction that computes the result of a computation."""
        lines = self.computations.get(computation, {}).values()
        return next((x for x in lines if x.is_root), None)

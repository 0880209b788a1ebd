"""Reads XLA's text into `Block`s: thunk sequences of a GPU, schedules of a TPU."""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rollout.inspection.hlo import Frame, Instruction, Module
from rollout.inspection.report import Block, Kind

_HOLDERS = ("kCommandBuffer", "kSequential", "kConcurrent", "kAsyncStart")
_COLLECTIVES = {
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
}

_THUNK = re.compile(r"^( *)(\d+): (k\w+)")
_SECTION = re.compile(r"^( *)(condition|body|\w*branch\w*):\s*$")

_OWN = f"{Path(__file__).parents[1]}/"
_INSPECTION = f"{Path(__file__).parent}/"
_JAX = tuple(f"{Path(jax.__file__).parents[1] / x}/" for x in ("jax", "jaxlib"))


def read_gpu(text: str, sequence: str, metadata: str) -> Block:
    """Reads the launches of a GPU, in the order in which they run.

    Args:
        text: the compiled program.
        sequence: XLA's dump of its thunks, an indented list.
        metadata: XLA's dump of the instructions that the thunks come from.
    """
    module, names = Module(text), _thunk_names(metadata)

    def read(thunks: Iterable[_Thunk], block: Block, *, in_graph: bool) -> Block:
        """Adds these thunks to an empty block."""
        for thunk, in_this_graph in _unfold(thunks, in_graph):
            x = module.find(names.get(thunk.number, ""))
            if thunk.kind == "kCommandBuffer":
                block = _add(block, graphs=1)
            elif thunk.kind in ("kWhile", "kConditional"):
                block = _add(block, blocks=(read_inner(thunk, x, in_this_graph),))
            else:
                launched = "graph_launches" if in_this_graph else "loose_launches"
                costs = _costs(module, x)
                # The text may not have the instruction.
                costs["collectives"] = _collectives(_opcode(thunk.kind))
                costs["operations"] = ((module.op_name(x) if x else "", 1),)
                block = _add(block, **{launched: 1}, **costs)
        return block

    def read_inner(thunk: _Thunk, x: Instruction | None, in_graph: bool) -> Block:
        if thunk.kind == "kConditional":
            head = _head(module, "conditional", x, asks_host=not in_graph)
            branch = Block(kind="branch")
            parts = (part for _, part in thunk.sections)
            branches = (read(part, branch, in_graph=in_graph) for part in parts)
            return _add(head, blocks=tuple(branches))
        trips = _trips(module, x)
        asks_host = trips is None and not in_graph
        head = _head(module, "loop", x, trips=trips, asks_host=asks_host)
        # With a known number of rounds the predicate is never computed.
        skipped = () if trips is None else ("condition",)
        parts = [part for name, part in thunk.sections if name not in skipped]
        return read([y for part in parts for y in part], head, in_graph=in_graph)

    return read(_nest(sequence), Block(kind="program"), in_graph=False)


def read_tpu(text: str) -> Block:
    """Reads the schedule of a TPU, with the cycles that its compiler estimates."""
    module = Module(text)
    return _read_schedule(module, module.entry, Block(kind="program"))


def find_source(frames: list[Frame]) -> Frame | None:
    """Finds the line to change, among those that an operation comes from.

    That is the innermost line outside of jax. If that line is in this library, but was
    called by foreign code that the library had called, such as an environment, it is
    the line in the foreign code.
    """
    own = [x for x in frames if not x.file.startswith(_JAX)]
    for number, frame in enumerate(own):
        if frame.file.startswith(_OWN):
            continue
        outer = [x for x in own[number + 1 :] if not x.file.startswith(_INSPECTION)]
        if number == 0 or any(x.file.startswith(_OWN) for x in outer):
            return frame
        break
    return own[0] if own else None


class _Thunk(NamedTuple):
    """A unit of work of XLA's runtime for GPUs: a launch, or a container of others."""

    kind: str
    number: int
    indent: int
    # By name, such as "body"; those of a command buffer have none.
    sections: list[tuple[str, list["_Thunk"]]]


def _unfold(thunks: Iterable[_Thunk], in_graph: bool) -> Iterator[tuple[_Thunk, bool]]:
    """Yields every launch, loop, conditional and graph; True for those in a graph."""
    for thunk in thunks:
        if thunk.kind in _HOLDERS:
            is_graph = thunk.kind == "kCommandBuffer"
            if is_graph:
                yield thunk, in_graph
            inner = (x for _, part in thunk.sections for x in part)
            yield from _unfold(inner, in_graph or is_graph)
        elif not thunk.kind.endswith("Done"):
            yield thunk, in_graph


def _nest(sequence: str) -> list[_Thunk]:
    """Reads an indented list of thunks."""
    root = _Thunk("", 0, -1, [("", [])])
    stack = [root]
    for line in sequence.splitlines():
        if found := _SECTION.match(line):
            # The header of a condition is not indented, and follows its loop at once.
            if found[2] != "condition":
                while len(stack) > 1 and stack[-1].indent >= len(found[1]):
                    stack.pop()
            stack[-1].sections.append((found[2], []))
        elif found := _THUNK.match(line):
            indent = len(found[1])
            while stack[-1].indent >= indent:
                stack.pop()
            thunk = _Thunk(found[3], int(found[2]), indent, [])
            if not stack[-1].sections:
                stack[-1].sections.append(("", []))
            stack[-1].sections[-1][1].append(thunk)
            stack.append(thunk)
    return root.sections[0][1]


def _thunk_names(metadata: str) -> dict[int, str]:
    """Maps the number of a thunk to the instruction that it comes from."""
    names = {}
    for part in metadata.split("thunk_metadata {")[1:]:
        number = re.search(r"thunk_id: (\d+)", part)
        name = re.search(r'profile_annotation: "([^"]*)"', part)
        if number and name:
            names[int(number[1])] = name[1]
    return names


def _read_schedule(module: Module, computation: str, head: Block) -> Block:
    block = head
    for x in module.computations.get(computation, {}).values():
        block = _add(block, **_costs(module, x))
        if x.opcode == "while":
            inner = _head(module, "loop", x, trips=_trips(module, x))
            inner = _read_schedule(module, x.attribute("body") or "", inner)
            block = _add(block, blocks=(inner,))
        elif x.opcode == "conditional":
            branch = Block(kind="branch")
            read = (_read_schedule(module, name, branch) for name in x.branches)
            inner = _add(_head(module, "conditional", x), blocks=tuple(read))
            block = _add(block, blocks=(inner,))
        elif x.opcode == "call":
            block = _read_schedule(module, x.attribute("to_apply") or "", block)
    return block


def _add(block: Block, **costs: Any) -> Block:
    """Adds costs, or blocks, to those of a block."""
    added = {name: getattr(block, name) + value for name, value in costs.items()}
    return dataclasses.replace(block, **added)


def _head(module: Module, kind: Kind, x: Instruction | None, **more: Any) -> Block:
    """Makes an empty loop or conditional."""
    if x is None:
        return Block(kind=kind, cause=kind, **more)
    name = x.op_name.rpartition("/")[2] or kind
    if name == "while":  # jax compiles a scan to one, too
        name = "while_loop" if more.get("trips") is None else "scan"
    source = find_source(module.frames(x)) or Frame("", 0)
    return Block(kind=kind, cause=name, file=source.file, line=source.line, **more)


def _costs(module: Module, x: Instruction | None) -> dict[str, Any]:
    """Returns the costs of one instruction, with its collectives and callbacks."""
    if x is None:
        return {}
    costs: dict[str, Any] = {}
    if x.opcode not in ("while", "conditional", "call"):
        costs["flops"] = module.flops(x)
        costs["bytes_moved"] = module.bytes_moved(x)
    cycles = re.findall(r'"estimated_cycles":"(\d+)"', x.text)
    costs["cycles"] = sum(map(int, cycles))
    if cycles:
        costs["operations"] = ((module.op_name(x), costs["cycles"]),)
    # The first match is the estimate of the kernel's cost model; the second, a bound.
    if time := re.search(r'"exec_time_us":([\d.e+\-]+)', x.text):
        costs["seconds"] = 1e-6 * float(time[1])
    costs["collectives"] = _collectives(x.opcode)
    if _is_callback(x):
        source = find_source(module.frames(x)) or Frame("", 0)
        cause = x.op_name.rpartition("/")[2] or x.opcode
        costs["callbacks"] = ((cause, source.file, source.line),)
    return costs


def _collectives(opcode: str) -> tuple[str, ...]:
    name = opcode.removesuffix("-start")
    return (name,) if name in _COLLECTIVES else ()


def _opcode(kind: str) -> str:
    """Converts the kind of a thunk to an opcode: kAllReduce to all-reduce."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind[1:]).lower()


def _is_callback(x: Instruction) -> bool:
    """Returns whether an instruction sends to the host; its answer does not count."""
    is_sent = x.opcode == "send" and "is_host_transfer=true" in x.text
    return is_sent or x.opcode in ("infeed", "outfeed")


def _trips(module: Module, x: Instruction | None) -> int | None:
    """Finds the rounds of a loop, if XLA states them or it counts to a constant."""
    if x is None:
        return None
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', x.text):
        return int(known[1])
    condition = module.computations.get(x.attribute("condition") or "", {})
    body = module.computations.get(x.attribute("body") or "", {})
    end = next((y for y in condition.values() if y.is_root), None)
    if end is None or end.opcode != "compare" or "direction=LT" not in end.text:
        return None
    # The condition is `counter < constant`, where the counter is an item of the loop's
    # tuple that starts at a constant and grows by one.
    counter, limit = (_resolve(condition, name) for name in end.operands)
    index, last = _index(counter), _constant(limit)
    start = _constant(_item(module.computations[x.home], x.operands[0], index))
    root = next((y.name for y in body.values() if y.is_root), "")
    if last is None or start is None or not _adds_one(body, root, index):
        return None
    return max(0, last - start)


def _resolve(lines: dict[str, Instruction], name: str) -> Instruction | None:
    """Returns the instruction of this name, or the one that it copies."""
    x = lines.get(name)
    while x is not None and x.opcode in ("copy", "bitcast"):
        x = lines.get(x.operands[0])
    return x


def _item(
    lines: dict[str, Instruction], name: str, index: int | None
) -> Instruction | None:
    """Returns the instruction that computes an item of a tuple."""
    x = lines.get(name)
    if x is None or x.opcode != "tuple" or index is None:
        return None
    return _resolve(lines, x.operands[index])


def _index(x: Instruction | None) -> int | None:
    if x is None or x.opcode != "get-tuple-element":
        return None
    found = re.search(r"index=(\d+)", x.text)
    return int(found[1]) if found else None


def _constant(x: Instruction | None) -> int | None:
    found = re.match(r"(-?\d+)\)", x.text) if x and x.opcode == "constant" else None
    return int(found[1]) if found else None


def _adds_one(body: dict[str, Instruction], root: str, index: int | None) -> bool:
    """Returns whether a loop's body adds one to an item of its tuple."""
    x = _item(body, root, index)
    if x is None or x.opcode != "add":
        return False
    parts = [_resolve(body, name) for name in x.operands]
    return index in map(_index, parts) and 1 in map(_constant, parts)

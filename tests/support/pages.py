"""Runs the code of documentation pages as a reader would run it."""

import ast
import functools
import importlib.util
import json
import math
import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
MARK = "\0"  # printed between the blocks of a page
NUMBER = re.compile(r"\bnan\b|-?\d[\d,]*(?:\.\d*)?(?:e[+-]?\d+)?")


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def program(text: str) -> str:
    """Returns the code of a page. It prints a mark between the blocks."""
    return f"print({MARK!r}, end='')\n".join(blocks(text))


def inject(program: str, line: str) -> str:
    """Inserts `line` after the statement that assigns the first constant in it."""
    match, lines = re.match(r"\w+", line), program.splitlines(keepends=True)
    assert match
    for node in (x for x in ast.parse(program).body if isinstance(x, ast.Assign)):
        targets = " ".join(map(ast.unparse, node.targets))
        if re.search(rf"\b{match[0]}\b", targets):
            lines.insert(node.end_lineno or 0, f"{line}\n")
            return "".join(lines)
    raise ValueError(f"no statement assigns `{match[0]}`")


def run(name: str, *programs: str) -> dict:
    """Runs programs in sequence in one new namespace; returns the namespace."""
    names = {"__name__": "__main__"}
    for code in programs:
        exec(compile(code, name, "exec"), names)
    return names


@functools.cache
def machine() -> str:
    """Describes this machine and its versions, as the records of results do."""
    path = ROOT / "benchmarks" / "harness.py"
    spec = importlib.util.spec_from_file_location("benchmarks_harness", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.machine()


def tolerance_here(page: str) -> float:
    """Returns 0 on a machine like the one that regenerated a page, otherwise infinity.

    Other processors and versions round differently.
    """
    records = json.loads((ROOT / "docs" / "regenerated.json").read_text())
    return 0.0 if records[page]["machine"] == machine() else math.inf


def check_printed(text: str, out: str, tolerance: float) -> None:
    """Compares each `text` block after a Python block with the output of the block.

    Args:
        text: the page.
        out: output of `program(text)`.
        tolerance: largest difference of two numbers, absolute or relative. If it is 0,
            outputs must be equal. If it is infinite, only words are compared, and
            repeated lines and arrays may have any length.
    """
    pattern = r"```python\n.*?```(?:\n\n(```text\n.*?)```)?"
    for block, output in zip(
        re.findall(pattern, text, re.DOTALL), out.split(MARK), strict=True
    ):
        expected = block.removeprefix("```text\n")
        if not block:
            continue
        if tolerance == 0:
            assert output == expected
            continue
        pair = [re.sub(r"[\d,]+ steps/s", "steps/s", x) for x in (output, expected)]
        if tolerance < np.inf:
            values = [
                [float(x.replace(",", "")) for x in NUMBER.findall(y)] for y in pair
            ]
            np.testing.assert_allclose(*values, rtol=tolerance, atol=tolerance)
        words, expected_words = map(_words, pair)
        assert words == expected_words


def _words(output: str) -> list[str]:
    """Returns the distinct lines of an output, with `#` instead of numbers."""
    words = re.sub(r"#(\s+#)+", "#", NUMBER.sub("#", output))
    words = re.sub(r"\[\s+", "[", words)
    words = re.sub(r"\s+\]", "]", words)
    return list(dict.fromkeys(" ".join(x.split()) for x in words.splitlines()))

"""The code of pages of the documentation, run as a reader would run it."""

import ast
import re

import numpy as np

MARK = "\0"  # printed between the blocks of a page
NUMBER = re.compile(r"\bnan\b|-?\d[\d,]*(?:\.\d*)?(?:e[+-]?\d+)?")


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def program(text: str) -> str:
    """Returns the code of a page. It prints a mark between the blocks."""
    return f"print({MARK!r}, end='')\n".join(blocks(text))


def inject(program: str, line: str) -> str:
    """Sets constants anew, right after the statement that sets the first of them."""
    name, lines = re.match(r"\w+", line).group(), program.splitlines(keepends=True)
    for node in (x for x in ast.parse(program).body if isinstance(x, ast.Assign)):
        if re.search(rf"\b{name}\b", ast.unparse(node.targets)):
            lines.insert(node.end_lineno, f"{line}\n")
            return "".join(lines)
    raise ValueError(f"no statement sets `{name}`")


def run(name: str, *programs: str) -> dict:
    """Runs programs one after another, in one namespace of their own."""
    names = {"__name__": "__main__"}
    for code in programs:
        exec(compile(code, name, "exec"), names)
    return names


def check_printed(text: str, out: str, tolerance: float) -> None:
    """Compares each `text` block after a Python block with the output of the block.

    Args:
        text: the page.
        out: output of `program(text)`.
        tolerance: largest difference of two numbers, absolute or relative. With 0, the
            outputs are equal. If infinite, only the words are compared, and repeated
            lines and arrays may have any length.
    """
    pattern = r"```python\n.*?```(?:\n\n(```text\n.*?)```)?"
    for block, printed in zip(
        re.findall(pattern, text, re.DOTALL), out.split(MARK), strict=True
    ):
        shown = block.removeprefix("```text\n")
        if not block:
            continue
        if tolerance == 0:
            assert printed == shown
            continue
        pair = [re.sub(r"[\d,]+ steps/s", "steps/s", x) for x in (printed, shown)]
        if tolerance < np.inf:
            values = [
                [float(x.replace(",", "")) for x in NUMBER.findall(y)] for y in pair
            ]
            np.testing.assert_allclose(*values, rtol=tolerance, atol=tolerance)
        got, want = map(_words, pair)
        assert got == want


def _words(printed: str) -> list[str]:
    """The lines of an output without numbers, each kind of line once."""
    words = re.sub(r"#(\s+#)+", "#", NUMBER.sub("#", printed))
    words = re.sub(r"\[\s+", "[", words)
    words = re.sub(r"\s+\]", "]", words)
    return list(dict.fromkeys(" ".join(x.split()) for x in words.splitlines()))

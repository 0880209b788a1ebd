"""The code of pages of the documentation, run as a reader would run it."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(name: str, *programs: str) -> dict:
    """Runs programs one after another, in one namespace of their own."""
    if str(ROOT / "docs/recipes") not in sys.path:
        sys.path.insert(0, str(ROOT / "docs/recipes"))
    names = {"__name__": "__main__"}
    for code in programs:
        exec(compile(code, name, "exec"), names)
    return names

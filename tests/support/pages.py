"""The code of pages of the documentation, run as a reader would run it."""

import pathlib
import re
import sys

# Programs import `ppo`, which a reader has saved beside them.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "docs" / "recipes"))


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(name: str, *programs: str) -> dict:
    """Runs programs one after another, in one namespace of their own."""
    names = {"__name__": "__main__"}
    for code in programs:
        exec(compile(code, name, "exec"), names)
    return names

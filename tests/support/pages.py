"""The code of pages of the documentation, run as a reader would run it."""

import ast
import re


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


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

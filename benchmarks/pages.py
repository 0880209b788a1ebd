"""Regenerates the printed results and the pictures of the programs on the pages.

    python benchmarks/pages.py                       # README and all pages
    python benchmarks/pages.py docs/tutorial.md      # one page

The Python blocks of a page run as one program with the numbers of the page, in a new
process and a temporary folder. If a `text` block directly follows a Python block, the
output of the Python block replaces it. A picture that the program saves under a name
that the page shows replaces the picture next to the page.

Other commands create the remaining pictures, for example curves over several seeds.
`README.md` of this folder lists these files, and `charts.py` plots `NAME.png` from
`NAME.json`. The script does not replace them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
MARK = "\0"  # printed between the blocks of a program


def run(program: str, folder: Path) -> str:
    """Runs a program in a new process; returns its output.

    The program is passed as standard input, because a worker process imports the main
    module of its parent if the module is a file, which would run the program again.
    """
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"PYTHONPATH": paths, "MPLBACKEND": "agg"}
    command = [sys.executable, "-"]
    options = {"cwd": folder, "env": environ, "check": True, "text": True}
    return subprocess.run(
        command, input=program, stdout=subprocess.PIPE, **options
    ).stdout


def with_outputs(text: str, outputs: list[str]) -> str:
    """Replaces the `text` blocks of a page by the outputs of the Python blocks."""
    output_iter = iter(outputs)

    def replace(block: re.Match) -> str:
        code, output = block[1], next(output_iter)
        if block[2] is None:
            return block[0]
        return f"```python\n{code}```\n\n```text\n{output}```"

    return BLOCK.sub(replace, text)


def pictures(page: Path, text: str, program: str) -> list[str]:
    """Lists the pictures of a page that only its program saves."""
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    return [
        name
        for name in re.findall(r"\]\((\w+\.(?:png|gif))\)", text)
        if f'"{name}"' in program
        and not (page.parent / name).with_suffix(".json").exists()
        and not re.search(rf"/{re.escape(name)}`", readme)
    ]


def regenerate(page: Path) -> None:
    """Runs the program of a page and replaces the results on the page."""
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    program = f"print({MARK!r}, end='')\n".join(x[1] for x in blocks)
    names = pictures(page, text, program)
    if not (names or any(x[2] is not None for x in blocks)):
        return  # no results
    print(f"{page} ...", end=" ", flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outputs = run(program, Path(folder)).split(MARK)
        for name in names:
            shutil.copy(Path(folder, name), page.parent / name)
    page.write_text(with_outputs(text, outputs))
    print(f"{time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    """Regenerates the results of all pages or of the given pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path)
    pages = parser.parse_args().pages
    failures = []
    for page in pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        try:
            regenerate(page)
        except subprocess.CalledProcessError:
            failures.append(str(page))
    if failures:
        sys.exit(f"programs that failed: {', '.join(failures)}")


if __name__ == "__main__":
    main()

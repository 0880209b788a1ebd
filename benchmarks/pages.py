"""Regenerates the outputs of programs in the README, the pages and the notebooks.

    python benchmarks/pages.py                       # README and all pages
    python benchmarks/pages.py docs/tutorial.md      # one page
    python benchmarks/pages.py notebooks/*.ipynb     # notebooks

The Python blocks of a page run as one program with the numbers of the page, in a new
process and a temporary folder. If a `text` block directly follows a Python block, the
output of the Python block replaces it. A picture that the program saves under a name
that the page shows replaces the picture next to the page. A notebook runs in a
temporary folder and is saved with its outputs.

If a program or its outputs changed, `docs/regenerated.json` gets a new record of the
machine, the date and the commit, with a digest of the program and the outputs.

Other commands create the remaining pictures, for example curves over several seeds.
`README.md` of this folder lists these files, and `charts.py` plots `NAME.png` from
`NAME.json`. The script does not replace them.
"""

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from harness import ROOT, dump, record
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
SPEED = re.compile(r"[\d,]+ steps/s|compiled in [\d.]+ s")
MARK = "\0"  # printed between the blocks of a program
RECORDS = ROOT / "docs" / "regenerated.json"
# Pictures of pages that are the first picture of a notebook.
FROM_NOTEBOOKS = {
    "07_why_endings_matter.ipynb": ROOT / "docs" / "why_endings_matter.png"
}


def environment() -> dict[str, str]:
    """Returns environment variables with which programs import this repository."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": paths}


def run(program: str, folder: Path) -> str:
    """Runs a program in a new process; returns its output.

    The program is passed as standard input, because a worker process imports the main
    module of its parent if the module is a file, which would run the program again.
    """
    environ = environment() | {"MPLBACKEND": "agg"}
    command = [sys.executable, "-"]
    options = {"cwd": folder, "env": environ, "check": True, "text": True}
    return subprocess.run(
        command, input=program, stdout=subprocess.PIPE, **options
    ).stdout


def with_outputs(text: str, outputs: list[str]) -> str:
    """Replaces the `text` blocks of a page by the outputs of the Python blocks.

    A block that differs only in speeds stays, because every run has other speeds.
    """
    output_iter = iter(outputs)

    def replace(block: re.Match) -> str:
        code, output = block[1], next(output_iter)
        if block[2] is None or SPEED.sub("", output) == SPEED.sub("", block[2]):
            return block[0]
        return f"```python\n{code}```\n\n```text\n{output}```"

    return BLOCK.sub(replace, text)


def program_of(text: str) -> str:
    """Returns the program of a page. It prints a mark between its blocks."""
    return f"print({MARK!r}, end='')\n".join(x[1] for x in BLOCK.finditer(text))


def pictures(page: Path, text: str) -> list[Path]:
    """Lists the pictures of a page that only its program saves."""
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    program = program_of(text)
    return [
        page.parent / name
        for name in re.findall(r"\]\((\w+\.(?:png|gif))\)", text)
        if f'"{name}"' in program
        and not (page.parent / name).with_suffix(".json").exists()
        and not re.search(rf"/{re.escape(name)}`", readme)
    ]


def digest(path: Path) -> str | None:
    """Returns a hash of a program and its outputs, or None if it has no outputs."""
    if path.suffix == ".ipynb":
        notebook = nbformat.read(path, as_version=4)
        cells = [x for x in notebook.cells if x.cell_type == "code"]
        parts = [json.dumps([x.source, x.outputs], sort_keys=True) for x in cells]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    text = path.read_text()
    blocks, shown = BLOCK.findall(text), pictures(path, text)
    if not (shown or any("```text" in x[0] for x in BLOCK.finditer(text))):
        return None
    images = (x.read_bytes() for x in shown if x.exists())  # a new one does not exist
    parts = [json.dumps(blocks).encode(), *images]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def save_record(path: Path) -> None:
    """Updates the record of a page or a notebook, if its digest changed."""
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    path = path.resolve()
    if not path.is_relative_to(ROOT):
        return  # a file of a user
    name, new = path.relative_to(ROOT).as_posix(), digest(path)
    if records.get(name, {}).get("digest") != new:
        records[name] = {**record(), "digest": new}
        RECORDS.write_text(dump(dict(sorted(records.items()))))


def regenerate_page(page: Path) -> None:
    """Runs the program of a page and replaces the results on the page."""
    text = page.read_text()
    with tempfile.TemporaryDirectory() as folder:
        outputs = run(program_of(text), Path(folder)).split(MARK)
        for picture in pictures(page, text):
            shutil.copy(Path(folder, picture.name), picture)
    page.write_text(with_outputs(text, outputs))


def regenerate_notebook(path: Path) -> None:
    """Runs a notebook and saves it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=None,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute(cleanup_kc=True, env=environment())
    for cell in notebook.cells:  # without warnings about the machine
        if "outputs" in cell:
            cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
    nbformat.write(notebook, path)
    if path.name in FROM_NOTEBOOKS:
        outputs = [x for cell in notebook.cells for x in cell.get("outputs", [])]
        images = (x["data"].get("image/png") for x in outputs if "data" in x)
        first = next(x for x in images if x)
        FROM_NOTEBOOKS[path.name].write_bytes(base64.b64decode(first))


def main() -> None:
    """Regenerates the results of all pages, or of the given pages and notebooks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path)
    paths = parser.parse_args().paths
    failures = []
    for path in paths or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if digest(path) is None:
            continue
        print(f"{path} ...", end=" ", flush=True)
        start = time.perf_counter()
        is_notebook = path.suffix == ".ipynb"
        try:
            (regenerate_notebook if is_notebook else regenerate_page)(path)
        except (subprocess.CalledProcessError, CellExecutionError) as error:
            print(error)
            failures.append(str(path))
            continue
        save_record(path)
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
    if failures:
        sys.exit(f"programs that failed: {', '.join(failures)}")


if __name__ == "__main__":
    main()

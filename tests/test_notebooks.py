"""Tests that notebooks run and contain their outputs."""

import os
import pathlib
import re
import sys

import nbformat
import pytest
from compiles import QUICK_FLAGS
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 400_000  # every clone downloads them
TIMEOUT = 300  # seconds per cell; whole notebooks take well under a minute
# Constants by notebook, set after the cell with the tag "parameters". Cells with the
# tag "learning" make claims about long training and are skipped.
CHANGES = {
    "00": {"NUM_UPDATES": 2},
    "03": {
        "INTERRUPTED_STEPS": 1_000,
        "KILLED_STEPS": 7_168,  # checkpoints, and a kill after 5
        "NUM_TIMED": 2,
        "TIMED_STEPS": 16,
        "PROFILED": ["CartPole-v1"],
    },
    "04": {"NUM_UPDATES": 2, "NUM_SEEDS": 2},
    "05": {"TOTAL_STEPS": 4096, "NUM_SEEDS": 2},
    "06": {"NUM_UPDATES": 20, "NUM_SNAPSHOTS": 4, "NUM_SEEDS": 1},
    "07": {"NUM_UPDATES": 2},
    "08": {
        **{"NAMES": ["CartPole-v1"], "NUM_ENVS": [16, 64], "NUM_REPEATS": 1},
        **{"GAMES": ["CartPole-v1"], "CHARTED": ["CartPole-v1"]},
        **{"LANES": 64, "SIZES": [64, 128], "PADDED": [64]},
    },
    "09": {
        **{"NUM_UPDATES": 2, "NUM_SEEDS": 1},
        **{"DEVICES": [8], "SIZES": [128], "REPEATS": 1},
    },
    "10": {
        **{"NUM_SEEDS": 1, "NUM_GAMES": 64, "NUM_JUDGED": 180},
        **{"TOTAL_STEPS": 14_000, "NUM_ENVS": 32, "KEEP_EVERY": 1},
    },
    "11": {"NUM_SEEDS": 1, "NUM_UPDATES": 2, "NUM_ROWS": 60, "NUM_MEASURED": 160},
    "12": {"NUM_SEEDS": 1, "TOTAL_STEPS": 2_000, "NUM_MOMENTS": 3},
}

# These notebooks train for long even with the changes: mark `very_slow`.
LONG = ("00", "02", "03", "04", "05", "06", "09", "10", "11", "12")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def kernel_manager() -> AsyncKernelManager:
    """Makes a manager whose kernel is the interpreter that runs this test.

    The manager searches no directories, so "python3" is `sys.executable`. An installed
    spec with this name may be another interpreter.
    """
    specs = KernelSpecManager(kernel_dirs=[])
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    assert manager.kernel_spec.argv[0] == sys.executable
    return manager


def outputs(path: pathlib.Path) -> list[nbformat.NotebookNode]:
    cells = nbformat.read(path, as_version=4).cells
    return [output for cell in cells for output in cell.get("outputs", [])]


def reduce_constants(path: pathlib.Path, notebook: nbformat.NotebookNode) -> None:
    """Reduces constants of a notebook, such as the number of updates."""
    tags = [cell.metadata.get("tags", []) for cell in notebook.cells]
    cells = zip(notebook.cells, tags, strict=True)
    notebook.cells = [cell for cell, tag in cells if "learning" not in tag]
    if smaller := CHANGES.get(path.stem[:2]):
        index = tags.index(["parameters"])
        assert all(name in notebook.cells[index].source for name in smaller)
        source = "\n".join(f"{name} = {value!r}" for name, value in smaller.items())
        notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(source))


@each_notebook
def test_notebook_states_packages_and_duration(path):
    first = nbformat.read(path, as_version=4).cells[0].source
    assert "pip install" in first
    assert re.search(r"\d+\s+(seconds|minutes?)", first)


@each_notebook
def test_pictures_have_alternative_texts(path):
    for cell in nbformat.read(path, as_version=4).cells:
        types = {type_ for x in cell.get("outputs", []) for type_ in x.get("data", {})}
        if types & {"image/png", "image/gif"}:
            assert cell.metadata.get("alt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(x, marks=[pytest.mark.very_slow] * x.stem.startswith(LONG))
        for x in NOTEBOOKS
        if not x.stem.startswith("08")  # the next test runs it
    ],
    ids=lambda path: path.stem,
)
def test_notebook_runs(path, tmp_path):
    run(path, tmp_path)


@pytest.mark.slow
@pytest.mark.compiles_for("h100", "v5e")
def test_notebook_on_profiling_runs(tmp_path):
    (path,) = (path for path in NOTEBOOKS if path.stem.startswith("08"))
    run(path, tmp_path)


def run(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    reduce_constants(path, notebook)
    client = NotebookClient(
        notebook,
        km=kernel_manager(),
        timeout=TIMEOUT,
        # The kernel writes to a temporary directory.
        resources={"metadata": {"path": str(tmp_path)}},
    )
    packages = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # The result must not depend on the user's IPython profile.
    environ = {**os.environ, "PYTHONPATH": packages, "IPYTHONDIR": str(tmp_path)}
    # Compilation takes most of the time, and no test depends on speed or on exact bits.
    environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}"
    client.execute(cleanup_kc=True, env=environ)  # raises the error of a cell

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


@each_notebook
def test_notebook_is_saved_with_its_outputs(path):
    saved = outputs(path)

    assert any("image/png" in output.get("data", {}) for output in saved)
    assert not [output for output in saved if output.output_type == "error"]
    assert not [output for output in saved if output.get("name") == "stderr"]


@each_notebook
def test_notebook_is_small_and_contains_no_local_paths(path):
    assert path.stat().st_size < MAX_BYTES
    texts = [str(output) for output in outputs(path)]
    folders = ("/home/", "/root/", "/tmp/", "/Users/", "site-packages")
    assert not [folder for folder in folders if any(folder in x for x in texts)]

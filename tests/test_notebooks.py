"""Every notebook runs from top to bottom, and is committed with its outputs."""

import os
import pathlib
import sys

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 400_000  # every clone downloads them
TIMEOUT = 300  # seconds per cell; whole notebooks take well under a minute
SMALL_BUDGET = "0.02"  # of the training steps; claims about learning are then left out

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def kernel_manager() -> AsyncKernelManager:
    """Makes a manager whose kernel is the interpreter that runs this test.

    Without directories to search, "python3" is what ipykernel says of itself, which is
    `sys.executable`; an installed spec of that name may be another interpreter.
    """
    specs = KernelSpecManager(kernel_dirs=[])
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    assert manager.kernel_spec.argv[0] == sys.executable
    return manager


def outputs(path: pathlib.Path) -> list[nbformat.NotebookNode]:
    cells = nbformat.read(path, as_version=4).cells
    return [output for cell in cells for output in cell.get("outputs", [])]


def spend_little(notebook: nbformat.NotebookNode) -> None:
    """Lowers the budget of a notebook that trains, which its first cell sets."""
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source = first.source.replace("BUDGET = 1.0", f"BUDGET = {SMALL_BUDGET}")


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@each_notebook
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    spend_little(notebook)
    client = NotebookClient(
        notebook,
        km=kernel_manager(),
        timeout=TIMEOUT,
        # The kernel starts in a directory of its own, so that it writes nothing here.
        resources={"metadata": {"path": str(tmp_path)}},
    )
    packages = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Nothing of the user's IPython profile may decide whether the notebook runs.
    environ = {**os.environ, "PYTHONPATH": packages, "IPYTHONDIR": str(tmp_path)}
    # Most of the time is compiling, and nothing here asks how fast the code is that
    # comes out, nor for its last bit.
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
    environ["XLA_FLAGS"] = " ".join(flags)
    client.execute(cleanup_kc=True, env=environ)  # raises what a cell raises

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


@each_notebook
def test_notebook_is_saved_with_its_outputs(path):
    saved = outputs(path)

    assert any("image/png" in output.get("data", {}) for output in saved)
    assert not [output for output in saved if output.output_type == "error"]
    assert not [output for output in saved if output.get("name") == "stderr"]


@each_notebook
def test_notebook_is_small_and_names_no_folder_of_a_machine(path):
    assert path.stat().st_size < MAX_BYTES
    texts = [str(output) for output in outputs(path)]
    folders = ("/home/", "/root/", "/tmp/", "/Users/", "site-packages")
    assert not [folder for folder in folders if any(folder in x for x in texts)]

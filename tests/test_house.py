"""The house: who imports whom, and what an import costs."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("buffers", "envs", "rollout")


@pytest.mark.parametrize("package", ["rollout", "buffers", "envs"])
def test_import_does_not_load_gymnax(package):
    code = (
        f"import sys, {package}; print(sorted({{name.split('.')[0] for name in "
        "sys.modules} & {'gymnax', 'gymnasium', 'matplotlib', 'minari', 'orbax', "
        "'tqdm'}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_import_does_not_start_the_backend():
    """The XLA loop flag can still be set after an import."""
    code = (
        "import rollout; from jax._src import xla_bridge as b; print(len(b._backends))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.stdout.strip() == "0", run.stderr


def imports(path):
    """Modules a file imports; `from envs import keys` counts as `envs.keys`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def ours(path):
    return {name for name in imports(path) if name.split(".")[0] in PACKAGES}


def test_packages_import_only_what_they_may():
    for path in sorted((ROOT / "rollout").rglob("*.py")):
        if path.parent.name != "cli":
            others = {name for name in ours(path) if not name.startswith("rollout")}
            assert others <= {"envs.types", "envs.keys"}, path
    for package in ("buffers", "envs"):
        for path in sorted((ROOT / package).rglob("*.py")):
            assert all(name.startswith(package) for name in ours(path)), path


@pytest.mark.parametrize("package", ["rollout", "buffers", "envs"])
def test_all_is_alphabetical_and_documented(package):
    module = __import__(package)
    # As ruff sorts it: constants, then classes, then functions.
    kind = lambda name: (not name.isupper(), name[0].islower(), name)  # noqa: E731
    assert module.__all__ == sorted(set(module.__all__), key=kind)
    for name in module.__all__:
        value = getattr(module, name)
        assert not callable(value) or value.__doc__

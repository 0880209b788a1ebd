"""The house: who imports whom, and what an import costs."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("package", ["rollout", "buffers", "envs"])
def test_import_does_not_load_gymnax(package):
    code = (
        f"import sys, {package}; print(sorted({{name.split('.')[0] for name in "
        "sys.modules} & {'gymnax', 'gymnasium', 'matplotlib', 'tqdm'}))"
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
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_packages_import_only_what_they_may():
    for path in sorted((ROOT / "rollout").glob("*.py")):
        if path.name in ("__main__.py", "stream.py"):
            continue
        names = {name for name in imports(path) if name.split(".")[0] == "envs"}
        allowed = ("envs", "envs.types", "envs.keys")
        assert all(name in allowed or name.startswith("envs.types.") for name in names)
        assert "buffers" not in {name.split(".")[0] for name in imports(path)}
    for path in sorted((ROOT / "buffers").glob("*.py")):
        assert not {"envs", "rollout"} & {n.split(".")[0] for n in imports(path)}
    for path in sorted((ROOT / "envs").glob("*.py")):
        assert not {"buffers", "rollout"} & {n.split(".")[0] for n in imports(path)}


@pytest.mark.parametrize("package", ["rollout", "buffers", "envs"])
def test_all_is_alphabetical_and_documented(package):
    module = __import__(package)
    assert module.__all__ == sorted(module.__all__, key=lambda n: (n.islower(), n)) or (
        sorted(module.__all__) == sorted(set(module.__all__))
    )
    for name in module.__all__:
        value = getattr(module, name)
        assert not callable(value) or value.__doc__

"""The house: who imports whom, and what an import costs."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("buffers", "envs", "rollout")
MOST_FLOORS = 12
# A room of `rollout` imports from those above it only; within one there is no circle.
LADDER = (
    {"types", "siblings", "processes", "unrolling"},
    {"finite", "checks"},
    {"stats", "trajectories", "checkpoint", "targets", "minibatches"},
    {"policies"},
    {"kernel"},
    {"collector"},
    {"hosts"},
    {"agents", "devices", "evaluation", "profiling", "recommendation"}
    | {"recording", "stream"},
    {"inspection"},
    {"cli"},
    {"__main__"},
)

# What `rollout` may import of `envs`: the contract, and shared means.
COMMON = {"envs.types", "envs.keys", "envs.few_lanes", "envs.checks", "envs.spaces"}
# Packages that know more of environments than the contract, and what.
KINDS = {
    "agents": {"envs.multi_agent"},
    "hosts": {
        "envs.host.claims",
        "envs.host.guard",
        "envs.host.probe",
        "envs.host.types",
    },
    "recommendation": {"envs.wrappers"},
    "recording": {"envs.host.claims", "envs.host.types", "envs.render"},
}


def read_modules():
    """Every module by its name, with the modules of ours that it imports."""
    files = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            files[name] = ast.parse(path.read_text())
    return {name: set(imports(tree, files)) - {name} for name, tree in files.items()}


def imports(tree, names):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in names else node.module


MODULES = read_modules()


def room(name):
    """The part of `rollout` that a module belongs to."""
    return name.split(".")[1]


def of(package):
    return {name: used for name, used in MODULES.items() if name.startswith(package)}


def floor(name, below=()):
    """The longest way down from a module; a circle fails the test."""
    assert name not in below, f"a circle: {[*below, name]}"
    lower = [floor(used, (*below, name)) for used in MODULES[name]]
    return 1 + max(lower, default=0)


def test_every_module_that_pickles_stands_on_the_page():
    pattern = re.compile(r"^\s*(?:import|from) (?:cloud)?pickle\b", re.M)
    paths = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if pattern.search(path.read_text())
    }
    page = (ROOT / "docs" / "streaming.md").read_text()
    assert found == set(re.findall(r"^\| `(\S+\.py)` \|", page, re.M))


def test_there_is_no_circle_and_there_are_few_floors():
    assert max(map(floor, MODULES)) <= MOST_FLOORS


def test_rooms_of_rollout_stand_on_the_ladder():
    step = {name: number for number, names in enumerate(LADDER) for name in names}
    for name, used in of("rollout.").items():
        others = {x for x in used if x.startswith("rollout.") and room(x) != room(name)}
        for other in others:
            assert step[room(other)] < step[room(name)], (name, other)
        # The package itself re-exports all of them.
        assert name == "rollout.cli" or "rollout" not in used, name


def test_packages_import_only_what_they_may():
    for name, used in MODULES.items():
        others = {x for x in used if x.split(".")[0] != name.split(".")[0]}
        if name.startswith("rollout.cli"):
            continue
        allowed = COMMON if name.startswith("rollout") else set()
        if name == "rollout":  # which re-exports them
            allowed = {"envs", "buffers"}
        for kind, own in KINDS.items():
            if name.startswith(f"rollout.{kind}"):
                allowed = allowed | own
        assert others <= allowed, name


def imported_by(package):
    """What third-party packages an import of ours loads, in a process of its own."""
    code = f"import sys, {package}; print(*{{x.split('.')[0] for x in sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_import_loads_no_package_that_is_not_always_needed(package):
    costly = {"gymnax", "gymnasium", "matplotlib", "minari", "orbax", "tqdm"}
    costly |= {"brax", "craftax", "jaxmarl", "jumanji", "mujoco", "mujoco_playground"}
    costly |= {"navix", "pandas", "pgx", "ray", "xminigrid"}
    others = set(PACKAGES) - {package} - ({"envs"} if package == "rollout" else set())
    assert not imported_by(package) & (costly | others)


def test_import_does_not_start_the_backend():
    """The XLA loop flag can still be set after an import."""
    code = (
        "import rollout; from jax._src import xla_bridge as b; print(len(b._backends))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.stdout.strip() == "0", run.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_alphabetical_and_documented(package):
    module = __import__(package)
    # As ruff sorts it: constants, then classes, then functions.
    kind = lambda name: (not name.isupper(), name[0].islower(), name)  # noqa: E731
    assert module.__all__ == sorted(set(module.__all__), key=kind)
    for name in module.__all__:
        value = getattr(module, name)
        assert not callable(value) or value.__doc__


def test_own_module_that_hides_one_of_ours_is_named(tmp_path):
    (tmp_path / "envs.py").write_text("")
    command = [sys.executable, "-c", "import rollout"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "`envs` must be the package that comes with `rollout`" in done.stderr
    assert str(tmp_path / "envs.py") in done.stderr


def test_one_import_reaches_all_three_packages():
    import buffers
    import envs
    import rollout

    assert rollout.envs is envs
    assert rollout.buffers is buffers
    with pytest.raises(AttributeError, match="no attribute 'buffer'"):
        _ = rollout.buffer


def test_own_buffers_are_named_when_ours_are_read(tmp_path):
    """Not before: a project may have its own `buffers.py` and not need ours."""
    (tmp_path / "buffers.py").write_text("")
    code = "import buffers, rollout; print(len(dir(buffers)) < 20); rollout.buffers"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    assert "`buffers` must be the package that comes with `rollout`" in done.stderr


# Of NumPy's and jax's kind, and what tests of suites read of these.
OTHERS_PRIVATE = {
    *("_asdict", "_backends", "_board", "_cache_size", "_exit", "_fields"),
    *("_mjx_model", "_observe", "_replace", "_src", "_x"),
}


def test_no_test_reads_what_is_private():
    folder = ROOT / "tests"
    for path in {*folder.rglob("*.py")} - {*(folder / "benchmarks").rglob("*.py")}:
        for node in ast.walk(ast.parse(path.read_text())):
            found = {x for x in names_read(node) if re.match("_[^_]", x)}
            assert found <= OTHERS_PRIVATE, f"{path}:{node.lineno}"


def names_read(node):
    """The names that an import or an attribute reads, but not those of `self`."""
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    is_own = isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
        "self",
        "cls",
        "super()",
    )
    return [node.attr] if isinstance(node, ast.Attribute) and not is_own else []

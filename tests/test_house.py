"""Tests of imports between packages, and of the cost of an import."""

import ast
import functools
import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Folders of the repository; `rollout` has links to the other two.
FOLDERS = {"buffers": "rollout.buffers", "envs": "rollout.envs", "rollout": "rollout"}
PACKAGES = tuple(FOLDERS.values())
# A package or module imports from those above it only, without a circle within one.
LADDER = (
    {"base", "version"},
    {"envs"},
    {"types"},
    {"buffers", "stats", "trajectories", "checkpoint", "targets", "minibatches"}
    | {"distributions"},
    {"policies", "networks"},
    {"kernel", "normalization"},
    {"collector"},
    {"host", "sharding"},
    {"logs", "agents"},
    {"evaluation", "gif", "env_checker", "profiling", "recommendation"}
    | {"stream", "training"},
    {"inspection"},
    {"cli"},
    {"__main__"},
)
# The contracts of environments, which every package may import.
CONTRACTS = {"envs.types", "envs.spaces", "envs.auto_reset"}
# Packages that import more of environments than the contract.
KINDS = {
    "agents": {"envs.multi_agent"},
    "host": {
        "envs.host.arrays",
        "envs.host.env_checks",
        "envs.host.workers",
        "envs.host.types",
    },
    "env_checker": {"envs"},
    "kernel": {"envs.multi_agent"},
    "networks": {"envs.wrappers"},
    "recommendation": {"envs.wrappers"},
    "sharding": {"envs.wrappers.wrapper", "envs.vectorize"},
    "training": {"envs.host.types", "envs.multi_agent"},
    "gif": {"envs.host.types", "envs.host.wrappers", "envs.render"},
    "profiling": {"envs.host.wrappers"},
    "cli": {"envs"},
}


@functools.cache
def read_modules():
    """Every module by its name, with the modules of ours that it imports."""
    files = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "recipes" in path.parts:  # programs of a user
                continue
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            files[".".join([package, *parts])] = ast.parse(path.read_text())
    return {name: set(imports(tree, files)) - {name} for name, tree in files.items()}


def imports(tree, names):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in names else node.module


def room(name):
    """The part of the house that a module belongs to; the package itself is no room."""
    inner = name.removeprefix("rollout").removeprefix(".")
    return inner.split(".")[0]


def floor(name, below=()):
    """The longest way down from a module; a circle fails the test."""
    assert name not in below, f"a circle: {[*below, name]}"
    lower = [floor(used, (*below, name)) for used in read_modules()[name]]
    return 1 + max(lower, default=0)


def test_page_lists_modules_that_pickle():
    pattern = re.compile(r"^\s*(?:import|from) (?:cloud)?pickle\b", re.M)
    paths = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    pickling = (path for path in paths if pattern.search(path.read_text()))
    paths_of_pickle = {path.relative_to(ROOT).as_posix() for path in pickling}
    page = (ROOT / "docs" / "streaming.md").read_text()
    assert paths_of_pickle == set(re.findall(r"`(envs/\S+\.py)`", page))


def test_imports_have_no_cycles():
    assert max(map(floor, read_modules())) > 1


def test_packages_import_only_lower_layers():
    step = {name: number for number, names in enumerate(LADDER) for name in names}
    for name, used in read_modules().items():
        package = room(name)
        for imported in {room(x) for x in used} - {package} if package else ():
            assert imported, f"{name} imports the package that re-exports it"
            assert step[imported] < step[package], (name, imported)


def test_packages_import_only_contracts_of_environments():
    for name, used in read_modules().items():
        inner = {x.removeprefix("rollout.") for x in used}
        of_envs = {x for x in inner if x.startswith("envs")} - CONTRACTS
        if room(name) not in ("", "envs"):
            permitted = KINDS.get(room(name), set())
            assert all(x.startswith(tuple(permitted)) for x in of_envs if permitted), (
                name
            )
            assert permitted or not of_envs, name


def test_recipes_import_public_names_and_no_other_recipe():
    """`running` is for all recipes. Only the last lines of a recipe import `cli`."""
    paths = [*(ROOT / "rollout" / "recipes").glob("*.py")]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            assert not any("._" in name for name in names), (path, names)
            if path.stem not in ("__init__", "running"):
                recipes = {x for x in names if x.startswith("rollout.recipes")}
                assert not recipes, path
    assert len(paths) >= 7


def test_step_module_is_short():
    page = (ROOT / "rollout" / "kernel" / "step.py").read_text()
    size = len(page.splitlines())
    message = f"{size} lines of 190: put what is no step into a module beside it"
    assert size <= 190, message


def test_module_names_are_unique():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    names = [path.stem for path in paths if path.stem != "__init__"]
    # The contracts of a package; users and items, to step and to evaluate.
    exceptions = {"types", "recommendation"}
    assert {name for name in names if names.count(name) > 1} <= exceptions


def test_packages_list_their_modules():
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            if path.parent.name == "suites":  # one module per suite
                continue
            text = ast.get_docstring(ast.parse(path.read_text()))
            named = set(re.findall(r"`(?:rollout\.)?(?:envs\.|buffers\.)?(\w+)`", text))
            inside = {x.stem for x in path.parent.iterdir() if x.suffix == ".py"}
            assert inside - {"__init__", "__main__"} <= named, package


def run(code, folder=ROOT, **variables):
    """Runs `code` in a folder and returns its output."""
    done = subprocess.run(
        [sys.executable, *(["-c", code] if isinstance(code, str) else code)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_cheap_and_has_no_side_effects():
    """The backend can still be chosen, and Ctrl-C is the caller's."""
    code = """
import signal, sys
sys.argv[:], sys.orig_argv[:] = ["-m"], [sys.executable, "-m", "rollout"]
import rollout
from jax._src import xla_bridge
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(len(xla_bridge._backends), *sys.modules)
"""
    costly = {"gymnax", "gymnasium", "matplotlib", "minari", "orbax", "tqdm"}
    costly |= {"brax", "craftax", "jaxmarl", "jumanji", "mujoco", "mujoco_playground"}
    costly |= {"navix", "pandas", "pgx", "ray", "xminigrid"}
    costly |= {"rollout.buffers", "rollout.cli", "rollout.inspection"}
    handler, num_backends, *loaded = run(code).split()
    assert (handler, num_backends) == ("True", "0")
    assert "rollout.envs" in loaded
    assert not costly & set(loaded)


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_alphabetical_and_documented(package):
    module = importlib.import_module(package)
    # As ruff sorts it: constants, then classes, then functions.
    sort_key = lambda name: (not name.isupper(), name[0].islower(), name)  # noqa: E731
    assert module.__all__ == sorted(set(module.__all__), key=sort_key)
    for name in module.__all__:
        value = getattr(module, name)
        assert not callable(value) or value.__doc__


def test_one_import_reaches_all_three_packages():
    import rollout
    from rollout import buffers, envs

    assert rollout.envs is envs
    assert rollout.buffers is buffers
    with pytest.raises(AttributeError, match="no attribute 'buffer'"):
        _ = rollout.buffer


# A training script that uses each part of the library that starts a process or pickles.
BESIDE = """
import functools, pickle
import gymnasium, jax
import buffers, envs
import rollout
import rollout.cli  # of `python -m rollout`

if __name__ == "__main__":
    assert envs.OWN and buffers.OWN and rollout.envs is not envs
    make = functools.partial(gymnasium.make, "CartPole-v1")
    env = rollout.envs.make_worker_envs([make] * 2, num_workers=1)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.HostCollector(env=env, policy=policy)
    rows = collector.collect_steps(collector.init(jax.random.key(0)), None, 5)[1]
    assert rows.reward.sum() == 10
    collector.close()
    memory = rollout.buffers.ReplayBuffer(capacity=8, num_envs=2)
    assert pickle.loads(pickle.dumps(memory)) == memory
    print(pickle.loads(pickle.dumps(rollout.envs.Box(0.0, 1.0, (2,)))))
"""


@pytest.fixture
def own_packages(tmp_path):
    """Creates a project folder with other packages `envs` and `buffers`."""
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("OWN = True\n")
    (tmp_path / "buffers.py").write_text("OWN = True\n")
    return tmp_path


def test_user_packages_may_be_named_envs_and_buffers(own_packages):
    (own_packages / "train.py").write_text(BESIDE)
    assert run(["train.py"], own_packages, PYTHONPATH=str(ROOT)).startswith("Box(")


# Private names of Python, NumPy, JAX and suites that tests read.
OTHERS_PRIVATE = {
    *("_asdict", "_backends", "_board", "_cache_size", "_exit", "_fields"),
    *("_forkserver", "_mjx_model", "_observe", "_preload_modules", "_replace"),
    *("_src", "_x"),
}


def test_tests_read_no_private_names():
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            private_names = {x for x in names_read(node) if re.match("_[^_]", x)}
            assert private_names <= OTHERS_PRIVATE, f"{path}:{node.lineno}"


def names_read(node):
    """Returns the names that an import or an attribute reads, except from `self`."""
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.Attribute):
        return []
    return [] if ast.unparse(node.value) in ("self", "cls", "super()") else [node.attr]

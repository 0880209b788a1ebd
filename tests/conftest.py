"""Settings for every test, and the environments that tests share."""

import gc
import importlib.util
import os
import pathlib
import re
import signal
import sys
import tempfile

import jax
import pytest
from compiles import QUICK_FLAGS, QUICK_OPTIONS, check_programs, count_compiles
from jax._src import compiler

# The modules without which a test that `compiles_for` an accelerator is skipped.
COMPILERS = {"h100": "jax_cuda12_plugin", "v5e": "libtpu"}
_MAPPINGS = pathlib.Path("/proc/self/maps")
_MANY_MAPPINGS, _MOST_MAPPINGS = 30_000, 45_000  # between files; between tests
_EVENTS = pytest.StashKey[list[str]]()
_QUICK = pytest.StashKey[str]()


def pytest_configure(config):
    """Shares what is compiled among the processes of a run, and with the next run.

    Most of the time of the tests is compiling. `JAX_COMPILATION_CACHE_DIR` may name
    another folder than the one in pytest's cache, which `--cache-clear` empties.

    With `-m "not slow"` programs are compiled with few optimizations, also in processes
    that tests start. Any other run compiles as users do: its tests compare bits.
    """
    if _is_quick(config):
        given = os.environ.get("XLA_FLAGS", "").replace(QUICK_FLAGS, "")
        os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} {given}".strip()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = _compile_folder(config)
    settings = {
        "JAX_COMPILATION_CACHE_DIR": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0,
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
    }
    for name, value in settings.items():
        os.environ[name] = str(value)  # for the processes that tests start
        jax.config.update(name.lower(), value)
    # A shell that starts the tests with `&` has Ctrl-C ignored, also in their children.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Devices in name: all share the cores.
    jax.config.update("jax_num_cpu_devices", 8)
    assert jax.device_count() == 8  # from here on they are as they are


def pytest_ignore_collect(collection_path, config):
    """Leaves out files that are slow as a whole: importing them may take seconds."""
    if collection_path.suffix == ".py" and _is_quick(config):
        text = collection_path.read_text()
        if re.search(r"^pytestmark = \[?\s*pytest\.mark\.slow", text, re.M):
            return True
    return None  # as pytest decides


def pytest_runtest_setup(item):
    for mark in item.iter_markers("compiles_for"):
        if not all(importlib.util.find_spec(COMPILERS[name]) for name in mark.args):
            pytest.skip("needs the extra `accelerators`")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Counts what a test compiles, with the fixtures that it is the first to use."""
    with count_compiles() as item.stash[_EVENTS]:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    yield
    check_programs(item, item.stash[_EVENTS])


def pytest_runtest_teardown(item, nextitem):
    """Drops compiled programs before there are too many for one process.

    JAX keeps every program, with memory mappings. Linux allows a process 65,530
    mappings, which a few hundred tests reach; beyond, XLA crashes. Programs are dropped
    between two files, so that a test needs as many programs in every run. A file with
    very large programs, such as those of the suites, also drops them between two tests.

    The programs of `quick_compile` and `quick_training` serve only tests with the same
    fixture, because other tests may compare bits.
    """
    is_last = nextitem is None or nextitem.path != item.path
    quick = item.stash.get(_QUICK, None)
    is_over = quick and (nextitem is None or quick not in nextitem.fixturenames)
    num_mappings = _num_mappings()
    is_full = num_mappings > (_MANY_MAPPINGS if is_last else _MOST_MAPPINGS)
    if is_over or is_full:
        jax.clear_caches()
        if is_over and "cases" in sys.modules:
            sys.modules["cases"].collect.cache_clear()
        gc.collect()


def _is_quick(config) -> bool:
    return config.option.markexpr == "not slow"


def _compile_folder(config) -> str:
    if hasattr(config, "cache"):
        return str(config.cache.mkdir("jax"))
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)  # without pytest's cache
    return folder.name


def _num_mappings() -> int:
    try:
        return _MAPPINGS.read_bytes().count(b"\n")
    except OSError:
        return 0  # not Linux


@pytest.fixture(autouse=True, scope="session")
def strict_jax(request):
    """Makes silent rank promotion an error; so are reused keys, but not with `-m "not
    slow"`, where to look for them would take a tenth of the time."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_debug_key_reuse", not _is_quick(request.config))


@pytest.fixture
def key_reuse():
    """Allows a test to draw twice from one key, to compare what is drawn."""
    with jax.debug_key_reuse(False):
        yield


@pytest.fixture
def quick_compile(monkeypatch, request):
    """Compiles everything as `quick_jit` does, also what a page compiles itself."""
    _compile_with(monkeypatch, request, QUICK_OPTIONS)


@pytest.fixture
def quick_training(monkeypatch, request):
    """Compiles faster, and to programs as fast, for a test that trains for long."""
    options = dict(QUICK_OPTIONS)
    del options["xla_backend_optimization_level"]
    _compile_with(monkeypatch, request, options)


def _compile_with(monkeypatch, request, options):
    """Passes options of the compiler also to programs whose `jit` names none."""
    if _is_quick(request.config):
        return  # all have them
    get_options = compiler.get_compile_options

    def get(*args, env_options_overrides=None, **others):
        overrides = {**options, **(env_options_overrides or {})}
        return get_options(*args, env_options_overrides=overrides, **others)

    monkeypatch.setattr(compiler, "get_compile_options", get)
    request.node.stash[_QUICK] = request.fixturename


@pytest.fixture
def rank_promotion():
    """Allows what some environments of others do."""
    with jax.numpy_rank_promotion("allow"):
        yield

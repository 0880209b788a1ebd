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

# The modules that tests with the mark `compiles_for` need.
COMPILERS = {"h100": "jax_cuda12_plugin", "v5e": "libtpu"}
_MAPPINGS = pathlib.Path("/proc/self/maps")
_MANY_MAPPINGS, _MOST_MAPPINGS = 30_000, 45_000  # between files; between tests
_EVENTS = pytest.StashKey[list[str]]()
_QUICK = pytest.StashKey[str]()


def pytest_configure(config):
    """Shares compiled programs among the processes of a run and with the next run.

    Compilation takes most of the time of the tests. `JAX_COMPILATION_CACHE_DIR` may
    name another folder than pytest's cache, which `--cache-clear` empties.

    Quick runs (`-m "not slow"`) compile with few optimizations, also in child
    processes. Other runs use the default optimizations, because tests compare bits.
    """
    if _is_quick(config):
        user_flags = os.environ.get("XLA_FLAGS", "").replace(QUICK_FLAGS, "")
        os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} {user_flags}".strip()
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
    # If a shell starts the tests with `&`, they and their children ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Virtual devices: all share the cores.
    jax.config.update("jax_num_cpu_devices", 8)
    assert jax.device_count() == 8  # initializes the devices


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests
def pytest_collection_modifyitems(items):
    """Marks very slow tests as slow."""
    for item in items:
        if item.get_closest_marker("very_slow"):
            item.add_marker("slow")


def pytest_ignore_collect(collection_path, config):
    """Skips files in which all tests are slow: their import may take seconds."""
    if collection_path.suffix == ".py" and _is_quick(config):
        text = collection_path.read_text()
        if re.search(r"^pytestmark = \[?\s*pytest\.mark\.slow", text, re.M):
            return True
    return None  # pytest decides


def pytest_runtest_setup(item):
    # A command that a test runs in this process lets Ctrl-C end the process.
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for mark in item.iter_markers("compiles_for"):
        if not all(importlib.util.find_spec(COMPILERS[name]) for name in mark.args):
            pytest.skip("needs the extra `accelerators`")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Counts the programs that a test and its new fixtures compile."""
    with count_compiles() as item.stash[_EVENTS]:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    yield
    check_programs(item, item.stash[_EVENTS])


def pytest_runtest_teardown(item, nextitem):
    """Clears compiled programs before there are too many for one process.

    JAX keeps every program, with memory mappings. Linux allows a process 65,530
    mappings. A few hundred tests reach this limit, and then XLA crashes. Programs are
    cleared between two files, so the number of programs of a test is constant. If a
    file has very large programs, they are also cleared between two tests.

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
    """Makes silent rank promotion an error, and key reuse in runs with slow tests.

    The check for key reuse would take a tenth of the time of a quick run.
    """
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_debug_key_reuse", not _is_quick(request.config))


@pytest.fixture
def key_reuse():
    """Allows a test to use a key twice, for example to compare two samples."""
    with jax.debug_key_reuse(False):
        yield


@pytest.fixture
def quick_compile(monkeypatch, request):
    """Compiles all programs with the options of `quick_jit`."""
    _compile_with(monkeypatch, request, QUICK_OPTIONS)


@pytest.fixture
def quick_training(monkeypatch, request):
    """Reduces the time of compilation for a long training, but not its speed."""
    options = dict(QUICK_OPTIONS)
    del options["xla_backend_optimization_level"]
    _compile_with(monkeypatch, request, options)


def _compile_with(monkeypatch, request, options):
    """Passes options of the compiler to all programs."""
    if _is_quick(request.config):
        return  # `XLA_FLAGS` has the options
    get_options = compiler.get_compile_options

    def get(*args, env_options_overrides=None, **kwargs):
        overrides = {**options, **(env_options_overrides or {})}
        return get_options(*args, env_options_overrides=overrides, **kwargs)

    monkeypatch.setattr(compiler, "get_compile_options", get)
    request.node.stash[_QUICK] = request.fixturename


@pytest.fixture
def rank_promotion():
    """Allows rank promotion, which some third-party environments need."""
    with jax.numpy_rank_promotion("allow"):
        yield

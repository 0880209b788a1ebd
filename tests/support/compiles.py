"""Counting what jax traces and compiles."""

import contextlib

import jax
import pytest

LIMIT = 25  # programs that a quick test may compile
# Less than half of the compiling, and the same results but for roundings.
QUICK_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}
if jax.__version_info__ >= (0, 11):
    del QUICK_OPTIONS["xla_cpu_use_fusion_emitters"]  # there is nothing else to use
# The same, for the environment of a process that a test starts.
QUICK_FLAGS = " ".join(f"--{name}={value}" for name, value in QUICK_OPTIONS.items())
_OPEN: list[list[str]] = []  # the events of every block that is open, outermost first


def _listen(name, *_, **__):
    if name.startswith("/jax/core/compile/"):
        for events in _OPEN:
            events.append(name)


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def count_compiles():
    """Yields the list of events of tracing, lowering and compiling in the block.

    A block within another counts for both.
    """
    _OPEN.append([])
    try:
        yield _OPEN[-1]
    finally:
        _OPEN.pop()


def check_programs(item, events):
    """Fails a quick test with more programs than `LIMIT` or its mark `compiles`.

    Not one that was picked by name, which may need the programs of those above it.
    """
    options, args = item.config.option, item.config.args
    is_picked = options.keyword or any("::" in arg for arg in args)
    is_slow = item.get_closest_marker("slow") or item.get_closest_marker("compiles_for")
    if is_picked or is_slow:
        return
    mark = item.get_closest_marker("compiles")
    most = mark.args[0] if mark else LIMIT
    num_programs = events.count("/jax/core/compile/backend_compile_duration")
    if num_programs > most:
        pytest.fail(
            f"The test and its fixtures compiled {num_programs} programs, and may "
            f'compile {most}: see "Programs that tests compile" in CONTRIBUTING.md.',
            pytrace=False,
        )

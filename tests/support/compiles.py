"""Counts the programs that jax traces and compiles."""

import contextlib

import jax
import pytest

LIMIT = 25  # programs that a quick test may compile
# Compilation takes less than half of the time. Results are equal up to rounding.
QUICK_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}
if jax.__version_info__ >= (0, 11):
    del QUICK_OPTIONS["xla_cpu_use_fusion_emitters"]  # jax 0.11 has no alternative
# The same options for processes that a test starts, as an environment variable.
QUICK_FLAGS = " ".join(f"--{name}={value}" for name, value in QUICK_OPTIONS.items())
_BLOCKS: list[list[str]] = []  # events of all active blocks, outermost first


def _listen(event, duration_secs, **_):
    del duration_secs  # unused
    if event.startswith("/jax/core/compile/"):
        for events in _BLOCKS:
            events.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def count_compiles():
    """Yields a list of the tracing, lowering and compiling events in the block.

    An event in nested blocks is added to the lists of all blocks.
    """
    _BLOCKS.append([])
    try:
        yield _BLOCKS[-1]
    finally:
        _BLOCKS.pop()


def check_programs(item, events):
    """Fails a quick test with more programs than `LIMIT` or its mark `compiles`.

    A test selected by name is not checked: it may compile programs that an earlier test
    of the file would otherwise compile.
    """
    options, args = item.config.option, item.config.args
    is_selected = options.keyword or any("::" in arg for arg in args)
    is_slow = item.get_closest_marker("slow") or item.get_closest_marker("compiles_for")
    if is_selected or is_slow:
        return
    mark = item.get_closest_marker("compiles")
    limit = mark.args[0] if mark else LIMIT
    num_programs = events.count("/jax/core/compile/backend_compile_duration")
    if num_programs > limit:
        pytest.fail(
            f"The test and its fixtures compiled {num_programs} programs, and may "
            f'compile {limit}: see "Programs that tests compile" in CONTRIBUTING.md.',
            pytrace=False,
        )

"""Checks the options of a stream."""

from typing import Any

import jax

from rollout import checks
from rollout.envs.checks import INT32_MAX
from rollout.stream.types import Options

_BATCH_COUNTS = ("steps_per_batch", "episodes_per_batch")
_RUN_COUNTS = ("total_steps", "max_episode_steps", "warmup_steps")  # of any size
_FLAGS = ("recycle", "check_finite")
_CHOICES = {
    "at_batch_end": ("continue", "reset", "truncate"),
    "on_fault": ("raise", "drop"),
    "prefetch": (0, 1),
}


def check(options: Options) -> Options:
    """Checks the options of a stream; returns them, counts as Python ints.

    Raises:
        ValueError: if an option is wrong, or clashes with another.
    """
    counts = {}
    for name in (*_BATCH_COUNTS, *_RUN_COUNTS):
        if (value := getattr(options, name)) is not None:
            least = 0 if name == "warmup_steps" else 1
            most = None if name in _RUN_COUNTS else INT32_MAX
            counts[name] = checks.int_between(name, value, least=least, most=most)
    window = options.window_episodes
    counts["window_episodes"] = checks.int_between("window_episodes", window, least=0)
    for name in _FLAGS:
        checks.flag(name, getattr(options, name))
    for name in ("postprocess", "mask_fn"):
        if getattr(options, name) is not None:
            checks.function(name, getattr(options, name))
    if options.mask_fn is not None and not options.warmup_steps:
        raise ValueError("`mask_fn` needs `warmup_steps` of at least 1, got 0.")
    for name, choices in _CHOICES.items():
        value = getattr(options, name)
        if isinstance(value, bool) or value not in choices:
            names = " or ".join(repr(x).replace("'", '"') for x in choices)
            raise ValueError(f"`{name}` must be {names}, got {value!r}.")
    if (options.steps_per_batch is None) == (options.episodes_per_batch is None):
        raise ValueError(
            "Either `steps_per_batch` or `episodes_per_batch` must be given, got "
            f"{options.steps_per_batch} and {options.episodes_per_batch}."
        )
    if options.episodes_per_batch is not None:
        _check_episodes(options)
    if options.on_fault == "drop" and not options.check_finite:
        raise ValueError(
            '`on_fault="drop"` needs `check_finite=True`, got `check_finite=False`.'
        )
    _check_placement(options)
    return options._replace(**counts)


def check_processes(options: Options) -> None:
    """Checks that lanes in several processes support the options.

    Raises:
        ValueError: if they do not.
    """
    if options.prefetch:
        raise ValueError(
            "`prefetch` must be 0 with lanes in several processes, which must run all "
            f"programs in the same order, got {options.prefetch}."
        )
    if options.placement == "host":
        raise ValueError(
            '`placement` must not be "host" with lanes in several processes: none has '
            "all of them."
        )


def _check_episodes(options: Options) -> None:
    if options.max_episode_steps is None:
        raise ValueError("`episodes_per_batch` needs `max_episode_steps`, got None.")
    # Whole episodes do not add up to a given number of steps.
    for name in ("total_steps", "warmup_steps"):
        if value := getattr(options, name):
            what = f"`{name}` must not be given with `episodes_per_batch`"
            raise ValueError(f"{what}, got {value!r}.")
    if options.on_fault == "drop":
        raise ValueError(
            '`on_fault="drop"` must not be given with `episodes_per_batch`, whose '
            "number of episodes is exact."
        )


def _check_placement(options: Options) -> None:
    placement: Any = options.placement
    named = isinstance(placement, str) and placement in ("device", "host")
    if not named and not isinstance(placement, jax.sharding.Sharding):
        raise ValueError(
            '`placement` must be "device", "host" or a `jax.sharding.Sharding`, got '
            f"{placement!r}."
        )
    if options.recycle and placement != "device":
        raise ValueError(
            '`recycle=True` needs `placement="device"`, since the memory of a copy '
            f"elsewhere cannot be reused, got {placement!r}."
        )

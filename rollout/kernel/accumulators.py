"""Accumulates values per episode, and records transitions."""

from collections.abc import Mapping
from typing import Any

from rollout import checks
from rollout.envs.types import ArrayTree, strong
from rollout.types import Accumulator, Accumulators, RecordFn, Transition

# What a `record_fn` must leave alone: statistics and returned episodes read these.
_BOOKKEEPING = (
    *("terminated", "truncated", "mask", "episode_id"),
    *("episode_return", "episode_length", "accumulated"),
)


def as_accumulators(value: Any) -> Accumulators:
    """Checks accumulators by name; returns them as a tuple."""
    what = "`accumulators` must map names to `Accumulator`s"
    items = tuple(value.items()) if isinstance(value, Mapping) else value
    if isinstance(items, Accumulator) or not isinstance(items, tuple):
        raise ValueError(f"{what}, got {checks.describe(value)}.")
    for name, accumulator in items:
        if not isinstance(name, str) or not isinstance(accumulator, Accumulator):
            raise ValueError(f"{what}, got {name!r}: {checks.describe(accumulator)}.")
        if "/" in name:  # which joins the names of statistics
            raise ValueError(
                f'`accumulators` must have names without "/", got {name!r}.'
            )
        for part, fn in zip(accumulator._fields, accumulator, strict=True):
            checks.function(f"{part}` of the accumulator `{name}", fn)
    return items


def accumulate_nothing(accumulators: Accumulators, num_envs: int) -> ArrayTree:
    """Returns the values before an episode's first step, `[B, ...]`."""
    return strong({name: x.init(num_envs) for name, x in accumulators} or ())


def accumulate(
    accumulators: Accumulators, accumulated: ArrayTree, transition: Transition
) -> Transition:
    """Adds the values after a step to its transition."""
    values = {name: x.update(accumulated[name], transition) for name, x in accumulators}
    for name, value in values.items():
        what = f"The accumulator `{name}` must return the kind of value it takes"
        checks.same(what, accumulated[name], value)
    return transition.replace(accumulated=strong(values or ()))


def record(record_fn: RecordFn | None, transition: Transition) -> Transition:
    """Applies `record_fn` to a transition; see `Collector.record_fn`."""
    if record_fn is None:
        return transition
    recorded = record_fn(transition)
    _check_recorded(transition, recorded)
    return recorded


def _check_recorded(before: Transition, after: Any) -> None:
    """Checks that `record_fn` left the lanes and the kernel's bookkeeping."""
    checks.kind("`record_fn` must return a `Transition`", after, Transition)
    for name in _BOOKKEEPING:
        if getattr(before, name) is not getattr(after, name):
            raise ValueError(
                f"`record_fn` must leave `{name}` as it is, since the statistics read "
                "it; put a value derived from it into `extras`."
            )
    for name, field in vars(after).items():
        if field is None and getattr(before, name) is not None:
            raise ValueError(
                f"`record_fn` must drop a field by `()`, got `{name}=None`."
            )
    checks.leading_axes("`record_fn` must return leaves", after, before.mask.shape)

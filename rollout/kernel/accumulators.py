"""Accumulates custom values per episode."""

from collections.abc import Mapping
from typing import Any

from rollout import checks
from rollout.envs.types import ArrayTree, strong
from rollout.types import Accumulator, Accumulators, Transition, check_policy


def checked_parts(collector: Any) -> Accumulators:
    """Checks the parts of a collector; returns its accumulators as a tuple."""
    check_policy(collector.policy)
    if collector.record_fn is not None:
        checks.function("record_fn", collector.record_fn, "transition")
    what, value = (
        "`accumulators` must map names to `Accumulator`s",
        collector.accumulators,
    )
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

"""Accumulates values per episode, and records transitions."""

from rollout import checks
from rollout.envs.types import ArrayTree, strong
from rollout.types import Accumulators, RecordFn, Transition


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
    checks.recorded(transition, recorded)
    return recorded

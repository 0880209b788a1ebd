"""`log_stats`: flattens statistics into floats, for any logger."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollout import checks
from rollout.episode_window import EpisodeWindow
from rollout.moments import Moments, merge
from rollout.stats import CollectStats


class _Figure(NamedTuple):
    """A statistic and whether there were enough episodes to define it."""

    value: Any
    is_defined: Any


def log_stats(
    stats: Any, *, prefix: str = "", num_seeds: int | None = None
) -> dict[str, float]:
    """Flattens statistics into a dict of Python floats, for any logger.

    Args:
        stats: a `CollectStats`, a `StreamStats`, an `EpisodeWindow`, an `AgentStats`, a
            mapping, or any of these nested; every leaf a number or a `()` array.
        prefix: group of names: "train" turns "return_mean" into "train/return_mean".
        num_seeds: S, if `jax.vmap` returned statistics of S runs: leaves may then be
            `[S]`. Each leaf is averaged over the seeds. For floats, entries with the
            suffixes "_ci_low" and "_ci_high" hold the 95 % confidence interval of this
            mean, and replace the intervals of single seeds.

    Returns:
        Names to floats; a nested name is a path joined by "/". Values that no episode
        defines, such as a mean before the first episode ends, are omitted. Seeds
        without such an episode do not count in the mean.

    Raises:
        ValueError: if a leaf is not a scalar, if it is not a real number, if two leaves
            have the same name, or inside of `jit`.
    """
    checks.outside_of_jit("log_stats")
    if num_seeds is not None:
        num_seeds = checks.int_between("num_seeds", num_seeds)
    flat: dict[str, float] = {}
    group = f"{prefix.rstrip('/')}/" if prefix else ""
    leaves = jax.tree.leaves_with_path(
        _named(stats), is_leaf=lambda x: isinstance(x, _Figure)
    )
    paths = [jax.tree_util.keystr(x, simple=True, separator="/") for x, _ in leaves]
    if len(set(paths)) < len(paths):
        twice = sorted({x for x in paths if paths.count(x) > 1})
        raise ValueError(
            f"`stats` must have different names, got {twice[0]!r} twice. A nested name "
            'is a path joined by "/".'
        )
    for name, (_, leaf) in zip(paths, leaves, strict=True):
        value, is_defined = leaf if isinstance(leaf, _Figure) else (leaf, True)
        _check(name, value, num_seeds)
        value = np.asarray(value)
        if value.ndim and name.endswith(("_ci_low", "_ci_high")):
            continue  # interval of a single seed
        is_float = value.dtype.kind not in "iub"
        value = value.astype(float)
        # Skip seeds without an episode: a single NaN would hide all seeds.
        defined = value[np.broadcast_to(is_defined, value.shape)]
        if defined.size:
            flat[group + name] = float(defined.mean())
        if value.ndim and is_float and defined.size > 1:
            constants: Any = {"count": 1, "squared_deviations": 0.0}
            # Merged moments of one value each have the deviation between the seeds.
            over_seeds = merge(
                [Moments(**constants, total=x, low=x, high=x) for x in defined]
            )
            flat[f"{group}{name}_ci_low"] = float(over_seeds.ci_low)
            flat[f"{group}{name}_ci_high"] = float(over_seeds.ci_high)
    return flat


def _check(name: str, value: Any, num_seeds: int | None) -> None:
    """Checks that a leaf is a real number, or one per seed."""
    dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
    is_real = any(jnp.issubdtype(dtype, x) for x in (jnp.integer, jnp.floating, bool))
    is_real |= type(value) is int  # NumPy has no dtype for a large int
    if not is_real or np.shape(value) not in ((), (num_seeds,)):
        raise ValueError(
            "`stats` must have real scalars as leaves, or one for each of `num_seeds`, "
            f"got {checks.describe(value)} at {name} and {num_seeds}."
        )


def _named(stats: Any) -> Any:
    """Converts statistics to plain dicts of numbers and `_Figure`s."""
    if isinstance(stats, CollectStats):
        # Counts are 0, not undefined, if no episode ended.
        named = {x: y for x, y in vars(stats).items() if x.startswith("num_")}
        for noun, moments in (("return", stats.returns), ("length", stats.lengths)):
            named |= {f"{noun}_{name}": x for name, x in _moments(moments).items()}
        is_defined = np.greater(stats.returns.count, 1)
        named["return_ci_low"] = _Figure(stats.returns.ci_low, is_defined)
        named["return_ci_high"] = _Figure(stats.returns.ci_high, is_defined)
        extra = {f"{name}_mean": x.mean for name, x in stats.accumulated.items()}
        return named | {"accumulated": _figures(extra, stats.num_episodes)}
    if isinstance(stats, Moments):
        return {"count": stats.count, **_moments(stats)}
    if isinstance(stats, EpisodeWindow):
        extra = {f"{name}_mean": x.mean for name, x in stats.accumulated.items()}
        means = {"return_mean": stats.returns.mean, "length_mean": stats.lengths.mean}
        count = stats.num_episodes
        figures = {"accumulated": _figures(extra, count), **_figures(means, count)}
        return {"num_episodes": count, **figures}
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        stats = vars(stats)
    if isinstance(stats, tuple | list):
        names = getattr(stats, "_fields", range(len(stats)))
        stats = dict(zip(names, stats, strict=True))
    if isinstance(stats, Mapping):  # not every mapping is a pytree
        return {name: _named(value) for name, value in stats.items()}
    return stats


def _moments(x: Moments) -> dict[str, _Figure]:
    named = {"mean": x.mean, "std": x.std, "min": x.min, "max": x.max}
    return _figures(named, x.count)


def _figures(values: Mapping[str, Any], count: Any) -> dict[str, _Figure]:
    return {name: _Figure(x, np.greater(count, 0)) for name, x in values.items()}

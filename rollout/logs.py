"""Statistics for logs, and writers of logs.

`EpisodeWindow` computes statistics inside `jit`, and `log_stats` flattens statistics
for any logger. `CSVWriter` and `TensorBoardWriter` are loggers.
"""

import dataclasses
import functools
import importlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from rollout.base import checks
from rollout.base.files import replace_file
from rollout.base.platform import choose
from rollout.stats import (
    CollectStats,
    Moments,
    by_name,
    is_known,
    merge,
    moments,
    plural,
    present,
    xp_of,
)
from rollout.types import Episodes, Transition, check_data, check_trajectory

_BLOCK = 64  # flags that `_list_starts` counts together

# Values per episode: return, length and accumulated values.
_Values = tuple[jax.Array, jax.Array, dict[str, jax.Array]]


class _Listed(struct.PyTreeNode, kw_only=True):
    """Episodes to add to the window later, in the order in which they started.

    Attributes:
        num: `()` int32, number of listed episodes, which are the first entries of the
            arrays below.
        start: `[K]` int32, row at which the episode started, counted from the start of
            the next trajectory: negative.
        lane: `[K]` int32, the lane.
        values: `[K]` each; the length is 0 until the episode ends.
    """

    num: jax.Array  # ()
    start: jax.Array  # [K]
    lane: jax.Array  # [K]
    values: _Values


class EpisodeWindow(struct.PyTreeNode, kw_only=True):
    """A moving window over the last K episodes. Use it for learning curves in `jit`.

    Store the window in the state of the loop:

        window = rollout.EpisodeWindow.init(100)  # before the loop
        window = window.add(trajectory)  # in each update

    An episode is listed when it starts, if the list has fewer than K entries. It is
    added to the window once it and all listed episodes that started earlier or at the
    same step have ended. The selection does not depend on the length of an episode, so
    the mean has no bias toward short episodes. The first mean covers the first episodes
    of all lanes, or of the first K lanes. It is NaN until the longest of these episodes
    has ended.

    Call `add` with every trajectory of one collector, in order. If a listed episode
    neither continues nor ends, for example after a fault or a missing trajectory, the
    window starts a new list. If lanes differ, as in `rollout.envs.vectorize_each`,
    choose K above the number of lanes, so that the window covers all lanes.

    Attributes:
        episode_return: `[K]` float32, undiscounted returns, in the order of the starts.
        episode_length: `[K]` int32, lengths in steps, zero for entries without an
            episode.
        episode_accumulated: `[K]` float32 by name, accumulated values named in `init`.
        listed: episodes to add to the window later.
    """

    episode_return: jax.Array  # [K]
    episode_length: jax.Array  # [K]
    episode_accumulated: dict[str, jax.Array]  # [K] each
    listed: _Listed

    @classmethod
    def init(cls, num_episodes: int, *, accumulated: Sequence[str] = ()) -> Self:
        """Returns an empty window.

        Args:
            num_episodes: K, at least 1.
            accumulated: names of accumulated values to include, each one number per
                episode, as in `CollectStats.accumulated`.

        Raises:
            ValueError: if `num_episodes` is not an int of at least 1.
        """
        size = checks.check_int("num_episodes", num_episodes)

        def zero(dtype: Any = jnp.float32) -> jax.Array:
            return jnp.zeros(size, dtype)  # one array per field, since all are donated

        def values() -> _Values:
            return zero(), zero(jnp.int32), {name: zero() for name in accumulated}

        returns, lengths, totals = values()
        start, lane = zero(jnp.int32), zero(jnp.int32)
        listed = _Listed(num=jnp.int32(0), start=start, lane=lane, values=values())
        return cls(
            episode_return=returns,
            episode_length=lengths,
            episode_accumulated=totals,
            listed=listed,
        )

    def add(self, data: Transition | Episodes) -> Self:
        """Adds episodes that ended to the window. Pure and jitted.

        Args:
            data: the next trajectory, `[T, B, ...]`, whose masked-out rows are ignored;
                or `Episodes`, which are all added.

        Raises:
            ValueError: if `data` is neither, has other axes, comes from a
                `HostCollector` with `num_ready`, or lacks an accumulated value of the
                window.
        """
        return _add(self, data)

    def _append(self, values: _Values, num_new: jax.Array) -> Self:
        """Appends the first `num_new` of `values`, and drops the oldest entries."""
        size = len(self.episode_length)
        old = self.episode_return, self.episode_length, self.episode_accumulated
        returns, lengths, totals = jax.tree.map(
            lambda x, new: lax.dynamic_slice_in_dim(
                jnp.concatenate((x, new)), num_new, size
            ),
            old,
            values,
        )
        return self.replace(
            episode_return=returns, episode_length=lengths, episode_accumulated=totals
        )

    @property
    def num_episodes(self) -> jax.Array:
        """`()` int32, number of episodes in the window, at most K."""
        return xp_of(self).sum(self.episode_length > 0, axis=-1, dtype=np.int32)

    @property
    def returns(self) -> Moments:
        """Moments of the undiscounted returns, such as `window.returns.mean`."""
        return self._moments(self.episode_return)

    @property
    def lengths(self) -> Moments:
        """Moments of the lengths in steps."""
        return self._moments(self.episode_length)

    @property
    def accumulated(self) -> dict[str, Moments]:
        """Moments of the accumulated values, by name."""
        return {name: self._moments(x) for name, x in self.episode_accumulated.items()}

    def __str__(self) -> str:
        """Formats the mean return and the number of episodes."""
        if not is_known(self.num_episodes):
            return repr(self)
        if not self.num_episodes:
            return "no episode counts yet"
        last = plural(self.num_episodes, "episode")
        return f"return {self.returns.mean:.6g}, last {last}"

    def _moments(self, values: jax.Array) -> Moments:
        xp = xp_of(self)  # NumPy outside of tracing: see `Moments`
        is_filled = self.episode_length > 0
        return moments(xp.asarray(values), xp.asarray(is_filled), axis=-1, xp=xp)


def _values(data: Any, names: list[str]) -> _Values:
    """Validates data for a window; returns the values of the episodes so far."""
    check_data(data)
    if isinstance(data, Transition):
        check_trajectory(data)
    shape = data.terminated.shape
    totals = by_name(data.accumulated, shape)
    if missing := set(names) - set(totals):
        raise ValueError(
            f"`data` must have the accumulated value {min(missing)!r} of the window, "
            f"one number per episode, got {', '.join(totals) or 'none'}."
        )
    totals = {name: jnp.asarray(totals[name], jnp.float32) for name in names}
    returns = jnp.asarray(data.episode_return, jnp.float32)
    return returns, jnp.asarray(data.episode_length, jnp.int32), totals


def _list_starts(listed: _Listed, is_first: jax.Array) -> _Listed:
    """Lists the episodes that start in a trajectory, up to the capacity of the list."""
    slot = jnp.arange(len(listed.start), dtype=jnp.int32)
    # Count flags per block, and read only the blocks that contain a new start: a
    # cumulative sum over all flags would be slower.
    flags = jnp.pad(is_first.reshape(-1), (0, -is_first.size % _BLOCK))
    blocks = flags.reshape(-1, _BLOCK)
    count = jnp.cumsum(jnp.sum(blocks, axis=1, dtype=jnp.int32))
    # The new starts fill the free slots in order.
    number = slot - listed.num + 1  # of the start, 1 for the first
    # On a GPU every round of a binary search is a launch: compare all at once instead.
    compare_all = functools.partial(jnp.searchsorted, method="compare_all")
    block = choose(jnp.searchsorted, compare_all, count, number)
    block = jnp.minimum(block, len(count) - 1)
    number_in_block = number - jnp.where(block > 0, count[block - 1], 0)
    counts_in_block = jnp.cumsum(blocks[block], axis=1, dtype=jnp.int32)
    index = jnp.argmax(counts_in_block == number_in_block[:, None], axis=1)
    index = (_BLOCK * block + index).astype(jnp.int32)
    is_new = (slot >= listed.num) & (number <= count[-1])
    new = index // is_first.shape[1], index % is_first.shape[1]
    start, lane = jax.tree.map(
        lambda old, new: jnp.where(is_new, new, old), (listed.start, listed.lane), new
    )
    values = jax.tree.map(
        lambda x: jnp.where(is_new, jnp.zeros_like(x), x), listed.values
    )
    num = listed.num + jnp.sum(is_new, dtype=jnp.int32)
    return _Listed(num=num, start=start, lane=lane, values=values)


# Jitted: otherwise a call from Python would compile a program for each operation.
@jax.jit
def _add(window: EpisodeWindow, data: Transition | Episodes) -> EpisodeWindow:
    """Adds episodes to a window; see `EpisodeWindow.add`."""
    rows = _values(data, list(window.episode_accumulated))
    slot = jnp.arange(len(window.episode_length), dtype=jnp.int32)
    if isinstance(data, Episodes):
        # Number the valid episodes from 1, and look up the last K by number.
        number = jnp.cumsum(present(data), dtype=jnp.int32)  # 1 for the first
        num_new = jnp.minimum(number[-1], slot.size)
        index = jnp.searchsorted(number, number[-1] - num_new + 1 + slot)
        return window._append(jax.tree.map(lambda x: x[index], rows), num_new)
    # List the episodes that start in this trajectory, find the end of each listed
    # episode, then move the ended episodes at the front of the list to the window.
    mask, done, length = jnp.asarray(data.mask), jnp.asarray(data.done), rows[1]
    listed, num_rows = _list_starts(window.listed, mask & (length == 1)), len(mask)
    # The rows of each listed episode, `[T, K]`, and the row in which it ends.
    first = jnp.arange(1, num_rows + 1, dtype=jnp.int32)[:, None] - length
    lane, start = listed.lane, listed.start
    # A row belongs to a listed episode of the same lane if the starts match.
    is_row = mask[:, lane] & (first[:, lane] == start[None])
    is_row &= (lane < mask.shape[1])[None]  # False if the data lack the lane
    is_end = is_row & done[:, lane]
    end, has_ended = jnp.argmax(is_end, axis=0), jnp.any(is_end, axis=0)
    values: _Values = jax.tree.map(
        lambda old, new: jnp.where(has_ended, new[end, lane], old), listed.values, rows
    )
    is_running = (slot < listed.num) & (values[1] == 0)
    # A running episode without the last row was discarded, or rows are missing.
    is_lost = is_running & ~is_row[-1]
    # Add the episodes that started before the oldest running episode. Episodes that
    # started at the same step wait: otherwise the mean would favor short episodes.
    oldest = jnp.min(jnp.where(is_running, start, num_rows))
    num_new = jnp.sum((slot < listed.num) & (start < oldest), dtype=jnp.int32)
    # Remove these episodes from the list, and count starts from the next trajectory.
    start, lane, values_left = jax.tree.map(
        lambda x: jnp.roll(x, -num_new), (start - num_rows, lane, values)
    )
    num = jnp.where(jnp.any(is_lost), 0, listed.num - num_new)
    listed = _Listed(num=num, start=start, lane=lane, values=values_left)
    return window._append(values, num_new).replace(listed=listed)


class CSVWriter:
    """Appends metrics to a CSV file. Use it to log a custom training loop.

        write = rollout.logs.CSVWriter("metrics.csv")
        write({"loss": 0.5}, step=1000)

    The first line names the columns: `steps`, and the metrics. A metric without a value
    in a row has an empty cell. A new metric adds a column, which rewrites the file. An
    existing file is continued. Rows are on disk when a call returns. If the process is
    killed during a call, the last line may be incomplete.

    Args:
        path: path of the file, in an existing folder.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).expanduser()

    def __call__(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Appends one row.

        Args:
            metrics: one number by name, such as the result of `log_stats`.
            step: number in the column `steps`, such as the environment steps so far.

        Raises:
            ValueError: if a name contains a comma, a quote or a line break.
        """
        self.append({"steps": int(step), **metrics})

    def append(self, columns: Mapping[str, Any]) -> None:
        """Appends n rows, given as one array `[n]` or number per column.

        Raises:
            ValueError: if a name contains a comma, a quote or a line break.
        """
        for name in columns:
            if not name.isprintable() or any(x in name for x in ',"'):
                raise ValueError(
                    "`metrics` must have names without commas, quotes and line breaks, "
                    f"got {name!r}."
                )
        names = self.columns
        if new_names := [name for name in columns if name not in names]:
            names = [*names, *new_names]
            self._add_columns(names, len(new_names))
        values = {name: np.atleast_1d(x).tolist() for name, x in columns.items()}
        num_rows = len(next(iter(values.values())))
        rows = zip(*(values.get(x, [""] * num_rows) for x in names), strict=True)
        with self._path.open("a", newline="") as file:
            for row in rows:
                cells = (f"{x:.9g}" if type(x) is float else str(x) for x in row)
                file.write(",".join(cells) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the file, empty for a new file."""
        if not self._path.exists():
            return []
        with self._path.open() as file:
            header = file.readline().rstrip("\n")
        return header.split(",") if header else []

    def _add_columns(self, names: list[str], num_new: int) -> None:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows = [line + "," * num_new for line in lines[1:]]
        with replace_file(self._path) as file:
            file.write("".join(f"{x}\n" for x in (",".join(names), *rows)).encode())


class TensorBoardWriter:
    """Writes metrics for TensorBoard. Use it to log a custom training loop.

        write = rollout.logs.TensorBoardWriter("runs/a")
        write({"loss": 0.5}, step=1000)

    The first call creates an event file.

    Args:
        folder: folder of the event file, which the first call creates if it is missing.

    Raises:
        ModuleNotFoundError: if the package `tensorboard` is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder).expanduser()
        checks.import_optional("tensorboard")
        self._writer: Any = None

    def __call__(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Writes one number by name, at a step."""
        if self._writer is None:
            name = "tensorboard.summary.writer.event_file_writer"
            module = importlib.import_module(name)
            self._writer = module.EventFileWriter(str(self._folder))
        proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        event = proto.Event(step=int(step), wall_time=time.time())
        for name, value in metrics.items():
            event.summary.value.add(tag=name, simple_value=float(value))
        self._writer.add_event(event)
        self._writer.flush()


class _Statistic(NamedTuple):
    """A number, and whether there were enough episodes to define it."""

    value: Any
    is_defined: Any


def log_stats(
    stats: Any, *, prefix: str = "", num_seeds: int | None = None
) -> dict[str, float]:
    """Flattens statistics into a dict of Python floats, for any logger.

    Args:
        stats: a `CollectStats`, a `StreamStats`, an `EpisodeWindow`, an `AgentStats`, a
            mapping, or any of these nested; every leaf is a number or a `()` array.
        prefix: group of names: "train" changes "return_mean" to "train/return_mean".
        num_seeds: S, if `jax.vmap` returned statistics of S runs: leaves may then be
            `[S]`. Each leaf is averaged over the seeds. For floats, entries with the
            suffixes "_ci_low" and "_ci_high" hold the 95 % confidence interval of this
            mean, and replace the intervals of single seeds.

    Returns:
        Floats by name; a nested name is a path joined by "/". Undefined values, such as
        a mean before the first episode ends, are omitted. The mean over seeds skips
        seeds with undefined values.

    Raises:
        ValueError: if a leaf is not a scalar, if it is not a real number, if two leaves
            have the same name, or inside of `jit`.
    """
    checks.check_outside_jit("log_stats")
    if num_seeds is not None:
        num_seeds = checks.check_int("num_seeds", num_seeds)
    flat: dict[str, float] = {}
    group = f"{prefix.rstrip('/')}/" if prefix else ""
    leaves = jax.tree.leaves_with_path(
        _named(stats), is_leaf=lambda x: isinstance(x, _Statistic)
    )
    paths = [jax.tree_util.keystr(x, simple=True, separator="/") for x, _ in leaves]
    if len(set(paths)) < len(paths):
        duplicates = sorted({x for x in paths if paths.count(x) > 1})
        raise ValueError(
            f"`stats` must have different names, got {duplicates[0]!r} twice. A nested "
            'name is a path joined by "/".'
        )
    for name, (_, leaf) in zip(paths, leaves, strict=True):
        value, is_defined = leaf if isinstance(leaf, _Statistic) else (leaf, True)
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
            # Merging one `Moments` per seed computes the deviation between seeds.
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
    """Converts statistics to plain dicts of numbers and `_Statistic`s."""
    if isinstance(stats, CollectStats):
        # Counts are 0, not undefined, if no episode ended.
        named = {x: y for x, y in vars(stats).items() if x.startswith("num_")}
        for noun, moments in (("return", stats.returns), ("length", stats.lengths)):
            named |= {f"{noun}_{name}": x for name, x in _moments(moments).items()}
        is_defined = np.greater(stats.returns.count, 1)
        named["return_ci_low"] = _Statistic(stats.returns.ci_low, is_defined)
        named["return_ci_high"] = _Statistic(stats.returns.ci_high, is_defined)
        extra = {f"{name}_mean": x.mean for name, x in stats.accumulated.items()}
        return named | {"accumulated": _statistics(extra, stats.num_episodes)}
    if isinstance(stats, Moments):
        return {"count": stats.count, **_moments(stats)}
    if isinstance(stats, EpisodeWindow):
        extra = {f"{name}_mean": x.mean for name, x in stats.accumulated.items()}
        means = {"return_mean": stats.returns.mean, "length_mean": stats.lengths.mean}
        count = stats.num_episodes
        statistics = {
            "accumulated": _statistics(extra, count),
            **_statistics(means, count),
        }
        return {"num_episodes": count, **statistics}
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        stats = vars(stats)
    if isinstance(stats, tuple | list):
        names = getattr(stats, "_fields", range(len(stats)))
        stats = dict(zip(names, stats, strict=True))
    if isinstance(stats, Mapping):  # not every mapping is a pytree
        return {name: _named(value) for name, value in stats.items()}
    return stats


def _moments(x: Moments) -> dict[str, _Statistic]:
    named = {"mean": x.mean, "std": x.std, "min": x.min, "max": x.max}
    return _statistics(named, x.count)


def _statistics(values: Mapping[str, Any], count: Any) -> dict[str, _Statistic]:
    return {name: _Statistic(x, np.greater(count, 0)) for name, x in values.items()}

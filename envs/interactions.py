"""Recorded feedback as tables, which `RecommendationEnv` plays.

A log has one row for each rating; here it becomes what every user thinks of every item,
with a choice of what is put where nothing is known. pandas is imported only where a
file is read.
"""

import dataclasses
import importlib
import numbers
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pandas import DataFrame

_MISSING = ("user_mean", "item_mean", "mask")
_DUPLICATES = ("mean", "last", "error")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Interactions:
    """What U users think of I items: tables of NumPy, read from a log.

    Attributes:
        feedback: `[U, I]` float32, completed where it is not known.
        known: `[U, I]` bool, which pairs are in the data.
        users: `[U]`, the ids of users, sorted: user number u is `users[u]`.
        items: `[I]`, the ids of items, likewise.
        popularity: `[I]` float32, the share of users with a known pair: above 0, since
            every item occurs, and at most 1.
        num_dropped: how many rows were left out, by the reason: "missing_id",
            "missing_timestamp", "nonfinite_feedback", "duplicate". A row counts under
            the first of them that holds.
    """

    feedback: np.ndarray  # [U, I]
    known: np.ndarray  # [U, I]
    users: np.ndarray  # [U]
    items: np.ndarray  # [I]
    popularity: np.ndarray  # [I]
    num_dropped: dict[str, int]


def from_interactions(
    data: "str | os.PathLike | DataFrame | Mapping[str, Any] | tuple",
    *,
    missing: float | str,
    duplicates: str = "mean",
    user: str = "user_id",
    item: str = "item_id",
    feedback: str = "feedback",
    timestamp: str | None = None,
) -> Interactions:
    """Makes tables of a log of users, items and feedback.

    A row without a user or an item is dropped, and one whose feedback is not finite in
    float32; a warning says how many. Users and items are those of the rows that are
    left. The tables are dense, with 5 bytes for each of U * I pairs.

    Args:
        data: the path of a CSV file, a DataFrame, or a mapping, whose columns are found
            by name, others are not read; or a tuple of columns, user, item, feedback
            and, if `timestamp` is given, time. Columns are 1-D, of one length K. Ids
            are of any kind that can be hashed and sorted.
        missing: what is put where a pair is not in the data: a finite number; the mean
            of the known pairs of the user, "user_mean", or of the item, "item_mean";
            or 0, "mask", where `known` is meant to be the mask of the environment.
        duplicates: what is made of several rows of one pair: their "mean"; the "last"
            of them, by row or by `timestamp`, where the others count as dropped; or an
            "error".
        user: name of the column of users.
        item: name of the column of items.
        feedback: name of the column of feedback, numbers.
        timestamp: name of the column of times, numbers or dates, if the last row is the
            one of the latest time; of equal times the later row. A row without a time
            is dropped. None for the order of rows.

    Returns:
        The tables, for `RecommendationEnv(tables.feedback)`, or with "mask" for
        `RecommendationEnv(tables.feedback, known=tables.known)`.

    Raises:
        ImportError: if a file is to be read, and pandas is not installed.
        ValueError: if an argument is not as above, a column is not there, no row is
            left, or a pair has several rows and `duplicates` is "error".
    """
    _check_options(missing, duplicates, timestamp)
    names = [name for name in (user, item, feedback, timestamp) if name is not None]
    columns = _read(data, names)
    shapes = [column.shape for column in columns]
    if len(shapes[0]) != 1 or len(set(shapes)) != 1:
        raise ValueError(
            "`data` must have 1-D columns of one length, got "
            f"{', '.join(map(str, shapes))} for {', '.join(names)}."
        )
    columns, num_dropped = _drop(names, columns)
    users, user_index = _number(user, columns[0])
    items, item_index = _number(item, columns[1])
    pair, values = user_index * len(items) + item_index, columns[2]
    if duplicates == "error":
        _check_single(pair, users, items)
    if duplicates == "last":
        time = None if timestamp is None else _number(timestamp, columns[3])[1]
        pair, values = _take_last(pair, values, time)
    # Nothing is lost of rows whose mean is taken.
    num_dropped["duplicate"] = len(user_index) - len(pair)
    _warn(num_dropped, *shapes[0])
    table, known = _tabulate(pair, values, (len(users), len(items)))
    return Interactions(
        feedback=_complete(table, known, missing),
        known=known,
        users=users,
        items=items,
        popularity=np.mean(known, axis=0).astype(np.float32),
        num_dropped=num_dropped,
    )


def _check_options(missing: Any, duplicates: Any, timestamp: Any) -> None:
    if isinstance(missing, str):
        is_one = missing in _MISSING
    else:
        is_number = isinstance(missing, numbers.Real) and not isinstance(missing, bool)
        is_one = is_number and _is_finite(missing)
    if not is_one:
        raise ValueError(
            f"`missing` must be a finite number or one of {', '.join(_MISSING)}, got "
            f"{missing!r}."
        )
    if duplicates not in _DUPLICATES:
        raise ValueError(
            f"`duplicates` must be one of {', '.join(_DUPLICATES)}, got {duplicates!r}."
        )
    if timestamp is not None and duplicates != "last":
        raise ValueError(
            '`timestamp` must be None unless `duplicates` is "last", got '
            f"{timestamp!r} with {duplicates!r}."
        )


def _read(data: Any, names: list[str]) -> list[Any]:
    """The columns of these names: arrays, or series of pandas."""
    if isinstance(data, tuple):
        if len(data) != len(names):
            raise ValueError(
                f"`data` must have {len(names)} columns, {', '.join(names)}, got "
                f"{len(data)}."
            )
        return [_column(name, x) for name, x in zip(names, data, strict=True)]
    if isinstance(data, str | os.PathLike):
        data = _read_csv(data, names)
    if not (isinstance(data, Mapping) or hasattr(data, "columns")):
        raise ValueError(
            "`data` must be a path, a DataFrame, a mapping or a tuple of columns, got "
            f"{type(data).__name__}."
        )
    _check_names(names, data.keys() if isinstance(data, Mapping) else data.columns)
    return [_column(name, data[name]) for name in names]


def _read_csv(path: str | os.PathLike, names: list[str]) -> "DataFrame":
    pandas = _import_pandas()
    _check_names(names, pandas.read_csv(path, nrows=0).columns)
    # Integers stay integers where some are missing, and a column is of one type.
    options = {"dtype_backend": "numpy_nullable", "low_memory": False}
    return pandas.read_csv(path, usecols=names, **options)


def _import_pandas() -> ModuleType:
    try:
        return importlib.import_module("pandas")
    except ImportError as error:
        raise ImportError(
            'pandas is not installed: pip install "rollout[recommend]"'
        ) from error


def _check_names(names: list[str], there: Iterable[Any]) -> None:
    there = list(there)
    for name in names:
        if name not in there:
            raise ValueError(
                f"`data` must have the column {name!r}, got "
                f"{', '.join(map(str, there))}."
            )


def _column(name: str, values: Any) -> Any:
    """An array; a series of pandas as it is, since it knows what is missing."""
    if hasattr(values, "isna"):
        return values
    if hasattr(values, "dtype"):
        return np.asarray(values)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        # Not `np.asarray`, which makes strings of what is mixed, and of None.
        return np.fromiter(values, object)
    raise ValueError(
        f"`data` must have 1-D columns, got {type(values).__name__} for {name!r}."
    )


def _drop(
    names: list[str], columns: list[Any]
) -> tuple[list[np.ndarray], dict[str, int]]:
    """The rows that count, with feedback in float64; how many others, by reason."""
    is_missing = [_is_missing(column) for column in columns]
    values = _floats(names[2], columns[2], is_missing[2])
    reasons = {
        "missing_id": is_missing[0] | is_missing[1],
        "missing_timestamp": np.any(is_missing[3:], axis=0),
        "nonfinite_feedback": ~_is_finite(values),
    }
    kept = np.ones(len(values), bool)
    num_dropped = {}
    for reason, holds in reasons.items():
        num_dropped[reason] = int(np.sum(kept & holds))
        kept &= ~holds
    if not np.any(kept):
        raise ValueError(
            "`data` must have a row with a user, an item and finite feedback, got none "
            f"in {len(kept)} rows."
        )
    columns = [*columns[:2], values, *columns[3:]]
    return [np.asarray(column[kept]) for column in columns], num_dropped


def _is_missing(column: Any) -> np.ndarray:
    """`[K]` bool."""
    if hasattr(column, "isna"):
        return np.asarray(column.isna(), bool)
    if column.dtype.kind in "OT":
        return np.fromiter(map(_is_nothing, column), bool)
    if column.dtype.kind in "fcmM":
        return np.asarray(column != column)  # NaN and NaT
    return np.zeros(len(column), bool)


def _is_nothing(value: Any) -> bool:
    """None, NaN, NaT and NA: nothing else differs from itself."""
    is_same = value == value
    return value is None or not (isinstance(is_same, bool | np.bool_) and is_same)


def _floats(name: str, column: Any, is_missing: np.ndarray) -> np.ndarray:
    """`[K]` float64, NaN where it is missing."""
    column = np.asarray(column)
    if column.dtype.kind in "biuf":
        return column.astype(np.float64)
    values = np.full(len(column), np.nan)
    for row in np.flatnonzero(~is_missing):
        try:
            values[row] = float(column[row])
        except (TypeError, ValueError):
            raise ValueError(
                f"`data` must have numbers as {name!r}, got {column[row]!r} in row "
                f"{row}."
            ) from None
    return values


def _is_finite(values: Any) -> np.ndarray:
    """Whether float32, which tables are of, has finite numbers for them."""
    with np.errstate(over="ignore"):
        return np.isfinite(np.asarray(values, np.float32))


def _number(name: str, column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What there is, sorted, and where each row stands in that, `[K]` int64."""
    if column.dtype.kind != "O":
        return np.unique(column, return_inverse=True)
    try:
        ids = np.fromiter(sorted(set(column)), object)
    except TypeError as error:
        raise ValueError(
            f"`data` must have what can be hashed and sorted as {name!r}, got an error:"
            f" {error}."
        ) from error
    index = {x: number for number, x in enumerate(ids)}
    return ids, np.fromiter((index[x] for x in column), np.int64)


def _check_single(pair: np.ndarray, users: np.ndarray, items: np.ndarray) -> None:
    """Refuses pairs of which there are several."""
    _, first, inverse = np.unique(pair, return_index=True, return_inverse=True)
    rows = np.flatnonzero(first[inverse] != np.arange(len(pair)))
    if len(rows):
        user, item = divmod(int(pair[rows[0]]), len(items))
        raise ValueError(
            "`data` must have each pair once, got another row of user "
            f"{users[user]} and item {items[item]}, and {len(rows) - 1} more:"
            ' `duplicates="mean"` or "last" takes them.'
        )


def _take_last(
    pair: np.ndarray, values: np.ndarray, time: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """One row for each pair: the last one, or that of the latest time."""
    if time is not None:
        order = np.argsort(time, kind="stable")
        pair, values = pair[order], values[order]
    pair, row = np.unique(pair[::-1], return_index=True)
    return pair, values[::-1][row]


def _tabulate(
    pair: np.ndarray, values: np.ndarray, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The mean of each pair, 0 where there is none, and which there are, `[U, I]`."""
    pair, inverse, counts = np.unique(pair, return_inverse=True, return_counts=True)
    table, known = np.zeros(shape, np.float32), np.zeros(shape, bool)
    table.flat[pair] = np.bincount(inverse, values) / counts
    known.flat[pair] = True
    return table, known


def _complete(table: np.ndarray, known: np.ndarray, missing: float | str) -> np.ndarray:
    if missing == "mask":
        return table
    if isinstance(missing, str):
        axis = 1 if missing == "user_mean" else 0
        total = np.sum(table, axis, np.float64, keepdims=True)
        missing = total / np.sum(known, axis, keepdims=True)
    return np.where(known, table, np.asarray(missing, np.float32))


def _warn(num_dropped: dict[str, int], num_rows: int) -> None:
    counts = [f"{number} {reason}" for reason, number in num_dropped.items() if number]
    if counts:
        warnings.warn(
            f"`data` lost {sum(num_dropped.values())} of {num_rows} rows: "
            f"{', '.join(counts)}.",
            stacklevel=3,
        )

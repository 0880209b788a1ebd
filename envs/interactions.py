"""Recorded feedback as tables, which `RecommendationEnv` plays.

A log has one row for each rating. pandas makes of it what every user thinks of every
item, with a choice of what is put where nothing is known.
"""

import dataclasses
import itertools
import numbers
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.extras import load

if TYPE_CHECKING:
    from pandas import DataFrame

_MISSING = ("user_mean", "item_mean", "mask")
_DUPLICATES = ("mean", "last", "error")
_REASONS = ("missing_id", "missing_timestamp", "nonfinite_feedback", "duplicate")
_REAL: Any = numbers.Real  # which has no order that a type checker knows of
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Interactions:
    """Feedback of U users on I items: tables of NumPy, read from a log.

    Attributes:
        feedback: `[U, I]` float32, completed where it is not known.
        known: `[U, I]` bool, which pairs are in the data.
        users: `[U]`, the ids of users as pandas sorts them: user u is `users[u]`.
        items: `[I]`, the ids of items, likewise.
        popularity: `[I]` float32, the share of users with a known pair, in (0, 1].
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
    left. Ids are integers or text: in a CSV file a column whose ids are all written as
    integers is one of integers, and any other, as with "007", one of text. The tables
    are dense, with 5 bytes for each of U * I pairs.

    Args:
        data: the path of a CSV file, a DataFrame or a mapping with these columns; or a
            tuple of columns, user, item, feedback and, if `timestamp` is given, time.
        missing: what is put where a pair is not in the data: a finite number; the mean
            of the known pairs of the user, "user_mean", or of the item, "item_mean";
            or 0, "mask", where `known` is to be the mask of the environment.
        duplicates: what counts of several rows of one pair: their "mean"; the "last",
            by row or by `timestamp`, and the others are dropped; or an "error".
        user: name of the column of users.
        item: name of the column of items.
        feedback: name of the column of feedback, numbers.
        timestamp: name of the column of times, numbers or dates (as text in ISO 8601),
            if the last row is that of the latest time, of equal times the later row,
            and a row without a time is dropped.

    Returns:
        The tables, for `RecommendationEnv(tables.feedback)`, or with "mask" for
        `RecommendationEnv(tables.feedback, known=tables.known)`.

    Raises:
        ImportError: if pandas is not installed.
        ValueError: if an argument is not as above, a column is not there, no row is
            left, a pair has several rows and `duplicates` is "error", or ids are floats
            that are no integers, or so large that several ids are one float.
    """
    _check_options(missing, duplicates, timestamp)
    names = {"user": user, "item": item, "feedback": feedback, "timestamp": timestamp}
    log = _read(data, {key: name for key, name in names.items() if name is not None})
    rows, num_dropped = _drop(log, duplicates)
    if len(rows) < len(log):
        counts = ", ".join(f"{x} {reason}" for reason, x in num_dropped.items() if x)
        message = f"`data` lost {len(log) - len(rows)} of {len(log)} rows: {counts}."
        warnings.warn(message, stacklevel=2)
    table = rows.groupby(["user", "item"], observed=True)["feedback"].mean().unstack()
    known = table.notna().to_numpy()  # NaN stands where a pair is not in the data
    means: dict[Any, Any] = {
        "user_mean": table.mean(axis=1).to_numpy()[:, None],
        "item_mean": table.mean(axis=0).to_numpy(),
        "mask": 0.0,
    }
    return Interactions(
        feedback=np.where(known, table, means.get(missing, missing)).astype(np.float32),
        known=known,
        users=table.index.to_numpy(),
        items=table.columns.to_numpy(),
        popularity=known.mean(axis=0).astype(np.float32),
        num_dropped=num_dropped,
    )


def _check_options(missing: Any, duplicates: Any, timestamp: Any) -> None:
    is_number = isinstance(missing, _REAL) and abs(missing) <= _FLOAT32_MAX
    if not is_number and missing not in _MISSING:
        one = f"a finite number or one of {', '.join(_MISSING)}"
        raise ValueError(f"`missing` must be {one}, got {missing!r}.")
    if duplicates not in _DUPLICATES:
        one = f"one of {', '.join(_DUPLICATES)}"
        raise ValueError(f"`duplicates` must be {one}, got {duplicates!r}.")
    if timestamp is not None and duplicates != "last":
        raise ValueError('`timestamp` must be None unless `duplicates` is "last".')


def _read(data: Any, names: dict[str, str]) -> Any:
    """The columns of these names, under the keys of `names`, feedback in float64."""
    pandas = load("pandas", "recommend")
    if isinstance(data, str | os.PathLike):
        as_text = dict.fromkeys((names["user"], names["item"]), "string")
        # Times that are integers stay so where some are missing.
        backend: Any = {"dtype": as_text, "dtype_backend": "numpy_nullable"}
        data = pandas.read_csv(data, low_memory=False, **backend)
        data = data.assign(
            **{name: _from_text(data[name]) for name in as_text if name in data}
        )
    if isinstance(data, tuple) and len(data) == len(names):
        data = dict(zip(names.values(), data, strict=True))
    if not isinstance(data, Mapping | pandas.DataFrame):
        got = f"{len(data)} of them" if isinstance(data, tuple) else type(data).__name__
        raise ValueError(
            "`data` must be the path of a CSV file, a DataFrame, a mapping, or a tuple "
            f"of {len(names)} columns, got {got}."
        )
    if lost := [name for name in names.values() if name not in data]:
        raise ValueError(f"`data` must have the columns {lost}, got {list(data)}.")
    table: Any = data
    columns: dict[str, Any] = {key: table[name] for key, name in names.items()}
    for key in ("user", "item"):
        if isinstance(columns[key], list | tuple):  # integers stay so without some
            columns[key] = pandas.array(columns[key])
    log = pandas.DataFrame(columns)
    column: Any = pandas.to_numeric(log["feedback"])
    log = log.assign(feedback=column.astype("float64"))
    for key in ("user", "item"):
        log[key] = _ids(names[key], log[key])
    if "timestamp" in log:
        log["timestamp"] = _times(names["timestamp"], log["timestamp"], pandas)
    return log


def _from_text(column: Any) -> Any:
    """Ids of a CSV file: integers if each is written as one, else text."""
    texts = column.dropna()
    is_integer = texts.str.fullmatch(r"\s*(0|-?[1-9]\d{0,17})(\.0*)?\s*")
    if not is_integer.all():
        return column
    return column.str.strip().str.split(".").str[0].astype("Int64")


def _ids(name: str, column: Any) -> Any:
    """Checks that no two ids of a column are the same float."""
    if column.dtype.kind != "f":
        return column
    ids = column.dropna().astype("float64")
    most = 2 ** (np.finfo(str(column.dtype).lower()).nmant + 1)
    wrong = ids[(ids % 1 != 0) | (ids.abs() >= most)]
    if wrong.size:
        raise ValueError(
            f"`{name}` must be integers or text, got the float {wrong.iloc[0]}: beyond "
            f"{most} several ids are one float; read the column as text or `Int64`."
        )
    return column.astype("Int64")


def _times(name: str, column: Any, pandas: Any) -> Any:
    """Turns text into numbers or dates, by which it can be put in order."""
    if column.dtype.kind in "biufM":
        return column
    try:
        return pandas.to_numeric(column)
    except (ValueError, TypeError):
        pass
    try:
        return pandas.to_datetime(column, format="ISO8601")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"`{name}` must be numbers or dates in ISO 8601, got {column.iloc[0]!r}."
        ) from error


def _drop(log: Any, duplicates: str) -> tuple[Any, dict[str, int]]:
    """The rows that count, and how many others there are, by the reason."""
    ids = ["user", "item"]
    with_ids = log.dropna(subset=ids)
    timed = with_ids.dropna(subset=with_ids.columns.drop("feedback"))
    rows = finite = timed[timed["feedback"].abs() <= _FLOAT32_MAX]
    if finite.empty:
        what = "a row with a user, an item and finite feedback"
        raise ValueError(f"`data` must have {what}, got none in {len(log)} rows.")
    if duplicates == "error" and (again := rows[rows.duplicated(ids)]).size:
        user, item = again[ids].iloc[0]
        got = f"another row of user {user} and item {item}, and {len(again) - 1} more"
        raise ValueError(f"`data` must have each pair once, got {got}.")
    if duplicates == "last":
        by = ["timestamp"] if "timestamp" in rows else []
        rows = rows.sort_values(by, kind="stable").drop_duplicates(ids, keep="last")
    sizes = itertools.pairwise(map(len, (log, with_ids, timed, finite, rows)))
    return rows, {x: a - b for x, (a, b) in zip(_REASONS, sizes, strict=True)}

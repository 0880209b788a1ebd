"""`from_interactions`: reads recorded feedback as tables for `RecommendationEnv`.

A log has one record for each rating. pandas turns it into a table of users and items,
and an option says how unknown pairs are completed.
"""

import dataclasses
import numbers
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.envs.optional_import import load

if TYPE_CHECKING:
    from pandas import DataFrame

_MISSING = ("user_mean", "item_mean", "mask")
_REAL: Any = numbers.Real  # a type checker knows no order of it
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Interactions:
    """Feedback of U users on I items: tables of NumPy, read from a log.

    Attributes:
        feedback: `[U, I]` float32, completed where it is not known.
        known: `[U, I]` bool, True for pairs in the data.
        users: `[U]`, the ids of users as pandas sorts them: user u is `users[u]`.
        items: `[I]`, the ids of items as pandas sorts them: item i is `items[i]`.
        popularity: `[I]` float32, the share of users with a known pair, in (0, 1].
        num_dropped: number of dropped records by reason: "missing_id", else
            "nonfinite_feedback".
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
    user: str = "user_id",
    item: str = "item_id",
    feedback: str = "feedback",
) -> Interactions:
    """Makes tables from a log of users, items and feedback.

    A record without a user or an item, or whose feedback is not finite in float32, is
    dropped; a warning says how many. Users and items are those of the other records.
    Ids are integers or text: in a CSV file a column whose ids are all written as
    integers has integers, and any other, for instance with "007", has text. Of several
    records of a pair the mean counts; for the last one pass a DataFrame after
    `drop_duplicates(["user_id", "item_id"], keep="last")`. The tables are dense, with 5
    bytes for each of U * I pairs.

    Args:
        data: the path of a CSV file, a DataFrame or a mapping with these columns; or a
            tuple of columns, user, item and feedback.
        missing: completes pairs that are not in the data: a finite number; the mean of
            the user's known pairs, "user_mean", or of the item's, "item_mean"; or 0,
            "mask", if `known` becomes the mask of the environment.
        user: name of the column of users.
        item: name of the column of items.
        feedback: name of the column of feedback, numbers.

    Returns:
        The tables, for `RecommendationEnv(tables.feedback)`, or with "mask" for
        `RecommendationEnv(tables.feedback, known=tables.known)`.

    Raises:
        ModuleNotFoundError: if pandas is not installed.
        ValueError: if an argument is not as above, a column is missing, no record is
            left, or ids are floats that are no integers, or so large that several ids
            are one float.
    """
    number: Any = missing
    is_number = isinstance(missing, _REAL) and abs(number) <= _FLOAT32_MAX
    if not is_number and missing not in _MISSING:
        one = f"a finite number or one of {', '.join(_MISSING)}"
        raise ValueError(f"`missing` must be {one}, got {missing!r}.")
    log = _read(data, {"user": user, "item": item, "feedback": feedback})
    with_ids = log.dropna(subset=["user", "item"])
    # False of NaN, too.
    records = with_ids[with_ids["feedback"].abs() <= _FLOAT32_MAX]
    if records.empty:
        what = "a record with a user, an item and finite feedback"
        raise ValueError(f"`data` must have {what}, got none in {len(log)} records.")
    num_dropped = {
        "missing_id": len(log) - len(with_ids),
        "nonfinite_feedback": len(with_ids) - len(records),
    }
    if len(records) < len(log):
        counts = ", ".join(f"{x} {reason}" for reason, x in num_dropped.items() if x)
        lost = f"{len(log) - len(records)} of {len(log)} records"
        warnings.warn(f"`data` lost {lost}: {counts}.", stacklevel=2)
    pairs = records.groupby(["user", "item"], observed=True)
    table = pairs["feedback"].mean().unstack()
    known = table.notna().to_numpy()  # NaN if a pair is not in the data
    # pandas leaves out the pairs that are not known.
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


def _read(data: Any, names: dict[str, str]) -> Any:
    """Reads the columns `names`, under their keys, with feedback in float64."""
    pandas = load("pandas", "recommend")
    if isinstance(data, str | os.PathLike):
        as_text = dict.fromkeys((names["user"], names["item"]), "string")
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
        if isinstance(columns[key], list | tuple):  # integers stay, if some are missing
            columns[key] = pandas.array(columns[key])
    log = pandas.DataFrame(columns)
    column: Any = pandas.to_numeric(log["feedback"])
    log = log.assign(feedback=column.astype("float64"))
    for key in ("user", "item"):
        log[key] = _ids(names[key], log[key])
    return log


def _from_text(column: Any) -> Any:
    """Converts ids of a CSV file: to integers if each is written as one."""
    texts = column.dropna()
    # Not "007", whose zeros belong to it; 18 digits fit an int64.
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

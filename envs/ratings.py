"""`from_interactions`: converts recorded feedback to tables for `RecommendationEnv`.

A log has one record per rating. pandas converts it to a table of users and items, and
an option determines the values of missing pairs.
"""

import dataclasses
import numbers
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.base.checks import import_optional

if TYPE_CHECKING:
    from pandas import DataFrame

_MISSING = ("user_mean", "item_mean", "mask")
_REAL: Any = numbers.Real  # `Any`: type checkers find no comparison of `numbers.Real`
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Interactions:
    """Feedback of U users on I items: NumPy tables, read from a log.

    Attributes:
        feedback: `[U, I]` float32, with values for missing pairs filled in.
        known: `[U, I]` bool, True for pairs in the data.
        users: `[U]`, the sorted ids of users: user u has the id `users[u]`.
        items: `[I]`, the sorted ids of items: item i has the id `items[i]`.
        popularity: `[I]` float32, fraction of users who rated the item, in (0, 1].
        num_dropped: number of dropped records by reason: "missing_id", otherwise
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
    """Converts a log of users, items and feedback to tables.

    A record is dropped if the user or the item is missing, or if the feedback is not
    finite in float32. A warning reports the number of dropped records. The tables have
    a row for every user and a column for every item in the remaining records.

    Ids are integers or text. A column of a CSV file has integer ids if every id is
    written as an integer, and otherwise text ids, for example because of "007". If a
    pair has several records, the feedback is their mean. To use the last record
    instead, pass a DataFrame after
    `drop_duplicates(["user_id", "item_id"], keep="last")`. The tables are dense and
    take 5 bytes for each of U * I pairs.

    Args:
        data: path of a CSV file, DataFrame or mapping with the columns below; or a
            tuple of three columns: user, item and feedback.
        missing: value for pairs without a record: a finite number; "user_mean", the
            mean of the user's known pairs; "item_mean", the mean of the item's known
            pairs; or "mask", which fills in 0, if `known` becomes the mask of the
            environment.
        user: name of the column of users.
        item: name of the column of items.
        feedback: name of the column of feedback, which contains numbers.

    Returns:
        The tables. Pass them to `RecommendationEnv(tables.feedback)`; if `missing` is
        "mask", to `RecommendationEnv(tables.feedback, known=tables.known)`.

    Raises:
        ModuleNotFoundError: if pandas is not installed.
        ValueError: if an argument is invalid, a column is missing or no record remains;
            or if ids are non-integer floats, or floats so large that different ids have
            the same value.
    """
    number: Any = missing
    is_number = isinstance(missing, _REAL) and abs(number) <= _FLOAT32_MAX
    if not is_number and missing not in _MISSING:
        choices = f"a finite number or one of {', '.join(_MISSING)}"
        raise ValueError(f"`missing` must be {choices}, got {missing!r}.")
    log = _read(data, {"user": user, "item": item, "feedback": feedback})
    with_ids = log.dropna(subset=["user", "item"])
    # The comparison is also False for NaN.
    records = with_ids[with_ids["feedback"].abs() <= _FLOAT32_MAX]
    if records.empty:
        condition = "have a record with a user, an item and finite feedback"
        raise ValueError(f"`data` must {condition}, got none in {len(log)} records.")
    num_dropped = {
        "missing_id": len(log) - len(with_ids),
        "nonfinite_feedback": len(with_ids) - len(records),
    }
    if len(records) < len(log):
        counts = ", ".join(f"{x} {reason}" for reason, x in num_dropped.items() if x)
        share = f"{len(log) - len(records)} of {len(log)} records"
        warnings.warn(f"Dropped {share} of `data`: {counts}.", stacklevel=2)
    pairs = records.groupby(["user", "item"], observed=True)
    table = pairs["feedback"].mean().unstack()
    mask = table.notna().to_numpy()  # missing pairs are NaN
    # The means of pandas ignore missing pairs.
    means: dict[Any, Any] = {
        "user_mean": table.mean(axis=1).to_numpy()[:, None],
        "item_mean": table.mean(axis=0).to_numpy(),
        "mask": 0.0,
    }
    return Interactions(
        feedback=np.where(mask, table, means.get(missing, missing)).astype(np.float32),
        known=mask,
        users=table.index.to_numpy(),
        items=table.columns.to_numpy(),
        popularity=mask.mean(axis=0).astype(np.float32),
        num_dropped=num_dropped,
    )


def _read(data: Any, names: dict[str, str]) -> Any:
    """Reads the columns `names` and renames them to the keys; feedback is float64."""
    pandas = import_optional("pandas", "recommend")
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
    if missing_names := [name for name in names.values() if name not in data]:
        raise ValueError(
            f"`data` must have the columns {missing_names}, got {list(data)}."
        )
    table: Any = data
    columns: dict[str, Any] = {key: table[name] for key, name in names.items()}
    for key in ("user", "item"):
        if isinstance(columns[key], list | tuple):  # keeps integers if ids are missing
            columns[key] = pandas.array(columns[key])
    log = pandas.DataFrame(columns)
    column: Any = pandas.to_numeric(log["feedback"])
    log = log.assign(feedback=column.astype("float64"))
    for key in ("user", "item"):
        log[key] = _ids(names[key], log[key])
    return log


def _from_text(column: Any) -> Any:
    """Converts the ids of a CSV column to integers if all are written as integers."""
    texts = column.dropna()
    # "007" remains text, since its zeros are significant. 18 digits fit into int64.
    is_integer = texts.str.fullmatch(r"\s*(0|-?[1-9]\d{0,17})(\.0*)?\s*")
    if not is_integer.all():
        return column
    return column.str.strip().str.split(".").str[0].astype("Int64")


def _ids(name: str, column: Any) -> Any:
    """Checks that float ids of a column are distinct integers; converts them."""
    if column.dtype.kind != "f":
        return column
    ids = column.dropna().astype("float64")
    limit = 2 ** (np.finfo(str(column.dtype).lower()).nmant + 1)
    invalid = ids[(ids % 1 != 0) | (ids.abs() >= limit)]
    if invalid.size:
        raise ValueError(
            f"`{name}` must be integers or text, got the float {invalid.iloc[0]}: "
            f"floats from {limit} cannot distinguish ids. Read the column as text or "
            "`Int64`."
        )
    return column.astype("Int64")

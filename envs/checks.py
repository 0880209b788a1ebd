"""Checks of the options of environments."""

from typing import Any


def count(name: str, value: Any) -> None:
    """Refuses a count that is not a Python int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}.")

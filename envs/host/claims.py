"""Notes who stepped environments last, so that nobody goes on in another's episode."""

import itertools
from typing import Any

_LAST: dict[int, int] = {}  # by the id of the environments, the number of the user
_NUMBERS = itertools.count(1)


def new_user() -> int:
    """A number that no other user of environments in this process has."""
    return next(_NUMBERS)


def claim(env: Any, user: int) -> None:
    """Notes that the episodes of these environments are this user's from now on."""
    _LAST[id(env)] = user


def is_claimed(env: Any, user: int) -> bool:
    """Tells whether nobody else has claimed them since this user did."""
    return _LAST.get(id(env)) == user

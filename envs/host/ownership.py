"""Notes who stepped environments last, so that none goes on in another's episode."""

import itertools
from typing import Any

from rollout.envs.host.types import HostVectorEnv

_NUMBERS = itertools.count(1)


def new_user() -> int:
    """Returns a number that no other user of environments in this process has."""
    return next(_NUMBERS)


def claim(env: Any, user: int) -> None:
    """Notes that the episodes of these environments belong to this user from now on."""
    object.__setattr__(_innermost(env), "_rollout_user", user)  # it may be frozen


def is_claimed(env: Any, user: int) -> bool:
    """Returns whether this user was the last to claim them."""
    return getattr(_innermost(env), "_rollout_user", None) == user


def _innermost(env: Any) -> Any:
    """Returns what is in all wrappers: several may be around the same."""
    # A collector around a wrapper and one around its environment step the same one.
    while isinstance(inner := getattr(env, "env", None), HostVectorEnv):
        env = inner
    return env

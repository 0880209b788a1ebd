"""Records the last user of environments, so that stale users can be rejected."""

import itertools
from typing import Any

from rollout.envs.host.types import HostVectorEnv

_NUMBERS = itertools.count(1)


def new_user() -> int:
    """Returns the id of a new user, unique in this process."""
    return next(_NUMBERS)


def claim(env: Any, user: int) -> None:
    """Records `user` as the owner of the current episodes of these environments."""
    object.__setattr__(_innermost(env), "_rollout_user", user)  # also if it is frozen


def is_claimed(env: Any, user: int) -> bool:
    """Returns whether `user` is the owner of the current episodes."""
    return getattr(_innermost(env), "_rollout_user", None) == user


def _innermost(env: Any) -> Any:
    """Returns the environments inside all wrappers."""
    # Collectors of a wrapper and of the wrapped object step the same environments.
    while isinstance(inner := getattr(env, "env", None), HostVectorEnv):
        env = inner
    return env

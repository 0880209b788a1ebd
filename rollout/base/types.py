"""Aliases for annotations that all packages use.

Both are aliases of `Any`. `ArrayTree` is a pytree of arrays: no annotation can express
its structure, and type checkers reject every access to a part of `chex.ArrayTree`, a
union. `AnySpace` is a `rollout.envs.spaces.Space`, or any object that
`rollout.envs.spaces.as_space` converts to a space. The aliases are imports, since
pyright interprets `a | b` on values of an assigned alias as a union of types.
"""

from typing import Any as AnySpace
from typing import Any as ArrayTree

__all__ = ["AnySpace", "ArrayTree"]

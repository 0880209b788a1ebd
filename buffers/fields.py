"""Reads and replaces fields of a transition by name.

A transition may be a dataclass, a named tuple or a mapping. The values `()` and None
mark an unrecorded field.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from rollout.envs.types import ArrayTree

FLAGS = ("terminated", "truncated")


def get(tree: ArrayTree, name: str) -> ArrayTree | None:
    """Returns the field `name` of `tree`, or None if it is not recorded."""
    value = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
    return None if isinstance(value, tuple) and not value else value


def replace(tree: ArrayTree, **values: ArrayTree) -> ArrayTree:
    """Returns `tree` with fields replaced; ignores fields that `tree` lacks."""
    if isinstance(tree, Mapping):
        mapping_type: Any = type(tree)
        return mapping_type({**tree, **{k: values[k] for k in values if k in tree}})
    values = {name: values[name] for name in values if hasattr(tree, name)}
    if hasattr(tree, "_replace"):
        return tree._replace(**values)
    return dataclasses.replace(tree, **values) if values else tree


def done(tree: ArrayTree) -> jax.Array:
    """Returns `terminated | truncated`, bool."""
    terminated, truncated = need(tree, FLAGS, "The buffer")
    return terminated | truncated


def need(tree: ArrayTree, names: tuple[str, ...], caller: str) -> tuple[Any, ...]:
    """Returns the fields `names`; raises `ValueError` if `tree` lacks one."""
    values = tuple(get(tree, name) for name in names)
    for name, value in zip(names, values, strict=True):
        if value is None:
            raise ValueError(f"{caller} needs the field `{name}` in the transition.")
    return values

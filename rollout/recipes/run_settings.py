"""Settings of a run as JSON: `describe` reads them, `check_settings` compares them.

The file `agent.json` of a run contains the class of the agent, the hyperparameters, the
spaces, and the class and attributes of the environments and networks. It contains no
code: functions are compared by name.
"""

import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

import rollout
from rollout.base import trees
from rollout.envs import spaces
from rollout.envs.host.types import HostVectorEnv
from rollout.envs.host.wrappers import HostWrapper

_IS_LEAF = "pytree_node"  # key of flax in the metadata of a field
_MAX_ENTRIES = 100  # attributes of one object; more are replaced by a digest


def describe(agent: Any) -> dict[str, Any]:
    """Returns the settings from which `load` builds the agent, as JSON."""
    settings = {
        "agent": name_of(type(agent)),
        "rollout": rollout.__version__,
        "config": {
            field.name: config_value(getattr(agent.config, field.name))
            for field in fields(agent.config)
        },
        "fields": describe_fields(
            {name: getattr(agent, name) for name in field_defaults(type(agent))}
        ),
        "env": describe_env(agent.env),
        "observation_space": spaces.to_json(agent.spec.observation_space),
        "action_space": spaces.to_json(agent.spec.action_space),
        "num_envs": agent.spec.num_envs,
    }
    return json.loads(json.dumps(settings))


def field_defaults(agent_class: Any) -> dict[str, Any]:
    """Returns the fields of an agent that `agent.json` describes, with defaults."""
    skipped = "env", "config", "mesh"
    return {x.name: x.default for x in fields(agent_class) if x.name not in skipped}


def describe_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Describes objects such as networks, by name."""
    entries: dict[str, Any] = {}
    for name, value in values.items():
        entries |= describe_value(name, value)
    return entries


def describe_env(env: Any, name: str = "env") -> dict[str, Any]:
    """Describes environments: the class, and the attributes by path.

    The attributes of host environments change in an episode. Their description has the
    classes and options of wrappers, and the functions that create the environments.
    """
    if not isinstance(env, HostVectorEnv):
        return describe_value(name, env)
    entries: dict[str, Any] = {name: type(env).__qualname__}
    if isinstance(env, HostWrapper):
        options = attributes(env) if is_dataclass(env) else {}
        options.pop("env", None)
        entries |= describe_children(name, options, ())
        return entries | describe_env(env.env, f"{name}.env")
    source = env.source
    if isinstance(source, list):  # often one function for all environments
        source = list({id(x): x for x in source}.values())
    return describe_value(name, source) if source is not None else entries


def describe_value(
    name: str, value: Any, parents: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Describes an object by its numbers, arrays and names of functions.

    Args:
        name: path of the object, for example "env.params".
        value: the object.
        parents: ids of the objects that contain it.

    Returns:
        The class or number of the object by `name`, and the attributes by path.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return {name: value}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return {name: describe_array(value)}
    if isinstance(value, functools.partial):
        children = {**dict(enumerate(value.args)), **value.keywords}
    elif callable(value) and not is_dataclass(type(value)):
        children = {}
    else:
        children = {} if id(value) in parents else attributes(value)
    entries = describe_children(name, children, (*parents, id(value)))
    if len(entries) > _MAX_ENTRIES:
        text = json.dumps(entries, sort_keys=True)
        entries = {f"{name}.digest": hashlib.sha256(text.encode()).hexdigest()[:16]}
    is_sequence = isinstance(value, tuple | list | set | frozenset | Mapping)
    return {name: len(value) if is_sequence else name_of_value(value)} | entries


def describe_children(
    name: str, children: Mapping[Any, Any], parents: tuple[int, ...]
) -> dict[str, Any]:
    """Describes attributes or elements, each under the path `name.child`."""
    entries: dict[str, Any] = {}
    for child, value in children.items():
        entries |= describe_value(f"{name}.{child}", value, parents)
    return entries


def attributes(value: Any) -> dict[Any, Any]:
    """Returns the attributes or elements of an object by name.

    Omits attributes that may change while an object is used: cached properties, and
    private objects such as viewers.
    """
    if hasattr(value, "items"):
        return dict(value.items())
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        return dict(zip(names, value, strict=True))
    if is_dataclass(value):
        # `repr=False` marks internal fields, for example the parent of a flax module.
        # Leaves are parameters.
        names = [x.name for x in fields(value) if x.repr or x.metadata.get(_IS_LEAF)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    members = getattr(value, "__dict__", {}).items()
    return {name: x for name, x in members if not is_internal(value, name, x)}


def is_internal(owner: Any, name: str, value: Any) -> bool:
    """Returns whether an attribute is a cached property or a private object."""
    if isinstance(getattr(type(owner), name, None), functools.cached_property):
        return True
    is_data = value is None or hasattr(value, "shape") or hasattr(value, "__len__")
    is_data |= isinstance(value, bool | int | float) or is_dataclass(value)
    return name.startswith("_") and not is_data


def describe_array(value: Any) -> Any:
    """Returns a small array as a list or number, and any other as a digest."""
    if isinstance(value, Tracer):  # a copy in a static attribute; the leaf is described
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array):
        value = trees.unwrap_keys(value)
    array = np.asarray(value)
    if array.size <= 16 and array.dtype.kind in "biuf":
        return array.tolist()
    digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
    return f"{array.dtype}{list(array.shape)} {digest}"


def name_of_value(value: Any) -> str:
    """Returns the name of a function or class, or of the class of an object."""
    if isinstance(value, functools.partial):
        return f"partial of {name_of_value(value.func)}"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def config_value(value: Any) -> Any:
    """Returns a hyperparameter as JSON; functions are replaced by their names."""
    if callable(value):
        module = getattr(value, "__module__", type(value).__module__)
        return {"function": f"{module}.{name_of_value(value)}"}
    if isinstance(value, tuple | list):
        return [config_value(x) for x in value]
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    return np.asarray(value).tolist() if is_array else value


def value_text(value: Any) -> str:
    """Formats a setting for a message."""
    if isinstance(value, dict) and "function" in value:
        return f"the function {value['function'].replace('.<locals>', '')}"
    text = repr(value)
    return text if len(text) < 80 else f"{text[:60]}..., {len(text)} characters"


def name_of(agent_class: type) -> str:
    """Returns the module and the name of a class, even if the module is `__main__`."""
    module = agent_class.__module__
    spec = getattr(sys.modules[module], "__spec__", None)
    return f"{spec.name if spec else module}:{agent_class.__qualname__}"


def check_settings(
    settings: Mapping[str, Any], saved: Mapping[str, Any], purpose: str
) -> None:
    """Raises unless settings equal the saved ones, except the length of the training.

    Settings that only one version of rollout or of a class has are not compared.

    Args:
        settings: result of `describe`, or a part of it.
        saved: the contents of `agent.json`.
        purpose: end of the condition, for example "to resume the run in runs/a".
    """
    values, saved = flatten(settings), flatten(saved)
    for name, value in values.items():
        if name not in saved or name in ("config.num_updates", "rollout"):
            continue
        # Compare text: NaN differs from itself.
        if json.dumps(value) != json.dumps(saved[name]):
            raise ValueError(
                f"`{name.removeprefix('config.')}` must be {value_text(saved[name])} "
                f"{purpose}, got {value_text(value)}."
            )


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Moves hyperparameters, as `config.name`, fields and `env` to the top level."""
    config = {f"config.{x}": y for x, y in settings.get("config", {}).items()}
    parts = config, settings.get("fields", {}), settings.get("env", {})
    rest = {x: y for x, y in settings.items() if x not in ("config", "fields", "env")}
    return rest | {name: value for part in parts for name, value in part.items()}

"""Checks options, arguments and the results of users' callables.

Messages contain the condition and the value. Checks of arrays run while JAX traces and
have no cost at run time.
"""

import importlib
import inspect
import itertools
import numbers
import operator
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from rollout.base.types import ArrayTree

INT32_MAX = 2**31 - 1  # steps, lanes and episodes are counted in int32
MAX_EPISODE_STEPS = 1_000_000  # default, which bounds calls if an episode never ends
_REAL: Any = numbers.Real  # `Any`: type checkers find no comparison of `Real`
# An attribute of the environments of each suite, and their adapter.
_ADAPTERS = (
    ("reset_env", "from_gymnax"),
    ("step_env", "suites.from_jaxmarl"),
    ("action_size", "suites.from_brax"),
    ("observation_spec", "suites.from_jumanji"),
    ("seed", "from_gymnasium"),
)


def check_int(
    name: str, value: Any, *, least: int = 1, most: int | None = INT32_MAX
) -> int:
    """Checks an integer from `least` to `most`; returns it as a Python int."""
    is_int = not isinstance(value, bool | jax.Array) and hasattr(value, "__index__")
    if not is_int or operator.index(value) < least:
        raise ValueError(f"`{name}` must be an int of at least {least}, got {value!r}.")
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be at most {most}, got {value!r}.")
    return operator.index(value)


def check_not_gymnasium(env: Any) -> None:
    """Raises for an environment of Gymnasium or PettingZoo without an adapter."""
    check_not_pettingzoo(env)
    modules = {cls.__module__.partition(".")[0] for cls in type(env).__mro__}
    if modules & {"gym", "gymnasium"} and jax.tree_util.all_leaves([env]):
        raise ValueError(
            f"`env` must not be an environment of Gymnasium, got {type(env).__name__}. "
            f"Write `rollout.envs.from_gymnasium({type(env).__name__}, num_envs=4)` "
            "for a `HostCollector`, an agent or `check_env`."
        )


def check_not_pettingzoo(env: Any) -> None:
    """Raises if `env` is an environment of PettingZoo, which is not a pytree."""
    if hasattr(env, "possible_agents") and jax.tree_util.all_leaves([env]):
        raise ValueError(
            "`env` must not be an environment of PettingZoo, got "
            f"{type(env).__name__}: `rollout.envs.from_pettingzoo` adapts it, for a "
            "`HostCollector`; on the command line, write `pettingzoo:` before "
            "`module:name` or `file.py:name`."
        )


def check_single_env(env: Any) -> None:
    """Checks that `env` is a single environment and a pytree."""
    check_not_gymnasium(env)
    if hasattr(env, "num_envs"):
        raise ValueError(
            "`env` must be a single environment, got parallel environments: wrap or "
            "check it before `vectorize`."
        )
    missing = [name for name in ("reset", "step") if not hasattr(env, name)]
    # Inspect the class, because a field of a custom environment may be named `seed`.
    adapters = [adapter for name, adapter in _ADAPTERS if hasattr(type(env), name)]
    hint = f": `rollout.envs.{adapters[0]}` adapts it" if adapters else ""
    if missing:
        raise ValueError(
            "`env` must have the methods `reset` and `step` of "
            f"`rollout.envs.types.Env`, got {type(env).__name__} without {missing[0]}"
            f"{hint}."
        )
    if jax.tree_util.all_leaves([env]):
        raise ValueError(
            "`env` must be a pytree, such as a `flax.struct.dataclass`, got a plain "
            f"{type(env).__name__}{hint}."
        )


def check_flag(name: str, value: Any) -> jax.Array:
    """Checks that a flag of `step` is a bool or an integer; returns it as a bool."""
    value = check_real(name, value)
    if jnp.issubdtype(value.dtype, jnp.inexact):
        raise ValueError(
            f"`env.step` must return `{name}` as bool, got {value.dtype}: compare it "
            "with a number, for example `done > 0.5`."
        )
    return value.astype(bool)


def check_real(name: str, value: Any) -> jax.Array:
    """Checks that an output of `step` is a real number or an array of real numbers."""
    is_number = isinstance(value, _REAL) or _is_array(value)
    if not is_number or jnp.iscomplexobj(value):
        raise ValueError(
            f"`env.step` must return `{name}` as a real number or an array, got "
            f"{describe(value)}."
        )
    return jnp.asarray(value)


def check_multiple(name: str, value: int, factor: int, label: str) -> None:
    """Checks a multiple of `factor`; the message contains `label`."""
    if value % factor:
        below = value // factor * factor
        nearest = f"are {below} or {below + factor}" if below else f"is {factor}"
        raise ValueError(
            f"`{name}` must be a multiple of {label}, got {value}; the nearest "
            f"{nearest}."
        )


def check_positive(name: str, value: Any) -> None:
    """Checks a number above 0."""
    if not (_is_real(value) and value > 0):
        raise ValueError(f"`{name}` must be above 0, got {value!r}.")


def check_fraction(
    name: str, value: Any, *, lowest: int = 0, highest: float = 1
) -> None:
    """Checks a number within bounds, or the shape and dtype of a scalar array."""
    if _is_real(value):
        is_wrong = not lowest <= value <= highest
    else:
        is_wrong = not has_dtype(value, jnp.number) or value.shape != ()
    if is_wrong:
        bounds = f"[{lowest}, {highest}]"
        raise ValueError(f"`{name}` must be a number in {bounds}, got {value!r}.")


def check_int_dtype(dtype: Any, low: int, high: int) -> None:
    """Checks that the range of an integer dtype contains `low` to `high`."""
    limits = jnp.iinfo(dtype)
    if not limits.min <= low <= high <= limits.max:
        raise ValueError(
            f"`dtype` must hold the integers from {low} to {high}, got {limits.dtype} "
            f"with the range from {limits.min} to {limits.max}."
        )


def _is_real(value: Any) -> bool:
    return isinstance(value, _REAL) and not isinstance(value, bool)


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def has_dtype(value: Any, category: Any) -> bool:
    """Returns whether a value is an array with a dtype such as `jnp.integer`."""
    return _is_array(value) and jnp.issubdtype(value.dtype, category)


def is_concrete(tree: Any) -> bool:
    """Returns whether every leaf is a number or a concrete array.

    JAX also builds pytrees of tracers and of placeholder objects.
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    types = (numbers.Number, np.ndarray, np.generic, jax.Array)
    return all(
        isinstance(leaf, types) and not isinstance(leaf, Tracer) for leaf in leaves
    )


def check_key(key: Any) -> None:
    """Checks that `key` is one typed key."""
    is_key = has_dtype(key, jax.dtypes.prng_key)
    if not is_key or key.shape:
        hint = " For several keys, call `jax.vmap` of this function." if is_key else ""
        raise ValueError(
            "`key` must be one typed key, for example `jax.random.key(seed)`, got "
            f"{describe(key)}.{hint}"
        )


def check_type(text: str, value: Any, types: Any) -> None:
    """Checks that a value has one of these types; `text` begins the error message."""
    if not isinstance(value, types):
        raise ValueError(f"{text}, got {describe(value)}.")


def check_function(name: str, value: Any, *arguments: str) -> None:
    """Checks that a function can be called with these arguments."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # builtins may have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ValueError(
            f"`{name}` must be a function of ({', '.join(arguments)}), got a function "
            f"of {signature}."
        ) from None


def check_max_episode_steps(value: Any, return_trajectory: bool = False) -> int:
    """Checks a number of steps; clips numbers above the largest int32."""
    if value is None:
        if return_trajectory:
            raise ValueError(
                "`max_episode_steps` must be given with `return_trajectory=True`, "
                "since it is the number of rows per episode, got None."
            )
        return MAX_EPISODE_STEPS
    return min(check_int("max_episode_steps", value, most=None), INT32_MAX)


def check_min_steps(value: Any, per_env: bool) -> int | None:
    """Checks the number of steps after which no queued episode starts."""
    if value is not None and per_env:
        raise ValueError(
            "`min_steps` must be None with `per_env=True`, since every lane plays all "
            f"its episodes, got {value!r}. Remove one of the two options."
        )
    return None if value is None else check_int("min_steps", value)


def check_choice(name: str, value: Any, choices: Collection[str | int | None]) -> None:
    """Checks that a value is one of the given strings, numbers or None."""
    if isinstance(value, bool) or value not in choices:
        names = " or ".join(repr(x).replace("'", '"') for x in choices)
        raise ValueError(f"`{name}` must be {names}, got {value!r}.")


def check_collector(value: Any) -> None:
    """Checks that a value is a collector."""
    if not hasattr(value, "collect_steps"):
        hint = " Pass `agent.collector`." if hasattr(value, "collector") else ""
        raise ValueError(
            "`collector` must be a `Collector` or a `HostCollector`, got "
            f"{type(value).__name__}.{hint}"
        )


def check_jax_collector(value: Any) -> None:
    """Raises if a collector does not have JAX environments."""
    if getattr(value, "is_host", True):
        raise ValueError(
            "`collector` must be a `Collector`, whose environments are in JAX, got "
            f"{type(value).__name__}. To train an agent on several devices, pass the "
            "mesh to it: `PPO(env, config, mesh=mesh)`."
        )


def check_frozen(collector: Any) -> None:
    """Raises if the environments still update normalization statistics."""
    if collector.env.learns:
        raise ValueError(
            "`collector` must have fixed normalization statistics, got a "
            f"{type(collector.env).__name__} that updates them: pass "
            "`collector.freeze(carry)` with the carry of the training."
        )


def check_num_episodes(name: str, value: Any, env: Any) -> tuple[int, bool]:
    """Checks the number of episodes of an evaluation.

    Args:
        name: name of the argument.
        value: N, at least 1; a multiple of B if the lanes have different parameters, as
            in `rollout.envs.vectorize_each`: all lanes then play equally often.
        env: the `B` parallel environments.

    Returns:
        `num_episodes` and `per_env` of `collect_episodes`: N and False, or N / B and
        True if the lanes differ.
    """
    value = check_int(name, value)
    inner = env
    while inner is not None and not getattr(inner, "each", False):
        inner = getattr(inner, "env", None)
    if inner is None:
        return value, False
    if value % env.num_envs:
        higher = -(-value // env.num_envs) * env.num_envs
        raise ValueError(
            f"`{name}` must be a multiple of the {env.num_envs} lanes of "
            f"`vectorize_each`, which play equally often, got {value}. Pass {higher}."
        )
    return value // env.num_envs, True


def is_tracing() -> bool:
    """Returns whether JAX is currently tracing a function."""
    return isinstance(jnp.add(1, 1), Tracer)


def check_outside_jit(name: str) -> None:
    """Raises while JAX traces: a Python loop would run only at trace time."""
    if is_tracing():
        raise ValueError(
            f"`{name}` runs in Python and must be called outside of `jit`, got a call "
            "while JAX traces a function."
        )


def check_leading_axes(text: str, tree: ArrayTree, axes: tuple[int, ...]) -> None:
    """Checks that the shapes of all leaves begin with `axes`, for example `(B,)`."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if jnp.shape(leaf)[: len(axes)] != axes:
            got = f"{describe(leaf)}{_at(path)}"
            raise ValueError(f"{text} with the leading axes {axes}, got {got}.")


def check_shape(
    text: str, value: Any, shape: tuple[int, ...], dtype: Any = None
) -> None:
    """Checks the shape of an array, and the dtype unless `dtype` is None.

    `text` begins the error message.
    """
    is_wrong = not _is_array(value) or value.shape != shape
    if is_wrong or (dtype is not None and value.dtype != dtype):
        name = "an array" if dtype is None else jnp.dtype(dtype).name
        raise ValueError(f"{text} {name} of shape {shape}, got {describe(value)}.")


def check_mesh(mesh: Any, axis: Any = None) -> tuple[jax.sharding.Mesh, str]:
    """Checks a device mesh and the name of the axis over which lanes are sharded.

    Args:
        mesh: the mesh.
        axis: name of the axis. None for the only axis, or for "lanes" among several.

    Returns:
        The mesh with axes of type Auto, because Explicit axes would become part of the
        types of arrays; and the name of the axis.
    """
    text = "`mesh` must be a `jax.sharding.Mesh`, for example from `jax.make_mesh`"
    check_type(text, mesh, jax.sharding.Mesh)
    if axis is None:
        axis = mesh.axis_names[0] if len(mesh.axis_names) == 1 else "lanes"
        if axis not in mesh.shape:
            raise ValueError(
                '`mesh` must have one axis, or an axis "lanes", got the axes '
                f"{', '.join(mesh.shape)}."
            )
    check_choice("axis", axis, mesh.axis_names)
    types = (jax.sharding.AxisType.Auto,) * mesh.devices.ndim
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types), axis


def check_same_types(text: str, expected: ArrayTree, got: ArrayTree) -> None:
    """Checks that two trees agree in structure, shapes and dtypes.

    The message names the first leaf that differs.
    """
    trees = map(jax.tree.leaves_with_path, (expected, got))
    for old, new in itertools.zip_longest(*trees):
        if old is None or new is None or old[0] != new[0]:
            raise ValueError(
                f"{text}: {_leaf(old)}, got another structure: {_leaf(new)}."
            )
        if not _alike(old[1], new[1]):
            raise ValueError(f"{text}: {_leaf(old)}, got {_leaf(new)}.")
    structures = jax.tree.structure(expected), jax.tree.structure(got)
    if structures[0] != structures[1]:
        raise ValueError(f"{text}: structure {structures[0]}, got {structures[1]}.")


def _alike(old: Any, new: Any) -> bool:
    if isinstance(old, bytes) or isinstance(new, bytes):
        return type(old) is type(new)
    if _is_array(new):
        dtypes = new.dtype, jnp.result_type(new)
        return old.shape == new.shape and old.dtype in dtypes
    is_number = isinstance(new, bool | int | float | complex)
    return is_number and old.shape == () and old.dtype == jnp.result_type(new)


def _leaf(leaf: tuple[tuple[Any, ...], Any] | None) -> str:
    return "no more leaves" if leaf is None else describe(leaf[1]) + _at(leaf[0])


def _at(path: tuple[Any, ...]) -> str:
    return f" at {jax.tree_util.keystr(path)}" if path else ""


def describe(value: Any) -> str:
    """Describes a value, for an error message."""
    if _is_array(value):
        return f"{value.dtype} of shape {value.shape}"
    if type(value) is tuple:
        return f"{len(value)} values"
    if isinstance(value, bytes) or not jax.tree_util.all_leaves([value]):
        return type(value).__name__  # the text of a pytree may be long
    return f"{type(value).__name__} {value!r}"


def import_optional(module: str, extra: str | None = None) -> Any:
    """Imports a module of an optional package.

    Args:
        module: name of the module.
        extra: name of the extra that installs the package. The default is the name of
            the package.

    Raises:
        ModuleNotFoundError: if the package or one of its dependencies is not installed;
            the message contains the install command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        extra = module.partition(".")[0] if extra is None else extra
        raise ModuleNotFoundError(
            f'{error.name} is not installed: pip install ".[{extra}]"', name=error.name
        ) from error

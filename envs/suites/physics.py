"""`adapt`: adapts environments of brax and MuJoCo Playground to `Env`.

Both suites have a `State` with the physics state and the fields `obs`, `reward`,
`done`, `metrics` and `info`. Both store the parameters of the physical model in an
attribute of the environment. The adapter does not use the wrappers of the suites, which
count steps and reset.
"""

import copy
import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from rollout.base.checks import import_optional
from rollout.envs.spaces import Box, space_of
from rollout.envs.suites.convert import (
    check_methods,
    keep_dtypes,
    promote,
    shapes_of_reset,
)
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep

# Modules of wrappers that reset, truncate episodes or batch environments.
_WRAPPERS = ("brax.envs.wrappers.", "mujoco_playground._src.wrapper")


def adapt(
    env: Any,
    *,
    model_field: str,
    frame_field: str | None,
    has_shared_arrays: bool = False,
) -> Env:
    """Adapts an environment of brax or Playground to `Env`.

    Args:
        env: environment of the suite, without training wrappers.
        model_field: attribute of `env` that holds the physical model. It is a leaf of
            the result, if `env` has it.
        frame_field: field of the state that `env.render` expects, or None if it expects
            the complete state.
        has_shared_arrays: whether `vmap` of `env` returns arrays without a lane axis.
            MuJoCo Warp stores the contacts of all lanes in such arrays.

    Returns:
        An `Env` with the state of `env`. Its leaves are the model and all attributes
        with traced arrays, so that they may vary by lane. Arrays of the state without
        a lane axis are replaced by None between steps, and are zero at the beginning of
        a step.

    Raises:
        TypeError: if `env` lacks a method.
        ValueError: if `env` has a training wrapper, or if an attribute with
            traced arrays has another value in an environment that `env` wraps.
    """
    check_methods(env, "brax or MuJoCo Playground", ("reset", "step", "action_size"))
    inner = env
    while inner is not None:
        # Allow `Wrapper`, the base class in the same module, for custom wrappers.
        if any(
            cls.__module__.startswith(_WRAPPERS) and cls.__name__ != "Wrapper"
            for cls in type(inner).__mro__
        ):
            raise ValueError(
                "`env` must be without the suite's training wrappers, got "
                f"{type(inner).__name__}. Use `rollout.envs.vectorize` and `TimeLimit` "
                "for batches, resets and time limits."
            )
        inner = vars(inner).get("env")
    parameters = _traced_attributes(env, model_field)
    # Custom environments may have no physical model.
    if (model := getattr(env, model_field, None)) is not None:
        parameters[model_field] = jax.tree.map(jnp.asarray, model)
    return _PhysicsEnv(
        parameters=parameters,
        env=env,
        frame_field=frame_field,
        shared=_shared_leaves(env) if has_shared_arrays else None,
        action_space=Box(-1.0, 1.0, (env.action_size,), jnp.dtype(jnp.float32)),
    )


class _SharedLeaves(NamedTuple):
    """The leaves of a state that have no lane axis under `vmap`."""

    structure: Any  # of the complete state
    leaves: tuple[jax.ShapeDtypeStruct | None, ...]  # None: has a lane axis

    def remove(self, state: ArrayTree) -> ArrayTree:
        """Replaces the shared leaves of a state by None."""
        pairs = zip(jax.tree.leaves(state), self.leaves, strict=True)
        return self.structure.unflatten([x if y is None else None for x, y in pairs])

    def restore(self, state: ArrayTree) -> ArrayTree:
        """Inserts zeros for the shared leaves."""
        lane_leaves = iter(jax.tree.leaves(state))
        return self.structure.unflatten(
            [
                next(lane_leaves) if x is None else jnp.zeros(x.shape, x.dtype)
                for x in self.leaves
            ]
        )


class _PhysicsEnv(struct.PyTreeNode, kw_only=True):
    """An `Env` over a brax or Playground environment.

    Attributes:
        parameters: attributes of `env` that are leaves, by name, such as the model.
    """

    parameters: dict[str, ArrayTree] = struct.field(repr=False)  # hundreds of arrays
    env: Any = struct.field(pytree_node=False)
    frame_field: str | None = struct.field(pytree_node=False)
    shared: _SharedLeaves | None = struct.field(pytree_node=False, repr=False)
    action_space: AnySpace = struct.field(pytree_node=False)

    @property
    def observation_space(self) -> AnySpace:
        return space_of(shapes_of_reset(self)[1])

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        env = _with_attributes(self.env, self.parameters)
        state = env.reset(_raw(key))
        lane_state = state if self.shared is None else self.shared.remove(state)
        return promote(self, key, lane_state, state.obs)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        if self.shared is not None:
            state = self.shared.restore(state)
        # Copy the dicts of the state, because the suites write into them.
        state_copy = jax.tree.map(lambda x: x, state)
        old, new = state_copy.info.get("rng"), _raw(key)
        is_raw = isinstance(old, jax.Array) and old.dtype == new.dtype
        if is_raw and old.shape == new.shape:
            state_copy.info["rng"] = new
        # `next_state` is the true successor, because no training wrapper resets.
        env = _with_attributes(self.env, self.parameters)
        next_state = env.step(state_copy, action)
        next_state = keep_dtypes(next_state, state)
        # `done` is also True at time limits, which brax marks in `info`.
        truncated = jnp.asarray(next_state.info.get("truncation", False)).astype(bool)
        shared = self.shared
        return EnvStep(
            state=next_state if shared is None else shared.remove(next_state),
            obs=next_state.obs,
            reward=jnp.asarray(next_state.reward, jnp.float32),
            terminated=next_state.done.astype(bool) & ~truncated,
            truncated=truncated,
            info=next_state.metrics,
        )

    @property
    def draws(self) -> bool:
        """Whether the environment has a MuJoCo model and can render it."""
        return hasattr(self.env, "render") and self._mj_model() is not None

    def render_frames(self, states: Sequence[Any]) -> Sequence[np.ndarray]:
        """Renders states, `[H, W, 3]` uint8 each, from the first camera of the model.

        Raises:
            RuntimeError: if OpenGL is missing.
        """
        field = self.frame_field
        rows = [x if field is None else getattr(x, field) for x in states]
        mj_model = self._mj_model()
        camera = mj_model.camera(0).name if mj_model.ncam else None
        try:
            return self.env.render(rows, camera=camera)
        except import_optional("mujoco").FatalError as error:
            raise RuntimeError(
                "Rendering needs OpenGL. Without a screen, set the environment "
                'variable MUJOCO_GL to "egl" or "osmesa" before mujoco is '
                f"imported: {error}"
            ) from error

    def _mj_model(self) -> Any:
        # Environments of brax have a system, which contains the model.
        return getattr(getattr(self.env, "sys", self.env), "mj_model", None)


def _shared_leaves(env: Any) -> _SharedLeaves:
    """Finds the leaves of the state whose shape does not change under `vmap`."""
    state = jax.eval_shape(env.reset, jax.eval_shape(lambda: jax.random.PRNGKey(0)))
    keys = jax.eval_shape(lambda: jnp.stack([jax.random.PRNGKey(0)] * 2))
    lanes = jax.tree.leaves(jax.eval_shape(jax.vmap(env.reset), keys))
    leaves, structure = jax.tree.flatten(state)
    pairs = zip(leaves, lanes, strict=True)
    shared = tuple(x if x.ndim == y.ndim else None for x, y in pairs)
    return _SharedLeaves(structure, shared)


def _traced_attributes(env: Any, model_field: str) -> dict[str, ArrayTree]:
    """Returns the attributes with traced arrays, also of wrapped environments.

    Omits the model. `_with_attributes` sets an attribute of every wrapped environment
    that has it, so a name must stand for one value.
    """
    levels = []
    while env is not None:
        levels.append(vars(env))
        env = vars(env).get("env")
    attributes: dict[str, ArrayTree] = {}
    for level in levels:
        for name, value in level.items():
            if name in ("env", model_field) or not _is_traced(value):
                continue
            if any(other.get(name, value) is not value for other in levels):
                raise ValueError(
                    f"`env` must have one attribute {name!r}, which has traced arrays, "
                    "got another value in a wrapped environment. Rename one."
                )
            attributes[name] = value
    return attributes


def _is_traced(value: Any) -> bool:
    """Returns whether a value is a pytree with traced arrays."""
    try:
        leaves = jax.tree.leaves(value)
    except (TypeError, ValueError):  # for example a dict whose keys cannot be sorted
        return False
    return any(isinstance(x, Tracer) for x in leaves)


def _with_attributes(env: Any, attributes: Mapping[str, ArrayTree]) -> Any:
    """Copies an environment and all wrapped environments, and sets attributes."""
    if not attributes:
        return env
    new_env = copy.copy(env)
    for name, value in vars(env).items():
        # Rebind methods stored in attributes: they are bound to the original.
        if inspect.ismethod(value) and value.__self__ is env:
            setattr(new_env, name, types.MethodType(value.__func__, new_env))
    for name in attributes.keys() & vars(env).keys():
        setattr(new_env, name, attributes[name])
    if "env" in vars(env):
        new_env.env = _with_attributes(env.env, attributes)
    return new_env


def _raw(key: chex.PRNGKey) -> jax.Array:
    """Converts a typed key to an old-style key of jax's default implementation.

    Several environments of the suites sample twice from one key, for which
    `jax_debug_key_reuse` raises an error if the key is typed.
    """
    default = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    words = jax.random.key_data(key)
    if words.shape == default.shape:
        return words
    return jax.random.bits(key, default.shape, default.dtype)

"""`adapt`: adapts an environment of brax or MuJoCo Playground to `Env`.

Both suites have a `State` with the fields `obs`, `reward`, `done`, `metrics` and `info`
and the state of the physics, and both keep the parameters of the physical model in an
attribute of the environment. Their wrappers, which count steps and reset, are never
used.
"""

import copy
import inspect
import types
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.envs.optional_import import load
from rollout.envs.spaces import Box, space_of
from rollout.envs.suites.convert import check_methods, like
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep, strong

# Modules of wrappers that reset, cut episodes or stack lanes.
_WRAPPERS = ("brax.envs.wrappers.", "mujoco_playground._src.wrapper")


def adapt(env: Any, *, model_field: str, frame_field: str | None) -> Env:
    """Makes an `Env` of an environment of one of the suites.

    Args:
        env: the suite's environment, without the wrappers of its training.
        model_field: the attribute of `env` that holds the physical model; if there is
            none, the result has no leaves.
        frame_field: the field of the suite's state that `env.render` takes, or None if
            it takes the state.

    Returns:
        An `Env` whose state is the suite's own.

    Raises:
        TypeError: if `env` lacks a method.
        ValueError: if `env` is wrapped for training.
    """
    check_methods(env, "brax or MuJoCo Playground", ("reset", "step", "action_size"))
    inner = env
    while inner is not None:
        # The base class of Playground's wrappers is in the same module.
        if any(
            cls.__module__.startswith(_WRAPPERS) and cls.__name__ != "Wrapper"
            for cls in type(inner).__mro__
        ):
            raise ValueError(
                "`env` must be without the wrappers of the suite's training, since "
                "`vectorize` and `TimeLimit` make lanes, resets and time limits, got "
                f"{type(inner).__name__}."
            )
        inner = vars(inner).get("env")
    state = jax.eval_shape(env.reset, jax.eval_shape(lambda: jax.random.PRNGKey(0)))
    # A custom environment need not have any physics.
    model = getattr(env, model_field, None)
    return _PhysicsEnv(
        model=jax.tree.map(jnp.asarray, model),
        env=env,
        model_field=model_field,
        frame_field=frame_field,
        observation_space=space_of(state.obs),
        action_space=Box(-1.0, 1.0, (env.action_size,), jnp.dtype(jnp.float32)),
    )


class _PhysicsEnv(struct.PyTreeNode, kw_only=True):
    """An `Env` over a suite's environment; the leaves are those of its model."""

    model: ArrayTree = struct.field(repr=False)  # more than a hundred arrays
    env: Any = struct.field(pytree_node=False)
    model_field: str = struct.field(pytree_node=False)
    frame_field: str | None = struct.field(pytree_node=False)
    observation_space: AnySpace = struct.field(pytree_node=False)
    action_space: AnySpace = struct.field(pytree_node=False)

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        env = _with_model(self.env, self.model_field, self.model)
        state = strong(env.reset(_raw(key)))
        return state, state.obs

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        # The suites write into the dicts of their argument: this makes new ones.
        given = jax.tree.map(lambda x: x, state)
        old, new = given.info.get("rng"), _raw(key)
        is_raw = isinstance(old, jax.Array) and old.dtype == new.dtype
        if is_raw and old.shape == new.shape:
            given.info["rng"] = new
        # Without the wrappers of training, `next_state` is never that of a reset.
        env = _with_model(self.env, self.model_field, self.model)
        next_state = env.step(given, action)
        next_state = jax.tree.map(like, next_state, state)
        # `done` is set at limits, too, which brax's own wrapper marks like this.
        truncated = jnp.asarray(next_state.info.get("truncation", False)).astype(bool)
        return EnvStep(
            state=next_state,
            obs=next_state.obs,
            reward=jnp.asarray(next_state.reward, jnp.float32),
            terminated=next_state.done.astype(bool) & ~truncated,
            truncated=truncated,
            info=next_state.metrics,
        )

    @property
    def draws(self) -> bool:
        """Whether the environment has a model of MuJoCo, and draws it."""
        return hasattr(self.env, "render") and self._mj_model() is not None

    def render_frames(self, states: Sequence[Any]) -> Sequence[np.ndarray]:
        """Draws states, `[H, W, 3]` uint8 each, from the first camera of the model.

        Raises:
            RuntimeError: if OpenGL is missing.
        """
        field = self.frame_field
        rows = [x if field is None else getattr(x, field) for x in states]
        mj_model = self._mj_model()
        camera = mj_model.camera(0).name if mj_model.ncam else None
        try:
            return self.env.render(rows, camera=camera)
        except load("mujoco").FatalError as error:
            raise RuntimeError(
                "Drawing needs OpenGL; without a screen, the environment "
                'variable MUJOCO_GL must be "egl" or "osmesa" before mujoco is '
                f"imported: {error}"
            ) from error

    def _mj_model(self) -> Any:
        of_brax = getattr(getattr(self.env, "sys", None), "mj_model", None)
        return getattr(self.env, "mj_model", None) or of_brax


def _with_model(env: Any, field: str, model: ArrayTree) -> Any:
    """Copies an environment and those it wraps, shallowly, with another model."""
    if model is None:
        return env
    other = copy.copy(env)
    for name, value in vars(env).items():
        # Some environments store one of their own methods, bound to the original.
        if inspect.ismethod(value) and value.__self__ is env:
            setattr(other, name, types.MethodType(value.__func__, other))
    if field in vars(env):
        setattr(other, field, model)
    if "env" in vars(env):
        other.env = _with_model(env.env, field, model)
    return other


def _raw(key: chex.PRNGKey) -> jax.Array:
    """Returns the words of a key, as an old-style key of jax's default kind.

    Several environments of the suites draw twice from one key; `jax_debug_key_reuse`
    raises an error for that if the key is typed.
    """
    default = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    words = jax.random.key_data(key)
    if words.shape == default.shape:
        return words
    return jax.random.bits(key, default.shape, default.dtype)

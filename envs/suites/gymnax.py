"""`from_gymnax`: adapts gymnax-style environments to `Env`.

The adapter supports three interfaces:

- gymnax 1.x: `step_env` returns `(obs, state, reward, terminated, info)`, and
  `is_truncated` returns whether the time limit is reached. The adapter assumes this
  interface if the class itself defines `is_truncated`, or `is_terminated` without
  `is_terminal`. Methods inherited from gymnax's base class are not taken into account.
- gymnax before 1.0: the fourth value is `done`, which includes the time limit. If
  `state.time` exists, and `params.max_steps_in_episode` or an attribute of the
  environment, `done` counts as truncation at the limit, and as termination before it.
- `step_env` returns six values, including both flags.

The adapter never calls gymnax's `step`, which computes a reset at every step.
"""

import contextlib
import dataclasses
import importlib
import inspect
import numbers
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.base import prng, programs
from rollout.base.checks import import_optional
from rollout.envs.spaces import as_space
from rollout.envs.suites.convert import check_methods, keep_dtypes, promote
from rollout.envs.types import AnySpace, ArrayTree, Env, EnvStep

_BASE = "gymnax.environments.environment"  # the module of gymnax's base classes
_LIMIT = "max_steps_in_episode"
_LIMITS = (_LIMIT, "max_steps")  # attributes of environments that are time limits
_PLOTTING = (  # modules that gymnax imports for rendering only, parents first
    *("matplotlib", "matplotlib.animation", "matplotlib.colors"),
    *("matplotlib.pyplot", "seaborn"),
)
# gymnax's visualizer renders all other environments as empty frames without an error.
_BY_PYGAME = (
    "CartPole-v1",
    "Pendulum-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
)
_BY_MATPLOTLIB = (
    *("Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "Seaquest-MinAtar"),
    *("SpaceInvaders-MinAtar", "Catch-bsuite", "FourRooms-misc", "MetaMaze-misc"),
    *("PointRobot-misc", "Pong-misc"),
)


def from_gymnax(
    env: Any,
    env_params: ArrayTree | None = None,
    *,
    limit_field: str | None = None,
    time_field: str | None = None,
) -> Env:
    """Adapts a gymnax-style environment to `Env`.

    Args:
        env: object with `reset_env(key, params)`, `step_env(key, state, action,
            params)`, `action_space(params)` and `observation_space(params)`.
        env_params: pytree of the parameters of `env`, which become the leaves of the
            `Env`. The default is `env.default_params`.
        limit_field: name of the time limit, a field of `env_params` or an attribute of
            `env`, for environments whose `done` includes the time limit. The default is
            `max_steps_in_episode` of `env_params` if the class of the parameters
            defines it: the field inherited from gymnax's base class does not count as a
            limit. Otherwise the default is the attribute `max_steps_in_episode` or
            `max_steps` of `env`.
        time_field: name of the step count in the state, by default `time`.

    Returns:
        An `Env` that returns true successor observations and separates termination from
        truncation.

    Raises:
        TypeError: if `env` lacks one of these methods.
        ValueError: if neither `env_params` nor `env` has `limit_field`. While tracing:
            if the state has no field `time_field`, or if a class written for gymnax
            before 1.0 must define `is_terminated` for gymnax's `discount`.
    """
    methods = ("reset_env", "step_env", "action_space", "observation_space")
    if env_params is None:
        methods += ("default_params",)
    check_methods(env, "gymnax", methods)
    env_params = env.default_params if env_params is None else env_params
    owners = env_params, env
    if limit_field and not any(hasattr(owner, limit_field) for owner in owners):
        raise ValueError(
            "`limit_field` must be a field of `env_params` or an attribute of `env`, "
            f"got {limit_field!r}, {type(env_params).__name__} and "
            f"{type(env).__name__}."
        )
    return GymnaxEnv(
        env_params=env_params, env=env, limit_field=limit_field, time_field=time_field
    )


def ids() -> tuple[str, ...]:
    """Lists the ids of gymnax."""
    return tuple(_import_gymnax().registered_envs)


def make(name: str, **env_params: Any) -> Env:
    """Creates an environment by id; `env_params` are parameters and arguments."""
    env, params = _build(name)
    spec = inspect.getfullargspec(type(env))
    arguments = [*spec.args[1:], *spec.kwonlyargs]
    init_args = {key: env_params[key] for key in env_params if key in arguments}
    # Build again: arguments of the constructor may change the default parameters.
    if init_args:
        env, params = _build(name, **init_args)
    fields = [field.name for field in dataclasses.fields(params)]
    unknown = sorted(set(env_params) - set(fields) - set(arguments))
    if unknown:
        raise TypeError(
            f"the parameters of {name} are {', '.join([*fields, *arguments])}; got "
            f"{', '.join(unknown)}."
        )
    changes = {key: env_params[key] for key in env_params if key not in init_args}
    for key, value in changes.items():
        _check_parameter(key, value, getattr(params, key))
    return from_gymnax(env, params.replace(**changes))


class GymnaxEnv(struct.PyTreeNode, kw_only=True):
    """An `Env` over a gymnax environment; the leaves are the gymnax parameters."""

    env_params: ArrayTree
    env: Any = struct.field(pytree_node=False)
    limit_field: str | None = struct.field(pytree_node=False, default=None)
    time_field: str | None = struct.field(pytree_node=False, default=None)

    @property
    def observation_space(self) -> AnySpace:
        """Space of an observation."""
        return as_space(self.env.observation_space(self.env_params))

    @property
    def action_space(self) -> AnySpace:
        """Space of an action."""
        return as_space(self.env.action_space(self.env_params))

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode; see `Env.reset`."""
        obs, state = self.env.reset_env(self._inline(key), self.env_params)
        return promote(self, key, state, obs)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step; see `Env.step`."""
        # `step_env` returns the true successor; gymnax's `step` replaces it by a reset.
        with _name_missing_methods():
            result = self.env.step_env(
                self._inline(key), state, action, self.env_params
            )
        obs, next_state, reward, *flags, info = result
        if len(flags) == 2:
            terminated, truncated = flags
        elif len(flags) == 1:
            terminated, truncated = self._endings(flags[0], next_state)
        else:
            raise ValueError(
                "`step_env` must return (obs, state, reward, terminated, info) or "
                "(obs, state, reward, terminated, truncated, info), got "
                f"{len(result)} values."
            )
        return EnvStep(
            state=keep_dtypes(next_state, state),
            obs=jax.tree.map(jnp.asarray, obs),
            reward=jnp.asarray(reward, jnp.float32),
            terminated=jnp.asarray(terminated, bool),
            truncated=jnp.asarray(truncated, bool),
            info=jax.tree.map(jnp.asarray, info),
        )

    def _endings(
        self, done: jax.Array, state: ArrayTree
    ) -> tuple[jax.Array, jax.Array]:
        """Splits `done` into termination and truncation, based on the new state."""
        if self.limit_field is None and not _merges_time_limit(self.env):
            return done, self.env.is_truncated(state, self.env_params)
        time_field, limit = self.time_field or "time", self._limit()
        has_time = hasattr(state, time_field)
        if self.time_field is not None and not has_time:
            raise ValueError(
                f"`time_field` must be a field of the state, got {time_field!r} and "
                f"{type(state).__name__}."
            )
        if not has_time or limit is None:
            return done, jnp.zeros((), bool)
        # A termination in the last step before the limit is not detectable in `done`.
        at_limit = jnp.asarray(getattr(state, time_field) >= limit)
        return done & ~at_limit, done & at_limit

    def _limit(self) -> Any:
        """Returns the time limit, or None if there is none."""
        if self.limit_field is not None:
            default = getattr(self.env, self.limit_field, None)
            return getattr(self.env_params, self.limit_field, default)
        if _has_own_limit(self.env_params):
            return getattr(self.env_params, _LIMIT)
        return next(
            (getattr(self.env, x) for x in _LIMITS if hasattr(self.env, x)), None
        )

    @property
    def draws(self) -> bool:
        """Whether gymnax can render the environment."""
        return self._name in _BY_PYGAME + _BY_MATPLOTLIB

    @property
    def frame_interval(self) -> int:
        """Time between frames in milliseconds, as in gymnax."""
        return 50 if self._name in _BY_PYGAME else 100

    @property
    def _name(self) -> str:
        return getattr(self.env, "name", "")

    @property
    def drawn_by(self) -> tuple[str, ...]:
        """Packages required for rendering."""
        pygame = ("pygame",) if self._name in _BY_PYGAME else ()
        return ("gymnasium", "matplotlib", "seaborn", *pygame)  # gymnax imports them

    def render_frames(self, states: Sequence[Any]) -> Iterator[np.ndarray]:
        """Renders states, `[H, W, 3]` or `[H, W, 4]` uint8 each."""
        if self._name in _BY_PYGAME:
            return _classic_frames(self._name, self.env_params, states)
        return _visualizer_frames(self.env, self.env_params, states)

    def _inline(self, key: chex.PRNGKey) -> chex.PRNGKey:
        # gymnax's environments call no sampler that is slow with inline keys. The
        # samplers of other environments are unknown.
        is_gymnax = type(self.env).__module__.startswith("gymnax.")
        return prng.inline(key) if is_gymnax else key


def _has_own_limit(env_params: Any) -> bool:
    """Returns whether the parameters define a limit outside gymnax's base class."""
    for cls in type(env_params).__mro__:
        if _LIMIT in vars(cls) or _LIMIT in vars(cls).get("__annotations__", {}):
            return not cls.__module__.startswith(_BASE)
    return hasattr(env_params, _LIMIT)


def _merges_time_limit(env: Any) -> bool:
    """Returns whether `done` of `step_env` includes the time limit."""
    if not callable(getattr(env, "is_truncated", None)):
        return True
    # A class written for gymnax before 1.0 defines `is_terminal`, possibly also as
    # `is_terminated`, and inherits `is_truncated` from the new base class.
    is_new = _defines(env, "is_terminated") and not _defines(env, "is_terminal")
    return not (is_new or _defines(env, "is_truncated"))


def _defines(env: Any, name: str) -> bool:
    """Returns whether `env` overrides a method of gymnax's base class."""
    method = getattr(env, name, None)
    return method is not None and not method.__module__.startswith(_BASE)


@contextlib.contextmanager
def _name_missing_methods() -> Iterator[None]:
    """Names a method that gymnax's base class leaves to its subclasses."""
    try:
        yield
    except NotImplementedError as error:
        # The environment that lacks the method may be inside another environment.
        frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
        owner, method = frame.f_locals.get("self"), frame.f_code.co_name
        if not frame.f_globals["__name__"].startswith(_BASE):
            raise
        text = f"`{type(owner).__name__}` must define `{method}`, which gymnax calls"
        if method != "is_terminated" or not _defines(owner, "is_terminal"):
            raise ValueError(f"{text}, got no such method.") from error
        raise ValueError(
            f"{text} since 1.0, got only `is_terminal`: write `is_terminated = "
            "is_terminal` below it. A limit still truncates if its name is "
            "`max_steps_in_episode`, or `max_steps` as an attribute of the "
            "environment. Otherwise, pass `from_gymnax(limit_field=)`."
        ) from error


class _Deferred(types.ModuleType):
    """Stands for a module, which is imported when an attribute is first read."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            raise AttributeError(f"{self.__name__} is read while gymnax is imported.")
        return getattr(importlib.import_module(self.__name__), name)


def _import_gymnax() -> Any:
    """Imports gymnax without its plotting packages, which take most of the time.

    gymnax uses them for rendering only. They are imported when it renders.
    """
    if "gymnax" in sys.modules or any(name in sys.modules for name in _PLOTTING):
        return import_optional("gymnax")
    deferred = {name: _Deferred(name) for name in _PLOTTING}
    for name, module in deferred.items():
        parent, _, attribute = name.rpartition(".")
        if parent:
            setattr(deferred[parent], attribute, module)
    old_names = set(sys.modules)
    sys.modules.update(deferred)
    try:
        return import_optional("gymnax")
    except AttributeError:  # another version of gymnax reads them
        for name in set(sys.modules) - old_names:
            del sys.modules[name]
    finally:
        for name in deferred:
            sys.modules.pop(name, None)
    return import_optional("gymnax")


@programs.shared
def _build(name: str, **arguments: Any) -> tuple[Any, Any]:
    try:
        env, params = _import_gymnax().make(name, **arguments)
    except OSError as error:
        raise ValueError(
            f"{name} must download its data set when it is created, got: {error}."
        ) from error
    # gymnax stops the gradients of its differentiable environments by default.
    if getattr(env, "supports_transition_gradients", False):
        env = env.with_transition_gradients()
    return env, params


def _check_parameter(name: str, value: Any, default: Any) -> None:
    """Raises unless a parameter is a number or array like the default value."""
    types: Any = numbers.Real | np.ndarray | np.generic | jax.Array
    if not isinstance(value, types):
        raise ValueError(f"`{name}` must be a number or array, got {value!r}.")
    if jnp.shape(value) != jnp.shape(default):
        raise ValueError(
            f"`{name}` must have shape {jnp.shape(default)}, got {jnp.shape(value)}."
        )
    dtype, target = (jnp.result_type(x) for x in (value, default))
    if jnp.issubdtype(target, jnp.integer) and jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"`{name}` must be an integer, got {value!r}.")


def _classic_frames(
    name: str, env_params: Any, states: Sequence[Any]
) -> Iterator[np.ndarray]:
    """Renders classic control with the Gymnasium environment of the same name.

    gymnax's visualizer also does this. It is slower, because it creates an environment
    for every frame and plots the image with matplotlib.
    """
    import gymnasium
    from gymnax.visualize import vis_gym

    env = gymnasium.make(name, render_mode="rgb_array")
    try:
        env.reset()
        inner: Any = env.unwrapped
        vis_gym.set_gym_params(inner, name, env_params)
        for state in states:
            inner.state = vis_gym.get_gym_state(state, name)
            if name == "Pendulum-v1":
                inner.last_u = np.asarray(state.last_u, np.float64)
            frame: Any = env.render()
            yield frame
    finally:
        env.close()


def _visualizer_frames(
    env: Any, env_params: Any, states: Sequence[Any]
) -> Iterator[np.ndarray]:
    """Renders frames with gymnax's visualizer, without titles."""
    import matplotlib.pyplot as plt
    from gymnax.visualize import Visualizer

    visualizer: Any = Visualizer(env, env_params, list(states))
    try:
        visualizer.init()
        for t in range(len(states)):
            visualizer.update(t)
            # Remove gymnax's title: it labels the state before step 1 as "step 1".
            visualizer.ax.set_title("")
            visualizer.fig.canvas.draw()
            yield np.asarray(visualizer.fig.canvas.buffer_rgba())
    finally:
        plt.close(visualizer.fig)

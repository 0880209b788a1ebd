"""`render_gif`: draws an episode as an animated GIF, by the drawing code of its suite.

Adapters have `render_frames(states)`, which draws one state after the other as
`[H, W, 3]` or `[H, W, 4]` uint8; so may a custom environment, also one inside an
adapter. An adapter whose `draws` is False cannot draw what it holds.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import chex
import jax
import numpy as np

from rollout.envs.host.request_checks import frame
from rollout.envs.joint import _JointState
from rollout.envs.optional_import import load
from rollout.envs.types import ArrayTree, Env, EnvStep, VectorEnv
from rollout.envs.vectorize import _VectorizedEnv
from rollout.envs.wrappers.wrapper import Wrapper, WrapperState

_INTERVAL = 100  # ms per frame, as in gymnax
_TITLE_HEIGHT, _LEAST_WIDTH, _MOST_WIDTH = 20, 200, 600  # pixels, of such a frame
_NO_SCREEN = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}


def can_render(env: Env) -> bool:
    """Returns whether `render_gif` can draw `env`.

    Args:
        env: an environment from `make` or an adapter, a custom one that has
            `render_frames(states)`, also in an adapter, or a wrapper that holds one of
            these in its attribute `env`.

    Returns:
        True if the suite has a drawing of it; the packages that draw need not be
        installed.
    """
    return _draws(_innermost(env))


def render_gif(env: Env, states: ArrayTree, rewards: Any) -> bytes:
    """Draws an episode of `T` steps as an animated GIF of `T + 1` frames.

    It opens no window and leaves no figure open. There are 20 frames per second in
    classic control, 10 elsewhere.

    Args:
        env: an environment that `can_render` accepts.
        states: `[T + 1, ...]`, states of `env`: before each step, and after the last.
            `expose_state` records them.
        rewards: `[T]` float, rewards of the steps; titles show the return so far.

    Returns:
        The contents of the file, for `Path.write_bytes` or `IPython.display.Image`.

    Raises:
        ValueError: if there is no drawing of `env`, or its `render_frames` returns
            something else than a frame per state.
        ModuleNotFoundError: if a package that draws is not installed.
        AssertionError: if the shapes are not as above.
    """
    check_render(env)
    chex.assert_rank(rewards, 1)
    chex.assert_tree_shape_prefix(states, (len(rewards) + 1,))
    # The drawing knows the state of the innermost environment only.
    while isinstance(states, WrapperState | _JointState):
        states = states.env_state
    states, rewards = jax.device_get((states, rewards))
    rows = [jax.tree.map(lambda x: x[t], states) for t in range(len(rewards) + 1)]  # noqa: B023
    inner = _innermost(env)
    with no_screen():
        frames = _checked(type(inner).__name__, inner.render_frames(rows), len(rows))
        return _to_gif(frames, rewards, getattr(inner, "frame_interval", _INTERVAL))


def frames_to_gif(frames: Iterable[np.ndarray], rewards: Any) -> bytes:
    """Makes an animated GIF of frames that an environment drew, 10 per second.

    Args:
        frames: `T + 1` of them, `[H, W, 3]` or `[H, W, 4]` uint8.
        rewards: `[T]` float, rewards of the steps; titles show the return so far.

    Returns:
        The contents of the file.

    Raises:
        ModuleNotFoundError: if Pillow is not installed.
    """
    check_packages()
    return _to_gif(frames, rewards, _INTERVAL)


def expose_state(env: Env) -> Env:
    """Puts the state into `info`, so that a trajectory has it for `render_gif`.

    Args:
        env: any environment.

    Returns:
        The same environment with the `info` `{"state", "next_state", "info"}`: the
        states before and after the step, and the info of `env`.
    """
    return _ExposedState(env)


def expose_lane_states(env: VectorEnv) -> tuple[VectorEnv, Env]:
    """Puts the states of all lanes into `info`, as `expose_state` does.

    Args:
        env: an environment of `make_vec`, `vectorize` or `vectorize_each`, also sharded
            or in a wrapper.

    Returns:
        The same lanes with that `info`; and the environment of the first lane.

    Raises:
        ValueError: if `env` is none of these.
    """
    around: Any = env
    inner: Any = getattr(around, "env", None)
    if isinstance(inner, VectorEnv):  # lanes in a wrapper
        lanes, first = expose_lane_states(inner)
    elif isinstance(around, _VectorizedEnv):
        lanes = expose_state(inner)
        first = jax.tree.map(lambda x: x[0], inner) if around.each else inner
    else:
        raise ValueError(
            "`env` must have lanes of one environment of one agent, as `make_vec` and "
            f"`vectorize` make them, got {type(env).__name__}."
        )
    return around.replace(env=lanes), first


def check_render(env: Env) -> None:
    """Raises if `render_gif` cannot draw an environment here."""
    inner: Any = _innermost(env)  # gymnax's environments have names
    if not _draws(inner):
        raise ValueError(
            "`env` must be one that its suite draws, or have `render_frames`, got "
            f"{getattr(inner, 'name', type(inner).__name__)}."
        )
    with no_screen():  # some packages look for one when they are imported
        check_packages(getattr(inner, "drawn_by", ()))


def check_packages(drawn_by: tuple[str, ...] = ()) -> None:
    """Raises if Pillow, which writes the frames, or a package that draws is missing."""
    for package in ("PIL", *drawn_by):
        load(package, "render")


class _ExposedState(Wrapper):
    """An `Env` whose `info` holds its states."""

    for_agents = "all"

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        result = self.env.step(key, state, action)
        info = {"state": state, "next_state": result.state, "info": result.info}
        return result.replace(info=info)


def _innermost(env: Any) -> Any:
    """Returns the first environment, from the outside in, that draws; else the last."""
    inner = getattr(env, "env", None)
    return env if inner is None or _draws(env) else _innermost(inner)


def _draws(env: Any) -> bool:
    return hasattr(env, "render_frames") and getattr(env, "draws", True)


def _checked(name: str, frames: Iterable[Any], num: int) -> Iterator[np.ndarray]:
    """Checks the frames of an environment, one for each of `num` states."""
    what, drawn = f"`render_frames` of {name} must", 0
    for drawn, pixels in enumerate(frames, 1):  # noqa: B007
        yield frame(pixels, f"{what} return frames of")
    if drawn != num:
        raise ValueError(f"{what} return a frame of each state, {num}, got {drawn}.")


def _to_gif(drawn: Iterable[np.ndarray], rewards: Any, interval: int) -> bytes:
    """Scales the frames to a common width, and puts a title above each."""
    from PIL import Image, ImageDraw

    # The return before each step and after the last.
    returns = np.append(0.0, np.cumsum(rewards, dtype=np.float64))
    frames = []
    for t, (pixels, total) in enumerate(zip(drawn, returns, strict=True)):
        # Small grids are enlarged, and large pictures reduced, by whole factors.
        larger = -(-_LEAST_WIDTH // pixels.shape[1])
        pixels = pixels[..., :3].repeat(larger, 0).repeat(larger, 1)
        picture = Image.fromarray(pixels).reduce(-(-pixels.shape[1] // _MOST_WIDTH))
        size = picture.width, picture.height + _TITLE_HEIGHT
        frame = Image.new("RGB", size, "white")
        frame.paste(picture, (0, _TITLE_HEIGHT))
        ImageDraw.Draw(frame).text((4, 4), f"step {t}, return {total:.2f}", "black")
        # A byte per pixel: Pillow would keep all frames in full color until it saves.
        frames.append(frame.quantize())
    file = io.BytesIO()
    options = {"duration": interval, "loop": 0}  # loop 0: for ever
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], **options)
    return file.getvalue()


@contextlib.contextmanager
def no_screen() -> Iterator[None]:
    """Lets pygame, matplotlib and Gymnasium draw without a screen, and restores all."""
    try:
        import matplotlib
    except ModuleNotFoundError:  # what draws itself may do without
        matplotlib = None
    settings = dict(_NO_SCREEN)
    if sys.platform == "linux" and "DISPLAY" not in os.environ:  # for its MuJoCo
        settings["MUJOCO_GL"] = os.environ.get("MUJOCO_GL", "egl")
    before = {name: os.environ.get(name) for name in settings}
    backend: Any = matplotlib and matplotlib.get_backend()
    os.environ.update(settings)
    if matplotlib:
        # Its other backends open a window, or need one.
        matplotlib.use("Agg")
    try:
        yield
    finally:
        if matplotlib:
            matplotlib.use(backend, force=False)  # no error if it cannot be loaded
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

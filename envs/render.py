"""`render_gif`: renders an episode as an animated GIF with the renderer of its suite.

Adapters define `render_frames(states)`, which renders every state as `[H, W, 3]` or
`[H, W, 4]` uint8. A custom environment may define the method, also inside an adapter.
An adapter whose attribute `draws` is False cannot render the environment.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import chex
import jax
import numpy as np

from rollout.base import checks
from rollout.base.checks import import_optional
from rollout.envs.host.env_checks import check_frame
from rollout.envs.types import ArrayTree, Env, EnvStep, VectorEnv, wrapped_env
from rollout.envs.vectorize import JointState, VectorizedEnv
from rollout.envs.wrappers.wrapper import Wrapper, WrapperState

_INTERVAL = 100  # ms per frame, as in gymnax
_TITLE_HEIGHT, _MIN_WIDTH, _MAX_WIDTH = 20, 200, 600  # pixels of a frame
_NUM_COLORS = 64  # of a GIF whose height is given
_NO_SCREEN = {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}


class GifFormat(NamedTuple):
    """Size and speed of a GIF."""

    height: int | None = None  # pixels of a frame without its title; None: as rendered
    every: int = 1  # steps between two frames
    fps: float | None = None  # frames per second; None: the default of the suite


DEFAULT_FORMAT = GifFormat()


def check_format(height: int | None, every: int, fps: float | None) -> GifFormat:
    """Checks the size and speed of a GIF.

    Raises:
        ValueError: if `height` or `every` is not an int of at least 1, or `fps` is not
            from 1 to 50.
    """
    if height is not None:
        height = checks.check_int("height", height)
    every = checks.check_int("every", every)
    if fps is not None and not 1 <= fps <= 50:
        raise ValueError(
            "`fps` must be from 1 to 50, because browsers play faster GIFs slowly, "
            f"got {fps}. Show fewer frames with `every`."
        )
    return GifFormat(height, every, fps)


def can_render(env: Env) -> bool:
    """Returns whether `render_gif` supports `env`.

    Args:
        env: an environment from `make` or an adapter; a custom environment that defines
            `render_frames(states)`, also in an adapter; or a wrapper that stores such
            an environment in its attribute `env`.

    Returns:
        True if there is a renderer, even if the packages that it needs are not
        installed.
    """
    return _draws(_innermost(env))


def render_gif(env: Env, states: ArrayTree, rewards: Any) -> bytes:
    """Renders an episode of `T` steps as an animated GIF of `T + 1` frames.

    The function opens no window and closes all figures. The GIF has 20 frames per
    second for classic control and 10 for other suites.

    Args:
        env: an environment that `can_render` accepts.
        states: `[T + 1, ...]`, states of `env` before each step and after the last
            step, as recorded by `expose_state`.
        rewards: `[T]` float, rewards of the steps; titles show the return so far.

    Returns:
        The contents of the file, for `Path.write_bytes` or `IPython.display.Image`.

    Raises:
        ValueError: if `env` cannot be rendered, an argument has a wrong shape, or
            `render_frames` does not return one frame per state.
        ModuleNotFoundError: if a package that the renderer needs is not installed.
    """
    return states_to_gif(env, states, rewards, DEFAULT_FORMAT)


def states_to_gif(
    env: Env, states: ArrayTree, rewards: Any, gif_format: GifFormat
) -> bytes:
    """Renders an episode as `render_gif` does, in a given size and speed."""
    check_render(env)
    num_steps = np.size(rewards)
    checks.check_shape("`rewards` must be", np.asarray(rewards), (num_steps,))
    checks.check_leading_axes("`states` must have leaves", states, (num_steps + 1,))
    # The renderer takes states of the innermost environment, without wrapper states.
    while isinstance(states, WrapperState | JointState):
        states = states.env_state
    states, rewards = jax.device_get((states, rewards))
    rows = [jax.tree.map(lambda x: x[t], states) for t in range(len(rewards) + 1)]  # noqa: B023
    inner = _innermost(env)
    with no_screen():
        frames = _check_frames(
            type(inner).__name__, inner.render_frames(rows), len(rows)
        )
        interval = getattr(inner, "frame_interval", _INTERVAL)
        return _to_gif(frames, rewards, interval, gif_format)


def frames_to_gif(
    frames: Iterable[np.ndarray], rewards: Any, gif_format: GifFormat = DEFAULT_FORMAT
) -> bytes:
    """Converts rendered frames to an animated GIF, with 10 frames per second.

    Args:
        frames: `T + 1` frames, `[H, W, 3]` or `[H, W, 4]` uint8.
        rewards: `[T]` float, rewards of the steps; titles show the return so far.
        gif_format: size and speed of the GIF.

    Returns:
        The contents of the file.

    Raises:
        ModuleNotFoundError: if Pillow is not installed.
    """
    check_packages()
    return _to_gif(frames, rewards, _INTERVAL, gif_format)


def expose_state(env: Env) -> Env:
    """Adds the environment state to `info`, so that trajectories can be rendered.

    Args:
        env: any environment.

    Returns:
        The wrapped environment. Its `info` is `{"state", "next_state", "info"}`: the
        states before and after the step, and the info of `env`.
    """
    return _ExposedState(env)


def expose_lane_states(env: VectorEnv) -> tuple[VectorEnv, Env]:
    """Adds the states of all lanes to `info`, as `expose_state` does.

    Args:
        env: a result of `make_vec`, `vectorize` or `vectorize_each`; it may be sharded
            or wrapped.

    Returns:
        The wrapped lanes, and the environment of the first lane.

    Raises:
        ValueError: if `env` is not such a result.
    """
    outer: Any = env
    inner = wrapped_env(outer)
    if isinstance(inner, VectorEnv):  # lanes in a wrapper
        lanes, first = expose_lane_states(inner)
    elif isinstance(outer, VectorizedEnv):
        lanes = expose_state(inner)
        first = jax.tree.map(lambda x: x[0], inner) if outer.each else inner
    else:
        raise ValueError(
            "`env` must have lanes of one environment of one agent, as returned by "
            f"`make_vec` and `vectorize`, got {type(env).__name__}."
        )
    return outer.replace(env=lanes), first


def check_render(env: Env) -> None:
    """Raises if `render_gif` cannot render an environment on this machine."""
    inner: Any = _innermost(env)
    if not _draws(inner):
        raise ValueError(
            "`env` must have a renderer in its suite or a method `render_frames`, got "
            f"{getattr(inner, 'name', type(inner).__name__)}."
        )
    with no_screen():  # some packages look for a screen when they are imported
        check_packages(getattr(inner, "drawn_by", ()))


def check_packages(drawn_by: tuple[str, ...] = ()) -> None:
    """Raises if Pillow or a package that the renderer needs is not installed."""
    for package in ("PIL", *drawn_by):
        import_optional(package, "render")


class _ExposedState(Wrapper):
    """An `Env` whose `info` contains the states before and after the step."""

    for_agents = "all"

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        result = self.env.step(key, state, action)
        info = {"state": state, "next_state": result.state, "info": result.info}
        return result.replace(info=info)


def _innermost(env: Any) -> Any:
    """Returns the outermost environment with a renderer, or the innermost if none."""
    inner = wrapped_env(env)
    return env if inner is None or _draws(env) else _innermost(inner)


def _draws(env: Any) -> bool:
    return hasattr(env, "render_frames") and getattr(env, "draws", True)


def _check_frames(name: str, frames: Iterable[Any], num: int) -> Iterator[np.ndarray]:
    """Yields the frames of an environment; checks their shapes and number."""
    condition, count = f"`render_frames` of {name} must", 0
    for count, pixels in enumerate(frames, 1):  # noqa: B007
        yield check_frame(pixels, f"{condition} return frames of")
    if count != num:
        raise ValueError(f"{condition} return one frame per state, {num}, got {count}.")


def _to_gif(
    images: Iterable[np.ndarray], rewards: Any, interval: float, gif_format: GifFormat
) -> bytes:
    """Scales images, adds titles and encodes them as a GIF."""
    from PIL import Image, ImageDraw

    height, every, fps = gif_format
    # The return before each step and after the last step.
    returns = np.append(0.0, np.cumsum(rewards, dtype=np.float64))
    frames = []
    for t, (pixels, total) in enumerate(zip(images, returns, strict=True)):
        if t % every and t != len(returns) - 1:
            continue
        picture = _scale(pixels[..., :3], height)
        size = picture.width, picture.height + _TITLE_HEIGHT
        frame = Image.new("RGB", size, "white")
        frame.paste(picture, (0, _TITLE_HEIGHT))
        ImageDraw.Draw(frame).text((4, 4), f"step {t}, return {total:.2f}", "black")
        # Store one byte per pixel, since Pillow holds all frames until it saves.
        frames.append(frame.quantize() if height is None else frame)
    if height is not None:
        frames = _share_colors(frames)
    interval = interval if fps is None else 1000 / fps
    file = io.BytesIO()
    options = {"duration": round(interval), "loop": 0}  # loop 0 repeats forever
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], **options)
    return file.getvalue()


def _scale(pixels: np.ndarray, height: int | None) -> Any:
    """Scales an image to a height, or to a similar width for all environments."""
    from PIL import Image

    if height is not None:
        width = max(1, round(height * pixels.shape[1] / pixels.shape[0]))
        return Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX)
    # Enlarge small grids and reduce large images by integer factors.
    scale = -(-_MIN_WIDTH // pixels.shape[1])
    pixels = pixels.repeat(scale, 0).repeat(scale, 1)
    return Image.fromarray(pixels).reduce(-(-pixels.shape[1] // _MAX_WIDTH))


def _share_colors(frames: list[Any]) -> list[Any]:
    """Reduces all frames to the same colors.

    Equal pixels of consecutive frames stay equal, so the file is small.
    """
    from PIL import Image

    samples = frames[:: -(-len(frames) // 16)]
    sample_height = frames[0].height
    mosaic = Image.new("RGB", (frames[0].width, len(samples) * sample_height))
    for number, frame in enumerate(samples):
        mosaic.paste(frame, (0, number * sample_height))
    palette = mosaic.quantize(_NUM_COLORS)
    return [x.quantize(palette=palette, dither=Image.Dither.NONE) for x in frames]


@contextlib.contextmanager
def no_screen() -> Iterator[None]:
    """Lets pygame, matplotlib and Gymnasium render without a screen in a `with` block.

    The previous settings are restored at the end of the block.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:  # some renderers do not need matplotlib
        matplotlib = None
    settings = dict(_NO_SCREEN)
    if sys.platform == "linux" and "DISPLAY" not in os.environ:  # Gymnasium's MuJoCo
        settings["MUJOCO_GL"] = os.environ.get("MUJOCO_GL", "egl")
    previous = {name: os.environ.get(name) for name in settings}
    backend: Any = matplotlib and matplotlib.get_backend()
    os.environ.update(settings)
    if matplotlib:
        # All other backends of matplotlib open a window or need a screen.
        matplotlib.use("Agg")
    try:
        yield
    finally:
        if matplotlib:
            # `force=False` raises no error if the backend cannot be loaded.
            matplotlib.use(backend, force=False)
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

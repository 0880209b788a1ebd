"""`render_gif`: draws an episode as an animated GIF, by the drawing code of its suite.

Adapters of suites other than gymnax have `render_frames(states)`, which draws one state
after the other as `[H, W, 3]` or `[H, W, 4]` uint8; so may a custom environment, also
one inside an adapter. An adapter whose `draws` is False cannot draw what it holds.
"""

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import chex
import jax
import numpy as np

from rollout.envs.host.request_checks import frame
from rollout.envs.suites.gymnax import _GymnaxEnv
from rollout.envs.types import ArrayTree, Env, EnvStep, VectorEnv
from rollout.envs.wrappers.wrapper import Wrapper, WrapperState

# gymnax's visualizer draws any other environment as an empty frame, without an error.
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
_FRAMES = "render_frames"
_PACKAGES = ("gymnasium", "matplotlib", "PIL", "seaborn")  # gymnax imports all of them
_INTERVAL, _CLASSIC_INTERVAL = 100, 50  # ms per frame, as in gymnax
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
    inner = _innermost(env)
    return _has_frames(inner) or _name(inner) in _BY_PYGAME + _BY_MATPLOTLIB


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
    while isinstance(states, WrapperState):
        states = states.env_state
    states, rewards = jax.device_get((states, rewards))
    inner, interval = _innermost(env), _INTERVAL
    rows = [jax.tree.map(lambda x: x[t], states) for t in range(len(rewards) + 1)]  # noqa: B023
    with no_screen():
        if _has_frames(inner):
            frames = _own_frames(inner, rows)
        elif _name(inner) in _BY_PYGAME:
            frames, interval = _classic_frames(inner, rows), _CLASSIC_INTERVAL
        else:
            frames = _visualizer_frames(inner, rows)
        return _to_gif(frames, rewards, interval)


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
    if hasattr(inner, "reset_done"):  # lanes in a wrapper
        lanes, first = expose_lane_states(inner)
    elif inner is not None and hasattr(around, "each"):
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
    name = _name(_innermost(env))
    if not can_render(env):
        raise ValueError(
            "`env` must be of a suite that draws, have `render_frames`, or be one that "
            f"gymnax draws ({', '.join(_BY_PYGAME + _BY_MATPLOTLIB)}), got {name}."
        )
    needed = (*_PACKAGES, "pygame") if name in _BY_PYGAME else _PACKAGES
    check_packages(("PIL",) if _has_frames(_innermost(env)) else needed, name)


def check_packages(
    needed: tuple[str, ...] = ("PIL",), what: str = "an episode"
) -> None:
    """Raises if packages that draw are not installed; frames alone need Pillow."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"Drawing {what} needs {', '.join(missing)}, which the extra `render` "
            'installs: pip install ".[render]".'
        )


class _ExposedState(Wrapper):
    """An `Env` whose `info` holds its states."""

    for_agents = "all"

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        result = self.env.step(key, state, action)
        info = {"state": state, "next_state": result.state, "info": result.info}
        return result.replace(info=info)


def _innermost(env: Any) -> Any:
    """Returns the first environment, from the outside in, that may have a drawing."""
    inner = getattr(env, "env", None)
    is_last = isinstance(env, _GymnaxEnv) and not _has_frames(inner)
    return env if inner is None or is_last or _has_frames(env) else _innermost(inner)


def _has_frames(env: Any) -> bool:
    return hasattr(env, _FRAMES) and getattr(env, "draws", True)


def _name(inner: Any) -> str:
    """Returns the gymnax name of an environment, else the name of its type."""
    env = inner.env if isinstance(inner, _GymnaxEnv) else inner
    return getattr(env, "name", type(env).__name__)


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
        frames.append(_with_palette(frame))
    file = io.BytesIO()
    options = {"duration": interval, "loop": 0}  # loop 0: for ever
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], **options)
    return file.getvalue()


def _with_palette(picture: Any) -> Any:
    """Reduces a picture to a byte per pixel; up to 256 colors stay as they are."""
    from PIL import Image

    counts = picture.getcolors(256)
    if counts is None:
        return picture.quantize()
    # Pillow would search for colors that are known; a table takes a fifth of the time.
    colors = np.asarray([color for _, color in counts], np.uint8)
    table = np.empty(2**24, np.uint8)  # only the entries of colors are touched
    table[_codes(colors)] = np.arange(len(colors))
    reduced = Image.fromarray(table[_codes(np.asarray(picture))])
    reduced.putpalette(colors.tobytes())
    return reduced


def _codes(pixels: np.ndarray) -> np.ndarray:
    """Turns colors `[..., 3]` into integers below 2^24."""
    red, green, blue = np.moveaxis(pixels.astype(np.int32), -1, 0)
    return red << 16 | green << 8 | blue


def _own_frames(inner: Any, rows: list[ArrayTree]) -> Iterator[np.ndarray]:
    """Draws frames by `render_frames`, and checks them."""
    what = f"`render_frames` of {type(inner).__name__} must"
    num = 0
    for num, pixels in enumerate(inner.render_frames(rows), 1):  # noqa: B007
        yield frame(pixels, f"{what} return frames of")
    if num != len(rows):
        raise ValueError(
            f"{what} return a frame of each state, {len(rows)}, got {num}."
        )


def _classic_frames(
    inner: _GymnaxEnv, rows: list[ArrayTree]
) -> Generator[np.ndarray, None, None]:
    """Draws classic control by the environment of Gymnasium that has the same name.

    gymnax's visualizer does so too, but makes a new one for every frame, and then has
    matplotlib draw its picture, which is slow.
    """
    import gymnasium
    from gymnax.visualize import vis_gym

    name = _name(inner)
    env = gymnasium.make(name, render_mode="rgb_array")
    try:
        env.reset()
        plain: Any = env.unwrapped
        vis_gym.set_gym_params(plain, name, inner.env_params)
        for row in rows:
            state: Any = row
            plain.state = vis_gym.get_gym_state(state, name)
            if name == "Pendulum-v1":
                plain.last_u = np.asarray(state.last_u, np.float64)
            frame: Any = env.render()
            yield frame
    finally:
        env.close()


def _visualizer_frames(
    inner: _GymnaxEnv, rows: list[ArrayTree]
) -> Generator[np.ndarray, None, None]:
    """Draws frames by gymnax's visualizer, without its titles."""
    import matplotlib.pyplot as plt
    from gymnax.visualize import Visualizer

    visualizer: Any = Visualizer(inner.env, inner.env_params, rows)
    try:
        visualizer.init()
        for t in range(len(rows)):
            visualizer.update(t)
            # gymnax numbers frames: it calls the state before step 1 "step 1".
            visualizer.ax.set_title("")
            visualizer.fig.canvas.draw()
            yield np.asarray(visualizer.fig.canvas.buffer_rgba())
    finally:
        plt.close(visualizer.fig)


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

"""`record_gif`: plays one episode and renders it as an animated GIF."""

from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np

from rollout.base import checks, trees
from rollout.base.files import replace_file
from rollout.collector import Collector
from rollout.envs.host.types import HostStep
from rollout.envs.host.wrappers import HostWrapper
from rollout.envs.render import (
    DEFAULT_FORMAT,
    GifFormat,
    check_format,
    check_packages,
    check_render,
    expose_lane_states,
    frames_to_gif,
    no_screen,
    states_to_gif,
)
from rollout.envs.types import ArrayTree
from rollout.host.host_collector import HostCollector
from rollout.types import Episodes, HasEvalCollector, choose_collector


def record_gif(
    collector: Collector | HostCollector | HasEvalCollector,
    params: Any,
    key: chex.PRNGKey,
    path: str | Path,
    *,
    max_episode_steps: int = 1000,
    height: int | None = None,
    every: int = 1,
    fps: float | None = None,
) -> Episodes:
    """Plays one episode and renders it as an animated GIF.

    The episode is the first episode that `collect_episodes` plays from
    `collector.init(key)`. The title of each frame contains the step number and the raw
    return so far.

    gymnax can render 15 of its environments, and most other suites can render all their
    environments. A custom environment must define `render_frames`; see
    `rollout.envs.render.can_render`. Host environments must run in this process and
    have the `render_mode` "rgb_array", for example:

        collector.replace(env=envs.from_gymnasium(id, 1, render_mode="rgb_array"))

    Args:
        collector: collector with the policy and the environments; or an agent, which
            takes the most likely action. Host environments are stepped, so later calls
            with an earlier carry of the collector raise.
        params: parameters of the policy; for an agent, its training state.
        key: one typed key, the source of all randomness.
        path: path of the GIF file, which must end in .gif, in an existing folder.
        max_episode_steps: number of steps after which the episode is truncated, at
            least 1. Memory for this many states is allocated. 1,000 frames of a robot
            take 30 MB.
        height: height of a frame in pixels, without the title of 20 pixels. All frames
            then share 64 colors, so the file is smaller. None keeps the size of the
            renderer, at most 600 pixels wide, and 256 colors per frame.
        every: number of steps between two frames, at least 1. The last step is always
            shown.
        fps: frames per second, from 1 to 50. None shows 20 for classic control of
            gymnax and 10 for all other environments.

    Returns:
        The episode, `[1]`: the return, the length and the flags of its last step.

    Raises:
        ValueError: if the environment cannot be rendered, `key` is not one typed key,
            `path` does not end in .gif, `max_episode_steps`, `height` or `every` is
            not an int of at least 1, or `fps` is not from 1 to 50.
        FileNotFoundError: if the folder of `path` does not exist.
        ModuleNotFoundError: if a package for rendering is not installed. The extra
            `render` installs all of them.
    """
    path = Path(path)
    if path.suffix.lower() != ".gif":
        raise ValueError(f"`path` must end in .gif, got {path}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"`path` must be in a folder that exists, got {path}.")
    gif_format = check_format(height, every, fps)
    gif, episodes = draw_episode(collector, params, key, max_episode_steps, gif_format)
    with replace_file(path) as file:
        file.write(gif)
    return episodes


def draw_episode(
    collector: Any,
    params: Any,
    key: chex.PRNGKey,
    max_episode_steps: int,
    gif_format: GifFormat = DEFAULT_FORMAT,
) -> tuple[bytes, Episodes]:
    """Plays and renders one episode; returns the content of the GIF and the episode.

    Raises:
        ValueError: under the conditions of `record_gif`.
        ModuleNotFoundError: under the conditions of `record_gif`.
    """
    checks.check_outside_jit("record_gif")
    checks.check_key(key)
    max_episode_steps = checks.check_int("max_episode_steps", max_episode_steps)
    collector, params = choose_collector(collector, params)
    checks.check_collector(collector)
    checks.check_frozen(collector)
    render_fn: Any = _render_host if collector.is_host else _render_states
    gif, episodes = render_fn(collector, params, key, max_episode_steps, gif_format)
    return gif, jax.device_get(episodes)


def _render_states(
    collector: Collector,
    params: Any,
    key: chex.PRNGKey,
    max_episode_steps: int,
    gif_format: GifFormat,
) -> tuple[bytes, Episodes]:
    """Plays an episode of a JAX environment and renders the states."""
    lanes, env = expose_lane_states(collector.env)
    check_render(env)
    # Record only states: recorded fields and accumulators would take memory.
    exposed = collector.replace(env=lanes, record_fn=None, accumulators=())
    info, returns, episodes = _play_jitted(exposed, params, key, max_episode_steps)
    # Render the states before each step and the state after the last step.
    num = episodes.episode_length.item()
    # Concatenate in NumPy, which compiles no program per leaf but has no typed keys.
    states, next_states = jax.device_get(
        trees.unwrap_keys((info["state"], info["next_state"]))
    )
    join = lambda x, y: np.concatenate([x[:num, 0], y[num - 1 : num, 0]])  # noqa: E731
    states = trees.wrap_keys(jax.tree.map(join, states, next_states), info["state"])
    rewards = _raw_rewards(returns, num)
    return states_to_gif(env, states, rewards, gif_format), episodes


def _play(
    collector: Any, params: Any, key: chex.PRNGKey, max_episode_steps: int
) -> tuple[ArrayTree, jax.Array, Episodes]:
    """Plays one episode; returns `info`, returns `[T, 1, ...]` and the episode."""
    _, episodes = collector.collect_episodes(
        collector.init(key),
        params,
        1,
        max_episode_steps=max_episode_steps,
        return_trajectory=True,
    )
    trajectory = episodes.trajectory
    returns = trajectory.episode_return
    return trajectory.info, returns, episodes.replace(trajectory=())


# XLA removes the parts of the trajectory that `_play` does not return.
_play_jitted = jax.jit(_play, static_argnames="max_episode_steps")


def _raw_rewards(returns: ArrayTree, num_steps: int) -> np.ndarray:
    """Returns the rewards of the first `num_steps` steps before normalization."""
    return np.diff(np.asarray(returns)[:num_steps, 0], prepend=0)


def _render_host(
    collector: HostCollector,
    params: Any,
    key: chex.PRNGKey,
    max_episode_steps: int,
    gif_format: GifFormat,
) -> tuple[bytes, Episodes]:
    """Plays an episode in the first host environment, which renders its frames."""
    check_packages()
    recorder: Any = _FrameRecorder(collector.env, max_episode_steps)
    exposed = collector.replace(
        env=recorder, num_ready=None, record_fn=None, accumulators=()
    )
    with no_screen():
        _, returns, episodes = _play(exposed, params, key, max_episode_steps)
    num = episodes.episode_length.item()
    rewards = _raw_rewards(returns, num)
    return frames_to_gif(recorder.frames, rewards, gif_format), episodes


class _FrameRecorder(HostWrapper):
    """Renders the first environment until its first episode ends or is truncated."""

    def __init__(self, env: Any, max_episode_steps: int) -> None:
        super().__init__(env)
        self._max_steps, self._is_done = max_episode_steps, False
        self.frames: list[np.ndarray] = []

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        obs = self.env.reset(seeds, mask)
        # The lane continues with more episodes. Render only the first episode.
        if mask[0] and not self._is_done:
            self.frames = [self.env.draw(0)]
        return obs

    def step(self, action: ArrayTree) -> HostStep:
        result = self.env.step(action)
        if not self._is_done and not result.faulty[0]:
            self.frames.append(self.env.draw(0))
            is_last = len(self.frames) > self._max_steps
            self._is_done = bool(result.terminated[0] or result.truncated[0] or is_last)
        return result

"""`record_gif`: plays one episode and draws it as an animated GIF."""

from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np

from rollout import checks
from rollout.collector import Collector
from rollout.envs import trees
from rollout.envs.host.host_wrapper import HostWrapper
from rollout.envs.host.types import HostStep
from rollout.envs.render import (
    check_packages,
    check_render,
    expose_lane_states,
    frames_to_gif,
    no_screen,
    render_gif,
)
from rollout.envs.types import ArrayTree
from rollout.host.host_collector import HostCollector
from rollout.types import Episodes, ParamsT


def record_gif(
    collector: Collector[ParamsT] | HostCollector[ParamsT],
    params: ParamsT,
    key: chex.PRNGKey,
    path: str | Path,
    *,
    max_episode_steps: int = 1000,
) -> Episodes:
    """Plays one episode and draws it: it is the first that `evaluate` plays with `key`.

    The title of a frame has the number of the step and the raw return so far.
    gymnax draws 15 of its environments, most other suites all of theirs, and custom
    ones those that have `render_frames`; see `rollout.envs.render.can_render`.
    Environments that are not JAX must be in this process and have the `render_mode`
    "rgb_array", such as those of

        collector.replace(env=envs.from_gymnasium(id, 1, render_mode="rgb_array"))

    Args:
        collector: policy and environments. Environments that are not JAX move on, so
            calls with an earlier carry of theirs raise.
        params: parameters of the policy.
        key: one typed key: the source of all randomness.
        path: the file to write, which ends in .gif, in a folder that exists.
        max_episode_steps: steps after which the episode is cut, at least 1; that many
            states are kept, and drawn: 1,000 frames of a robot are 30 MB.

    Returns:
        The episode, `[1]`: its return, its length and how it ended.

    Raises:
        ValueError: if the environment cannot be drawn, `key` is not one typed key,
            `path` does not end in .gif or `max_episode_steps` is not an int of at least
            1.
        FileNotFoundError: if the folder of `path` does not exist.
        ModuleNotFoundError: if a package that draws is not installed; the extra
            `render` has all of them.
    """
    path = Path(path)
    if path.suffix.lower() != ".gif":
        raise ValueError(f"`path` must end in .gif, got {path}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"`path` must be in a folder that exists, got {path}.")
    gif, episodes = draw_episode(collector, params, key, max_episode_steps)
    path.write_bytes(gif)
    return episodes


def draw_episode(
    collector: Any, params: Any, key: chex.PRNGKey, max_episode_steps: int
) -> tuple[bytes, Episodes]:
    """Plays and draws one episode; returns the contents of the file, and the episode.

    Raises:
        ValueError: as `record_gif` does.
        ModuleNotFoundError: as `record_gif` does.
    """
    checks.outside_of_jit("record_gif")
    checks.typed_key(key)
    max_episode_steps = checks.int_between("max_episode_steps", max_episode_steps)
    checks.collects(collector)
    checks.statistics_are_fixed(collector)
    draw: Any = _draw_on_host if collector.is_host else _draw_states
    gif, episodes = draw(collector, params, key, max_episode_steps)
    return gif, jax.device_get(episodes)


def _draw_states(
    collector: Collector, params: Any, key: chex.PRNGKey, max_episode_steps: int
) -> tuple[bytes, Episodes]:
    """Plays an episode of an environment in JAX, and draws its states."""
    lanes, env = expose_lane_states(collector.env)
    check_render(env)
    # Only states are read, so recording and accumulating more would cost memory.
    exposed = collector.replace(env=lanes, record_fn=None, accumulators=())
    info, returns, episodes = _play_jitted(exposed, params, key, max_episode_steps)
    # The states before each step, and the one after the last.
    num = episodes.episode_length.item()
    # NumPy joins them, without a program for each leaf; it has no typed keys.
    before, after = jax.device_get(
        trees.unwrap_keys((info["state"], info["next_state"]))
    )
    join = lambda x, y: np.concatenate([x[:num, 0], y[num - 1 : num, 0]])  # noqa: E731
    states = trees.wrap_keys(jax.tree.map(join, before, after), info["state"])
    return render_gif(env, states, _raw_rewards(returns, num)), episodes


def _play(
    collector: Any, params: Any, key: chex.PRNGKey, max_episode_steps: int
) -> tuple[ArrayTree, jax.Array, Episodes]:
    """Plays one episode: its info and the return so far, `[T, 1, ...]`, and itself."""
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


# What is returned is all that XLA compiles.
_play_jitted = jax.jit(_play, static_argnames="max_episode_steps")


def _raw_rewards(returns: ArrayTree, num: int) -> np.ndarray:
    """Rewards of the first `num` steps, whose sum titles show: not normalized."""
    return np.diff(np.asarray(returns)[:num, 0], prepend=0)


def _draw_on_host(
    collector: HostCollector, params: Any, key: chex.PRNGKey, max_episode_steps: int
) -> tuple[bytes, Episodes]:
    """Plays an episode in the first of some environments, which draws itself."""
    check_packages()
    filmed: Any = _Filmed(collector.env, max_episode_steps)
    exposed = collector.replace(
        env=filmed, num_ready=None, record_fn=None, accumulators=()
    )
    with no_screen():
        _, returns, episodes = _play(exposed, params, key, max_episode_steps)
    num = episodes.episode_length.item()
    return frames_to_gif(filmed.frames, _raw_rewards(returns, num)), episodes


class _Filmed(HostWrapper):
    """Draws the first of some environments, until its episode ends or is cut."""

    def __init__(self, env: Any, max_episode_steps: int) -> None:
        super().__init__(env)
        self._max_steps, self._is_done = max_episode_steps, False
        self.frames: list[np.ndarray] = []

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        obs = self.env.reset(seeds, mask)
        # The lane goes on with other episodes until the call ends; only the first is
        # drawn.
        if mask[0] and not self._is_done:
            self.frames = [self.env.draw(0)]
        return obs

    def step(self, action: ArrayTree) -> HostStep:
        result = self.env.step(action)
        if not self._is_done and not result.faulty[0]:
            self.frames.append(self.env.draw(0))
            is_cut = len(self.frames) > self._max_steps
            self._is_done = bool(result.terminated[0] or result.truncated[0] or is_cut)
        return result

"""`HostWrapper`: the base class of wrappers of host environments."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.envs.host.types import AsyncHostVectorEnv
from rollout.envs.types import ArrayTree


class HostWrapper(AsyncHostVectorEnv):
    """Base class of wrappers of a `HostVectorEnv`; forwards all optional members.

    A subclass defines `reset` and `step`, and also `freeze` if the wrapped environments
    may update running statistics.

    Args:
        env: the wrapped `B` environments.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.num_envs, self.info = env.num_envs, env.info
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.is_async, self.can_rebuild = env.is_async, env.can_rebuild
        self.can_load, self.learns = env.can_load, env.learns
        self.batch_size = env.batch_size if env.is_async else None

    @property
    def shared(self) -> ArrayTree:
        """Running statistics over all environments; see `HostVectorEnv`."""
        return self.env.shared

    @property
    def pending_reset(self) -> np.ndarray | None:
        """Environments whose next step only resets them; see `HostVectorEnv`."""
        return self.env.pending_reset

    def at_episodes(self, numbers: np.ndarray) -> None:
        """Announces the numbers of the next episodes; see `HostVectorEnv`."""
        self.env.at_episodes(numbers)

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        """Starts a step in some environments; see `AsyncHostVectorEnv`."""
        self.env.send(action, env_id)

    def receive(self, num_ready: int, timeout: float | None = None) -> Any:
        """Waits until some environments are ready; see `AsyncHostVectorEnv`."""
        return self.env.receive(num_ready, timeout)

    def rebuild(self, mask: np.ndarray) -> None:
        """Replaces environments by new ones; see `HostVectorEnv`."""
        self.env.rebuild(mask)

    def save(self) -> list[bytes] | None:
        """Saves the state of every environment; see `HostVectorEnv`."""
        return self.env.save()

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        """Restores the state of every environment; see `HostVectorEnv`."""
        self.env.load(saved, obs)

    def normalize_obs(self, obs: ArrayTree) -> ArrayTree:
        """Normalizes raw observations; see `BaseVectorEnv.normalize_obs`."""
        return self.env.normalize_obs(obs)

    def restart(self, shared: ArrayTree) -> None:
        """Restores the running statistics; see `HostVectorEnv`."""
        self.env.restart(shared)

    def draw(self, number: int) -> np.ndarray:
        """Renders the current state of one environment, `[H, W, 3]` uint8."""
        return self.env.draw(number)

    def close(self) -> None:
        """Closes the environments."""
        self.env.close()

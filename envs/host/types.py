"""Interfaces of vector environments that step outside JAX, on NumPy arrays.

A `HostVectorEnv` holds `B` environments that reset only on request, each with a
separate seed. An `AsyncHostVectorEnv` can also step a subset of the environments, and
returns the environments that are ready first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout.base import checks
from rollout.envs.types import ArrayTree, BaseVectorEnv


class HostStep(NamedTuple):
    """Result of a step of `B` environments, or of `num_ready` after `receive`.

    The arrays may be views of memory that the next call overwrites.

    Attributes:
        obs: `[B, ...]` pytree, true successor observations, also at episode ends.
        reward: `[B]` float32, reward for the action.
        terminated: `[B]` bool, True if the task ended: do not bootstrap.
        truncated: `[B]` bool, True if the episode was cut off, for example by a time
            limit: bootstrap. Both flags may be set.
        faulty: `[B]` bool, True if the environment failed. Ignore all other values of
            this environment, and call `rebuild` and `reset` before its next step.
        info: `[B, ...]` pytree of arrays with a constant structure; `{}` if empty.
        mask: `[B]` bool, False if the environment reset automatically instead of
            stepping: `obs` is then the first observation of a new episode. None is
            equivalent to True everywhere.
        causes: exception of each faulty environment, by index.
        raw_reward: `[B]` float32, summands of `episode_return`; None if equal to
            `reward`.
    """

    obs: ArrayTree  # [B, ...]
    reward: np.ndarray  # [B]
    terminated: np.ndarray  # [B]
    truncated: np.ndarray  # [B]
    faulty: np.ndarray  # [B]
    info: ArrayTree  # [B, ...]
    mask: np.ndarray | None = None  # [B]
    causes: Mapping[int, BaseException] = {}
    raw_reward: np.ndarray | None = None  # [B]

    @property
    def total_reward(self) -> np.ndarray:
        """Reward that `episode_return` sums, `[B]` float32."""
        return self.reward if self.raw_reward is None else self.raw_reward


class EnvFault(RuntimeError):  # noqa: N818
    """Raised when environments fail. A `reset` still resets the healthy environments.

    Attributes:
        causes: exception of each failed environment, by index.
    """

    def __init__(self, causes: Mapping[int, BaseException], hint: str = "") -> None:
        super().__init__(causes, hint)  # pickle restores from `args`
        self.causes = dict(causes)

    def __str__(self) -> str:
        number, cause = next(iter(self.causes.items()))
        more = f", and {len(self.causes) - 1} more" if len(self.causes) > 1 else ""
        text = f"{type(cause).__name__}: {cause}{more}{self.args[1]}"
        return f"environment {number} failed: {text}"


class HostVectorEnv(BaseVectorEnv):
    """Base class of `B` environments on the host; all arrays are `[B, ...]`.

    A subclass sets the spaces and `num_envs` as attributes, and defines `reset` and
    `step`. All other members are optional: by default environments cannot be rebuilt,
    saved or rendered, and update no running statistics.

    Attributes:
        is_async: whether `send` and `receive` are defined, see `AsyncHostVectorEnv`.
        can_rebuild: whether `rebuild` is defined.
        can_load: whether `save` and `load` are defined.
        shared: running statistics over all environments, a pytree of arrays. It is part
            of `carry.env_state`.
        info: `[B, ...]` arrays with the structure, shapes and dtypes of
            `HostStep.info`, which `HostCollector.row_shape` reads; `{}` if empty.
        source: description of how the environments were created, for example the
            functions or an id and options. `rollout.recipes.run` compares it before it
            resumes a run. None if unknown.
    """

    is_async: bool = False
    can_rebuild: bool = False
    can_load: bool = False
    shared: ArrayTree = ()
    info: ArrayTree = {}  # noqa: RUF012 (never written to)
    source: Any = None

    @property
    def pending_reset(self) -> np.ndarray | None:
        """`[B]` bool, environments that the next step only resets; None if none.

        In the autoreset mode NEXT_STEP, `reset` returns the final observation again.
        The next `step` returns the first observation, with `mask` False.
        """
        return None

    def at_episodes(self, numbers: np.ndarray) -> None:
        """Announces the numbers of the next episodes, for numbered scenarios.

        A `HostCollector` calls this method before each `reset`. By default the numbers
        are ignored.

        Args:
            numbers: `[B]` int32, numbers from 0, as in `rollout.envs.types.Env`. The
                next `reset` uses the numbers of the environments that it resets.
        """

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts an episode in some environments, each with a separate seed.

        Discards the steps of these environments that are in flight.

        Args:
            seeds: `[B]` uint32 seeds; only the seeds where `mask` is True are used.
            mask: `[B]` bool, the environments to reset, at least one.

        Returns:
            `[B, ...]` observations, unchanged where `mask` is False. The arrays may be
            views of memory that the next call overwrites.

        Raises:
            EnvFault: if an environment fails.
        """
        raise NotImplementedError

    def step(self, action: ArrayTree) -> HostStep:
        """Steps every environment with its action, `[B, ...]`, without resets."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends processes and frees memory; a second call does nothing."""

    def rebuild(self, mask: np.ndarray) -> None:
        """Replaces environments by new ones, to continue after a fault.

        Args:
            mask: `[B]` bool, the environments to rebuild. Each must be reset before its
                next step.

        Raises:
            EnvFault: if an environment cannot be created.
        """
        raise NotImplementedError

    def save(self) -> list[bytes] | None:
        """Saves the state of every environment.

        Returns:
            `B` states, or None if an environment is faulty or does not support saving.
        """
        return None

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        """Restores the state of every environment, including faulty environments.

        If `load` raises, rebuild and reset all environments before the next step.

        Args:
            saved: result of `save`, one state per environment.
            obs: `[B, ...]` observations at the time of `save`.
        """
        raise NotImplementedError

    def load_shared(self, shared: ArrayTree) -> None:
        """Restores the running statistics from `shared`, or resets them if None."""

    def draw(self, number: int) -> np.ndarray:
        """Renders the current state of one environment, `[H, W, 3]` uint8.

        Raises:
            ValueError: if the environments do not support rendering, as by default.
        """
        raise ValueError(
            "`collector.env` must have environments in this process that render "
            f"frames, got {type(self).__name__}. Pass "
            "`collector.replace(env=envs.from_gymnasium(make, 1, "
            'render_mode="rgb_array"))`.'
        )


class AsyncHostVectorEnv(HostVectorEnv):
    """Base class of a `HostVectorEnv` that steps environments asynchronously.

    A subclass also defines `send` and `receive`.

    Attributes:
        batch_size: fixed number of environments that `receive` returns, or None if any
            number is possible. With a fixed number, only a reset of all environments
            discards steps in flight.
    """

    is_async: bool = True
    batch_size: int | None = None

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        """Starts a step in some environments without waiting for the results.

        Args:
            action: `[K, ...]` actions for `K` of the `B` environments.
            env_id: `[K]` int, indices of these environments, which must not be in
                flight.
        """
        raise NotImplementedError

    def receive(
        self, num_ready: int, timeout: float | None = None
    ) -> tuple[HostStep, np.ndarray]:
        """Waits until `num_ready` environments have finished their steps.

        Args:
            num_ready: number of environments to return, from 1 to the number of
                environments in flight.
            timeout: seconds to wait; None waits indefinitely. It does not depend on
                the `timeout` of `make_worker_envs`, the limit of a single step.

        Returns:
            Tuple of the results, `[num_ready, ...]`, in order of completion, and the
            indices of the environments, `[num_ready]` int32.

        Raises:
            TimeoutError: if fewer environments are ready within `timeout`. No result is
                lost: the next call returns them.
        """
        raise NotImplementedError


def check_host_env(env: Any) -> None:
    """Raises unless `env` is a `HostVectorEnv`."""
    checks.check_not_gymnasium(env)
    if not isinstance(env, HostVectorEnv):
        raise ValueError(
            "`env` must be a `HostVectorEnv`, for example from `rollout.envs."
            f"from_gymnasium`, got {type(env).__name__}. Use a `Collector` for JAX "
            "environments, and subclass `rollout.envs.host.types.HostVectorEnv` for "
            "custom environments in NumPy."
        )

"""The contracts of environments that are not JAX: NumPy in, NumPy out.

A `HostVectorEnv` is `B` environments side by side that reset only on request, each from
its own seed. An `AsyncHostVectorEnv` can also step some of them, and returns those that
answer first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout import checks
from rollout.envs.types import ArrayTree, BaseVectorEnv


class HostStep(NamedTuple):
    """One step of `B` environments; after `receive`, of `num_ready` of the `B`.

    The arrays may be views of memory that the next call writes to.

    Attributes:
        obs: `[B, ...]`, true successors, also where an episode ended; any pytree.
        reward: `[B]` float32.
        terminated: `[B]` bool, the task itself ended.
        truncated: `[B]` bool, cut from outside (time limit). Both flags may be set.
        faulty: `[B]` bool, the environment failed: its other values are meaningless,
            and it takes no step before `rebuild`, then `reset`.
        info: `[B, ...]`, any pytree of arrays of one structure; `{}` if there is none.
        mask: `[B]` bool, False where the environment took no step but reset itself:
            `obs` is then the first of a new episode. None stands for True everywhere.
        causes: the exception of each faulty environment, by its number.
        raw_reward: `[B]` float32, what `episode_return` sums; None for `reward`.
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
        """`[B]` float32, the reward that `episode_return` sums."""
        return self.reward if self.raw_reward is None else self.raw_reward


class EnvFault(RuntimeError):  # noqa: N818
    """Environments failed; at a `reset`, the others are reset all the same.

    Attributes:
        causes: the exception of each that failed, by its number.
    """

    def __init__(self, causes: Mapping[int, BaseException], hint: str = "") -> None:
        super().__init__(causes, hint)  # by which it is pickled, for another process
        self.causes = dict(causes)

    def __str__(self) -> str:
        number, cause = next(iter(self.causes.items()))
        more = f", and {len(self.causes) - 1} more" if len(self.causes) > 1 else ""
        what = f"{type(cause).__name__}: {cause}{more}{self.args[1]}"
        return f"environment {number} failed: {what}"


class HostVectorEnv(BaseVectorEnv):
    """Base of `B` environments on the host, `[B, ...]` everywhere.

    A subclass has the spaces and `num_envs` as attributes, and defines `reset` and
    `step`. All other members have defaults, for environments that cannot be rebuilt,
    saved or drawn and that learn no statistics.

    Attributes:
        is_async: whether `send` and `receive` are defined, as `AsyncHostVectorEnv` has
            them.
        can_rebuild: whether `rebuild` is defined.
        can_load: whether `save` and `load` are defined.
        shared: statistics of all environments, any pytree of arrays, which
            `carry.env_state` contains.
        info: arrays like the `info` of a step, `[B, ...]`, so that
            `HostCollector.row_shape` knows them; `{}` if there is none.
    """

    is_async: bool = False
    can_rebuild: bool = False
    can_load: bool = False
    shared: ArrayTree = ()
    info: ArrayTree = {}  # noqa: RUF012 (never written to)

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts an episode in some environments, each from its own seed.

        Drops the steps of these environments that are in flight.

        Args:
            seeds: `[B]` uint32; read where `mask`.
            mask: `[B]` bool, which to reset; at least one.

        Returns:
            `[B, ...]` observations, unchanged for the other environments. They may be
            views of memory that the next call writes to.

        Raises:
            EnvFault: if some failed.
        """
        raise NotImplementedError

    def step(self, action: ArrayTree) -> HostStep:
        """Takes one step in every environment, `[B, ...]`, and resets none."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends processes and frees memory; a second call does nothing."""

    def rebuild(self, mask: np.ndarray) -> None:
        """Makes new environments in place of some, to go on after a fault.

        Args:
            mask: `[B]` bool, which to rebuild; each must be reset before its next step.

        Raises:
            EnvFault: if some could not be made.
        """
        raise NotImplementedError

    def save(self) -> list[bytes] | None:
        """Saves every environment.

        Returns:
            `B` states, or None if an environment is faulty or cannot be saved.
        """
        return None

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        """Restores every environment, also the faulty ones.

        After an error all environments must be rebuilt and reset.

        Args:
            saved: the result of `save`.
            obs: `[B, ...]`, the observations at the time of `save`.
        """
        raise NotImplementedError

    def restart(self, shared: ArrayTree) -> None:
        """Restores the statistics from `shared`, or resets them if it is None."""

    def draw(self, number: int) -> np.ndarray:
        """Draws one environment as it is now, `[H, W, 3]` uint8.

        Raises:
            ValueError: if the environments draw nothing, as by default.
        """
        raise ValueError(
            "`collector.env` must have environments in this process that draw "
            f"themselves, got {type(self).__name__}: pass "
            "`collector.replace(env=envs.from_gymnasium(make, 1, "
            'render_mode="rgb_array"))`.'
        )


class AsyncHostVectorEnv(HostVectorEnv):
    """Base of a `HostVectorEnv` that can step some environments while others work.

    A subclass also defines `send` and `receive`.

    Attributes:
        batch_size: the number of environments that `receive` returns, if it is fixed:
            then only a reset of all environments drops steps in flight. None for any
            number.
    """

    is_async: bool = True
    batch_size: int | None = None

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        """Begins a step in some environments.

        Args:
            action: `[K, ...]`, one action for each of `K` of the `B` environments.
            env_id: `[K]` int, their numbers; none of them may be in flight.
        """
        raise NotImplementedError

    def receive(
        self, num_ready: int, timeout: float | None = None
    ) -> tuple[HostStep, np.ndarray]:
        """Waits for the first `num_ready` environments that answer.

        Args:
            num_ready: at least 1 and at most the number in flight.
            timeout: seconds to wait, None for any time.

        Returns:
            Their answers, `[num_ready, ...]`, in the order of answering; and their
            numbers, `[num_ready]` int32.

        Raises:
            TimeoutError: if fewer answer within `timeout`. Nothing is lost: the next
                call returns them.
        """
        raise NotImplementedError


def check_host_env(env: Any) -> None:
    """Raises unless `env` is a `HostVectorEnv`."""
    checks.not_of_gymnasium(env)
    if not isinstance(env, HostVectorEnv):
        raise ValueError(
            "`env` must be a `HostVectorEnv`, such as `rollout.envs.from_gymnasium` "
            f"makes, got {type(env).__name__}: environments in JAX go into a "
            "`Collector`, and a class of your own that steps in NumPy must subclass "
            "`rollout.envs.host.types.HostVectorEnv`."
        )

"""The contracts of environments that are not JAX: NumPy in, NumPy out.

A `HostVectorEnv` is `B` environments side by side that reset only on request, each from
its own seed. An `AsyncHostVectorEnv` can also step some of them, and returns those that
answer first.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from rollout.envs.types import AnySpace, ArrayTree


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


@runtime_checkable
class HostVectorEnv(Protocol):
    """`B` environments side by side on the host, `[B, ...]` everywhere.

    An implementation that can go on after a fault also has `rebuild(mask)`, `[B]` bool,
    which makes new ones in their place; each must be reset before its next step.

    An implementation whose state can be saved also has two methods. `save()` returns
    `B` states as `bytes`, or None if an environment is faulty or cannot be saved.
    `load(saved, obs)` takes the states and the observations `[B, ...]` at the `save`,
    also where environments are faulty; after an error all must be rebuilt and reset.

    An implementation that learns of all its environments also has `learns` and
    `freeze`, as a `VectorEnv` has them; `shared`, any pytree of arrays, which goes into
    `carry.env_state`; and `restart(shared)`, which goes on with it, or from the start
    if it is None.

    An implementation whose steps have an `info` also has `info`, arrays like these,
    `[B, ...]`, so that `HostCollector.row_shape` knows them.

    An implementation that can draw an environment also has `draw(number)`, which
    returns `[H, W, 3]` uint8, the environment as it is now.
    """

    @property
    def num_envs(self) -> int:
        """B, the number of environments."""
        ...

    @property
    def observation_space(self) -> AnySpace:
        """Space of one environment's observation."""
        ...

    @property
    def action_space(self) -> AnySpace:
        """Space of one environment's action."""
        ...

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
        ...

    def step(self, action: ArrayTree) -> HostStep:
        """Takes one step in every environment, `[B, ...]`, and resets none."""
        ...

    def close(self) -> None:
        """Ends processes and frees memory; a second call does nothing."""


@runtime_checkable
class AsyncHostVectorEnv(HostVectorEnv, Protocol):
    """A `HostVectorEnv` that can step some of its environments while others work.

    An implementation that returns a fixed number at a time has that number as
    `batch_size`; only a reset of all its environments drops steps in flight.
    """

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        """Begins a step in some environments.

        Args:
            action: `[K, ...]`, one action for each of `K` of the `B` environments.
            env_id: `[K]` int, their numbers; none of them may be in flight.
        """

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
        ...

"""`AsyncCollector`: of many environments those step that are ready."""

import time
from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from envs.host.types import AsyncHostVectorEnv, HostStep
from envs.types import ArrayTree
from rollout import checks
from rollout.host.collector import HostCollector
from rollout.host.faults import Faults
from rollout.host.rows import Rows
from rollout.host.run import ActFn, At, Causes, Run
from rollout.host.seats import Seats
from rollout.types import (
    Accumulator,
    Accumulators,
    ActionT,
    ObsT,
    ParamsT,
    Policy,
    RecordFn,
    Transition,
)


class Served(struct.PyTreeNode):
    """`info` of what an `AsyncCollector` collects: who answered, and when.

    Attributes:
        env_id: `[T, R]` int32, which environment the row is of.
        time: `[T, R]` float32, seconds since `init` until it answered; of simulated
            latencies, theirs.
        info: `[T, R, ...]`, whatever the environment gave along.
        num_envs: E, of how many.
    """

    env_id: jax.Array  # [T, R]
    time: jax.Array  # [T, R]
    info: ArrayTree  # [T, R, ...]
    num_envs: int = struct.field(pytree_node=False)


class AsyncCollector(HostCollector[ParamsT, ObsT, ActionT]):
    """Collects experience from environments that answer at different speeds.

    In every row the first `R` environments that have answered stand, in the order in
    which they did; the policy chooses for these, and they work on while the next ones
    are waited for. A row holds what an environment answered to its last action, and
    `info` is a `Served`: `by_env` puts rows into the order of each environment. Actions
    that are not answered at the end of a call are in the first rows of the next one.

    The methods are those of `HostCollector`, with trajectories `[T, R, ...]`. The
    policy gets `[R, ...]` observations, and `E` rows of state. Which environment is
    served when depends on its speed, and with it what a policy draws.

    `collect_episodes` plays the first N episodes that are *started*, so that fast or
    short ones are not favoured.

    Attributes:
        num_ready: R.

    Args:
        env: E environments of which any number may be stepped.
        policy: as `HostCollector` has it, and so the last four.
        num_ready: R, environments of a row, at least 1 and at most E.
        timeout: seconds to wait for R environments, None for any time; what is longer
            is a `TimeoutError`.
        record_fn: what is recorded of a transition.
        accumulators: figures of one's own that are kept per episode, by name.
        on_fault: what becomes of an environment that fails.
        max_restarts: how often that may happen.

    Raises:
        ValueError: if an argument is not as above.
    """

    env: AsyncHostVectorEnv

    def __init__(
        self,
        *,
        env: AsyncHostVectorEnv,
        policy: Policy[ParamsT, ObsT, ActionT],
        num_ready: int,
        timeout: float | None = None,
        record_fn: RecordFn[ObsT, ActionT] | None = None,
        accumulators: Mapping[str, Accumulator] | Accumulators = (),
        on_fault: str = "raise",
        max_restarts: int = 100,
    ) -> None:
        checks.kind_of_env(env, is_host=True)
        if not hasattr(env, "receive"):
            raise ValueError(
                "`env` must be an `AsyncHostVectorEnv`, as `envs.workers` makes it, "
                f"got {type(env).__name__}."
            )
        self.num_ready = checks.count("num_ready", num_ready, most=env.num_envs)
        fixed = getattr(env, "batch_size", num_ready)
        if fixed != num_ready:
            raise ValueError(
                f"`num_ready` must be the `batch_size` of the environment, {fixed}, "
                f"got {num_ready}."
            )
        self._timeout = timeout
        super().__init__(
            env=env,
            policy=policy,
            record_fn=record_fn,
            accumulators=accumulators,
            on_fault=on_fault,
            max_restarts=max_restarts,
        )

    @property
    def _num_columns(self) -> int:
        return self.num_ready

    def _make_run(self, key: chex.PRNGKey) -> Run:
        if isinstance(self._run, _AsyncRun):
            self._run.drain()
        wait = self.num_ready, self._timeout
        return _AsyncRun(self.env, self._program.act, key, self._faults, *wait)


def by_env(rows: Transition) -> Transition:
    """Puts what an `AsyncCollector` collected into the order of each environment.

    Targets that look ahead, such as `gae`, need it. Inside or outside of `jit`.

    Args:
        rows: `[T, R, ...]`, in the order in which they were served.

    Returns:
        `[T, E, ...]`: column e has the rows of environment e in the order of time, and
        after its last one rows that are zero, with `mask` False.

    Raises:
        ValueError: if `rows` are not of an `AsyncCollector`.
    """
    if not isinstance(getattr(rows, "info", None), Served):
        raise ValueError(
            "`rows` must be what an `AsyncCollector` collected, with its `info`, got "
            f"{checks.describe(getattr(rows, 'info', rows))}."
        )
    num_rows, num_envs = rows.mask.shape[0], rows.info.num_envs
    env_id = jnp.where(rows.mask, rows.info.env_id, num_envs).reshape(-1)
    order = jnp.argsort(env_id, stable=True)
    env_id = env_id[order]
    first = jnp.searchsorted(env_id, env_id, side="left")
    place = (jnp.arange(env_id.size) - first, env_id)  # void ones in no column

    def put(leaf: jax.Array) -> jax.Array:
        leaf = leaf.reshape(-1, *leaf.shape[2:])[order]
        zeros = jnp.zeros((num_rows, num_envs, *leaf.shape[1:]), leaf.dtype)
        return zeros.at[place].set(leaf, mode="drop")

    return jax.tree.map(put, rows)


class _AsyncRun(Run):
    """The loop of an `AsyncCollector`: act, send, receive whoever answers first."""

    _env: AsyncHostVectorEnv

    def __init__(
        self,
        env: AsyncHostVectorEnv,
        act_fn: ActFn,
        key: chex.PRNGKey,
        faults: Faults,
        num_ready: int,
        timeout: float | None,
    ) -> None:
        self._num_ready, self._timeout = num_ready, timeout
        self._start = time.monotonic()
        self._waits = np.zeros(env.num_envs, bool)  # for an action
        self._works = np.zeros(env.num_envs, bool)  # on one
        # What is known of the steps under way, `[E, ...]`, and who is in which row.
        self._chosen: ArrayTree = None
        self._served: list[np.ndarray] = []
        super().__init__(env, act_fn, key, faults)

    def _step(
        self,
        params: Any,
        rows: Rows,
        is_random: np.ndarray | None,
        seats: Seats | None,
    ) -> tuple[HostStep, At]:
        del is_random  # unused: nobody knows which steps come first
        self._send(params, seats)
        result, env_id = self._receive(min(self._num_ready, int(self._works.sum())))
        self._waits[env_id] = True
        _put(self.obs, env_id, result.obs)
        if not rows.num:
            self._served.clear()
        self._served.append(env_id)
        for name, field in zip(_CHOSEN, self._chosen, strict=True):
            rows.write(name, jax.tree.map(lambda x: x[env_id], field))
        rows.write("info", self._info(result, env_id))
        return result, env_id

    def drain(self) -> None:
        """Waits for the steps under way, and drops their answers."""
        count = int(self._works.sum())
        if count and not hasattr(self._env, "batch_size"):
            self._receive(count)

    def _receive(self, num_ready: int) -> tuple[HostStep, np.ndarray]:
        try:
            result, env_id = self._env.receive(num_ready, self._timeout)
        except TimeoutError as error:
            raise TimeoutError(
                f"`num_ready`={num_ready} environments must answer within "
                f"`timeout`={self._timeout} s, got fewer."
            ) from error
        except BaseException:
            self._is_torn = True
            raise
        self._works[env_id] = False
        return result, env_id

    def _reset(self, lane: np.ndarray, mask: np.ndarray, begun: np.ndarray) -> Causes:
        if self._works[lane].any():  # only where all lanes begin anew
            self.drain()
        return super()._reset(lane, mask, begun)

    def _send(self, params: Any, seats: Seats | None) -> None:
        """Chooses for all that wait, and sends them on; idle ones wait on."""
        waits = self._waits
        if seats is not None and not hasattr(self._env, "batch_size"):
            waits = waits & seats.mask
        env_id = np.flatnonzero(waits).astype(np.int32)
        for first in range(0, len(env_id), self._num_ready):
            self._choose(params, env_id[first : first + self._num_ready])

    def _choose(self, params: Any, env_id: np.ndarray) -> None:
        """Chooses for up to R environments, as if for R, so that one program does."""
        lanes, count = self.lanes, len(env_id)
        padded = np.full(self._num_ready, lanes.num_envs, np.int32)
        padded[:count] = env_id
        at = np.minimum(padded, lanes.num_envs - 1)
        obs = jax.tree.map(lambda x: x[at], self.obs)
        action, extras = self._act_fn(
            params, obs, lanes.over[at], lanes.episode_id[at], env_id=padded
        )
        lanes.over[env_id] = False
        chosen = jax.tree.map(lambda x: x[:count], (obs, action, extras))
        if self._chosen is None:
            self._chosen = jax.tree.map(
                lambda x: np.zeros((lanes.num_envs, *x.shape[1:]), x.dtype), chosen
            )
        _put(self._chosen, env_id, chosen)
        self._env.send(chosen[1], env_id)
        self._works[env_id], self._waits[env_id] = True, False

    def _info(self, result: HostStep, env_id: Any) -> Served:
        now = getattr(self._env, "now", time.monotonic() - self._start)
        at: Any = np.full(len(env_id), now, np.float32)
        return Served(
            env_id=env_id,
            time=at,
            info=result.info,
            num_envs=self.lanes.num_envs,
        )

    def _take(self, obs: ArrayTree, mask: np.ndarray) -> None:
        if self.obs is None:
            self.obs = jax.tree.map(np.array, obs)
        where = np.flatnonzero(mask)
        _put(self.obs, where, jax.tree.map(lambda x: x[where], obs))
        self._waits |= mask
        self._works &= ~mask

    def _place_of(self, lane: int, rows: Rows) -> tuple[Any, Any]:
        first = int(self.lanes.first_row[lane])
        places = [
            (row, column)
            for row in range(first, rows.num + 1)
            for column in np.flatnonzero(self._served[row] == lane)
        ]
        return tuple(np.array(places).T)


_CHOSEN = ("obs", "action", "extras")


def _put(tree: ArrayTree, where: np.ndarray, rows: ArrayTree) -> None:
    """Writes rows into arrays, in place."""
    for array, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(rows), strict=True):
        array[where] = leaf

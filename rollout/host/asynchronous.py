"""`AsyncCollector`: collects `num_ready` of `B` environments a row, as they answer."""

import time
from collections.abc import Mapping
from typing import Any, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout import checks
from rollout.envs.host.types import AsyncHostVectorEnv, HostStep
from rollout.envs.types import ArrayTree
from rollout.host.host_collector import HostCollector
from rollout.host.loop import TORN, Answer, At, Loop
from rollout.host.rows import RowBlock
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
    """`info` of an `AsyncCollector`: which environments answered, and when.

    Attributes:
        env_id: `[T, num_ready]` int32, the environment that answered.
        time: `[T, num_ready]` float32, seconds since `init` until it answered, in
            virtual time with simulated latencies.
        info: `[T, num_ready, ...]`, the `info` of the environment.
        num_envs: B, the number of environments.
    """

    env_id: jax.Array  # [T, num_ready]
    time: jax.Array  # [T, num_ready]
    info: ArrayTree  # [T, num_ready, ...]
    num_envs: int = struct.field(pytree_node=False)


class AsyncCollector(HostCollector[ParamsT, ObsT, ActionT]):
    """Collects experience from environments that answer at different speeds.

    Every row has the first `num_ready` of `B` environments that answered, in the order
    of their answers. The policy then acts for these, and they step while the collector
    waits for the next ones. A transition is an environment's answer to its last action,
    and `info` is a `Served`: `by_env` sorts transitions by environment. Actions in
    flight at the end of a call are answered in the first rows of the next one.

    The methods are those of `HostCollector`, with trajectories `[T, num_ready, ...]`.
    The policy gets `[num_ready, ...]` observations, and a state of `B` lanes. The speed
    of the environments decides which one is in which row, and so which random numbers
    the policy draws for it.

    `collect_episodes` plays the first N episodes that are *started*, so that fast or
    short ones are not favoured.

    Attributes:
        num_ready: number of environments in a row.
        timeout: seconds to wait for `num_ready` environments, or None.

    Args:
        env: B environments that can step independently.
        policy: as in `HostCollector`, and so are the last four.
        num_ready: number of environments in a row, at least 1 and at most B.
        timeout: seconds to wait for `num_ready` environments, None for any time; after
            that a `TimeoutError` is raised.
        record_fn: maps a transition to its recorded fields.
        accumulators: user-defined values that are accumulated per episode, by name.
        on_fault: "raise" or "restart", where an environment fails.
        max_restarts: how many times environments are rebuilt in all.

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
                "`env` must be an `AsyncHostVectorEnv`, as `rollout.envs.workers` "
                f"makes it, got {type(env).__name__}."
            )
        self.num_ready = checks.int_between("num_ready", num_ready, most=env.num_envs)
        fixed = getattr(env, "batch_size", num_ready)
        if fixed != num_ready:
            raise ValueError(
                f"`num_ready` must be the `batch_size` of the environment, {fixed}, "
                f"got {num_ready}."
            )
        self.timeout = checks.seconds("timeout", timeout)
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

    def _arguments(self) -> dict[str, Any]:
        own = {"num_ready": self.num_ready, "timeout": self.timeout}
        return super()._arguments() | own

    def _make_loop(self, key: chex.PRNGKey, failed: np.ndarray) -> Loop:
        act_fn, progress = self._runner.act, self._runner.start(key)
        loop = _AsyncLoop(self.env, act_fn, progress, key, self._restarts, failed)
        return loop.serving(self.num_ready, self.timeout)


def by_env(rows: Transition) -> Transition:
    """Sorts the transitions of an `AsyncCollector` by environment and time.

    Targets that look ahead, such as `gae`, need it. Inside or outside of `jit`.

    Args:
        rows: `[T, num_ready, ...]`, in the order of the answers.

    Returns:
        `[T, B, ...]`: column b has the transitions of environment b in the order of
        time, followed by masked-out rows of zeros.

    Raises:
        ValueError: if `rows` are not of an `AsyncCollector`.
    """
    if not isinstance(getattr(rows, "info", None), Served):
        raise ValueError(
            "`rows` must be of an `AsyncCollector`, with its `info`, got "
            f"{checks.describe(getattr(rows, 'info', rows))}."
        )
    num_rows, num_envs = rows.mask.shape[0], rows.info.num_envs
    # Masked-out ones get a column beyond the last, where `put` drops them.
    env_id = jnp.where(rows.mask, rows.info.env_id, num_envs).reshape(-1)
    order = jnp.argsort(env_id, stable=True)  # stable: keeps the order of time
    env_id = env_id[order]
    # The row of a transition: how far it is behind the first one of its environment.
    first = jnp.searchsorted(env_id, env_id, side="left")
    place = (jnp.arange(env_id.size) - first, env_id)

    def put(leaf: jax.Array) -> jax.Array:
        leaf = leaf.reshape(-1, *leaf.shape[2:])[order]
        zeros = jnp.zeros((num_rows, num_envs, *leaf.shape[1:]), leaf.dtype)
        return zeros.at[place].set(leaf, mode="drop")

    return jax.tree.map(put, rows)


class _AsyncLoop(Loop):
    """The loop of an `AsyncCollector`: act, send, receive the first that answer.

    An action waits in `_actions` until its answer comes, in this call or in a later
    one. `_pending` is then the pair that `AsyncHostVectorEnv.receive` returns.
    """

    _env: AsyncHostVectorEnv

    def serving(self, num_ready: int, timeout: float | None) -> Self:
        """Sets how many environments are in a row, and how long to wait for them."""
        self._num_ready, self.timeout = num_ready, timeout
        self._start = time.monotonic()
        self._in_flight = self._nowhere  # [B] bool, True while an environment steps
        self._actions: ArrayTree = None  # obs, action, extras in flight, [B, ...]
        return self

    def _exchange(self, params: Any, block: RowBlock) -> None:
        del block  # unused
        waits, plan = ~self._in_flight, self.state.plan
        # Idle lanes keep waiting; but a fixed batch may need their answers to be full.
        if plan is not None and not hasattr(self._env, "batch_size"):
            waits = waits & plan.mask
        # Send to all that wait before waiting for a row, so that none stands still:
        # usually the lanes of the last row; at the start all, in several sends.
        env_id = np.flatnonzero(waits).astype(np.int32)
        for first in range(0, len(env_id), self._num_ready):
            self._send(params, env_id[first : first + self._num_ready])
        # Fewer than `num_ready` are in flight where a plan ends.
        self._receive(min(self._num_ready, int(self._in_flight.sum())))

    def _answer(self, block: RowBlock) -> Answer:
        result, at = self._pending
        obs, action, extras = jax.tree.map(lambda x: x[at], self._actions)
        block.write("obs", obs)
        self._in_flight = self._in_flight & ~self._scatter(np.ones(len(at), bool), at)
        result = result._replace(info=self._info(result, at))
        return Answer(action, extras, self.state.progress, result, at)

    def _send(self, params: Any, env_id: np.ndarray) -> None:
        """Sends actions to up to `num_ready` environments; calls the policy once."""
        state, count = self.state, len(env_id)
        # Padded, so that one compiled program serves any number. The policy drops the
        # state of the number beyond the last lane; as input any lane will do.
        padded = np.full(self._num_ready, len(state.over), np.int32)
        padded[:count] = env_id
        at = np.minimum(padded, len(state.over) - 1)
        obs = jax.tree.map(lambda x: x[at], self.obs)
        *decision, progress = self._act_fn(
            params,
            obs,
            state.over[at],
            state.episode_id[at],
            state.progress,
            env_id=padded,
        )
        chosen = jax.tree.map(lambda x: x[:count], (obs, *decision))
        if self._actions is None:
            self._actions = jax.tree.map(
                lambda x: np.zeros((len(state.over), *x.shape[1:]), x.dtype), chosen
            )
        _place_rows(self._actions, env_id, chosen)
        sent = self._scatter(np.ones(count, bool), env_id)
        in_flight = self._in_flight | sent
        state = state._replace(progress=progress, over=state.over & ~sent)
        self._pending = TORN  # until it is certain that the actions are sent
        self._env.send(chosen[1], env_id)
        self.state, self._in_flight, self._pending = state, in_flight, None

    def _receive(self, num_ready: int) -> None:
        """Waits for the first environments that answer."""
        self._pending = TORN
        try:
            self._pending = self._env.receive(num_ready, self.timeout)
        except TimeoutError as error:
            self._pending = None  # nothing is lost: the next call receives them
            raise TimeoutError(
                f"`num_ready`={num_ready} environments must answer within "
                f"`timeout`={self.timeout} s, got fewer."
            ) from error

    def _info(self, result: HostStep, env_id: Any) -> Served:
        now = getattr(self._env, "now", time.monotonic() - self._start)
        at: Any = np.full(len(env_id), now, np.float32)
        num_envs = self._env.num_envs
        return Served(env_id=env_id, time=at, info=result.info, num_envs=num_envs)

    def _read(self, obs: ArrayTree, at: At) -> ArrayTree:
        _place_rows(self.obs, at, obs)
        return self.obs

    def _read_first(self, obs: ArrayTree, mask: np.ndarray) -> ArrayTree:
        own = jax.tree.map(np.array, obs) if self.obs is None else self.obs
        where = np.flatnonzero(mask)
        _place_rows(own, where, jax.tree.map(lambda x: x[where], obs))
        self._in_flight = self._in_flight & ~mask  # a reset drops the step in flight
        return own


def _place_rows(tree: ArrayTree, where: At, rows: ArrayTree) -> None:
    """Writes rows into arrays, in place."""
    for array, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(rows), strict=True):
        array[where] = leaf

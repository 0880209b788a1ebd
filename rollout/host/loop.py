"""Steps environments under a policy, and owns the state of a host collection.

The loop is a NumPy version of `rollout.kernel.step`, which cannot call environments
outside of JAX. It uses the kernel's functions for policy state, accumulators and
recorded fields.

Ctrl-C is delayed and raises only between two rows, so the loop may update its state in
several lines. A second Ctrl-C, or an error in the code of an environment, may raise at
any line: the state is then inconsistent, and `recover` begins new episodes in all
lanes.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import chex
import jax
import numpy as np

from rollout.base import checks, trees
from rollout.base.platform import to_host
from rollout.envs.host import env_checks
from rollout.envs.host.arrays import place_rows
from rollout.envs.host.env_checks import SpaceCheck
from rollout.envs.host.types import EnvFault, HostStep, HostVectorEnv
from rollout.envs.spaces import as_space
from rollout.envs.types import ArrayTree
from rollout.host.ctrl_c import held_back
from rollout.host.episode_plan import EpisodePlan
from rollout.host.host_policy import HostPolicy
from rollout.host.rows import RowBlock, recorder
from rollout.kernel import keys
from rollout.kernel.state import accumulate_nothing
from rollout.types import (
    Accumulators,
    AsyncInfo,
    Carry,
    Episode,
    Policy,
    RecordFn,
    Transition,
    check_carry,
)

NO_LIMIT = 2**31 - 1  # steps, longer than any episode
_NUM_SEED_ROWS = 256  # rows of B seeds per table
_ALL = slice(None)
_LOG = logging.getLogger("rollout")


class FaultStats(NamedTuple):
    """Counts faults and lost steps since the collector was created.

    Attributes:
        faulty_episodes: number of discarded episodes.
        lost_steps: number of masked-out steps of discarded episodes, including the
            faulty steps. `collect_episodes` and the folds count only steps in their
            current block of at most 64 rows.
        restarts: number of rebuilt environments.
    """

    faulty_episodes: int
    lost_steps: int
    restarts: int


class Loop:
    """Steps `B` environments under a policy, and owns the state of the collection.

    The state consists of the lanes, the latest carry, and the rows and assigned
    episodes of a running call. No other class changes it.

    Args:
        env: vector of `B` environments.
        policy: policy that acts in the environments.
        num_ready, record_fn, accumulators, on_fault, max_restarts: as in
            `HostCollector`.

    Attributes:
        stats: counts of faults so far.
        policy: the compiled policy; None before `start`.
        key: root key.
        step: number of steps so far.
        next_episode: number of queue positions used so far.
        policy_state: `[B, ...]` state of the policy, on the device.
        obs: `[B, ...]` current observations, possibly in memory of the environments.
        episode_id: `[B]` int32, ids of the current episodes.
        episode_return, episode_length: `[B]` float32 and int32, return and length of
            the current episodes so far.
        is_first: `[B]` bool, True before the first action of an episode.
        accumulated: accumulated values of all lanes before the block.
        is_torn: True while environments step. If it is True after an error, the state
            of the environments is unknown.
        plan: assigned episodes; None while lanes play per-lane episodes.
        block: rows of the running or interrupted call; None if there are none.
    """

    def __init__(
        self,
        env: HostVectorEnv,
        policy: Policy,
        *,
        num_ready: int | None,
        record_fn: RecordFn | None,
        accumulators: Accumulators,
        on_fault: str,
        max_restarts: int,
    ) -> None:
        _check(env, num_ready, on_fault)
        checks.check_int("max_restarts", max_restarts, least=0)
        self._env: Any = env
        self._policy, self._is_async = policy, num_ready is not None
        self._width = num_ready or env.num_envs  # columns of a row
        self._max_restarts, self._restarts = max_restarts, on_fault == "restart"
        self._action_space = as_space(env.action_space, "env.action_space")
        self._obs_check = SpaceCheck(env.observation_space)
        self._accumulators = accumulators
        self._record_fn = None
        if record_fn is not None or accumulators:
            self._record_fn = recorder(accumulators, record_fn)
        self._all_lanes = np.ones(env.num_envs, bool)
        self._no_lanes = ~self._all_lanes
        self._failed = self._no_lanes.copy()  # [B] bool, lanes to rebuild
        self._call_lock = threading.Lock()
        # Called between two rows; raises if Ctrl-C was pressed.
        self._raise_pending: Callable[[], None] = lambda: None
        # A ticket identifies a carry. The environments store the ticket of the latest
        # carry, so that a collector detects if another collector has stepped them.
        self._ticket: Any = np.uint32(0)  # of the latest carry or the running call
        self._used_ticket: Any = None  # of the carry that began the call
        self._latest: Carry | None = None
        self.policy: Any = None  # a `HostPolicy`
        self.stats = FaultStats(0, 0, 0)
        self.is_torn = False

    @contextlib.contextmanager
    def call(self, carry: Carry | None = None) -> Iterator[None]:
        """Delays Ctrl-C during a call, and invalidates the carry that begins it.

        Until the call returns, `recover` can continue from the last complete row.
        """
        with held_back() as raise_pending:
            if not self._call_lock.acquire(blocking=False):
                raise RuntimeError(
                    "A collector over host environments makes one call at a time, and "
                    "a batch of a `Stream` is running in another thread. Close the "
                    "stream first, or use a second collector with other environments."
                )
            try:
                # Validate the carry first: after an error the latest carry stays valid.
                if carry is not None:
                    self.check(carry)
                    self.policy_state = carry.policy_state
                    self._use_carry()
                self._raise_pending = raise_pending
                yield
            finally:
                self._call_lock.release()
        # Delayed Ctrl-C raises before this line, so that `recover` finds the rows.
        self.block = self._used_ticket = None

    def check(self, carry: Carry) -> None:
        """Raises unless a call may begin with a carry."""
        checks.check_outside_jit("HostCollector")
        check_carry(carry)
        # Compare tickets: a copy of the carry has the same ticket.
        if not self.is_latest(carry):
            raise ValueError(
                "`carry` must be the result of the latest call: the environments have "
                "been stepped since. After an error, call `recover`. If another "
                "collector steps these environments, call `init` or use separate ones."
            )
        for name in ("key", "step", "next_episode", "obs", "episode"):
            value, expected = (getattr(x, name) for x in (carry, self._latest))
            message = f"`carry.{name}` must be as the latest call returned it, since "
            message += "only `policy_state` may be replaced"
            checks.check_same_types(message, expected, value)
            for x, y in zip(*map(jax.tree.leaves, (expected, value)), strict=True):
                if x is y:  # the usual case: avoid the transfer from the device
                    continue
                if not np.array_equal(*trees.unwrap_keys((x, y)), equal_nan=True):
                    raise ValueError(f"{message}.")

    def is_latest(self, carry: Carry) -> bool:
        """Returns whether a carry, or a copy of it, matches the environments."""
        is_owner = env_checks.is_claimed(self._env, self._ticket)
        return is_owner and np.array_equal(_ticket_of(carry), self._ticket)

    def _use_carry(self) -> None:
        """Begins a call, which invalidates the latest carry."""
        # No carry is valid until the call returns, since the environments step.
        self._used_ticket = self._ticket
        self._claim()

    def _claim(self) -> None:
        """Invalidates all earlier carries, including carries of other collectors."""
        self._ticket = np.uint32(env_checks.new_user())
        env_checks.claim(self._env, self._ticket)

    def start(self, key: chex.PRNGKey, shared: Any = None) -> None:
        """Claims the environments and resets all state except shared statistics.

        `begin` then resets the environments.
        """
        self._claim()
        self._env.restart(shared)
        num_envs = self._env.num_envs
        self.policy = HostPolicy(self._policy, self._action_space, num_envs, key)
        self.key, self.step, self.next_episode = key, 0, 0
        self.policy_state = self.policy.initial_state
        self.accumulated = accumulate_nothing(self._accumulators, num_envs)
        # Every lane may need a different table. If a table was evicted, it is computed
        # again with the same seeds.
        self._seed_table = functools.lru_cache(num_envs + 1)(
            functools.partial(_compute_seeds, key, num_envs)
        )
        self.plan: Any = None  # an `EpisodePlan`
        self.block: RowBlock | None = None
        self.episode_id = np.arange(num_envs, dtype=np.int32)
        self.episode_return = np.zeros(num_envs, np.float32)
        self.episode_length = np.zeros(num_envs, np.int32)
        # Without `num_ready`, this is the array that `step` returned. With `num_ready`,
        # the loop owns the array and replaces rows when environments return a step.
        self.obs: ArrayTree = None
        self.is_first = self._all_lanes
        self._must_reset = self._no_lanes.copy()  # [B] bool, lanes to reset
        # Used with `num_ready`: `[B]` bool, environments in flight; `[B, ...]`, their
        # observations, actions and extras.
        self._in_flight = self._no_lanes.copy()
        self._sent: ArrayTree = None

    def carry(self) -> Carry:
        """Returns the carry for the next call."""
        # Copy arrays: the loop updates them in place.
        if self._accumulators:
            initial = accumulate_nothing(self._accumulators, self._env.num_envs)
            has_begun: Any = self.episode_length > 0
            self.accumulated = trees.select(has_begun, self.accumulated, initial)
        episode: dict[str, Any] = {
            "key": (),  # host episodes have a seed instead
            "episode_return": self.episode_return.copy(),
            "episode_length": self.episode_length.copy(),
            "episode_id": self.episode_id,
            "accumulated": self.accumulated,
        }
        fields: dict[str, Any] = {
            "key": self.key,
            "step": np.int32(self.step),
            "next_episode": np.int32(self.next_episode),
            "env_state": (self._ticket, self._env.shared),
            "obs": jax.tree.map(np.array, self.obs),
            "policy_state": self.policy.reset_state(
                self.policy_state, self.is_first, self.episode_id
            ),
            "episode": Episode(**episode),
        }
        self._latest = Carry(**fields)
        return self._latest

    def begin(self, episode_id: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Begins the episodes with these ids, `[B]`, in all lanes or where `mask`."""
        self._mark(self._all_lanes if mask is None else mask, episode_id)
        self._reset()

    def begin_started(self) -> None:
        """Begins the next episode in lanes whose episode has at least one step."""
        # Skip lanes at the start of an episode: if the last row of the previous batch
        # ended an episode, the lane is already reset.
        self.begin(self._next_ids, self.episode_length > 0)

    def assign(
        self,
        num_episodes: int,
        *,
        per_env: bool,
        min_steps: int | None,
        max_length: int | None,
    ) -> EpisodePlan:
        """Assigns episodes to the lanes, and begins them; `finish` ends the plan."""
        next_ids, num_envs = self._next_ids, self._env.num_envs
        if per_env:  # lanes without a step play their current episode
            next_ids = np.where(self.episode_length > 0, next_ids, self.episode_id)
        self.plan = EpisodePlan(
            next_ids,
            num_episodes * (num_envs if per_env else 1),
            first_queued=None if per_env else self.next_episode,
            min_steps=min_steps,
            max_length=max_length,
        )
        self.begin(self.plan.episode_id)
        return self.plan

    def finish(self) -> None:
        """Ends the assigned episodes, and begins the next episode of every lane."""
        # Each lane is in the middle of an arbitrary episode.
        self.next_episode += self.plan.num_used
        next_ids, self.plan, self.block = self._next_ids, None, None
        self.begin(next_ids)

    def run(
        self,
        params: Any,
        num_rows: int,
        block_size: int,
        limit: int = NO_LIMIT,
        *,
        cut_last: bool = False,
    ) -> Iterator[tuple[RowBlock, Transition]]:
        """Collects up to `num_rows` rows, or until the assigned episodes have ended.

        Yields each full block with its recorded rows. Episodes are truncated after
        `limit` steps. With `cut_last`, the last row truncates all episodes that do not
        terminate in it. After an error, the block has the complete rows, and `recover`
        continues.
        """
        step_fn = self._receive if self._is_async else self._step
        for first in range(0, num_rows, block_size):
            if self._is_done:
                return
            # Allocate the full size, so that one compiled program records every block.
            size = min(block_size, num_rows - first)
            block = self.block = RowBlock(self._width, block_size)
            # Each iteration acts, steps, writes a row, and begins the next episodes. An
            # interrupt at any line leaves a complete row or no row in the block.
            while block.num < size and not self._is_done:
                self._raise_pending()
                result, lanes = step_fn(params, block)
                is_last = cut_last and block.num == size - 1
                done = self._write(params, block, result, lanes, limit, is_last)
                self._advance(block, result, lanes, done)
                self.is_torn = False
                if np.count_nonzero(self._must_reset):  # faster than `any`
                    self._reset()
            yield block, block.record(self._record)

    def restore(self, carry: Carry, saved: list[bytes] | None) -> None:
        """Continues from a carry; restarts its episodes unless states were saved."""
        if saved is not None:
            self.is_torn = True
            self._use_carry()
            self._env.load(saved, jax.tree.map(np.array, carry.obs))
        self.start(carry.key, carry.env_state[1])
        self.next_episode = int(carry.next_episode)
        self.step, self.policy_state = int(carry.step), carry.policy_state
        self.episode_id = np.array(carry.episode.episode_id)
        self.episode_return = np.array(carry.episode.episode_return)
        self.episode_length = np.array(carry.episode.episode_length)
        self.obs, self.is_first = jax.tree.map(np.array, carry.obs), self._no_lanes
        if saved is None:
            self.begin(self.episode_id)
        else:
            self.accumulated = carry.episode.accumulated
            self._failed, self.is_torn = self._no_lanes.copy(), False

    def was_used(self, carry: Carry) -> bool:
        """Returns whether a carry began the running or interrupted call."""
        return np.array_equal(_ticket_of(carry), self._used_ticket)

    def recover(self) -> Transition | None:
        """Continues after an error, and returns the rows collected before it.

        Failed environments are rebuilt, and lanes whose episode cannot continue begin a
        new one. All lanes begin a new episode if the state is torn, if episodes were
        assigned, or if another collector has stepped the environments.
        """
        if self.policy is None:
            raise ValueError("`recover` must follow `init`. Call `init` first.")
        is_owner = env_checks.is_claimed(self._env, self._ticket)
        next_ids = self._next_ids
        if self.plan is not None:
            # Do not play started episodes again: their ids would repeat.
            self.next_episode += self.plan.num_used
        if self.is_torn or self.plan is not None or not is_owner:
            self.plan = None
            self._mark(self._all_lanes, next_ids)
        self._reset()
        self._claim()
        block = self.block
        if block is None or not block.num:
            return None
        rows = block.record(self._record)
        return jax.tree.map(lambda x: x[: block.num], rows)

    @property
    def _is_done(self) -> bool:
        """True if all assigned episodes have ended."""
        return self.plan is not None and self.plan.is_done

    @property
    def _next_ids(self) -> np.ndarray:
        """`[B]` int32, ids of the next per-lane episodes, after the plan if any."""
        if self.plan is not None:
            return self.plan.next_ids
        return self.episode_id + np.int32(len(self.episode_id))

    def _record(self, rows: Transition, lane: np.ndarray) -> Transition:
        """Accumulates values over the rows of a block, and applies `record_fn`."""
        if self._record_fn is None:
            return jax.device_put(rows)
        self.accumulated, trajectory = self._record_fn(self.accumulated, rows, lane)
        return trajectory

    def _step(self, params: Any, block: RowBlock) -> tuple[HostStep, slice]:
        """Takes one step in all lanes."""
        # Pass the copy in the block: JAX may alias its input, and the environments may
        # overwrite the original while the program runs.
        obs = block.write("obs", self.obs)
        action, extras = self._act(params, obs)
        self.is_first, self.is_torn = self._no_lanes, True
        result = self._env.step(action)
        block.write("action", action)
        block.write_extras(extras)
        return result, _ALL

    def _act(
        self, params: Any, obs: ArrayTree, env_id: np.ndarray | None = None
    ) -> tuple[ArrayTree, ArrayTree]:
        """Applies the policy in all lanes, or in the lanes `env_id`."""
        self.policy_state, action, extras = self.policy.act(
            params,
            self.step,
            self.policy_state,
            obs,
            self.is_first,
            self.episode_id,
            env_id,
        )
        self.step += 1
        return action, extras

    def _receive(self, params: Any, block: RowBlock) -> tuple[HostStep, np.ndarray]:
        """Sends actions to all waiting lanes and receives the first steps."""
        is_waiting = ~self._in_flight
        # Idle lanes get no action, unless a fixed batch size requires their steps.
        if self.plan is not None and self._env.batch_size is None:
            is_waiting &= self.plan.mask
        # Send all actions before receiving, so that no environment is idle.
        # Usually these are the lanes of the last row; at the start, all lanes.
        env_id = np.flatnonzero(is_waiting).astype(np.int32)
        for first in range(0, len(env_id), self._width):
            self._send(params, env_id[first : first + self._width])
        # At the end of a plan, fewer environments are in flight.
        num_ready = min(self._width, int(np.count_nonzero(self._in_flight)))
        self.is_torn = True
        result, lanes = self._env.receive(num_ready)
        self._in_flight[lanes] = False
        obs, action, extras = jax.tree.map(lambda x: x[lanes], self._sent)
        block.write("obs", obs)
        block.write("action", action)
        block.write_extras(extras)
        block.write_lanes(lanes)
        env_id: Any = lanes
        info = AsyncInfo(env_id=env_id, info=result.info, num_envs=self._env.num_envs)
        return result._replace(info=info), lanes

    def _send(self, params: Any, env_id: np.ndarray) -> None:
        """Sends actions to up to `num_ready` environments, with one policy call."""
        num_envs, count = self._env.num_envs, len(env_id)
        # Pad, so that one compiled program handles any number of lanes. The policy
        # drops the state of lane B, which is padding with arbitrary observations.
        padded = np.full(self._width, num_envs, np.int32)
        padded[:count] = env_id
        index = np.minimum(padded, num_envs - 1)
        obs = jax.tree.map(lambda x: x[index], self.obs)
        decision = self._act(params, obs, padded)
        rows = jax.tree.map(lambda x: x[:count], (obs, *to_host(decision)))
        if self._sent is None:
            self._sent = jax.tree.map(
                lambda x: np.zeros((num_envs, *x.shape[1:]), x.dtype), rows
            )
        place_rows(self._sent, env_id, rows)
        # Copy: JAX may still read the array that was passed to `act`.
        self.is_first = self.is_first.copy()
        self.is_first[env_id] = False
        self.is_torn = True
        self._env.send(rows[1], env_id)
        self._in_flight[env_id] = True
        self.is_torn = False

    def _write(
        self,
        params: Any,
        block: RowBlock,
        result: HostStep,
        lanes: Any,
        limit: int,
        is_last: bool,
    ) -> np.ndarray:
        """Writes a row; returns `[K]` bool, True for episodes that end with it."""
        # `lanes` selects K of the B lanes; the first K columns of the row have their
        # steps.
        plan, terminated, truncated = self.plan, result.terminated, result.truncated
        reward, step_mask = result.total_reward, result.mask
        if step_mask is None:  # the usual case, kept fast
            step_mask = self._all_lanes[lanes]
        else:
            reward, self.is_first = np.where(step_mask, reward, 0), self.is_first.copy()
            self.is_first[lanes] |= ~step_mask  # lanes that only reset
        self.episode_length[lanes] += step_mask
        self.episode_return[lanes] += reward
        # Mask out lanes that only reset themselves, and idle lanes.
        mask = step_mask if plan is None else step_mask & plan.mask[lanes]
        length, cut = self.episode_length[lanes], False
        if limit < NO_LIMIT:
            cut = mask & (length >= limit) & ~truncated
            # An assigned episode that terminates at the limit is not truncated.
            cut = cut if plan is None else cut & ~terminated
            truncated = truncated | cut
        if is_last:
            truncated = truncated | (mask & ~terminated)
        if self.policy.has_critic:
            bootstraps = truncated & ~terminated & mask
            # Rows without bootstraps stay zero.
            if block.num == 0 or np.count_nonzero(bootstraps):
                env_id = None if lanes is _ALL else np.resize(lanes, self._width)
                value = self.policy.values(
                    params, result.obs, self.policy_state, bootstraps, env_id
                )
                block.write("final_value", value)
        block.complete_row(
            result,
            terminated=terminated,
            truncated=truncated,
            mask=mask,
            cut=cut,
            episode_id=self.episode_id[lanes],
            episode_return=self.episode_return[lanes],
            episode_length=length,
        )
        return terminated | truncated

    def _advance(
        self, block: RowBlock, result: HostStep, lanes: Any, done: np.ndarray
    ) -> None:
        """Prepares the next row after `_write`, and checks for faults."""
        if lanes is _ALL:
            self.obs, ended = result.obs, done
        else:
            place_rows(self.obs, lanes, result.obs)
            ended = self._no_lanes.copy()
            ended[lanes] = done
        # Nonfinite values and values outside the space are faults. Check after the row
        # is written, since a fault masks out all rows of its episode.
        faults, reward = self._obs_check.find(result.obs), result.total_reward
        if not np.isfinite(reward).all():
            is_invalid = ~np.isfinite(reward)
            is_invalid = is_invalid if result.mask is None else is_invalid & result.mask
            for column in np.flatnonzero(is_invalid).tolist():
                message = f"`reward` must be finite, got {reward[column]}"
                faults.setdefault(column, ValueError(message))
        causes = result.causes
        if faults:  # the keys are columns of the row; the keys of `causes` are lanes
            lane = np.arange(len(ended))[lanes].tolist()
            causes = {lane[i]: cause for i, cause in faults.items()} | dict(causes)
        if self.plan is not None:
            self.plan.count_steps(block.mask[block.num - 1])
        self._end(ended, causes)

    def _end(self, ended: np.ndarray, causes: Mapping[int, BaseException]) -> None:
        """Ends finished and lost episodes, and marks their lanes for a reset.

        Args:
            ended: `[B]` bool, True for lanes whose episode has ended without a fault.
            causes: error of each failed environment, by index. The episodes are lost,
                and their rows in the block are masked out.
        """
        step = 0
        if causes:
            step = int(self.episode_length[next(iter(causes))])
            failed = list(causes)
            lost_ids, num_episodes = self.episode_id[failed], len(failed)
            if self.plan is not None:
                num_episodes = int(np.count_nonzero(self.plan.mask[failed]))
                self.plan.mark_lost(lost_ids)
            num_steps = 0 if self.block is None else self.block.mask_out(lost_ids)
            episodes, steps, restarts = self.stats
            self.stats = FaultStats(
                episodes + num_episodes, steps + num_steps, restarts
            )
            # The lane of a lost episode is rebuilt before it is reset. With
            # `on_fault="raise"`, `recover` rebuilds it.
            self._failed[failed] = ended[failed] = True
        if np.count_nonzero(ended):
            if self.plan is None:
                self._mark(ended, self._next_ids)
            else:
                self.plan.advance(ended)
                self._mark(ended, self.plan.episode_id)
        if causes:
            self._report(causes, step)

    def _mark(self, mask: np.ndarray, episode_id: np.ndarray) -> None:
        """Assigns episode ids to lanes, and marks the lanes for `_reset`."""
        # Create new ids and flags: a carry or JAX may hold the old arrays. Lengths and
        # returns may change in place, since callers receive copies.
        self.episode_id = np.where(mask, episode_id, self.episode_id)
        self.episode_length[mask] = 0
        self.episode_return[mask] = 0
        self.is_first = self.is_first | mask
        self._must_reset = self._must_reset | mask

    def _reset(self) -> None:
        """Rebuilds failed environments and resets the lanes that begin an episode."""
        if self.is_torn:  # any environment may be inconsistent
            self._failed = self._all_lanes.copy()
        self.is_torn = True
        # Repeat, since a fault in a reset discards the next episode.
        while np.count_nonzero(self._must_reset):
            if self._env.can_rebuild and np.count_nonzero(self._failed):
                self._rebuild()
                continue
            lane = np.flatnonzero(self._must_reset)
            seeds = self._seeds(lane)
            # Queued ids count down from -1, and their numbers count up from 0.
            ids = self.episode_id
            self._env.at_episodes(np.where(ids < 0, -1 - ids, ids))
            try:
                obs = self._env.reset(seeds, self._must_reset)
                causes = self._obs_check.find(obs)
                causes = {n: causes[n] for n in lane.tolist() if n in causes}
            except EnvFault as error:
                obs, causes = None, error.causes
            if causes:
                # The seed may be the cause, so the lane begins the following episode.
                # All other lanes are reset again with the same seeds.
                self._end(self._no_lanes.copy(), causes)
                continue
            if not self._is_async:
                self.obs = obs
            else:
                if self.obs is None:
                    self.obs = jax.tree.map(np.array, obs)
                place_rows(self.obs, lane, [x[lane] for x in jax.tree.leaves(obs)])
                self._in_flight &= ~self._must_reset  # a reset cancels steps
            self._must_reset = self._no_lanes
        self.is_torn = False

    def _seeds(self, lanes: np.ndarray) -> np.ndarray:
        """Returns the seeds of episodes of these lanes, `[B]` uint32; 0 elsewhere."""
        num_envs = self._env.num_envs
        seeds = np.zeros(num_envs, np.uint32)
        for lane in lanes.tolist():
            # Queued ids count down from -1, so rows may be negative.
            row, column = divmod(int(self.episode_id[lane]), num_envs)
            table = self._seed_table(row // _NUM_SEED_ROWS)
            seeds[lane] = table[row % _NUM_SEED_ROWS, column]
        return seeds

    def _rebuild(self) -> None:
        """Rebuilds failed environments, for any `on_fault`."""
        # Count before the attempt, so that `max_restarts` also limits failed rebuilds.
        mask, self._failed = self._failed, self._no_lanes.copy()
        restarts = self.stats.restarts + int(np.count_nonzero(mask))
        self.stats = self.stats._replace(restarts=restarts)
        try:
            self._env.rebuild(mask)
        except EnvFault as error:  # the new environment also failed
            self._failed[list(error.causes)] = True
            self._report(error.causes)

    def _report(self, causes: Mapping[int, BaseException], step: int = 0) -> None:
        """Logs faults; raises `EnvFault` unless the environments may be rebuilt.

        Args:
            causes: error of each failed environment, by index.
            step: number of the step, from 1, in the episode of the first failed
                environment; 0 for a reset.
        """
        hint = f", at step {step} of its episode" if step else ""
        num_restarts = self.stats.restarts + len(causes)
        is_exhausted = self._restarts and num_restarts > self._max_restarts
        if is_exhausted:
            hint += f"; `max_restarts`={self._max_restarts} are used up"
        if is_exhausted or not self._restarts:
            self.is_torn = False  # the state is consistent
            raise EnvFault(causes, hint) from next(iter(causes.values()))
        for number, reason in causes.items():
            text = f"{type(reason).__name__}: {reason}"
            _LOG.warning("environment %d is rebuilt after %s", number, text)


def _ticket_of(carry: Carry) -> Any:
    state = carry.env_state
    return state[0] if isinstance(state, tuple) and state else None


def _compute_seeds(key: chex.PRNGKey, num_envs: int, table: int) -> np.ndarray:
    """Computes a table of seeds, `[_NUM_SEED_ROWS, B]`, to avoid JAX in each reset."""
    row = table * _NUM_SEED_ROWS + np.arange(_NUM_SEED_ROWS, dtype=np.int32)
    lane = np.arange(num_envs, dtype=np.int32)
    return np.asarray(_seeds_of(key, row[:, None] * num_envs + lane))


@jax.jit
def _seeds_of(key: chex.PRNGKey, episode_id: jax.Array) -> jax.Array:
    """Computes the seeds of the episodes with these ids, `[N, B]`."""
    row_keys = jax.vmap(lambda row: keys.keys_of(key, row))
    return keys.seeds(row_keys(episode_id))


def _check(env: Any, num_ready: Any, on_fault: Any) -> None:
    """Validates the options that only some environments support."""
    checks.check_choice("on_fault", on_fault, ("raise", "restart"))
    if on_fault == "restart" and not env.can_rebuild:
        raise ValueError(
            '`on_fault="restart"` needs environments that can be rebuilt one by one, '
            f"got {type(env).__name__}. Make them by `rollout.envs.make_worker_envs`, "
            "or by `rollout.envs.from_gymnasium` with an id or a function."
        )
    if num_ready is None:
        return
    if not env.is_async:
        raise ValueError(
            "`env` must be an `AsyncHostVectorEnv` for `num_ready`, got "
            f"{type(env).__name__}. Make it by `rollout.envs.make_worker_envs`."
        )
    checks.check_int("num_ready", num_ready, most=env.num_envs)
    if env.batch_size not in (None, num_ready):
        raise ValueError(
            f"`num_ready` must be the `batch_size` of the environment, "
            f"{env.batch_size}, got {num_ready}."
        )

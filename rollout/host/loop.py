"""Steps environments under a policy: acts, steps, and begins the next episodes.

The loop is a NumPy version of `rollout.kernel.step`, which cannot call environments
outside of JAX. It uses the kernel's functions for policy state, accumulators and
recorded fields.

Ctrl-C is delayed and raises only between two rows, so the loop may update its state in
several lines. A second Ctrl-C, or an error in the code of an environment, may raise at
any line: the state is then torn, and `recover` begins new episodes in all lanes.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import numpy as np

from rollout import checks
from rollout.envs.host.arrays import place_rows
from rollout.envs.host.env_checks import SpaceCheck
from rollout.envs.host.types import EnvFault, HostStep
from rollout.envs.types import ArrayTree
from rollout.host.policy_runner import PolicyRunner
from rollout.host.rows import RowBlock
from rollout.host.seeds import Seeds
from rollout.platform import to_host
from rollout.types import AsyncInfo, Carry

NO_LIMIT = 2**31 - 1  # steps, longer than any episode
_ALL = slice(None)
_LOG = logging.getLogger("rollout")


class FaultStats(NamedTuple):
    """Counts faults and lost steps since the collector was created.

    Attributes:
        faulty_episodes: number of discarded episodes.
        lost_steps: number of masked-out steps of discarded episodes, including the
            faulty steps. A call for episodes stores only the last rows, at most 64, and
            counts lost steps in these.
        restarts: number of rebuilt environments.
    """

    faulty_episodes: int
    lost_steps: int
    restarts: int


class Loop:
    """Steps `B` environments under a policy, and holds the state of the lanes.

    Args:
        collector: `HostCollector` that has the environments, the policy and options.

    Attributes:
        is_torn: True while environments step. If an error leaves it True, the state of
            the environments is unknown.
        runner: runs the policy.
        check: function called between two rows; raises if Ctrl-C was pressed.
        stats: counts of faults so far.
        obs: `[B, ...]` current observations, possibly in memory of the environments.
        episode_id: `[B]` int32, ids of the current episodes.
        episode_return, episode_length: `[B]` float32 and int32, return and length of
            the current episodes so far.
        is_first: `[B]` bool, True before the first action of an episode.
        plan: assigned episodes; None while lanes play per-lane episodes.
        block: rows of the running or interrupted call; None if there are none.
    """

    def __init__(self, collector: Any) -> None:
        env = self._env = collector.env
        _check(env, collector.num_ready, collector.on_fault)
        checks.int_between("max_restarts", collector.max_restarts, least=0)
        self._num_ready = collector.num_ready
        self._max_restarts = collector.max_restarts
        self._restarts = collector.on_fault == "restart"
        self.runner = PolicyRunner(collector.policy, env.action_space, env.num_envs)
        self._obs_check = SpaceCheck(env.observation_space)
        self.check: Callable[[], None] = lambda: None
        self.stats = FaultStats(0, 0, 0)
        self._all_lanes = np.ones(env.num_envs, bool)
        self._no_lanes = ~self._all_lanes
        self.is_torn = False
        self._failed = self._no_lanes.copy()  # [B] bool, lanes to rebuild

    def start(self, key: chex.PRNGKey) -> None:
        """Prepares the first episode of every lane; `begin` resets the environments."""
        num_envs = self._env.num_envs
        self.runner.start(key)
        self._seeds = Seeds(key, num_envs)
        self.plan: Any = None  # an `EpisodePlan`
        self.block: RowBlock | None = None
        self.episode_id = np.arange(num_envs, dtype=np.int32)
        self.episode_return = np.zeros(num_envs, np.float32)
        self.episode_length = np.zeros(num_envs, np.int32)
        # Without `num_ready`, this is the array that `step` returned. With `num_ready`,
        # the loop owns the array and replaces the rows of environments that answer.
        self.obs: ArrayTree = None
        self.is_first = self._all_lanes
        self._must_reset = self._no_lanes.copy()  # [B] bool, lanes to reset
        # Used with `num_ready`: `[B]` bool, environments in flight; `[B, ...]`, their
        # observations, actions and extras.
        self._in_flight = self._no_lanes.copy()
        self._sent: ArrayTree = None

    @property
    def is_done(self) -> bool:
        """True if all assigned episodes have ended."""
        return self.plan is not None and self.plan.is_done

    @property
    def next_ids(self) -> np.ndarray:
        """`[B]` int32, ids of the next per-lane episodes, after the plan if any."""
        if self.plan is not None:
            return self.plan.next_ids
        return self.episode_id + np.int32(len(self.episode_id))

    @property
    def next_unplayed(self) -> np.ndarray:
        """`[B]` int32, `next_ids`, or the current ids of lanes without a step."""
        return np.where(self.episode_length > 0, self.next_ids, self.episode_id)

    def play(self, params: Any, block: RowBlock, limit: int, *, cut_last: bool) -> None:
        """Fills a block until it is full or the assigned episodes have ended.

        Episodes are truncated after `limit` steps. With `cut_last`, the last row
        truncates all episodes that do not terminate in it. After an error, the block
        has the complete rows, and `recover` continues.
        """
        self.block = block
        # Each iteration acts, steps, writes a row, and begins the next episodes. If it
        # is interrupted at any line, the block has the complete row or no row.
        step_fn = self._step if self._num_ready is None else self._receive
        while block.num < block.size and not self.is_done:
            self.check()
            result, lanes = step_fn(params, block)
            is_last = cut_last and block.num == block.size - 1
            done = self._write(params, block, result, lanes, limit, is_last)
            self._advance(block, result, lanes, done)
            self.is_torn = False
            if np.count_nonzero(self._must_reset):  # faster than `any`
                self._reset()

    def begin(self, episode_id: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Begins the episodes with these ids, `[B]`, in all lanes or where `mask`."""
        self._mark(self._all_lanes if mask is None else mask, episode_id)
        self._reset()

    def resume(self, carry: Carry, *, is_loaded: bool) -> None:
        """Continues from a carry; restarts its episodes unless `env` has loaded it."""
        self.runner.step, self.runner.state = int(carry.step), carry.policy_state
        self.episode_id = np.array(carry.episode.episode_id)
        self.episode_return = np.array(carry.episode.episode_return)
        self.episode_length = np.array(carry.episode.episode_length)
        self.obs, self.is_first = jax.tree.map(np.array, carry.obs), self._no_lanes
        if is_loaded:
            self._failed, self.is_torn = self._no_lanes.copy(), False
        else:
            self.begin(self.episode_id)

    def recover(self, *, restart_all: bool) -> None:
        """Continues after an error.

        Failed environments are rebuilt, and lanes whose episode cannot continue begin a
        new one. All lanes begin a new episode if `restart_all`, if the state is torn,
        or if episodes were assigned.
        """
        if self.is_torn or self.plan is not None or restart_all:
            next_ids, self.plan = self.next_ids, None
            self._mark(self._all_lanes, next_ids)
        self._reset()

    def _step(self, params: Any, block: RowBlock) -> tuple[HostStep, slice]:
        """Takes one step in all lanes."""
        # Pass the copy in the block: jax may alias it, while the environments overwrite
        # the original before the program has ended.
        obs = block.write("obs", self.obs)
        action, extras = self.runner.act(params, obs, self.is_first, self.episode_id)
        self.is_first, self.is_torn = self._no_lanes, True
        result = self._env.step(action)
        block.write("action", action)
        # Assign a slice, which replaces the extras of an interrupted row.
        block.extras[block.num :] = [extras]
        return result, _ALL

    def _receive(self, params: Any, block: RowBlock) -> tuple[HostStep, np.ndarray]:
        """Sends actions to all waiting lanes and receives the first answers."""
        is_waiting = ~self._in_flight
        # Idle lanes get no action, unless a fixed batch size needs their answers.
        if self.plan is not None and self._env.batch_size is None:
            is_waiting &= self.plan.mask
        # Send all actions before receiving, so that no environment stands still.
        # Usually these are the lanes of the last row; at the start, all lanes.
        env_id = np.flatnonzero(is_waiting).astype(np.int32)
        num_ready = self._num_ready
        for first in range(0, len(env_id), num_ready):
            self._send(params, env_id[first : first + num_ready])
        # At the end of a plan, fewer environments are in flight.
        num_ready = min(num_ready, int(np.count_nonzero(self._in_flight)))
        self.is_torn = True
        result, lanes = self._env.receive(num_ready)
        self._in_flight[lanes] = False
        obs, action, extras = jax.tree.map(lambda x: x[lanes], self._sent)
        block.write("obs", obs)
        block.write("action", action)
        block.extras[block.num :] = [extras]
        block.lane[block.num, : len(lanes)] = lanes
        env_id: Any = lanes
        info = AsyncInfo(env_id=env_id, info=result.info, num_envs=self._env.num_envs)
        return result._replace(info=info), lanes

    def _send(self, params: Any, env_id: np.ndarray) -> None:
        """Sends actions to up to `num_ready` environments, with one policy call."""
        num_envs, count = self._env.num_envs, len(env_id)
        # Pad, so that one compiled program serves any number of lanes. The policy drops
        # the state of lane B, which does not exist; padded observations are arbitrary.
        padded = np.full(self._num_ready, num_envs, np.int32)
        padded[:count] = env_id
        index = np.minimum(padded, num_envs - 1)
        obs = jax.tree.map(lambda x: x[index], self.obs)
        decision = self.runner.act(params, obs, self.is_first, self.episode_id, padded)
        rows = jax.tree.map(lambda x: x[:count], (obs, *to_host(decision)))
        if self._sent is None:
            self._sent = jax.tree.map(
                lambda x: np.zeros((num_envs, *x.shape[1:]), x.dtype), rows
            )
        place_rows(self._sent, env_id, rows)
        # Copy: jax may still read the array that was passed to `act`.
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
        # answers.
        row, columns, plan = block.num, slice(len(result.reward)), self.plan
        terminated, truncated = result.terminated, result.truncated
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
        length = self.episode_length[lanes]
        if limit < NO_LIMIT:
            cut = mask & (length >= limit) & ~truncated
            # An assigned episode that terminates at the limit is not cut.
            cut = cut if plan is None else cut & ~terminated
            block.cut[row, columns], truncated = cut, truncated | cut
        if is_last:
            truncated = truncated | (mask & ~terminated)
        # Copy: the environments and the next row overwrite these arrays.
        block.reward[row, columns] = result.reward
        block.terminated[row, columns] = terminated
        block.truncated[row, columns] = truncated
        block.mask[row, columns] = mask
        block.episode_id[row, columns] = self.episode_id[lanes]
        block.episode_return[row, columns] = self.episode_return[lanes]
        block.episode_length[row, columns] = length
        block.write("next_obs", result.obs)
        block.write("info", result.info)
        if self.runner.has_critic:
            bootstraps = truncated & ~terminated & mask
            if row == 0 or np.count_nonzero(bootstraps):  # other rows stay zero
                env_id = None if lanes is _ALL else np.resize(lanes, self._num_ready)
                value = self.runner.values(params, result.obs, bootstraps, env_id)
                block.write("final_value", value)
        # The row is complete: `recover` returns it even if the next line fails.
        block.num = row + 1
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
        # Non-finite values and values outside of the space are faults. Check after the
        # row is written: a fault masks out all rows of its episode.
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
            self.plan.num_steps += int(np.count_nonzero(block.mask[block.num - 1]))
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
                self.plan.lost_ids += lost_ids.tolist()
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
                self._mark(ended, self.next_ids)
            else:
                self.plan.advance(ended)
                self._mark(ended, self.plan.episode_id)
        if causes:
            self._report(causes, step)

    def _mark(self, mask: np.ndarray, episode_id: np.ndarray) -> None:
        """Assigns episode ids to lanes, and marks the lanes for `_reset`."""
        # Create new ids and flags: a carry or jax may hold the old arrays. Lengths and
        # returns are copied before they are passed on.
        self.episode_id = np.where(mask, episode_id, self.episode_id)
        self.episode_length[mask] = 0
        self.episode_return[mask] = 0
        self.is_first = self.is_first | mask
        self._must_reset = self._must_reset | mask

    def _reset(self) -> None:
        """Rebuilds failed environments and resets the lanes that begin an episode."""
        env: Any = self._env
        if self.is_torn:  # any environment may be inconsistent
            self._failed = self._all_lanes.copy()
        self.is_torn = True
        # Repeat, because a fault in a reset discards the next episode.
        while np.count_nonzero(self._must_reset):
            if env.can_rebuild and np.count_nonzero(self._failed):
                self._rebuild()
                continue
            lane = np.flatnonzero(self._must_reset)
            seeds = self._seeds.lookup(lane, self.episode_id[lane])
            # Queued ids count down from -1, and their numbers count up from 0.
            ids = self.episode_id
            env.at_episodes(np.where(ids < 0, -1 - ids, ids))
            try:
                obs = env.reset(seeds, self._must_reset)
                causes = self._obs_check.find(obs)
                causes = {n: causes[n] for n in lane.tolist() if n in causes}
            except EnvFault as error:
                obs, causes = None, error.causes
            if causes:
                # The seed may be the cause, so the lane begins the episode after it.
                # All other lanes are reset again, with the same seeds.
                self._end(self._no_lanes.copy(), causes)
                continue
            if self._num_ready is None:
                self.obs = obs
            else:
                if self.obs is None:
                    self.obs = jax.tree.map(np.array, obs)
                place_rows(self.obs, lane, [x[lane] for x in jax.tree.leaves(obs)])
                self._in_flight &= ~self._must_reset  # a reset cancels steps
            self._must_reset = self._no_lanes
        self.is_torn = False

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


def _check(env: Any, num_ready: Any, on_fault: Any) -> None:
    """Validates the options that only some environments support."""
    checks.choice("on_fault", on_fault, ("raise", "restart"))
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
    checks.int_between("num_ready", num_ready, most=env.num_envs)
    if env.batch_size not in (None, num_ready):
        raise ValueError(
            f"`num_ready` must be the `batch_size` of the environment, "
            f"{env.batch_size}, got {num_ready}."
        )

"""Steps environments under a policy: act, step, and begin the episodes that follow.

It does in NumPy what `rollout.kernel.step` does in one program, which cannot call
environments that are not JAX. The policy's state, accumulators and recorded fields are
the kernel's.

Ctrl-C is held back and leaves at one place, between two rows, so the state may change
piece by piece. Only a second Ctrl-C, or an error in the environments' own code, comes
at any line: the state is then torn, and `recover` begins new episodes everywhere.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import numpy as np

from rollout import checks
from rollout.envs.host.arrays import place_rows
from rollout.envs.host.space_check import SpaceCheck
from rollout.envs.host.types import EnvFault, HostStep
from rollout.envs.types import ArrayTree
from rollout.host.policy_runner import PolicyRunner
from rollout.host.rows import RowBlock
from rollout.host.seeds import Seeds
from rollout.platform import to_host
from rollout.types import AsyncInfo, Carry

NO_LIMIT = 2**31 - 1  # no episode has so many steps
_ALL = slice(None)
_LOG = logging.getLogger("rollout")


class FaultStats(NamedTuple):
    """Counts of faults and their costs, since the collector was made.

    Attributes:
        faulty_episodes: episodes that were given up.
        lost_steps: steps of these that were masked out, the faulty ones included. A
            call for episodes has only its last rows, at most 64, and counts those.
        restarts: number of times an environment was rebuilt.
    """

    faulty_episodes: int
    lost_steps: int
    restarts: int


class Loop:
    """Steps `B` environments under a policy, and holds their state.

    Args:
        collector: the `HostCollector`, whose environments, policy and options it reads.

    Attributes:
        is_torn: True while environments work: where an error leaves it True, nobody
            knows what state they are in.
        runner: calls the policy.
        check: called between two rows; raises if Ctrl-C was pressed.
        stats: counts of faults so far.
        obs: `[B, ...]`, perhaps the environments' own memory.
        episode_id: `[B]` int32, the episodes that the lanes are in.
        episode_return, episode_length: `[B]` float32 and int32, theirs so far.
        unseen: `[B]` bool, True where the policy has not seen the episode yet.
        plan: the episodes that were assigned, None while lanes play their own.
        block: the rows of the current call, or of one that was cut short; None if
            there are none.
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
        self._everywhere = np.ones(env.num_envs, bool)
        self._nowhere = ~self._everywhere
        self.is_torn = False
        self._failed = self._nowhere.copy()  # [B] bool, to be rebuilt

    def start(self, key: chex.PRNGKey) -> None:
        """Prepares the first episode of every lane, which `begin` begins."""
        num_envs = self._env.num_envs
        self.runner.start(key)
        self._seeds = Seeds(key, num_envs)
        self.plan: Any = None  # an `EpisodePlan`
        self.block: RowBlock | None = None
        self.episode_id = np.arange(num_envs, dtype=np.int32)
        self.episode_return = np.zeros(num_envs, np.float32)
        self.episode_length = np.zeros(num_envs, np.int32)
        # That of the environments without `num_ready`, since `step` returns all rows;
        # else the loop's own, in which it replaces the rows of those that answer.
        self.obs: ArrayTree = None
        self.unseen = self._everywhere
        self._begins = self._nowhere.copy()  # [B] bool, to be reset
        # With `num_ready`: which environments step, `[B]` bool, and of these the
        # observations, actions and extras, `[B, ...]`, until they answer.
        self._in_flight = self._nowhere.copy()
        self._sent: ArrayTree = None

    @property
    def is_done(self) -> bool:
        """True if all assigned episodes have ended."""
        return self.plan is not None and self.plan.is_done

    @property
    def next_own(self) -> np.ndarray:
        """`[B]` int32, the ids of the lanes' own next episodes, after a plan's."""
        if self.plan is not None:
            return self.plan.next_own
        return self.episode_id + np.int32(len(self.episode_id))

    @property
    def next_unplayed(self) -> np.ndarray:
        """`[B]` int32, those ids, but that of the lane's own where it has no step."""
        return np.where(self.episode_length > 0, self.next_own, self.episode_id)

    def play(self, params: Any, block: RowBlock, limit: int, *, cut_last: bool) -> None:
        """Fills a block, or as much of it as the assigned episodes take.

        Episodes are cut after `limit` steps; with `cut_last` the last row truncates
        those that it does not end. After an error the block has the complete rows;
        `recover` goes on.
        """
        self.block = block
        # Each round acts, steps, writes the row, and begins the episodes that follow: a
        # row is whole, or not there, wherever a round is cut short.
        take = self._step if self._num_ready is None else self._receive
        while block.num < block.size and not self.is_done:
            self.check()
            result, lanes = take(params, block)
            is_last = cut_last and block.num == block.size - 1
            done = self._write(params, block, result, lanes, limit, is_last)
            self._advance(block, result, lanes, done)
            self.is_torn = False
            if np.count_nonzero(self._begins):  # faster than `any`
                self._reset()

    def begin(self, episode_id: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Begins the episodes with these ids, `[B]`, where `mask`, or in all lanes."""
        self._mark(self._everywhere if mask is None else mask, episode_id)
        self._reset()

    def resume(self, carry: Carry, *, is_loaded: bool) -> None:
        """Goes on from a carry, or restarts its episodes if `env` could not load it."""
        self.runner.step, self.runner.state = int(carry.step), carry.policy_state
        self.episode_id = np.array(carry.episode.episode_id)
        self.episode_return = np.array(carry.episode.episode_return)
        self.episode_length = np.array(carry.episode.episode_length)
        self.obs, self.unseen = jax.tree.map(np.array, carry.obs), self._nowhere
        if is_loaded:
            self._failed, self.is_torn = self._nowhere.copy(), False
        else:
            self.begin(self.episode_id)

    def recover(self, *, restart_all: bool) -> None:
        """Goes on after an error.

        Environments that failed are rebuilt, and lanes whose episode cannot go on begin
        new ones. With `restart_all`, or where episodes were assigned, all lanes do.
        """
        if self.is_torn or self.plan is not None or restart_all:
            next_own, self.plan = self.next_own, None
            self._mark(self._everywhere, next_own)
        self._reset()

    def _step(self, params: Any, block: RowBlock) -> tuple[HostStep, slice]:
        """Takes a step in all lanes."""
        # From the block jax may read it without a copy: the environments' own memory
        # changes while the program may still run.
        obs = block.write("obs", self.obs)
        action, extras = self.runner.act(params, obs, self.unseen, self.episode_id)
        self.unseen, self.is_torn = self._nowhere, True
        result = self._env.step(action)
        block.write("action", action)
        # By slice: a row that was cut short may have left its extras behind.
        block.extras[block.num :] = [extras]
        return result, _ALL

    def _receive(self, params: Any, block: RowBlock) -> tuple[HostStep, np.ndarray]:
        """Sends actions to all lanes that wait; receives the first that answer."""
        waits = ~self._in_flight
        # Idle lanes keep waiting; but a fixed batch may need their answers to be full.
        if self.plan is not None and self._env.batch_size is None:
            waits &= self.plan.mask
        # All before waiting for a row, so that none stands still: usually the lanes of
        # the last row; at the start all, in several sends.
        env_id = np.flatnonzero(waits).astype(np.int32)
        num_ready = self._num_ready
        for first in range(0, len(env_id), num_ready):
            self._send(params, env_id[first : first + num_ready])
        # Fewer are in flight where a plan ends.
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
        """Sends actions to up to `num_ready` environments; calls the policy once."""
        num_envs, count = self._env.num_envs, len(env_id)
        # Padded, so that one compiled program serves any number. The policy drops the
        # state of the number beyond the last lane; as input any lane will do.
        padded = np.full(self._num_ready, num_envs, np.int32)
        padded[:count] = env_id
        at = np.minimum(padded, num_envs - 1)
        obs = jax.tree.map(lambda x: x[at], self.obs)
        decision = self.runner.act(params, obs, self.unseen, self.episode_id, padded)
        chosen = jax.tree.map(lambda x: x[:count], (obs, *to_host(decision)))
        if self._sent is None:
            self._sent = jax.tree.map(
                lambda x: np.zeros((num_envs, *x.shape[1:]), x.dtype), chosen
            )
        place_rows(self._sent, env_id, chosen)
        # A copy, since jax may still read the one that `act` was given.
        self.unseen = self.unseen.copy()
        self.unseen[env_id] = False
        self.is_torn = True
        self._env.send(chosen[1], env_id)
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
        """Completes a row, and returns which lanes' episodes end with it."""
        # `lanes` are lanes `[K]` of the `B`; the row has their answers in its first K
        # columns.
        row, columns, plan = block.num, slice(len(result.reward)), self.plan
        terminated, truncated = result.terminated, result.truncated
        reward, stepped = result.total_reward, result.mask
        if stepped is None:  # the usual case, kept fast
            stepped = self._everywhere[lanes]
        else:
            reward, self.unseen = np.where(stepped, reward, 0), self.unseen.copy()
            self.unseen[lanes] |= ~stepped  # these only got their first observation
        self.episode_length[lanes] += stepped
        self.episode_return[lanes] += reward
        # The mask of the row: neither lanes that only reset themselves nor idle ones.
        mask = stepped if plan is None else stepped & plan.mask[lanes]
        length = self.episode_length[lanes]
        if limit < NO_LIMIT:
            cut = mask & (length >= limit) & ~truncated
            # An assigned episode that terminates at the limit is not cut, too.
            cut = cut if plan is None else cut & ~terminated
            block.cut[row, columns], truncated = cut, truncated | cut
        if is_last:
            truncated = truncated | (mask & ~terminated)
        # Copied, since the environments and the next row write to these arrays.
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
            goes_on = truncated & ~terminated & mask
            if row == 0 or np.count_nonzero(goes_on):  # the other rows are zero
                env_id = None if lanes is _ALL else np.resize(lanes, self._num_ready)
                value = self.runner.values(params, result.obs, goes_on, env_id)
                block.write("final_value", value)
        # From here on the row counts: `recover` returns it, whatever happens next.
        block.num = row + 1
        return terminated | truncated

    def _advance(
        self, block: RowBlock, result: HostStep, lanes: Any, done: np.ndarray
    ) -> None:
        """Moves on to the row after the one that `_write` has completed."""
        if lanes is _ALL:
            self.obs, ended = result.obs, done
        else:
            place_rows(self.obs, lanes, result.obs)
            ended = self._nowhere.copy()
            ended[lanes] = done
        # Values that are not finite, or not in their space, are faults like any other.
        # Only after the row is written, which a fault masks out with its whole episode.
        bad, reward = self._obs_check.find(result.obs), result.total_reward
        if not np.isfinite(reward).all():
            wrong = ~np.isfinite(reward)
            wrong = wrong if result.mask is None else wrong & result.mask
            for column in np.flatnonzero(wrong).tolist():
                what = f"`reward` must be finite, got {reward[column]}"
                bad.setdefault(column, ValueError(what))
        causes = result.causes
        if bad:  # by column of the row, while causes go by lane
            number = np.arange(len(ended))[lanes].tolist()
            causes = {number[at]: cause for at, cause in bad.items()} | dict(causes)
        if self.plan is not None:
            self.plan.num_steps += int(np.count_nonzero(block.mask[block.num - 1]))
        self._end(ended, causes)

    def _end(self, ended: np.ndarray, causes: Mapping[int, BaseException]) -> None:
        """Marks the lanes whose episodes have ended, or are lost to a fault.

        Args:
            ended: `[B]` bool, lanes whose episode has ended by itself.
            causes: by the number of the environment; their episodes are lost, and
                their rows in the block masked out.
        """
        step = 0
        if causes:
            step = int(self.episode_length[next(iter(causes))])
            failed = list(causes)
            lost, num_episodes = self.episode_id[failed], len(failed)
            if self.plan is not None:
                num_episodes = int(np.count_nonzero(self.plan.mask[failed]))
                self.plan.lost += lost.tolist()
            num_steps = 0 if self.block is None else self.block.mask_out(lost)
            episodes, steps, restarts = self.stats
            self.stats = FaultStats(
                episodes + num_episodes, steps + num_steps, restarts
            )
            # A lost episode ends like any other, but its lane is rebuilt first. With
            # `on_fault="raise"`, too: `recover` rebuilds it.
            self._failed[failed] = ended[failed] = True
        if np.count_nonzero(ended):
            if self.plan is None:
                self._mark(ended, self.next_own)
            else:
                self.plan.advance(ended)
                self._mark(ended, self.plan.episode_id)
        if causes:
            self._report(causes, step)

    def _mark(self, mask: np.ndarray, episode_id: np.ndarray) -> None:
        """Marks lanes, which `_reset` resets, for the episodes with these ids."""
        # Ids and flags are new arrays, which a carry or jax may hold; length and return
        # are copied where they leave.
        self.episode_id = np.where(mask, episode_id, self.episode_id)
        self.episode_length[mask] = 0
        self.episode_return[mask] = 0
        self.unseen = self.unseen | mask
        self._begins = self._begins | mask

    def _reset(self) -> None:
        """Rebuilds failed environments, and resets the lanes that begin an episode."""
        env: Any = self._env
        if self.is_torn:  # nobody knows which environments are whole
            self._failed = self._everywhere.copy()
        self.is_torn = True
        # Until all lanes have begun: a fault at a reset is a fault of the next episode.
        while np.count_nonzero(self._begins):
            if env.can_rebuild and np.count_nonzero(self._failed):
                self._rebuild()
                continue
            lane = np.flatnonzero(self._begins)
            seeds = self._seeds.of(lane, self.episode_id[lane])
            try:
                obs = env.reset(seeds, self._begins)
                causes = self._obs_check.find(obs)
                causes = {n: causes[n] for n in lane.tolist() if n in causes}
            except EnvFault as error:
                obs, causes = None, error.causes
            if causes:
                # Its seed may be the cause, so the next episode takes its place. The
                # other lanes are reset once more, with the same seeds.
                self._end(self._nowhere.copy(), causes)
                continue
            if self._num_ready is None:
                self.obs = obs
            else:
                if self.obs is None:
                    self.obs = jax.tree.map(np.array, obs)
                place_rows(self.obs, lane, [x[lane] for x in jax.tree.leaves(obs)])
                self._in_flight &= ~self._begins  # a reset drops the step in flight
            self._begins = self._nowhere
        self.is_torn = False

    def _rebuild(self) -> None:
        """Rebuilds environments that failed, whatever `on_fault` says."""
        # Counted before the attempt, so that one that fails at once is given up, too.
        mask, self._failed = self._failed, self._nowhere.copy()
        restarts = self.stats.restarts + int(np.count_nonzero(mask))
        self.stats = self.stats._replace(restarts=restarts)
        try:
            self._env.rebuild(mask)
        except EnvFault as error:  # a new environment failed at once
            self._failed[list(error.causes)] = True
            self._report(error.causes)

    def _report(self, causes: Mapping[int, BaseException], step: int = 0) -> None:
        """Logs faults; raises them unless environments are rebuilt.

        Args:
            causes: by the number of the environment.
            step: of the first one's episode, from 1; 0 at its start.
        """
        hint = f", at step {step} of its episode" if step else ""
        num_restarts = self.stats.restarts + len(causes)
        is_over = self._restarts and num_restarts > self._max_restarts
        if is_over:
            hint += f"; `max_restarts`={self._max_restarts} are used up"
        if is_over or not self._restarts:
            self.is_torn = False  # all that a fault changes has changed
            raise EnvFault(causes, hint) from next(iter(causes.values()))
        for number, reason in causes.items():
            text = f"{type(reason).__name__}: {reason}"
            _LOG.warning("environment %d is rebuilt after %s", number, text)


def _check(env: Any, num_ready: Any, on_fault: Any) -> None:
    """Checks the options that need more of the environments than the contract."""
    checks.choice("on_fault", on_fault, ("raise", "restart"))
    if on_fault == "restart" and not env.can_rebuild:
        raise ValueError(
            '`on_fault="restart"` needs environments that can be rebuilt one by one, '
            "as those of `rollout.envs.make_worker_envs`, and of "
            "`rollout.envs.from_gymnasium` with an id or a function, got "
            f"{type(env).__name__}."
        )
    if num_ready is None:
        return
    if not env.is_async:
        raise ValueError(
            "`env` must be an `AsyncHostVectorEnv` for `num_ready`, as "
            f"`rollout.envs.make_worker_envs` makes it, got {type(env).__name__}."
        )
    checks.int_between("num_ready", num_ready, most=env.num_envs)
    if env.batch_size not in (None, num_ready):
        raise ValueError(
            f"`num_ready` must be the `batch_size` of the environment, "
            f"{env.batch_size}, got {num_ready}."
        )

"""Steps environments under a policy: act, step, and begin the episodes that follow.

An exception, Ctrl-C among them, may come on any line. So the state after a row is
computed first and then takes effect in one assignment; until then the answer of the
environments is kept, and can be taken again.
"""

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import chex
import numpy as np

from rollout.envs.host.observation_check import ObservationCheck
from rollout.envs.host.types import EnvFault, HostStep, HostVectorEnv
from rollout.envs.types import ArrayTree
from rollout.host.episode_plan import EpisodePlan
from rollout.host.restarts import Restarts
from rollout.host.rows import RowBlock
from rollout.host.seeds import Seeds

At = slice | np.ndarray  # the lanes of a row's columns: all, or `[num_ready]` int

NO_LIMIT = 2**31 - 1  # no episode has so many steps
TORN = "torn"  # a step that may have been interrupted
_ALL = slice(None)


class Fault(NamedTuple):
    """Environments that failed, until the failure is reported."""

    causes: Mapping[int, BaseException]  # by the number of the environment
    lost: tuple[int, ...]  # ids of the episodes that are lost with them
    num_episodes: int  # how many of these count


class Answer(NamedTuple):
    """Actions of a row that is not written yet, and the answer of the environments.

    The first axis has all `B` lanes, or those in `at`.
    """

    action: ArrayTree
    extras: ArrayTree
    progress: Any  # of the policy
    result: HostStep
    at: At = _ALL


class State(NamedTuple):
    """State of the loop between two rows, `[B]` each; replaced as a whole."""

    progress: Any  # the `Progress` of the policy
    episode_id: np.ndarray  # int32
    own_id: np.ndarray  # int32, the lane's last own episode
    length: np.ndarray  # int32, steps of the episode so far
    over: np.ndarray  # bool, the policy has not seen the lane's episode yet
    must_begin: np.ndarray  # bool, the lane must be reset
    unread: np.ndarray  # bool, the lane's first observation was not read yet
    failed: np.ndarray  # bool, the environment must be rebuilt
    fault: Fault | None = None
    lost: tuple[int, ...] = ()  # ids of the episodes that were lost in this call
    plan: EpisodePlan | None = None  # None: every lane plays its own episodes

    @property
    def next_own(self) -> np.ndarray:
        """`[B]` int32, the ids of the lanes' own next episodes."""
        return self.own_id + np.int32(len(self.own_id))

    def begin(self, mask: np.ndarray, episode_id: np.ndarray) -> Self:
        """Begins the episodes with these ids, `[B]`, in the lanes where `mask`."""
        # Only marks the lanes: `Loop.settle` resets them, and may do so repeatedly.
        # Ids of the queue are negative, and leave the count of own episodes as it is.
        episode_id = np.where(mask, episode_id, self.episode_id)
        return self._replace(
            episode_id=episode_id,
            own_id=np.where(mask & (episode_id >= 0), episode_id, self.own_id),
            length=np.where(mask, np.int32(0), self.length),
            over=self.over | mask,
            must_begin=self.must_begin | mask,
            unread=self.unread | mask,
        )

    def end(self, mask: np.ndarray, num_steps: int) -> Self:
        """Ends the episodes where `mask`; the lanes begin those that follow.

        Args:
            mask: `[B]` bool.
            num_steps: steps since the last call, of lanes that are not idle.
        """
        if self.plan is None:
            return self.begin(mask, self.next_own) if np.count_nonzero(mask) else self
        plan = self.plan.advance(mask, num_steps)
        state = self._replace(plan=plan)
        return state.begin(mask, plan.episode_id) if mask.any() else state

    def lose(self, causes: Mapping[int, BaseException], counts: np.ndarray) -> Self:
        """Records that environments failed. Call it before `end`, which changes ids.

        Args:
            causes: by the number of the environment.
            counts: `[B]` bool, lanes whose episode counts.
        """
        lanes = list(causes)
        lost, failed = tuple(self.episode_id[lanes].tolist()), self.failed.copy()
        failed[lanes] = True
        fault = Fault(dict(causes), lost, int(counts[lanes].sum()))
        return self._replace(fault=fault, failed=failed, lost=self.lost + lost)


class Loop:
    """Steps environments under a policy, and holds their state.

    Args:
        env: `B` environments.
        act_fn: `PolicyRunner.act`, which chooses the actions.
        progress: of the policy, before its first step.
        key: one typed root key.
        restarts: counts environments that fail, and rebuilds them.
        failed: `[B]` bool, those that must be rebuilt at once.
    """

    def __init__(
        self,
        env: HostVectorEnv,
        act_fn: Callable[..., tuple[ArrayTree, ArrayTree, Any]],
        progress: Any,
        key: chex.PRNGKey,
        restarts: Restarts,
        failed: np.ndarray,
    ) -> None:
        self._env, self._act_fn, self._restarts = env, act_fn, restarts
        self._seeds = Seeds(key, env.num_envs)
        self._obs_check = ObservationCheck(env.observation_space)
        self._everywhere = np.ones(env.num_envs, bool)
        self._nowhere = ~self._everywhere
        for mask in (self._everywhere, self._nowhere):
            mask.setflags(write=False)  # environments get them
        self._limit = NO_LIMIT
        self.obs: ArrayTree = None  # [B, ...], in the environments' own memory
        # None between two rows; TORN while the environments step, since it is unknown
        # how far an interrupted step got; then their answer, until its row is written.
        self._pending: Any = None
        lane = np.arange(env.num_envs, dtype=np.int32)
        self.state = State(
            progress=progress,
            episode_id=lane,
            own_id=lane,
            length=np.zeros_like(lane),
            over=self._everywhere,
            must_begin=self._everywhere,
            unread=self._everywhere,
            failed=failed,
        )

    @property
    def is_over(self) -> bool:
        """True if all assigned episodes are over."""
        plan = self.state.plan
        return plan is not None and plan.is_over

    def play(
        self,
        params: Any,
        block: RowBlock,
        *,
        limit: int = NO_LIMIT,
    ) -> None:
        """Fills a block, or as much of it as the assigned episodes take.

        After an error the block has the complete rows; `recover` goes on.

        Args:
            params: whatever the policy takes as its parameters.
            block: where the rows go.
            limit: steps after which an episode is cut.
        """
        self._limit = limit
        with _InterruptBetweenSteps() as interrupt:
            while block.num < block.size and not self.is_over:
                interrupt.check()
                self._exchange(params, block)
                self._take(block)
                self.settle(block)

    def begin(self, mask: np.ndarray, episode_id: np.ndarray) -> None:
        """Begins the episodes with these ids, `[B]`, where `mask`."""
        # The state first: if a reset is interrupted, `recover` finishes it.
        self.state = self.state.begin(mask, episode_id)
        self.settle()

    def assign(self, plan: EpisodePlan) -> None:
        """Begins the first episodes of a plan, in all lanes."""
        state = self.state.begin(self._everywhere, plan.episode_id)
        self.state = state._replace(plan=plan, lost=())
        self.settle()

    def dismiss(self, after: np.ndarray) -> None:
        """Ends the plan: lanes begin their own episodes, with the ids `after`."""
        state = self.state.begin(self._everywhere, after)
        self.state = state._replace(plan=None, lost=())
        self.settle()

    def recover(self, block: RowBlock | None, *, restart_all: bool = False) -> None:
        """Goes on after an error.

        Environments that failed are rebuilt, and lanes whose episode cannot go on begin
        new ones. With `restart_all`, or where episodes were assigned, all lanes do.
        """
        # A whole answer still counts as a row; `_take` then clears `_pending`.
        if self._pending is not None and self._pending is not TORN and block:
            self._take(block)
        state = self.state
        # After a torn step it is unknown which observations the environments are at.
        if self._pending is not None or state.plan is not None or restart_all:
            state = state.begin(self._everywhere, state.next_own)
        self.state, self._pending = state._replace(plan=None, lost=()), None
        self.settle(block, forgiven=set())

    def settle(
        self, block: RowBlock | None = None, forgiven: set[int] | None = None
    ) -> None:
        """Rebuilds failed environments, and resets the lanes that must begin.

        Args:
            block: the rows in which lost episodes are masked out.
            forgiven: None reports each fault, which raises unless `on_fault` is
                "restart". A set forgives the first fault of each environment, and
                collects those that had one.
        """
        # In this order: a fault may raise, and a failed environment cannot be reset.
        # Each call clears its part of the state, or adds a fault for the next round.
        while True:
            fault = self.state.fault
            if fault is not None:
                self._report(fault, block, forgiven)
            elif np.count_nonzero(self.state.failed):  # faster than `any`
                self._rebuild()
            elif np.count_nonzero(self.state.must_begin):
                self._reset()
            else:
                return

    def _exchange(self, params: Any, block: RowBlock) -> None:
        """Sends the actions, and waits for the answers of a row."""
        state = self.state
        block.write("obs", self.obs)
        # The row of the block is not overwritten, so jax may read it without a copy.
        obs = block.written("obs")
        action, extras, progress = self._act_fn(
            params, obs, state.over, state.episode_id, state.progress
        )
        self._pending = TORN
        # One line, so that no interrupt comes between the step and the assignment.
        self._pending = Answer(action, extras, progress, self._env.step(action))

    def _answer(self, block: RowBlock) -> Answer:
        """Returns the answer to a row, whose observations are written."""
        del block  # unused: `_exchange` has written them
        return self._pending

    def _take(self, block: RowBlock) -> None:
        """Writes the answered row, which takes effect with the last line.

        Until then it may be interrupted, and called again with the same answer.
        """
        answer = self._answer(block)
        result, at = answer.result, answer.at
        block.write("action", answer.action)
        block.write("extras", answer.extras)
        block.write("info", result.info)
        block.write("next_obs", result.obs)
        state, stepped = self._count(answer), result.mask
        # The mask of the row: neither lanes that only reset themselves nor idle ones.
        data = self._everywhere[at] if stepped is None else stepped
        if state.plan is not None:
            data = data & state.plan.mask[at]
        row, columns = block.num, slice(len(result.reward))
        terminated, truncated = result.terminated, result.truncated
        over = self._scatter(terminated | truncated, at)
        if self._limit < NO_LIMIT:
            cut = data & (state.length[at] >= self._limit) & ~truncated
            over = over | self._scatter(cut, at)
            block.cut[row, columns] = cut
            # A stream sets both flags where an episode terminates at the limit; an
            # assigned episode is then only terminated.
            truncated = truncated | (cut if state.plan is None else cut & ~terminated)
        block.reward[row, columns] = result.reward
        block.terminated[row, columns] = terminated
        block.truncated[row, columns] = truncated
        block.mask[row, columns] = data
        block.episode_id[row, columns] = state.episode_id[at]
        # Faults before `end`, which replaces the ids of the episodes that are lost.
        causes = self._find_faults(result, at)
        if causes:
            state = state.lose(causes, self._scatter(data, at))
            over = over | _flags(causes, len(over))
        num_steps = 0 if state.plan is None else int(data.sum())
        state, self.obs = state.end(over, num_steps), self._read(result.obs, at)
        # One line, so that an interrupt keeps either all of the row or nothing.
        block.num, self.state, self._pending = row + 1, state, None

    def _count(self, answer: Answer) -> State:
        """Returns the state with the steps of a row counted."""
        at, stepped = answer.at, answer.result.mask
        state, progress = self.state, answer.progress
        if stepped is None and at is _ALL:  # the usual case, kept fast
            length = state.length + np.int32(1)
            return state._replace(progress=progress, over=self._nowhere, length=length)
        over = self._nowhere if at is _ALL else state.over
        state = state._replace(progress=progress, over=over)
        length = state.length.copy()
        length[at] += 1 if stepped is None else stepped
        if stepped is None:
            return state._replace(length=length)
        over = state.over.copy()
        over[at] |= ~stepped  # those lanes only got their first observation
        return state._replace(length=length, over=over)

    def _read(self, obs: ArrayTree, at: At) -> ArrayTree:
        """Returns the observations `[B, ...]` after a step that returned `obs`."""
        del at  # unused: all lanes
        return obs

    def _read_first(self, obs: ArrayTree, mask: np.ndarray) -> ArrayTree:
        """Returns the observations `[B, ...]` after a reset where `mask`."""
        del mask  # unused: `obs` has those of the other lanes, too
        return obs

    def _scatter(self, flags: np.ndarray, at: At) -> np.ndarray:
        """Scatters flags of the lanes that answered to all lanes, `[B]` bool."""
        if at is _ALL:
            return flags
        scattered = np.zeros(self._env.num_envs, bool)
        scattered[at] = flags
        return scattered

    def _find_faults(self, result: HostStep, at: At) -> Mapping[int, BaseException]:
        bad = self._obs_check.find(result.obs)
        if not bad:
            return result.causes
        lanes = np.arange(self._env.num_envs)[at].tolist()
        return {lanes[row]: cause for row, cause in bad.items()} | dict(result.causes)

    def _report(
        self, fault: Fault, block: RowBlock | None, forgiven: set[int] | None
    ) -> None:
        """Masks out the rows of lost episodes, and reports the fault."""
        num_steps = 0
        if block is not None:
            num_steps = sum(block.mask_out(episode_id) for episode_id in fault.lost)
        self.state = self.state._replace(fault=None)
        counts = {"episodes": fault.num_episodes, "steps": num_steps}
        if forgiven is None or not forgiven.isdisjoint(fault.causes):
            self._restarts.report(fault.causes, **counts)
        else:
            forgiven.update(fault.causes)
            self._restarts.count(**counts)

    def _rebuild(self) -> None:
        try:
            self._restarts.rebuild(np.flatnonzero(self.state.failed).tolist())
        except EnvFault as error:  # a new environment failed at once
            failed = _flags(error.causes, len(self._nowhere))
            fault = Fault(error.causes, (), 0)
            self.state = self.state._replace(failed=failed, fault=fault)
            return
        self.state = self.state._replace(failed=self._nowhere)

    def _reset(self) -> None:
        """Resets the lanes that must begin, to the next episode where that fails."""
        state, lane = self.state, np.flatnonzero(self.state.must_begin)
        seeds = self._seeds.of(lane, state.episode_id[lane])
        causes, obs = {}, None
        try:
            obs = self._env.reset(seeds, state.must_begin)
            bad = self._obs_check.find(obs)
            causes = {n: bad[n] for n in lane.tolist() if n in bad}
        except EnvFault as error:
            causes = error.causes
        if causes:
            # Its seed may be the cause, so the next episode takes its place.
            plan, failed = state.plan, _flags(causes, len(state.over))
            counts = self._everywhere if plan is None else plan.mask
            state = state.lose(causes, counts)._replace(must_begin=self._nowhere)
            self.state = state.end(failed, 0)
            return
        obs = self._read_first(obs, state.unread)
        state = state._replace(must_begin=self._nowhere, unread=self._nowhere)
        self.obs, self.state = obs, state


def _flags(causes: Mapping[int, BaseException], num_envs: int) -> np.ndarray:
    flags = np.zeros(num_envs, bool)
    flags[list(causes)] = True
    return flags


class _InterruptBetweenSteps:
    """Delays Ctrl-C until `check` or the end of the `with`; a second one raises."""

    def __init__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        own = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._is_waiting, self._num_pressed = own, 0

    def __enter__(self) -> Self:
        if self._is_waiting:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        is_waiting, self._is_waiting = self._is_waiting, False
        if is_waiting:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if Ctrl-C was pressed."""
        if self._num_pressed:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: Any) -> None:
        del number, frame  # unused
        self._num_pressed += 1
        # The second one raises, for the answer may never come.
        if self._num_pressed > 1 or not self._is_waiting:
            raise KeyboardInterrupt

"""The host loop: act, step, record, and reset what is done; once per row."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import chex
import numpy as np

from envs.host.types import EnvFault, HostStep, HostVectorEnv
from envs.types import ArrayTree
from rollout.host.faults import Faults, Guard
from rollout.host.lanes import Lanes, Seeds
from rollout.host.rows import Rows
from rollout.host.seats import Seats

Causes = dict[int, BaseException]  # of environments that failed, by their numbers

At = slice | np.ndarray  # lanes that answered, which are columns: all, or `[R]` int

NO_LIMIT = 2**31 - 1
_ALL = slice(None)
_NOWHERE = np.zeros((), bool)


class ActFn(Protocol):
    """Chooses the actions, as `Program.act` does."""

    def __call__(
        self,
        params: Any,
        obs: ArrayTree,
        over: np.ndarray,
        episode_id: np.ndarray,
        *,
        env_id: np.ndarray | None = None,
        is_random: np.ndarray | None = None,
    ) -> tuple[ArrayTree, ArrayTree]:
        """Returns action and extras."""
        ...


class Run:
    """A policy in environments: where they stand, and how they go on.

    Args:
        env: `E` environments.
        act_fn: chooses the actions.
        key: one typed root key.
        faults: what is done about those that fail.
    """

    def __init__(
        self, env: HostVectorEnv, act_fn: ActFn, key: chex.PRNGKey, faults: Faults
    ) -> None:
        self._env, self._act_fn, self._faults = env, act_fn, faults
        self.lanes, self._seeds = Lanes(env.num_envs), Seeds(key, env.num_envs)
        self._guard = Guard(env.observation_space)
        self._everywhere = np.ones(env.num_envs, bool)
        self._has_failed = ~self._everywhere  # must be made anew before it is reset
        self._must_begin = ~self._everywhere  # whose episode is over
        self._is_torn = False  # a step was interrupted: nobody knows how far it got
        self.obs: ArrayTree = None  # [E, ...], in the environments' own memory
        self.begin(self._everywhere, self.lanes.episode_id)

    def play(
        self,
        params: Any,
        rows: Rows,
        *,
        limit: int = NO_LIMIT,
        seats: Seats | None = None,
        random_fn: Callable[[int], np.ndarray | None] = lambda row: None,
    ) -> None:
        """Fills `rows`, or as many as it takes until the episodes of `seats` are over.

        After an error `rows` holds those that are whole, and `recover` goes on.

        Args:
            params: whatever the policy takes as its parameters.
            rows: what to fill.
            limit: steps after which an episode is cut.
            seats: the episodes to play; None to go on from episode to episode.
            random_fn: the row to `[E]` bool, the lanes that act at random, or None.
        """
        if not rows.num:  # else it goes on after an error
            self.lanes.first_row[:] = 0
        with _interrupted_between_steps() as check:
            while rows.num < rows.size and not (seats and seats.is_over):
                check()
                is_random = random_fn(rows.num)
                result, at = self._step(params, rows, is_random, seats)
                self._note(rows, result, at, limit, seats)

    def begin(
        self, mask: np.ndarray, episode_id: np.ndarray, seats: Seats | None = None
    ) -> None:
        """Begins the episodes of these ids, `[E]` int32, where `mask`."""
        self._begin(mask, 0, seats, episode_id)

    def recover(self, row: int = 0) -> None:
        """Begins new episodes where an error left none; rows go on with `row`."""
        if self._has_failed.any():
            self._rebuild(self._has_failed.nonzero()[0].tolist())
        mask = self._everywhere if self._is_torn else self._must_begin
        self._is_torn = False
        self._begin(mask, row, None)

    def _step(
        self,
        params: Any,
        rows: Rows,
        is_random: np.ndarray | None,
        seats: Seats | None,
    ) -> tuple[HostStep, At]:
        """Sends the actions; returns the answers and the lanes that gave them."""
        del seats  # unused: idle lanes play on
        lanes = self.lanes
        # A row of `rows` stays as it is, so that jax may read it where it lies.
        obs = rows.write("obs", self.obs)
        action, extras = self._act_fn(
            params, obs, lanes.over, lanes.episode_id, is_random=is_random
        )
        if lanes.any_over:
            lanes.over, lanes.any_over = ~self._everywhere, False
        self._is_torn = True
        result = self._env.step(action)
        self._is_torn = False
        self.obs = result.obs
        rows.write("action", action)
        rows.write("extras", extras)
        rows.write("info", result.info)
        return result, _ALL

    def _note(
        self, rows: Rows, result: HostStep, at: At, limit: int, seats: Seats | None
    ) -> None:
        """Writes what was answered, and begins the episodes that follow."""
        lanes, cut = self.lanes, _NOWHERE
        mask = self._count(result, at, seats)
        terminated = self._of_all(result.terminated, at)
        truncated = self._of_all(result.truncated, at)
        if limit < NO_LIMIT:
            cut = mask & (lanes.episode_length >= limit) & ~truncated
            truncated = truncated | cut
        over = terminated | truncated
        causes = self._find_faults(result, at)
        if seats is not None:
            flags = {"terminated": terminated, "truncated": truncated}
            self._take_seats(seats, over, cut, mask, causes, flags)
            truncated = truncated & ~(cut & terminated)  # only what goes on
        rows.write("next_obs", result.obs)
        flags = terminated[at], truncated[at], mask[at]
        rows.end(result.reward, *flags, lanes.episodes[:, at])
        num_lost = self._void(rows, causes) if causes else 0
        rows.num += 1
        if causes:
            over = over | _flags(causes, len(over))
            num_faulty = int(mask[list(causes)].sum())
            self._must_begin |= over
            self._handle(causes, episodes=num_faulty, steps=num_lost)
        if np.count_nonzero(over):  # `any` takes three times as long
            if seats is not None:
                seats.free(over)
            self._begin(over, rows.num, seats)

    def _count(self, result: HostStep, at: At, seats: Seats | None) -> np.ndarray:
        """Counts the step; tells in which lanes it is data, `[E]` bool."""
        lanes, stepped = self.lanes, result.mask
        if stepped is None and at is _ALL:
            lanes.episode_return += result.reward
            lanes.episode_length += 1
        elif stepped is None:
            lanes.episode_return[at] += result.reward
            lanes.episode_length[at] += 1
        else:
            lanes.episode_return[at] += np.where(stepped, result.reward, np.float32(0))
            lanes.episode_length[at] += stepped
            lanes.over[at] |= ~stepped  # the first observation has come only now
            lanes.any_over = True
        if seats is None and stepped is None and at is _ALL:
            return self._everywhere
        mask = np.zeros(lanes.num_envs, bool)
        mask[at] = True if stepped is None else stepped
        return mask if seats is None else mask & seats.mask

    def _of_all(self, flags: np.ndarray, at: At) -> np.ndarray:
        """Flags of the lanes that answered, for all lanes, `[E]` bool."""
        if at is _ALL:
            return flags
        of_all = np.zeros(self.lanes.num_envs, bool)
        of_all[at] = flags
        return of_all

    def _take_seats(
        self,
        seats: Seats,
        over: np.ndarray,
        cut: np.ndarray,
        mask: np.ndarray,
        causes: Causes,
        flags: dict[str, np.ndarray],
    ) -> None:
        """Notes the episodes that are over, or lost."""
        lanes, faulty = self.lanes, _flags(causes, len(mask))
        seats.count_steps(int(mask.sum()))
        seats.lose(faulty)
        seats.note(
            over & ~faulty,
            cut,
            lane=np.arange(len(mask), dtype=np.int32),
            episode_return=lanes.episode_return,
            episode_length=lanes.episode_length,
            **flags,
        )

    def _void(self, rows: Rows, causes: Causes) -> int:
        """Voids the episodes that are lost; tells how many rows they have."""
        return sum(rows.void(*self._place_of(lane, rows)) for lane in causes)

    def _place_of(self, lane: int, rows: Rows) -> tuple[Any, Any]:
        """Rows and columns of the lane's episode."""
        return slice(int(self.lanes.first_row[lane]), rows.num + 1), lane

    def _find_faults(self, result: HostStep, at: At) -> Causes:
        causes = dict(result.causes)
        bad = self._guard.find(result.obs)
        return causes if bad is None else _bad_obs(self._of_all(bad, at)) | causes

    def _handle(self, causes: Causes, **lost: int) -> None:
        """Makes the environments anew, or raises."""
        self._has_failed |= _flags(causes, len(self._has_failed))
        self._faults.report(causes, **lost)
        while causes:
            try:
                self._rebuild(list(causes))
                causes = {}
            except EnvFault as fault:  # they fail at that, too
                causes = fault.causes
                self._faults.report(causes, episodes=0, steps=0)

    def _rebuild(self, lanes: list[int]) -> None:
        self._faults.rebuild(lanes)
        self._has_failed[lanes] = False

    def _begin(
        self,
        mask: np.ndarray,
        row: int,
        seats: Seats | None,
        episode_id: np.ndarray | None = None,
    ) -> None:
        """Begins episodes where `mask`, `[E]`; the rows that follow begin with `row`.

        Those of the ids, `[E]`, or else the next ones of `seats`, or of their own.
        """
        begun, lane = mask, mask.nonzero()[0]
        self._must_begin[lane] = True  # until what a reset returned is taken
        while lane.size:
            if episode_id is None:
                own = seats is None
                episode_id = self.lanes.next_own() if own else seats.episode_id
            self.lanes.begin(lane, episode_id[lane], row)
            causes = self._reset(lane, mask, begun)
            if not causes:
                self._must_begin[begun] = False
                return
            # Its seed may be what it fails at, so the next episode takes its place.
            failed = _flags(causes, self.lanes.num_envs)
            num_faulty = len(causes) if seats is None else int(seats.mask[failed].sum())
            if seats is not None:
                seats.lose(failed)
            self._handle(causes, episodes=num_faulty, steps=0)
            if seats is not None:
                seats.free(failed)
            mask, lane, episode_id = failed, failed.nonzero()[0], None

    def _take(self, obs: ArrayTree, mask: np.ndarray) -> None:
        """Takes what a reset of the lanes where `mask` returned."""
        del mask  # unused: the others are what they were
        self.obs = obs

    def _reset(self, lane: np.ndarray, mask: np.ndarray, begun: np.ndarray) -> Causes:
        """Resets some lanes, `[n]` or `[E]` bool; takes the observations of `begun`."""
        try:
            seeds = self._seeds.of(lane, self.lanes.episode_id[lane])
            obs = self._env.reset(seeds, mask)
        except EnvFault as fault:
            return fault.causes
        self._take(obs, begun)
        bad = self._guard.find(obs)
        return {} if bad is None else _bad_obs(bad & mask)


def _bad_obs(bad: np.ndarray) -> Causes:
    what = "the observation is not finite, or outside of its space"
    return {int(number): ValueError(what) for number in np.flatnonzero(bad)}


def _flags(causes: Causes, num_envs: int) -> np.ndarray:
    flags = np.zeros(num_envs, bool)
    flags[list(causes)] = True
    return flags


@contextlib.contextmanager
def _interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Puts Ctrl-C off until the function that it yields is called; a second one not."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:  # what is waited for may never come
            raise KeyboardInterrupt
        pressed.append(number)

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

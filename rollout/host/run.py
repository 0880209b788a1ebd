"""The loop: act, step, note, and begin anew what is over; once per row."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import chex
import numpy as np

from envs.host.types import EnvFault, HostStep, HostVectorEnv
from rollout.host.faults import Faults, Guard
from rollout.host.lanes import Lanes, Seeds
from rollout.host.program import Program
from rollout.host.rows import Rows
from rollout.host.seats import Seats
from rollout.types import Policy

Causes = dict[int, BaseException]  # of environments that failed, by their numbers

NO_LIMIT = 2**31 - 1


class Run:
    """A policy in environments: where they stand, and how they go on.

    Args:
        env: `E` environments.
        policy: the policy that acts in them.
        key: one typed root key.
        faults: what is done about those that fail.
    """

    def __init__(
        self, env: HostVectorEnv, policy: Policy, key: chex.PRNGKey, faults: Faults
    ) -> None:
        self._env, self._faults = env, faults
        self.program = Program(policy, env.action_space, env.num_envs, key)
        self.lanes, self._seeds = Lanes(env.num_envs), Seeds(key, env.num_envs)
        self._guard = Guard(env.observation_space)
        self._everywhere = np.ones(env.num_envs, bool)
        self._has_failed = ~self._everywhere  # must be made anew before it is reset
        self._must_begin = ~self._everywhere  # whose episode is over, or torn
        self.obs: chex.ArrayTree = None  # [E, ...], in the environments' own memory
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
                result = self._step(params, rows, random_fn(rows.num))
                self._note(rows, result, limit, seats)

    def begin(
        self, mask: np.ndarray, episode_id: np.ndarray, seats: Seats | None = None
    ) -> None:
        """Begins the episodes of these ids, `[E]` int32, where `mask`."""
        if mask.any():
            self._begin(mask, episode_id, 0, seats)

    def recover(self) -> None:
        """Begins new episodes where an error left none that can go on."""
        failed = {number: None for number in np.flatnonzero(self._has_failed)}
        if failed:
            self._rebuild(failed)
        self.begin(self._must_begin.copy(), self.lanes.next_own())

    def _step(self, params: Any, rows: Rows, is_random: np.ndarray | None) -> HostStep:
        lanes = self.lanes
        # A row of `rows` stays as it is, so that jax may read it where it lies.
        obs = rows.write("obs", self.obs)
        action, extras = self.program.act(
            params, obs, lanes.over, lanes.episode_id, is_random=is_random
        )
        self._must_begin[:] = True  # should the step be torn
        result = self._env.step(action)
        self._must_begin[:] = False
        self.obs, lanes.over = result.obs, np.zeros_like(lanes.over)
        rows.write("action", action)
        rows.write("extras", extras)
        return result

    def _note(
        self, rows: Rows, result: HostStep, limit: int, seats: Seats | None
    ) -> None:
        """Writes what the environments answered, and begins the episodes that follow."""
        lanes = self.lanes
        mask = self._count(result, seats)
        truncated = result.truncated
        cut = lanes.episode_length >= limit
        if cut.any():
            cut &= ~truncated
            truncated = truncated | cut
        over = result.terminated | truncated
        causes = self._find_faults(result)
        if seats is not None:
            self._take_seats(seats, result, truncated, cut, mask, causes)
            truncated = truncated & ~(cut & result.terminated)  # only what goes on
        self._write(rows, result, truncated, mask)
        num_lost = self._mask_out(rows, mask, causes)
        rows.num += 1
        if causes:
            over = over | _flags(causes, len(over))
            num_faulty = int(mask[list(causes)].sum())
            self._must_begin |= over
            self._handle(causes, episodes=num_faulty, steps=num_lost)
        if over.any():
            if seats is not None:
                seats.free(over)
            episode_id = lanes.next_own() if seats is None else seats.episode_id
            self._begin(over, episode_id, rows.num, seats)

    def _count(self, result: HostStep, seats: Seats | None) -> np.ndarray:
        """Counts the step; tells in which lanes it is data, `[E]` bool."""
        lanes, stepped = self.lanes, result.mask
        if stepped is None:
            stepped = self._everywhere
            lanes.episode_return += result.reward
        else:
            lanes.episode_return += np.where(stepped, result.reward, np.float32(0.0))
            lanes.over |= ~stepped  # the first observation has come only now
        lanes.episode_length += stepped
        return stepped if seats is None else stepped & seats.mask

    def _take_seats(
        self,
        seats: Seats,
        result: HostStep,
        truncated: np.ndarray,
        cut: np.ndarray,
        mask: np.ndarray,
        causes: Causes,
    ) -> None:
        """Notes the episodes that are over, or lost."""
        lanes, faulty = self.lanes, _flags(causes, len(mask))
        seats.count_steps(int(mask.sum()))
        seats.lose(faulty)
        seats.note(
            (result.terminated | truncated) & ~faulty,
            cut,
            lane=np.arange(len(mask), dtype=np.int32),
            terminated=result.terminated,
            truncated=truncated,
            episode_return=lanes.episode_return,
            episode_length=lanes.episode_length,
        )

    def _write(
        self, rows: Rows, result: HostStep, truncated: np.ndarray, mask: np.ndarray
    ) -> None:
        lanes = self.lanes
        rows.write("next_obs", result.obs)
        rows.write("reward", result.reward)
        rows.write("terminated", result.terminated)
        rows.write("truncated", truncated)
        rows.write("mask", mask)
        rows.write("episode_id", lanes.episode_id)
        rows.write("episode_return", lanes.episode_return)
        rows.write("episode_length", lanes.episode_length)
        rows.write("info", result.info)

    def _mask_out(self, rows: Rows, mask: np.ndarray, causes: Causes) -> int:
        """Voids what is no data; tells how many rows the faults cost."""
        num_lost = 0
        for lane in causes:
            first = int(self.lanes.first_row[lane])
            num_lost += (rows.num + 1 - first) if mask[lane] else 0
            rows.mask_out(first, lane)
        if not mask.all():
            for lane in np.flatnonzero(~mask):
                rows.mask_out(rows.num, lane)
        return num_lost

    def _find_faults(self, result: HostStep) -> Causes:
        causes = dict(result.causes) if result.faulty.any() else {}
        bad = self._guard.find(result.obs)
        return causes if bad is None else self._bad_obs(bad) | causes

    def _bad_obs(self, bad: np.ndarray) -> Causes:
        what = "the observation is not finite, or outside of its space"
        return {int(number): ValueError(what) for number in np.flatnonzero(bad)}

    def _handle(self, causes: Causes, **lost: int) -> None:
        """Makes the environments anew, or raises."""
        self._has_failed |= _flags(causes, len(self._has_failed))
        self._faults.report(causes, **lost)
        self._rebuild(causes)

    def _rebuild(self, causes: Causes) -> None:
        self._faults.rebuild(causes)
        self._has_failed[list(causes)] = False

    def _begin(
        self, mask: np.ndarray, episode_id: np.ndarray, row: int, seats: Seats | None
    ) -> None:
        """Begins episodes; the rows that follow begin with `row`."""
        while True:
            self._must_begin |= mask
            self.lanes.begin(mask, episode_id, row)
            causes = self._reset(mask)
            failed = _flags(causes, len(mask))
            self._must_begin &= ~mask | failed
            if not causes:
                return
            # Its seed may be what it fails at, so the next episode takes its place.
            num_faulty = len(causes) if seats is None else int(seats.mask[failed].sum())
            if seats is not None:
                seats.lose(failed)
            self._handle(causes, episodes=num_faulty, steps=0)
            if seats is not None:
                seats.free(failed)
            mask = failed
            episode_id = self.lanes.next_own() if seats is None else seats.episode_id

    def _reset(self, mask: np.ndarray) -> Causes:
        seeds = self._seeds.of(self.lanes.episode_id, mask)
        try:
            self.obs = self._env.reset(seeds, mask)
        except EnvFault as fault:
            return fault.causes
        bad = self._guard.find(self.obs)
        return {} if bad is None else self._bad_obs(bad & mask)


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

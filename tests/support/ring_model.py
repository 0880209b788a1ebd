"""Numbered rows and a slow model of a buffer, for tests of buffers.

Every leaf of a row is computed from the number of the row, so that a misplaced leaf is
detected. Numbers are consecutive within an episode, and `next_obs` is the number plus
one. Episodes are separated by a gap, so that no row equals a final observation.
"""

import collections
import dataclasses
from typing import Any

import numpy as np

import rollout

_LANE = 10_000  # distance between the first numbers of two lanes


@dataclasses.dataclass(frozen=True)
class Step:
    """A row of the model."""

    number: int
    terminated: bool
    truncated: bool
    episode_id: int
    episode_length: int

    @property
    def done(self):
        return self.terminated or self.truncated


VOID = Step(-1, True, True, -1, -1)


def encode_obs(number):
    return {
        "pair": np.stack([number, -number], axis=-1).astype(np.float32),
        "byte": (number % 251).astype(np.uint8),
    }


def decode_obs(obs):
    number = np.asarray(obs["pair"])[..., 0].astype(int)
    np.testing.assert_array_equal(obs["pair"][..., 1], -number)
    np.testing.assert_array_equal(obs["byte"], number % 251)
    return number


def reward_of(number):
    return number % 7 - 2.5


def encode(steps, mask):
    """Converts `[T, B]` steps of the model to rows."""

    def leaf(name, dtype):
        return np.array([[getattr(s, name) for s in row] for row in steps], dtype)

    number = leaf("number", int)
    make_rows: Any = rollout.Transition  # the rows are NumPy arrays
    return make_rows(
        obs=encode_obs(number),
        action=(),
        reward=reward_of(number).astype(np.float32),
        terminated=leaf("terminated", bool),
        truncated=leaf("truncated", bool),
        next_obs=encode_obs(number + 1),
        mask=np.array(mask, bool),
        episode_id=leaf("episode_id", np.int32),
        episode_return=(),
        episode_length=leaf("episode_length", np.int32),
        extras={"policy_state": (number * 2).astype(np.int32)},
        info=(),
    )


class Model:
    """The rows that a buffer must store and return, in plain Python.

    `num_finals` is None if every row stores its successor.
    """

    def __init__(self, num_slots, num_envs, num_finals=None):
        self.num_slots, self.num_envs = num_slots, num_envs
        self.lanes = [collections.deque(maxlen=num_slots) for _ in range(num_envs)]
        self.final_obs = (
            None if num_finals is None else collections.deque(maxlen=num_finals)
        )
        self.last = [
            Step(lane * _LANE, True, False, lane, 3) for lane in range(num_envs)
        ]

    # Methods that add rows.

    def make_chunk(self, rng, num_rows, mask_rate=0.0, done_rate=0.3, break_rate=0.1):
        """Returns `[T, B]` steps that continue from the last steps, and a mask."""
        mask = rng.random((num_rows, self.num_envs)) >= mask_rate
        steps = [[VOID] * self.num_envs for _ in range(num_rows)]
        for t, lane in np.argwhere(mask):
            steps[t][lane] = self._next_step(rng, lane, done_rate, break_rate)
        return steps, mask

    def _next_step(self, rng, lane, done_rate, break_rate):
        last = self.last[lane]
        done = rng.random() < done_rate
        ending = rng.integers(3)  # 0: terminated, 1: truncated, 2: both
        flags = {"terminated": done and ending != 1, "truncated": done and ending != 0}
        is_first = last.done or rng.random() < break_rate
        step = Step(
            last.number + (3 if is_first else 1),
            episode_id=last.episode_id + (self.num_envs if is_first else 0),
            episode_length=1 if is_first else last.episode_length + 1,
            **flags,
        )
        self.last[lane] = step
        return step

    def add(self, steps, mask):
        """Appends a chunk; if it is longer than the ring, only its last rows."""
        # Count the rows of the lane from each row on.
        num_later = np.cumsum(mask[::-1], axis=0)[::-1]
        for t, lane in np.argwhere(mask):
            if num_later[t, lane] <= self.num_slots:
                self.append(int(lane), steps[t][lane])

    def append(self, lane, step):
        self.lanes[lane].append(step)
        if self.final_obs is not None and step.done:
            self.final_obs.append(step.number)

    # Methods that read rows.

    def rows(self):
        """Returns all stored rows, `(lane, position from the oldest row)`."""
        return [(i, p) for i, lane in enumerate(self.lanes) for p in range(len(lane))]

    def step(self, row):
        return self.lanes[row[0]][row[1]]

    def next_row(self, row):
        lane, position = row
        if position + 1 == len(self.lanes[lane]) or self.step(row).done:
            return None
        step, next_step = self.step(row), self.step((lane, position + 1))
        continues = step.number + 1 == next_step.number
        return (lane, position + 1) if continues else None

    def previous_row(self, row):
        previous = (row[0], row[1] - 1)
        return previous if row[1] > 0 and self.next_row(previous) else None

    def has_successor(self, row):
        if self.final_obs is None:
            return True
        if self.step(row).done:
            return self.step(row).number in self.final_obs
        return self.next_row(row) is not None

    def history(self, row, length):
        """Returns the numbers up to `row`, padded in front; None if one was evicted."""
        numbers = [self.step(row).number]
        while len(numbers) < length and (previous := self.previous_row(row)):
            row = previous
            numbers.insert(0, self.step(row).number)
        missing = length - len(numbers)
        if missing and self.step(row).episode_length != 1:
            return None
        return [numbers[0]] * missing + numbers

    def usable_rows(self, stack=1):
        return [
            row
            for row in self.rows()
            if self.has_successor(row) and self.history(row, stack) is not None
        ]

    def window(self, row, length):
        """Returns the rows of the episode from `row` on, each with a successor."""
        rows = [row]
        while len(rows) < length and (next_row := self.next_row(rows[-1])):
            if not self.has_successor(next_row):
                break
            rows.append(next_row)
        return rows

    def n_step(self, row, n_step, gamma):
        """Computes return, discount and last row with a loop."""
        rows, total = self.window(row, n_step), 0.0
        for k, window_row in enumerate(rows):
            total += gamma**k * reward_of(self.step(window_row).number)
        last = self.step(rows[-1])
        discount = 0.0 if last.terminated else gamma ** len(rows)
        return total, discount, rows[-1]

    def complete_episodes(self, max_length):
        """Returns the rows of completely stored episodes by their first number."""
        episodes = {}
        for row in self.rows():
            if self.step(row).episode_length != 1:
                continue
            rows = self.window(row, max_length)
            if self.step(rows[-1]).done and self.has_successor(rows[-1]):
                episodes[self.step(row).number] = rows
        return episodes

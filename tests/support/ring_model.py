"""Shared by tests of buffers: numbered rows, and a slow model of a buffer.

A row is a number, from which every leaf is computed, so that one that slips shows. In
an episode numbers go on by one, and `next_obs` is always the number plus one; from one
episode to the next they leave a gap, so no row has the final observation of another.
"""

import collections
import dataclasses

import numpy as np

import rollout

_LANE = 10_000  # numbers of a lane


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
    """`[T, B]` steps of the model as rows."""

    def leaf(name, dtype):
        return np.array([[getattr(s, name) for s in row] for row in steps], dtype)

    number = leaf("number", int)
    return rollout.Transition(
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
    """The rows that a buffer must hold and return, in plain Python.

    `num_finals` is None where every row keeps its own successor.
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

    # Rows to add.

    def make_chunk(self, rng, num_rows, mask_rate=0.0, done_rate=0.3, break_rate=0.1):
        """Makes `[T, B]` steps that go on from the last ones, and a mask."""
        mask = rng.random((num_rows, self.num_envs)) >= mask_rate
        steps = [[VOID] * self.num_envs for _ in range(num_rows)]
        for t, lane in np.argwhere(mask):
            steps[t][lane] = self._next_step(rng, lane, done_rate, break_rate)
        return steps, mask

    def _next_step(self, rng, lane, done_rate, break_rate):
        last = self.last[lane]
        done = rng.random() < done_rate
        kind = rng.integers(3)  # terminated, truncated or both
        flags = {"terminated": done and kind != 1, "truncated": done and kind != 0}
        begins = last.done or rng.random() < break_rate
        step = Step(
            last.number + (3 if begins else 1),
            episode_id=last.episode_id + (self.num_envs if begins else 0),
            episode_length=1 if begins else last.episode_length + 1,
            **flags,
        )
        self.last[lane] = step
        return step

    def add(self, steps, mask):
        """Appends; of a chunk longer than the ring only the last rows count."""
        later = np.cumsum(mask[::-1], axis=0)[::-1]  # this row and those after it
        for t, lane in np.argwhere(mask):
            if later[t, lane] <= self.num_slots:
                self.append(int(lane), steps[t][lane])

    def append(self, lane, step):
        self.lanes[lane].append(step)
        if self.final_obs is not None and step.done:
            self.final_obs.append(step.number)

    # Rows that may be read.

    def rows(self):
        """All rows that are stored: `(lane, position from the oldest)`."""
        return [(i, p) for i, lane in enumerate(self.lanes) for p in range(len(lane))]

    def step(self, row):
        return self.lanes[row[0]][row[1]]

    def following(self, row):
        lane, position = row
        if position + 1 == len(self.lanes[lane]) or self.step(row).done:
            return None
        here, there = self.step(row), self.step((lane, position + 1))
        continues = here.number + 1 == there.number
        return (lane, position + 1) if continues else None

    def previous(self, row):
        before = (row[0], row[1] - 1)
        return before if row[1] > 0 and self.following(before) else None

    def has_successor(self, row):
        if self.final_obs is None:
            return True
        if self.step(row).done:
            return self.step(row).number in self.final_obs
        return self.following(row) is not None

    def history(self, row, length):
        """Numbers up to `row`, the first repeated; None if some are gone."""
        numbers = [self.step(row).number]
        while len(numbers) < length and (before := self.previous(row)):
            row = before
            numbers.insert(0, self.step(row).number)
        missing = length - len(numbers)
        if missing and self.step(row).episode_length != 1:
            return None
        return [numbers[0]] * missing + numbers

    def usable(self, stack=1):
        return [
            row
            for row in self.rows()
            if self.has_successor(row) and self.history(row, stack) is not None
        ]

    def window(self, row, length):
        """The rows from `row` on, of its episode, each with a successor."""
        rows = [row]
        while len(rows) < length and (after := self.following(rows[-1])):
            if not self.has_successor(after):
                break
            rows.append(after)
        return rows

    def n_step(self, row, n_step, gamma):
        """Return, discount and last row, by a loop."""
        rows, total = self.window(row, n_step), 0.0
        for k, each in enumerate(rows):
            total += gamma**k * reward_of(self.step(each).number)
        last = self.step(rows[-1])
        discount = 0.0 if last.terminated else gamma ** len(rows)
        return total, discount, rows[-1]

    def whole_episodes(self, max_length):
        """First rows of the episodes that are stored as a whole, with their rows."""
        found = {}
        for row in self.rows():
            if self.step(row).episode_length != 1:
                continue
            rows = self.window(row, max_length)
            if self.step(rows[-1]).done and self.has_successor(rows[-1]):
                found[self.step(row).number] = rows
        return found

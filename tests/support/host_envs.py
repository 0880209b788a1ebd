"""Gymnasium environments with faults.

The classes are at module level, so that worker processes can import them. Observations
count the steps of an episode. The seed of a reset selects the fault of the episode.
"""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import gymnasium
import numpy as np

FAULTS = ("raise", "shape", "dtype", "reward", "flag", "values", "odd")  # exceptions
ENDS = {"kill": -9, "exit": 3}  # ends of the process, and its exit codes
NAMES = ("fine", *FAULTS, *ENDS, "hang", "nan", "reset", "slow", "late")
FAULT_STEP = 3  # the step that fails


def seed_of(name):
    """Returns the seed of an episode with this fault."""
    return 1000 + NAMES.index(name)


class OddError(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class Count(gymnasium.Env):
    """Counts `length` steps; the end is a termination if `length` is even."""

    observation_space = gymnasium.spaces.Box(0, 100, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(3, start=1)

    def __init__(self, length=5, fails=False):
        if fails:
            raise ValueError("no such game")
        self.length, self.closed = length, False
        self.actions = []

    def reset(self, *, seed=None, options=None):
        assert seed is not None
        self.fault = NAMES[seed - 1000] if seed >= 1000 else "fine"
        self.seed, self.count = seed, 0
        if self.fault == "reset":
            raise RuntimeError("no start")
        return self._obs(), {"even": True, "seed": seed}

    def step(self, action):
        assert type(action) is np.int64
        self.actions.append(int(action))
        self.count += 1
        done = self.count >= self.length
        flags = done and self.length % 2 == 0, done and self.length % 2 == 1
        result = [self._obs(), float(action), *flags, self._info()]
        if self.fault == "slow":
            time.sleep(0.2)
        if self.count == FAULT_STEP:
            self._fail(result)
        return tuple(result)

    def close(self):
        self.closed = True

    def _obs(self):
        return np.full(2, self.count, np.float64)

    def _info(self):
        info = {"even": self.count % 2 == 0}
        return info | ({"third": self.count} if self.count % 3 == 0 else {})

    def _fail(self, result):
        if self.fault == "raise":
            raise ZeroDivisionError("at step 3")
        if self.fault == "odd":
            raise OddError("odd", "error")
        if self.fault == "late":
            time.sleep(0.2)
        if self.fault in ("kill", "late"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exit":
            raise SystemExit(3)
        if self.fault == "hang":
            time.sleep(1000)
        wrong_values = {
            "shape": (0, np.zeros(1)),
            "dtype": (0, np.zeros(2, complex)),
            "reward": (1, "1.0"),
            "flag": (2, 1.0),
            "nan": (0, np.full(2, np.nan)),
        }
        if self.fault in wrong_values:
            index, value = wrong_values[self.fault]
            result[index] = value
        if self.fault == "values":
            result.pop()


class Faultless(Count):
    """A `Count` without faults for any seed."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0)


class OtherCount(Count):
    """A `Count` with a different action space."""

    action_space = gymnasium.spaces.Discrete(4)


class Described(Count):
    """A `Count` that saves and loads its state as arrays."""

    def save_state(self):
        return {"count": self.count, "seed": np.uint32(self.seed)}

    def load_state(self, arrays):
        self.fault, self.seed = "fine", int(arrays["seed"])
        self.count = int(arrays["count"])


class Arrays(Described, Faultless):
    """A `Described` without faults for any seed."""


class FailsAtLoad(Arrays):
    """Raises when it loads its state, and in each later reset."""

    is_broken = False

    def reset(self, *, seed=None, options=None):
        assert not self.is_broken
        return super().reset(seed=seed)

    def load_state(self, arrays):
        self.is_broken = True
        raise KeyError("no such state")


class EndsAtLoad(Described):
    """Ends its process when it loads its state."""

    def load_state(self, arrays):
        os._exit(9)


class Undescribed(Described):
    """Raises when it saves its state."""

    def save_state(self):
        raise RuntimeError("no state today")


class Backends(Count):
    """Reports in its info the number of jax backends of its process."""

    def _info(self):
        from jax._src import xla_bridge

        return {"backends": len(xla_bridge._backends)}


class Unreliable(Count):
    """A `Count` with one of these faults in one of eight episodes."""

    FAULTS = ("raise", "shape", "kill", "nan", "reset", "hang")

    def reset(self, *, seed=None, options=None):
        assert seed is not None
        number, index = divmod(seed, len(self.FAULTS))
        return super().reset(seed=seed_of("fine" if number % 8 else self.FAULTS[index]))


class Hangs(Count):
    """Hangs in the sixth step while a file exists."""

    def __init__(self, path):
        super().__init__(length=8)
        self.path = path

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0)

    def step(self, action):
        if self.count == 5 and self.path.exists():
            time.sleep(1000)
        return super().step(action)


class GlobalDraws(gymnasium.Env):
    """Observes samples of NumPy's and Python's global generators, and an early one."""

    observation_space = gymnasium.spaces.Box(0, 1, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self):
        self.first = random.random()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([np.random.random(), random.random(), self.first]), {}

    def step(self, action):
        obs, info = self.reset()
        return obs, 0.0, False, False, info


class StartsProcess(Count):
    """Starts a process in `reset`."""

    def reset(self, *, seed=None, options=None):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.map(abs, [-3]) == [3]
        return super().reset(seed=seed, options=options)


def is_alive(pid):
    """Returns whether a thread of a process runs; a zombie process has none."""
    try:
        stats = [x.read_text() for x in Path(f"/proc/{pid}/task").glob("*/stat")]
        return any(stat.split(")")[1].split()[0] != "Z" for stat in stats)
    except (FileNotFoundError, ProcessLookupError):  # the process ended during the call
        return True


def wait_until_gone(pids, seconds=10):
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


class Levels(gymnasium.Env):
    """Numbered levels: level n has n % 5 + 1 steps with reward n + 1."""

    number = 0
    observation_space = gymnasium.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def at_episode(self, number):
        assert type(number) is int
        self.number = number

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.full(1, self.number, np.float32), {}

    def step(self, action):
        self.count += 1
        is_last = self.count > self.number % 5
        obs = np.full(1, self.number, np.float32)
        return obs, self.number + 1.0, is_last, False, {}


def make_levels():
    """Returns `Levels` in a wrapper, as `gymnasium.make` does."""
    return gymnasium.wrappers.TimeLimit(Levels(), 100)


class Resumable(gymnasium.Env):
    """Counts the steps of an episode, and saves the count."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.full(1, self.count, np.float32), 0.0, False, False, {}

    def save_state(self):
        return {"count": self.count}

    def load_state(self, arrays):
        self.count = int(arrays["count"])


def make_limited():
    """Creates a `Resumable` that is truncated after five steps."""
    return gymnasium.wrappers.TimeLimit(Resumable(), 5)

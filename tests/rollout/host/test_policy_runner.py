"""The policy's program on the host: its results are copied from where it runs."""

import jax
import numpy as np
import pytest
from host_count import KEY, OPTIONS, HostCount

from rollout.host.policy_runner import PolicyRunner
from rollout.host.rows import RowBlock

OBS, OVER, ID = np.zeros((4, 1), np.float32), np.ones(4, bool), np.arange(4)


@pytest.fixture
def fetched(monkeypatch):
    """The trees that are copied from a device."""
    trees, device_get = [], jax.device_get
    monkeypatch.setattr(
        jax, "device_get", lambda tree: (trees.append(tree), device_get(tree))[1]
    )
    return trees


def test_actions_are_read_at_once_and_extras_stay_on_the_device(fetched):
    runner = PolicyRunner(OPTIONS["policy"], HostCount.action_space, len(OVER))
    runner.start(KEY)
    action, extras = runner.act(None, OBS, OVER, ID)
    assert isinstance(action, np.ndarray)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(extras))
    assert not fetched  # a single array is read in place


class OnGpu:
    """An array of another device, which records the calls of its methods."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls
        self.shape, self.dtype = (4,), np.dtype(np.float32)

    def __len__(self):
        return 4

    def copy_to_host_async(self):
        self.calls.append(f"start {self.name}")

    def __array__(self, dtype=None, copy=None):
        self.calls.append(f"wait {self.name}")
        return np.full(4, int(self.name), np.float32)


def test_copies_from_another_device_begin_before_one_is_waited_for():
    calls, block = [], RowBlock(4, 2)
    for row in range(2):
        names = ("obs", "action", "next_obs", "info")
        for name in names:
            block.write(name, np.zeros(4))
        block.mask[row] = True
        block.num = row + 1
        block.extras.append({"value": OnGpu(str(row), calls)})
    assert not calls
    rows = block.read()
    np.testing.assert_array_equal(rows.extras["value"], [[0] * 4, [1] * 4])
    assert calls == ["start 0", "start 1", "wait 0", "wait 1"]

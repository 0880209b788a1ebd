"""The policy's program on the host: its results are copied from where it runs."""

import jax
import numpy as np
import pytest
from host_count import KEY, OPTIONS, HostCount

from rollout.host.host_policy import HostPolicy
from rollout.platform import to_host

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
    policy = HostPolicy(OPTIONS["policy"], HostCount.action_space, len(OVER), KEY)
    _, action, extras = policy.act(None, 0, policy.initial_state, OBS, OVER, ID)
    assert isinstance(action, np.ndarray)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(extras))
    assert not fetched  # a single array is read in place


class OnGpu:
    """An array of another device."""

    platform = "gpu"

    def devices(self):
        return {self}


def test_extras_of_another_device_are_copied_together(monkeypatch):
    trees, rows = [], [{"value": OnGpu()}, {"value": OnGpu()}]
    monkeypatch.setattr(jax, "Array", OnGpu)
    monkeypatch.setattr(jax, "device_get", trees.append)
    to_host(rows)
    assert trees == [rows]

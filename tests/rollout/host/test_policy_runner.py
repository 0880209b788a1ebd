"""The policy's program on the host: its results are copied from where it runs."""

import jax
import numpy as np
import pytest
from host_count import KEY, OPTIONS, HostCount

from rollout.host.policy_runner import PolicyRunner

OBS, OVER, ID = np.zeros((4, 1), np.float32), np.ones(4, bool), np.arange(4)


@pytest.fixture
def fetched(monkeypatch):
    """The trees that are copied from a device."""
    trees, device_get = [], jax.device_get
    monkeypatch.setattr(
        jax, "device_get", lambda tree: (trees.append(tree), device_get(tree))[1]
    )
    return trees


def start():
    runner = PolicyRunner(OPTIONS["policy"], HostCount.action_space, len(OVER))
    progress = runner.start(KEY)

    def act():
        return runner.act(None, OBS, OVER, ID, progress)

    return runner, act


def test_results_of_a_cpu_are_read_in_place(fetched):
    action, *_ = start()[1]()
    assert isinstance(action, np.ndarray)
    assert not fetched


def test_default_platform_of_the_process_changes_nothing(monkeypatch, fetched):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert isinstance(start()[1]()[0], np.ndarray)
    assert not fetched


class OnGpu:
    """An array of another device, which records the calls of its methods."""

    platform = "gpu"

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def devices(self):
        return {self}

    def copy_to_host_async(self):
        self.calls.append(f"start {self.name}")

    def __array__(self, dtype=None, copy=None):
        self.calls.append(f"wait {self.name}")
        return np.zeros(4, dtype)


def test_copies_from_another_device_begin_before_one_is_waited_for(monkeypatch):
    calls, (runner, act) = [], start()
    out = OnGpu("action", calls), {"value": OnGpu("value", calls)}
    monkeypatch.setattr(runner, "_act", lambda params, words, state, *_: (state, out))
    action, extras, _ = act()
    assert calls[:2] == ["start action", "start value"]
    assert {*calls[2:]} == {"wait action", "wait value"}
    assert all(isinstance(x, np.ndarray) for x in (action, extras["value"]))

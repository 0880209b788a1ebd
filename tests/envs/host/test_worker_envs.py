"""Environments in worker processes: faults, lost workers and released resources."""

import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import host_envs
import numpy as np
import pytest
from host_envs import (
    ENDS,
    FAULT_STEP,
    Count,
    Described,
    GlobalDraws,
    StartsProcess,
    is_alive,
    seed_of,
    wait_until_gone,
)

from rollout import envs

ALL = np.ones(4, bool)
ACTION = np.int32([1, 2, 3, 1])
SUPPORT = Path(host_envs.__file__).parent


@pytest.fixture
def make_env():
    """Returns a function that makes environments and closes them after the test."""
    envs_to_close = []

    def make_env(make_fns=(Count,) * 4, num_workers=2, **options):
        envs_to_close.append(
            envs.make_worker_envs(list(make_fns), num_workers, **options)
        )
        return envs_to_close[-1]

    yield make_env
    for env in envs_to_close:
        env.close()


def start(env, faults=("fine",) * 4, mask=ALL):
    return env.reset(np.uint32([seed_of(fault) for fault in faults]), mask)


def run_until_fault(env, faults, num_steps=FAULT_STEP):
    """Resets with these faults and returns the last step."""
    start(env, faults)
    for _ in range(num_steps):
        step = env.step(ACTION)
    return step


def check_rebuild(env, mask):
    """Rebuilds masked environments and checks a step of all environments."""
    env.rebuild(mask)
    start(env, mask=mask)
    assert not env.step(ACTION).faulty.any()


def shared_memory_files(pids):
    """Returns named files in /dev/shm, which would outlive their processes."""
    paths = []
    for pid in pids:
        paths += Path(f"/proc/{pid}/maps").read_text().splitlines()
        descriptors = Path(f"/proc/{pid}/fd").iterdir()
        paths += [os.readlink(file) for file in descriptors if file.is_symlink()]
    return [x for x in paths if "/dev/shm/" in x and not x.endswith("(deleted)")]


WORKER_FAULTS = {
    **{x: (RuntimeError, f"ended with exit code {ENDS[x]}$") for x in ENDS},
    "hang": (TimeoutError, r"did not answer within 1\.0 s"),
}


@pytest.mark.parametrize("fault", WORKER_FAULTS)
def test_lost_worker_affects_its_environments_only(make_env, fault):
    env = make_env(timeout=1.0) if fault == "hang" else make_env()
    pid = env.pids[1]
    step = run_until_fault(env, ("fine", "fine", fault, "fine"))
    np.testing.assert_array_equal(step.faulty, [False, False, True, True])
    np.testing.assert_array_equal(step.obs[:2, 0], [FAULT_STEP, FAULT_STEP])
    error_type, message = WORKER_FAULTS[fault]
    with pytest.raises(
        error_type, match=rf"worker 1 \(environments 2 to 3\) {message}"
    ):
        raise step.causes[3]
    assert not is_alive(pid)
    with pytest.raises(
        envs.EnvFault, match=f"environment 2 failed: {error_type.__name__}"
    ):
        start(env)
    step = env.step(ACTION)
    np.testing.assert_array_equal(step.faulty, [False, False, True, True])
    check_rebuild(env, step.faulty)


def test_worker_killed_between_calls_is_a_fault(make_env):
    env = make_env()
    start(env)
    pid = env.pids[1]
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone([pid])
    np.testing.assert_array_equal(env.step(ACTION).faulty, [False, False, True, True])


def raise_keyboard_interrupt(*_):
    raise KeyboardInterrupt


def check_interrupted_call(call):
    """Interrupts a call with a signal after 0.1 s."""
    handler = signal.signal(signal.SIGALRM, raise_keyboard_interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("name", ["step", "receive", "reset"])
def test_interrupted_call_ends_workers(make_env, name):
    """Workers ignore Ctrl-C; an interrupted call of the main process ends them."""
    env = make_env()
    for pid in env.pids:
        os.kill(pid, signal.SIGINT)
    run_until_fault(env, ("slow", "fine", "fine", "hang"), FAULT_STEP - 1)
    worker_pids = env.pids
    if name != "step":
        env.send(ACTION, np.arange(4))
    calls = {
        "step": lambda: env.step(ACTION),
        "receive": lambda: env.receive(4),
        "reset": lambda: start(env),
    }
    check_interrupted_call(calls[name])
    assert not any(map(is_alive, worker_pids))
    with pytest.raises(envs.EnvFault, match=r"worker 0 .* was interrupted"):
        start(env)
    check_rebuild(env, ALL)
    env.send(ACTION, np.arange(4))
    step, _ = env.receive(4)
    np.testing.assert_array_equal(step.obs, np.full((4, 2), 2))


def test_workers_start_no_jax_backend(make_env):
    env = make_env([host_envs.Backends], 1, record_info={"backends": np.int32(-1)})
    start(env, ("fine",), np.ones(1, bool))
    np.testing.assert_array_equal(env.step(np.int32([1])).info["backends"], [0])


def test_receive_returns_fastest_environments(make_env):
    env = make_env(num_workers=4)
    start(env, ("slow", "fine", "fine", "fine"))
    env.send(np.int32([3, 2]), np.int32([0, 2]))
    step, env_id = env.receive(1)
    np.testing.assert_array_equal(env_id, [2])
    np.testing.assert_array_equal(step.reward, [2])
    with pytest.raises(TimeoutError, match=r"0 of 1 environments .* 0\.01 s"):
        env.receive(1, timeout=0.01)
    env.send(np.int32([1]), np.int32([2]))
    step, env_id = env.receive(2)
    assert env_id.dtype == np.int32
    np.testing.assert_array_equal(env_id, [2, 0])
    np.testing.assert_array_equal(step.obs, [[2, 2], [1, 1]])
    np.testing.assert_array_equal(step.reward, [1, 3])


def test_environments_of_a_worker_answer_separately(make_env):
    env = make_env(num_workers=1)
    start(env, ("fine", "slow", "fine", "fine"))
    env.send(np.int32([1, 1]), np.int32([0, 1]))
    _, env_id = env.receive(1)
    np.testing.assert_array_equal(env_id, [0])
    with pytest.raises(TimeoutError):  # environment 1 sleeps
        env.receive(1, timeout=0.0)
    env.receive(1)


def test_reset_discards_pending_steps(make_env):
    env = make_env()
    start(env, ("slow", "fine", "slow", "fine"))
    env.send(np.int32([1, 1]), np.int32([0, 2]))
    np.testing.assert_array_equal(start(env), np.zeros((4, 2)))
    with pytest.raises(ValueError, match="`num_ready` must be at most 0, got 1"):
        env.receive(1)
    np.testing.assert_array_equal(env.step(ACTION).obs, np.ones((4, 2)))


def test_rebuild_restarts_worker_with_pending_step(make_env):
    env = make_env(num_workers=1)
    start(env, ("raise", "late", "fine", "fine"))
    for _ in range(FAULT_STEP):
        env.send(ACTION[:2], np.int32([0, 1]))
        step, env_id = env.receive(1)
        if not step.faulty.any():
            env.receive(1)
    np.testing.assert_array_equal(env_id, [0])
    first_mask = np.bool_([True, False, False, False])
    env.rebuild(first_mask)
    step, env_id = env.receive(1)
    np.testing.assert_array_equal(env_id, [1])
    assert step.faulty.all()
    np.testing.assert_array_equal(start(env, mask=first_mask)[0], [0, 0])
    np.testing.assert_array_equal(env.step(ACTION).faulty, ~first_mask)


def test_step_counts_are_consecutive_despite_random_faults(make_env):
    env, rng = make_env(num_workers=2), np.random.default_rng(0)
    faults = ["fine"] * 12 + ["raise", "kill", "exit", "shape"]
    counts, env_id, num_faults = np.zeros(4, int), np.arange(4), 0
    start(env, rng.choice(faults, 4))
    # The order of answers is random, and with it the sampled actions and faults.
    for number in range(1000):
        if number >= 200 and num_faults > 20:
            break
        env.send(rng.integers(1, 4, len(env_id)).astype(np.int32), env_id)
        step, env_id = env.receive(int(rng.integers(1, 4)))
        counts[env_id] += 1
        np.testing.assert_array_equal(
            step.obs[~step.faulty, 0], counts[env_id][~step.faulty]
        )
        faulty = np.zeros(4, bool)
        faulty[env_id[step.faulty]] = True
        needs_reset = faulty.copy()
        needs_reset[env_id[step.truncated]] = True
        num_faults += int(step.faulty.sum())
        while needs_reset.any():
            if faulty.any():
                env.rebuild(faulty)
            faulty = np.zeros(4, bool)
            try:
                start(env, rng.choice(faults, 4), needs_reset)
            except envs.EnvFault as error:  # another environment ended the worker
                faulty[list(error.causes)] = True
            counts[needs_reset & ~faulty] = 0
            needs_reset = faulty
    assert num_faults > 20


def test_load_restores_states_after_worker_death(make_env):
    env, target = make_env([Described] * 4), make_env([Described] * 4, num_workers=3)
    for worker_env in (env, target):
        start(worker_env)
    obs, states = np.copy(env.step(ACTION).obs), env.save()
    os.kill(target.pids[1], signal.SIGKILL)
    assert wait_until_gone(target.pids[1:2])
    target.load(states, obs)
    rows = start(target, mask=np.bool_([True, False, False, False]))
    np.testing.assert_array_equal(rows[:, 0], [0, 1, 1, 1])
    np.testing.assert_array_equal(target.step(ACTION).obs[:, 0], [1, 2, 2, 2])
    os.kill(env.pids[0], signal.SIGKILL)
    assert wait_until_gone(env.pids[:1])
    assert env.save() is None


def test_worker_exit_during_load_is_a_fault(make_env):
    env = make_env([Described] * 2 + [host_envs.EndsAtLoad] * 2)
    start(env)
    obs, states = np.copy(env.step(ACTION).obs), env.save()
    with pytest.raises(envs.EnvFault, match=r"worker 1 .* exit code 9, and"):
        env.load(states, obs)
    check_rebuild(env, ALL)


def test_close_ends_workers_and_frees_memory(make_env):
    env = make_env()
    start(env)
    obs = env.step(ACTION).obs
    worker_pids = env.pids
    assert not shared_memory_files([*worker_pids, os.getpid()])
    env.close()
    env.close()
    assert wait_until_gone(worker_pids)
    np.testing.assert_array_equal(obs, np.ones((4, 2)))  # still readable


def test_garbage_collection_ends_workers():
    files = len(os.listdir("/proc/self/fd"))
    env = envs.make_worker_envs([Count] * 2, 2)
    worker_pids = env.pids
    del env
    gc.collect()
    assert wait_until_gone(worker_pids)
    assert len(os.listdir("/proc/self/fd")) <= files + 2  # two files of the fork server


MAIN = """
import os, sys, time
import numpy as np
sys.path.insert(0, {support!r})
from host_envs import Count, seed_of
from rollout import envs

if __name__ == "__main__":
    env = envs.make_worker_envs([Count] * 2, 2)
    env.reset(np.uint32([seed_of("hang"), seed_of("fine")]), np.ones(2, bool))
    print(*env.pids, flush=True)
    {rest}
"""
STEPS = "for _ in range({}): env.step(np.int32([1, 1]))"
FORK = """child = os.fork()
    if not child:
        sys.exit(3)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
    print(*env.step(np.int32([1, 2])).reward)
"""


def start_main(tmp_path, rest):
    """Starts a main process with two workers and returns it with the workers' pids."""
    script = tmp_path / "main.py"
    script.write_text(MAIN.format(support=str(SUPPORT), rest=rest))
    command = [sys.executable, "-W", "error", str(script)]
    if rest == FORK:
        command[1:3] = []  # Python warns about a fork with threads
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    path = os.pathsep.join([str(SUPPORT.parent.parent), *sys.path])
    main = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes)
    worker_pids = [int(pid) for pid in main.stdout.readline().split()]
    assert len(worker_pids) == 2, main.communicate()[1]
    return main, worker_pids


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, FAULT_STEP])
def test_workers_end_with_main_process(tmp_path, steps):
    """The main process ends without `close`, or is killed while a worker hangs."""
    main, worker_pids = start_main(tmp_path, STEPS.format(steps))
    if steps == FAULT_STEP:
        assert not shared_memory_files([*worker_pids, main.pid])
        time.sleep(0.3)  # until the worker hangs
        main.kill()
    _, errors = main.communicate(timeout=30)
    assert wait_until_gone(worker_pids)
    assert main.returncode == (0 if steps == 1 else -signal.SIGKILL), errors
    assert not errors  # no warning of multiprocessing


@pytest.mark.slow
def test_fork_of_main_process_keeps_workers(tmp_path):
    main, _ = start_main(tmp_path, FORK)
    output, errors = main.communicate(timeout=120)
    assert (output, main.returncode) == ("1.0 2.0\n", 0), errors


def test_factories_may_be_lambdas_and_local_classes(make_env):
    class LocalCount(Count):
        pass

    env = make_env([lambda: Count(length=2), LocalCount], num_workers=1)
    env.reset(np.uint32([0, 0]), ALL[:2])
    env.step(ACTION[:2])
    np.testing.assert_array_equal(env.step(ACTION[:2]).terminated, [True, False])


def test_workers_seed_separate_global_generators(make_env):
    state = np.random.get_state()[1].copy(), random.getstate()
    env = make_env([GlobalDraws] * 4, 4)
    seeds = np.uint32([7, 1, 2, 3])
    rows = [env.reset(seeds, ALL).copy(), env.step(ACTION).obs.copy()]
    # `first` appears in both rows.
    assert len(np.unique(np.ravel(rows))) == 2 * 4 * 2 + 4
    # Equal seeds give equal numbers, and the main process keeps its generator states.
    repeated = [env.reset(seeds, ALL).copy(), env.step(ACTION).obs.copy()]
    np.testing.assert_array_equal(repeated, rows)
    obs = env.reset(np.uint32([0, 7, 0, 0]), np.arange(4) == 1)
    np.testing.assert_array_equal(obs[1, :2], rows[0][0, :2])
    np.testing.assert_array_equal(np.random.get_state()[1], state[0])
    assert random.getstate() == state[1]


def test_received_environments_are_not_in_flight(make_env):
    env = make_env([Count] * 2, 2)
    env.reset(np.uint32([0, 1]), np.bool_([True, True]))
    env.send(ACTION[:2], np.int32([0, 1]))
    env.receive(2)
    with pytest.raises(ValueError, match="`num_ready` must be"):
        env.receive(1, timeout=0.1)


def test_reset_of_some_environments_keeps_global_generators(make_env):
    env = make_env([GlobalDraws] * 2, 1)
    seeds, mask = np.uint32([7, 1]), np.bool_([False, True])
    env.reset(seeds, np.bool_([True, True]))
    rows = [env.reset(seeds, mask)[1, :2].copy() for _ in range(2)]
    assert (rows[0] != rows[1]).all()


def test_environments_may_start_processes(make_env):
    env = make_env([StartsProcess] * 4, 2)
    assert start(env).shape[0] == 4
    assert not env.step(ACTION).faulty.any()

"""Environments in worker processes: faults, deaths, and that nothing is left."""

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

EVERY = np.ones(4, bool)
ACTION = np.int32([1, 2, 3, 1])
SUPPORT = Path(host_envs.__file__).parent


@pytest.fixture
def make():
    """Makes environments that are closed after the test."""
    made = []

    def make(make_fns=(Count,) * 4, num_workers=2, **options):
        made.append(envs.make_worker_envs(list(make_fns), num_workers, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


def start(env, faults=("fine",) * 4, mask=EVERY):
    return env.reset(np.uint32([seed_of(fault) for fault in faults]), mask)


def go_wrong(env, faults, num_steps=FAULT_STEP):
    """The last of the steps from a start with these faults."""
    start(env, faults)
    for _ in range(num_steps):
        step = env.step(ACTION)
    return step


def check_renewed(env, mask):
    """Rebuilds some environments, and takes a step of all."""
    env.rebuild(mask)
    start(env, mask=mask)
    assert not env.step(ACTION).faulty.any()


def named_files(pids):
    """Files of processes in /dev/shm that have a name, and would stay."""
    lines = []
    for pid in pids:
        lines += Path(f"/proc/{pid}/maps").read_text().splitlines()
        opened = Path(f"/proc/{pid}/fd").iterdir()
        lines += [os.readlink(file) for file in opened if file.is_symlink()]
    return [x for x in lines if "/dev/shm/" in x and not x.endswith("(deleted)")]


LOST = {
    **{x: (RuntimeError, f"ended with exit code {ENDS[x]}$") for x in ENDS},
    "hang": (TimeoutError, r"did not answer within 1\.0 s"),
}


@pytest.mark.parametrize("fault", LOST)
def test_worker_that_is_lost_takes_along_its_own_environments_only(make, fault):
    env = make(timeout=1.0) if fault == "hang" else make()
    pid = env.pids[1]
    step = go_wrong(env, ("fine", "fine", fault, "fine"))
    np.testing.assert_array_equal(step.faulty, [False, False, True, True])
    np.testing.assert_array_equal(step.obs[:2, 0], [FAULT_STEP, FAULT_STEP])
    kind, words = LOST[fault]
    with pytest.raises(kind, match=rf"worker 1 \(environments 2 to 3\) {words}"):
        raise step.causes[3]
    assert not is_alive(pid)
    with pytest.raises(envs.EnvFault, match=f"environment 2 failed: {kind.__name__}"):
        start(env)
    step = env.step(ACTION)
    np.testing.assert_array_equal(step.faulty, [False, False, True, True])
    check_renewed(env, step.faulty)


def test_worker_that_dies_between_calls_is_noticed_at_the_next(make):
    env = make()
    start(env)
    pid = env.pids[1]
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone([pid])
    np.testing.assert_array_equal(env.step(ACTION).faulty, [False, False, True, True])


def interrupt(*_):
    raise KeyboardInterrupt


def interrupted(call):
    """Runs a call that a signal of 0.1 s later interrupts."""
    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        signal.signal(signal.SIGALRM, old)


@pytest.mark.parametrize("name", ["step", "receive", "reset"])
def test_call_that_is_interrupted_ends_the_workers(make, name):
    """Workers themselves take no notice of Ctrl-C."""
    env = make()
    for pid in env.pids:
        os.kill(pid, signal.SIGINT)
    go_wrong(env, ("slow", "fine", "fine", "hang"), FAULT_STEP - 1)
    running = env.pids
    if name != "step":
        env.send(ACTION, np.arange(4))
    calls = {
        "step": lambda: env.step(ACTION),
        "receive": lambda: env.receive(4),
        "reset": lambda: start(env),
    }
    interrupted(calls[name])
    assert not any(map(is_alive, running))
    with pytest.raises(envs.EnvFault, match=r"worker 0 .* was interrupted"):
        start(env)
    check_renewed(env, EVERY)
    env.send(ACTION, np.arange(4))
    step, _ = env.receive(4)
    np.testing.assert_array_equal(step.obs, np.full((4, 2), 2))


def test_no_worker_starts_a_backend_of_jax(make):
    env = make([host_envs.Backends], 1, record_info={"backends": np.int32(-1)})
    start(env, ("fine",), np.ones(1, bool))
    np.testing.assert_array_equal(env.step(np.int32([1])).info["backends"], [0])


def test_first_to_answer_is_received_first(make):
    env = make(num_workers=4)
    start(env, ("slow", "fine", "fine", "fine"))
    env.send(np.int32([3, 2]), np.int32([0, 2]))
    step, env_id = env.receive(1)
    np.testing.assert_array_equal(env_id, [2])
    np.testing.assert_array_equal(step.reward, [2])
    with pytest.raises(
        TimeoutError, match=r"0 of 1 environments answered within 0\.01 s"
    ):
        env.receive(1, timeout=0.01)
    env.send(np.int32([1]), np.int32([2]))
    step, env_id = env.receive(2)
    assert env_id.dtype == np.int32
    np.testing.assert_array_equal(env_id, [2, 0])
    np.testing.assert_array_equal(step.obs, [[2, 2], [1, 1]])
    np.testing.assert_array_equal(step.reward, [1, 3])


def test_each_environment_of_a_worker_answers_on_its_own(make):
    env = make(num_workers=1)
    start(env, ("fine", "slow", "fine", "fine"))
    env.send(np.int32([1, 1]), np.int32([0, 1]))
    _, env_id = env.receive(1)
    np.testing.assert_array_equal(env_id, [0])
    with pytest.raises(TimeoutError):  # the other one sleeps
        env.receive(1, timeout=0.0)
    env.receive(1)


def test_reset_drops_the_step_that_is_in_flight(make):
    env = make()
    start(env, ("slow", "fine", "slow", "fine"))
    env.send(np.int32([1, 1]), np.int32([0, 2]))
    np.testing.assert_array_equal(start(env), np.zeros((4, 2)))
    with pytest.raises(ValueError, match="`num_ready` must be at most 0, got 1"):
        env.receive(1)
    np.testing.assert_array_equal(env.step(ACTION).obs, np.ones((4, 2)))


def test_worker_that_another_ends_during_a_rebuild_is_started_again(make):
    env = make(num_workers=1)
    start(env, ("raise", "late", "fine", "fine"))
    for _ in range(FAULT_STEP):
        env.send(ACTION[:2], np.int32([0, 1]))
        step, env_id = env.receive(1)
        if not step.faulty.any():
            env.receive(1)
    np.testing.assert_array_equal(env_id, [0])
    first = np.bool_([True, False, False, False])
    env.rebuild(first)
    step, env_id = env.receive(1)
    np.testing.assert_array_equal(env_id, [1])
    assert step.faulty.all()
    np.testing.assert_array_equal(start(env, mask=first)[0], [0, 0])
    np.testing.assert_array_equal(env.step(ACTION).faulty, ~first)


def test_steps_of_each_environment_run_on_without_a_gap_through_all_faults(make):
    env, draw = make(num_workers=2), np.random.default_rng(0)
    faults = ["fine"] * 12 + ["raise", "kill", "exit", "shape"]
    counts, idle, num_faults = np.zeros(4, int), np.arange(4), 0
    start(env, draw.choice(faults, 4))
    # Which environments answer first, and so what is drawn for them, is up to chance.
    for number in range(1000):
        if number >= 200 and num_faults > 20:
            break
        env.send(draw.integers(1, 4, len(idle)).astype(np.int32), idle)
        step, idle = env.receive(int(draw.integers(1, 4)))
        counts[idle] += 1
        np.testing.assert_array_equal(
            step.obs[~step.faulty, 0], counts[idle][~step.faulty]
        )
        faulty = np.zeros(4, bool)
        faulty[idle[step.faulty]] = True
        over = faulty.copy()
        over[idle[step.truncated]] = True
        num_faults += int(step.faulty.sum())
        while over.any():
            if faulty.any():
                env.rebuild(faulty)
            faulty = np.zeros(4, bool)
            try:
                start(env, draw.choice(faults, 4), over)
            except envs.EnvFault as error:  # another environment ended the worker
                faulty[list(error.causes)] = True
            counts[over & ~faulty] = 0
            over = faulty
    assert num_faults > 20


def test_environments_go_on_where_they_were_saved_though_a_worker_ended(make):
    env, other = make([Described] * 4), make([Described] * 4, num_workers=3)
    for each in (env, other):
        start(each)
    obs, states = np.copy(env.step(ACTION).obs), env.save()
    os.kill(other.pids[1], signal.SIGKILL)
    assert wait_until_gone(other.pids[1:2])
    other.load(states, obs)
    rows = start(other, mask=np.bool_([True, False, False, False]))
    np.testing.assert_array_equal(rows[:, 0], [0, 1, 1, 1])
    np.testing.assert_array_equal(other.step(ACTION).obs[:, 0], [1, 2, 2, 2])
    os.kill(env.pids[0], signal.SIGKILL)
    assert wait_until_gone(env.pids[:1])
    assert env.save() is None


def test_worker_that_ends_while_it_loads_is_a_fault(make):
    env = make([Described] * 2 + [host_envs.EndsAtLoad] * 2)
    start(env)
    obs, states = np.copy(env.step(ACTION).obs), env.save()
    with pytest.raises(envs.EnvFault, match=r"worker 1 .* exit code 9, and"):
        env.load(states, obs)
    check_renewed(env, EVERY)


def test_nothing_is_left_after_close(make):
    env = make()
    start(env)
    obs = env.step(ACTION).obs
    running = env.pids
    assert not named_files([*running, os.getpid()])
    env.close()
    env.close()
    assert wait_until_gone(running)
    np.testing.assert_array_equal(obs, np.ones((4, 2)))  # still there to be read


def test_nothing_is_left_after_garbage_collection():
    files = len(os.listdir("/proc/self/fd"))
    env = envs.make_worker_envs([Count] * 2, 2)
    running = env.pids
    del env
    gc.collect()
    assert wait_until_gone(running)
    assert len(os.listdir("/proc/self/fd")) <= files + 2  # the fork server's


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
    """Runs a main process with two workers, the pids of which are returned too."""
    script = tmp_path / "main.py"
    script.write_text(MAIN.format(support=str(SUPPORT), rest=rest))
    command = [sys.executable, "-W", "error", str(script)]
    if rest == FORK:
        command[1:3] = []  # of a fork beside threads
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    path = os.pathsep.join([str(SUPPORT.parent.parent), *sys.path])
    main = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes)
    running = [int(pid) for pid in main.stdout.readline().split()]
    assert len(running) == 2, main.communicate()[1]
    return main, running


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, FAULT_STEP])
def test_workers_end_with_a_main_process(tmp_path, steps):
    """One that ends without `close`, or is killed while an environment hangs."""
    main, running = start_main(tmp_path, STEPS.format(steps))
    if steps == FAULT_STEP:
        assert not named_files([*running, main.pid])
        time.sleep(0.3)  # until it hangs
        main.kill()
    _, errors = main.communicate(timeout=30)
    assert wait_until_gone(running)
    assert main.returncode == (0 if steps == 1 else -signal.SIGKILL), errors
    assert not errors  # nor a warning of multiprocessing


def test_fork_of_the_main_process_ends_and_leaves_the_workers(tmp_path):
    main, _ = start_main(tmp_path, FORK)
    output, errors = main.communicate(timeout=120)
    assert (output, main.returncode) == ("1.0 2.0\n", 0), errors


def test_functions_may_be_lambdas_and_classes_of_a_notebook(make):
    class Local(Count):
        pass

    env = make([lambda: Count(length=2), Local], num_workers=1)
    env.reset(np.uint32([0, 0]), EVERY[:2])
    env.step(ACTION[:2])
    np.testing.assert_array_equal(env.step(ACTION[:2]).terminated, [True, False])


def test_workers_have_global_generators_of_their_own(make):
    state = np.random.get_state()[1].copy(), random.getstate()
    env = make([GlobalDraws] * 4, 4)
    seeds = np.uint32([7, 1, 2, 3])
    rows = [env.reset(seeds, EVERY).copy(), env.step(ACTION).obs.copy()]
    assert len(np.unique(np.ravel(rows))) == 2 * 4 * 2 + 4  # `first` comes twice
    # The same seeds give the same numbers, and the main process keeps its states.
    again = [env.reset(seeds, EVERY).copy(), env.step(ACTION).obs.copy()]
    np.testing.assert_array_equal(again, rows)
    alone = env.reset(np.uint32([0, 7, 0, 0]), np.arange(4) == 1)
    np.testing.assert_array_equal(alone[1, :2], rows[0][0, :2])
    np.testing.assert_array_equal(np.random.get_state()[1], state[0])
    assert random.getstate() == state[1]


def test_environments_of_a_worker_may_start_processes(make):
    env = make([StartsProcess] * 4, 2)
    assert start(env).shape[0] == 4
    assert not env.step(ACTION).faulty.any()

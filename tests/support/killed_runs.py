"""Kills trainings by `run` at random times and compares the files.

    python tests/support/killed_runs.py 70 jax host seeds

Each kind of run, in JAX, in a host environment and with several seeds, is killed 70
times, and the files are compared with the files of an uninterrupted run. About one kill
in four hits the start of the process. All processes are forks of this process, which
has imported all modules but has not initialized JAX.
"""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import jax
from host_envs import Arrays

from rollout import envs
from rollout.recipes import run
from rollout.recipes.ppo import PPO, Config

OPTIONS = {"evaluate_every": 16, "num_eval_episodes": 2, "resume": True}


def train(kind: str, folder: Path, num_updates: int) -> None:
    """Runs or resumes a training; `folder.parent` has the compilation cache."""
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    config = Config(
        num_updates=num_updates,
        num_steps=8,
        num_epochs=1,
        num_minibatches=1,
        anneal_lr=False,
        hidden_layer_sizes=(4,),
    )
    key, options = jax.random.key(0), {**OPTIONS, "folder": folder}
    if kind == "host":
        agent = PPO(envs.from_gymnasium(Arrays, 2), config)
        run(agent, key, eval_env=envs.from_gymnasium(Arrays, 2), **options)
        return
    agent = PPO(envs.make_vec("CartPole-v1", 2, max_steps_in_episode=9), config)
    run(agent, jax.random.split(key, 3) if kind == "seeds" else key, **options)


def start(kind: str, folder: Path, num_updates: int) -> int:
    """Starts a training in a process of its own; returns the process id."""
    pid = os.fork()
    if pid:
        return pid
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        train(kind, folder, num_updates)
        os._exit(0)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)


def wait(pid: int, folder: Path) -> bool:
    """Waits for a process; returns whether it was killed, and raises if it failed."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    if status:
        log = (folder.parent / f"{folder.name}.log").read_text()
        raise RuntimeError(f"{folder} cannot be resumed: {log[-2000:]}")
    return False


def kill_once(
    kind: str, folder: Path, num_updates: int, rng: random.Random, at_start: bool
) -> bool:
    """Starts a training and kills it; returns False if it ended before the kill."""
    pid, metrics = start(kind, folder, num_updates), folder / "metrics.csv"
    if at_start:
        time.sleep(rng.uniform(0, 3))
    else:
        # Wait for a new row, then for a random part of a few updates.
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if metrics.exists() and metrics.stat().st_mtime_ns > before:
                break
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.3))
    os.kill(pid, signal.SIGKILL)  # a zombie ignores the signal
    return wait(pid, folder)


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files, except event files, which contain times."""
    paths = [x for x in sorted(folder.rglob("*")) if x.is_file()]
    names = [str(x.relative_to(folder)) for x in paths]
    pairs = zip(names, paths, strict=True)
    return {x: y.read_bytes() for x, y in pairs if not x.startswith("events.")}


def compare(kind: str, folder: Path, num_kills: int, seed: int = 0) -> tuple[int, int]:
    """Kills a run `num_kills` times, and compares it with an uninterrupted run.

    Returns:
        The number of kills, and the number of files, which are all equal.

    Raises:
        RuntimeError: if a resumed run raises.
        AssertionError: if files differ.
    """
    rng, count = random.Random(seed), 0
    killed, uninterrupted = folder / f"{kind}-killed", folder / f"{kind}-whole"
    num_updates = 8 * num_kills
    wait(start(kind, uninterrupted, num_updates), uninterrupted)
    while count < num_kills:
        at_start = rng.random() < 0.25
        is_killed = kill_once(kind, killed, num_updates, rng, at_start)
        count += is_killed
        if not is_killed:
            break
    wait(start(kind, killed, num_updates), killed)
    expected, files = files_of(uninterrupted), files_of(killed)
    assert files.keys() == expected.keys(), files.keys() ^ expected.keys()
    for name, content in expected.items():
        assert files[name] == content, f"{name} of {kind} differs"
    return count, len(files)


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as name:
            num_kills, num_files = compare(kind, Path(name), int(sys.argv[1]))
            print(f"{kind}: {num_kills} kills, {num_files} equal files", flush=True)

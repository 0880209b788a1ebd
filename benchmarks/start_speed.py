"""How long do imports, the first batch, the first update and the README's program take?

Each row runs in a new process, which measures the time from its first line to its last.
CPU time includes the threads of the compiler. Rows of other libraries need
`pip install stable-baselines3 sbx-rl`, and are omitted without them.

The programs run without a compilation cache, with a filled cache
(JAX_COMPILATION_CACHE_DIR) of programs that took at least a second to compile, and with
a cache of all programs (JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0). Reports medians
of interleaved runs.

    python benchmarks/start_speed.py
"""

import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from harness import run

ROOT = Path(__file__).parents[1]
CACHE = "JAX_COMPILATION_CACHE_DIR"
KEEP_ALL = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
PROLOGUE = "import time\n_begin = time.perf_counter()\n"
EPILOGUE = "\nprint(time.perf_counter() - _begin, time.process_time())"
FIRST_BATCH = """
import jax
import rollout

env = rollout.envs.make_vec("CartPole-v1", num_envs=64)
policy = rollout.random_policy(env.action_space)
collector = rollout.Collector(env=env, policy=policy)
collect = jax.jit(collector.collect_steps, static_argnums=2)
carry, trajectory = collect(collector.init(jax.random.key(0)), None, 128)
print(rollout.summarize(trajectory))
"""

FIRST_UPDATE = """
import jax
from rollout import envs
from rollout.recipes.{name} import {agent}, Config

agent = {agent}({env}, Config({config}))
state = agent.init(jax.random.key(0))
state, metrics = {update}(state)
jax.block_until_ready(metrics)
"""
PEER = """
import {library}
from stable_baselines3.common.env_util import make_vec_env

model = {library}.{agent}("MlpPolicy", make_vec_env({env}), {config})
model.learn({steps})
"""
HOST, LANES = "envs.from_gymnasium('{}', {})", "envs.make_vec('CartPole-v1', 64)"
FIRST_UPDATES = {
    "PPO, 8 CartPoles of Gymnasium": FIRST_UPDATE.format(
        name="ppo",
        agent="PPO",
        env=HOST.format("CartPole-v1", 8),
        config="num_steps=32",
        update="agent.update",
    ),
    "SAC, a Pendulum of Gymnasium": FIRST_UPDATE.format(
        name="sac",
        agent="SAC",
        env=HOST.format("Pendulum-v1", 1),
        config="num_steps=2, learning_starts=100",
        update="agent.update",
    ),
    "DQN, a CartPole of Gymnasium": FIRST_UPDATE.format(
        name="dqn",
        agent="DQN",
        env=HOST.format("CartPole-v1", 1),
        config="num_steps=4, gradient_steps=1, learning_starts=100, prioritized=False",
        update="agent.update",
    ),
    "PPO, 64 CartPoles in JAX": FIRST_UPDATE.format(
        name="ppo",
        agent="PPO",
        env=LANES,
        config="num_updates=1",
        update="jax.jit(agent.train)",
    ),
}
# Arguments of the programs of Stable-Baselines3 and sbx.
PEERS = {
    "PPO, 8 CartPoles of Gymnasium": {
        "agent": "PPO",
        "env": "'CartPole-v1', 8",
        "config": "n_steps=32",
        "steps": 256,
    },
    "SAC, a Pendulum of Gymnasium": {
        "agent": "SAC",
        "env": "'Pendulum-v1', 1",
        "config": "learning_starts=100",
        "steps": 102,
    },
    "DQN, a CartPole of Gymnasium": {
        "agent": "DQN",
        "env": "'CartPole-v1', 1",
        "config": "learning_starts=100",
        "steps": 104,
    },
}


def readme_program() -> str:
    """Returns the first program of the README, a training and an evaluation."""
    readme = (ROOT / "README.md").read_text()
    match = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert match
    return match[1]


def cases(folder: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Returns the programs by row, each with environment variables."""
    partial = {CACHE: f"{folder}/some"}
    complete = {CACHE: f"{folder}/every", KEEP_ALL: "0"}
    programs: dict[str, tuple[str, dict[str, str]]] = {
        "`import jax`": ("import jax", {}),
        "`import jax, flax, chex`": ("import jax, flax, chex", {}),
        "`import rollout`": ("import rollout", {}),
        "first batch, no cache": (FIRST_BATCH, {}),
        "first batch, filled cache": (FIRST_BATCH, partial),
        "first batch, cache of everything": (FIRST_BATCH, complete),
        "program of the README, no cache": (readme_program(), {}),
        "program of the README, filled cache": (readme_program(), partial),
        "program of the README, cache of everything": (readme_program(), complete),
    }
    for name, code in FIRST_UPDATES.items():
        programs[f"first update, {name}, no cache"] = code, {}
        programs[f"first update, {name}, cache of everything"] = code, complete
    libraries = {"stable_baselines3": "Stable-Baselines3", "sbx": "sbx"}
    peers = [
        (name, label, PEER.format(library=library, **values))
        for name, values in PEERS.items()
        for library, label in libraries.items()
        if importlib.util.find_spec(library)
    ]
    for name, label, code in peers:
        programs[f"first update, {name}, {label}, no cache"] = code, {}
        if label != "Stable-Baselines3":
            row = f"first update, {name}, {label}, cache of everything"
            programs[row] = code, complete
    return programs


def seconds(code: str, variables: dict[str, str]) -> tuple[float, float]:
    """Runs code in a new process; returns wall time and CPU time in seconds."""
    # Python would otherwise parse every module again in each process.
    unset = CACHE, KEEP_ALL, "PYTHONDONTWRITEBYTECODE"
    env = {k: v for k, v in os.environ.items() if k not in unset}
    command = [sys.executable, "-c", PROLOGUE + code + EPILOGUE]
    out = subprocess.check_output(command, cwd=ROOT, env=env | variables)
    wall, cpu = map(float, out.split()[-2:])
    return wall, cpu


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times all cases in interleaved runs."""
    with tempfile.TemporaryDirectory() as folder:
        runs = cases(folder)
        times = {name: [] for name in runs}
        # The first round warms the disk and fills the caches.
        for index in range(args.repeats + 1):
            for name, run in runs.items():
                times[name] += [seconds(*run)] * (index > 0)
    for name, samples in times.items():
        yield {
            "": name,
            "median, s": f"{statistics.median(x[0] for x in samples):.2f}",
            "median, CPU s": f"{statistics.median(x[1] for x in samples):.2f}",
            "fastest, CPU s": f"{min(x[1] for x in samples):.2f}",
        }


if __name__ == "__main__":
    run(__doc__, 7, {"start": rows})

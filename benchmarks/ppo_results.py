"""How well does `rollout/recipes/ppo.py` learn, and how much does each detail matter?

Trains five seeds of every task and evaluates the final parameters in 1,000 episodes
(robots: 100), with actions sampled as in training. On brax, also trains PureJaxRL's
script with the same settings. With `--details`, trains the tasks again for each
changed detail.

    pip install ".[brax,mujoco,bench]" optax scipy
    git clone https://github.com/luchris429/purejaxrl
    taskset -c 0 python benchmarks/ppo_results.py docs/recipes/ppo.json \\
        --purejaxrl purejaxrl/purejaxrl
    taskset -c 0 python benchmarks/ppo_results.py docs/recipes/ppo.json --details \\
        --tasks Pendulum-v1 Breakout-MinAtar

Runs in the file are only repeated with `--repeat`. Then `charts.py` draws
`docs/recipes/ppo.png`, and `tables.py` writes the tables of the page.
"""

import argparse
import dataclasses
import functools
import math
import time
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import purejaxrl
import recipes
from harness import complete

import rollout
from rollout import envs

SOURCE = Path(recipes.ppo.__file__)
CLASSIC = {"num_envs": 32, "num_steps": 64, "num_minibatches": 4}
ROBOT = {
    "num_updates": 122,
    "num_envs": 32,
    "num_minibatches": 32,
    "learning_rate": 1e-3,
    "ent_coef": 0.0,
    "normalize_observations": True,
}
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {**CLASSIC, "num_updates": 244},
    "Acrobot-v1": {**CLASSIC, "num_updates": 244},
    "Pendulum-v1": {
        "num_updates": 48,
        "num_envs": 16,
        "num_epochs": 10,
        "num_minibatches": 16,
        "learning_rate": 2e-3,
        "gamma": 0.95,
        "normalize_observations": True,
    },
    "Breakout-MinAtar": {
        "num_updates": 122,
        "learning_rate": 5e-3,
        "activation": "relu",
    },
    "brax:hopper": ROBOT,
    "brax:halfcheetah": ROBOT,
    "HalfCheetah-v5": {
        "num_updates": 488,
        "num_envs": 8,
        "num_steps": 256,
        "num_epochs": 10,
        "num_minibatches": 32,
        "learning_rate": 3e-4,
        "ent_coef": 0.0,
        "normalize_observations": True,
    },
}
# References for brax are runs of PureJaxRL with the same settings.
REFERENCES = {
    "CartPole-v1": "CleanRL 490.0 ± 6.1, PureJaxRL 488.2 ± 12.4",
    "Acrobot-v1": "CleanRL -86.4 ± 1.3, PureJaxRL -83.2 ± 1.6",
    "Pendulum-v1": "RL Zoo -172.2",
    "Breakout-MinAtar": "PureJaxRL 30.2 ± 15.9",
    "HalfCheetah-v5": "CleanRL 1,443 ± 46",
}
# Text of the program and its replacement, or changed settings.
DETAILS: dict[str, tuple[str, str] | dict[str, Any]] = {
    "as it is": {},
    "ratio not clipped": {"clip_eps": math.inf},
    "one epoch": {"num_epochs": 1},
    "advantages not normalized": (
        "advantage=normalize(batch.advantage, batch.weight)",
        "advantage=batch.advantage",
    ),
    "values clipped at 0.2": {"clip_range_vf": 0.2},
    "no entropy bonus": {"ent_coef": 0.0},
    "flax's own initialization": (
        "nn.Dense(size, kernel_init=kernel_init)",
        "nn.Dense(size)",
    ),
    "constant learning rate": {"anneal_lr": False},
    "gradients not clipped": {"max_grad_norm": math.inf},
    "observations not normalized": {"normalize_observations": False},
    "rewards not normalized": {"normalize_rewards": False},
}
# Reason for each detail, for the table of the page.
REASONS = {
    "ratio not clipped": "limits the size of a policy update",
    "one epoch": (
        "instead of 10 and 4; reuses rows while the policy is still close to the "
        "policy that collected them"
    ),
    "advantages not normalized": "makes the learning rate independent of reward scale",
    "rewards not normalized": "keeps errors of the critic near 1",
    "observations not normalized": "keeps inputs near 1; in Pendulum they are near 1",
    "flax's own initialization": "small last layers give a policy that explores",
    "constant learning rate": "makes the last steps small",
    "gradients not clipped": "limits the effect of a single minibatch",
    "no entropy bonus": "keeps the policy random for longer",
    "values clipped at 0.2": "disabled by default: `clip_range_vf` is infinite",
}


def load(detail: str = "as it is") -> Any:
    """Loads `ppo.py` with one changed detail."""
    source, change = SOURCE.read_text(), DETAILS[detail]
    if isinstance(change, tuple):
        assert source.count(change[0]) == 1
        source = source.replace(*change)
    module = types.ModuleType("ppo")
    exec(compile(source, str(SOURCE), "exec"), module.__dict__)
    return module


def make_robot(env_id: str) -> Any:
    """Creates a Gymnasium environment with clipped actions, in a worker process."""
    import gymnasium

    return gymnasium.wrappers.ClipAction(gymnasium.make(env_id))


def make_env(
    env_id: str, config: recipes.PPOSettings, *, normalize_rewards: bool = True
) -> Any:
    """Creates the environments of a task; normalizes rewards of continuous tasks."""
    if env_id.endswith("-v5"):
        makers = [functools.partial(make_robot, env_id)] * config.num_envs
        workers = envs.make_worker_envs(makers, num_workers=2)
        if not normalize_rewards:
            return workers
        return envs.NormalizeHostEnv(workers, gamma=config.gamma, only=())
    return recipes.make_lanes(env_id, config, normalize_rewards=normalize_rewards)


def run(name: str, seed: int, programs: dict[str, Any]) -> dict[str, Any]:
    """Trains and evaluates one seed."""
    env_id, _, detail = name.partition(", ")
    module, settings = load(detail or "as it is"), dict(TASKS[env_id])
    change = DETAILS[detail or "as it is"]
    settings.update(change if isinstance(change, dict) else {})
    normalize_rewards = settings.pop("normalize_rewards", True)
    config, key = recipes.PPOSettings(**settings), jax.random.key(seed)
    env = make_env(env_id, config, normalize_rewards=normalize_rewards)
    agent = module.PPO(env, config)
    if env_id.endswith("-v5"):
        start = time.process_time() + worker_seconds()
        state, metrics = agent.train(agent.init(key))
        seconds = time.process_time() + worker_seconds() - start
        agent = agent.replace(env=make_env(env_id, config))
    else:
        if name not in programs:
            train = jax.jit(lambda key: agent.train(agent.init(key)))
            programs[name] = train.lower(key).compile()
        start = time.process_time()
        state, metrics = jax.block_until_ready(programs[name](key))
        seconds = time.process_time() - start
    stats = evaluate(agent.collector, seed, state.params)
    print(f"{name}, seed {seed}: {stats}, {seconds:.1f} s", flush=True)
    stride = max(1, config.num_updates // 100)
    curve = np.asarray(metrics["return_mean"], float)[::stride]
    steps = agent.env_steps(np.arange(1, config.num_updates + 1))[::stride]
    return {
        "return": float(stats.returns.mean),
        "seconds": seconds,
        "steps": steps.tolist(),
        "curve": [None if np.isnan(x) else round(x, 2) for x in curve.tolist()],
    }


def evaluate(collector: Any, seed: int, params: Any) -> rollout.stats.CollectStats:
    """Evaluates parameters in 1,000 episodes, or in 100 episodes of a robot."""
    is_robot = collector.env.action_space.shape not in ((), (1,))
    num = 100 if is_robot else 1000
    return rollout.evaluate(collector, params, jax.random.key(1000 + seed), num)


def worker_seconds() -> float:
    """Returns the CPU seconds of all live worker processes."""
    import psutil

    times = [x.cpu_times() for x in psutil.Process().children(recursive=True)]
    return sum(x.user + x.system for x in times)


def run_peer(env_id: str, seed: int, programs: dict[str, Any], folder: Path) -> Any:
    """Trains and evaluates PureJaxRL's script with the same settings."""
    config = recipes.PPOSettings(**TASKS[env_id])
    if env_id not in programs:
        learner = purejaxrl.make_learner(env_id, config, folder)
        lowered = jax.jit(learner.train).lower(jax.random.key(0))
        programs[env_id] = learner, lowered.compile()
    learner, train = programs[env_id]
    start = time.process_time()
    params = learner.params(jax.block_until_ready(train(jax.random.key(seed))))
    seconds = time.process_time() - start
    env = make_env(env_id, config, normalize_rewards=False)
    policy = rollout.stateless_policy(learner.act)
    collector = rollout.Collector(env=env, policy=policy)
    stats = evaluate(collector, seed, params)
    print(f"PureJaxRL, {env_id}, seed {seed}: {stats}, {seconds:.1f} s", flush=True)
    return {"return": float(stats.returns.mean), "seconds": seconds}


def is_changed(env_id: str, detail: str) -> bool:
    """Returns whether a changed detail affects the training of a task."""
    change = DETAILS[detail]
    if not isinstance(change, dict):
        return True
    settings = {**dataclasses.asdict(recipes.PPOSettings()), **TASKS[env_id]}
    if "normalize_rewards" in change:  # `make_lanes` normalizes continuous tasks
        return settings["normalize_observations"]
    return any(settings[x] != y for x, y in change.items())


def main() -> None:
    """Runs all tasks and seeds for which the file has no values."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeat", action="store_true", help="also runs in the file")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--purejaxrl", type=Path)
    args = parser.parse_args()
    names, runs = args.tasks, []
    if args.details:
        names = [f"{x}, {y}" for x in args.tasks for y in DETAILS if is_changed(x, y)]
    makers = {name: functools.partial(run, name) for name in names}
    if args.purejaxrl and not args.details:
        for name in args.tasks:
            if name.startswith("brax:"):  # `learning.json` contains the other tasks
                peer = functools.partial(run_peer, name, folder=args.purejaxrl)
                makers[f"PureJaxRL, {name}"] = peer
    for name, make in makers.items():
        programs: dict[str, Any] = {}
        for seed in range(args.seeds):
            fn = functools.partial(make, seed=seed, programs=programs)
            runs.append(((name, str(seed)), fn))
    complete(args.file, runs, args.repeat)


if __name__ == "__main__":
    main()

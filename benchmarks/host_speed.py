"""How fast experience comes from environments that are not JAX.

A small MLP; what is compared is run in turn, and ratios are of medians:

- MuJoCo and Atari by Gymnasium, where they are installed: a plain loop (a jitted
  policy, nothing stored) over `SyncVectorEnv` and over `AsyncVectorEnv`, which has a
  process for each environment, against `HostCollector` in this process and with two
  workers;
- 16 CartPoles, and EnvPool where it is installed: likewise, in this process;
- eight workers that are slow, in step and asynchronously;
- other libraries, each in an environment of its own, as `host_peers.py` says:

    pip install ".[mujoco]" ale-py opencv-python-headless
    python benchmarks/host_speed.py
    python benchmarks/host_speed.py --tables "other libraries" \\
        --peers tianshou=/path/to/its/python
"""

import functools
import importlib.util
import json
import statistics
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from harness import Program, measure, run

import rollout
from rollout import envs
from rollout.distributions import ActionDistribution
from rollout.recipes import ppo

NUM_ENVS, ROWS, CALLS = 16, 125, 4
LATENCY = 0.005  # s, on average
DISABLED = {"copy": False, "autoreset_mode": AutoresetMode.DISABLED}
MakeEnv = Callable[[], gymnasium.Env]
make_cartpole = functools.partial(gymnasium.make, "CartPole-v1")


class SeededOnce(gymnasium.Wrapper):
    """Takes the first seed only: ALE loads its game anew for each, 0.1 s long."""

    is_seeded = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        """Starts an episode."""
        seed, self.is_seeded = None if self.is_seeded else seed, True
        return self.env.reset(seed=seed, options=options)


def make_breakout() -> gymnasium.Env:
    """Makes Atari's Breakout with the usual wrappers: four frames a step, 84 x 84."""
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Breakout-v5", frameskip=1)
    return SeededOnce(gymnasium.wrappers.AtariPreprocessing(env))


# What each needs, how one is made, and how many of them.
TASKS: dict[str, tuple[str, MakeEnv, int]] = {
    "`HalfCheetah-v5` x 8": (
        "mujoco",
        functools.partial(gymnasium.make, "HalfCheetah-v5"),
        8,
    ),
    "`Ant-v5` x 16": ("mujoco", functools.partial(gymnasium.make, "Ant-v5"), 16),
    "`ALE/Breakout-v5` x 8": ("ale_py", make_breakout, 8),
}


class Slow(gymnasium.Env):
    """Takes its time: exponentially distributed, for every step anew."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        """Starts an episode."""
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple:
        """Takes a step."""
        time.sleep(self.np_random.exponential(LATENCY))
        return np.zeros(4, np.float32), 1.0, False, False, {}


class Network:
    """An MLP with two layers of 64 for an environment, and its parameters."""

    def __init__(self, make: MakeEnv) -> None:
        env = make()
        size = int(np.prod(env.observation_space.shape))
        self.distribution = ActionDistribution(env.action_space)
        obs_space = envs.Box(-np.inf, np.inf, (size,))
        self.module = ppo.ActorCritic(self.distribution, obs_space, (64, 64), "tanh")
        self.params = self.module.init(jax.random.key(0), jnp.zeros((1, size)))
        env.close()

    def act(self, params: Any, obs: jax.Array, key: jax.Array) -> tuple:
        """Samples actions, and computes their log-probabilities."""
        outputs, _ = self.module.apply(params, obs.reshape(len(obs), -1))
        raw_action = self.distribution.sample(outputs, key)
        log_prob = self.distribution.log_prob(outputs, raw_action)
        return self.distribution.postprocess(raw_action), {"log_prob": log_prob}

    def plain_loop(self, env: Any, *, resets: bool) -> Program:
        """A loop that steps a vector environment of Gymnasium, and keeps nothing."""

        @jax.jit
        def choose(params: Any, obs: Any, key: jax.Array) -> tuple:
            key, policy_key = jax.random.split(key)
            return self.act(params, obs, policy_key)[0], key

        obs, key = env.reset()[0], jax.random.key(0)

        def program() -> None:
            nonlocal obs, key
            for _ in range(ROWS):
                action, key = choose(self.params, obs, key)
                obs, _, terminated, truncated, _ = env.step(np.asarray(action))
                done = terminated | truncated
                if resets and done.any():
                    obs = env.reset(options={"reset_mask": done})[0]

        return program

    def collector(self, env: Any, **options: Any) -> rollout.HostCollector:
        """A `HostCollector` over environments of ours."""
        policy = rollout.stateless_policy(self.act)
        return rollout.HostCollector(env=env, policy=policy, **options)

    def collect(self, made: rollout.HostCollector, num_rows: int = ROWS) -> Program:
        """Calls `collect_steps`."""
        carry = made.init(jax.random.key(0))

        def program() -> Any:
            nonlocal carry
            carry, rows = made.collect_steps(carry, self.params, num_rows)
            return rows

        return program


def numpy() -> VectorEnv:
    """Gymnasium's CartPole that is vectorized itself."""
    kind = "vector_entry_point"
    return gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode=kind)


def time_loops(
    environments: str, programs: dict[str, Program], repeats: int
) -> Iterator[dict[str, str]]:
    """Times loops over the same environments; the first one is the plain one."""
    taken = measure(programs, repeats, calls=CALLS)
    plain, other = taken[next(iter(programs))], taken.get("plain, `AsyncVectorEnv`")
    for loop, timing in taken.items():
        over_other = f"{other.wall / timing.wall:.2f}" if other else ""
        yield {
            "environments": environments,
            "loop": loop,
            "us per row": f"{1e6 * timing.wall / ROWS:.0f}",
            "speed / plain loop": f"{plain.wall / timing.wall:.2f}",
            "speed / `AsyncVectorEnv`": over_other,
        }


def task_rows(
    environments: str, make: MakeEnv, num_envs: int, repeats: int
) -> Iterator[dict[str, str]]:
    """Times every loop over environments of Gymnasium, in processes as well."""
    network, every = Network(make), [make] * num_envs
    # A fork of a process that runs jax may block for ever.
    apart = AsyncVectorEnv(every, context="forkserver", **DISABLED)
    sync = SyncVectorEnv(every, **DISABLED)
    local = network.collector(envs.from_gymnasium(make, num_envs))
    workers = network.collector(envs.make_worker_envs(every, 2))
    programs = {
        "plain, `SyncVectorEnv`": network.plain_loop(sync, resets=True),
        "plain, `AsyncVectorEnv`": network.plain_loop(apart, resets=True),
        "`from_gymnasium`, in this process": network.collect(local),
        "`make_worker_envs`, two processes": network.collect(workers),
    }
    yield from time_loops(environments, programs, repeats)
    for opened in (apart, sync, local, workers):
        opened.close()


def loop_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times `HostCollector` against plain loops over the same environments."""
    for environments, (package, make, num_envs) in TASKS.items():
        if importlib.util.find_spec(package):
            yield from task_rows(environments, make, num_envs, args.repeats)
    network = Network(make_cartpole)
    host = lambda env: network.collect(network.collector(env))  # noqa: E731
    sync = functools.partial(SyncVectorEnv, [make_cartpole] * NUM_ENVS, **DISABLED)
    cartpoles = {
        "one array": {
            "plain": network.plain_loop(numpy(), resets=False),
            "`HostCollector`": host(envs.from_gymnasium(numpy())),
        },
        "`SyncVectorEnv`": {
            "plain": network.plain_loop(sync(), resets=True),
            "`HostCollector`": host(envs.from_gymnasium(sync())),
            "`HostCollector`, `from_gymnasium`": host(
                envs.from_gymnasium("CartPole-v1", NUM_ENVS)
            ),
        },
    }
    if importlib.util.find_spec("envpool"):
        import envpool

        pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=NUM_ENVS)
        cartpoles["EnvPool"] = {
            "plain": network.plain_loop(pool, resets=False),
            "`HostCollector`": host(envs.from_envpool("CartPole-v1", NUM_ENVS)),
        }
    for kind, programs in cartpoles.items():
        environments = f"`CartPole-v1` x {NUM_ENVS}, {kind}"
        yield from time_loops(environments, programs, args.repeats)


def waiting_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Eight workers that are slow: all of them in a row, or those that are ready."""
    network = Network(Slow)
    made = {
        num_ready: network.collector(
            envs.make_worker_envs([Slow] * 8, 8),
            num_ready=None if num_ready == 8 else num_ready,
        )
        for num_ready in (8, 4, 2, 1)
    }
    # 400 steps each.
    programs = {x: network.collect(y, 400 // x) for x, y in made.items()}
    taken = measure(programs, args.repeats)
    print(f"\nall in step: {400 / taken[8].wall:.0f} steps/s")
    for num_ready in (4, 2, 1):
        ratio = taken[8].wall / taken[num_ready].wall
        yield {
            "ready": f"{num_ready}",
            "steps, `num_ready` / all in step": f"{ratio:.2f}",
        }
    for collector in made.values():
        collector.close()


def peer_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times each library by its script, in turn with `HostCollector`.

    The same environments, and those that Gymnasium steps as one array.
    """
    network = Network(make_cartpole)
    ours = {
        "`HostCollector`": envs.from_gymnasium("CartPole-v1", NUM_ENVS),
        "one array": envs.from_gymnasium(numpy()),
    }
    programs = {x: network.collect(network.collector(y)) for x, y in ours.items()}
    rates: dict[str, list[float]] = {}
    script = str(Path(__file__).with_name("host_peers.py"))
    for _ in range(args.repeats):
        for name, timing in measure(programs, 1, calls=10).items():
            rates.setdefault(name, []).append(ROWS * NUM_ENVS / timing.wall)
        for peer in filter(None, args.peers):
            name, _, python = peer.partition("=")
            out = subprocess.check_output([python, script, name, "--repeats", "1"])
            told = json.loads(out.splitlines()[-1])
            name = f"{told['library']} {told['version']}"
            rates.setdefault(name, []).append(told["steps_per_second"])
    rate = {name: statistics.median(values) for name, values in rates.items()}
    same, array = rate["`HostCollector`"], rate.pop("one array")
    for name, middle in rate.items():
        yield {
            "library": name,
            "steps/s": f"{middle:,.0f}",
            "`HostCollector`, same environments / library": f"{same / middle:.1f}",
            "`HostCollector`, one array / library": f"{array / middle:.1f}",
        }


if __name__ == "__main__":
    tables = {
        "environments that are not JAX": loop_rows,
        "workers that are slow": waiting_rows,
        "other libraries": peer_rows,
    }
    run(__doc__, 9, tables, peers=("",))

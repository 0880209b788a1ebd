"""How fast is collection from host environments?

The policy is a small MLP. Runs are interleaved, and ratios are ratios of medians:

- MuJoCo and Atari of Gymnasium, if installed: a plain loop (a jitted policy, nothing
  stored) over `SyncVectorEnv` and over `AsyncVectorEnv`, which starts one process per
  environment, against `HostCollector` in this process and with two workers;
- 16 CartPoles, also of EnvPool if it is installed: the same comparison in this process;
- eight slow workers, synchronous and asynchronous.

    pip install ".[mujoco]" ale-py opencv-python-headless
    python benchmarks/host_speed.py
"""

import functools
import importlib.util
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
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
    """Ignores all seeds except the first: ALE loads the game for every seed (0.1 s)."""

    is_seeded = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        """Resets the environment."""
        seed, self.is_seeded = None if self.is_seeded else seed, True
        return self.env.reset(seed=seed, options=options)


def make_breakout() -> gymnasium.Env:
    """Creates Atari's Breakout with four frames per step and 84 x 84 observations."""
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Breakout-v5", frameskip=1)
    return SeededOnce(gymnasium.wrappers.AtariPreprocessing(env))


# Required package, function that makes one environment, number of environments.
TASKS: dict[str, tuple[str, MakeEnv, int]] = {
    "`HalfCheetah-v5` x 8": (
        "mujoco",
        functools.partial(gymnasium.make, "HalfCheetah-v5"),
        8,
    ),
    "`Ant-v5` x 16": ("mujoco", functools.partial(gymnasium.make, "Ant-v5"), 16),
    "`ALE/Breakout-v5` x 8": ("ale_py", make_breakout, 8),
}


class SlowEnv(gymnasium.Env):
    """An environment with exponentially distributed step times."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        """Resets the environment."""
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple:
        """Sleeps, then returns a reward of 1."""
        time.sleep(self.np_random.exponential(LATENCY))
        return np.zeros(4, np.float32), 1.0, False, False, {}


class Network:
    """An MLP policy with two layers of 64, and its parameters."""

    def __init__(self, make: MakeEnv) -> None:
        env = make()
        size = int(np.prod(env.observation_space.shape or ()))
        self.distribution = ActionDistribution(env.action_space)
        obs_space = envs.Box(-np.inf, np.inf, (size,))
        self.module = ppo.ActorCritic(self.distribution, obs_space, (64, 64), "tanh")
        self.params = self.module.init(jax.random.key(0), jnp.zeros((1, size)))
        env.close()

    def act(self, params: Any, obs: jax.Array, key: jax.Array) -> tuple:
        """Samples actions and computes their log-probabilities."""
        outputs, _ = self.module.apply(params, obs.reshape(len(obs), -1))
        raw_action = self.distribution.sample(outputs, key)
        log_prob = self.distribution.log_prob(outputs, raw_action)
        return self.distribution.postprocess(raw_action), {"log_prob": log_prob}

    def plain_loop(self, env: Any, *, resets: bool) -> Program:
        """Creates a loop over a vector environment of Gymnasium that stores nothing."""

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
        """Creates a `HostCollector` over vectorized host environments."""
        policy = rollout.stateless_policy(self.act)
        return rollout.HostCollector(env=env, policy=policy, **options)

    def collect(self, host: rollout.HostCollector, num_rows: int = ROWS) -> Program:
        """Creates a program that calls `collect_steps` and continues from its carry."""
        carry = host.init(jax.random.key(0))

        def program() -> Any:
            nonlocal carry
            carry, rows = host.collect_steps(carry, self.params, num_rows)
            return rows

        return program


def numpy_cartpole() -> VectorEnv:
    """Creates Gymnasium's CartPole that steps all environments as one NumPy array."""
    mode = "vector_entry_point"
    return gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode=mode)


def time_loops(
    environments: str, programs: dict[str, Program], repeats: int
) -> Iterator[dict[str, str]]:
    """Times loops over the same environments; the first loop is the plain loop."""
    times = measure(programs, repeats, calls=CALLS)
    plain, peer = times[next(iter(programs))], times.get("plain, `AsyncVectorEnv`")
    for loop, timing in times.items():
        ratio = f"{peer.wall / timing.wall:.2f}" if peer else ""
        yield {
            "environments": environments,
            "loop": loop,
            "us per row": f"{1e6 * timing.wall / ROWS:.0f}",
            "speed / plain loop": f"{plain.wall / timing.wall:.2f}",
            "speed / `AsyncVectorEnv`": ratio,
        }


def task_rows(
    environments: str, make: MakeEnv, num_envs: int, repeats: int
) -> Iterator[dict[str, str]]:
    """Times every loop over Gymnasium environments, with and without processes."""
    network, env_fns = Network(make), [make] * num_envs
    # Forking a process that runs JAX can deadlock.
    async_env = AsyncVectorEnv(env_fns, context="forkserver", **DISABLED)
    sync = SyncVectorEnv(env_fns, **DISABLED)
    local = network.collector(envs.from_gymnasium(make, num_envs))
    workers = network.collector(envs.make_worker_envs(env_fns, 2))
    programs = {
        "plain, `SyncVectorEnv`": network.plain_loop(sync, resets=True),
        "plain, `AsyncVectorEnv`": network.plain_loop(async_env, resets=True),
        "`from_gymnasium`, in this process": network.collect(local),
        "`make_worker_envs`, two processes": network.collect(workers),
    }
    yield from time_loops(environments, programs, repeats)
    for env in (async_env, sync, local, workers):
        env.close()


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
            "plain": network.plain_loop(numpy_cartpole(), resets=False),
            "`HostCollector`": host(envs.from_gymnasium(numpy_cartpole())),
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
    for group, programs in cartpoles.items():
        environments = f"`CartPole-v1` x {NUM_ENVS}, {group}"
        yield from time_loops(environments, programs, args.repeats)


def waiting_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times eight slow workers: rows of all workers, or of `num_ready` workers."""
    network = Network(SlowEnv)
    collectors = {
        num_ready: network.collector(
            envs.make_worker_envs([SlowEnv] * 8, 8),
            num_ready=None if num_ready == 8 else num_ready,
        )
        for num_ready in (8, 4, 2, 1)
    }
    # Every program collects 400 steps.
    programs = {x: network.collect(y, 400 // x) for x, y in collectors.items()}
    timing = measure(programs, args.repeats)
    print(f"\nall in step: {400 / timing[8].wall:.0f} steps/s")
    for num_ready in (4, 2, 1):
        ratio = timing[8].wall / timing[num_ready].wall
        yield {
            "ready": f"{num_ready}",
            "steps, `num_ready` / all in step": f"{ratio:.2f}",
        }
    for collector in collectors.values():
        collector.close()


if __name__ == "__main__":
    tables = {
        "environments that are not JAX": loop_rows,
        "workers that are slow": waiting_rows,
    }
    run(__doc__, 9, tables)

"""How fast experience comes from environments that are not JAX.

16 CartPoles of Gymnasium and a small MLP, in one process; what is compared is run in
turn, and ratios are of medians:

- environments alone: Gymnasium's vector environments, ours in this process, workers;
- a plain loop (a jitted policy, nothing stored) against `HostCollector` over the same;
- eight workers that are slow, in step and asynchronously;
- EnvPool, where it is installed, against a loop around it;
- other libraries, each in an environment of its own, whose script says what to install:

    python tests/benchmarks/host_speed.py
    python tests/benchmarks/host_speed.py --peer tianshou=/path/to/its/python
"""

import argparse
import functools
import importlib.util
import itertools
import json
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from machine import machine

import rollout
from rollout import envs

NUM_ENVS, ROWS = 16, 125
EVERY, SEEDS = np.ones(NUM_ENVS, bool), list(range(NUM_ENVS))
MAKE = functools.partial(gymnasium.make, "CartPole-v1")
LATENCY = 0.005  # s, on average


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


def make_params() -> list[jax.Array]:
    """The weights of an MLP, 4-64-64-2."""
    sizes, keys = (4, 64, 64, 2), jax.random.split(jax.random.key(0), 3)
    pairs = itertools.pairwise(sizes)
    return [
        jax.random.normal(key, pair) / pair[0] ** 0.5
        for key, pair in zip(keys, pairs, strict=True)
    ]


def act(params: list[jax.Array], obs: jax.Array, key: jax.Array) -> tuple:
    """Draws actions, and says how likely they were."""
    for weights in params[:-1]:
        obs = jnp.tanh(obs @ weights)
    log_probs = jax.nn.log_softmax(obs @ params[-1])
    action = jax.random.categorical(key, log_probs)
    return action, {"log_prob": log_probs[jnp.arange(len(action)), action]}


POLICY, PARAMS = rollout.stateless_policy(act), make_params()


def sync() -> SyncVectorEnv:
    """Gymnasium's environments one after the other."""
    return SyncVectorEnv(
        [MAKE] * NUM_ENVS, copy=False, autoreset_mode=AutoresetMode.DISABLED
    )


def numpy() -> gymnasium.vector.VectorEnv:
    """Gymnasium's CartPole that is vectorized itself."""
    kind = "vector_entry_point"
    return gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode=kind)


def plain_loop(env: Any, *, resets: bool, seeds: bool = False) -> Callable[[int], None]:
    """A loop that steps a vector environment of Gymnasium, and keeps nothing.

    With `seeds` every episode has a seed of its own, as `HostCollector` does it.
    """

    @jax.jit
    def choose(params: Any, obs: Any, key: jax.Array) -> tuple:
        key, policy_key = jax.random.split(key)
        return act(params, obs, policy_key)[0], key

    obs, key = env.reset(seed=0)[0], jax.random.key(0)

    def run(num_steps: int) -> None:
        nonlocal obs, key
        for _ in range(num_steps):
            action, key = choose(PARAMS, obs, key)
            obs, _, terminated, truncated, _ = env.step(np.asarray(action))
            done = terminated | truncated
            if resets and done.any():
                seed = SEEDS if seeds else None
                obs = env.reset(seed=seed, options={"reset_mask": done})[0]

    return run


def alone(env: envs.HostVectorEnv) -> Callable[[int], None]:
    """Steps environments of ours with random actions."""
    env.reset(np.arange(NUM_ENVS, dtype=np.uint32), EVERY)
    actions = np.random.default_rng(0).integers(0, 2, (ROWS, NUM_ENVS), np.int32)

    def run(num_steps: int) -> None:
        for row in range(num_steps):
            step = env.step(actions[row % ROWS])
            done = step.terminated | step.truncated
            if done.any():
                env.reset(np.full(NUM_ENVS, row, np.uint32), done)

    return run


def collector(made: rollout.HostCollector) -> Callable[[int], None]:
    """Calls `collect_steps`."""
    carry = made.init(jax.random.key(0))

    def run(num_steps: int) -> None:
        nonlocal carry
        for _ in range(num_steps // ROWS):
            carry, rows = made.collect_steps(carry, PARAMS, ROWS)
        jax.block_until_ready(rows)

    return run


def host(env: Any) -> Callable[[int], None]:
    """A `HostCollector` over environments of ours."""
    return collector(rollout.HostCollector(env=env, policy=POLICY))


def compare(
    title: str, runs: dict[str, Callable[[int], None]], repeats: int, size: int = 4
) -> None:
    """Prints steps per second of each, and how they are to the first one."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        names = np.random.default_rng(repeat).permutation(list(runs))
        for name in names:
            start = time.perf_counter()
            runs[name](size * ROWS)
            if repeat:  # the first one compiles
                seconds[name].append((time.perf_counter() - start) / (size * ROWS))
    print(f"\n{title}\n{'':26} {'us/row':>8} {'steps/s':>9} {'ratio':>6}")
    first = statistics.median(next(iter(seconds.values())))
    for name, times in seconds.items():
        middle = statistics.median(times)
        rate, ratio = NUM_ENVS / middle, first / middle
        print(f"{name:26} {1e6 * middle:8.0f} {rate:9,.0f} {ratio:6.2f}")


def compare_waiting(repeats: int) -> None:
    """Eight workers that are slow: all of them in a row, or those that are ready."""
    made, rates = {}, {}
    for num_ready in (None, 4, 2, 1):
        env = envs.workers([Slow] * 8, num_workers=8)
        options = {"env": env, "policy": POLICY}
        if num_ready is None:
            made["all in step"] = rollout.HostCollector(**options), 8
        else:
            options |= {"num_ready": num_ready}
            made[f"{num_ready} ready"] = rollout.HostCollector(**options), num_ready
    carries = {name: each.init(jax.random.key(0)) for name, (each, _) in made.items()}
    for repeat in range(repeats + 1):
        for name, (each, columns) in made.items():
            start = time.perf_counter()
            rows = 400 // columns
            carries[name], _ = each.collect_steps(carries[name], PARAMS, rows)
            rate = rows * columns / (time.perf_counter() - start)
            rates.setdefault(name, []).extend([rate] if repeat else [])
    print(f"\n8 workers, exponential latency of {1e3 * LATENCY:g} ms")
    first = statistics.median(rates["all in step"])
    for name, values in rates.items():
        middle = statistics.median(values)
        print(f"{name:26} {middle:9,.0f} steps/s {middle / first:6.2f}")
    for each, _ in made.values():
        each.close()


def compare_envpool(repeats: int) -> None:
    """EnvPool in a loop of its own, and collected from."""
    import envpool

    options = {"env_type": "gymnasium", "num_envs": NUM_ENVS}

    class Pool:
        """EnvPool takes no seed when it is reset."""

        def __init__(self) -> None:
            self.pool = envpool.make("CartPole-v1", **options)
            self.step = self.pool.step

        def reset(self, seed: int) -> tuple:
            return self.pool.reset()

    runs = {
        "EnvPool, a plain loop": plain_loop(Pool(), resets=False),
        "EnvPool, HostCollector": host(envs.from_envpool("CartPole-v1", NUM_ENVS)),
    }
    compare("EnvPool", runs, repeats)


def compare_peers(peers: dict[str, str], repeats: int) -> None:
    """Each library by its script, in turn with `HostCollector`.

    The same environments, and those that Gymnasium steps as one array.
    """
    ours = {
        "HostCollector": host(envs.from_gymnasium("CartPole-v1", NUM_ENVS)),
        "HostCollector, numpy": host(envs.from_gymnasium(numpy())),
    }
    rates: dict[str, list[float]] = {x: [] for x in (*ours, *peers)}
    versions = {}
    for run in ours.values():
        run(ROWS)  # compiles
    for _ in range(repeats):
        for name, run in ours.items():
            start = time.perf_counter()
            run(20_000 // NUM_ENVS)
            rates[name].append(20_000 / (time.perf_counter() - start))
        for name, told in run_peers(peers):
            rates[name].append(told["steps_per_second"])
            versions[name] = told["version"]
    middles = {name: statistics.median(values) for name, values in rates.items()}
    print(f"\n{'':26} {'steps/s':>9}  HostCollector, numpy")
    for name, middle in middles.items():
        what = f"{name} {versions.get(name, '')}"
        factors = [f"{middles[x] / middle:11.1f}x" for x in ours]
        print(f"{what:26} {middle:9,.0f} {''.join(factors)}")


def run_peers(peers: dict[str, str]) -> Iterator[tuple[str, dict]]:
    """Runs the script of each with its interpreter."""
    folder = pathlib.Path(__file__).parent / "peers"
    for name, python in peers.items():
        command = [python, str(folder / f"{name}_speed.py"), "--repeats", "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        yield name, json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    args = parser.parse_args()
    print(machine())
    print(f"gymnasium {gymnasium.__version__}, {NUM_ENVS} CartPoles")
    if args.peer:
        peers = dict(each.split("=", 1) for each in args.peer)
        compare_peers(peers, args.repeats)
        return
    runs = {
        "Gymnasium, numpy": alone(envs.from_gymnasium(numpy())),
        "Gymnasium, sync": alone(envs.from_gymnasium(sync())),
        "ours, in this process": alone(envs.from_gymnasium("CartPole-v1", NUM_ENVS)),
        "ours, 2 workers": alone(envs.workers([MAKE] * NUM_ENVS, 2)),
    }
    compare("environments alone", runs, args.repeats)
    pairs = {
        "Gymnasium, numpy": (numpy, False),
        "Gymnasium, sync": (sync, True),
    }
    for name, (make, resets) in pairs.items():
        runs = {
            "plain loop": plain_loop(make(), resets=resets),
            "HostCollector": host(envs.from_gymnasium(make())),
        }
        if resets:
            runs["plain loop, seeds"] = plain_loop(make(), resets=True, seeds=True)
            local = envs.from_gymnasium("CartPole-v1", NUM_ENVS)
            runs["HostCollector, ours"] = host(local)
        compare(f"with a policy: {name}", runs, args.repeats)
    compare_waiting(args.repeats)
    if importlib.util.find_spec("envpool"):
        compare_envpool(args.repeats)


if __name__ == "__main__":
    main()

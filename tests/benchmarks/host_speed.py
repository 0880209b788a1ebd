"""How fast experience comes from environments that are not JAX.

16 CartPoles of Gymnasium and a small MLP, in one process; what is compared is run in
turn, and ratios are of medians:

- environments alone: Gymnasium's vector environments, ours in this process, workers;
- a plain loop (a jitted policy, nothing stored) against `HostCollector` over the same;
- eight workers that are slow, in step and asynchronously;
- EnvPool, where it is installed, against a loop around it;
- other libraries, each in an environment of its own, as `host_peers.py` says:

    python tests/benchmarks/host_speed.py
    python tests/benchmarks/host_speed.py --peers tianshou=/path/to/its/python
"""

import functools
import importlib.util
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from harness import Program, arguments, measure, report

import rollout
from rollout import envs

NUM_ENVS, ROWS, CALLS = 16, 125, 4
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


def plain_loop(env: Any, *, resets: bool, seeds: bool = False) -> Program:
    """A loop that steps a vector environment of Gymnasium, and keeps nothing.

    With `seeds` every episode has a seed of its own, as `HostCollector` does it.
    """

    @jax.jit
    def choose(params: Any, obs: Any, key: jax.Array) -> tuple:
        key, policy_key = jax.random.split(key)
        return act(params, obs, policy_key)[0], key

    obs, key = env.reset(seed=0)[0], jax.random.key(0)

    def run() -> None:
        nonlocal obs, key
        for _ in range(ROWS):
            action, key = choose(PARAMS, obs, key)
            obs, _, terminated, truncated, _ = env.step(np.asarray(action))
            done = terminated | truncated
            if resets and done.any():
                seed = SEEDS if seeds else None
                obs = env.reset(seed=seed, options={"reset_mask": done})[0]

    return run


def alone(env: envs.HostVectorEnv) -> Program:
    """Steps environments of ours with random actions."""
    env.reset(np.arange(NUM_ENVS, dtype=np.uint32), EVERY)
    actions = np.random.default_rng(0).integers(0, 2, (ROWS, NUM_ENVS), np.int32)

    def run() -> None:
        for row in range(ROWS):
            step = env.step(actions[row])
            done = step.terminated | step.truncated
            if done.any():
                env.reset(np.full(NUM_ENVS, row, np.uint32), done)

    return run


def collect(made: rollout.HostCollector, num_rows: int = ROWS) -> Program:
    """Calls `collect_steps`."""
    carry = made.init(jax.random.key(0))

    def run() -> Any:
        nonlocal carry
        carry, rows = made.collect_steps(carry, PARAMS, num_rows)
        return rows

    return run


def host(env: Any) -> Program:
    """A `HostCollector` over environments of ours."""
    return collect(rollout.HostCollector(env=env, policy=POLICY))


def envpool_loops() -> dict[str, Program]:
    """EnvPool in a loop of its own, and collected from."""
    import envpool

    class Pool:
        """EnvPool takes no seed when it is reset."""

        def __init__(self) -> None:
            options = {"env_type": "gymnasium", "num_envs": NUM_ENVS}
            self.pool = envpool.make("CartPole-v1", **options)
            self.step = self.pool.step

        def reset(self, seed: int) -> tuple:
            return self.pool.reset()

    ours = host(envs.from_envpool("CartPole-v1", NUM_ENVS))
    return {"plain": plain_loop(Pool(), resets=False), "`HostCollector`": ours}


def loop_rows(repeats: int) -> Iterator[dict[str, str]]:
    """Times `HostCollector` against a plain loop over the same environments."""
    local, one_array = 'from_gymnasium("CartPole-v1", 16)', "stepped as one array"
    kinds = {
        one_array: {
            "plain": plain_loop(numpy(), resets=False),
            "`HostCollector`": host(envs.from_gymnasium(numpy())),
        },
        "`SyncVectorEnv`": {
            "plain": plain_loop(sync(), resets=True),
            "plain, a seed for each episode": plain_loop(
                sync(), resets=True, seeds=True
            ),
            "`HostCollector`": host(envs.from_gymnasium(sync())),
            local: host(envs.from_gymnasium("CartPole-v1", NUM_ENVS)),
        },
    }
    if importlib.util.find_spec("envpool"):
        kinds["EnvPool"] = envpool_loops()
    for kind, programs in kinds.items():
        runs = [measure(programs, repeats, calls=CALLS) for _ in range(2)]
        for name in programs:
            us = [1e6 * run[name].wall / ROWS for run in runs]
            ratios = [run["plain"].wall / run[name].wall for run in runs]
            yield {
                "environments": f"`{local}`" if name == local else kind,
                "loop": "`HostCollector`" if name == local else name,
                "us per row, run 1": f"{us[0]:.0f}",
                "run 2": f"{us[1]:.0f}",
                "speed / plain loop, run 1": f"{ratios[0]:.2f}",
                "speed / plain loop, run 2": f"{ratios[1]:.2f}",
            }


def waiting_rows(repeats: int) -> Iterator[dict[str, str]]:
    """Eight workers that are slow: all of them in a row, or those that are ready."""
    made = {8: rollout.HostCollector(env=envs.workers([Slow] * 8, 8), policy=POLICY)}
    for num_ready in (4, 2, 1):
        options = {"env": envs.workers([Slow] * 8, 8), "policy": POLICY}
        made[num_ready] = rollout.HostCollector(**options, num_ready=num_ready)
    # 400 steps each.
    taken = measure({x: collect(y, 400 // x) for x, y in made.items()}, repeats)
    print(f"\nall in step: {400 / taken[8].wall:.0f} steps/s")
    for num_ready in (4, 2, 1):
        ratio = taken[8].wall / taken[num_ready].wall
        yield {
            "ready": f"{num_ready}",
            "steps, `num_ready` / all in step": f"{ratio:.2f}",
        }
    for collector in made.values():
        collector.close()


def peer_rows(peers: list[str], repeats: int) -> Iterator[dict[str, str]]:
    """Times each library by its script, in turn with `HostCollector`.

    The same environments, and those that Gymnasium steps as one array.
    """
    ours = {
        "`HostCollector`": host(envs.from_gymnasium("CartPole-v1", NUM_ENVS)),
        "one array": host(envs.from_gymnasium(numpy())),
    }
    for run in ours.values():
        run()  # compiles
    rates: dict[str, list[float]] = {}
    script = str(Path(__file__).with_name("host_peers.py"))
    for _ in range(repeats):
        for name, run in ours.items():
            start = time.perf_counter()
            for _ in range(10):
                run()
            rate = 10 * ROWS * NUM_ENVS / (time.perf_counter() - start)
            rates.setdefault(name, []).append(rate)
        for peer in peers:
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


def main() -> None:
    """Makes the tables."""
    args = arguments(__doc__, 9, peers=("",))
    if any(args.peers):
        return report(args, "other libraries", peer_rows(args.peers, args.repeats))
    programs = {
        "Gymnasium, numpy": alone(envs.from_gymnasium(numpy())),
        "Gymnasium, sync": alone(envs.from_gymnasium(sync())),
        "ours, in this process": alone(envs.from_gymnasium("CartPole-v1", NUM_ENVS)),
        "ours, 2 workers": alone(envs.workers([MAKE] * NUM_ENVS, 2)),
    }
    for name, taken in measure(programs, args.repeats, calls=CALLS).items():
        print(f"{name}: {1e6 * taken.wall / ROWS:.0f} us a row without a policy")
    report(args, "environments that are not JAX", loop_rows(args.repeats))
    report(args, "workers that are slow", waiting_rows(args.repeats))


if __name__ == "__main__":
    main()

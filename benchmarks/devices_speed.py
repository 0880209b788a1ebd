"""How much faster are lanes and agents on several CPU devices than on one?

The first table times `collect_steps` with every field returned, in interleaved runs in
one process:

- `plain`: the collector on one device;
- `one`: `rollout.shard` over one device;
- `two`: `rollout.shard` over two devices;
- `peer`: a hand-written `shard_map` over the same two devices. Each device runs the
  plain collector with half of the lanes and a separate key.

The second table reads the compiled program of an update of each agent: floating point
operations and temporary memory of a device relative to one device, and operations
between devices per gradient step. The third table times trainings of PPO.

    python benchmarks/devices_speed.py
    python benchmarks/devices_speed.py --envs CartPole-v1 --num-envs 4096
"""

import functools
import itertools
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
from gymnax_loops import POLICIES, Case, make_policy
from harness import Program, lanes, measure, run, steps
from jax.sharding import PartitionSpec

import rollout
from rollout import envs
from rollout.recipes import dqn, ppo, pqn, recurrent_ppo, sac, td3

ENVS = ("CartPole-v1", "Acrobot-v1", "Breakout-MinAtar")
NUM_ENVS = (128, 1024, 4096, 16384)
REPLAY: dict[str, Any] = {"buffer_size": 25_600, "batch_size": 960}
# XLA counts the operations of a loop once, so there is one microbatch of 960 rows.
ON_POLICY: dict[str, Any] = {"num_steps": 120, "num_minibatches": 32}
AGENTS = {
    "PPO": (ppo.PPO, ppo.Config(**ON_POLICY), "CartPole-v1"),
    "recurrent PPO": (
        recurrent_ppo.RecurrentPPO,
        recurrent_ppo.Config(num_minibatches=4),
        "CartPole-v1",
    ),
    "PQN": (pqn.PQN, pqn.Config(**ON_POLICY), "CartPole-v1"),
    "DQN": (dqn.DQN, dqn.Config(prioritized=False, **REPLAY), "CartPole-v1"),
    "SAC": (sac.SAC, sac.Config(num_steps=4, **REPLAY), "Pendulum-v1"),
    "TD3": (td3.TD3, td3.Config(num_steps=4, **REPLAY), "Pendulum-v1"),
}


def make_mesh(num_devices: int) -> jax.sharding.Mesh:
    """Creates a mesh of the first `num_devices` devices."""
    return jax.make_mesh(
        (num_devices,), ("lanes",), devices=jax.devices()[:num_devices]
    )


def make_programs(case: Case) -> dict[str, Program]:
    """Creates the four programs, each with a separate carry."""
    policy, init_params = make_policy(case)
    params = init_params(jax.random.key(1))
    plain = lanes(case.env_id, case.num_envs, policy)
    half = lanes(case.env_id, case.num_envs // 2, policy)
    collectors = {
        "plain": plain,
        "one": rollout.shard(plain, make_mesh(1)),
        "two": rollout.shard(plain, make_mesh(2)),
    }
    programs = {x: steps(y, case.num_steps, params) for x, y in collectors.items()}
    lane_spec = PartitionSpec("lanes")
    shard_map = functools.partial(jax.shard_map, mesh=make_mesh(2), check_vma=False)
    init = shard_map(
        lambda keys: jax.tree.map(lambda x: x[None], half.init(keys[0])),
        in_specs=lane_spec,
        out_specs=lane_spec,
    )
    collect = shard_map(
        lambda carry, params: half.collect_steps(
            jax.tree.map(lambda x: x[0], carry), params, case.num_steps
        )[1],
        in_specs=(lane_spec, PartitionSpec()),
        out_specs=PartitionSpec(None, "lanes"),
    )
    keys = jax.device_put(
        jax.random.split(jax.random.key(0), 2),
        jax.sharding.NamedSharding(make_mesh(2), lane_spec),
    )
    programs["peer"] = functools.partial(
        jax.jit(collect), jax.jit(init)(keys), jax.device_put(params)
    )
    return programs


def rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times each case."""
    for sizes in itertools.product(args.envs, args.policies, args.num_envs):
        env_id, policy, num_envs = sizes
        case = Case(env_id, num_envs, policy)
        timing = measure(make_programs(case), args.repeats)
        plain, single, double, peer = (
            timing[name].wall for name in ("plain", "one", "two", "peer")
        )
        yield {
            "environment": f"`{case.env_id}`",
            "policy": case.policy,
            "lanes": f"{case.num_envs:,}",
            "one device, M steps/s": (
                f"{case.num_envs * case.num_steps / plain / 1e6:.1f}"
            ),
            "two devices / one": f"{plain / double:.2f}",
            "`rollout` / `shard_map` by hand": f"{peer / double:.2f}",
            "`shard` over one device / no `shard`": f"{plain / single:.2f}",
        }


def agent_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Reads the compiled update of each agent with 256 lanes."""
    for name, (make_agent, config, env_id) in AGENTS.items():
        cost = {}
        for num_devices in (1, 2, 4, 8):
            mesh = make_mesh(num_devices)
            agent = make_agent(envs.make_vec(env_id, 256), config, mesh=mesh)
            state = agent.init(jax.random.key(0))
            program: Any = jax.jit(agent.update).lower(state).compile()
            memory = program.memory_analysis().temp_size_in_bytes
            cost[num_devices] = program.cost_analysis()["flops"], memory
            text = program.as_text()
        row = {"agent": name}
        for i, label in enumerate(("operations", "temporary memory")):
            for n in (2, 4, 8):
                row[f"{label}, {n} devices"] = f"{cost[n][i] / cost[1][i]:.3f}"
        yield row | count_collectives(text)


def count_collectives(text: str) -> dict[str, str]:
    """Counts the operations between devices of a compiled update."""
    counts = {"all-reduces per gradient step": 0, "all-reduces of single numbers": 0}
    moved = []
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    pattern = rf" = (.*) ({names})(?:-start)?\(.*op_name=\"([^\"]*)\""
    for shapes, kind, op_name in re.findall(pattern, text):
        if kind != "all-reduce":
            moved.append(f"{kind} {shapes.partition('{')[0]}")
        elif "while" in op_name:
            is_number = not re.search(r"\[\d", shapes)
            counts[[*counts][is_number]] += 1
    found = {name: f"{count}" for name, count in counts.items()}
    return found | {"other operations per update": ", ".join(moved)}


def training_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times updates of PPO in CartPole on one and on two devices."""
    for num_envs in (1024, 8192):
        programs = {}
        for num_devices in (1, 2):
            agent = ppo.PPO(
                envs.make_vec("CartPole-v1", num_envs),
                ppo.Config(num_updates=2),
                mesh=make_mesh(num_devices),
            )
            state = agent.init(jax.random.key(0))
            programs[f"{num_devices}"] = functools.partial(jax.jit(agent.train), state)
        one, two = measure(programs, min(args.repeats, 7)).values()
        yield {
            "lanes": f"{num_envs:,}",
            "update on one device, ms": f"{500 * one.wall:,.0f}",
            "update on two devices, ms": f"{500 * two.wall:,.0f}",
            "two devices / one": f"{one.wall / two.wall:.2f}",
        }


if __name__ == "__main__":
    options = {"envs": ENVS, "num_envs": NUM_ENVS, "policies": POLICIES}
    tables = {
        "several devices": rows,
        "agents on several devices": agent_rows,
        "training on two devices": training_rows,
    }
    run(__doc__, 25, tables, **options)

"""How much faster are lanes on two CPU devices than on one?

Times of one run of `collect_steps`, every field returned, in turns in one process:

- `plain`: the collector, on one device;
- `one`: `rollout.shard` over one device;
- `two`: `rollout.shard` over two;
- `peer`: by hand, a `shard_map` over the same two around the plain collector with half
  of the lanes and a key of its own for each device, so with other random numbers.

    python tests/benchmarks/devices_speed.py
    python tests/benchmarks/devices_speed.py --envs CartPole-v1 --num-envs 4096
"""

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
)

import jax
from jax.sharding import PartitionSpec
from machine import machine
from rollout_speed import Case, make_policy
from timing import measure

import rollout
from rollout import envs

ENVS = ("CartPole-v1", "Acrobot-v1", "Breakout-MinAtar")
NUM_ENVS = (128, 1024, 4096, 16384)
POLICIES = ("random", "mlp")
NUM_STEPS = 128


def make_collector(case: Case, num_envs: int) -> tuple[rollout.Collector, Any]:
    """Makes a collector of so many lanes, and the parameters of its policy."""
    env = envs.make_vec(case.env_id, num_envs)
    policy, params = make_policy(case)
    policy = policy or rollout.random_policy(env.action_space)
    return rollout.Collector(env=env, policy=policy), params


def make_mesh(num_devices: int) -> jax.sharding.Mesh:
    """Makes a mesh of the first devices."""
    return jax.make_mesh(
        (num_devices,), ("lanes",), devices=jax.devices()[:num_devices]
    )


def make_programs(case: Case) -> dict[str, Callable[[], Any]]:
    """Makes what is timed, each with a carry of its own."""
    plain, params = make_collector(case, case.num_envs)
    half, _ = make_collector(case, case.num_envs // 2)
    collectors = {
        "plain": plain,
        "one": rollout.shard(plain, make_mesh(1)),
        "two": rollout.shard(plain, make_mesh(2)),
    }
    programs = {}
    for name, collector in collectors.items():
        carry = collector.init(jax.random.key(0))
        args = carry, params, case.num_steps
        programs[name] = functools.partial(collector.collect_steps, *args)

    lanes = PartitionSpec("lanes")
    over = functools.partial(jax.shard_map, mesh=make_mesh(2), check_vma=False)
    init = over(
        lambda keys: jax.tree.map(lambda x: x[None], half.init(keys[0])),
        in_specs=lanes,
        out_specs=lanes,
    )
    take = over(
        lambda carry, params: half.collect_steps(
            jax.tree.map(lambda x: x[0], carry), params, case.num_steps
        )[1],
        in_specs=(lanes, PartitionSpec()),
        out_specs=PartitionSpec(None, "lanes"),
    )
    split = jax.device_put(
        jax.random.split(jax.random.key(0), 2),
        jax.sharding.NamedSharding(make_mesh(2), lanes),
    )
    programs["peer"] = functools.partial(
        jax.jit(take), jax.jit(init)(split), jax.device_put(params)
    )
    return programs


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--envs", nargs="*", default=ENVS)
    parser.add_argument("--num-envs", nargs="*", type=int, default=NUM_ENVS)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    print(f"{machine()}; {NUM_STEPS} steps, median of {args.repeats} runs\n")
    names = "env | policy | envs | plain, M steps/s | two / plain | two / peer"
    print(f"| {names} | one / plain |\n|{' --- |' * 7}")
    for env_id in args.envs:
        for policy in args.policies:
            for num_envs in args.num_envs:
                case = Case(env_id, num_envs, policy, "threefry2x32")
                seconds = measure(make_programs(case), args.repeats)
                plain, two = seconds["plain"], seconds["two"]
                rate = num_envs * NUM_STEPS / plain / 1e6
                print(
                    f"| {env_id} | {policy} | {num_envs:,} | {rate:.1f} | "
                    f"{plain / two:.2f} | {seconds['peer'] / two:.2f} | "
                    f"{plain / seconds['one']:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

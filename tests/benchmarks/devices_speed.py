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

import functools
import os
from collections.abc import Iterator
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
)

import jax
from harness import Program, arguments, measure, report
from jax.sharding import PartitionSpec
from rollout_speed import Case, make_policy

import rollout
from rollout import envs

ENVS = ("CartPole-v1", "Acrobot-v1", "Breakout-MinAtar")
NUM_ENVS = (128, 1024, 4096, 16384)
POLICIES = ("random", "mlp")


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


def make_programs(case: Case) -> dict[str, Program]:
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


def rows(cases: list[Case], repeats: int) -> Iterator[dict[str, str]]:
    """Times each case."""
    for case in cases:
        timing = measure(make_programs(case), repeats)
        plain, one, two, peer = (
            timing[name].wall for name in ("plain", "one", "two", "peer")
        )
        yield {
            "environment": f"`{case.env_id}`",
            "policy": case.policy,
            "lanes": f"{case.num_envs:,}",
            "one device, M steps/s": (
                f"{case.num_envs * case.num_steps / plain / 1e6:.1f}"
            ),
            "two devices / one": f"{plain / two:.2f}",
            "`rollout` / `shard_map` by hand": f"{peer / two:.2f}",
            "`shard` over one device / no `shard`": f"{plain / one:.2f}",
        }


def main() -> None:
    """Makes the table."""
    args = arguments(__doc__, 25, envs=ENVS, num_envs=NUM_ENVS, policies=POLICIES)
    cases = [
        Case(env_id, num_envs, policy)
        for env_id in args.envs
        for policy in args.policies
        for num_envs in args.num_envs
    ]
    report(args, "several devices", rows(cases, args.repeats))


if __name__ == "__main__":
    main()

"""How much faster are lanes on two CPU devices than on one?

Times `collect_steps` with every field returned, in interleaved runs in one process:

- `plain`: the collector on one device;
- `one`: `rollout.shard` over one device;
- `two`: `rollout.shard` over two devices;
- `peer`: a hand-written `shard_map` over the same two devices. Each device runs the
  plain collector with half of the lanes and a separate key.

    python benchmarks/devices_speed.py
    python benchmarks/devices_speed.py --envs CartPole-v1 --num-envs 4096
"""

import functools
import itertools
import os
from argparse import Namespace
from collections.abc import Iterator

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
)

import jax
from gymnax_loops import POLICIES, Case, make_policy
from harness import Program, lanes, measure, run, steps
from jax.sharding import PartitionSpec

import rollout

ENVS = ("CartPole-v1", "Acrobot-v1", "Breakout-MinAtar")
NUM_ENVS = (128, 1024, 4096, 16384)


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


if __name__ == "__main__":
    options = {"envs": ENVS, "num_envs": NUM_ENVS, "policies": POLICIES}
    run(__doc__, 25, {"several devices": rows}, **options)

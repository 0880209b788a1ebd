"""How fast is `collect_steps`, against the loop everyone writes and a bare loop?

Times, interleaved in one process:

- `rollout`: this kernel, the six fields of the next read from its trajectory;
- `gymnax loop`: the loop everyone writes: a key split per env and step, gymnax's own
  auto-reset (every env is reset at every step, then selected), return and length in the
  carry;
- `bare loop`: this kernel's step without reset and without statistics;
- `all fields`: this kernel with every field of `Transition`.

The first three return the same fields: obs, action, reward, done, episode return and
length. `bare loop` keeps no statistics and writes the reward in place of the return.

    python tests/benchmarks/rollout_speed.py                  # the table
    python tests/benchmarks/rollout_speed.py --both-loops     # and with the XLA flag
    python tests/benchmarks/rollout_speed.py --linear         # time against num_steps
    python tests/benchmarks/rollout_speed.py --outer-jit      # called directly or not
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
from jax import lax
from machine import LOOP_FLAG, machine

import rollout
from rollout import envs, kernel

ENVS = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "Breakout-MinAtar")
NUM_ENVS = (16, 128, 1024, 4096)
NUM_STEPS = 128
LOOPS = ("rollout", "gymnax loop", "bare loop", "all fields")
Run = Callable[..., Any]


class Case(NamedTuple):
    """One row of the table."""

    env_id: str
    num_envs: int
    policy: str
    impl: str
    auto_reset: str = "compact"
    num_steps: int = NUM_STEPS


class Program(NamedTuple):
    """A compiled loop, what it takes and what its times were."""

    run: Run
    memory: Any
    compile_s: float
    wall_s: list[float]
    cpu_s: list[float]


class ActorCritic(nn.Module):
    """Two tanh layers of 64, a head for the action and one for the value."""

    num_outputs: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `[B, ...]` observations to `[B, num_outputs]` and `[B]` values."""
        x = obs.reshape(obs.shape[0], -1)
        x = nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x))))
        return nn.Dense(self.num_outputs)(x), nn.Dense(1)(x)[:, 0]


def make_policy(case: Case) -> tuple[rollout.Policy | None, Any]:
    """Makes the policy of a case, None for the random one, and its parameters."""
    if case.policy == "random":
        return None, ()
    env = envs.make(case.env_id)
    space = env.action_space
    discrete = hasattr(space, "n")
    net = ActorCritic(space.n if discrete else space.shape[0])
    obs = jax.eval_shape(env.reset, jax.random.key(0))[1]
    params = net.init(jax.random.key(1), jnp.zeros((1, *obs.shape)))

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        head, _ = net.apply(params, obs)
        if discrete:
            return jax.random.categorical(key, head)
        return head + jax.random.normal(key, head.shape)

    return rollout.stateless_policy(act), params


def kernel_loop(case: Case, policy: rollout.Policy | None, fields: str) -> tuple:
    """`rollout` or `all fields`: `(init, run)` of this library's collector."""
    env = envs.make_vec(case.env_id, case.num_envs, auto_reset=case.auto_reset)
    policy = policy or rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)

    def run(carry: Any, params: Any) -> tuple[Any, Any]:
        carry, t = collector.collect_steps(carry, params, case.num_steps)
        if fields == "all fields":
            return carry, t
        return carry, (
            t.obs,
            t.action,
            t.reward,
            t.done,
            t.episode_return,
            t.episode_length,
        )

    return collector.init, run


def bare_loop(case: Case, policy: rollout.Policy | None) -> tuple:
    """`bare loop`: the kernel's policy and environment step, and nothing else."""
    env = envs.make_vec(case.env_id, case.num_envs)
    policy = policy or rollout.random_policy(env.action_space)

    def run(carry: Any, params: Any) -> tuple[Any, Any]:
        def step(carry: Any, policy_key: jax.Array) -> tuple[Any, Any]:
            decision = kernel.act(env, policy, carry, params, policy_key)
            result = kernel.step_env(env, carry, decision.action)
            length = carry.episode.episode_length
            out = (
                carry.obs,
                decision.action,
                result.reward,
                result.terminated | result.truncated,
                result.reward,
                length,
            )
            episode = carry.episode.replace(episode_length=length + 1)
            return carry.replace(
                step=carry.step + 1,
                env_state=result.state,
                obs=result.obs,
                episode=episode,
            ), out

        roots = kernel.roots_of(env, carry)
        return lax.scan(step, carry, kernel.policy_keys(roots, carry, case.num_steps))

    collector = rollout.Collector(env=env, policy=policy)
    return functools.partial(kernel.init, collector), run


def everyones_loop(case: Case, policy: rollout.Policy | None) -> tuple:
    """`gymnax loop`: the rollout loop that goes from project to project."""
    env, env_params = gymnax.make(case.env_id)
    space = env.action_space(env_params)
    num_envs = case.num_envs

    def init(key: jax.Array) -> tuple[Any, ...]:
        key, reset_key = jax.random.split(key)
        reset_keys = jax.random.split(reset_key, num_envs)
        obs, state = jax.vmap(env.reset, (0, None))(reset_keys, env_params)
        zero = jnp.zeros(num_envs)
        return key, state, obs, zero, zero.astype(jnp.int32)

    def run(carry: Any, params: Any) -> tuple[Any, Any]:
        def step(carry: Any, _: None) -> tuple[Any, Any]:
            key, state, obs, total, length = carry
            key, action_key, step_key = jax.random.split(key, 3)
            if policy is None:
                action_keys = jax.random.split(action_key, num_envs)
                action = jax.vmap(space.sample)(action_keys)
            else:
                action = policy.apply(params, obs, (), action_key).action
            step_keys = jax.random.split(step_key, num_envs)
            next_obs, state, reward, terminated, truncated, _ = jax.vmap(
                env.step, (0, 0, 0, None)
            )(step_keys, state, action, env_params)
            done = terminated | truncated
            total, length = total + reward, length + 1
            out = obs, action, reward, done, total, length
            return (key, state, next_obs, total * ~done, length * ~done), out

        return lax.scan(step, carry, length=case.num_steps)

    return init, run


def prepare(case: Case, init: Run, run: Run, params: Any) -> list[Any]:
    """Compiles one loop and starts it: `[program, carry]`."""
    carry = jax.jit(init)(jax.random.key(0, impl=case.impl))
    carry = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), carry)
    start = time.perf_counter()
    compiled = jax.jit(run).lower(carry, params).compile()
    compile_s = time.perf_counter() - start
    jax.block_until_ready(compiled(carry, params))
    memory = compiled.memory_analysis()
    return [Program(compiled, memory, compile_s, [], []), carry]


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Times the four loops of a case in turn, `repeats` times."""
    policy, params = make_policy(case)
    loops = {
        "rollout": kernel_loop(case, policy, "six"),
        "gymnax loop": everyones_loop(case, policy),
        "bare loop": bare_loop(case, policy),
        "all fields": kernel_loop(case, policy, "all fields"),
    }
    running = {k: prepare(case, *loop, params) for k, loop in loops.items()}
    for _ in range(repeats):
        for slot in running.values():
            program, carry = slot
            wall, cpu = time.perf_counter(), time.process_time()
            slot[1], out = jax.block_until_ready(program.run(carry, params))
            program.wall_s.append(time.perf_counter() - wall)
            program.cpu_s.append(time.process_time() - cpu)
            del out
    return summarize(case, {k: slot[0] for k, slot in running.items()})


def summarize(case: Case, programs: dict[str, Program]) -> dict[str, Any]:
    """Makes the row of a case from its programs."""
    wall = {k: statistics.median(p.wall_s) for k, p in programs.items()}
    cpu = {k: statistics.median(p.cpu_s) for k, p in programs.items()}
    steps = case.num_envs * case.num_steps
    full = programs["all fields"].memory
    returned = full.output_size_in_bytes
    return {
        **case._asdict(),
        "steps_per_s": {k: steps / t for k, t in wall.items()},
        "cpu_per_wall": {k: cpu[k] / wall[k] for k in wall},
        "over_gymnax_loop": wall["gymnax loop"] / wall["rollout"],
        "over_bare_loop": wall["bare loop"] / wall["rollout"],
        "over_gymnax_loop_cpu": cpu["gymnax loop"] / cpu["rollout"],
        "over_bare_loop_cpu": cpu["bare loop"] / cpu["rollout"],
        "compile_s": {k: p.compile_s for k, p in programs.items()},
        "memory_over_returned": (returned + full.temp_size_in_bytes) / returned,
    }


def print_row(row: dict[str, Any]) -> None:
    """Prints one row under `HEADER`."""
    million = " | ".join(f"{row['steps_per_s'][loop] / 1e6:.2f}" for loop in LOOPS)
    compile_s = row["compile_s"]
    print(
        f"| {row['env_id']} | {row['num_envs']:,} | {row['policy']} | {row['impl']} "
        f"| {million} | {row['over_gymnax_loop']:.2f} | {row['over_bare_loop']:.2f} "
        f"| {row['over_gymnax_loop_cpu']:.2f} | {row['over_bare_loop_cpu']:.2f} "
        f"| {compile_s['rollout']:.1f} | {compile_s['gymnax loop']:.1f} "
        f"| {row['memory_over_returned']:.3f} |",
        flush=True,
    )


HEADER = (
    "| environment | lanes | policy | keys | `rollout` | `gymnax loop` | `bare loop` "
    "| `all fields` | `rollout` / `gymnax loop` | `rollout` / `bare loop` "
    "| CPU time, `gymnax loop` / `rollout` | CPU time, `bare loop` / `rollout` "
    "| compiling `rollout`, s | compiling `gymnax loop`, s "
    "| peak memory of `all fields` / its outputs |\n"
    f"|{'---|' * 15}"
)


def measure_linearity(repeats: int) -> None:
    """Prints the time of a step for 1,000 to 16,000 steps a call."""
    print("| env | num_steps | us per step | against 1,000 |\n|---|---|---|---|")
    for env_id in ("CartPole-v1", "Pendulum-v1"):
        lengths = (1000, 2000, 4000, 8000, 16000)
        cases = [
            Case(env_id, 64, "random", "threefry2x32", num_steps=n) for n in lengths
        ]
        slots = [prepare(c, *kernel_loop(c, None, "all fields"), ()) for c in cases]
        for _ in range(repeats):
            for program, carry in slots:
                start = time.perf_counter()
                jax.block_until_ready(program.run(carry, ()))
                program.wall_s.append(time.perf_counter() - start)
        times = [
            statistics.median(slot[0].wall_s) / n
            for slot, n in zip(slots, lengths, strict=True)
        ]
        for n, t in zip(lengths, times, strict=True):
            print(f"| {env_id} | {n} | {t * 1e6:.2f} | {t / times[0]:.3f} |")


def measure_outer_jit(repeats: int) -> None:
    """Prints the time of a call from Python and from inside the caller's own jit."""
    print("| env | envs | direct ms | inside jit ms | ratio |\n|---|---|---|---|---|")
    for num_envs in (16, 1024):
        env = envs.make_vec("CartPole-v1", num_envs)
        policy = rollout.random_policy(env.action_space)
        collector = rollout.Collector(env=env, policy=policy)

        def direct(carry: Any, collector: Any = collector) -> tuple[Any, Any]:
            return collector.collect_steps(carry, None, NUM_STEPS)

        calls = {"direct": direct, "inside": jax.jit(direct)}
        carry = collector.init(jax.random.key(0))
        times = {name: [] for name in calls}
        for call in calls.values():
            jax.block_until_ready(call(carry))
        for _ in range(repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                jax.block_until_ready(call(carry))
                times[name].append(time.perf_counter() - start)
        one, other = (statistics.median(times[name]) * 1e3 for name in calls)
        print(
            f"| CartPole-v1 | {num_envs} | {one:.3f} | {other:.3f} "
            f"| {one / other:.2f} |"
        )


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", nargs="+", default=ENVS, choices=ENVS)
    parser.add_argument("--num-envs", nargs="+", type=int, default=NUM_ENVS)
    parser.add_argument("--policies", nargs="+", default=("random", "mlp"))
    parser.add_argument("--impl", nargs="+", default=("threefry2x32",))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--auto-reset", default="compact")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    parser.add_argument(
        "--device", action="store_true", help="only say what it runs on"
    )
    parser.add_argument(
        "--outer-jit", action="store_true", help="a direct call against one in a jit"
    )
    parser.add_argument("--linear", action="store_true", help="time against num_steps")
    parser.add_argument(
        "--both-loops",
        action="store_true",
        help="run again in a process with the XLA:CPU loop flag",
    )
    args = parser.parse_args()
    print(machine(), flush=True)
    if args.device:
        return
    if args.outer_jit:
        measure_outer_jit(args.repeats)
        return
    if args.linear:
        measure_linearity(args.repeats)
        return
    print(HEADER)
    rows = []
    for policy in args.policies:
        for impl in args.impl:
            for env_id in args.envs:
                for num_envs in args.num_envs:
                    case = Case(env_id, num_envs, policy, impl, args.auto_reset)
                    rows.append(measure(case, args.repeats))
                    print_row(rows[-1])
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": machine(), "rows": rows}, file, indent=1)
    if args.both_loops:
        rest = [argument for argument in sys.argv if argument != "--both-loops"]
        flags = f"{os.environ.get('XLA_FLAGS', '')} {LOOP_FLAG}".strip()
        env = {**os.environ, "XLA_FLAGS": flags}
        subprocess.run([sys.executable, *rest], env=env, check=True)


if __name__ == "__main__":
    main()

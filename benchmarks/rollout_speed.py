"""How fast is `collect_steps`, compared with PureJaxRL's loop and a bare loop?

Times four loops in interleaved runs in one process:

- `rollout`: the kernel of this library;
- `gymnax loop`: the loop of PureJaxRL, with a key split per environment and step, the
  auto-reset of gymnax (resets every environment at every step, then selects), and
  return and length in the carry;
- `bare loop`: the step of the kernel without resets and statistics;
- `all fields`: the kernel with every field of `Transition`.

The first three return six fields: obs, action, reward, done, episode return and episode
length. `bare loop` has no statistics: it returns the reward instead of the episode
return. Also times the parts of a step with `rollout.profile`, and
`a learned model`: rollouts of a network that replaces an environment, and their
gradient, against a plain scan.

    python benchmarks/rollout_speed.py --tables "random policy" "a network"
    python benchmarks/rollout_speed.py --num-steps 16000 --impl philox2x32

Each table of loops has more columns in a second table, for example "more on random
policy". The tables "jax 0.11" and "one flag of XLA" repeat the random policy with this
version of JAX and with `XLA_FLAGS` set to `harness.LOOP_FLAG`.
"""

import functools
import itertools
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from gymnax_loops import ENVS, Case, Loop, gymnax_loop, make_policy, our_loop
from harness import Program, lanes, measure, run, steps
from jax import lax

import rollout
from rollout import envs
from rollout.kernel import keys
from rollout.kernel.state import roots_of
from rollout.kernel.step import act, init, step_env

NUM_ENVS = (16, 128, 1024, 4096)
NUM_STEPS = 128
POLICY = {
    "random policy": "random",
    "a network": "mlp",
    "jax 0.11": "random",
    "one flag of XLA": "random",
}
LOOPS = ("rollout", "gymnax loop", "bare loop", "all fields")


def bare_loop(case: Case) -> Loop:
    """Creates `bare loop`: only the policy and the environment step of the kernel."""
    policy = make_policy(case)[0]
    collector = lanes(case.env_id, case.num_envs, policy)

    def run(carry: Any, params: Any) -> tuple[Any, Any]:
        def step(carry: Any, policy_key: jax.Array) -> tuple[Any, Any]:
            decision = act(collector, carry, params, policy_key)
            result = step_env(collector, carry, decision.action)
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

        roots = roots_of(collector, carry)
        steps = carry.step + jnp.arange(case.num_steps, dtype=jnp.int32)
        return lax.scan(step, carry, keys.at_step(roots.policy, steps))

    return Loop(functools.partial(init, collector), run)


def recorded_fields(t: rollout.Transition) -> tuple[Any, ...]:
    """Selects the six fields that `gymnax loop` also returns."""
    totals = t.episode_return, t.episode_length
    return t.obs, t.action, t.reward, t.done, *totals


def purejaxrl_loop(case: Case) -> Loop:
    """Creates `gymnax loop`; its info is reduced to episode return and length."""
    init, run = gymnax_loop(case)

    def run_and_read(carry: Any, params: Any) -> tuple[Any, Any]:
        carry, (*row, _, info) = run(carry, params)
        names = "returned_episode_returns", "returned_episode_lengths"
        return carry, (*row, *(info[name] for name in names))

    return Loop(init, run_and_read)


def compile_loop(case: Case, loop: Loop, params: Any) -> tuple[Program, Any, float]:
    """Compiles a loop; returns a call without arguments, the program and seconds."""
    carry = jax.jit(loop.init)(jax.random.key(0, impl=case.impl))
    carry = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), carry)
    start = time.perf_counter()
    program = jax.jit(loop.run).lower(carry, params).compile()
    seconds = time.perf_counter() - start
    return functools.partial(program, carry, params), program, seconds


@functools.cache
def measure_loops(case: Case, repeats: int) -> tuple[dict[str, str], dict[str, str]]:
    """Times the four loops of a case; returns a row of each table."""
    params = make_policy(case)[1](jax.random.key(1))
    loops = {
        "rollout": our_loop(case, recorded_fields),
        "gymnax loop": purejaxrl_loop(case),
        "bare loop": bare_loop(case),
        "all fields": our_loop(case, lambda t: t.replace(extras=())),
    }
    programs = {name: compile_loop(case, loop, params) for name, loop in loops.items()}
    timing = measure({x: run for x, (run, *_) in programs.items()}, repeats)
    ours, gymnax_loop, bare = (timing[name] for name in LOOPS[:3])
    speed = {x: case.num_envs * case.num_steps / timing[x].wall / 1e6 for x in LOOPS}
    memory = programs["all fields"][1].memory_analysis()
    peak = memory.output_size_in_bytes + memory.temp_size_in_bytes
    setting = {"environment": f"`{case.env_id}`", "lanes": f"{case.num_envs:,}"}
    row = setting | {f"`{x}`, M/s": f"{speed[x]:.2f}" for x in LOOPS[:3]}
    row["`rollout` / `gymnax loop`"] = f"{gymnax_loop.wall / ours.wall:.2f}"
    row["`rollout` / `bare loop`"] = f"{bare.wall / ours.wall:.2f}"
    details = setting | {
        "`all fields`, M/s": f"{speed['all fields']:.2f}",
        "CPU time, `gymnax loop` / `rollout`": f"{gymnax_loop.cpu / ours.cpu:.2f}",
        "CPU time, `bare loop` / `rollout`": f"{bare.cpu / ours.cpu:.2f}",
        "compiling `rollout`, s": f"{programs['rollout'][2]:.1f}",
        "compiling `gymnax loop`, s": f"{programs['gymnax loop'][2]:.1f}",
        "peak memory of `all fields` / its outputs": (
            f"{peak / memory.output_size_in_bytes:.3f}"
        ),
    }
    return row, details


def measure_parts(env_id: str, num_envs: int, repeats: int) -> dict[str, str]:
    """Times the parts of a step and a collection without `next_obs`."""
    full = lanes(env_id, num_envs)
    lean = full.replace(record_fn=lambda row: row.replace(next_obs=()))
    parts = rollout.profile(
        full, None, jax.random.key(0), NUM_STEPS, num_repeats=repeats
    )
    programs = {"total": steps(full, NUM_STEPS), "less": steps(lean, NUM_STEPS)}
    timing = measure(programs, repeats)
    names = {"policy": "policy", "step": "env_step", "reset": "auto_reset"}
    names |= {"recording": "recording", "total": "total"}
    limit = (parts.policy + parts.env_step + parts.recording) / parts.total
    ratio = timing["total"].wall / timing["less"].wall
    return {
        "environment": f"`{env_id}`",
        "lanes": f"{num_envs:,}",
        **{f"{x}, ms": f"{1e3 * getattr(parts, y):.2f}" for x, y in names.items()},
        "(policy + step + recording) / total": f"{limit:.2f}",
        "total / total without `next_obs`": f"{ratio:.2f}",
    }


def mlp(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Applies an MLP without biases."""
    for weights in params[:-1]:
        x = jnp.tanh(x @ weights)
    return x @ params[-1]


@struct.dataclass
class Model:
    """An environment whose dynamics are a network; episodes never end."""

    params: list[jax.Array]
    observation_space = envs.Box(-jnp.inf, jnp.inf, (8,))
    action_space = envs.Box(-1.0, 1.0, (2,))

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Samples a state of eight numbers."""
        obs = jax.random.normal(key, (8,))
        return obs, obs

    def step(self, key: jax.Array, state: jax.Array, action: jax.Array) -> envs.EnvStep:
        """Adds the output of the network to the state."""
        del key
        obs = state + mlp(self.params, jnp.append(state, action))
        return envs.EnvStep(
            state=obs,
            obs=obs,
            reward=-jnp.square(obs).sum(),
            terminated=jnp.bool_(False),
            truncated=jnp.bool_(False),
            info=(),
        )


def model_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times rollouts of 15 steps in 256 lanes of a `Model` and their gradient."""
    policy = rollout.stateless_policy(lambda params, obs, _: jnp.tanh(mlp(params, obs)))

    def ours(params: Any, model: Any, carry: rollout.Carry) -> jax.Array:
        collector = lanes(Model(model), 256, policy)
        return collector.collect_steps(carry, params, 15)[1].reward.mean()

    def plain(params: Any, model: Any, carry: rollout.Carry) -> jax.Array:
        def step(obs: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            action = jnp.tanh(mlp(params, obs))
            obs += mlp(model, jnp.concatenate([obs, action], axis=-1))
            return obs, -jnp.square(obs).sum(axis=-1)

        return lax.scan(step, carry.obs, length=15)[1].mean()

    init_fn = jax.nn.initializers.lecun_normal()
    params, model = (
        [init_fn(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
        for shapes in (((8, 128), (128, 2)), ((10, 128), (128, 128), (128, 8)))
    )
    inputs = params, model, lanes(Model(model), 256, policy).init(jax.random.key(0))
    for name, op in {"forward": lambda fn: fn, "gradient": jax.value_and_grad}.items():
        seconds, lines, programs = [], [], dict[str, Program]()
        for fn in (ours, plain):
            start = time.process_time()
            program = jax.jit(op(fn)).lower(*inputs).compile()
            seconds.append(time.process_time() - start)
            lines.append(str(program.as_text()).count("\n"))
            programs[fn.__name__] = functools.partial(program, *inputs)
        cpu = [1e3 * timing.cpu for timing in measure(programs, args.repeats).values()]
        row = {"": name}
        columns = {"CPU time, ms": cpu, "compiling, CPU s": seconds, "lines": lines}
        for label, (cost, scan) in columns.items():
            row |= {f"{label}": f"{cost:.4g}", f"{label}, a plain scan": f"{scan:.4g}"}
        yield row


def loop_rows(args: Namespace, policy: str, part: int) -> Iterator[dict[str, str]]:
    """Times the loops; `part` selects the table."""
    sizes = args.envs, args.num_envs, args.impl, args.num_steps
    for env_id, num_envs, impl, num_steps in itertools.product(*sizes):
        case = Case(env_id, num_envs, policy, num_steps, impl)
        yield measure_loops(case, args.repeats)[part]


def part_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times the parts of a step."""
    for size in itertools.product(args.envs, args.num_envs):
        yield measure_parts(*size, args.repeats)


if __name__ == "__main__":
    tables = {"where the time goes": part_rows, "a learned model": model_rows}
    for name, policy in POLICY.items():
        for part, table in enumerate((name, f"more on {name}")):
            tables[table] = functools.partial(loop_rows, policy=policy, part=part)
    # The other tables need a different version of JAX or an XLA flag.
    default = [x for x in tables if not x.endswith(("jax 0.11", "one flag of XLA"))]
    options = {"envs": ENVS, "num_envs": NUM_ENVS, "num_steps": (NUM_STEPS,)}
    run(__doc__, 15, tables, **options, impl=("threefry2x32",), tables=default)

"""How fast is `collect_steps`, against the loop everyone writes and a bare loop?

Times in turn, in one process:

- `rollout`: this kernel, the six fields of the next read from its trajectory;
- `gymnax loop`: the loop everyone writes: a key split per env and step, gymnax's own
  auto-reset (every env is reset at every step, then selected), return and length in the
  carry;
- `bare loop`: this kernel's step without reset and without statistics;
- `all fields`: this kernel with every field of `Transition`.

The first three return the same fields: obs, action, reward, done, episode return and
length. `bare loop` keeps no statistics and writes the reward in place of the return.
Then, with `rollout.profile`, where the time goes.

    python tests/benchmarks/rollout_speed.py --tables "random policy" "a network"
    python tests/benchmarks/rollout_speed.py --num-steps 16000 --impl philox2x32

Tables "jax 0.11" and "one flag of XLA" are those of the random policy, made with this
version and with `XLA_FLAGS` set to `harness.LOOP_FLAG`.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
from harness import arguments, measure, report
from jax import lax

import rollout
from rollout import envs, kernel

ENVS = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "Breakout-MinAtar")
NUM_ENVS = (16, 128, 1024, 4096)
NUM_STEPS = 128
TABLES = ("random policy", "a network", "where the time goes")
LOOPS = ("rollout", "gymnax loop", "bare loop", "all fields")
Run = Callable[..., Any]


class Case(NamedTuple):
    """One row of the table."""

    env_id: str
    num_envs: int
    policy: str
    impl: str = "threefry2x32"
    num_steps: int = NUM_STEPS


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
    env = envs.make_vec(case.env_id, case.num_envs)
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


def compile_loop(case: Case, loop: tuple, params: Any) -> tuple[Run, Any, float]:
    """Compiles a loop, ready to call; the program, and the seconds that it took."""
    init, run = loop
    carry = jax.jit(init)(jax.random.key(0, impl=case.impl))
    carry = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), carry)
    start = time.perf_counter()
    program = jax.jit(run).lower(carry, params).compile()
    seconds = time.perf_counter() - start
    return functools.partial(program, carry, params), program, seconds


def measure_loops(case: Case, repeats: int) -> tuple[dict[str, str], dict[str, str]]:
    """Times the four loops of a case; returns its row in both tables."""
    policy, params = make_policy(case)
    loops = {
        "rollout": kernel_loop(case, policy, "six"),
        "gymnax loop": everyones_loop(case, policy),
        "bare loop": bare_loop(case, policy),
        "all fields": kernel_loop(case, policy, "all fields"),
    }
    made = {name: compile_loop(case, loop, params) for name, loop in loops.items()}
    timing = measure({name: program for name, (program, *_) in made.items()}, repeats)
    ours, gymnax_loop, bare = (timing[name] for name in LOOPS[:3])
    speed = {x: case.num_envs * case.num_steps / timing[x].wall / 1e6 for x in LOOPS}
    memory = made["all fields"][1].memory_analysis()
    peak = memory.output_size_in_bytes + memory.temp_size_in_bytes
    setting = {"environment": f"`{case.env_id}`", "lanes": f"{case.num_envs:,}"}
    row = setting | {f"`{x}`, M/s": f"{speed[x]:.2f}" for x in LOOPS[:3]}
    row["`rollout` / `gymnax loop`"] = f"{gymnax_loop.wall / ours.wall:.2f}"
    row["`rollout` / `bare loop`"] = f"{bare.wall / ours.wall:.2f}"
    more = setting | {
        "`all fields`, M/s": f"{speed['all fields']:.2f}",
        "CPU time, `gymnax loop` / `rollout`": f"{gymnax_loop.cpu / ours.cpu:.2f}",
        "CPU time, `bare loop` / `rollout`": f"{bare.cpu / ours.cpu:.2f}",
        "compiling `rollout`, s": f"{made['rollout'][2]:.1f}",
        "compiling `gymnax loop`, s": f"{made['gymnax loop'][2]:.1f}",
        "peak memory of `all fields` / its outputs": (
            f"{peak / memory.output_size_in_bytes:.3f}"
        ),
    }
    return row, more


def measure_parts(env_id: str, num_envs: int, repeats: int) -> dict[str, str]:
    """Times the parts of a step, and a collection without `next_obs`."""
    env = envs.make_vec(env_id, num_envs)
    policy = rollout.random_policy(env.action_space)
    whole = rollout.Collector(env=env, policy=policy)
    less = whole.replace(record_fn=lambda row: row.replace(next_obs=()))
    parts = rollout.profile(whole, None, NUM_STEPS, num_repeats=repeats)
    carry = whole.init(jax.random.key(0))
    timing = measure(
        {
            "whole": lambda: whole.collect_steps(carry, None, NUM_STEPS),
            "less": lambda: less.collect_steps(carry, None, NUM_STEPS),
        },
        repeats,
    )
    names = {"policy": "policy", "step": "env_step", "reset": "auto_reset"}
    names |= {"recording": "recording", "whole": "whole"}
    limit = (parts.policy + parts.env_step + parts.recording) / parts.whole
    ratio = timing["whole"].wall / timing["less"].wall
    return {
        "environment": f"`{env_id}`",
        "lanes": f"{num_envs:,}",
        **{f"{x}, ms": f"{1e3 * getattr(parts, y):.2f}" for x, y in names.items()},
        "(policy + step + recording) / whole": f"{limit:.2f}",
        "whole / whole without `next_obs`": f"{ratio:.2f}",
    }


def main() -> None:
    """Makes the tables."""
    options = {"envs": ENVS, "num_envs": NUM_ENVS, "num_steps": (NUM_STEPS,)}
    options |= {"impl": ("threefry2x32",), "tables": TABLES}
    args = arguments(__doc__, 15, **options)
    sizes = [(env_id, num_envs) for env_id in args.envs for num_envs in args.num_envs]
    for table in args.tables:
        if table == "where the time goes":
            rows = (measure_parts(*size, args.repeats) for size in sizes)
            report(args, table, rows)
            continue
        policy, more = "mlp" if table == "a network" else "random", []

        def loops(policy: str = policy, more: list = more) -> Iterator[dict[str, str]]:
            for size in sizes:
                for impl in args.impl:
                    for num_steps in args.num_steps:
                        case = Case(*size, policy, impl, num_steps)
                        row, rest = measure_loops(case, args.repeats)
                        more.append(rest)
                        yield row

        report(args, table, loops())
        report(args, f"more on {table}", more)


if __name__ == "__main__":
    main()

"""How fast are several agents, one agent, and many members of a population?

Medians of single runs in random order, in one process:

- `spread`: MPE simple_spread under the random policy, against JaxMARL's own loop: its
  `LogWrapper` around its auto-reset `step`, vmapped in a `lax.scan`, one key split per
  environment and step, and one draw of all actions. Both return the observations,
  actions and rewards of every agent, the flag and the returns of finished episodes.
- `one`: an environment as one of one agent against the plain kernel; both return eight
  fields of the transition, or (`full`) every field.
- `population`: the agents of 512 lanes of two, with a network of two layers of 64: one
  policy for all, or P members of which each agent plays one, against the same members
  with the parameters gathered per agent.

    python benchmarks/agents_speed.py
    python benchmarks/agents_speed.py --tables population --repeats 50
"""

import contextlib
import functools
import io
import itertools
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from harness import Program, lanes, measure, rows_of, run, steps
from jax import lax

import rollout
from rollout import envs
from rollout.distributions import ActionDistribution
from rollout.envs import prng
from rollout.recipes import ppo

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from agents import OneAgent

with contextlib.redirect_stdout(io.StringIO()):  # it says which parts are missing
    import jaxmarl
    from jaxmarl.wrappers.baselines import LogWrapper

NUM_STEPS = 128
SPREAD_ENVS = (64, 256, 1024)
ONE_ENVS = (128, 1024, 4096)
SIZES = (1, 2, 8, 32)
ONE_IDS = ("CartPole-v1", "Acrobot-v1", "Breakout-MinAtar")
NUM_LANES, NUM_AGENTS, OBS_SIZE, NUM_ACTIONS = 512, 2, 18, 5
NETWORK = ppo.ActorCritic(
    ActionDistribution(envs.Discrete(NUM_ACTIONS)),
    envs.Box(-10.0, 10.0, (OBS_SIZE,)),
    hidden_layer_sizes=(64, 64),
    activation="tanh",
)


@struct.dataclass
class Still:
    """Agents whose observations are drawn once, so that policies are what costs."""

    agents = tuple(f"agent_{i}" for i in range(NUM_AGENTS))
    simultaneous = True

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """All in one."""
        return {"agents": self.agents}

    @property
    def observation_spaces(self) -> dict[str, envs.spaces.Space]:
        """Of one agent."""
        return {"agents": envs.Box(-10.0, 10.0, (OBS_SIZE,))}

    @property
    def action_spaces(self) -> dict[str, envs.spaces.Space]:
        """Of one agent."""
        return {"agents": envs.Discrete(NUM_ACTIONS)}

    def reset(self, key: jax.Array) -> tuple[Any, dict[str, Any], jax.Array]:
        """Starts an episode of 25 steps."""
        obs = jax.random.normal(key, (NUM_AGENTS, OBS_SIZE))
        return (jnp.int32(0), obs), {"agents": obs}, jnp.ones(NUM_AGENTS, bool)

    def step(
        self, key: jax.Array, state: Any, action: dict[str, jax.Array]
    ) -> envs.multi_agent.MultiAgentStep:
        """Adds a little of the action to the observation."""
        number, obs = state[0] + 1, state[1]
        obs = obs + 1e-3 * action["agents"][:, None].astype(jnp.float32)
        none = jnp.zeros(NUM_AGENTS, bool)
        return envs.multi_agent.MultiAgentStep(
            state=(number, obs),
            obs={"agents": obs},
            acting=~none,
            reward=obs[:, 0],
            terminated=none,
            truncated=none,
            episode_terminated=jnp.bool_(False),
            episode_truncated=number >= 25,
        )


def spread_programs(num_envs: int) -> dict[str, Program]:
    """Ours and JaxMARL's loop, with the same things returned."""
    with contextlib.redirect_stdout(io.StringIO()):
        game = jaxmarl.make("MPE_simple_spread_v3")
    env = envs.vectorize(envs.suites.from_jaxmarl(game), num_envs)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)

    def read(t: rollout.Transition) -> tuple:
        info = t.info.agents
        fields = t.obs["agents"], t.action["agents"], info.reward, t.done
        return *fields, info.agent_return, t.episode_length

    logged, num_agents = LogWrapper(game), len(game.agents)

    def step(state: tuple, _: None) -> tuple:
        env_state, obs, key = state
        key, action_key, step_key = jax.random.split(key, 3)
        shape = num_agents, num_envs
        drawn = jax.random.randint(action_key, shape, 0, NUM_ACTIONS)
        action = {name: drawn[i] for i, name in enumerate(game.agents)}
        step_keys = jax.random.split(step_key, num_envs)
        result = jax.vmap(logged.step)(step_keys, env_state, action)
        next_obs, env_state, reward, done, info = result
        stack = lambda x: jnp.stack([x[name] for name in game.agents], axis=1)  # noqa: E731
        row = (
            stack(obs),
            drawn.T,
            stack(reward),
            done["__all__"],
            info["returned_episode_returns"],
            info["returned_episode_lengths"],
        )
        return (env_state, next_obs, key), row

    @jax.jit
    def theirs(state: tuple) -> Any:
        return lax.scan(step, state, length=NUM_STEPS)

    reset_keys = jax.random.split(jax.random.key(0), num_envs)
    obs, env_state = jax.jit(jax.vmap(logged.reset))(reset_keys)
    start = env_state, obs, jax.random.key(1)
    return {
        "ours": steps(collector, NUM_STEPS, read=read),
        "full": steps(collector, NUM_STEPS),
        "jaxmarl": functools.partial(theirs, start),
    }


def one_programs(env_id: str, num_envs: int) -> dict[str, Program]:
    """An environment plainly, and as one of one agent."""
    agent = envs.vectorize(OneAgent(envs.make(env_id)), num_envs)
    policy = rollout.random_policy(agent.action_space)
    programs = {}
    for name, collector in (
        ("plain", lanes(env_id, num_envs)),
        ("agent", rollout.Collector(env=agent, policy=policy)),
    ):
        programs[name] = steps(collector, NUM_STEPS, read=rows_of)
        programs[f"{name}_full"] = steps(collector, NUM_STEPS)
    return programs


def draw(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
    """Samples actions from the network's logits."""
    return jax.random.categorical(prng.inline(key), NETWORK.apply(params, obs)[0])


def population_programs(size: int) -> dict[str, Program]:
    """One policy for all, members in blocks, and members gathered per agent."""
    env = envs.vectorize(Still(), NUM_LANES)
    policy = rollout.stateless_policy(draw)
    init_key = jax.random.key(1)
    init = lambda key: NETWORK.init(key, jnp.zeros((1, OBS_SIZE)))  # noqa: E731
    league = jax.vmap(init)(jax.random.split(init_key, size))

    def mapping(key: jax.Array, agents: tuple[str, ...]) -> jax.Array:
        return jax.random.randint(key, (len(agents),), 0, size)

    def gather(params: Any, obs: tuple, state: Any, key: jax.Array) -> Any:
        # The member stands in the state, where the mapping draws it in the others.
        own = jax.tree.map(lambda x: x[state], params)
        one = lambda params, obs, key: draw(params, obs[None], key)[0]  # noqa: E731
        agent_keys = prng.fold_in(key, jnp.arange(obs.shape[0]))
        return jax.vmap(one)(own, obs, agent_keys), state

    members = jax.random.randint(init_key, (NUM_LANES * NUM_AGENTS,), 0, size)
    gathered = rollout.recurrent_policy(gather, lambda num: members)
    shared = rollout.agents.static_mapping("it")
    single = jax.tree.map(lambda x: x[0], league)
    cases = {
        "one": (policy, shared, single),
        "blocks": (rollout.agents.Population(policy, size), mapping, league),
        "gather": (gathered, shared, league),
    }
    read = lambda t: (t.obs["agents"], t.action["agents"], t.reward)  # noqa: E731
    programs = {}
    for name, (each, assign, params) in cases.items():
        seats = rollout.agents.policy_map({"it": each}, assign, env)
        collector = rollout.Collector(env=env, policy=seats)
        programs[name] = steps(collector, NUM_STEPS, {"it": params}, read)
    return programs


def spread_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times simple_spread."""
    for num_envs in SPREAD_ENVS:
        taken = measure(spread_programs(num_envs), args.repeats)
        ours, full, theirs = (taken[x].wall for x in ("ours", "full", "jaxmarl"))
        yield {
            "lanes": f"{num_envs:,}",
            "`rollout`, env steps/s": f"{num_envs * NUM_STEPS / ours:,.0f}",
            "`rollout` / JaxMARL's loop": f"{theirs / ours:.2f}",
            "every field, also `next_obs` / JaxMARL's loop": f"{theirs / full:.2f}",
        }


def one_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times environments of one agent."""
    for env_id, num_envs in itertools.product(ONE_IDS, ONE_ENVS):
        taken = measure(one_programs(env_id, num_envs), args.repeats)
        ratio = taken["agent"].wall / taken["plain"].wall
        full = taken["agent_full"].wall / taken["plain_full"].wall
        yield {
            "environment": f"`{env_id}`",
            "lanes": f"{num_envs:,}",
            "time of eight fields / plain kernel": f"{ratio:.2f}",
            "time of every field / plain kernel": f"{full:.2f}",
        }


def population_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times populations."""
    for size in SIZES:
        taken = measure(population_programs(size), args.repeats)
        one, blocks, gather = (taken[x].wall for x in ("one", "blocks", "gather"))
        yield {
            "members": f"{size}",
            "one policy, ms": f"{1e3 * one:.0f}",
            "time, members / one policy": f"{blocks / one:.2f}",
            "time, gathered / members": f"{gather / blocks:.1f}",
        }


if __name__ == "__main__":
    tables = {"several agents": spread_rows, "one agent": one_rows}
    run(__doc__, 25, tables | {"population": population_rows})

"""How fast are single agents and populations of policies?

Reports medians of single runs in random order, in one process:

- `one agent`: an environment as a multi-agent environment with a single agent, against
  the plain kernel; both return eight fields of the transition, or every field.
- `population`: 512 lanes with two agents each and a network of two layers of 64. All
  agents share one policy, or each agent is assigned one of P members; the baseline
  gathers the parameters of a member per agent.

    pip install ".[test]"
    python benchmarks/agents_speed.py
    python benchmarks/agents_speed.py --tables population --repeats 50
"""

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

import rollout
from rollout import envs
from rollout.base import prng
from rollout.distributions import ActionDistribution
from rollout.recipes import ppo

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from agents import OneAgent

NUM_STEPS = 128
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
class StaticAgents:
    """Agents with nearly constant observations, so that policies dominate the time."""

    agents = tuple(f"agent_{i}" for i in range(NUM_AGENTS))
    simultaneous = True

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """One group that contains all agents."""
        return {"agents": self.agents}

    @property
    def observation_spaces(self) -> dict[str, envs.spaces.Space]:
        """Observation space of a single agent."""
        return {"agents": envs.Box(-10.0, 10.0, (OBS_SIZE,))}

    @property
    def action_spaces(self) -> dict[str, envs.spaces.Space]:
        """Action space of a single agent."""
        return {"agents": envs.Discrete(NUM_ACTIONS)}

    def reset(self, key: jax.Array) -> tuple[Any, dict[str, Any], jax.Array]:
        """Starts an episode of 25 steps."""
        obs = jax.random.normal(key, (NUM_AGENTS, OBS_SIZE))
        return (jnp.int32(0), obs), {"agents": obs}, jnp.ones(NUM_AGENTS, bool)

    def step(
        self, key: jax.Array, state: Any, action: dict[str, jax.Array]
    ) -> envs.multi_agent.MultiAgentStep:
        """Adds the scaled action to the observation."""
        number, obs = state[0] + 1, state[1]
        obs = obs + 1e-3 * action["agents"][:, None].astype(jnp.float32)
        no_agent = jnp.zeros(NUM_AGENTS, bool)
        return envs.multi_agent.MultiAgentStep(
            state=(number, obs),
            obs={"agents": obs},
            acting=~no_agent,
            reward=obs[:, 0],
            terminated=no_agent,
            truncated=no_agent,
            episode_terminated=jnp.bool_(False),
            episode_truncated=number >= 25,
        )


def one_programs(env_id: str, num_envs: int) -> dict[str, Program]:
    """Creates collectors with and without the multi-agent interface."""
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


def sample_action(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
    """Samples actions from the network's logits."""
    return jax.random.categorical(prng.inline(key), NETWORK.apply(params, obs)[0])


def population_programs(size: int) -> dict[str, Program]:
    """Creates programs with one policy, with a population and with gathered members."""
    env = envs.vectorize(StaticAgents(), NUM_LANES)
    policy = rollout.stateless_policy(sample_action)
    init_key = jax.random.key(1)
    init = lambda key: NETWORK.init(key, jnp.zeros((1, OBS_SIZE)))  # noqa: E731
    league = jax.vmap(init)(jax.random.split(init_key, size))

    def mapping(key: jax.Array, agents: tuple[str, ...]) -> jax.Array:
        return jax.random.randint(key, (len(agents),), 0, size)

    def gather(params: Any, obs: jax.Array, state: Any, key: jax.Array) -> Any:
        # The policy state stores the member index; `Population` uses a mapping instead.
        member = jax.tree.map(lambda x: x[state], params)
        act_one = lambda params, obs, key: sample_action(params, obs[None], key)[0]  # noqa: E731
        agent_keys = prng.fold_in(key, jnp.arange(obs.shape[0]))
        return jax.vmap(act_one)(member, obs, agent_keys), state

    members = jax.random.randint(init_key, (NUM_LANES * NUM_AGENTS,), 0, size)
    gather_policy = rollout.recurrent_policy(gather, lambda num: members)
    shared = rollout.agents.static_mapping("it")
    single = jax.tree.map(lambda x: x[0], league)
    cases = {
        "one": (policy, shared, single),
        "blocks": (rollout.agents.Population(policy, size), mapping, league),
        "gather": (gather_policy, shared, league),
    }
    read = lambda t: (t.obs["agents"], t.action["agents"], t.reward)  # noqa: E731
    programs = {}
    for name, (member_policy, policy_mapping_fn, params) in cases.items():
        policy_map = rollout.agents.policy_map(
            {"it": member_policy}, policy_mapping_fn, env
        )
        collector = rollout.Collector(env=env, policy=policy_map)
        programs[name] = steps(collector, NUM_STEPS, {"it": params}, read)
    return programs


def one_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times environments with a single agent."""
    for env_id, num_envs in itertools.product(ONE_IDS, ONE_ENVS):
        timing = measure(one_programs(env_id, num_envs), args.repeats)
        ratio = timing["agent"].wall / timing["plain"].wall
        full = timing["agent_full"].wall / timing["plain_full"].wall
        yield {
            "environment": f"`{env_id}`",
            "lanes": f"{num_envs:,}",
            "time of eight fields / plain kernel": f"{ratio:.2f}",
            "time of every field / plain kernel": f"{full:.2f}",
        }


def population_rows(args: Namespace) -> Iterator[dict[str, str]]:
    """Times populations."""
    for size in SIZES:
        timing = measure(population_programs(size), args.repeats)
        shared, blocks, gather = (timing[x].wall for x in ("one", "blocks", "gather"))
        yield {
            "members": f"{size}",
            "one policy, ms": f"{1e3 * shared:.0f}",
            "time, members / one policy": f"{blocks / shared:.2f}",
            "time, gathered / members": f"{gather / blocks:.1f}",
        }


if __name__ == "__main__":
    run(__doc__, 25, {"one agent": one_rows, "population": population_rows})

"""Multi-agent environments in closed form, and a plain model of transitions.

The observation of agent a after n steps is `10 n + a`, or -1 if it is not valid.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
from cases import last_word
from flax import struct
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from rollout import envs

NUM_STEPS, NUM_AGENTS, B = 5, 3, 2


def _tables(num_rows, dtype, elements):
    return st_np.arrays(dtype, (num_rows, NUM_AGENTS), elements=elements)


_RARE = st.integers(0, 7).map(lambda x: x == 7)
# Strategies for the arguments of `schedule`.
TABLES = {
    "acting": _tables(NUM_STEPS + 1, bool, st.booleans()),
    "reward": _tables(NUM_STEPS, np.float32, st.integers(-3, 9).map(float)),
    "terminated": _tables(NUM_STEPS, bool, _RARE),
    "truncated": _tables(NUM_STEPS, bool, _RARE),
    "end": st.sampled_from(["terminated", "truncated"]),
}


@struct.dataclass(kw_only=True)
class ScheduleEnv:
    """Replays tables of acting agents, rewards and endings.

    Attributes:
        acting: `[L + 1, A]` bool, the agents that act at each step; the last row
            follows the last step.
        reward: `[L, A]` float32, rewards.
        terminated: `[L, A]` bool, terminations of single agents.
        truncated: `[L, A]` bool, truncations of single agents.
        episode_terminated: `[L]` bool, termination of all agents.
        episode_truncated: `[L]` bool, truncation of all agents. One flag is set for the
            last step.
    """

    acting: jax.Array  # [L + 1, A]
    reward: jax.Array  # [L, A]
    terminated: jax.Array  # [L, A]
    truncated: jax.Array  # [L, A]
    episode_terminated: jax.Array  # [L]
    episode_truncated: jax.Array  # [L]
    names: tuple[str, ...] = struct.field(pytree_node=False, default=("a", "b", "c"))

    @property
    def agents(self):
        return self.names

    @property
    def groups(self):
        return {"all": self.names}

    @property
    def observation_spaces(self):
        return {"all": envs.Box(-1.0, 1e6, ())}

    @property
    def action_spaces(self):
        return {"all": envs.Discrete(1_000_000)}

    def reset(self, key):
        # Every reset returns step 0, so a missing reset changes the rows.
        return jnp.int32(0), {"all": self.observe(0, self.acting[0])}, self.acting[0]

    def step(self, key, state, action):
        num, n = self.reward.shape[0], state + 1
        agent_done = self.terminated[state] | self.truncated[state]
        is_truncated = (n == num) & ~self.episode_terminated[state]
        return envs.multi_agent.MultiAgentStep(
            state=n,
            obs={"all": self.observe(n, self.acting[n] | agent_done)},
            acting=self.acting[n],
            reward=self.reward[state],
            terminated=self.terminated[state],
            truncated=self.truncated[state],
            episode_terminated=self.episode_terminated[state],
            episode_truncated=self.episode_truncated[state] | is_truncated,
        )

    def observe(self, n, valid):
        return jnp.where(valid, 10.0 * n + jnp.arange(len(self.names)), -1.0)


@struct.dataclass
class OneAgent:
    """Adapts an `Env` to a `MultiAgentEnv` with a single agent."""

    env: envs.types.Env
    agents = ("only",)
    simultaneous = True

    groups = types.MappingProxyType({"all": ("only",)})

    @property
    def observation_spaces(self):
        return {"all": self.env.observation_space}

    @property
    def action_spaces(self):
        return {"all": self.env.action_space}

    def reset(self, key):
        state, obs = self.env.reset(key)
        return state, {"all": obs[None]}, jnp.ones(1, bool)

    def step(self, key, state, action):
        result = self.env.step(key, state, action["all"][0])
        no_agent = jnp.zeros(1, bool)
        return envs.multi_agent.MultiAgentStep(
            state=result.state,
            obs={"all": result.obs[None]},
            acting=~no_agent,
            reward=jnp.float32(result.reward)[None],
            terminated=no_agent,
            truncated=no_agent,
            episode_terminated=result.terminated,
            episode_truncated=result.truncated,
            info=result.info,
        )


@struct.dataclass
class ChanceEnv:
    """Samples acting agents, rewards and endings from the words of keys.

    Agents a and c form one group. Agent b forms another group with different spaces.
    The observation of agent a after n steps is `10 n + a`, or -1 if it is not valid.
    `info` contains the action.
    """

    is_turn_based: bool = struct.field(pytree_node=False, default=False)
    agents = "a", "b", "c"

    groups = types.MappingProxyType({"two": ("a", "c"), "one": ("b",)})

    @property
    def observation_spaces(self):
        return {"two": envs.Box(-1.0, 1e6, ()), "one": envs.Box(-1.0, 1e6, (2,))}

    @property
    def action_spaces(self):
        return {"two": envs.Discrete(4), "one": envs.Box(0.0, 1.0, (2,))}

    def reset(self, key):
        acting = self.choose(last_word(key))
        obs = self.observe(0, acting)
        return {"n": jnp.int32(0), "next": acting}, obs, acting

    def step(self, key, state, action):
        word, n = last_word(key), state["n"] + 1
        bits = (word >> jnp.arange(30)) & 1 != 0
        agent_done = bits[3:6] & bits[6:9] & bits[9:12]
        acting = self.choose(word >> 12)
        return envs.multi_agent.MultiAgentStep(
            state={"n": n, "next": acting},
            obs=self.observe(n, acting | agent_done),
            acting=acting,
            reward=((word >> jnp.array([16, 18, 20])) & 3).astype(jnp.float32),
            terminated=agent_done & bits[22],
            truncated=agent_done & ~bits[22],
            episode_terminated=bits[23] & bits[24] & bits[25],
            episode_truncated=n == 9,
            info={"action": action},
        )

    def choose(self, word):
        if self.is_turn_based:
            return jnp.arange(3) == word % 3
        return (word >> jnp.arange(3)) & 1 != 0

    def observe(self, n, valid):
        obs = jnp.where(valid, 10.0 * n + jnp.arange(3), -1.0)
        return {"two": obs[jnp.array([0, 2])], "one": jnp.repeat(obs[1:2], 2)[None]}


@jax.tree_util.register_static  # pyright: ignore[reportArgumentType] flax adds `__hash__`
class AllAct(ChanceEnv):
    """A `ChanceEnv` in which every agent that has not ended acts at every step."""

    simultaneous = True

    def choose(self, word):
        return jnp.ones(3, bool)


def schedule(
    acting, reward, *, terminated=None, truncated=None, end="terminated", names="abc"
):
    """Creates a `ScheduleEnv` from lists; `end` is the flag of the last step."""
    num_steps, num_agents = np.shape(reward)
    is_last = np.arange(num_steps) == num_steps - 1
    no_agent = np.zeros((num_steps, num_agents), bool)
    return ScheduleEnv(
        acting=jnp.asarray(acting, bool),
        reward=jnp.asarray(reward, jnp.float32),
        terminated=jnp.asarray(no_agent if terminated is None else terminated, bool),
        truncated=jnp.asarray(no_agent if truncated is None else truncated, bool),
        episode_terminated=jnp.asarray(is_last & (end == "terminated")),
        episode_truncated=jnp.asarray(is_last & (end == "truncated")),
        names=tuple(names)[:num_agents],
    )


def play(env, *, is_team=False):
    """Plays an episode of a `ScheduleEnv`, agent by agent in plain Python.

    Returns:
        The rows of each agent in the format of `rows_of`, for `agent_transitions` or
        `team_transitions`; the return of each agent; the part of the return without a
        pending action; and the length of the episode.
    """
    tables = jax.tree.map(np.asarray, env)
    num_steps, num_agents = tables.reward.shape
    rows = [[] for _ in range(num_agents)]
    pending = [None] * num_agents  # [obs, reward so far]
    final_flags = [(False, False)] * num_agents  # terminated, truncated
    returns, unassigned = np.zeros(num_agents), np.zeros(num_agents)
    for n in range(num_steps):
        reward, step_flags = tables.reward[n], [(False, False)] * num_agents
        for a in range(num_agents):
            if tables.acting[n, a] and not any(final_flags[a]):
                assert pending[a] is None
                pending[a] = [10 * n + a, 0.0]
            returns[a] += reward[a]
            if pending[a] is None:
                unassigned[a] += reward[a]
            else:
                pending[a][1] += reward[a]
            if not any(final_flags[a]):
                flags = tables.terminated[n, a], tables.truncated[n, a]
                final_flags[a] = step_flags[a] = tuple(map(bool, flags))
        all_done = all(map(any, final_flags))
        is_truncated = n == num_steps - 1 and not tables.episode_terminated[n]
        all_terminated = all(terminated for terminated, _ in final_flags)
        end = (
            bool(tables.episode_terminated[n]) or (all_done and all_terminated),
            is_truncated or (all_done and not all_terminated),
        )
        for a in range(num_agents):
            acts_next = tables.acting[n + 1, a] and not any(final_flags[a])
            is_valid = any(step_flags[a]) or acts_next
            if pending[a] is None:
                rows[a] += [(None, reward[a], None, *end, False, False)] * is_team
            elif is_valid or any(end):
                obs, reward_sum = pending[a]
                next_obs = 10 * (n + 1) + a if is_valid else obs
                flags = step_flags[a] if any(step_flags[a]) and not is_team else end
                rows[a].append((obs, reward_sum, next_obs, *flags, not is_valid, True))
                pending[a] = None
        if any(end):
            return rows, returns, unassigned, n + 1
    raise AssertionError("the episode must end")


def rows_of(rows, num_envs, num_agents):
    """Returns the rows of one group by lane and agent, in time order.

    A row is `(obs, reward, next_obs, terminated, truncated, stale, acting)`. Both
    observations are None if the agent does not act.
    """
    rows_by_agent = {}
    for column in range(num_envs * num_agents):
        rows_by_agent[divmod(column, num_agents)] = agent_rows = []
        for t in np.flatnonzero(rows.mask[:, column]):
            fields = rows.obs, rows.reward, rows.next_obs, rows.terminated
            fields += rows.truncated, rows.stale_next_obs, rows.acting
            obs, reward, next_obs, *flags = (x[t, column] for x in fields)
            is_acting = flags[-1]
            values = (obs, reward, next_obs) if is_acting else (None, reward, None)
            agent_rows.append((*values, *flags))
    return rows_by_agent


@jax.tree_util.register_static
class Walk:
    """Three agents walk; agent i ends after 4 + i steps, the last by truncation."""

    agents = "a", "b", "c"
    groups = {"agents": agents}  # noqa: RUF012
    simultaneous = True
    observation_spaces = {"agents": envs.Box(-100.0, 100.0, (2,))}  # noqa: RUF012
    action_spaces = {"agents": envs.Discrete(2)}  # noqa: RUF012

    def reset(self, key):
        position = jax.random.randint(key, (3,), -2, 3)
        state = position, jnp.int32(0)
        return state, self.observe(state), jnp.ones(3, bool)

    def observe(self, state):
        position, n = state
        n = jnp.broadcast_to(n, 3)
        return {"agents": jnp.stack([position, n], -1).astype(jnp.float32)}

    def step(self, key, state, action):
        position, n = state
        state = position + 2 * action["agents"] - 1, n + 1
        ended = n + 1 == 4 + jnp.arange(3)
        is_last = jnp.arange(3) == 2
        return envs.multi_agent.MultiAgentStep(
            state=state,
            obs=self.observe(state),
            acting=jnp.ones(3, bool),
            reward=-jnp.abs(state[0]).astype(jnp.float32),
            terminated=ended & ~is_last,
            truncated=ended & is_last,
            episode_terminated=False,
            episode_truncated=False,
        )

"""Environments of several agents in closed form, and a plain model of transitions.

The observation of agent a after n steps is `10 n + a`, and -1 where it is void.
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
    """Follows tables: who acts, the rewards, and the endings.

    Attributes:
        acting: `[L + 1, A]` bool, who acts before each step, and after the last.
        reward: `[L, A]` float32.
        terminated: `[L, A]` bool, own endings.
        truncated: `[L, A]` bool, likewise.
        episode_terminated: `[L]` bool, the end for all.
        episode_truncated: `[L]` bool, likewise. Step L is one or the other.
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
        # Another key, another state, so that a reset that is forgotten shows.
        return jnp.int32(0), {"all": self.observe(0, self.acting[0])}, self.acting[0]

    def step(self, key, state, action):
        num, n = self.reward.shape[0], state + 1
        ended = self.terminated[state] | self.truncated[state]
        is_cut = (n == num) & ~self.episode_terminated[state]
        return envs.multi_agent.MultiAgentStep(
            state=n,
            obs={"all": self.observe(n, self.acting[n] | ended)},
            acting=self.acting[n],
            reward=self.reward[state],
            terminated=self.terminated[state],
            truncated=self.truncated[state],
            episode_terminated=self.episode_terminated[state],
            episode_truncated=self.episode_truncated[state] | is_cut,
        )

    def observe(self, n, valid):
        return jnp.where(valid, 10.0 * n + jnp.arange(len(self.names)), -1.0)


@struct.dataclass
class OneAgent:
    """An `Env` as an environment of one agent."""

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
        result, none = self.env.step(key, state, action["all"][0]), jnp.zeros(1, bool)
        return envs.multi_agent.MultiAgentStep(
            state=result.state,
            obs={"all": result.obs[None]},
            acting=~none,
            reward=jnp.float32(result.reward)[None],
            terminated=none,
            truncated=none,
            episode_terminated=result.terminated,
            episode_truncated=result.truncated,
            info=result.info,
        )


@struct.dataclass
class ChanceEnv:
    """Acting, rewards and endings by chance, from the words of keys.

    Agents a, c are one group, b another with other spaces. The observation of an agent
    after n steps is `10 n + a`, and -1 where it is void. `info` is the action.
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
        ended = bits[3:6] & bits[6:9] & bits[9:12]
        acting = self.choose(word >> 12)
        return envs.multi_agent.MultiAgentStep(
            state={"n": n, "next": acting},
            obs=self.observe(n, acting | ended),
            acting=acting,
            reward=((word >> jnp.array([16, 18, 20])) & 3).astype(jnp.float32),
            terminated=ended & bits[22],
            truncated=ended & ~bits[22],
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


@jax.tree_util.register_static
class AllAct(ChanceEnv):
    """Everyone who is left acts."""

    simultaneous = True

    def choose(self, word):
        return jnp.ones(3, bool)


def schedule(
    acting, reward, *, terminated=None, truncated=None, end="terminated", names="abc"
):
    """A `ScheduleEnv` of lists; `end` says what the last step is."""
    num_steps, num_agents = np.shape(reward)
    last = np.arange(num_steps) == num_steps - 1
    none = np.zeros((num_steps, num_agents), bool)
    return ScheduleEnv(
        acting=jnp.asarray(acting, bool),
        reward=jnp.asarray(reward, jnp.float32),
        terminated=jnp.asarray(none if terminated is None else terminated, bool),
        truncated=jnp.asarray(none if truncated is None else truncated, bool),
        episode_terminated=jnp.asarray(last & (end == "terminated")),
        episode_truncated=jnp.asarray(last & (end == "truncated")),
        names=tuple(names)[:num_agents],
    )


def play(env, *, is_team=False):
    """One episode of a `ScheduleEnv`, agent by agent in plain Python.

    Returns:
        Rows by agent, as `rows_of` lists those of `agent_transitions`, or those of
        `team_transitions`; the return of each agent, the part of it that came without
        a pending action, and the episode's length.
    """
    tables = jax.tree.map(np.asarray, env)
    num_steps, num_agents = tables.reward.shape
    rows = [[] for _ in range(num_agents)]
    pending = [None] * num_agents  # [obs, reward so far]
    over = [(False, False)] * num_agents  # terminated, truncated
    total, unassigned = np.zeros(num_agents), np.zeros(num_agents)
    for n in range(num_steps):
        reward, now = tables.reward[n], [(False, False)] * num_agents
        for a in range(num_agents):
            if tables.acting[n, a] and not any(over[a]):
                assert pending[a] is None
                pending[a] = [10 * n + a, 0.0]
            total[a] += reward[a]
            if pending[a] is None:
                unassigned[a] += reward[a]
            else:
                pending[a][1] += reward[a]
            if not any(over[a]):  # how each agent itself ends
                now[a] = bool(tables.terminated[n, a]), bool(tables.truncated[n, a])
                over[a] = now[a]
        all_over = all(map(any, over))
        is_cut = n == num_steps - 1 and not tables.episode_terminated[n]
        all_terminated = all(terminated for terminated, _ in over)
        end = (
            bool(tables.episode_terminated[n]) or (all_over and all_terminated),
            is_cut or (all_over and not all_terminated),
        )
        for a in range(num_agents):
            is_seen = any(now[a]) or (tables.acting[n + 1, a] and not any(over[a]))
            if pending[a] is None:
                rows[a] += [(None, reward[a], None, *end, False, False)] * is_team
            elif is_seen or any(end):
                obs, earned = pending[a]
                next_obs = 10 * (n + 1) + a if is_seen else obs
                flags = now[a] if any(now[a]) and not is_team else end
                rows[a].append((obs, earned, next_obs, *flags, not is_seen, True))
                pending[a] = None
        if any(end):
            return rows, total, unassigned, n + 1
    raise AssertionError("it must end")


def rows_of(rows, num_envs, num_agents):
    """The rows of one group, by lane and agent, in order of time.

    Each is `(obs, reward, next_obs, terminated, truncated, stale, acting)`; both
    observations are None where the agent does not act.
    """
    found = {}
    for column in range(num_envs * num_agents):
        found[divmod(column, num_agents)] = own = []
        for t in np.flatnonzero(rows.mask[:, column]):
            fields = rows.obs, rows.reward, rows.next_obs, rows.terminated
            fields += rows.truncated, rows.stale_next_obs, rows.acting
            obs, reward, next_obs, *flags = (x[t, column] for x in fields)
            is_acting = flags[-1]
            seen = (obs, reward, next_obs) if is_acting else (None, reward, None)
            own.append((*seen, *flags))
    return found

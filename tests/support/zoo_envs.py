"""Environments with the interfaces of PettingZoo, and plain loops over them.

The classes do not import PettingZoo. Their spaces are Gymnasium's.
"""

import collections
from typing import Any

import gymnasium
import numpy as np

Box, Discrete = gymnasium.spaces.Box, gymnasium.spaces.Discrete
ACTION_SPACES = {"red": Discrete(3), "blue": Box(-1.0, 1.0, (2,), np.float32)}
OBSERVATION_SPACES = {
    "red": Box(-1e6, 1e6, (3,), np.float32),
    "blue": gymnasium.spaces.Dict(
        {"position": Box(-1e6, 1e6, (4,), np.float64), "step": Discrete(100)}
    ),
}
DUEL_ACTIONS = Discrete(4)
DUEL_SPACE = gymnasium.spaces.Dict(
    {
        "observation": Box(-1e6, 1e6, (2,), np.float32),
        "action_mask": Box(0, 1, (4,), np.int8),
    }
)


class Crowd:
    """A `ParallelEnv` in which agents of two groups join late and leave early.

    The observation of an agent contains the step, its number and its last action.
    """

    render_mode = "rgb_array"
    possible_agents = ("red_0", "blue_0", "red_1", "blue_1", "red_2")

    def __init__(self, late=True):
        self.late, self.agents = late, []

    def observation_space(self, agent):
        return OBSERVATION_SPACES[agent.rstrip("_0123456789")]

    def action_space(self, agent):
        return ACTION_SPACES[agent.rstrip("_0123456789")]

    def reset(self, seed=None, options=None):
        self.random, self.step_number = np.random.default_rng(seed), 0
        self.waiting = list(self.possible_agents)
        self.agents = self._join(all_agents=not self.late)
        observations = {agent: self.observe(agent, 0.0) for agent in self.agents}
        return observations, {agent: {} for agent in self.agents}

    def _join(self, all_agents=False):
        joining = [x for x in self.waiting if all_agents or self.random.random() < 0.5]
        joining = joining or self.waiting[:1]
        self.waiting = [x for x in self.waiting if x not in joining]
        return joining

    def observe(self, agent, action):
        number = self.possible_agents.index(agent)
        if agent.startswith("red"):
            return np.array([self.step_number, number, action], np.float32)
        position = np.array([self.step_number, number, *np.resize(action, 2)])
        return {"position": position, "step": np.int64(self.step_number)}

    def step(self, actions):
        assert set(actions) == set(self.agents), (list(actions), self.agents)
        self.step_number += 1
        observations, rewards, terminations, truncations, infos = {}, {}, {}, {}, {}
        limit = self.step_number >= 12
        for agent, action in actions.items():
            rewards[agent] = float(self.random.integers(-3, 4))
            terminations[agent] = bool(self.random.random() < 0.15)
            truncations[agent] = bool(limit or self.random.random() < 0.05)
            observations[agent] = self.observe(agent, action)
            infos[agent] = {"hits": self.step_number}
        ended = [x for x in actions if terminations[x] or truncations[x]]
        self.agents = [x for x in self.agents if x not in ended]
        if self.waiting and not limit and self.random.random() < 0.4:
            joining = self._join()
            self.agents += joining
            for agent in joining:
                observations[agent] = self.observe(agent, 0.0)
                rewards[agent], infos[agent] = 0.0, {}
                terminations[agent] = truncations[agent] = False
        return observations, rewards, terminations, truncations, infos

    def render(self):
        return np.full((8, 8, 3), self.step_number, np.uint8)

    def close(self):
        pass

    def save_state(self):
        full = self.random.bit_generator.state
        words = full["state"]
        parts = [words[x] >> (32 * i) & 0xFFFFFFFF for x in words for i in range(4)]
        flags = [(x in self.agents, x in self.waiting) for x in self.possible_agents]
        order = [self.possible_agents.index(x) for x in self.agents]
        return {
            "random": np.array(parts, np.uint32),
            "buffer": np.array([full["has_uint32"], full["uinteger"]], np.uint32),
            "flags": np.array(flags),
            "order": np.array(order, np.int32),
            "step": self.step_number,
        }

    def load_state(self, state):
        parts = [int(x) for x in state["random"]]
        words = [
            sum(x << (32 * i) for i, x in enumerate(parts[j : j + 4])) for j in (0, 4)
        ]
        full: Any = self.random.bit_generator.state
        full["state"] = dict(zip(("state", "inc"), words, strict=True))
        full["has_uint32"], full["uinteger"] = (int(x) for x in state["buffer"])
        self.random.bit_generator.state = full
        self.step_number = int(state["step"])
        names = self.possible_agents
        self.agents = [names[i] for i in state["order"]]
        self.waiting = [x for x, (_, y) in zip(names, state["flags"], strict=True) if y]


class Duel:
    """An `AECEnv` whose agents earn late rewards and end in turns of other agents.

    An observation is the number of turns, the agent's number, and an action mask.
    """

    possible_agents: tuple[str, ...] = ("north", "east", "south")

    def __init__(self, deads_first=True):
        self.deads_first = deads_first

    def observation_space(self, agent):
        return DUEL_SPACE

    def action_space(self, agent):
        return DUEL_ACTIONS

    def reset(self, seed=None, options=None):
        self.random, self.num_turns = np.random.default_rng(seed), 0
        self.agents = list(self.possible_agents)
        self.rewards: dict[str, float] = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards: dict[str, float] = dict.fromkeys(self.agents, 0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {x: {"turns": 0} for x in self.agents}
        self.agent_selection = self.agents[self.random.integers(3)]

    def observe(self, agent):
        number = self.possible_agents.index(agent)
        mask = np.array([1, self.num_turns % 2, number == 1, 0], np.int8)
        return {
            "observation": np.array([self.num_turns, number], np.float32),
            "action_mask": mask,
        }

    def last(self, observe=True):
        agent = self.agent_selection
        values = self._cumulative_rewards, self.terminations, self.truncations
        obs = self.observe(agent) if observe else None
        return obs, *(x[agent] for x in values), self.infos[agent]

    def agent_iter(self, max_iter=2**63):
        while self.agents and max_iter:
            max_iter -= 1
            yield self.agent_selection

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            assert action is None
            self.agents.remove(agent)
            for values in (
                self.rewards,
                self._cumulative_rewards,
                self.terminations,
                self.truncations,
                self.infos,
            ):
                del values[agent]
            self.rewards = dict.fromkeys(self.agents, 0)
            self._select(agent)
            return
        assert self.observe(agent)["action_mask"][action], (agent, action)
        self.num_turns += 1
        self._cumulative_rewards[agent] = 0
        for x in self.agents:
            self.rewards[x] = self.random.integers(-2, 3) / 4 + (x == agent) * int(
                action
            )
            self._cumulative_rewards[x] += self.rewards[x]
            self.infos[x] = {"turns": self.num_turns}
            if self.random.random() < 0.12:
                self.terminations[x] = True
            if self.num_turns >= 15 or self.random.random() < 0.03:
                self.truncations[x] = True
        self._select(agent)

    def _select(self, agent):
        if not self.agents:
            return
        ended = [x for x in self.agents if self.terminations[x] or self.truncations[x]]
        if ended and self.deads_first:
            self.agent_selection = ended[0]
            return
        names = self.possible_agents
        start = names.index(agent) + 1
        order = [names[(start + i) % 3] for i in range(3)]
        self.agent_selection = next(x for x in order if x in self.agents)

    def close(self):
        pass


class Rows:
    """The transitions of the agents of one environment, by a plain loop.

    Attributes:
        rows: by agent, `(obs, action, reward, next_obs, terminated, truncated)`.
        returns: by episode, the return of each agent.
    """

    def __init__(self):
        self.rows = collections.defaultdict(list)
        self.returns = []


def play_parallel(env, seeds, action_fn):
    """Plays episodes of a `ParallelEnv`; `action_fn(t, agent)` raises at the end."""
    result, t = Rows(), 0
    for seed in seeds:
        obs, _ = env.reset(seed=seed)
        returns = collections.Counter()
        while env.agents:
            try:
                actions = {agent: action_fn(t, agent) for agent in env.agents}
            except IndexError:
                return result
            next_obs, rewards, terminations, truncations, _ = env.step(actions)
            t += 1
            for agent, action in actions.items():
                row = obs[agent], action, rewards[agent], next_obs[agent]
                flags = terminations[agent], truncations[agent]
                result.rows[agent].append((*row, *flags))
                returns[agent] += rewards[agent]
            obs = next_obs
        result.returns.append(returns)
    return result


def play_turns(env, seeds, action_fn):
    """Plays episodes of an `AECEnv`, as in PettingZoo's documentation."""
    result, t = Rows(), 0
    for seed in seeds:
        env.reset(seed=seed)
        returns, sources = collections.Counter(), {}
        for agent in env.agent_iter():
            obs, reward, terminated, truncated, _ = env.last()
            returns[agent] += reward
            if agent in sources:
                row = (*sources.pop(agent), reward, obs, terminated, truncated)
                result.rows[agent].append(row)
            if terminated or truncated:
                env.step(None)
                continue
            try:
                action = action_fn(t, agent)
            except IndexError:
                return result
            t += 1
            sources[agent] = obs, action
            env.step(action)
        result.returns.append(returns)
    return result

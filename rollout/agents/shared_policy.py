"""Parameter sharing: one policy for all agents of an environment."""

from typing import Any

import chex
import jax

from rollout.agents.mapping import static_mapping
from rollout.agents.policy_map import PolicyMap, policy_map
from rollout.agents.transitions import agent_transitions, last_values
from rollout.base import checks
from rollout.collector import Collector
from rollout.envs.multi_agent import layout_of
from rollout.envs.spaces import EnvSpec, make_spec
from rollout.envs.types import ArrayTree
from rollout.host.host_collector import HostCollector
from rollout.types import Carry, Key, Policy, PolicyStep, Transition

_NAME = "shared"  # name of the policy in the `policy_map`


class SharedPolicy(Policy):
    """Applies one policy, with its parameters, to all agents.

    Attributes:
        policies: the `policy_map` of the policy, made by `share_policy`.
    """

    policies: PolicyMap

    def init(self, num_envs: int) -> ArrayTree:
        """Returns the initial state of the policy for all agents."""
        return self.policies.init(num_envs)

    def apply(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Applies the policy to all agents."""
        return self.policies.apply({_NAME: params}, obs, state, key)

    def mode(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Applies the mode of the policy to all agents."""
        return self.policies.mode({_NAME: params}, obs, state, key)

    def value(self, params: Any, obs: Any, state: Any) -> Any:
        """Evaluates the critic of the policy, `{group: [B, A]}`."""
        return self.policies.value({_NAME: params}, obs, state)

    @property
    def has_mode(self) -> bool:
        """Whether the policy has a mode."""
        return self.policies.has_mode

    @property
    def has_value(self) -> bool:
        """Whether the policy has a critic."""
        return self.policies.has_value


def share_policy(policy: Policy, env: Any) -> SharedPolicy:
    """Lets all agents of an environment act by one policy (parameter sharing).

    Args:
        policy: policy for the observations and actions of one agent.
        env: environment with the agents, as in `policy_map`.

    Returns:
        A policy for the environment, whose parameters are those of `policy`.

    Raises:
        ValueError: as in `policy_map`.
    """
    policies: Any = policy_map({_NAME: policy}, static_mapping(_NAME), env)
    return SharedPolicy(policies=policies)


def spec_of_agent(env: Any) -> EnvSpec:
    """Returns the spaces of one agent, and the number of agents in all environments.

    Raises:
        ValueError: if the agents cannot share the training of one policy: if their
            spaces differ, or if some agents do not act at every step until their end;
            if `env` is a single environment; if a space has no entries.
    """
    layout = layout_of(env)
    if len(layout.groups) > 1 or not layout.simultaneous:
        groups = {x.name: [layout.agents[i] for i in x.members] for x in layout.groups}
        problem = "" if layout.simultaneous else ", which do not act at every step"
        raise ValueError(
            "`env` must have agents with equal spaces that act at every step until "
            f"their end, so that they share one policy, got the groups {groups}"
            f"{problem}. Train a policy for each group, or agents that take turns, "
            "with `rollout.agents.policy_map` and `agent.learn`."
        )
    if not hasattr(env, "num_envs"):
        raise ValueError(
            f"`env` must be parallel environments, got {checks.describe(env)} without "
            "`num_envs`. Call `rollout.envs.vectorize(env, num_envs)` first."
        )
    (group,) = env.groups
    return make_spec(
        lambda: (env.observation_spaces[group], env.action_spaces[group]),
        env.num_envs * len(layout.agents),
    )


class SharedCollector:
    """Collects the transitions of agents that share one policy.

    Attributes:
        collector: collector of a `SharedPolicy`.
        is_host: whether Python steps the environments.
        env: the environments.
    """

    def __init__(self, collector: Collector | HostCollector) -> None:
        self.collector: Any = collector
        self.is_host, self.env = collector.is_host, collector.env
        (group,) = layout_of(collector.env).groups
        self._group = group.name

    def init(self, key: chex.PRNGKey) -> Carry:
        """Starts the first episode of every environment; see `Collector.init`."""
        return self.collector.init(key)

    def collect_steps(
        self, carry: Carry, params: Any, num_steps: int
    ) -> tuple[Carry, Transition]:
        """Takes `num_steps` steps; returns the rows of all agents, `[T, B * A]`.

        `episode_return` is the return of the agent times the number of agents, so that
        its mean over the agents is the return of the team, as in `rollout.evaluate`.
        """
        carry, trajectory = self.collector.collect_steps(carry, params, num_steps)
        rows = _rows(trajectory)[self._group]
        num_agents = rows.mask.shape[1] // self.env.num_envs
        return carry, rows.replace(episode_return=rows.episode_return * num_agents)

    def value(self, carry: Carry, params: Any) -> jax.Array:
        """Evaluates the critic at the current observations, `[B * A]`."""
        values = self.collector.value(carry, params)
        return last_values((), values)[self._group]

    def agent_obs(self, carry: Carry) -> ArrayTree:
        """Returns the current observations of all agents, `[B * A, ...]`."""
        obs = carry.obs[self._group]
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)

    def save(self, carry: Carry) -> list[bytes]:
        """Returns the states of host environments; see `HostCollector.save`."""
        return self.collector.save(carry)

    def restore(self, carry: Carry, saved: list[bytes]) -> Carry:
        """Continues from a carry; see `HostCollector.restore`."""
        return self.collector.restore(carry, saved)


@jax.jit
def _rows(trajectory: Transition) -> Any:
    return agent_transitions((), trajectory)[1]

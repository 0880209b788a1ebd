"""Combines single-agent policies into one multi-agent policy."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from rollout.agents import mapping
from rollout.agents.mapping import (
    FixedMapping,
    MapExtras,
    MappingFn,
    PolicyIndex,
    Subgroup,
)
from rollout.agents.population import Population
from rollout.base import checks, prng, trees
from rollout.envs.multi_agent import ACTING, AgentLayout, layout_of
from rollout.envs.types import ArrayTree
from rollout.policies import masks, random_policy
from rollout.types import Carry, EpisodeKey, Key, Obs, Params, Policy, PolicyStep

_INDEX = "`policy_mapping_fn` must return the index of each agent's policy"
_NUM_SAMPLES = 64  # results of a mapping function that `policy_map` validates


def policy_map(
    policies: Mapping[str, Policy | Population],
    policy_mapping_fn: MappingFn | FixedMapping,
    env: Any,
    *,
    groups: Mapping[str, Collection[str]] | None = None,
    value_fn: Callable[[Any, Any, Any], ArrayTree] | None = None,
) -> Policy:
    """Combines single-agent policies into one multi-agent policy.

    Each policy observes the agents that it controls as a batch: the `obs` of their
    group, `[B * n, ...]`, lane by lane. An agent's recurrent state is reset in every
    episode and does not change at steps at which the agent does not act. If a single
    policy controls a single group, it receives the key of the step. Several policies
    receive keys derived from the key of the step.

    Args:
        policies: policies and populations by name. Policies of one group may have
            different classes. Extras are joined by name, with zeros for policies
            without an entry.
        policy_mapping_fn: function `(key, agents)` of a key and the names of the agents
            that returns the index of each agent's policy, `[A]` integers. Indices
            follow the order of `policies`, and a population has one index per member.
            The key belongs to the lane's episode, so the mapping is constant within an
            episode and does not depend on the number of lanes. Or the result of
            `static_mapping`. Outside of `jit`, some of its indices are validated.
        env: environment with the agents: a `MultiAgentEnv`, or the result of
            `rollout.envs.vectorize`. The policy acts in any number of lanes of
            environments with the same agents.
        groups: names of the groups that a policy can act for, by policy; only for a
            mapping function. A policy without an entry must be able to act for all
            groups.
        value_fn: critic of the team, which replaces the critics of the policies:
            function `(params, obs, state)` that returns values, `[K]` float32 or
            `[K, A_g]` by group; see `Policy.value`.

    Returns:
        A policy for lanes of an environment with several agents. Its `params` are a
        dict with an entry for every policy name. Its extras are `MapExtras`. Agents
        without a policy that can act for them take the action zero. Its mode uses the
        modes of the policies, and `apply` of policies without a mode. Without a
        `value_fn`, its critic returns values by group, `[K, A_g]`, for groups with a
        critic, and 0 for agents whose policy has no critic.

    Raises:
        ValueError: if `policies` is not a dict of policies by name, or contains a
            population under a fixed mapping; if `env` does not have several agents; if
            the mapping lacks an agent, or names an unknown agent or policy; if `groups`
            names an unknown group or policy, leaves a group without a policy, or is
            given with a fixed mapping. While tracing, if a policy returns actions
            outside the group's action space, or extras other than () or a dict, or if
            `params` lacks an entry.
    """
    index = PolicyIndex(mapping.number(policies), None)
    message = "`policy_mapping_fn` must be a function or made by `static_mapping`"
    checks.check_type(message, policy_mapping_fn, Callable | FixedMapping)
    if value_fn is not None:
        checks.check_function("value_fn", value_fn, "params", "obs", "state")
    layout, by_agent = layout_of(env), None
    groups = {} if groups is None else dict(groups)
    if isinstance(policy_mapping_fn, FixedMapping):
        by_agent = mapping.policies_by_agent(policies, policy_mapping_fn, layout)
    else:
        _check_mapping_fn(policy_mapping_fn, layout.agents, index.indices[-1][2])
    group_names = {group.name for group in layout.groups}
    policy_names = set(policies) if by_agent is None else set()
    used_groups = {name for names in groups.values() for name in names}
    subgroups = mapping.make_subgroups(policies, index, layout, by_agent, groups)
    unused_groups = group_names - {subgroup.group.name for subgroup in subgroups}
    has_valid_names = set(groups) <= policy_names and used_groups <= group_names
    if unused_groups or not has_valid_names:
        raise ValueError(
            "`groups` must map the policies of a mapping function "
            f"({', '.join(sorted(policy_names)) or 'none'}) to groups "
            f"({', '.join(sorted(group_names))}), each with a policy, got {groups}."
        )
    if by_agent is not None:
        columns = tuple((x.name, x.group.name, x.columns) for x in subgroups)
        index = index.replace(columns=columns)
    return PolicyMap(
        policies=tuple(policies.values()),
        policy_mapping_fn=policy_mapping_fn,
        value_fn=value_fn,
        index=index,
        layout=layout,
        subgroups=subgroups,
    )


def random_policy_map(env: Any) -> Policy:
    """Makes a policy that samples valid actions of all agents uniformly.

    Args:
        env: environment with the agents, as in `policy_map`. An entry `action_mask` of
            an agent's observation marks its valid actions.

    Returns:
        A policy with the name of each group as the name of a policy: its parameters are
        `dict.fromkeys(env.groups)`.

    Raises:
        ValueError: if `env` does not have several agents.
    """
    layout_of(env)  # raises if there is one agent
    policies = {}
    for group, space in env.action_spaces.items():
        action_mask_fn = masks.find_mask(env.observation_spaces[group], space)
        policies[group] = random_policy(space, action_mask_fn=action_mask_fn)
    groups = {agent: group for group, names in env.groups.items() for agent in names}
    return policy_map(policies, mapping.static_mapping(groups), env)


def _check_mapping_fn(
    fn: MappingFn, agents: tuple[str, ...], num_policies: int
) -> None:
    """Checks the shape of the indices of a mapping function, and samples of them."""
    indices = _sample_indices(fn, agents)
    if isinstance(indices, Tracer):
        return  # inside `jit` the values are unknown
    low, high = np.min(indices), np.max(indices)
    if low < 0 or high >= num_policies:
        raise ValueError(
            f"{_INDEX}, from 0 to {num_policies - 1}, got {low if low < 0 else high}."
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sample_indices(fn: MappingFn, agents: tuple[str, ...]) -> jax.Array:
    """Calls a mapping function with several keys; returns `[_NUM_SAMPLES, A]`."""

    def sample(key: Key) -> jax.Array:
        try:
            result = fn(key, agents)
        except Exception as error:
            raise ValueError(
                "`policy_mapping_fn` must be a function of a key and the names of all "
                f"agents, `(key, agents)`, got {checks.describe(fn)}, which raised "
                f"{type(error).__name__}: {error}. {mapping.BY_FUNCTION}"
            ) from error
        is_int = checks.has_dtype(result, jnp.integer)
        if not is_int or result.shape != (len(agents),):
            raise ValueError(
                f"{_INDEX}, integers of shape ({len(agents)},), got "
                f"{checks.describe(result)}. For names of policies, pass the result of "
                "`static_mapping`."
            )
        return result

    return jax.vmap(sample)(jax.random.split(jax.random.key(0), _NUM_SAMPLES))


def policy_state(state: Carry | ArrayTree, name: str) -> dict[str, ArrayTree]:
    """Returns the recurrent state of one policy of a `policy_map`.

    Args:
        state: a carry, or its `policy_state`, which `Policy.value` receives.
        name: name of the policy.

    Returns:
        The states by group, `[B * n, ...]`, for the `n` agents per lane that the policy
        may control, in the layout of the observations of the policy.

    Raises:
        ValueError: if the state does not contain the state of one `policy_map` with a
            policy of that name.
    """
    tree = state.policy_state if isinstance(state, Carry) else state
    is_map = lambda x: isinstance(x, _MapState)  # noqa: E731
    maps = [x for x in jax.tree.leaves(tree, is_leaf=is_map) if is_map(x)]
    if len(maps) != 1 or name not in maps[0].inner:
        names = ", ".join(maps[0].inner) if maps else "none"
        raise ValueError(
            f"`name` must be a policy of a `policy_map` ({names}), got {name!r}."
        )
    return mapping.merge(maps[0].inner[name])


class _MapState(struct.PyTreeNode, kw_only=True):
    """State of a policy map, `[B, n, ...]` per subgroup."""

    key: Any  # EpisodeKey from which the mapping is sampled; () if it is fixed
    inner: dict[str, dict[str, ArrayTree]]  # states by policy and group


class PolicyMap(Policy):
    """Multi-agent policy; made by `policy_map`."""

    policies: tuple[Policy | Population, ...]  # in the order of `index`
    # A `MappingFn` or a `FixedMapping`.
    policy_mapping_fn: Any = struct.field(pytree_node=False)
    # A function or None.
    value_fn: Any = struct.field(pytree_node=False)
    index: PolicyIndex = struct.field(pytree_node=False)
    layout: AgentLayout = struct.field(pytree_node=False, repr=False)
    subgroups: tuple[Subgroup, ...] = struct.field(pytree_node=False, repr=False)

    @property
    def is_fixed(self) -> bool:
        """Whether the mapping is the same in every episode."""
        return isinstance(self.policy_mapping_fn, FixedMapping)

    def policy_of(self, subgroup: Subgroup) -> Policy:
        """Returns the policy of a subgroup; the members' policy for a population."""
        names = [name for name, *_ in self.index.indices]
        policy = self.policies[names.index(subgroup.name)]
        return policy.policy if isinstance(policy, Population) else policy

    def init(self, num_envs: int) -> _MapState:
        """Returns the initial states of all policies."""
        inner = {name: {} for name, *_ in self.index.indices}
        for subgroup in self.subgroups:
            state = self.policy_of(subgroup).init(num_envs * len(subgroup.columns))
            state = mapping.unmerge(state, num_envs)
            inner[subgroup.name][subgroup.group.name] = state
        return _MapState(key=() if self.is_fixed else EpisodeKey(), inner=inner)

    def apply(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Applies all policies to the agents that they control."""
        return self._act(False, params, obs, state, key)

    def mode(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Applies the modes of the policies, and `apply` of policies without a mode."""
        return self._act(True, params, obs, state, key)

    def value(self, params: Any, obs: Any, state: Any) -> Any:
        """Calls `value_fn`, or evaluates the policies' critics, `[K, A_g]` by group."""
        if self.value_fn is not None:
            return self.value_fn(params, obs, state)
        policy_id = self._policy_ids(state, obs[ACTING].shape)
        values = {}
        for group in (x.name for x in self.layout.groups):
            subgroups = [x for x in self.subgroups if x.group.name == group]
            if any(self.policy_of(x).has_value for x in subgroups):
                parts = [
                    mapping.value(
                        x,
                        self.policy_of(x),
                        policy_id,
                        params,
                        obs,
                        state.inner[x.name][group],
                    )
                    for x in subgroups
                ]
                values[group] = mapping.join(
                    subgroups, parts, policy_id, is_fixed=self.is_fixed
                )
        return values

    @property
    def has_mode(self) -> bool:
        """Whether one of the policies has a mode."""
        return any(self.policy_of(x).has_mode for x in self.subgroups)

    @property
    def has_value(self) -> bool:
        """Whether `value_fn` is given or one of the policies has a critic."""
        has_critic = any(self.policy_of(x).has_value for x in self.subgroups)
        return self.value_fn is not None or has_critic

    def _act(
        self, use_mode: bool, params: Params, obs: Obs, state: _MapState, key: Key
    ) -> PolicyStep:
        message = "`policy_map` must act in an environment with several agents"
        checks.check_type(message, obs, Mapping)
        for subgroup in self.subgroups:
            if not isinstance(params, Mapping) or subgroup.name not in params:
                raise ValueError(
                    "`params` must be a dict with an entry for each policy of the map, "
                    f"got none for {subgroup.name!r}."
                )
        acting = obs[ACTING]
        policy_id = self._policy_ids(state, acting.shape)
        join = functools.partial(
            mapping.join, policy_id=policy_id, is_fixed=self.is_fixed
        )
        inner = {name: dict(groups) for name, groups in state.inner.items()}
        action, extras = {}, {}
        for group in (x.name for x in self.layout.groups):
            subgroups = [x for x in self.subgroups if x.group.name == group]
            steps = []
            for subgroup in subgroups:
                group_state = inner[subgroup.name][group]
                step_key = key  # a single policy samples as without a map
                if len(self.subgroups) > 1:
                    step_key = prng.fold_in(key, subgroup.number)
                policy = self.policy_of(subgroup)
                step = mapping.decide(
                    subgroup,
                    policy,
                    use_mode,
                    policy_id,
                    params,
                    obs,
                    group_state,
                    step_key,
                )
                # Update only the states of agents that act under this policy.
                is_acting = subgroup.of(acting & subgroup.controls(policy_id))
                inner[subgroup.name][group] = trees.select(
                    is_acting, step.state, group_state
                )
                steps.append(step)
            action[group] = join(subgroups, [step.action for step in steps])
            extras[group] = join(subgroups, mapping.fill_extras(subgroups, steps))
        extras = MapExtras(extras, policy_id, self.index)
        return PolicyStep(action, state.replace(inner=inner), extras)

    def _policy_ids(self, state: _MapState, shape: tuple[int, ...]) -> jax.Array:
        """Returns the policy of each agent, `[B, A]` int32."""
        agents = self.layout.agents
        if self.is_fixed:
            ids = np.zeros(len(agents), np.int32)
            for subgroup in self.subgroups:
                members = [subgroup.group.members[x] for x in subgroup.columns]
                ids[members] = subgroup.first
            return jnp.broadcast_to(jnp.asarray(ids)[None], shape)
        # Sample the mapping at every step. Storing it in the state would not be faster:
        # all lanes would still sample at every step, because some lanes are reset.
        sample = jax.vmap(lambda key: self.policy_mapping_fn(key, agents))
        policy_id = sample(prng.inline(state.key.value)).astype(jnp.int32)
        is_mapped = jnp.zeros(shape, bool)
        for subgroup in self.subgroups:
            is_member = np.isin(np.arange(len(agents)), subgroup.group.members)
            is_mapped |= subgroup.controls(policy_id) & is_member[None]
        # The index -1 means that no policy acts and the action is zero.
        return jnp.where(is_mapped, policy_id, -1)

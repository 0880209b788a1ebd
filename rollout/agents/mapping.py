"""Maps agents to policies, and joins the actions of all policies.

A mapping is either fixed, or a function that samples each agent's policy in every
episode. Policies are numbered in order, and a population has one number per member.
Trajectories store a `PolicyIndex`, which maps numbers to names.

A subgroup contains the agents of one group that one policy controls: the same columns
in every lane. With a fixed mapping the subgroups partition the group. With a mapping
function any policy may control any agent, so every policy acts for the whole group, and
then each agent's action is selected. A population evaluates one member per agent.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.agents.population import Population, apply_members
from rollout.base import checks, trees
from rollout.envs.multi_agent import AgentGroup, AgentLayout
from rollout.envs.types import ArrayTree
from rollout.kernel.state import check_values
from rollout.policies import base
from rollout.types import Key, Obs, Params, Policy, PolicyStep

# The fix for a function that maps the name of an agent to the name of a policy.
BY_FUNCTION = (
    "For a function of the name of an agent, as in RLlib, pass `static_mapping("
    "{agent: fn(agent) for agent in env.agents})`."
)

MappingFn = Callable[[Key, tuple[str, ...]], jax.Array]


class FixedMapping(NamedTuple):
    """The name of each agent's policy, constant over episodes."""

    policies: tuple[tuple[str, str], ...] | str


def static_mapping(policies: Mapping[str, str] | str) -> FixedMapping:
    """Makes a mapping from agents to policies that is constant over episodes.

    A policy is evaluated only for the agents that it controls.

    Args:
        policies: names of policies by agent, for every agent of the environment, or by
            group, for every group; or the name of the policy that controls all agents.

    Raises:
        ValueError: if `policies` is neither a dict nor a name.
    """
    rule = "`policies` must be a dict by agent or by group, or the name of a policy"
    if callable(policies):
        raise ValueError(f"{rule}, got a function. {BY_FUNCTION}")
    checks.check_type(rule, policies, Mapping | str)
    return FixedMapping(
        policies if isinstance(policies, str) else tuple(policies.items())
    )


class PolicyIndex(struct.PyTreeNode):
    """Maps the policy indices of a policy map to names. All fields are static.

    Attributes:
        indices: `(name, first, last)` of every policy, with `last` excluded.
        columns: `(name, group, columns)`, the agents of a group that a policy controls
            under a fixed mapping; None under a mapping function.
    """

    indices: tuple[tuple[str, int, int], ...] = struct.field(pytree_node=False)
    columns: tuple[tuple[str, str, tuple[int, ...]], ...] | None = struct.field(
        pytree_node=False
    )

    def select(self, name: str, policy_id: jax.Array) -> jax.Array:
        """Returns a bool of the shape of `policy_id`, True for one policy's indices.

        Raises:
            ValueError: if no policy has that name.
        """
        for policy_name, first, last in self.indices:
            if policy_name == name:
                return (policy_id >= first) & (policy_id < last)
        names = ", ".join(policy_name for policy_name, *_ in self.indices)
        raise ValueError(f"`name` must be one of the policies {names}, got {name!r}.")


class MapExtras(struct.PyTreeNode):
    """The `extras` of a `policy_map`.

    Attributes:
        agents: extras of the policies by group, `[T, B, A_g, ...]`.
        policy_id: `[T, B, A]` int32, index of each agent's policy; -1 if the mapping
            assigned no policy that can act for the agent.
        policy_index: maps the indices to names.
    """

    agents: dict[str, Any]  # by group [T, B, A_g, ...]
    policy_id: jax.Array  # [T, B, A]
    policy_index: PolicyIndex


def number(
    policies: Mapping[str, Policy | Population],
) -> tuple[tuple[str, int, int], ...]:
    """Validates policies by name, and numbers them as in `PolicyIndex.indices`."""
    checks.check_type("`policies` must be a dict by name", policies, Mapping)
    indices, first = [], 0
    for name, policy in policies.items():
        message = f"`policies[{name!r}]` must be a policy or a population"
        checks.check_type(message, policy, Policy | Population)
        last = first + (policy.size if isinstance(policy, Population) else 1)
        indices.append((name, first, last))
        first = last
    return tuple(indices)


def policies_by_agent(
    policies: Mapping[str, Policy | Population],
    mapping: FixedMapping,
    layout: AgentLayout,
) -> dict[str, str]:
    """Validates a fixed mapping; returns the name of each agent's policy."""
    agents = layout.agents
    if isinstance(mapping.policies, str):
        by_agent = dict.fromkeys(agents, mapping.policies)
    else:
        by_agent = dict(mapping.policies)
    members = {x.name: [agents[i] for i in x.members] for x in layout.groups}
    if set(by_agent) == set(members):
        by_agent = {x: by_agent[name] for name, group in members.items() for x in group}
    single = [x for x, y in policies.items() if not isinstance(y, Population)]
    if set(by_agent) != set(agents) or not set(by_agent.values()) <= set(single):
        raise ValueError(
            f"`static_mapping` must map the agents {', '.join(agents)}, or the groups "
            f"{', '.join(members)}, to the policies {', '.join(single) or '(none)'}, "
            f"got {by_agent}. Use a mapping function for the members of a population."
        )
    return by_agent


class Subgroup(NamedTuple):
    """The agents of one group that one policy controls.

    Attributes:
        number: number of the subgroup among all subgroups of the map.
        name: name of the policy.
        first: index of the policy, or of the first member of a population.
        size: number of members of a population; None for a policy.
        group: the group.
        columns: positions of the agents in the group.
    """

    number: int
    name: str
    first: int
    size: int | None
    group: AgentGroup
    columns: tuple[int, ...]

    def __str__(self) -> str:
        """Describes the subgroup in messages."""
        return (
            f"The policy {self.name!r}, which controls the group {self.group.name!r},"
        )

    def controls(self, policy_id: jax.Array) -> jax.Array:
        """Returns a bool, True for the indices of the policy."""
        return (policy_id >= self.first) & (policy_id < self.first + (self.size or 1))

    def of(self, per_agent: jax.Array) -> jax.Array:
        """Selects the agents of the subgroup: `[B, A]` to `[B, n]`."""
        return _take(per_agent, tuple(self.group.members[x] for x in self.columns))


def make_subgroups(
    policies: Mapping[str, Policy | Population],
    index: PolicyIndex,
    layout: AgentLayout,
    by_agent: Mapping[str, str] | None,
    groups: Mapping[str, Collection[str]],
) -> tuple[Subgroup, ...]:
    """Lists the subgroups that a mapping can use, group by group.

    With a fixed mapping, `by_agent` has the policy of each agent. With a mapping
    function, `groups` has the groups that a policy can act for; a policy without an
    entry can act for all groups.
    """
    subgroups = []
    for group in layout.groups:
        for name, first, _ in index.indices:
            columns = tuple(
                column
                for column, member in enumerate(group.members)
                if by_agent is None or by_agent[layout.agents[member]] == name
            )
            if columns and group.name in groups.get(name, (group.name,)):
                policy = policies[name]
                size = policy.size if isinstance(policy, Population) else None
                subgroups.append(
                    Subgroup(len(subgroups), name, first, size, group, columns)
                )
    return tuple(subgroups)


def decide(
    subgroup: Subgroup,
    policy: Policy,
    use_mode: bool,
    policy_id: jax.Array,
    params: Params,
    obs: Obs,
    state: ArrayTree,
    key: Key,
) -> PolicyStep:
    """Applies the policy of a subgroup to its agents, `[B, n, ...]`.

    If `use_mode` is True and the policy has a mode, applies its mode instead.
    """
    apply = policy.mode if use_mode and policy.has_mode else policy.apply
    decision = _call(subgroup, apply, policy_id, params, obs, state, key)
    num_envs, num = policy_id.shape[0], len(subgroup.columns)
    caller, space = str(subgroup), subgroup.group
    group_obs = merge(obs[space.name])
    decision = base.decision(caller, decision, space, num_envs * num, group_obs)
    message = f"{subgroup} must return a state like its input state"
    checks.check_same_types(message, merge(state), decision.state)
    return unmerge(decision, num_envs)


def value(
    subgroup: Subgroup,
    policy: Policy,
    policy_id: jax.Array,
    params: Params,
    obs: Obs,
    state: ArrayTree,
) -> jax.Array:
    """Evaluates the critic for a subgroup's agents, `[B, n]`; 0 without a critic."""
    num_envs = policy_id.shape[0]
    if not policy.has_value:
        return jnp.zeros((num_envs, len(subgroup.columns)), jnp.float32)

    def apply(params: Params, obs: Obs, state: ArrayTree, key: Key) -> jax.Array:
        del key  # unused
        values = policy.value(params, obs, state)
        check_values(values, obs)
        return values

    # `_call` needs a key, which a critic does not use.
    no_key = jax.random.key(0)
    values = _call(subgroup, apply, policy_id, params, obs, state, no_key)
    return unmerge(values, num_envs)


def _call(
    subgroup: Subgroup,
    apply: Callable[..., Any],
    policy_id: jax.Array,
    params: Params,
    obs: Obs,
    state: ArrayTree,
    key: Key,
) -> Any:
    """Applies a policy or critic to its agents, `[B, n, ...]` as `[B * n, ...]`."""
    name, size = subgroup.name, subgroup.size
    # The policy observes each agent as a lane, `[B * n, ...]`.
    lane_obs, state = merge((_take(obs[subgroup.group.name], subgroup.columns), state))
    try:
        if size is None:
            return apply(params[name], lane_obs, state, key)
        # Agents of other policies get an arbitrary member; `join` discards the action.
        member = subgroup.of(policy_id) - subgroup.first
        member = jnp.clip(member, 0, size - 1).reshape(-1)
        return apply_members(apply, size, member, params[name], lane_obs, state, key)
    except Exception as error:
        error.add_note(f"{subgroup} raised this error.")
        raise


def join(
    subgroups: list[Subgroup],
    values: list[ArrayTree],
    policy_id: jax.Array,
    *,
    is_fixed: bool,
) -> ArrayTree:
    """Joins the values of a group's subgroups, `[B, n, ...]`, to `[B, A_g, ...]`."""
    if is_fixed and len(values) == 1:
        return values[0]
    if is_fixed:
        # The columns are a permutation of the group's agents; `argsort` inverts it.
        order = np.argsort(np.concatenate([x.columns for x in subgroups]))
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1)[:, order], *values)
    # All policies acted for all agents: select the value of each agent's policy, or
    # zeros for an agent without a policy.
    joined = jax.tree.map(jnp.zeros_like, values[0])
    for subgroup, value in zip(subgroups, values, strict=True):
        joined = trees.select(subgroup.controls(subgroup.of(policy_id)), value, joined)
    return joined


def fill_extras(subgroups: list[Subgroup], steps: list[PolicyStep]) -> list[Any]:
    """Returns the extras of a group's policies, with zeros for missing names."""
    all_extras, templates = [], {}
    for subgroup, step in zip(subgroups, steps, strict=True):
        is_empty = isinstance(step.extras, tuple) and not step.extras
        extras: Any = {} if is_empty else step.extras
        message = f"The extras of the policy {subgroup.name!r} must be () or a dict"
        checks.check_type(message, extras, dict)
        all_extras.append(extras)
        for name, x in extras.items():
            # Compare entries of one agent: policies may control different numbers.
            template = jax.eval_shape(lambda x: jax.tree.map(lambda y: y[0, 0], x), x)
            message = f"Policies of one group must return the same kind of `{name}`"
            checks.check_same_types(
                message, templates.setdefault(name, template), template
            )
    filled = []
    for subgroup, step, extras in zip(subgroups, steps, all_extras, strict=True):
        axes = jax.tree.leaves(step.action)[0].shape[0], len(subgroup.columns)
        missing = {name: x for name, x in templates.items() if name not in extras}
        filled.append({**extras, **trees.blank(missing, axes)})
    return filled


def _take(tree: ArrayTree, columns: tuple[int, ...]) -> ArrayTree:
    """Selects columns of `[B, n, ...]`."""
    first, num = columns[0], len(columns)
    # XLA fuses a slice with its consumer; a gather would copy.
    if columns == tuple(range(first, first + num)):
        return jax.tree.map(lambda x: x[:, first : first + num], tree)
    return jax.tree.map(lambda x: x[:, np.asarray(columns)], tree)


def merge(tree: ArrayTree) -> ArrayTree:
    """Merges lanes and agents: `[B, n, ...]` to `[B * n, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def unmerge(tree: ArrayTree, num_envs: int) -> ArrayTree:
    """Splits lanes and agents: `[B * n, ...]` to `[B, n, ...]`."""

    def split(x: jax.typing.ArrayLike) -> jax.Array:
        x = jnp.asarray(x, jnp.result_type(x))
        return x.reshape(num_envs, -1, *x.shape[1:])

    return jax.tree.map(split, tree)

"""Subgroups of agents under one policy, and how their actions are joined.

A subgroup is the agents of one group that one policy controls, the same columns in
every lane. Under a fixed mapping the subgroups partition the group. Under a drawn
mapping a policy may control any agent, so every policy acts for the whole group and
each agent's action is chosen afterwards; only a population costs one member per agent.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollout import checks
from rollout.agents import mapping
from rollout.agents.mapping import Entry, FixedMapping, MappingFn
from rollout.agents.population import apply_members
from rollout.envs import prng
from rollout.envs.multi_agent import AgentGroup, AgentLayout
from rollout.envs.types import ArrayTree
from rollout.types import Key, Obs, Params, PolicyStep


class Subgroup(NamedTuple):
    """The agents, `columns` of one group, that one policy controls."""

    entry: Entry
    group: AgentGroup
    columns: tuple[int, ...]


Made = list[tuple[Subgroup, PolicyStep]]  # the subgroups of a group, and their steps
Join = Callable[[Made, list[ArrayTree]], ArrayTree]


def make_subgroups(
    entries: tuple[Entry, ...],
    mapping_fn: MappingFn | FixedMapping,
    layout: AgentLayout,
) -> list[Subgroup]:
    """Lists the subgroups that a mapping can use."""
    if not isinstance(mapping_fn, FixedMapping):
        return [
            Subgroup(entry, group, tuple(range(len(group.members))))
            for group in layout.groups
            for entry in entries
        ]
    policies = mapping.policies_by_agent(entries, mapping_fn, layout.agents)
    subgroups = []
    for group in layout.groups:
        names = [policies[layout.agents[member]] for member in group.members]
        for entry in entries:
            columns = tuple(i for i, name in enumerate(names) if name == entry.name)
            if columns:
                subgroups.append(Subgroup(entry, group, columns))
    return subgroups


def fitting(
    subgroups: list[Subgroup],
    mapping_fn: MappingFn,
    layout: AgentLayout,
    policy_id: jax.Array,
    decide: Callable[[Subgroup, Key], PolicyStep],
    key: Key,
) -> tuple[list[Subgroup], jax.Array]:
    """Leaves out the subgroups whose policy cannot act for the group.

    Agents that the mapping still gives to such a policy get the index -1.

    Raises:
        ValueError: if draws of the mapping give such a group to such a policy.
    """
    fitting = []
    for subgroup in subgroups:
        members = np.asarray(subgroup.group.members)
        # Only a trial shows whether a policy takes the group's observations.
        try:
            jax.eval_shape(functools.partial(decide, subgroup), key)
        except Exception as error:
            drawn: Any = mapping.try_out(mapping_fn, layout.agents)
            if drawn is None or np.any(subgroup.entry.controls(drawn[:, members])):
                name = subgroup.entry.name
                raise ValueError(
                    f"`mapping_fn` must not give the group {subgroup.group.name!r} to "
                    f"the policy {name!r}, which cannot act for it: {error}"
                ) from error
            is_member = np.isin(np.arange(len(layout.agents)), members)
            wrong = subgroup.entry.controls(policy_id) & is_member[None]
            policy_id = jnp.where(wrong, -1, policy_id)
        else:
            fitting.append(subgroup)
    return fitting, policy_id


def decide(
    subgroup: Subgroup,
    policy_id: jax.Array,
    params: Params,
    obs: Obs,
    state: ArrayTree,
    key: Key,
) -> PolicyStep:
    """Applies the policy of a subgroup to its agents, `[B, n, ...]`."""
    entry, group = subgroup.entry, subgroup.group
    num_envs, num = policy_id.shape[0], len(subgroup.columns)
    seen, state = _merge((_take(obs[group.name], subgroup.columns), state))
    own = params[entry.name]
    if entry.size is None:
        decision = entry.policy.apply(own, seen, state, key)
    else:
        # An agent of another policy gets any member; `join_chosen` drops its action.
        member = jnp.clip(
            columns_of(policy_id, subgroup) - entry.first, 0, entry.size - 1
        )
        decision = apply_members(
            entry.policy, entry.size, member.reshape(-1), own, seen, state, key
        )
    who = f"The policy {entry.name!r}, which controls the group {group.name!r},"
    checks.decision(who, decision, group, num_envs * num)
    checks.same(f"{who} must return the state as it came in", state, decision.state)
    return unmerge(decision, num_envs)


def columns_of(per_agent: jax.Array, subgroup: Subgroup) -> jax.Array:
    """Takes the agents of a subgroup, `[B, n]`, of `[B, A]`."""
    return _take(per_agent, tuple(subgroup.group.members[x] for x in subgroup.columns))


def join_columns(
    made: Made, values: list[ArrayTree], policy_id: jax.Array
) -> ArrayTree:
    """Concatenates the subgroups of a group, in the order of its agents."""
    del policy_id  # unused
    if len(made) == 1:
        return values[0]
    # The columns are a permutation of the group's agents; `argsort` inverts it.
    order = np.argsort(np.concatenate([subgroup.columns for subgroup, _ in made]))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1)[:, order], *values)


def join_chosen(made: Made, values: list[ArrayTree], policy_id: jax.Array) -> ArrayTree:
    """Takes for every agent the value of its policy, zero where it has none."""
    joined = jax.tree.map(jnp.zeros_like, values[0])
    for (subgroup, _), value in zip(made, values, strict=True):
        is_its = subgroup.entry.controls(columns_of(policy_id, subgroup))
        joined = prng.select(is_its, value, joined)
    return joined


def join_extras(join: Join, made: Made) -> ArrayTree:
    """Joins the extras of a group's policies by name."""
    named = [{} if _is_nothing(x.extras) else x.extras for _, x in made]
    for (subgroup, _), extras in zip(made, named, strict=True):
        if not isinstance(extras, dict):
            name = subgroup.entry.name
            raise ValueError(
                f"The extras of the policy {name!r} must be () or a dict, "
                f"got {type(extras).__name__}."
            )
    if len(named) == 1:
        return named[0]
    joined = {}
    for name in sorted(set().union(*named)):
        like = next(x[name] for x in named if name in x)
        values = [
            x[name] if name in x else _zeros(like, subgroup)
            for x, (subgroup, _) in zip(named, made, strict=True)
        ]
        for value in values:
            checks.same(
                f"Policies of one group must return the same kind of `{name}`",
                _row(like),
                _row(value),
            )
        joined[name] = join(made, values)
    return joined


def _take(tree: ArrayTree, columns: tuple[int, ...]) -> ArrayTree:
    """Takes columns of `[B, n, ...]`."""
    first, num = columns[0], len(columns)
    if columns == tuple(range(first, first + num)):
        return jax.tree.map(lambda x: x[:, first : first + num], tree)
    return jax.tree.map(lambda x: x[:, np.asarray(columns)], tree)


def _merge(tree: ArrayTree) -> ArrayTree:
    """`[B, n, ...]` to `[B * n, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def unmerge(tree: ArrayTree, num_envs: int) -> ArrayTree:
    """`[B * n, ...]` to `[B, n, ...]`."""

    def split(x: jax.typing.ArrayLike) -> jax.Array:
        x = jnp.asarray(x, jnp.result_type(x))
        return x.reshape(num_envs, -1, *x.shape[1:])

    return jax.tree.map(split, tree)


def _is_nothing(extras: ArrayTree) -> bool:
    return isinstance(extras, tuple) and not extras


def _zeros(like: ArrayTree, subgroup: Subgroup) -> ArrayTree:
    """Makes zeros for a subgroup, in the shapes of another's extras."""
    num = len(subgroup.columns)
    return jax.tree.map(
        lambda x: jnp.zeros((x.shape[0], num, *x.shape[2:]), x.dtype), like
    )


def _row(tree: ArrayTree) -> ArrayTree:
    return jax.eval_shape(lambda: jax.tree.map(lambda x: x[0, 0], tree))

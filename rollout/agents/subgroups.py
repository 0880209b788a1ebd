"""Subgroups of agents under one policy, and how their actions are joined.

A subgroup is the agents of one group that one policy controls, the same columns in
every lane. Under a fixed mapping the subgroups partition the group. Under a drawn
mapping a policy may control any agent, so every policy acts for the whole group and
each agent's action is chosen afterwards; only a population costs one member per agent.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollout import checks
from rollout.agents.mapping import Entry
from rollout.agents.population import apply_members
from rollout.envs import prng
from rollout.envs.multi_agent import AgentGroup, AgentLayout
from rollout.envs.types import ArrayTree
from rollout.kernel.values import check_values
from rollout.policies import outputs
from rollout.types import Key, Obs, Params, PolicyStep


class Subgroup(NamedTuple):
    """The agents, `columns` of one group, that one policy controls."""

    entry: Entry
    group: AgentGroup
    columns: tuple[int, ...]


# The subgroups of a group, each with its step, or with its values.
Made = list[tuple[Subgroup, Any]]
Join = Callable[[Made, list[ArrayTree]], ArrayTree]


def make_subgroups(
    entries: tuple[Entry, ...],
    layout: AgentLayout,
    by_agent: Mapping[str, str] | None,
    groups: Mapping[str, Collection[str]],
) -> list[Subgroup]:
    """Lists the subgroups that a mapping can use.

    `by_agent` has the policy of each agent under a fixed mapping, `groups` the groups
    that a policy can act for under a drawn one, all if it has no entry.
    """
    subgroups = []
    for group in layout.groups:
        for entry in entries:
            columns = tuple(
                column
                for column, member in enumerate(group.members)
                if by_agent is None or by_agent[layout.agents[member]] == entry.name
            )
            if columns and group.name in groups.get(entry.name, (group.name,)):
                subgroups.append(Subgroup(entry, group, columns))
    return subgroups


def decide(
    subgroup: Subgroup,
    use_mode: bool,
    policy_id: jax.Array,
    params: Params,
    obs: Obs,
    state: ArrayTree,
    key: Key,
) -> PolicyStep:
    """Applies the policy of a subgroup to its agents, `[B, n, ...]`.

    With `use_mode` it takes its mode, if the policy has one.
    """
    who, policy = _name_of(subgroup), subgroup.entry.policy
    apply = policy.mode if use_mode and policy.mode is not None else policy.apply
    decision = _call(subgroup, apply, policy_id, params, obs, state, key)
    num_envs, num = policy_id.shape[0], len(subgroup.columns)
    decision = outputs.decision(who, decision, subgroup.group, num_envs * num)
    merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state)
    checks.same(f"{who} must return the state as it came in", merged, decision.state)
    return unmerge(decision, num_envs)


def value(
    subgroup: Subgroup, policy_id: jax.Array, params: Params, obs: Obs, state: ArrayTree
) -> jax.Array:
    """Applies the critic of a subgroup to its agents, `[B, n, ...]`: `[B, n]`."""
    value_fn: Any = subgroup.entry.policy.value

    def apply(params: Params, obs: Obs, state: ArrayTree, key: Key) -> jax.Array:
        del key  # unused
        values = value_fn(params, obs, state)
        check_values(values, obs)
        return values

    no_key = jax.random.key(0)
    values = _call(subgroup, apply, policy_id, params, obs, state, no_key)
    return unmerge(values, policy_id.shape[0])


def _call(
    subgroup: Subgroup,
    apply: Callable[..., Any],
    policy_id: jax.Array,
    params: Params,
    obs: Obs,
    state: ArrayTree,
    key: Key,
) -> Any:
    """Calls a function of a policy for its agents, `[B, n, ...]` as `[B * n, ...]`."""
    entry, group = subgroup.entry, subgroup.group
    seen = _take(obs[group.name], subgroup.columns)
    seen, state = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (seen, state))
    own = params[entry.name]
    try:
        if entry.size is None:
            return apply(own, seen, state, key)
        # An agent of another policy gets any member; `join_chosen` drops its action.
        member = columns_of(policy_id, subgroup) - entry.first
        member = jnp.clip(member, 0, entry.size - 1).reshape(-1)
        return apply_members(apply, entry.size, member, own, seen, state, key)
    except Exception as error:
        error.add_note(f"{_name_of(subgroup)} raised this.")
        raise


def _name_of(subgroup: Subgroup) -> str:
    name, group = subgroup.entry.name, subgroup.group.name
    return f"The policy {name!r}, which controls the group {group!r},"


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
    named = []
    for subgroup, step in made:
        is_nothing = isinstance(step.extras, tuple) and not step.extras
        extras = {} if is_nothing else step.extras
        what = f"The extras of the policy {subgroup.entry.name!r} must be () or a dict"
        checks.kind(what, extras, dict)
        named.append(extras)
    if len(named) == 1:
        return named[0]
    joined = {}
    for name in sorted(set().union(*named)):
        like = _row(next(x[name] for x in named if name in x))
        values = []
        for extras, (subgroup, step) in zip(named, made, strict=True):
            if name in extras:
                checks.same(
                    f"Policies of one group must return the same kind of `{name}`",
                    like,
                    _row(extras[name]),
                )
                values.append(extras[name])
                continue
            num_envs = jax.tree.leaves(step.action)[0].shape[0]
            axes = num_envs, len(subgroup.columns)
            values.append(
                jax.tree.map(lambda x, at=axes: jnp.zeros(at + x.shape, x.dtype), like)
            )
        joined[name] = join(made, values)
    return joined


def _row(tree: ArrayTree) -> ArrayTree:
    """Returns the shapes and dtypes of one agent's part of `[B, n, ...]`."""
    return jax.eval_shape(lambda: jax.tree.map(lambda x: x[0, 0], tree))


def _take(tree: ArrayTree, columns: tuple[int, ...]) -> ArrayTree:
    """Takes columns of `[B, n, ...]`."""
    first, num = columns[0], len(columns)
    if columns == tuple(range(first, first + num)):
        return jax.tree.map(lambda x: x[:, first : first + num], tree)
    return jax.tree.map(lambda x: x[:, np.asarray(columns)], tree)


def unmerge(tree: ArrayTree, num_envs: int) -> ArrayTree:
    """`[B * n, ...]` to `[B, n, ...]`."""

    def split(x: jax.typing.ArrayLike) -> jax.Array:
        x = jnp.asarray(x, jnp.result_type(x))
        return x.reshape(num_envs, -1, *x.shape[1:])

    return jax.tree.map(split, tree)

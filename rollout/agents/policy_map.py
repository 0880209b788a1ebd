"""`policy_map`: combines policies for single agents into one for several."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.agents import mapping, subgroups
from rollout.agents.mapping import Entry, FixedMapping, MappingFn, PolicyIndex
from rollout.agents.population import Population
from rollout.agents.subgroups import Subgroup
from rollout.envs import prng
from rollout.envs.multi_agent import ACTING, AgentLayout, layout_of
from rollout.envs.types import ArrayTree
from rollout.types import EpisodeKey, Key, Obs, Params, Policy, PolicyStep


def policy_map(
    policies: Mapping[str, Policy | Population],
    mapping_fn: MappingFn | FixedMapping,
    env: Any,
) -> Policy:
    """Combines policies for single agents into one policy for several.

    Each policy sees the agents that it controls as a batch: `obs` of their group,
    `[B * n, ...]`, lane by lane. An agent's recurrent state restarts with every
    episode, and stays unchanged where the agent does not act. A single policy of a
    single group acts with the key of the step, others with keys derived from it.

    Args:
        policies: by name. Policies of one group may differ in class; `extras` that are
            dicts are joined by name, with zeros where a policy has no such entry.
        mapping_fn: `(key, agents)` to `[A]` int32, for each agent the index of its
            policy in the order of `policies`, where a population takes as many indices
            as it has members. `agents` are the names. It is called with a key of each
            lane's episode, so it holds until that ends and does not depend on the
            number of lanes. Or a mapping made by `fixed_mapping`.
        env: the environment whose agents are mapped: a `MultiAgentEnv`, or lanes of it
            made by `rollout.envs.vectorize_agents`. The policy acts in any number of
            lanes of environments with these agents.

    Returns:
        A policy for an environment of `rollout.envs.vectorize_agents`. Its `params` are
        a dict by policy name, with an entry for each. Its extras are `policy_id`, `[B,
        A]` int32, the index of the policy of each agent, -1 (and a zero action) where
        the mapping gave none that can act for it; `agents`, the extras of the policies
        by group, `[B, A_g, ...]`; and `policy_index`, which names the indices. Its mode
        uses the modes of those policies that have one.

    Raises:
        ValueError: if `policies` are not policies by name, or a population under a
            fixed mapping; if `env` is not of several agents; if the mapping lacks an
            agent, names one or a policy that does not exist, or gives an index out of
            range. While tracing: if it acts in an environment of other agents, if
            `params` lacks an entry, or if a policy returns actions that are not of the
            group's action space, or extras that are not () or a dict.
    """
    entries = mapping.make_entries(policies)
    if not callable(mapping_fn) and not isinstance(mapping_fn, FixedMapping):
        raise ValueError(
            "`mapping_fn` must be a function or made by `fixed_mapping`, got "
            f"{type(mapping_fn).__name__}."
        )
    layout = layout_of(env)
    if not isinstance(mapping_fn, FixedMapping):
        mapping.check(mapping_fn, layout.agents, entries[-1].last)
    modes = tuple(
        entry._replace(policy=entry.policy._replace(apply=entry.policy.mode))
        if entry.policy.mode
        else entry
        for entry in entries
    )
    has_mode = any(entry.policy.mode for entry in entries)
    drawn, likely = (
        _Map(x, mapping_fn, layout, subgroups.make_subgroups(x, mapping_fn, layout))
        for x in (entries, modes)
    )
    return Policy(
        init=functools.partial(_init, drawn),
        apply=functools.partial(_apply, drawn),
        mode=functools.partial(_apply, likely) if has_mode else None,
    )


class _Map(NamedTuple):
    """Maps agents to the policies that act for them."""

    entries: tuple[Entry, ...]
    mapping_fn: MappingFn | FixedMapping
    layout: AgentLayout
    subgroups: list[Subgroup]


class _MapState(struct.PyTreeNode, kw_only=True):
    """State of a policy map, `[B, n, ...]` per subgroup."""

    key: Any  # the EpisodeKey that the mapping is drawn from, or ()
    inner: dict[str, dict[str, ArrayTree]]  # by policy and group


def _init(this: _Map, num_envs: int) -> _MapState:
    inner = {entry.name: {} for entry in this.entries}
    for subgroup in this.subgroups:
        num = len(subgroup.columns)
        state = subgroup.entry.policy.init(num_envs * num)
        if any(isinstance(x, EpisodeKey) for x in _nodes(state)):
            raise ValueError(
                f"The policy {subgroup.entry.name!r} must have no `EpisodeKey` in its "
                "state, which belongs to a lane and not to an agent."
            )
        inner[subgroup.entry.name][subgroup.group.name] = subgroups.unmerge(
            state, num_envs
        )
    is_fixed = isinstance(this.mapping_fn, FixedMapping)
    return _MapState(key=() if is_fixed else EpisodeKey(), inner=inner)


def _apply(
    this: _Map, params: Params, obs: Obs, state: _MapState, key: Key
) -> PolicyStep:
    entries, mapping_fn, layout, playing = this
    _check_params(params, entries)
    _check_agents(obs, layout)
    acting = obs[ACTING]
    # First the policy of each agent, `[B, A]`.
    is_fixed = isinstance(mapping_fn, FixedMapping)
    if is_fixed:
        policy_id = mapping.fixed_ids(entries, mapping_fn, layout.agents)
        policy_id = jnp.broadcast_to(policy_id[None], acting.shape)
    else:
        policy_id = mapping.drawn_ids(
            entries, mapping_fn, layout.agents, state.key.value
        )

    def decide(subgroup: Subgroup, key: Key) -> PolicyStep:
        own = state.inner[subgroup.entry.name][subgroup.group.name]
        return subgroups.decide(subgroup, policy_id, params, obs, own, key)

    # A drawn mapping pairs every policy with every group, even if their spaces differ.
    if not is_fixed and len(layout.groups) > 1:
        playing, policy_id = subgroups.fitting(
            playing, mapping_fn, layout, policy_id, decide, key
        )
    # Then each policy acts; states change only where an agent acts under that policy.
    inner = {name: dict(groups) for name, groups in state.inner.items()}
    made: dict[str, subgroups.Made] = {group.name: [] for group in layout.groups}
    for number, subgroup in enumerate(playing):
        name, group = subgroup.entry.name, subgroup.group.name
        decision = decide(
            subgroup, key if len(playing) == 1 else prng.fold_in(key, number)
        )
        moves = subgroups.columns_of(
            acting & subgroup.entry.controls(policy_id), subgroup
        )
        inner[name][group] = prng.select(moves, decision.state, inner[name][group])
        made[group].append((subgroup, decision))
    # Last, actions and extras are put together again, `[B, A_g, ...]` by group.
    join = subgroups.join_columns if is_fixed else subgroups.join_chosen
    join = functools.partial(join, policy_id=policy_id)
    actions = {x: [step.action for _, step in of] for x, of in made.items()}
    return PolicyStep(
        action={group: join(of, actions[group]) for group, of in made.items()},
        state=state.replace(inner=inner),
        extras={
            "policy_id": policy_id,
            "agents": {x: subgroups.join_extras(join, of) for x, of in made.items()},
            "policy_index": _policy_index(entries, playing if is_fixed else None),
        },
    )


def _policy_index(
    entries: tuple[Entry, ...], playing: list[Subgroup] | None
) -> PolicyIndex:
    columns = None
    if playing is not None:
        columns = tuple((x.entry.name, x.group.name, x.columns) for x in playing)
    return PolicyIndex(tuple((x.name, x.first, x.last) for x in entries), columns)


def _check_params(params: Params, entries: tuple[Entry, ...]) -> None:
    names, is_dict = [entry.name for entry in entries], isinstance(params, Mapping)
    if not is_dict or not set(names) <= set(params):
        got = ", ".join(params) if is_dict else checks.describe(params)
        raise ValueError(
            f"`params` must have an entry for each policy, {', '.join(names)}, got "
            f"{got or 'none'}."
        )


def _check_agents(obs: Obs, layout: AgentLayout) -> None:
    names, num_agents = {ACTING, *(x.name for x in layout.groups)}, len(layout.agents)
    fits = isinstance(obs, Mapping) and names <= set(obs)
    if not fits or obs[ACTING].shape[-1] != num_agents:
        got = ", ".join(obs) if isinstance(obs, Mapping) else checks.describe(obs)
        raise ValueError(
            "`policy_map` must act in an environment of "
            f"`rollout.envs.vectorize_agents` with the {num_agents} agents of its "
            f"`env`, got observations of {got}."
        )


def _nodes(tree: ArrayTree) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, EpisodeKey))

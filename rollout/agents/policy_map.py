"""`policy_map`: combines policies for single agents into one for several."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout import checks, programs
from rollout.agents import mapping
from rollout.agents.mapping import FixedMapping, MappingFn, PolicyIndex, Subgroup
from rollout.agents.population import Population
from rollout.envs import prng, trees
from rollout.envs.multi_agent import ACTING, AgentLayout, layout_of
from rollout.envs.types import ArrayTree
from rollout.types import Carry, EpisodeKey, Key, Obs, Params, Policy, PolicyStep


def policy_map(
    policies: Mapping[str, Policy | Population],
    policy_mapping_fn: MappingFn | FixedMapping,
    env: Any,
    *,
    groups: Mapping[str, Collection[str]] | None = None,
) -> Policy:
    """Combines policies for single agents into one policy for several.

    Each policy sees the agents that it controls as a batch: `obs` of their group,
    `[B * n, ...]`, lane by lane. An agent's recurrent state restarts with every
    episode, and stays unchanged where the agent does not act. A single policy of a
    single group acts with the key of the step, others with keys derived from it.

    Args:
        policies: by name. Policies of one group may differ in class; `extras` that are
            dicts are joined by name, with zeros where a policy has no such entry.
        policy_mapping_fn: `(key, agents)` to `[A]` integers, for each agent the index
            of its policy in the order of `policies`, where a population takes as many
            indices as it has members. `agents` are the names. It is called with a key
            of each lane's episode, so it holds until that ends and does not depend on
            the number of lanes. Or a mapping made by `static_mapping`.
        env: the environment whose agents are mapped: a `MultiAgentEnv`, or lanes of it
            made by `rollout.envs.vectorize`. The policy acts in any number of
            lanes of environments with these agents.
        groups: for a mapping function, the names of the groups that a policy can act
            for, by policy. A policy without an entry must be able to act for all.

    Returns:
        A policy for lanes of an environment of several agents. Its `params` are a dict
        by policy name, with an entry for each. Its extras are `policy_id`, `[B,
        A]` int32, the index of the policy of each agent, -1 (and a zero action) where
        the mapping gave none that can act for it; `agents`, the extras of the policies
        by group, `[B, A_g, ...]`; and `policy_index`, which names the indices. Its mode
        uses the modes of those policies that have one. Its critic, if a policy has one,
        returns the values of the groups of such policies, `[K, A_g]` by name, 0 for
        agents whose own has none; that of a team takes its place by `_replace`.

    Raises:
        ValueError: if `policies` are not policies by name, or a population under a
            fixed mapping; if `env` is not of several agents; if the mapping lacks an
            agent, or names one or a policy that does not exist; if `groups` names such
            a group or policy, leaves a group without a policy, or is given with a fixed
            mapping. While tracing, if a policy returns actions that are not of the
            group's action space, or extras that are not () or a dict.
        KeyError: while tracing, if `params` lacks an entry.
    """
    index = PolicyIndex(mapping.number(policies), None)
    what = "`policy_mapping_fn` must be a function or made by `static_mapping`"
    checks.kind(what, policy_mapping_fn, Callable | FixedMapping)
    layout, by_agent = layout_of(env), None
    groups = {} if groups is None else dict(groups)
    if isinstance(policy_mapping_fn, FixedMapping):
        by_agent = mapping.policies_by_agent(policies, policy_mapping_fn, layout.agents)
    else:
        # Called once with a key of no episode, only for the shape of what it returns.
        shape = jax.eval_shape(
            lambda: policy_mapping_fn(jax.random.key(0), layout.agents)
        )
        num = len(layout.agents)
        is_int = jnp.issubdtype(getattr(shape, "dtype", bool), jnp.integer)
        if not is_int or shape.shape != (num,):
            raise ValueError(
                "`policy_mapping_fn` must return an index per agent, integers of shape "
                f"({num},), got {checks.describe(shape)}."
            )
    known = {group.name for group in layout.groups}
    names = set(policies) if by_agent is None else set()
    asked = {name for its in groups.values() for name in its}
    playing = mapping.make_subgroups(policies, index, layout, by_agent, groups)
    idle = known - {subgroup.group.name for subgroup in playing}
    if idle or not (set(groups) <= names and asked <= known):
        raise ValueError(
            "`groups` must map policies of a mapping function, "
            f"{', '.join(sorted(names)) or 'none here'}, to groups, "
            f"{', '.join(sorted(known))}, and leave each a policy, got {groups}."
        )
    if by_agent is not None:
        columns = tuple((x.name, x.group.name, x.columns) for x in playing)
        index = index.replace(columns=columns)
    return _as_policy(_Map(index, policy_mapping_fn, layout, playing, by_agent))


def policy_state(state: Carry | ArrayTree, name: str) -> dict[str, ArrayTree]:
    """Returns the recurrent state of one policy of a `policy_map`.

    Args:
        state: a carry, or its `policy_state`, as `Policy.value` gets it.
        name: of the policy.

    Returns:
        By group `[B * n, ...]`, for the `n` agents per lane that the policy may
        control, in the layout of the observations that it sees.

    Raises:
        ValueError: if the state is not of a `policy_map` with a policy of that name.
    """
    tree = state.policy_state if isinstance(state, Carry) else state
    is_map = lambda x: isinstance(x, _MapState)  # noqa: E731
    maps = [x for x in jax.tree.leaves(tree, is_leaf=is_map) if is_map(x)]
    if len(maps) != 1 or name not in maps[0].inner:
        got = ", ".join(maps[0].inner) if maps else "none"
        raise ValueError(
            f"`name` must be a policy of a `policy_map`, {got}, got {name!r}."
        )
    return mapping.merge(maps[0].inner[name])


class _Map(NamedTuple):
    """Maps agents to the policies that act for them."""

    index: PolicyIndex
    policy_mapping_fn: Any  # a `MappingFn`, not called under a fixed mapping
    layout: AgentLayout
    subgroups: tuple[Subgroup, ...]
    by_agent: dict[str, str] | None  # under a fixed mapping

    def of(self, group: str) -> list[Subgroup]:
        """The subgroups of a group."""
        return [x for x in self.subgroups if x.group.name == group]


class _MapState(struct.PyTreeNode, kw_only=True):
    """State of a policy map, `[B, n, ...]` per subgroup."""

    key: Any  # the EpisodeKey that the mapping is drawn from, or ()
    inner: dict[str, dict[str, ArrayTree]]  # by policy and group


@programs.shared
def _as_policy(this: _Map) -> Policy:
    has_mode = any(x.policy.mode for x in this.subgroups)
    has_value = any(x.policy.value for x in this.subgroups)
    return Policy(
        init=functools.partial(_init, this),
        apply=functools.partial(_apply, this, False),
        mode=functools.partial(_apply, this, True) if has_mode else None,
        value=functools.partial(_value, this) if has_value else None,
    )


def _init(this: _Map, num_envs: int) -> _MapState:
    inner = {name: {} for name, *_ in this.index.indices}
    for subgroup in this.subgroups:
        state = subgroup.policy.init(num_envs * len(subgroup.columns))
        state = mapping.unmerge(state, num_envs)
        inner[subgroup.name][subgroup.group.name] = state
    return _MapState(key=EpisodeKey() if this.by_agent is None else (), inner=inner)


def _apply(
    this: _Map, use_mode: bool, params: Params, obs: Obs, state: _MapState, key: Key
) -> PolicyStep:
    what = "`policy_map` must act in an environment of several agents"
    checks.kind(what, obs, Mapping)
    acting = obs[ACTING]
    policy_id = _policy_ids(this, state, acting.shape)
    is_fixed = this.by_agent is not None
    join = functools.partial(mapping.join, policy_id=policy_id, is_fixed=is_fixed)
    inner = {name: dict(groups) for name, groups in state.inner.items()}
    action, extras = {}, {}
    for group in (x.name for x in this.layout.groups):
        its, steps = this.of(group), []
        for subgroup in its:
            own = inner[subgroup.name][group]
            own_key = key  # a single policy draws what it would draw without a map
            if len(this.subgroups) > 1:
                own_key = prng.fold_in(key, subgroup.number)
            step = mapping.decide(
                subgroup, use_mode, policy_id, params, obs, own, own_key
            )
            # States change only where an agent acts under that policy.
            moves = subgroup.of(acting & subgroup.controls(policy_id))
            inner[subgroup.name][group] = trees.select(moves, step.state, own)
            steps.append(step)
        action[group] = join(its, [step.action for step in steps])
        extras[group] = join(its, mapping.fill_extras(its, steps))
    every = {"policy_id": policy_id, "agents": extras, "policy_index": this.index}
    return PolicyStep(action, state.replace(inner=inner), every)


def _policy_ids(this: _Map, state: _MapState, shape: tuple[int, ...]) -> jax.Array:
    """Returns the policy of each agent, `[B, A]` int32."""
    agents = this.layout.agents
    if this.by_agent is not None:
        first = {name: first for name, first, _ in this.index.indices}
        fixed = [first[this.by_agent[agent]] for agent in agents]
        return jnp.broadcast_to(jnp.asarray(fixed, jnp.int32)[None], shape)
    # Drawn at every step. Keeping it in the state saves nothing: then all lanes draw at
    # every step too, for those that restart.
    draw = jax.vmap(lambda key: this.policy_mapping_fn(key, agents))
    drawn = draw(prng.inline(state.key.value)).astype(jnp.int32)
    is_mapped = jnp.zeros(shape, bool)
    for subgroup in this.subgroups:
        is_member = np.isin(np.arange(len(agents)), subgroup.group.members)
        is_mapped |= subgroup.controls(drawn) & is_member[None]
    # -1 is no policy's index: nothing acts for the agent, and its action is zero.
    return jnp.where(is_mapped, drawn, -1)


def _value(
    this: _Map, params: Params, obs: Obs, state: _MapState
) -> dict[str, jax.Array]:
    """Values the observations of the groups with a critic, `[K, A_g]` by group."""
    policy_id = _policy_ids(this, state, obs[ACTING].shape)
    values, is_fixed = {}, this.by_agent is not None
    for group in (x.name for x in this.layout.groups):
        its = this.of(group)
        if any(x.policy.value for x in its):
            found = [
                mapping.value(x, policy_id, params, obs, state.inner[x.name][group])
                for x in its
            ]
            values[group] = mapping.join(its, found, policy_id, is_fixed=is_fixed)
    return values

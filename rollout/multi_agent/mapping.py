"""Who plays whom: policies by name, and a mapping of agents to them.

A *seat* is what one policy plays of one group: some columns of its agents in every
lane. Under a fixed mapping the seats share a group out between them. Under a mapping
that is drawn anyone may sit anywhere, so every policy has a seat for the whole group
and what counts is chosen afterwards; only a `population` costs one member per agent.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from envs import keys
from envs.multi_agent import ACTING, AgentGroup, AgentLayout
from rollout import checks
from rollout.multi_agent.members import Population, apply_members
from rollout.types import EpisodeKey, Key, Obs, Params, Policy, PolicyStep

MappingFn = Callable[[Key, tuple[str, ...]], jax.Array]

_NUM_TRIALS = 64  # draws of a mapping that are looked at before it is used


class FixedMapping(NamedTuple):
    """Agents to the names of their policies, the same in every episode."""

    policies: tuple[tuple[str, str], ...] | str


def fixed_mapping(policies: Mapping[str, str] | str) -> FixedMapping:
    """Makes the mapping that gives every agent the same policy in every episode.

    No policy is evaluated for an agent that it does not play.

    Args:
        policies: agents to names of policies, every agent of the environment; or one
            name, of the policy that plays all of them.
    """
    return FixedMapping(
        policies if isinstance(policies, str) else tuple(policies.items())
    )


def policy_map(
    policies: Mapping[str, Policy | Population], mapping_fn: MappingFn | FixedMapping
) -> Policy:
    """Makes a policy for several agents of policies for one.

    Each of them sees the agents that it plays as a batch: `obs` of their group,
    `[B * n, ...]`, lane by lane. An agent's recurrent state goes back to the start with
    the episode, and stays where the agent does not act. Its key at a step is that of
    the batch if it is the only one, else derived from it.

    Args:
        policies: by name. Policies of one group may differ in class; `extras` that are
            dicts are joined by name, with zeros where a policy has no such entry.
        mapping_fn: `(key, agents)` to `[A]` int32, for each agent the index of its
            policy in the order of `policies`, where a population takes as many indices
            as it has members. `agents` are the names. It is called with a key of each
            lane's episode, so it holds until that ends and does not depend on the
            number of lanes. Or what `fixed_mapping` makes.

    Returns:
        A policy for an environment of `envs.vectorize_agents`. Its `params` are a dict
        by policy name, with an entry for each. Its extras are `policy_id`, `[B, A]`
        int32, the index of who played each agent, -1 where the mapping gave none that
        can (the action is zero then); `agents`, the extras of the policies by group,
        `[B, A_g, ...]`; and `roster`, which says who the indices are. Its mode takes
        the modes of those policies that have one.

    Raises:
        ValueError: if `policies` are not policies by name, or a population under a
            fixed mapping. When a collector is initialized: if the environment is not
            one of several agents, if the mapping lacks an agent, names one or a policy
            that is not there, or gives an index out of range. While tracing: if
            `params` lacks an entry, or if a policy returns actions that are not of the
            group's action space, or extras that are not () or a dict.
    """
    entries = _entries(policies)
    if not callable(mapping_fn) and not isinstance(mapping_fn, FixedMapping):
        raise ValueError(
            "`mapping_fn` must be a function or made by `fixed_mapping`, got "
            f"{type(mapping_fn).__name__}."
        )
    modes = tuple(
        entry._replace(policy=entry.policy._replace(apply=entry.policy.mode))
        if entry.policy.mode
        else entry
        for entry in entries
    )
    has_mode = any(entry.policy.mode for entry in entries)
    return Policy(
        init=functools.partial(_init, entries, mapping_fn),
        apply=functools.partial(_apply, entries, mapping_fn),
        mode=functools.partial(_apply, modes, mapping_fn) if has_mode else None,
    )


class _Entry(NamedTuple):
    """A policy of the map: `size` members from index `first` on, or one if None."""

    name: str
    policy: Policy
    first: int
    size: int | None

    @property
    def last(self) -> int:
        return self.first + (self.size or 1)


class _Seat(NamedTuple):
    """What one policy plays of one group: `columns` of its agents."""

    entry: _Entry
    group: AgentGroup
    columns: tuple[int, ...]


@struct.dataclass
class Roster:
    """Who the policies of a map are; no arrays.

    Attributes:
        indices: `(name, first, last)` of every policy, `last` not included.
        columns: `(name, group, columns)`, the agents of a group that a policy always
            plays, of a fixed mapping; None of one that is drawn.
    """

    indices: tuple[tuple[str, int, int], ...] = struct.field(pytree_node=False)
    columns: tuple[tuple[str, str, tuple[int, ...]], ...] | None = struct.field(
        pytree_node=False
    )

    def select(self, name: str, policy_id: jax.Array) -> jax.Array:
        """Tells where a policy played, of the shape of `policy_id`, bool.

        Raises:
            ValueError: if there is none of that name.
        """
        for known, first, last in self.indices:
            if known == name:
                return (policy_id >= first) & (policy_id < last)
        names = ", ".join(known for known, *_ in self.indices)
        raise ValueError(f"`name` must be a policy of {names}, got {name!r}.")


@struct.dataclass(kw_only=True)
class _MapState:
    """State of a policy map, `[B, n, ...]` per seat."""

    key: EpisodeKey | tuple[()]  # that the mapping is drawn from
    inner: dict[str, dict[str, chex.ArrayTree]]  # by policy and group
    layout: AgentLayout = struct.field(pytree_node=False)


def _entries(policies: Mapping[str, Policy | Population]) -> tuple[_Entry, ...]:
    is_map = isinstance(policies, Mapping) and policies
    if not is_map or not all(
        isinstance(name, str) and isinstance(policy, Policy | Population)
        for name, policy in policies.items()
    ):
        raise ValueError(
            "`policies` must be a dict of names to policies or populations, at least "
            f"one, got {policies!r}."
        )
    entries, first = [], 0
    for name, policy in policies.items():
        size = policy.size if isinstance(policy, Population) else None
        inner = policy.policy if isinstance(policy, Population) else policy
        entries.append(_Entry(name, inner, first, size))
        first = entries[-1].last
    return tuple(entries)


def _init(
    entries: tuple[_Entry, ...], mapping_fn: MappingFn | FixedMapping, num_envs: int
) -> _MapState:
    layout = getattr(num_envs, "agents", None)
    if layout is None:
        raise ValueError(
            "`policy_map` must act in an environment of `envs.vectorize_agents`, got "
            "one without agents."
        )
    is_fixed = isinstance(mapping_fn, FixedMapping)
    if not is_fixed:
        _check_mapping(mapping_fn, layout.agents, entries[-1].last)
    inner = {entry.name: {} for entry in entries}
    for seat in _seats(entries, mapping_fn, layout):
        num = len(seat.columns)
        state = seat.entry.policy.init(num_envs * num)
        if any(isinstance(x, EpisodeKey) for x in _nodes(state)):
            raise ValueError(
                f"The policy {seat.entry.name!r} must have no `EpisodeKey` in its "
                "state, which belongs to a lane and not to an agent."
            )
        inner[seat.entry.name][seat.group.name] = _part(state, num_envs)
    return _MapState(key=() if is_fixed else EpisodeKey(), inner=inner, layout=layout)


def _apply(
    entries: tuple[_Entry, ...],
    mapping_fn: MappingFn | FixedMapping,
    params: Params,
    obs: Obs,
    state: _MapState,
    key: Key,
) -> PolicyStep:
    _check_params(params, entries)
    layout, acting = state.layout, obs[ACTING]
    seats = _seats(entries, mapping_fn, layout)
    policy_id = _draw_ids(entries, mapping_fn, state, acting.shape)

    def decide(seat: _Seat, key: Key) -> PolicyStep:
        return _decide(seat, policy_id, params, obs, state, key)

    is_fixed = isinstance(mapping_fn, FixedMapping)
    if not is_fixed and len(layout.groups) > 1:
        seats, policy_id = _fitting(seats, mapping_fn, layout, policy_id, decide, key)
    inner = {name: dict(groups) for name, groups in state.inner.items()}
    made = {group.name: [] for group in layout.groups}
    for number, seat in enumerate(seats):
        name, group = seat.entry.name, seat.group.name
        seat_key = key if len(seats) == 1 else keys.fold_in(key, number)
        decision = decide(seat, seat_key)
        moves = acting & _is_of(seat.entry, policy_id)
        inner[name][group] = keys.select(
            _columns_of(moves, seat), decision.state, inner[name][group]
        )
        made[group].append((seat, decision))
    join = functools.partial(
        _join_columns if is_fixed else _join_chosen, policy_id=policy_id
    )
    return PolicyStep(
        action={
            group: join(seats, [x.action for _, x in seats])
            for group, seats in made.items()
        },
        state=state.replace(inner=inner),
        extras={
            "policy_id": policy_id,
            "agents": {group: _join_extras(join, x) for group, x in made.items()},
            "roster": _roster(entries, seats if is_fixed else None),
        },
    )


def _roster(entries: tuple[_Entry, ...], seats: list[_Seat] | None) -> Roster:
    columns = seats and tuple((x.entry.name, x.group.name, x.columns) for x in seats)
    return Roster(tuple((x.name, x.first, x.last) for x in entries), columns)


def _seats(
    entries: tuple[_Entry, ...],
    mapping_fn: MappingFn | FixedMapping,
    layout: AgentLayout,
) -> list[_Seat]:
    """Who may sit where."""
    if not isinstance(mapping_fn, FixedMapping):
        return [
            _Seat(entry, group, tuple(range(len(group.members))))
            for group in layout.groups
            for entry in entries
        ]
    policies = _policies_by_agent(entries, mapping_fn, layout.agents)
    seats = []
    for group in layout.groups:
        names = [policies[layout.agents[member]] for member in group.members]
        for entry in entries:
            columns = tuple(i for i, name in enumerate(names) if name == entry.name)
            if columns:
                seats.append(_Seat(entry, group, columns))
    return seats


def _policies_by_agent(
    entries: tuple[_Entry, ...], mapping: FixedMapping, agents: tuple[str, ...]
) -> dict[str, str]:
    """Refuses a fixed mapping that does not fit; returns it by agent."""
    if isinstance(mapping.policies, str):
        policies = dict.fromkeys(agents, mapping.policies)
    else:
        policies = dict(mapping.policies)
    if set(policies) != set(agents):
        raise ValueError(
            f"`fixed_mapping` must have the agents {', '.join(agents)}, got "
            f"{', '.join(policies)}."
        )
    sizes = {entry.name: entry.size for entry in entries}
    for agent, name in policies.items():
        if name not in sizes:
            raise ValueError(
                f"`fixed_mapping` must have policies of {', '.join(sizes)}, got "
                f"{name!r} for {agent!r}."
            )
        if sizes[name] is not None:
            raise ValueError(
                "`fixed_mapping` must not have a population, whose members are drawn, "
                f"got {name!r} for {agent!r}."
            )
    return policies


def _draw_ids(
    entries: tuple[_Entry, ...],
    mapping_fn: MappingFn | FixedMapping,
    state: _MapState,
    shape: tuple[int, int],
) -> jax.Array:
    """The index of each agent's policy, `[B, A]`; -1 where it is out of range."""
    agents = state.layout.agents
    if isinstance(mapping_fn, FixedMapping):
        policies = _policies_by_agent(entries, mapping_fn, agents)
        first = {entry.name: entry.first for entry in entries}
        fixed = [first[policies[agent]] for agent in agents]
        return jnp.broadcast_to(jnp.asarray(fixed, jnp.int32)[None], shape)
    # Drawn at every step, from the same key: a select would keep what all lanes draw.
    episode_keys = keys.inline(state.key.value)
    drawn = jax.vmap(lambda key: mapping_fn(key, agents))(episode_keys)
    is_index = (drawn >= 0) & (drawn < entries[-1].last)
    return jnp.where(is_index, drawn, -1)


def _check_mapping(mapping_fn: MappingFn, agents: tuple[str, ...], num: int) -> None:
    """Refuses a mapping that returns something else than an index for each agent."""
    shape = jax.eval_shape(lambda: mapping_fn(jax.random.key(0), agents))
    if getattr(shape, "shape", None) != (len(agents),) or shape.dtype != jnp.int32:
        raise ValueError(
            f"`mapping_fn` must return one index per agent, int32 of shape "
            f"({len(agents)},), got {checks.describe(shape)}."
        )
    drawn = _try_mapping(mapping_fn, agents)
    wrong = () if drawn is None else drawn[(drawn < 0) | (drawn >= num)]
    if len(wrong):
        raise ValueError(
            f"`mapping_fn` must return indices from 0 to {num - 1}, got {wrong[0]}."
        )


def _try_mapping(mapping_fn: MappingFn, agents: tuple[str, ...]) -> np.ndarray | None:
    """`[64, A]` draws of a mapping; None if it holds on to what is traced."""
    try:
        return _trial(mapping_fn, agents)
    except (TypeError, jax.errors.JAXTypeError):
        return None


@functools.cache
def _trial(mapping_fn: MappingFn, agents: tuple[str, ...]) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        trial_keys = jax.random.split(jax.random.key(0), _NUM_TRIALS)
        return np.asarray(jax.vmap(lambda key: mapping_fn(key, agents))(trial_keys))


def _fitting(
    seats: list[_Seat],
    mapping_fn: MappingFn,
    layout: AgentLayout,
    policy_id: jax.Array,
    decide: Callable[[_Seat, Key], PolicyStep],
    key: Key,
) -> tuple[list[_Seat], jax.Array]:
    """Leaves out the seats whose policy cannot play the group.

    Refuses a mapping that is seen to give such a group to such a policy. Where it does
    so later, nobody plays: the index is -1.
    """
    fitting = []
    for seat in seats:
        members = np.asarray(seat.group.members)
        try:
            jax.eval_shape(functools.partial(decide, seat), key)
        except Exception as error:
            drawn = _try_mapping(mapping_fn, layout.agents)
            if drawn is None or np.any(_is_of(seat.entry, drawn[:, members])):
                raise ValueError(
                    f"`mapping_fn` must not give the group {seat.group.name!r} to the "
                    f"policy {seat.entry.name!r}, which cannot play it: {error}"
                ) from error
            is_member = np.isin(np.arange(len(layout.agents)), members)
            wrong = _is_of(seat.entry, policy_id) & is_member[None]
            policy_id = jnp.where(wrong, -1, policy_id)
        else:
            fitting.append(seat)
    return fitting, policy_id


def _decide(
    seat: _Seat,
    policy_id: jax.Array,
    params: Params,
    obs: Obs,
    state: _MapState,
    key: Key,
) -> PolicyStep:
    """What the policy does in its seat, `[B, n, ...]`."""
    entry, group = seat.entry, seat.group
    num_envs, num = policy_id.shape[0], len(seat.columns)
    args = _merge(
        (_take(obs[group.name], seat.columns), state.inner[entry.name][group.name])
    )
    args = params[entry.name], *args, key
    if entry.size is None:
        decision = entry.policy.apply(*args)
    else:
        member = jnp.clip(_columns_of(policy_id, seat) - entry.first, 0, entry.size - 1)
        decision = apply_members(entry.policy, entry.size, member.reshape(-1), *args)
    who = f"The policy {entry.name!r}, which plays the group {group.name!r},"
    checks.decision(who, decision, group, num_envs * num)
    checks.same(f"{who} must return the state as it came in", args[2], decision.state)
    return _part(decision, num_envs)


def _columns_of(per_agent: jax.Array, seat: _Seat) -> jax.Array:
    """`[B, A]` to the `[B, n]` of a seat."""
    return _take(per_agent, tuple(seat.group.members[x] for x in seat.columns))


def _is_of(entry: _Entry, policy_id: jax.Array) -> jax.Array:
    return (policy_id >= entry.first) & (policy_id < entry.last)


def _take(tree: chex.ArrayTree, columns: tuple[int, ...]) -> chex.ArrayTree:
    """Columns of `[B, n, ...]`."""
    first, num = columns[0], len(columns)
    if columns == tuple(range(first, first + num)):
        return jax.tree.map(lambda x: x[:, first : first + num], tree)
    return jax.tree.map(lambda x: x[:, np.asarray(columns)], tree)


def _merge(tree: chex.ArrayTree) -> chex.ArrayTree:
    """`[B, n, ...]` to `[B * n, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _part(tree: chex.ArrayTree, num_envs: int) -> chex.ArrayTree:
    """`[B * n, ...]` to `[B, n, ...]`."""

    def part(x: jax.typing.ArrayLike) -> jax.Array:
        x = jnp.asarray(x, jnp.result_type(x))
        return x.reshape(num_envs, -1, *x.shape[1:])

    return jax.tree.map(part, tree)


_Made = list[tuple[_Seat, PolicyStep]]  # the seats of a group and what they decided
_Join = Callable[[_Made, list[chex.ArrayTree]], chex.ArrayTree]


def _join_columns(
    made: _Made, values: list[chex.ArrayTree], policy_id: jax.Array
) -> chex.ArrayTree:
    """Puts the columns of a group's seats back in their order."""
    del policy_id  # unused: it does not change
    if len(made) == 1:
        return values[0]
    order = np.argsort(np.concatenate([seat.columns for seat, _ in made]))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1)[:, order], *values)


def _join_chosen(
    made: _Made, values: list[chex.ArrayTree], policy_id: jax.Array
) -> chex.ArrayTree:
    """Takes for every agent what its policy decided, zero where it has none."""
    joined = jax.tree.map(jnp.zeros_like, values[0])
    for (seat, _), value in zip(made, values, strict=True):
        is_its = _is_of(seat.entry, _columns_of(policy_id, seat))
        joined = keys.select(is_its, value, joined)
    return joined


def _join_extras(join: _Join, made: _Made) -> chex.ArrayTree:
    """Joins the extras of a group's policies by name."""
    named = [
        {} if isinstance(x.extras, tuple) and not x.extras else x.extras
        for _, x in made
    ]
    for (seat, _), extras in zip(made, named, strict=True):
        if not isinstance(extras, dict):
            raise ValueError(
                f"The extras of the policy {seat.entry.name!r} must be () or a dict, "
                f"got {type(extras).__name__}."
            )
    if len(named) == 1:
        return named[0]
    joined = {}
    for name in sorted(set().union(*named)):
        like = next(x[name] for x in named if name in x)
        values = [
            x[name] if name in x else _zeros(like, seat)
            for x, (seat, _) in zip(named, made, strict=True)
        ]
        for value in values:
            checks.same(
                f"Policies that share a group must give `{name}` alike",
                _row(like),
                _row(value),
            )
        joined[name] = join(made, values)
    return joined


def _is_nothing(extras: chex.ArrayTree) -> bool:
    return isinstance(extras, tuple) and not extras


def _zeros(like: chex.ArrayTree, seat: _Seat) -> chex.ArrayTree:
    """Zeros for a seat, of the kind of another's extras."""
    num = len(seat.columns)
    return jax.tree.map(
        lambda x: jnp.zeros((x.shape[0], num, *x.shape[2:]), x.dtype), like
    )


def _row(tree: chex.ArrayTree) -> chex.ArrayTree:
    return jax.eval_shape(lambda: jax.tree.map(lambda x: x[0, 0], tree))


def _check_params(params: Params, entries: tuple[_Entry, ...]) -> None:
    names, is_dict = [entry.name for entry in entries], isinstance(params, Mapping)
    if not is_dict or not set(names) <= set(params):
        got = ", ".join(params) if is_dict else checks.describe(params)
        raise ValueError(
            f"`params` must have an entry for each policy, {', '.join(names)}, got "
            f"{got or 'none'}."
        )


def _nodes(tree: chex.ArrayTree) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, EpisodeKey))

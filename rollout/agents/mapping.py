"""`fixed_mapping`, and mappings that draw each agent's policy in every episode.

Policies are numbered in their order, and a population takes as many numbers as it has
members. Trajectories keep a `Roster`, which names the numbers.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from flax import struct

from rollout.agents.population import Population
from rollout.types import Key, Policy

MappingFn = Callable[[Key, tuple[str, ...]], jax.Array]


class FixedMapping(NamedTuple):
    """Agents with the names of their policies, the same in every episode."""

    policies: tuple[tuple[str, str], ...] | str


def fixed_mapping(policies: Mapping[str, str] | str) -> FixedMapping:
    """Makes the mapping that gives every agent the same policy in every episode.

    A policy is evaluated only for the agents that it controls.

    Args:
        policies: the name of a policy for every agent of the environment; or one name,
            of the policy that controls all of them.
    """
    return FixedMapping(
        policies if isinstance(policies, str) else tuple(policies.items())
    )


class Entry(NamedTuple):
    """A policy of the map: `size` members from index `first` on, or one if None."""

    name: str
    policy: Policy
    first: int
    size: int | None

    @property
    def last(self) -> int:
        """The index after the last one of this policy."""
        return self.first + (self.size or 1)

    def controls(self, policy_id: jax.Array) -> jax.Array:
        """Returns a bool, True where an index is one of this policy's."""
        return (policy_id >= self.first) & (policy_id < self.last)


class PolicyIndex(struct.PyTreeNode):
    """The policies of a map by number; static.

    Attributes:
        indices: `(name, first, last)` of every policy, `last` not included.
        columns: `(name, group, columns)`, the agents of a group that a policy controls
            under a fixed mapping; None under a drawn one.
    """

    indices: tuple[tuple[str, int, int], ...] = struct.field(pytree_node=False)
    columns: tuple[tuple[str, str, tuple[int, ...]], ...] | None = struct.field(
        pytree_node=False
    )

    def select(self, name: str, policy_id: jax.Array) -> jax.Array:
        """Returns where a policy was in control, bool of the shape of `policy_id`.

        Raises:
            ValueError: if no policy has that name.
        """
        for known, first, last in self.indices:
            if known == name:
                return (policy_id >= first) & (policy_id < last)
        names = ", ".join(known for known, *_ in self.indices)
        raise ValueError(f"`name` must be one of the policies {names}, got {name!r}.")


def make_entries(policies: Mapping[str, Policy | Population]) -> tuple[Entry, ...]:
    """Checks policies by name, and numbers them."""
    is_map = isinstance(policies, Mapping) and policies  # not empty
    if not is_map or not all(
        isinstance(name, str) and isinstance(policy, Policy | Population)
        for name, policy in policies.items()
    ):
        raise ValueError(
            "`policies` must be a dict with at least one policy or population by name, "
            f"got {policies!r}."
        )
    entries, first = [], 0
    for name, policy in policies.items():
        if isinstance(policy, Population):
            entry = Entry(name, policy.policy, first, policy.size)
        else:
            entry = Entry(name, policy, first, None)
        entries.append(entry)
        first = entry.last
    return tuple(entries)


def policies_by_agent(
    entries: tuple[Entry, ...], mapping: FixedMapping, agents: tuple[str, ...]
) -> dict[str, str]:
    """Checks a fixed mapping against the agents; returns the policy of each agent."""
    if isinstance(mapping.policies, str):
        policies = dict.fromkeys(agents, mapping.policies)
    else:
        policies = dict(mapping.policies)
    if set(policies) != set(agents):
        raise ValueError(
            f"`fixed_mapping` must map the agents {', '.join(agents)}, got "
            f"{', '.join(policies)}."
        )
    sizes = {entry.name: entry.size for entry in entries}
    for agent, name in policies.items():
        if name not in sizes:
            raise ValueError(
                f"`fixed_mapping` must use the policies {', '.join(sizes)}, got "
                f"{name!r} for {agent!r}."
            )
        if sizes[name] is not None:
            raise ValueError(
                "`fixed_mapping` must not use a population, whose members are drawn, "
                f"got {name!r} for {agent!r}."
            )
    return policies

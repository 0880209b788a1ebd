"""`Population`: one policy with many sets of parameters, one of them per agent.

Agents are sorted into blocks of one member each, so that parameters are gathered per
block and not per agent, and every agent is evaluated by its own member only. `N` agents
of `P` members fill at most `N / K + P` blocks of `K`, however many each member has:
shapes stay static, and no agent is left out.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs import prng
from rollout.envs.types import ArrayTree
from rollout.types import Key, Obs, Params, Policy, PolicyState, check_policy

# Blocks per member on average. Few large ones are mostly padding, many small ones are
# slow.
_BLOCKS_PER_MEMBER = 4
_CHUNK = 32  # agents that are compared pairwise


class Population(struct.PyTreeNode):
    """An entry of `policy_map` with many members, such as past selves or a league.

    Its entry in `params` has the leading axis P. Its members have P consecutive
    indices, in the order of policies. Each agent costs one member, not P, and acts with
    its own key, as a batch of one.

    Attributes:
        policy: the policy of every member.
        size: P, the number of parameter sets, at least 1.

    Raises:
        ValueError: if `policy` is not a `Policy` or `size` not an int of at least 1;
            while tracing, if the parameters lack the axis.
    """

    policy: Policy
    size: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        check_policy(self.policy)
        checks.int_between("size", self.size)


def apply_members(
    apply: Callable[..., ArrayTree],
    size: int,
    member: jax.Array,
    params: Params,
    obs: Obs,
    state: PolicyState,
    key: Key,
) -> Any:
    """Calls a policy's function for `[N, ...]` agents, agent i of `member[i]`."""
    what = "The parameters of a population must have leaves"
    checks.leading_axes(what, params, (size,))
    num_agents = member.shape[0]
    agent_keys = prng.fold_in(key, jnp.arange(num_agents, dtype=jnp.int32))

    def apply_one(params: Params, *inputs: ArrayTree) -> ArrayTree:
        obs, state, key = inputs
        obs, state = jax.tree.map(lambda x: x[None], (obs, state))
        return jax.tree.map(lambda x: x[0], apply(params, obs, state, key))

    def apply_local(member: jax.Array, *inputs: ArrayTree) -> ArrayTree:
        agent, block_member, place = blocks_of(member, size)
        block_params = jax.tree.map(lambda x: x[block_member], params)
        blocks = jax.tree.map(lambda x: x[agent], inputs)
        apply_block = jax.vmap(apply_one, (None, 0, 0, 0))
        decided = jax.vmap(apply_block)(block_params, *blocks)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[place], decided)

    inputs, num_parts = (member, obs, state, agent_keys), prng.num_parts()
    if num_parts == 1:
        return apply_local(*inputs)
    # The agents of each device are ordered separately.
    parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), inputs)
    decided = jax.vmap(apply_local)(*parts)
    return jax.tree.map(lambda x: x.reshape(num_agents, *x.shape[2:]), decided)


def blocks_of(member: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts `N` agents into blocks of `K`, each of one member.

    Returns:
        `[blocks, K]` int32, the agent in each place, an arbitrary one in empty places;
        `[blocks]` int32, the member; `[N]` int32, the place of each agent, counted over
        all blocks.
    """
    num_agents = member.shape[0]
    block_size = max(1, num_agents // (_BLOCKS_PER_MEMBER * size))
    # Enough for any members: each leaves at most its last block unfilled.
    num_blocks = num_agents // block_size + size
    # A counting sort: each member's blocks follow those of the member before, and an
    # agent's rank is its place in them.
    rank, count = _ranks(member, size)
    end = jnp.cumsum(-(-count // block_size))  # of each member's blocks
    begin = jnp.concatenate([jnp.zeros((1,), end.dtype), end[:-1]])
    place = begin[member] * block_size + rank
    agent = jnp.zeros((num_blocks * block_size,), jnp.int32)
    every = jnp.arange(num_agents, dtype=jnp.int32)
    agent = agent.at[place].set(every, unique_indices=True)
    # A block belongs to the first member whose blocks end after it. Unused blocks come
    # last and get the last member; nobody reads their results.
    is_after = jnp.arange(num_blocks)[:, None] >= end[None]
    block_member = jnp.minimum(jnp.sum(is_after, axis=1), size - 1)
    return agent.reshape(num_blocks, block_size), block_member, place


def _ranks(member: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Ranks each agent among those of its member, `[N]`; counts them, `[P]`.

    It compares agents within chunks and counts over chunks, which is faster on a CPU
    than sorting or a cumulative sum.
    """
    num_agents = member.shape[0]
    # The padding is a member that does not exist, so it is counted nowhere.
    chunks = jnp.pad(member, (0, -num_agents % _CHUNK), constant_values=size)
    chunks = chunks.reshape(-1, _CHUNK)
    earlier = jnp.tri(_CHUNK, k=-1, dtype=bool)[None]
    within = jnp.sum((chunks[:, :, None] == chunks[:, None]) & earlier, axis=2)
    # Rank: equal members earlier in the chunk, plus those in all earlier chunks.
    counts = jnp.sum(chunks[:, :, None] == jnp.arange(size)[None, None], axis=1)
    earlier = jnp.tri(counts.shape[0], k=-1, dtype=bool)[:, :, None]
    before = jnp.sum(jnp.where(earlier, counts[None], 0), axis=1)
    chunk = jnp.arange(num_agents) // _CHUNK
    return before[chunk, member] + within.reshape(-1)[:num_agents], counts.sum(axis=0)

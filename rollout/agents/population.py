"""A policy with many sets of parameters, one set per agent.

Agents are sorted into blocks, and all agents of a block have the same member of the
population. Parameters are gathered per block instead of per agent, and every agent is
evaluated by a single member. `N` agents of `P` members fill at most `N / K + P` blocks
of `K` agents, for every distribution of agents over members. Shapes are therefore
static, and no agent is dropped.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rollout.base import checks, prng
from rollout.envs.types import ArrayTree
from rollout.types import Key, Obs, Params, Policy, PolicyState, check_policy

# Blocks per member on average. A few large blocks are mostly padding, and many small
# blocks are slow.
_BLOCKS_PER_MEMBER = 4
_CHUNK = 32  # number of agents in a pairwise comparison


class Population(struct.PyTreeNode):
    """A policy of `policy_map` with many members, such as past checkpoints or a league.

    The population's entry in `params` has the leading axis P. The members have P
    consecutive policy indices. Each agent is evaluated by a single member, with a
    separate key, as a batch of one.

    Attributes:
        policy: policy that all members share.
        size: P, the number of parameter sets, at least 1.

    Raises:
        ValueError: if `policy` is not a `Policy`; if `size` is not an int of at least
            1; while tracing, if the parameters lack the leading axis.
    """

    policy: Policy
    size: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        check_policy(self.policy)
        checks.check_int("size", self.size)


def apply_members(
    apply: Callable[..., ArrayTree],
    size: int,
    member: jax.Array,
    params: Params,
    obs: Obs,
    state: PolicyState,
    key: Key,
) -> Any:
    """Applies a policy to `[N, ...]` agents; agent i has parameters `member[i]`."""
    message = "The parameters of a population must have leaves"
    checks.check_leading_axes(message, params, (size,))
    num_agents = member.shape[0]
    agent_keys = prng.fold_in(key, jnp.arange(num_agents, dtype=jnp.int32))

    def apply_one(params: Params, *inputs: ArrayTree) -> ArrayTree:
        obs, state, key = inputs
        obs, state = jax.tree.map(lambda x: x[None], (obs, state))
        return jax.tree.map(lambda x: x[0], apply(params, obs, state, key))

    def apply_local(member: jax.Array, *inputs: ArrayTree) -> ArrayTree:
        agent, block_member, slot = blocks_of(member, size)
        block_params = jax.tree.map(lambda x: x[block_member], params)
        blocks = jax.tree.map(lambda x: x[agent], inputs)
        apply_block = jax.vmap(apply_one, (None, 0, 0, 0))
        outputs = jax.vmap(apply_block)(block_params, *blocks)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[slot], outputs)

    inputs, num_parts = (member, obs, state, agent_keys), prng.num_parts()
    if num_parts == 1:
        return apply_local(*inputs)
    # Sort the agents of each device separately.
    parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), inputs)
    outputs = jax.vmap(apply_local)(*parts)
    return jax.tree.map(lambda x: x.reshape(num_agents, *x.shape[2:]), outputs)


def blocks_of(member: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts `N` agents into blocks of `K` agents with the same member.

    Returns:
        `[blocks, K]` int32, the agent in each slot, arbitrary in empty slots;
        `[blocks]` int32, the member of each block; `[N]` int32, the slot of each agent,
        counted over all blocks.
    """
    num_agents = member.shape[0]
    block_size = max(1, num_agents // (_BLOCKS_PER_MEMBER * size))
    # Enough for every distribution: each member has at most one block with empty slots.
    num_blocks = num_agents // block_size + size
    # Counting sort: the blocks are ordered by member, and an agent's rank is its slot
    # within the blocks of its member.
    rank, count = _ranks(member, size)
    end = jnp.cumsum(-(-count // block_size))  # end of each member's blocks
    begin = jnp.concatenate([jnp.zeros((1,), end.dtype), end[:-1]])
    slot = begin[member] * block_size + rank
    agent = jnp.zeros((num_blocks * block_size,), jnp.int32)
    agent_index = jnp.arange(num_agents, dtype=jnp.int32)
    agent = agent.at[slot].set(agent_index, unique_indices=True)
    # A block belongs to the first member whose blocks end after it. Unused blocks are
    # last and get the last member; their results are never read.
    is_after = jnp.arange(num_blocks)[:, None] >= end[None]
    block_member = jnp.minimum(jnp.sum(is_after, axis=1), size - 1)
    return agent.reshape(num_blocks, block_size), block_member, slot


def _ranks(member: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Ranks each agent among the agents of its member, `[N]`; counts agents, `[P]`.

    Comparisons within chunks and sums over chunks are faster on a CPU than sorting or a
    cumulative sum.
    """
    num_agents = member.shape[0]
    # Pad with a member that does not exist, so that padding is not counted.
    chunks = jnp.pad(member, (0, -num_agents % _CHUNK), constant_values=size)
    chunks = chunks.reshape(-1, _CHUNK)
    is_earlier = jnp.tri(_CHUNK, k=-1, dtype=bool)[None]
    chunk_rank = jnp.sum((chunks[:, :, None] == chunks[:, None]) & is_earlier, axis=2)
    # Rank: number of equal members earlier in the chunk and in all earlier chunks.
    counts = jnp.sum(chunks[:, :, None] == jnp.arange(size)[None, None], axis=1)
    is_earlier = jnp.tri(counts.shape[0], k=-1, dtype=bool)[:, :, None]
    offset = jnp.sum(jnp.where(is_earlier, counts[None], 0), axis=1)
    chunk = jnp.arange(num_agents) // _CHUNK
    rank = offset[chunk, member] + chunk_rank.reshape(-1)[:num_agents]
    return rank, counts.sum(axis=0)

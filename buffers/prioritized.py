"""`PrioritizedReplayBuffer`: samples transitions in proportion to priorities."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from rollout.base import checks
from rollout.buffers import neighbours, ring, sampling, sum_tree
from rollout.buffers.replay import ReplayBuffer, as_rows, jit_method
from rollout.buffers.types import Batch, PrioritizedState, Sequences
from rollout.envs.types import ArrayTree

_BETA = 0.4  # default, as in the paper
_LARGEST = 1e30  # largest valid priority: 2**28 of them have a finite float32 sum


class PrioritizedReplayBuffer(ReplayBuffer):
    """A replay buffer that samples in proportion to `priority ** alpha`.

    New rows get the largest priority so far, initially 1. A row with priority 0 is
    never sampled. The class adds `update_priorities` to the methods of `ReplayBuffer`.

    Sampling is stratified: the sum of all priorities is split into `batch_size` equal
    segments, and each segment yields one transition. The importance weight is
    `(1 / (N P(i))) ** beta`, divided by the largest weight of the batch.

    Attributes:
        alpha: priority exponent, in [0, 1]; 0 samples uniformly. See `ReplayBuffer` for
            all other attributes.

    Raises:
        ValueError: if `alpha` is out of range, or as in `ReplayBuffer`.

    Source:
        "Prioritized Experience Replay", section 3.3, 3.4; arXiv:1511.05952.
    """

    alpha: float = struct.field(pytree_node=False, default=0.6, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.check_fraction("alpha", self.alpha)
        object.__setattr__(self, "alpha", float(self.alpha))  # arrays do not hash

    def init(self, transition: ArrayTree, params: Any = None) -> PrioritizedState:
        """Initializes an empty buffer; see `ReplayBuffer.init`."""
        return PrioritizedState(
            ring=super().init(transition, params),
            priorities=sum_tree.build(
                jnp.zeros(self.num_slots * self.num_envs, jnp.float32)
            ),
            max_priority=jnp.ones((), jnp.float32),
            num_rejected=jnp.zeros((), jnp.int32),
        )

    def _add(
        self, state: PrioritizedState, rows: ArrayTree, mask: jax.Array
    ) -> PrioritizedState:
        """Appends the rows `[T, B, ...]` where `mask` is True, at `max_priority`."""
        memory, slot = ring.write(state.ring, rows, mask)
        # Slot N marks unwritten rows: map them to an out-of-range row number.
        row = slot * self.num_envs + jnp.arange(self.num_envs, dtype=jnp.int32)[None]
        row = jnp.where(slot < self.num_slots, row, state.priorities[0].shape[0])
        priorities = sum_tree.set_distinct_leaves(
            state.priorities, row.reshape(-1), self._mass(state.max_priority)
        )
        return state.replace(ring=memory, priorities=priorities)

    def sample(
        self,
        state: PrioritizedState,
        key: chex.PRNGKey,
        batch_size: int,
        *,
        beta: float | jax.Array = _BETA,
    ) -> Batch:
        """Samples `batch_size` transitions; see `ReplayBuffer.sample`.

        Args:
            state: buffer state for which `can_sample` is True.
            key: one typed key.
            batch_size: S, number of transitions, at least 1.
            beta: exponent of the importance weights, in [0, 1], a number or `()`. At 1
                the weights fully correct the sampling bias. The default 0.4 is the
                initial value of the paper; anneal it to 1.

        Returns:
            A batch `[S, ...]` with importance weights.

        Raises:
            ValueError: if `beta` is a number out of range, or as in
                `ReplayBuffer.sample`.
        """
        checks.check_fraction("beta", beta)
        return self._sample_transitions(state, key, batch_size, beta)

    def sample_sequences(
        self,
        state: PrioritizedState,
        key: chex.PRNGKey,
        batch_size: int,
        length: int,
        *,
        beta: float | jax.Array = _BETA,
    ) -> Sequences:
        """Samples sequences within episodes; see `ReplayBuffer.sample_sequences`.

        Args:
            state: buffer state for which `can_sample` is True.
            key: one typed key.
            batch_size: S, number of sequences, at least 1.
            length: L, maximum number of steps, at least 1.
            beta: exponent of the importance weights, as in `sample`.

        Returns:
            Sequences `[L, S, ...]` with importance weights.

        Raises:
            ValueError: if `beta` is a number out of range, or as in
                `ReplayBuffer.sample_sequences`.
        """
        checks.check_fraction("beta", beta)
        return self._sample_sequences(state, key, batch_size, length, beta)

    @jit_method()
    def update_priorities(
        self, state: PrioritizedState, indices: jax.Array, priorities: jax.Array
    ) -> PrioritizedState:
        """Updates the priorities of sampled rows.

        Args:
            state: buffer state before the update; donate it.
            indices: `[S]` int32, `batch.indices`. If a row appears twice, its last
                priority is used. Row numbers without a stored row are skipped.
            priorities: `[S]` float, at least 0, for example absolute TD errors. A
                priority below 0, above 1e30 or not finite is rejected and counted in
                `num_rejected`.

        Returns:
            The buffer state after the update.

        Raises:
            ValueError: while tracing, if the shapes are not `[S]`, or if `indices` are
                not integers.
        """
        self._check_state(state)
        indices, priorities = as_rows(indices), jnp.asarray(priorities)
        is_number = jnp.issubdtype(priorities.dtype, jnp.number)
        if indices.ndim != 1 or priorities.shape != indices.shape or not is_number:
            raise ValueError(
                "`indices` and `priorities` must be `[S]`, one number per row, got "
                f"shape {indices.shape} and {checks.describe(priorities)}."
            )
        priorities = priorities.astype(jnp.float32)
        valid = (priorities >= 0) & (priorities <= _LARGEST)
        is_stored = neighbours.is_stored(state.ring, indices)
        accepted = valid & is_stored
        out_of_range = state.priorities[0].shape[0]  # `set_leaves` skips this leaf
        leaf = jnp.where(accepted, indices, out_of_range)
        largest = jnp.max(jnp.where(accepted, priorities, 0), initial=0)
        rejected = jnp.sum(~valid, dtype=jnp.int32)
        return state.replace(
            priorities=sum_tree.set_leaves(
                state.priorities, leaf, self._mass(priorities)
            ),
            max_priority=jnp.maximum(state.max_priority, largest),
            num_rejected=state.num_rejected + rejected,
        )

    def _mass(self, priority: jax.Array) -> jax.Array:
        """Returns `priority ** alpha`; 0 stays 0, even with `alpha=0`."""
        return jnp.where(priority > 0, priority ** jnp.float32(self.alpha), 0)

    def _usable_fn(self, state: PrioritizedState) -> sampling.RowFn:
        """Returns a predicate that also excludes rows of priority 0."""
        usable_fn = super()._usable_fn(state)

        def usable(row: jax.Array) -> jax.Array:
            positive = state.priorities[0][row] > 0
            return positive if usable_fn is None else positive & usable_fn(row)

        return usable

    def _sample_rows(
        self, state: PrioritizedState, key: chex.PRNGKey, batch_size: int, beta: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Samples `[S]` rows and their importance weights, 0 for an unusable row."""
        tree = state.priorities
        usable_fn = self._usable_fn(state)
        # If the base class has no predicate, only rows of priority 0 are unusable.
        all_usable = super()._usable_fn(state) is None
        sample_key, resample_key = (key, key) if all_usable else jax.random.split(key)
        row = sum_tree.sample_stratified(tree, sample_key, batch_size)
        usable = usable_fn(row)
        if not all_usable:
            row, usable = sampling.resample_invalid(
                row,
                # Resample from the whole tree: stratified resampling would overweight
                # segments with few usable rows.
                lambda key: sum_tree.sample_iid(tree, key, batch_size),
                usable_fn,
                lambda key: sampling.weighted(
                    lambda row: jnp.where(usable_fn(row), tree[0][row], 0.0),
                    state.ring,
                    key,
                    batch_size,
                ),
                resample_key,
            )
        # Divided by the largest weight, N and the sum cancel: the row with the smallest
        # mass has weight 1. An infinite mass excludes unusable rows from the minimum.
        mass = jnp.where(usable, tree[0][row], jnp.inf)
        beta = jnp.asarray(beta, jnp.float32)
        weights = (mass / jnp.min(mass)) ** -beta
        # The barrier orders a later update of these rows after the reads of the tree,
        # so XLA can write the update in place.
        return lax.optimization_barrier((row, jnp.where(usable, weights, 0)))

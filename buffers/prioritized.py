"""`PrioritizedReplayBuffer`: samples transitions in proportion to priorities."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from rollout import checks
from rollout.buffers import neighbours, ring, sampling, sum_tree
from rollout.buffers.batches import SampleOptions
from rollout.buffers.replay import ReplayBuffer, as_rows, jit_method
from rollout.buffers.types import Batch, PrioritizedState, Sequences
from rollout.envs.types import ArrayTree

_BETA = 0.4  # by default
_LARGEST = 1e30  # of priority ** alpha: a sum of 2**30 of them is still finite


class PrioritizedReplayBuffer(ReplayBuffer):
    """A ring of transitions per lane, sampled in proportion to `priority ** alpha`.

    New rows get the largest priority seen so far, at first 1. A row whose priority is 0
    is never sampled. It has the methods of `ReplayBuffer` and `update_priorities`.

    A sample has one transition from each of `batch_size` equal shares of the sum, with
    the weight `(1 / (N P(i))) ** beta`, divided by the largest one in the batch.

    Attributes:
        alpha: how much priorities count, in [0, 1]; at 0 all rows are equal. For the
            other attributes see `ReplayBuffer`.

    Raises:
        ValueError: if `alpha` is out of range, and as `ReplayBuffer`.

    Source:
        "Prioritized Experience Replay", section 3.3, 3.4; arXiv:1511.05952.
    """

    alpha: float = struct.field(pytree_node=False, default=0.6, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction("alpha", self.alpha)
        object.__setattr__(self, "alpha", float(self.alpha))  # arrays have no hash

    def init(self, transition: ArrayTree, params: Any = None) -> PrioritizedState:
        """Makes an empty buffer; arguments and errors as in `ReplayBuffer.init`."""
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
        """Appends rows `[T, B, ...]` where `mask`, with the largest priority seen."""
        written, slot = ring.write(state.ring, rows, mask)
        # Rows that are not written have the slot N; their numbers lie beyond all rows.
        row = slot * self.num_envs + jnp.arange(self.num_envs, dtype=jnp.int32)[None]
        row = jnp.where(slot < self.num_slots, row, state.priorities[0].shape[0])
        priorities = sum_tree.set_distinct_leaves(
            state.priorities, row.reshape(-1), self._mass(state.max_priority)
        )
        return state.replace(ring=written, priorities=priorities)

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
            state: a state for which `can_sample` holds.
            key: one typed key.
            batch_size: S, at least 1.
            beta: how much of the bias of unequal chances the weights correct, in
                [0, 1], a number or `()`; by default 0.4, the first value in the paper.
                Anneal it to 1.

        Returns:
            The batch, `[S, ...]`, with importance weights.

        Raises:
            ValueError: if `beta` is a number out of range, and as
                `ReplayBuffer.sample`.
        """
        checks.fraction("beta", beta)
        return self._sample_rows(state, key, batch_size, beta)

    def sample_sequences(
        self,
        state: PrioritizedState,
        key: chex.PRNGKey,
        batch_size: int,
        length: int,
        *,
        beta: float | jax.Array = _BETA,
    ) -> Sequences:
        """Samples pieces of episodes; see `ReplayBuffer.sample_sequences`.

        Args:
            state: a state for which `can_sample` holds.
            key: one typed key.
            batch_size: S, at least 1.
            length: L, at least 1.
            beta: as in `sample`.

        Returns:
            The pieces, `[L, S, ...]`, with importance weights.

        Raises:
            ValueError: if `beta` is a number out of range, and as
                `ReplayBuffer.sample_sequences`.
        """
        checks.fraction("beta", beta)
        return self._sample_pieces(state, key, batch_size, length, beta)

    @jit_method()
    def update_priorities(
        self, state: PrioritizedState, indices: jax.Array, priorities: jax.Array
    ) -> PrioritizedState:
        """Sets the priorities of rows.

        Args:
            state: the state before; donate it.
            indices: `[S]` int32, `batch.indices`. If a row appears twice, its last
                priority counts. A row that is not stored is skipped.
            priorities: `[S]` float, at least 0: absolute errors. A priority that is
                negative, not finite or above 1e30 is rejected and counted in
                `num_rejected`.

        Returns:
            The state after.

        Raises:
            ValueError: while tracing, if the shapes are not `[S]`, or if `indices` are
                not integers.
        """
        self._check_state(state)
        indices, priorities = as_rows(indices), jnp.asarray(priorities)
        is_number = jnp.issubdtype(priorities.dtype, jnp.number)
        if indices.ndim != 1 or priorities.shape != indices.shape or not is_number:
            raise ValueError(
                "`indices` and `priorities` must be `[S]`, a number for each row, got "
                f"shape {indices.shape} and {checks.describe(priorities)}."
            )
        priorities = priorities.astype(jnp.float32)
        valid = (priorities >= 0) & (priorities <= _LARGEST)
        stored = neighbours.is_stored(state.ring, indices)
        taken = valid & stored
        beyond = state.priorities[0].shape[0]  # a leaf that is not written
        leaf = jnp.where(taken, indices, beyond)
        seen = jnp.max(jnp.where(taken, priorities, 0), initial=0)
        rejected = jnp.sum(~valid, dtype=jnp.int32)
        return state.replace(
            priorities=sum_tree.set_leaves(
                state.priorities, leaf, self._mass(priorities)
            ),
            max_priority=jnp.maximum(state.max_priority, seen),
            num_rejected=state.num_rejected + rejected,
        )

    def _mass(self, priority: jax.Array) -> jax.Array:
        """Returns a priority's term in the sums; 0 stays 0, even with alpha 0."""
        return jnp.where(priority > 0, priority ** jnp.float32(self.alpha), 0)

    def _usable_fn(self, state: PrioritizedState) -> sampling.RowFn:
        """Also excludes rows of priority 0."""
        usable_fn = super()._usable_fn(state)

        def usable(row: jax.Array) -> jax.Array:
            positive = state.priorities[0][row] > 0
            return positive if usable_fn is None else positive & usable_fn(row)

        return usable

    def _draw(
        self, state: PrioritizedState, key: chex.PRNGKey, options: SampleOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Draws `[S]` rows and their importance weights, 0 for an unusable row."""
        tree, num_draws = state.priorities, options.batch_size
        usable_fn = self._usable_fn(state)
        # Except at priority 0.
        all_usable = super()._usable_fn(state) is None
        draw_key, again_key = (key, key) if all_usable else jax.random.split(key)
        row = sum_tree.draw(tree, draw_key, num_draws)
        usable = usable_fn(row)
        if not all_usable:
            row, usable = sampling.redraw(
                row,
                # Not by shares: the few usable rows of a share would be drawn too
                # often.
                lambda key: sum_tree.draw_apart(tree, key, num_draws),
                usable_fn,
                lambda key: sampling.in_proportion_to(
                    lambda row: jnp.where(usable_fn(row), tree[0][row], 0.0),
                    state.ring,
                    key,
                    num_draws,
                ),
                again_key,
            )
        # N and the sum cancel when weights are divided by the largest, which is that of
        # the smallest mass. At infinity an unusable row is never the smallest.
        mass = jnp.where(usable, tree[0][row], jnp.inf)
        beta = jnp.asarray(options.beta, jnp.float32)
        weights = (mass / jnp.min(mass)) ** -beta
        # The barrier makes an update of these rows wait until the weights have read
        # the sums, so that it writes in place.
        return lax.optimization_barrier((row, jnp.where(usable, weights, 0)))

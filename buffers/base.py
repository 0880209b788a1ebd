"""What all buffers have in common: a ring per lane to read, walk and count."""

import chex
import jax
import jax.numpy as jnp
from flax import struct

from buffers import batches, checks, fields, ring, sampling, walk
from buffers.types import RingState, Sequences


@struct.dataclass
class RingBuffer:
    """The part that the buffers share; it has no way to add a row.

    Every buffer state has a `ring`, which holds the rows that are visible.
    Indices are row numbers, int32: slot n of lane i is `n * B + i`.

    Attributes:
        capacity: transitions that all lanes hold together. Each lane has
            `capacity // num_envs` slots.
        num_envs: B, environments (lanes) that are written side by side.
        successor: "stored" keeps `next_obs` with every row. "shared" takes it from the
            next row of the lane, and keeps only the final observations of episodes, in
            a side ring: about half of the memory. A row whose successor is
            missing, not written yet or evicted from the side ring, is never sampled.
        final_capacity: F, final observations that are kept with "shared", at least
            `num_envs`; by default a quarter of the capacity, which is enough for
            episodes of four steps or more. Twice the capacity divided by the mean
            length of an episode is ample; `count_lost` tells whether it was.

    Raises:
        ValueError: if a number is not an int of at least 1, if `capacity` is less than
            one step of all lanes or more than 2**30, or if `successor` or
            `final_capacity` is not as above.
    """

    capacity: int = struct.field(pytree_node=False)
    num_envs: int = struct.field(pytree_node=False)
    successor: str = struct.field(pytree_node=False, default="stored", kw_only=True)
    final_capacity: int | None = struct.field(
        pytree_node=False, default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        checks.capacity(self.capacity, self.num_envs)
        checks.successor(self.successor, self.final_capacity, self.num_envs)

    @property
    def num_slots(self) -> int:
        """N, transitions that each lane holds."""
        return self.capacity // self.num_envs

    def size(self, state: chex.ArrayTree) -> jax.Array:
        """Counts the transitions that are stored, `()` int32."""
        return jnp.sum(state.ring.size)

    def can_sample(
        self, state: chex.ArrayTree, batch_size: int, *, stack: int | None = None
    ) -> jax.Array:
        """Tells whether at least `batch_size` transitions may be sampled.

        Args:
            state: the state.
            batch_size: S, at least 1.
            stack: as in `sample`: rows whose history is gone do not count.

        Returns:
            `()` bool. It costs as much as a small sample.
        """
        checks.count("batch_size", batch_size)
        usable_fn = self._usable_fn(state, stack)
        if usable_fn is None:
            return self.size(state) >= batch_size
        return sampling.has_usable(state.ring, usable_fn, batch_size)

    def count_lost(self, state: chex.ArrayTree) -> jax.Array:
        """Counts endings that are stored but never sampled, `()` int32.

        With `successor="shared"` these are the endings whose final observation was
        evicted from the side ring: if there are any, raise `final_capacity`. It looks
        at the flags of all rows: O(capacity).
        """
        if not state.ring.finals:
            return jnp.zeros((), jnp.int32)
        row = walk.all_rows(state.ring)
        ended = walk.is_stored(state.ring, row) & walk.is_done(state.ring, row)
        return jnp.sum(ended & ~walk.has_successor(state.ring, row), dtype=jnp.int32)

    def get(self, state: chex.ArrayTree, indices: jax.Array) -> chex.ArrayTree:
        """Reads rows.

        Args:
            state: the state.
            indices: `[...]` int32.

        Returns:
            `[..., *leaf]`, like the transition of `init`. Its field `mask`, if it has
            one, is False where there is no such row or its successor is missing.
        """
        return batches.get(state.ring, indices)

    def previous(self, state: chex.ArrayTree, indices: jax.Array) -> jax.Array:
        """Finds the previous rows of the same episodes.

        Args:
            state: the state.
            indices: `[...]` int32, rows that are stored.

        Returns:
            `[...]` int32; the row itself where it is the first of its episode, or the
            oldest that is stored.

        Raises:
            ValueError: if the transition has no `terminated` or `truncated`.
        """
        fields.need(state.ring.experience, checks.FLAGS, "`previous`")
        return walk.previous(state.ring, indices)

    def following(self, state: chex.ArrayTree, indices: jax.Array) -> jax.Array:
        """Finds the next rows of the same episodes.

        Args:
            state: the state.
            indices: `[...]` int32, rows that are stored.

        Returns:
            `[...]` int32; the row itself where its episode ended or broke off, or where
            it is the newest.

        Raises:
            ValueError: if the transition has no `terminated` or `truncated`.
        """
        fields.need(state.ring.experience, checks.FLAGS, "`following`")
        return walk.following(state.ring, indices)

    def unfinished(self, state: chex.ArrayTree) -> tuple[jax.Array, jax.Array]:
        """Finds the newest rows of the episodes that are under way.

        Returns:
            `[B]` int32, the newest row of every lane, and `[B]` bool, False where the
            lane is empty or its newest row ended an episode.

        Raises:
            ValueError: if the transition has no `terminated` or `truncated`.
        """
        fields.need(state.ring.experience, checks.FLAGS, "`unfinished`")
        row = walk.newest(state.ring)
        return row, (state.ring.size > 0) & ~walk.is_done(state.ring, row)

    def sample_episodes(
        self,
        state: chex.ArrayTree,
        key: chex.PRNGKey,
        batch_size: int,
        max_length: int,
    ) -> Sequences:
        """Draws whole episodes evenly, with replacement.

        It draws from the episodes that have ended, are stored from their first row on
        and have at most `max_length` steps. Each has the same chance, whatever its
        length. It looks at the flags of all rows: O(capacity).

        Args:
            state: a state for which `count_episodes` is at least 1.
            key: one typed key.
            batch_size: S, at least 1.
            max_length: L, at least 1.

        Returns:
            The episodes, `[L, S, ...]`, padded; weights are ones. If there is no such
            episode, everything is masked and the weights are zeros.

        Raises:
            ValueError: if a count is not an int of at least 1, or if the transition has
                no `terminated`, `truncated` or `episode_length`.
        """
        checks.count("batch_size", batch_size)
        whole_fn = self._whole_fn(state, max_length)
        last = sampling.in_proportion_to(whole_fn, state.ring, key, batch_size)
        found = walk.is_stored(state.ring, last) & whole_fn(last)
        first = walk.first_of(state.ring, last)
        weights = found.astype(jnp.float32)
        return batches.sequences(state.ring, first, weights, max_length)

    def count_episodes(self, state: chex.ArrayTree, max_length: int) -> jax.Array:
        """Counts the episodes that `sample_episodes` draws from, `()` int32."""
        whole_fn = self._whole_fn(state, max_length)
        row = walk.all_rows(state.ring)
        stored = walk.is_stored(state.ring, row)
        return jnp.sum(stored & whole_fn(row), dtype=jnp.int32)

    def _whole_fn(self, state: chex.ArrayTree, max_length: int) -> sampling.RowFn:
        """Makes the test whether a row ends an episode that is stored whole."""
        checks.count("max_length", max_length)
        needed = (*checks.FLAGS, "episode_length")
        fields.need(state.ring.experience, needed, "A sample of episodes")
        return lambda row: walk.ends_whole(state.ring, row, max_length)

    def _usable_fn(
        self, state: chex.ArrayTree, stack: int | None
    ) -> sampling.RowFn | None:
        """Makes the test whether a stored row may be sampled; None if all may."""
        if not state.ring.finals and (stack is None or stack == 1):
            return None

        def usable(row: jax.Array) -> jax.Array:
            flat = row.reshape(-1)
            whole = walk.history(state.ring, flat, stack or 1)[1]
            return (whole & walk.has_successor(state.ring, flat)).reshape(row.shape)

        return usable

    def _init(self, transition: chex.ArrayTree) -> RingState:
        """Makes an empty ring for transitions `[B, ...]`."""
        checks.row(transition, self.num_envs)
        final_capacity = 0
        if self.successor == "shared":
            checks.can_share(transition)
            default = max(self.num_envs, -(-self.capacity // 4))
            final_capacity = self.final_capacity or default
        row = fields.put(transition, mask=())
        return ring.init(row, self.num_slots, final_capacity)

    def _chunk(
        self, state: chex.ArrayTree, trajectory: chex.ArrayTree
    ) -> tuple[chex.ArrayTree, jax.Array]:
        """Checks what is added: `[T, B, ...]` rows, and their mask, `[T, B]` bool."""
        rows = fields.put(trajectory, mask=())
        if checks.like_init(rows, state.ring):
            rows = jax.tree.map(lambda x: x[None], rows)
        shape = jax.tree.leaves(rows)[0].shape[:2]
        mask = fields.get(trajectory, "mask")
        if mask is None:
            return rows, jnp.ones(shape, bool)
        return rows, checks.mask(mask, shape)

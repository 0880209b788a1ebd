"""`RingBuffer`: the methods that all buffers share, from `add` to `merge`."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.core import Tracer

from rollout.buffers import checks, fields, gather, neighbours, ring, sampling
from rollout.buffers.types import ArrayTree, Batch, RingState, Sequences


class RingBuffer(struct.PyTreeNode):
    """The base of all buffers: a ring of transitions per lane.

    Every buffer state has a `ring`, which holds the visible rows. Indices are row
    numbers, int32: slot n of lane i is `n * B + i`.

    Attributes:
        capacity: transitions that all lanes hold together. Each lane has
            `capacity // num_envs` slots.
        num_envs: B, environments (lanes) that are written side by side.
        next_obs: "stored" keeps `next_obs` with every row. "shared" takes it from the
            next row of the lane, and keeps only the final observations of episodes, in
            a side ring: about half of the memory. A row whose successor is not written
            yet, or was evicted from the side ring, is never sampled.
        final_obs_capacity: F, final observations that "shared" keeps, at least
            `num_envs`; by default a quarter of the capacity, enough for episodes of
            four steps or more. Twice the capacity divided by the mean length of an
            episode is ample; `count_lost` shows whether F was too small.

    Raises:
        ValueError: if a number is not an int of at least 1, if `capacity` is less than
            one step of all lanes or more than 2**30, or if `next_obs` or
            `final_obs_capacity` is not as above.
    """

    capacity: int = struct.field(pytree_node=False)
    num_envs: int = struct.field(pytree_node=False)
    next_obs: str = struct.field(pytree_node=False, default="stored", kw_only=True)
    final_obs_capacity: int | None = struct.field(
        pytree_node=False, default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        checks.capacity(self.capacity, self.num_envs)
        checks.next_obs(self.next_obs, self.final_obs_capacity, self.num_envs)

    @property
    def num_slots(self) -> int:
        """N, transitions that each lane holds."""
        return self.capacity // self.num_envs

    def add(self, state: ArrayTree, trajectory: ArrayTree) -> ArrayTree:
        """Appends transitions; a full lane drops its oldest ones.

        Args:
            state: the state before; donate it.
            trajectory: `[T, B, ...]`, a chunk, or `[B, ...]`, one step, like the
                transition of `init`. If it has a field `mask`, rows where that is False
                are not stored: lanes may advance by different numbers of rows.

        Returns:
            The state after.

        Raises:
            ValueError: while tracing, if the structure, a shape or a dtype is not that
                of `init`; it names the leaf.
        """
        rows, mask = self._chunk(state, trajectory)
        return self._run(self._add, state, rows, mask)

    def init(self, transition: ArrayTree, params: Any = None) -> ArrayTree:
        """Makes an empty buffer; every kind of buffer has its own kind of state."""
        raise NotImplementedError

    def size(self, state: ArrayTree) -> jax.Array:
        """Counts the transitions that are stored, `()` int32."""
        return jnp.sum(state.ring.size)

    def can_sample(
        self, state: ArrayTree, batch_size: int, *, stack: int | None = None
    ) -> jax.Array:
        """Returns whether at least `batch_size` transitions may be sampled.

        Args:
            state: the state.
            batch_size: S, at least 1.
            stack: as in `sample`: rows whose history was evicted do not count.

        Returns:
            `()` bool. It costs as much as a small sample.
        """
        batch_size = checks.positive_int("batch_size", batch_size)
        return self._run(self._can_sample, state, batch_size=batch_size, stack=stack)

    def _can_sample(
        self, state: ArrayTree, batch_size: int, stack: int | None
    ) -> jax.Array:
        usable_fn = self._usable_fn(state, stack)
        if usable_fn is None:
            return self.size(state) >= batch_size
        return sampling.has_usable(state.ring, usable_fn, batch_size)

    def count_lost(self, state: ArrayTree) -> jax.Array:
        """Counts endings that are stored but never sampled, `()` int32.

        With `next_obs="shared"` these are the endings whose final observation was
        evicted from the side ring: if there are any, raise `final_obs_capacity`. It
        reads the flags of all rows: O(capacity).
        """
        if not state.ring.final_obs:
            return jnp.zeros((), jnp.int32)
        row = neighbours.all_rows(state.ring)
        ended = neighbours.is_stored(state.ring, row) & neighbours.is_done(
            state.ring, row
        )
        return jnp.sum(
            ended & ~neighbours.has_successor(state.ring, row), dtype=jnp.int32
        )

    def get(self, state: ArrayTree, indices: jax.Array) -> ArrayTree:
        """Reads rows.

        Args:
            state: the state.
            indices: `[...]` int32.

        Returns:
            `[..., *leaf]`, like the transition of `init`. A field `mask` is False
            where there is no such row, or its successor is missing.
        """
        return gather.get(state.ring, checks.indices(indices))

    def previous(self, state: ArrayTree, indices: jax.Array) -> jax.Array:
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
        return neighbours.previous(state.ring, checks.indices(indices))

    def following(self, state: ArrayTree, indices: jax.Array) -> jax.Array:
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
        return neighbours.following(state.ring, checks.indices(indices))

    def unfinished(self, state: ArrayTree) -> tuple[jax.Array, jax.Array]:
        """Finds the newest rows of unfinished episodes.

        Returns:
            `[B]` int32, the newest row of every lane, and `[B]` bool, False where the
            lane is empty or its newest row ended an episode.

        Raises:
            ValueError: if the transition has no `terminated` or `truncated`.
        """
        fields.need(state.ring.experience, checks.FLAGS, "`unfinished`")
        row = neighbours.newest(state.ring)
        return row, (state.ring.size > 0) & ~neighbours.is_done(state.ring, row)

    def sample_episodes(
        self,
        state: ArrayTree,
        key: chex.PRNGKey,
        batch_size: int,
        max_length: int,
    ) -> Sequences:
        """Draws whole episodes evenly, with replacement.

        It draws from the episodes that have ended, are stored from their first row on
        and have at most `max_length` steps. Each has the same chance, whatever its
        length. It reads the flags of all rows: O(capacity).

        Args:
            state: a state for which `count_episodes` is at least 1.
            key: one typed key.
            batch_size: S, at least 1.
            max_length: L, at least 1.

        Returns:
            The episodes, `[L, S, ...]`, padded; weights are ones. If there is no such
            episode, all rows are masked out and the weights are zeros.

        Raises:
            ValueError: if a count is not an int of at least 1, or if the transition has
                no `terminated`, `truncated` or `episode_length`.
        """
        checks.state(state, self.num_slots, self.num_envs)
        checks.key(key)
        return self._run(
            self._sample_episodes,
            state,
            key,
            batch_size=checks.positive_int("batch_size", batch_size),
            max_length=self._check_whole(state, max_length),
        )

    def count_episodes(self, state: ArrayTree, max_length: int) -> jax.Array:
        """Counts the episodes that `sample_episodes` draws from, `()` int32."""
        max_length = self._check_whole(state, max_length)
        return self._run(self._count_episodes, state, max_length=max_length)

    def _sample_episodes(
        self, state: ArrayTree, key: chex.PRNGKey, batch_size: int, max_length: int
    ) -> Sequences:
        def is_end(row: jax.Array) -> jax.Array:
            return neighbours.ends_whole(state.ring, row, max_length)

        last = sampling.in_proportion_to(is_end, state.ring, key, batch_size)
        found = neighbours.is_stored(state.ring, last) & is_end(last)
        first = neighbours.first_of(state.ring, last)
        weights = found.astype(jnp.float32)
        return gather.sequences(state.ring, first, weights, max_length)

    def _count_episodes(self, state: ArrayTree, max_length: int) -> jax.Array:
        row = neighbours.all_rows(state.ring)
        is_end = neighbours.ends_whole(state.ring, row, max_length)
        return jnp.sum(neighbours.is_stored(state.ring, row) & is_end, dtype=jnp.int32)

    def _check_whole(self, state: ArrayTree, max_length: int) -> int:
        needed = (*checks.FLAGS, "episode_length")
        fields.need(state.ring.experience, needed, "A sample of episodes")
        return checks.positive_int("max_length", max_length)

    def _usable_fn(self, state: ArrayTree, stack: int | None) -> sampling.RowFn | None:
        """Makes the test for stored rows that may be sampled; None if all may."""
        if not state.ring.final_obs and (stack is None or stack == 1):
            return None

        def usable(row: jax.Array) -> jax.Array:
            flat = row.reshape(-1)
            whole = neighbours.history(state.ring, flat, stack or 1)[1]
            return (whole & neighbours.has_successor(state.ring, flat)).reshape(
                row.shape
            )

        return usable

    def dump(self, state: ArrayTree) -> tuple[ArrayTree, jax.Array]:
        """Reads all rows of every lane, in the order of time.

        Returns:
            `[N, B, *leaf]`, like the transition of `init`, the oldest row of every lane
            first; and `[N, B]` bool, False where a lane holds no further row, or the
            successor of a row is missing. A field `mask` has the same values.
        """
        return self._run(self._dump, state)

    def merge(self, state: ArrayTree, other: ArrayTree) -> ArrayTree:
        """Appends all rows of another buffer, lane by lane, in the order of time.

        Args:
            state: the state before.
            other: the state of a buffer with as many lanes, and rows of the same
                structure, shapes and dtypes; of any capacity.

        Returns:
            The state after. The rows get the priority of new rows. Rows whose successor
            is missing in `other` are left out.

        Raises:
            ValueError: if the lanes or the rows differ.
        """
        rows, mask = self.dump(other)
        return self._run(self._add, state, *self._chunk(state, rows, mask))

    def _dump(self, state: ArrayTree) -> tuple[ArrayTree, jax.Array]:
        memory = state.ring
        # All slots of a lane from its oldest row on; those after `size` are empty.
        time = jnp.arange(memory.num_slots, dtype=jnp.int32)[:, None]
        oldest = neighbours.move(memory, neighbours.newest(memory), 1 - memory.size)
        row = neighbours.move(memory, oldest[None], time)
        mask = (time < memory.size[None]) & neighbours.has_successor(memory, row)
        return gather.get(memory, row), mask

    def _draw(
        self,
        state: ArrayTree,
        key: chex.PRNGKey,
        num_draws: int,
        stack: int | None,
        beta: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """Draws `[S]` rows and their weights; `beta` is None without priorities."""
        raise NotImplementedError

    def _sample(
        self,
        state: ArrayTree,
        key: chex.PRNGKey,
        gamma: Any,
        beta: Any,
        *,
        batch_size: int,
        stack: int | None,
        n_step: int | None,
        relabel_fn: gather.RelabelFn | None,
        horizon: int,
    ) -> Batch:
        if relabel_fn is not None:
            key, relabel_key = jax.random.split(key)
        row, weights = self._draw(state, key, batch_size, stack, beta)
        batch = gather.transitions(
            state.ring, row, weights, n_step=n_step, gamma=gamma, stack=stack
        )
        if relabel_fn is None:
            return batch
        return gather.relabelled(state.ring, batch, relabel_key, relabel_fn, horizon)

    def _sample_sequences(
        self,
        state: ArrayTree,
        key: chex.PRNGKey,
        beta: Any,
        *,
        batch_size: int,
        length: int,
    ) -> Sequences:
        row, weights = self._draw(state, key, batch_size, None, beta)
        return gather.sequences(state.ring, row, weights, length)

    def _add(self, state: Any, rows: ArrayTree, mask: jax.Array) -> Any:
        """Stores rows `[T, B, ...]` where `mask`, `[T, B]` bool."""
        raise NotImplementedError

    def _run(self, method: MethodType, *args: Any, **options: Any) -> Any:
        """Calls a method that checks nothing; jitted, unless already traced."""
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
            return method(*args, **options)
        # Function and buffer apart: bound methods of equal buffers are not equal, and
        # each would be compiled again.
        return _call(method.__func__, self, tuple(options.items()), *args)

    def _init(self, transition: ArrayTree, params: Any) -> RingState:
        """Makes an empty ring for transitions `[B, ...]`, or for a collector's."""
        if hasattr(transition, "collect_steps"):
            collector = transition
            # A host collector must really step to show the kind of its rows.
            if not hasattr(collector.env, "reset_done"):
                raise TypeError(
                    "`transition` must be one step if environments are not JAX, "
                    "such as `collector.step(carry, params)[1]` or a row of a "
                    f"trajectory, got {type(collector).__name__}."
                )
            transition = _row_of(collector, params)
        checks.row(transition, self.num_envs)
        final_obs_capacity = 0
        if self.next_obs == "shared":
            checks.can_share(transition)
            default = max(self.num_envs, -(-self.capacity // 4))
            final_obs_capacity = self.final_obs_capacity or default
        row = fields.replace(transition, mask=())
        return ring.init(row, self.num_slots, final_obs_capacity)

    def _chunk(
        self,
        state: ArrayTree,
        trajectory: ArrayTree,
        mask: ArrayTree | None = None,
    ) -> tuple[ArrayTree, jax.Array]:
        """Checks rows to add, `[T, B, ...]`, and their mask, `[T, B]` bool."""
        checks.state(state, self.num_slots, self.num_envs)
        rows = fields.replace(trajectory, mask=())
        is_step = checks.like_init(rows, state.ring)
        given: Any = fields.get(trajectory, "mask") if mask is None else mask
        shape = jax.tree.leaves(rows)[0].shape[: 1 if is_step else 2]
        mask = jnp.ones(shape, bool) if given is None else checks.mask(given, shape)
        added = rows, mask
        return jax.tree.map(lambda x: x[None], added) if is_step else added


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call(
    function: Callable[..., Any], buffer: RingBuffer, options: tuple, *args: Any
) -> Any:
    return function(buffer, *args, **dict(options))


def _row_of(collector: Any, params: Any) -> ArrayTree:
    """Returns the shapes and dtypes of a collector's row."""

    def step(key: chex.PRNGKey) -> ArrayTree:
        return collector.step(collector.init(key), params)[1]

    try:
        return jax.eval_shape(step, jax.random.key(0))
    except Exception as error:  # the policy may raise any
        if params is not None:
            raise
        raise ValueError(
            "`params` must be given, as `init(collector, params)`, to a policy that "
            f"needs them; without, it raised {type(error).__name__}: {error}"
        ) from error

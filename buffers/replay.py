"""`ReplayBuffer`: uniform sampling, and the methods that all buffers share."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout.base import checks, programs
from rollout.buffers import neighbours, ring, sampling
from rollout.buffers.types import (
    Batch,
    EpisodicState,
    PrioritizedState,
    RingState,
    Sequences,
)
from rollout.envs.types import ArrayTree

Fn = TypeVar("Fn", bound=Callable[..., Any])

_MAX_ROWS = 2**30  # row numbers up to twice the capacity must fit int32


def jit_method(*static: str) -> Callable[[Fn], Fn]:
    """Returns a decorator that jits a method of a buffer and inlines it in outer jits.

    The buffer is a pytree argument: equal buffers share jit cache entries, and `gamma`
    may be traced.
    """

    def decorate(method: Fn) -> Fn:
        # `types` separates jit cache entries; see `hash_of_types`.
        def run(types: int, *args: Any, **options: Any) -> Any:
            del types
            return method(*args, **options)

        signature = inspect.signature(method)
        types = inspect.Parameter("types", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [types, *signature.parameters.values()]
        # `jax.jit` finds static arguments by the names in the signature.
        signature = signature.replace(parameters=parameters)
        setattr(run, "__signature__", signature)  # noqa: B010  (pyright)
        jitted = jax.jit(run, static_argnames=("types", *static), inline=True)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            return jitted(programs.hash_of_types(self), self, *args, **options)

        return cast(Fn, call)

    return decorate


class ReplayBuffer(struct.PyTreeNode):
    """A replay buffer with uniform sampling and one ring of transitions per lane.

    All methods are pure and jitted. Jit them together with the surrounding code and
    donate the state, so that `add` writes in place: a call outside of `jit` copies the
    ring.

    Every buffer state has a field `ring` with the visible rows. Indices are int32 row
    numbers: slot n of lane i is row `n * B + i`.

    Attributes:
        capacity: total number of transitions in all lanes. Each lane has
            `capacity // num_envs` slots.
        num_envs: B, number of parallel environments (lanes).
        next_obs: storage of successors. "stored" stores `next_obs` with every row.
            "shared" reads it from the next row of the lane, and stores only the final
            observations of episodes in a side ring. This halves the memory of
            observations. A row is not sampled before its successor is written, nor
            after its successor was evicted from the side ring.
        final_obs_capacity: F, capacity of the side ring for "shared", at least
            `num_envs`. The default is a quarter of `capacity`, which is sufficient for
            episodes of four or more steps. If episodes are longer,
            `2 * capacity / mean_episode_length` is ample. `num_evicted` reports whether
            F was too small.
        n_step: maximum number of rewards in an n-step return, at least 1; None for
            one-step rewards without `discount`. The sum stops at an episode end and at
            the newest row, so it may have fewer terms. `discount` and `next_obs` belong
            to its last step.

                G = r_t + γ r_{t+1} + ... + γ^{m-1} r_{t+m-1},  1 <= m <= n_step
                target = G + discount V(next_obs),  discount = γ^m (1 - terminated)

        gamma: discount per step, in [0, 1], a number or `()`; required with `n_step`.
        stack: K, number of frames in `obs` and `next_obs` of a sample, at least 1.
            Frames before the start of an episode repeat its first observation, and an
            entry `action_mask` is not stacked, as in `rollout.envs.FrameStack`. Rows
            with an evicted history are not sampled. None returns a single observation
            without the axis K.
        relabel_fn: function `(key, experience, future) -> experience` of batches, with
            leaves `[S, ...]`, for hindsight goals. `future` is sampled uniformly from
            each row and the later rows of its episode. Not supported with `n_step` or
            `stack`. Pass the same function object in every call: a new object compiles
            again.
        relabel_horizon: maximum offset of `future` in rows, at least 1.

    Raises:
        ValueError: if a number is not an int of at least 1, if `capacity` is less than
            `num_envs` or more than 2**30, or if another attribute is invalid. `sample`
            validates `gamma`.

    Source:
        "Reinforcement Learning: An Introduction", 2nd ed., eq. 7.1; "Hindsight
        Experience Replay", section 4.5, arXiv:1707.01495.
    """

    capacity: int = struct.field(pytree_node=False)
    num_envs: int = struct.field(pytree_node=False)
    next_obs: str = struct.field(pytree_node=False, default="stored", kw_only=True)
    final_obs_capacity: int | None = struct.field(
        pytree_node=False, default=None, kw_only=True
    )
    n_step: int | None = struct.field(pytree_node=False, default=None, kw_only=True)
    gamma: float | jax.Array | None = struct.field(default=None, kw_only=True)
    stack: int | None = struct.field(pytree_node=False, default=None, kw_only=True)
    relabel_fn: sampling.RelabelFn | None = struct.field(
        pytree_node=False, default=None, kw_only=True
    )
    relabel_horizon: int = struct.field(pytree_node=False, default=64, kw_only=True)

    def __post_init__(self) -> None:
        # The ring and the side ring must have room for one step of all lanes.
        least = checks.check_int("num_envs", self.num_envs)
        checks.check_int("capacity", self.capacity, least=least, most=_MAX_ROWS)
        checks.check_choice("next_obs", self.next_obs, ("stored", "shared"))
        self._check_options()
        if self.final_obs_capacity is None:
            return
        checks.check_int("final_obs_capacity", self.final_obs_capacity, least=least)
        if self.next_obs == "stored":
            raise ValueError(
                '`final_obs_capacity` needs next_obs="shared", got '
                f'{self.final_obs_capacity} with next_obs="stored".'
            )

    def _check_options(self) -> None:
        """Validates the sampling options."""
        sizes = {
            "n_step": self.n_step,
            "stack": self.stack,
            "relabel_horizon": self.relabel_horizon,
        }
        for name, size in sizes.items():
            if size is not None:
                checks.check_int(name, size)
        if self.relabel_fn is not None and (self.n_step or self.stack):
            raise ValueError("`relabel_fn` must not be given with `n_step` or `stack`.")

    @property
    def num_slots(self) -> int:
        """N, capacity of each lane in transitions."""
        return self.capacity // self.num_envs

    def init(self, transition: ArrayTree, params: Any = None) -> RingState:
        """Initializes an empty buffer.

        Args:
            transition: `[B, ...]`, one `Transition` or any other pytree; only shapes
                and dtypes are read. A `rollout.Collector` or `rollout.HostCollector`
                may be passed instead of its transition. A field `mask` is not stored,
                because every stored row is valid.
            params: parameters of the policy, if `transition` is a collector.

        Returns:
            The initial buffer state. Its type depends on the buffer class.

        Raises:
            ValueError: if a leaf lacks the lane axis, if a flag is not bool, or if
                `next_obs` is "shared" and the transition lacks `obs`, `next_obs`,
                `terminated` or `truncated`.
        """
        if hasattr(transition, "row_shape"):
            transition = _row_of(transition, params)
        final_obs_capacity = 0
        if self.next_obs == "shared":
            default = max(self.num_envs, -(-self.capacity // 4))
            final_obs_capacity = self.final_obs_capacity or default
        return ring.init(transition, self.num_envs, self.num_slots, final_obs_capacity)

    @jit_method()
    def add(self, state: ArrayTree, trajectory: ArrayTree) -> ArrayTree:
        """Appends transitions; a full lane overwrites its oldest transitions.

        Args:
            state: buffer state before the write; donate it.
            trajectory: `[T, B, ...]`, T steps, or `[B, ...]`, one step, with the
                structure of the transition of `init`. Rows with a False field `mask`
                are not stored, so lanes may receive different numbers of rows.

        Returns:
            The buffer state after the write.

        Raises:
            ValueError: while tracing, if the structure, a shape or a dtype differs from
                `init`. The message names the leaf.
        """
        self._check_state(state)
        mask = neighbours.get_field(trajectory, "mask")
        return self._add(state, *ring.check_rows(state.ring, trajectory, mask))

    def size(self, state: ArrayTree) -> jax.Array:
        """Returns the number of stored transitions, `()` int32."""
        return jnp.sum(state.ring.size, dtype=jnp.int32)

    def can_sample(self, state: ArrayTree, batch_size: int) -> jax.Array:
        """Returns whether at least `batch_size` transitions can be sampled.

        Args:
            state: buffer state.
            batch_size: S, number of transitions, at least 1.

        Returns:
            `()` bool. The call costs about as much as a small sample.
        """
        batch_size = checks.check_int("batch_size", batch_size)
        return self._can_sample(state, batch_size)

    # `batch_size` is traced: a warm-up passes many sizes, which would each compile.
    @jit_method()
    def _can_sample(self, state: ArrayTree, batch_size: Any) -> jax.Array:
        usable_fn = self._usable_fn(state)
        if usable_fn is None:
            return self.size(state) >= batch_size
        return sampling.has_usable(state.ring, usable_fn, batch_size)

    def sample(self, state: ArrayTree, key: chex.PRNGKey, batch_size: int) -> Batch:
        """Samples `batch_size` transitions with replacement.

        All stored transitions are equally likely, even if lanes store different numbers
        of transitions. With `next_obs="shared"`, only transitions with a stored
        successor are sampled.

        Args:
            state: buffer state for which `can_sample` is True.
            key: one typed key.
            batch_size: S, number of transitions, at least 1.

        Returns:
            A batch `[S, ...]` with weights of 1. If no transition can be sampled, the
            weights are zeros and a field `mask` is False.

        Raises:
            ValueError: if `batch_size` is not an int of at least 1, if `gamma` is a
                number out of range, or if the transition lacks a required field.
        """
        return self._sample_transitions(state, key, batch_size)

    def sample_sequences(
        self, state: ArrayTree, key: chex.PRNGKey, batch_size: int, length: int
    ) -> Sequences:
        """Samples sequences of consecutive steps within episodes.

        The first row of a sequence is sampled like a row of `sample`. A sequence ends
        at the end of its episode, at the newest row, or after `length` steps. It is
        then padded, and `mask` is False for padding. To replay a recurrent policy,
        record its input state in `extras` and start from the state in the first row of
        the sequence. `n_step`, `stack` and `relabel_fn` are ignored.

        Args:
            state: buffer state for which `can_sample` is True.
            key: one typed key.
            batch_size: S, number of sequences, at least 1.
            length: L, maximum number of steps, at least 1.

        Returns:
            Sequences `[L, S, ...]`.

        Raises:
            ValueError: if a count is not an int of at least 1, or if the transition has
                no `terminated` or `truncated`.
        """
        return self._sample_sequences(state, key, batch_size, length)

    @jit_method("batch_size", "max_length")
    def sample_episodes(
        self, state: ArrayTree, key: chex.PRNGKey, batch_size: int, max_length: int
    ) -> Sequences:
        """Samples complete episodes uniformly, with replacement.

        An episode is eligible if it has ended, if all of its rows are stored, and if it
        has at most `max_length` steps. All eligible episodes are equally likely,
        independent of their length. The call reads the flags of all rows: O(capacity).

        Args:
            state: buffer state for which `count_episodes` is at least 1.
            key: one typed key.
            batch_size: S, number of episodes, at least 1.
            max_length: L, maximum number of steps, at least 1.

        Returns:
            Padded episodes `[L, S, ...]` with weights of 1. If no episode is eligible,
            all rows are masked out and the weights are zeros.

        Raises:
            ValueError: if a count is not an int of at least 1, or if the transition has
                no `terminated`, `truncated` or `episode_length`.
        """
        self._check_state(state)
        checks.check_key(key)
        batch_size = checks.check_int("batch_size", batch_size)
        max_length = checks.check_int("max_length", max_length)

        def is_end(row: jax.Array) -> jax.Array:
            return neighbours.ends_whole(state.ring, row, max_length)

        last = sampling.weighted(is_end, state.ring, key, batch_size)
        is_valid = neighbours.is_stored(state.ring, last) & is_end(last)
        first = neighbours.first_row(state.ring, last)
        weights = is_valid.astype(jnp.float32)
        return sampling.sequences(state.ring, first, weights, max_length)

    @jit_method("max_length")
    def count_episodes(self, state: ArrayTree, max_length: int) -> jax.Array:
        """Counts the episodes that `sample_episodes` can sample, `()` int32."""
        max_length = checks.check_int("max_length", max_length)
        ring = state.ring
        return neighbours.count(
            ring, lambda row: neighbours.ends_whole(ring, row, max_length)
        )

    def num_evicted(self, state: ArrayTree) -> jax.Array:
        """Counts final transitions without a stored successor, `()` int32.

        With `next_obs="shared"`, the final observations of these transitions were
        evicted from the side ring, so the transitions are never sampled. If the count
        is above 0, increase `final_obs_capacity`. The call reads the flags of all rows:
        O(capacity).
        """

        def lacks_successor(row: jax.Array) -> jax.Array:
            done = neighbours.is_done(state.ring, row)
            return done & ~neighbours.has_successor(state.ring, row)

        return neighbours.count(state.ring, lacks_successor)

    @jit_method()
    def gather(self, state: ArrayTree, indices: jax.Array) -> ArrayTree:
        """Reads rows by their numbers.

        Args:
            state: buffer state.
            indices: `[...]` int32, row numbers.

        Returns:
            Rows `[..., *leaf]` with the structure of the transition of `init`. A field
            `mask` is False for row numbers without a stored row or without a successor.
        """
        return sampling.read_rows(state.ring, as_rows(indices))

    @jit_method()
    def to_trajectory(self, state: ArrayTree) -> tuple[ArrayTree, jax.Array]:
        """Reads all rows of every lane in time order.

        Returns:
            Rows `[N, B, *leaf]` with the structure of the transition of `init`, oldest
            row first in each lane; and a mask, `[N, B]` bool, False for empty slots and
            for rows without a successor. A field `mask` has the same values.
        """
        memory = state.ring
        # Enumerate the slots from the oldest row; slots after `size` rows are empty.
        time = jnp.arange(memory.num_slots, dtype=jnp.int32)[:, None]
        lane = jnp.arange(memory.num_envs, dtype=jnp.int32)[None]
        slot = ((memory.head - memory.size)[None] + time) % memory.num_slots
        row = slot * memory.num_envs + lane
        mask = (time < memory.size[None]) & neighbours.has_successor(memory, row)
        return sampling.read_rows(memory, row), mask

    def _add(self, state: Any, rows: ArrayTree, mask: jax.Array) -> Any:
        """Stores the rows `[T, B, ...]` for which `mask`, `[T, B]` bool, is True."""
        return ring.write(state, rows, mask)[0]

    def _sample_transitions(
        self, state: ArrayTree, key: chex.PRNGKey, batch_size: int, beta: Any = None
    ) -> Batch:
        """Samples transitions; `beta` is the exponent of importance weights."""
        self._check_sample(state, key, batch_size)
        # `__post_init__` cannot check this: jax also builds pytrees with None leaves.
        if (self.n_step is None) != (self.gamma is None):
            name = "n_step" if self.gamma is None else "gamma"
            raise ValueError(f"`n_step` and `gamma` go together, got only `{name}`.")
        if self.gamma is not None:
            checks.check_fraction("gamma", self.gamma)
        relabel_fn = self.relabel_fn
        if relabel_fn is not None:
            # A function that is not static gets a new object and a new jit cache entry.
            static_fn = programs.static(relabel_fn, state, key, self.gamma)
            relabel_fn = static_fn or functools.partial(relabel_fn)
        buffer = self.replace(relabel_fn=relabel_fn)
        return buffer._sample(state, key, batch_size, beta)

    def _sample_sequences(
        self,
        state: ArrayTree,
        key: chex.PRNGKey,
        batch_size: int,
        length: int,
        beta: Any = None,
    ) -> Sequences:
        """Samples sequences; `beta` is the exponent of importance weights."""
        self._check_sample(state, key, batch_size)
        checks.check_int("length", length)
        # Remove unused options, so that more buffers share a program.
        buffer = self.replace(n_step=None, gamma=None, stack=None, relabel_fn=None)
        return buffer._sample(state, key, batch_size, beta, length)

    def _check_sample(self, state: Any, key: Any, batch_size: Any) -> None:
        self._check_state(state)
        checks.check_key(key)
        checks.check_int("batch_size", batch_size)

    @jit_method("batch_size", "length")
    def _sample(
        self,
        state: ArrayTree,
        key: chex.PRNGKey,
        batch_size: int,
        beta: Any,
        length: int | None = None,
    ) -> Any:
        """Samples transitions, or sequences of `length`."""
        relabel_fn, relabel_key = self.relabel_fn, key
        if relabel_fn is not None:
            key, relabel_key = jax.random.split(key)
        row, weights = self._sample_rows(state, key, batch_size, beta)
        if length is not None:
            return sampling.sequences(state.ring, row, weights, length)
        batch = sampling.transitions(
            state.ring,
            row,
            weights,
            n_step=self.n_step,
            gamma=self.gamma,
            stack=self.stack,
        )
        if relabel_fn is None:
            return batch
        return sampling.relabel(
            state.ring, batch, relabel_key, relabel_fn, self.relabel_horizon
        )

    def _sample_rows(
        self, state: ArrayTree, key: chex.PRNGKey, batch_size: int, beta: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Samples `[S]` rows and their weights; the weight of an unusable row is 0."""
        del beta
        memory = state.ring
        usable_fn = self._usable_fn(state)
        if usable_fn is None:
            row = sampling.sample_rows(memory, key, batch_size)
            usable = jnp.broadcast_to(self.size(state) > 0, row.shape)
            return row, usable.astype(jnp.float32)
        first_key, resample_key = jax.random.split(key)
        row, usable = sampling.resample_invalid(
            sampling.sample_rows(memory, first_key, batch_size),
            lambda key: sampling.sample_rows(memory, key, batch_size),
            lambda row: neighbours.is_stored(memory, row) & usable_fn(row),
            lambda key: sampling.weighted(usable_fn, memory, key, batch_size),
            resample_key,
        )
        return row, usable.astype(jnp.float32)

    def _usable_fn(self, state: ArrayTree) -> sampling.RowFn | None:
        """Returns a predicate for usable stored rows; None if all rows are usable."""
        stack = self.stack
        if not state.ring.final_obs and (stack is None or stack == 1):
            return None

        def usable(row: jax.Array) -> jax.Array:
            flat = row.reshape(-1)
            complete = neighbours.history(state.ring, flat, stack or 1)[1]
            return (complete & neighbours.has_successor(state.ring, flat)).reshape(
                row.shape
            )

        return usable

    def _check_state(self, state: Any) -> None:
        """Raises unless `state` is a buffer state with these slots and lanes."""
        if not isinstance(state, RingState | PrioritizedState | EpisodicState):
            raise ValueError(
                "`state` must be a buffer state, as returned by `init` or `add`, got "
                f"{type(state).__name__}."
            )
        shape = (state.ring.num_slots, *state.ring.size.shape)
        if shape != (self.num_slots, self.num_envs):
            raise ValueError(
                f"`state` must come from a buffer with {self.num_slots} slots in each "
                f"of num_envs={self.num_envs} lanes, got (slots, lanes)={shape}."
            )


def as_rows(indices: Any) -> jax.Array:
    """Validates row numbers, and converts them to an array."""
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(f"`indices` must be integers, got {indices.dtype}.")
    return indices


def _row_of(collector: Any, params: Any) -> ArrayTree:
    """Returns the shapes and dtypes of a collector's transition."""
    try:
        return collector.row_shape(params)
    except Exception as error:  # the policy may raise any error
        if params is not None:
            raise
        raise ValueError(
            "`params` must be given if the policy needs them: call `init(collector, "
            f"params)`. With params=None it raised {type(error).__name__}: {error}"
        ) from error

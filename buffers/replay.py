"""`ReplayBuffer`: the methods that all buffers share, with even draws."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks, programs
from rollout.buffers import batches, fields, neighbours, ring, sampling
from rollout.buffers.types import Batch, RingState, Sequences
from rollout.envs.types import ArrayTree

Fn = TypeVar("Fn", bound=Callable[..., Any])

_MOST_ROWS = 2**30  # so that row numbers up to one lap ahead fit int32


def jit_method(*static: str) -> Callable[[Fn], Fn]:
    """Returns a decorator that jits a method of a buffer, and inlines it when traced.

    The buffer is a pytree, so equal buffers share a program, and `gamma` may be traced.
    """

    def decorate(method: Fn) -> Fn:
        # jax takes pytrees for equal that differ in their class only, so the class is
        # an argument of its own.
        def run(cls: type, *args: Any, **options: Any) -> Any:
            del cls
            return method(*args, **options)

        signature = inspect.signature(method)
        cls = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [cls, *signature.parameters.values()]
        # `jax.jit` finds static arguments by the names in the signature.
        signature = signature.replace(parameters=parameters)
        setattr(run, "__signature__", signature)  # noqa: B010  (pyright)
        jitted = jax.jit(run, static_argnames=("cls", *static), inline=True)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            return jitted(type(self), self, *args, **options)

        return cast(Fn, call)

    return decorate


class ReplayBuffer(struct.PyTreeNode):
    """A ring of transitions per lane, sampled evenly; the base of the other buffers.

    The methods are pure and jitted. Jit them together with the code around them, and
    donate the state, so that `add` writes in place: called alone it copies the ring.

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
            episode is ample; `num_evicted` shows whether F was too small.
        n_step: steps that the reward of a sample sums, at least 1; None for the reward
            of its own step, without `discount`. The sum stops at a termination, at a
            truncation, and where the rows end. Then it has fewer steps, and `discount`
            and `next_obs` match them.

                G = r_t + γ r_{t+1} + ... + γ^{m-1} r_{t+m-1},  1 <= m <= n_step
                target = G + discount V(next_obs),  discount = γ^m (1 - terminated)

        gamma: the discount per step, in [0, 1], a number or `()`; with `n_step`.
        stack: K, observations that `obs` and `next_obs` of a sample stack, at least 1;
            before the start of an episode its first observation repeats. Rows whose
            history was evicted are not sampled. None for a single observation, without
            the axis.
        relabel_fn: `(key, experience, future)` to the experience, `[S, ...]` each:
            hindsight goals. `future` is sampled evenly, for each row, from that row and
            the later rows of its episode. Not with `n_step` or `stack`. Pass the
            same function object again: another one compiles again.
        relabel_horizon: number of later rows that `future` is sampled from, at least 1.

    Raises:
        ValueError: if a number is not an int of at least 1, if `capacity` is less than
            one step of all lanes or more than 2**30, or if another attribute is not as
            above. `sample` checks `gamma`.

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
    relabel_fn: batches.RelabelFn | None = struct.field(
        pytree_node=False, default=None, kw_only=True
    )
    relabel_horizon: int = struct.field(pytree_node=False, default=64, kw_only=True)

    def __post_init__(self) -> None:
        # One step of all lanes must fit, into the ring and into the side ring.
        least = checks.int_between("num_envs", self.num_envs)
        checks.int_between("capacity", self.capacity, least=least, most=_MOST_ROWS)
        checks.choice("next_obs", self.next_obs, ("stored", "shared"))
        self._check_options()
        if self.final_obs_capacity is None:
            return
        checks.int_between("final_obs_capacity", self.final_obs_capacity, least=least)
        if self.next_obs == "stored":
            raise ValueError(
                '`final_obs_capacity` goes with next_obs="shared", got '
                f'{self.final_obs_capacity} with "stored".'
            )

    def _check_options(self) -> None:
        """Checks how samples are made."""
        for name in ("n_step", "stack", "relabel_horizon"):
            if getattr(self, name) is not None:
                checks.int_between(name, getattr(self, name))
        if self.relabel_fn is not None:
            checks.function("relabel_fn", self.relabel_fn)
            if self.n_step or self.stack:
                raise ValueError(
                    "`relabel_fn` must not be given with `n_step` or `stack`."
                )

    @property
    def num_slots(self) -> int:
        """N, transitions that each lane holds."""
        return self.capacity // self.num_envs

    def init(self, transition: ArrayTree, params: Any = None) -> RingState:
        """Makes an empty buffer.

        Args:
            transition: `[B, ...]`, one `Transition` or any other pytree; only its
                shapes and dtypes are read. Or a `rollout.Collector` or
                `rollout.HostCollector`, for its transitions. A field `mask` is not
                stored, since every stored row is valid.
            params: parameters of the collector's policy.

        Returns:
            The state, for the other methods; every kind of buffer has its own kind.

        Raises:
            ValueError: if a leaf lacks the lane axis, if a flag is not bool, if
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
        self._check_state(state)
        mask = fields.get(trajectory, "mask")
        return self._add(state, *ring.check_rows(state.ring, trajectory, mask))

    def size(self, state: ArrayTree) -> jax.Array:
        """Counts the transitions that are stored, `()` int32."""
        return jnp.sum(state.ring.size, dtype=jnp.int32)

    def can_sample(self, state: ArrayTree, batch_size: int) -> jax.Array:
        """Returns whether at least `batch_size` transitions may be sampled.

        Args:
            state: the state.
            batch_size: S, at least 1.

        Returns:
            `()` bool. It costs as much as a small sample.
        """
        batch_size = checks.int_between("batch_size", batch_size)
        return self._can_sample(state, batch_size)

    # The size is data: a warm-up asks for many, and each would be a program.
    @jit_method()
    def _can_sample(self, state: ArrayTree, batch_size: Any) -> jax.Array:
        usable_fn = self._usable_fn(state)
        if usable_fn is None:
            return self.size(state) >= batch_size
        return sampling.has_usable(state.ring, usable_fn, batch_size)

    def sample(self, state: ArrayTree, key: chex.PRNGKey, batch_size: int) -> Batch:
        """Samples `batch_size` transitions with replacement.

        Every stored transition has the same chance, even if lanes hold different
        numbers of them. With `next_obs="shared"`, only transitions whose successor is
        stored are sampled.

        Args:
            state: a state for which `can_sample` holds.
            key: one typed key.
            batch_size: S, at least 1.

        Returns:
            The batch, `[S, ...]`, with weights of 1. If no transition may be sampled,
            they are zeros, and a field `mask` is False.

        Raises:
            ValueError: if `batch_size` is not an int of at least 1, if `gamma` is a
                number out of range, or if the transition lacks a needed field.
        """
        return self._sample_rows(state, key, batch_size)

    def sample_sequences(
        self, state: ArrayTree, key: chex.PRNGKey, batch_size: int, length: int
    ) -> Sequences:
        """Samples pieces of episodes, by their first rows as `sample` does.

        A piece lasts as long as its episode does in the buffer, at most `length` steps,
        and is padded after that, where `mask` is False. To replay a recurrent policy,
        record its input state in `extras`, and start from the state in the first row of
        the piece. `n_step`, `stack` and `relabel_fn` do not apply.

        Args:
            state: a state for which `can_sample` holds.
            key: one typed key.
            batch_size: S, at least 1.
            length: L, at least 1.

        Returns:
            The pieces, `[L, S, ...]`.

        Raises:
            ValueError: if a count is not an int of at least 1, or if the transition has
                no `terminated` or `truncated`.
        """
        return self._sample_pieces(state, key, batch_size, length)

    @jit_method("batch_size", "max_length")
    def sample_episodes(
        self, state: ArrayTree, key: chex.PRNGKey, batch_size: int, max_length: int
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
        self._check_state(state)
        checks.typed_key(key)
        batch_size = checks.int_between("batch_size", batch_size)
        max_length = checks.int_between("max_length", max_length)

        def is_end(row: jax.Array) -> jax.Array:
            return neighbours.ends_whole(state.ring, row, max_length)

        last = sampling.in_proportion_to(is_end, state.ring, key, batch_size)
        found = neighbours.is_stored(state.ring, last) & is_end(last)
        first = neighbours.first_of(state.ring, last)
        weights = found.astype(jnp.float32)
        return batches.sequences(state.ring, first, weights, max_length)

    @jit_method("max_length")
    def count_episodes(self, state: ArrayTree, max_length: int) -> jax.Array:
        """Counts the episodes that `sample_episodes` draws from, `()` int32."""
        max_length = checks.int_between("max_length", max_length)
        ring = state.ring
        return neighbours.count(
            ring, lambda row: neighbours.ends_whole(ring, row, max_length)
        )

    def num_evicted(self, state: ArrayTree) -> jax.Array:
        """Counts endings that are stored but never sampled, `()` int32.

        With `next_obs="shared"` these are the endings whose final observation was
        evicted from the side ring: if there are any, raise `final_obs_capacity`. It
        reads the flags of all rows: O(capacity).
        """

        def is_lost(row: jax.Array) -> jax.Array:
            done = neighbours.is_done(state.ring, row)
            return done & ~neighbours.has_successor(state.ring, row)

        return neighbours.count(state.ring, is_lost)

    @jit_method()
    def gather(self, state: ArrayTree, indices: jax.Array) -> ArrayTree:
        """Reads rows.

        Args:
            state: the state.
            indices: `[...]` int32.

        Returns:
            `[..., *leaf]`, like the transition of `init`. A field `mask` is False
            where there is no such row, or its successor is missing.
        """
        return batches.read(state.ring, as_rows(indices))

    @jit_method()
    def to_trajectory(self, state: ArrayTree) -> tuple[ArrayTree, jax.Array]:
        """Reads all rows of every lane, in the order of time.

        Returns:
            `[N, B, *leaf]`, like the transition of `init`, the oldest row of every lane
            first; and `[N, B]` bool, False where a lane holds no further row, or the
            successor of a row is missing. A field `mask` has the same values.
        """
        memory = state.ring
        # All slots of a lane from its oldest row on; those after `size` are empty.
        time = jnp.arange(memory.num_slots, dtype=jnp.int32)[:, None]
        lane = jnp.arange(memory.num_envs, dtype=jnp.int32)[None]
        slot = ((memory.head - memory.size)[None] + time) % memory.num_slots
        row = slot * memory.num_envs + lane
        mask = (time < memory.size[None]) & neighbours.has_successor(memory, row)
        return batches.read(memory, row), mask

    def _add(self, state: Any, rows: ArrayTree, mask: jax.Array) -> Any:
        """Stores rows `[T, B, ...]` where `mask`, `[T, B]` bool."""
        return ring.write(state, rows, mask)[0]

    def _sample_rows(
        self, state: ArrayTree, key: chex.PRNGKey, batch_size: int, beta: Any = None
    ) -> Batch:
        """Samples transitions, with `beta` for importance weights."""
        # Not in `__post_init__`: jax also makes pytrees whose leaves are None.
        if (self.n_step is None) != (self.gamma is None):
            only = "n_step" if self.gamma is None else "gamma"
            raise ValueError(f"`n_step` and `gamma` go together, got only `{only}`.")
        if self.gamma is not None:
            checks.fraction("gamma", self.gamma)
        relabel_fn = self.relabel_fn
        if relabel_fn is not None:
            # If it is not to be found in the cache of `jit`: a new object.
            known = programs.static(relabel_fn, state, key, self.gamma)
            relabel_fn = known or functools.partial(relabel_fn)
        options = batches.SampleOptions(
            batch_size=batch_size,
            beta=beta,
            n_step=self.n_step,
            gamma=self.gamma,
            stack=self.stack,
            relabel_fn=relabel_fn,
            horizon=self.relabel_horizon,
        )
        # The options have them; without, more buffers share a program.
        buffer = self.replace(n_step=None, gamma=None, relabel_fn=None)
        return buffer._sample(state, key, options)

    def _sample_pieces(
        self,
        state: ArrayTree,
        key: chex.PRNGKey,
        batch_size: int,
        length: int,
        beta: Any = None,
    ) -> Sequences:
        """Samples pieces, with `beta` for importance weights."""
        options = batches.SampleOptions(batch_size=batch_size, beta=beta, length=length)
        buffer = self.replace(n_step=None, gamma=None, stack=None, relabel_fn=None)
        return buffer._sample(state, key, options)

    @jit_method()
    def _sample(
        self, state: ArrayTree, key: chex.PRNGKey, options: batches.SampleOptions
    ) -> Any:
        """Checks the arguments of a sample, and draws it."""
        self._check_state(state)
        checks.typed_key(key)
        options.check()
        return self._draw_batch(state, key, options)

    def _draw_batch(
        self, state: ArrayTree, key: chex.PRNGKey, options: batches.SampleOptions
    ) -> Batch | Sequences:
        read_key = key
        if options.relabel_fn is not None:
            key, read_key = jax.random.split(key)
        row, weights = self._draw(state, key, options)
        if options.length is not None:
            return batches.sequences(state.ring, row, weights, options.length)
        return batches.transitions(state.ring, row, weights, read_key, options)

    def _draw(
        self, state: ArrayTree, key: chex.PRNGKey, options: batches.SampleOptions
    ) -> tuple[jax.Array, jax.Array]:
        """Draws `[S]` rows and their weights; the weight of an unusable row is 0."""
        memory, num_draws = state.ring, options.batch_size
        usable_fn = self._usable_fn(state)
        if usable_fn is None:
            row = sampling.evenly(memory, key, num_draws)
            usable = jnp.broadcast_to(self.size(state) > 0, row.shape)
            return row, usable.astype(jnp.float32)
        first_key, again_key = jax.random.split(key)
        row, usable = sampling.redraw(
            sampling.evenly(memory, first_key, num_draws),
            lambda key: sampling.evenly(memory, key, num_draws),
            lambda row: neighbours.is_stored(memory, row) & usable_fn(row),
            lambda key: sampling.in_proportion_to(usable_fn, memory, key, num_draws),
            again_key,
        )
        return row, usable.astype(jnp.float32)

    def _usable_fn(self, state: ArrayTree) -> sampling.RowFn | None:
        """Makes the test for stored rows that may be sampled; None if all may."""
        stack = self.stack
        if not state.ring.final_obs and (stack is None or stack == 1):
            return None

        def usable(row: jax.Array) -> jax.Array:
            flat = row.reshape(-1)
            whole = neighbours.history(state.ring, flat, stack or 1)[1]
            return (whole & neighbours.has_successor(state.ring, flat)).reshape(
                row.shape
            )

        return usable

    def _check_state(self, state: Any) -> None:
        """Checks that it is the state of a buffer with these slots and lanes."""
        memory = getattr(state, "ring", None)
        if not isinstance(memory, RingState):
            raise ValueError(
                "`state` must be what `init` or `add` of a buffer returned, got "
                f"{type(state).__name__}."
            )
        got = (memory.num_slots, *memory.size.shape)
        if got != (self.num_slots, self.num_envs):
            raise ValueError(
                f"`state` must be of a buffer like this one, {self.num_slots} slots in "
                f"each of num_envs={self.num_envs} lanes, got (slots, lanes)={got}."
            )


def as_rows(indices: Any) -> jax.Array:
    """Checks that they are row numbers; returns them as an array."""
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(f"`indices` must be integers, got {indices.dtype}.")
    return indices


def _row_of(collector: Any, params: Any) -> ArrayTree:
    """Returns the shapes and dtypes of a collector's row."""
    try:
        return collector.row_shape(params)
    except Exception as error:  # the policy may raise any
        if params is not None:
            raise
        raise ValueError(
            "`params` must be given, as `init(collector, params)`, to a policy that "
            f"needs them; without, it raised {type(error).__name__}: {error}"
        ) from error

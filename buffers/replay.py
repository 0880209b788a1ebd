"""The uniform replay buffer."""

import chex
import jax
import jax.numpy as jnp
from flax import struct

from buffers import checks, ring
from buffers.types import Batch, RingState


@struct.dataclass
class ReplayBuffer:
    """A ring of transitions per lane, sampled evenly.

    The functions are pure and plain: jit them together with what is around them, and
    donate the state, then `add` writes in place.

    Attributes:
        capacity: transitions that all lanes hold together. Each lane has
            `capacity // num_envs` slots.
        num_envs: B, lanes that are written side by side.

    Raises:
        ValueError: if one is not an int of at least 1, or if `capacity` is less than
            one step of all lanes.
    """

    capacity: int = struct.field(pytree_node=False)
    num_envs: int = struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        checks.count("capacity", self.capacity)
        checks.count("num_envs", self.num_envs)
        if self.capacity < self.num_envs:
            raise ValueError(
                "`capacity` must hold one step of all lanes, num_envs="
                f"{self.num_envs}, got {self.capacity}."
            )

    @property
    def num_slots(self) -> int:
        """N, transitions that each lane holds."""
        return self.capacity // self.num_envs

    def init(self, transition: chex.ArrayTree) -> RingState:
        """Makes an empty buffer.

        Args:
            transition: `[B, ...]`, one `Transition` or any other pytree, of which only
                the shapes and dtypes are read (`jax.eval_shape` gives them). A field
                `mask` is not stored, since every row that is stored is a valid one.

        Returns:
            The state to hand to the other methods.

        Raises:
            ValueError: if a leaf lacks the lane axis.
        """
        row = checks.without_mask(transition)
        checks.row(row, self.num_envs)
        return ring.init(row, self.num_slots, self.num_envs)

    def add(self, state: RingState, trajectory: chex.ArrayTree) -> RingState:
        """Appends transitions, and drops the oldest of a lane that is full.

        Args:
            state: the state before; donate it.
            trajectory: `[T, B, ...]`, a chunk, or `[B, ...]`, one step, like the
                transition of `init`. Rows where its field `mask` is False, if it has
                one, are not stored: lanes may advance by different numbers of rows.

        Returns:
            The state after.

        Raises:
            ValueError: while tracing, if the structure, a shape or a dtype is not that
                of `init`; it names the leaf.
        """
        rows = checks.without_mask(trajectory)
        is_step = checks.like_init(rows, state.experience)
        mask = getattr(trajectory, "mask", None)
        if is_step:
            rows, mask = jax.tree.map(lambda x: x[None], (rows, mask))
        if mask is None:
            num_rows = jax.tree.leaves(rows)[0].shape[0]
            mask = jnp.ones((num_rows, self.num_envs), bool)
        return ring.write(state, rows, mask)

    def sample(self, state: RingState, key: chex.PRNGKey, batch_size: int) -> Batch:
        """Draws `batch_size` transitions evenly, with replacement.

        Every transition that is stored has the same chance, also where lanes hold
        different numbers of them.

        Args:
            state: a state of which `can_sample` holds; of an empty one the rows are
                void.
            key: one typed key.
            batch_size: S, at least 1.

        Returns:
            The batch, `[S, ...]`; weights are ones.

        Raises:
            ValueError: if `batch_size` is not an int of at least 1.
        """
        checks.count("batch_size", batch_size)
        slot, lane = ring.draw(state, key, batch_size)
        return Batch(
            experience=checks.with_mask(ring.read(state, slot, lane)),
            indices=slot * self.num_envs + lane,
            weights=jnp.ones((batch_size,), jnp.float32),
        )

    def can_sample(self, state: RingState, batch_size: int) -> jax.Array:
        """Tells whether at least `batch_size` transitions are stored, `()` bool."""
        return self.size(state) >= batch_size

    def size(self, state: RingState) -> jax.Array:
        """Counts the transitions that are stored, `()` int32."""
        return jnp.sum(state.size)

    def clear(self, state: RingState) -> RingState:
        """Forgets all transitions; the memory stays."""
        return state.replace(
            head=jnp.zeros_like(state.head), size=jnp.zeros_like(state.size)
        )

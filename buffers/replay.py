"""The uniform replay buffer."""

import chex
import jax
import jax.numpy as jnp
from flax import struct

from buffers import batches, checks, ring, sampling
from buffers.base import RingBuffer
from buffers.types import Batch, RingState, Sequences


@struct.dataclass
class ReplayBuffer(RingBuffer):
    """A ring of transitions per lane, sampled evenly.

    The functions are pure and plain: jit them together with the code around them, and
    donate the state, so that `add` writes in place. For the attributes see
    `RingBuffer`.
    """

    def init(self, transition: chex.ArrayTree) -> RingState:
        """Makes an empty buffer.

        Args:
            transition: `[B, ...]`, one `Transition` or any other pytree, of which only
                the shapes and dtypes are read (`jax.eval_shape` gives them). A field
                `mask` is not stored, since every stored row is valid.

        Returns:
            The state to hand to the other methods.

        Raises:
            ValueError: if a leaf lacks the lane axis, or if `successor` is "shared" and
                the transition lacks `obs`, `next_obs`, `terminated` or `truncated`.
        """
        return self._init(transition)

    def add(self, state: RingState, trajectory: chex.ArrayTree) -> RingState:
        """Appends transitions; a lane that is full drops its oldest ones.

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
        rows, mask = self._chunk(state, trajectory)
        return ring.write(state, rows, mask)[0]

    def sample(
        self,
        state: chex.ArrayTree,
        key: chex.PRNGKey,
        batch_size: int,
        *,
        n_step: int | None = None,
        gamma: float | None = None,
        stack: int | None = None,
    ) -> Batch:
        """Draws `batch_size` transitions evenly, with replacement.

        Every stored transition has the same chance, even where lanes hold different
        numbers of them. With `successor="shared"`, only those whose successor is there
        are drawn.

        Args:
            state: a state for which `can_sample` holds.
            key: one typed key.
            batch_size: S, at least 1.
            n_step: steps that are summed, at least 1. The sum stops at a termination,
                at a truncation, and where the rows end. Then it has fewer steps, and
                `discount` and `next_obs` match them.

                    G = r_t + γ r_{t+1} + ... + γ^{m-1} r_{t+m-1},  1 <= m <= n_step
                    target = G + discount V(next_obs),  discount = γ^m (1 - terminated)

            gamma: the discount per step, in [0, 1], a number or `()`; goes with
                `n_step`.
            stack: K, observations that are stacked, at least 1; before the start of an
                episode its first one repeats. Rows whose history was evicted are not
                drawn.

        Returns:
            The batch, `[S, ...]`. If no transition may be sampled, the weights are
            zeros, and the field `mask`, if it has one, is False.

        Raises:
            ValueError: if a count is not an int of at least 1, if `gamma` is out of
                range or goes without `n_step`, or if the transition lacks a field that
                is needed.

        Source:
            "Reinforcement Learning: An Introduction", 2nd ed., eq. 7.1.
        """
        checks.count("batch_size", batch_size)
        checks.targets(state.ring, n_step, gamma, stack)
        row, weights = self._draw(state, key, batch_size, stack)
        return batches.transitions(
            state.ring, row, weights, n_step=n_step, gamma=gamma, stack=stack
        )

    def sample_sequences(
        self, state: chex.ArrayTree, key: chex.PRNGKey, batch_size: int, length: int
    ) -> Sequences:
        """Draws pieces of episodes, evenly by their first rows, with replacement.

        A piece goes on as long as its episode does in the buffer, for `length` steps at
        most, and is padded after that: `mask` says where. If a recurrent policy puts
        the state it was given into `extras["policy_state"]`, that of the first row
        comes with the piece.

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
        checks.count("batch_size", batch_size)
        checks.sequence(state.ring, length)
        row, weights = self._draw(state, key, batch_size, None)
        return batches.sequences(state.ring, row, weights, length)

    def clear(self, state: RingState) -> RingState:
        """Forgets all transitions; the memory stays."""
        return ring.clear(state)

    def _draw(
        self,
        state: chex.ArrayTree,
        key: chex.PRNGKey,
        num_draws: int,
        stack: int | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Draws `[S]` rows; the weight of an unusable one is 0."""
        usable_fn = self._usable_fn(state, stack)
        if usable_fn is None:
            row = sampling.evenly(state.ring, key, num_draws)
            usable = jnp.broadcast_to(self.size(state) > 0, row.shape)
        else:
            row, usable = sampling.evenly_usable(state.ring, key, num_draws, usable_fn)
        return row, usable.astype(jnp.float32)

"""`ReplayBuffer`: samples transitions evenly."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from rollout.buffers import checks, ring, sampling
from rollout.buffers.gather import RelabelFn
from rollout.buffers.ring_buffer import RingBuffer
from rollout.buffers.types import ArrayTree, Batch, RingState, Sequences


class ReplayBuffer(RingBuffer):
    """A ring of transitions per lane, sampled evenly.

    The methods are pure and jitted. Jit them together with the code around them, and
    donate the state, so that `add` writes in place: called alone it copies the ring.
    For the attributes see `RingBuffer`.
    """

    def init(self, transition: ArrayTree, params: Any = None) -> RingState:
        """Makes an empty buffer.

        Args:
            transition: `[B, ...]`, one `Transition` or any other pytree; only its
                shapes and dtypes are read. Or a `rollout.Collector`, for its
                transitions. A field `mask` is not stored, since every stored row is
                valid.
            params: parameters of the collector's policy.

        Returns:
            The state, for the other methods.

        Raises:
            ValueError: if a leaf lacks the lane axis, if a flag is not bool, or if
                `next_obs` is "shared" and the transition lacks `obs`, `next_obs`,
                `terminated` or `truncated`.
        """
        return self._init(transition, params)

    def _add(self, state: RingState, rows: ArrayTree, mask: jax.Array) -> RingState:
        """Appends rows `[T, B, ...]` where `mask`, `[T, B]` bool."""
        return ring.write(state, rows, mask)[0]

    def sample(
        self,
        state: ArrayTree,
        key: chex.PRNGKey,
        batch_size: int,
        *,
        n_step: int | None = None,
        gamma: float | None = None,
        stack: int | None = None,
        relabel_fn: RelabelFn | None = None,
        horizon: int = 64,
    ) -> Batch:
        """Draws `batch_size` transitions evenly, with replacement.

        Every stored transition has the same chance, even if lanes hold different
        numbers of them. With `next_obs="shared"`, only transitions whose successor is
        stored are drawn.

        Args:
            state: a state for which `can_sample` holds.
            key: one typed key.
            batch_size: S, at least 1.
            n_step: steps to sum, at least 1. The sum stops at a termination, at a
                truncation, and where the rows end. Then it has fewer steps, and
                `discount` and `next_obs` match them.

                    G = r_t + γ r_{t+1} + ... + γ^{m-1} r_{t+m-1},  1 <= m <= n_step
                    target = G + discount V(next_obs),  discount = γ^m (1 - terminated)

            gamma: the discount per step, in [0, 1], a number or `()`; only with
                `n_step`.
            stack: K, observations to stack, at least 1; before the start of an episode
                its first observation repeats. Rows whose history was evicted are not
                drawn.
            relabel_fn: `(key, experience, future)` to the experience, `[S, ...]` each:
                hindsight goals. `future` is drawn evenly, for each row, from the row
                itself and those after it in its episode. It excludes `n_step` and
                `stack`. Pass the same function object again: another one compiles
                again.
            horizon: number of rows ahead that `future` is drawn from, at least 1.

        Returns:
            The batch, `[S, ...]`. If no transition may be sampled, the weights are
            zeros, and a field `mask` is False.

        Raises:
            ValueError: if a count is not an int of at least 1, if `gamma` is out of
                range or without `n_step`, or if the transition lacks a needed field.

        Source:
            "Reinforcement Learning: An Introduction", 2nd ed., eq. 7.1; "Hindsight
            Experience Replay", section 4.5, arXiv:1707.01495.
        """
        batch_size = checks.positive_int("batch_size", batch_size)
        checks.state(state, self.num_slots, self.num_envs)
        checks.key(key)
        checks.targets(state.ring, n_step, gamma, stack)
        checks.relabelling(state.ring, relabel_fn, horizon, n_step or stack)
        return self._run(
            self._sample,
            state,
            key,
            gamma,
            None,
            batch_size=batch_size,
            stack=stack,
            n_step=n_step,
            relabel_fn=relabel_fn,
            horizon=horizon,
        )

    def sample_sequences(
        self, state: ArrayTree, key: chex.PRNGKey, batch_size: int, length: int
    ) -> Sequences:
        """Draws pieces of episodes, evenly by their first rows, with replacement.

        A piece lasts as long as its episode does in the buffer, at most `length` steps,
        and is padded after that, where `mask` is False. If a recurrent policy puts its
        input state into `extras["policy_state"]`, the piece has that of its first row.

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
        batch_size = checks.positive_int("batch_size", batch_size)
        checks.state(state, self.num_slots, self.num_envs)
        checks.key(key)
        checks.sequence(state.ring, length)
        return self._run(
            self._sample_sequences,
            state,
            key,
            None,
            batch_size=batch_size,
            length=length,
        )

    def clear(self, state: RingState) -> RingState:
        """Forgets all transitions; the memory stays."""
        return ring.clear(state)

    def _draw(
        self,
        state: ArrayTree,
        key: chex.PRNGKey,
        num_draws: int,
        stack: int | None,
        beta: None,
    ) -> tuple[jax.Array, jax.Array]:
        """Draws `[S]` rows; the weight of an unusable row is 0."""
        del beta  # unused: only for priorities
        usable_fn = self._usable_fn(state, stack)
        if usable_fn is None:
            row = sampling.evenly(state.ring, key, num_draws)
            usable = jnp.broadcast_to(self.size(state) > 0, row.shape)
        else:
            row, usable = sampling.evenly_usable(state.ring, key, num_draws, usable_fn)
        return row, usable.astype(jnp.float32)

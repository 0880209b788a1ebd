"""Computes accumulators and recorded fields of host rows, a block per jitted call."""

from collections.abc import Callable
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from envs import keys
from envs.types import ArrayTree
from rollout import kernel
from rollout.host.lanes import Lanes
from rollout.host.rows import Rows
from rollout.kernel.transition import accumulate, accumulate_nothing
from rollout.types import Accumulators, Transition

Acc = TypeVar("Acc")


class Figures:
    """Accumulators of the episodes under way, and the recorded fields of transitions.

    Args:
        accumulators: figures that are kept per episode.
        record_fn: what is recorded of a transition; None for all of it.
        num_envs: E.
        num_columns: lanes of a row.
    """

    def __init__(
        self,
        accumulators: Accumulators,
        record_fn: Callable[[Transition], Transition] | None,
        num_envs: int,
        num_columns: int,
    ) -> None:
        self._accumulators, self._record_fn = accumulators, record_fn
        self._num_envs, self._num_columns = num_envs, num_columns
        self.start()
        self._derive = jax.jit(self._derive_rows)

    def start(self) -> None:
        """Begins anew in every lane."""
        self.figures = accumulate_nothing(self._accumulators, self._num_envs)

    def finish(self, rows: Rows) -> Transition:
        """Rows as they are handed out, on the device; zero from number `num` on."""
        trajectory = jax.device_put(rows.read())
        if self._record_fn is None and not self._accumulators:
            return trajectory
        self.figures, trajectory = self._derive(self.figures, trajectory)
        return trajectory

    def of(self, lanes: Lanes) -> ArrayTree:
        """The figures of the episodes that the lanes are in."""
        if not self._accumulators:
            return ()
        nothing = accumulate_nothing(self._accumulators, self._num_envs)
        is_first = jnp.asarray(lanes.episode_length == 0)
        return keys.select(is_first, nothing, self.figures)

    def _derive_rows(
        self, figures: ArrayTree, trajectory: Transition
    ) -> tuple[ArrayTree, Transition]:
        nothing = accumulate_nothing(self._accumulators, self._num_columns)

        def see(figures: ArrayTree, row: Transition) -> tuple:
            if self._accumulators:
                lane = jnp.where(row.mask, lanes_of(row), self._num_envs)
                old = jax.tree.map(lambda x: x[lane], figures)
                old = keys.select(row.first, nothing, old)
                new = accumulate(self._accumulators, old, row)
                figures = jax.tree.map(
                    lambda x, rows: x.at[lane].set(rows, mode="drop"), figures, new
                )
                row = row.replace(accumulated=new)
            return figures, kernel.void(kernel.record(self._record_fn, row))

        return lax.scan(see, figures, trajectory)


def lanes_of(rows: Transition) -> chex.Array:
    """Lane of each column."""
    if hasattr(rows.info, "env_id"):
        return rows.info.env_id
    return np.arange(rows.mask.shape[-1])


def fold(
    fn: Callable[[Acc, Transition], Acc], acc: Acc, trajectory: Transition, num: int
) -> Acc:
    """Folds the first `num` rows of a trajectory into `acc`."""
    try:
        hash(fn)
    except TypeError:
        return _fold(fn, acc, trajectory, num)
    return _fold_jitted(fn, acc, trajectory, num)


def _fold(
    fn: Callable[[Acc, Transition], Acc], acc: Acc, trajectory: Transition, num: Any
) -> Acc:
    def step(row: jax.Array, acc: Acc) -> Acc:
        return fn(acc, jax.tree.map(lambda x: x[row], trajectory))

    return lax.fori_loop(0, num, step, acc)


_fold_jitted = jax.jit(_fold, static_argnums=0)

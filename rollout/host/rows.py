"""Stores rows of host transitions, and records them in one jitted call.

A row has a column for each of the `B` lanes, or with `num_ready` for each environment
that answered.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout import checks, programs
from rollout.envs import trees
from rollout.envs.spaces import as_space
from rollout.envs.types import ArrayTree
from rollout.kernel.policy_state import init_policy_state
from rollout.kernel.recording import accumulate, accumulate_nothing, mask_out, record
from rollout.platform import to_host
from rollout.policies import outputs
from rollout.policies.outputs import View
from rollout.types import Accumulators, AsyncInfo, RecordFn, Transition

Acc = TypeVar("Acc")


class RowBlock:
    """Memory for rows of `[B, ...]`; the first row that is written fixes the shapes.

    Columns that a row does not write are masked out.

    Attributes:
        size: number of rows to write.
        num: number of rows that are complete.
        width: B.
        extras: by row, what the policy returned, perhaps on the device until `read`.
        lane: `[capacity, B]` int32, the lane of each column.
        reward, terminated, truncated, mask, episode_id, episode_return,
            episode_length: `[capacity, B]`, as `Transition` has them.
        cut: `[capacity, B]` bool, True where `max_episode_steps` alone ended it.
        trajectory: the rows as they are recorded, once they are.
    """

    def __init__(self, width: int, size: int, capacity: int | None = None) -> None:
        self.width, self.size, self.num = width, size, 0
        # Zeros are pages that the system gives when they are written to: what a block
        # does not fill costs nothing.
        self._shape = shape = capacity or size, width
        self.extras: list[ArrayTree] = []
        self.reward, self.episode_return = np.zeros((2, *shape), np.float32)
        self.episode_id, self.episode_length = np.zeros((2, *shape), np.int32)
        self.terminated, self.truncated = np.zeros((2, *shape), bool)
        self.mask, self.cut = np.zeros((2, *shape), bool)
        self.lane = np.zeros(shape, np.int32) + np.arange(width, dtype=np.int32)
        # By field: the tree's structure and its leaves.
        self._trees: dict[str, tuple[Any, list[np.ndarray]]] = {}
        self.trajectory: Any = None

    def write(self, name: str, tree: ArrayTree, row: int | None = None) -> ArrayTree:
        """Writes a field of a row, of the current one whose number is `num`.

        Returns:
            The field as it is in the block, `[B, ...]`: not overwritten by later rows.
        """
        row = self.num if row is None else row
        if name not in self._trees:
            leaves, structure = jax.tree.flatten(tree)
            arrays = [np.zeros(self._shape + x.shape[1:], x.dtype) for x in leaves]
            self._trees[name] = structure, arrays
        structure, arrays = self._trees[name]
        if isinstance(tree, np.ndarray):  # the usual case, kept fast
            view = arrays[0][row]
            view[: len(tree)] = tree
            return view
        views = [array[row] for array in arrays]
        for view, leaf in zip(views, structure.flatten_up_to(tree), strict=True):
            view[: len(leaf)] = leaf
        return structure.unflatten(views)

    def mask_out(self, episode_ids: np.ndarray) -> int:
        """Masks out the rows of some episodes; returns how many there were."""
        # By id, since a lane may have several episodes in the block, and with
        # `num_ready` its rows are in any column.
        mask, episode_id = self.mask[: self.num], self.episode_id[: self.num]
        rows = mask & np.isin(episode_id, episode_ids)
        mask[rows] = False
        return int(rows.sum())

    def read(self) -> Transition:
        """Returns all rows, `[capacity, B, ...]`, not copied; masked-out ones zero."""
        # All together, and only now: usually nothing waits for them any more.
        for row, extras in enumerate(to_host(self.extras[: self.num])):
            self.write("extras", extras, row)
        self.mask[self.num :] = False  # part of a row, which does not count
        columns = "reward terminated truncated mask episode_id episode_return"
        fields = {x: getattr(self, x) for x in (*columns.split(), "episode_length")}
        for name, (structure, arrays) in self._trees.items():
            fields[name] = structure.unflatten(arrays)
        rows, is_out = Transition(**fields), ~self.mask
        if is_out[: self.num].any():
            for array in jax.tree.leaves(rows):
                array[is_out] = 0
        return rows


def record_rows(
    accumulators: Accumulators,
    record_fn: RecordFn | None,
    accumulated: ArrayTree,
    rows: Transition,
    lane: jax.Array,
) -> tuple[ArrayTree, Transition]:
    """Updates the accumulators and applies `record_fn`, row by row.

    Args:
        accumulators: values that are accumulated per episode.
        record_fn: maps a transition to its recorded fields; None for all of it.
        accumulated: the values before the first row, of all lanes.
        rows: `[T, B, ...]`.
        lane: `[T, B]` int32, the lane of each column.

    Returns:
        The values after the last row; and the rows to record.
    """
    nothing = accumulate_nothing(accumulators, lane.shape[1])

    def step(accumulated: ArrayTree, now: tuple) -> tuple[ArrayTree, Transition]:
        row, lane = now
        if accumulators:
            old = jax.tree.map(lambda x: x[lane], accumulated)  # [B, ...] of the row
            old = trees.select(row.first, nothing, old)
            row = accumulate(accumulators, old, row)
            # Masked-out rows get a lane beyond the last, and are dropped.
            place = jnp.where(row.mask, lane, jnp.iinfo(lane.dtype).max)
            accumulated = jax.tree.map(
                lambda x, new: x.at[place].set(new, mode="drop"),
                accumulated,
                row.accumulated,
            )
        recorded = record(record_fn, row)
        if isinstance(row.info, AsyncInfo) and not isinstance(recorded.info, AsyncInfo):
            raise ValueError(
                "`record_fn` must keep the `AsyncInfo` in `info` with `num_ready`, "
                "which `regroup_by_env` reads, got "
                f"{checks.describe(recorded.info)}: it may drop "
                "the `info` in it."
            )
        return accumulated, mask_out(recorded)

    return lax.scan(step, accumulated, (rows, lane))


def row_shape(collector: Any, width: int, params: Any) -> Transition:
    """Returns the shapes and dtypes of a `HostCollector`'s row, `[width, ...]`."""
    env, policy = collector.env, collector.policy
    info = jax.tree.map(lambda x: x[:width], env.info)
    seen: Any = View(width, as_space(env.action_space))

    def make(params: Any, key: chex.PRNGKey) -> Transition:
        key, *pair = jax.random.split(key, 3)
        obs_keys, episode_keys = (jax.random.split(x, width) for x in pair)
        obs = jax.vmap(as_space(env.observation_space).sample)(obs_keys)
        state = init_policy_state(policy, episode_keys)
        decision = outputs.act(policy, seen, params, obs, state, key)
        flag, number = jnp.zeros(width, bool), jnp.zeros(width, jnp.int32)
        reward = jnp.zeros(width, jnp.float32)
        served = AsyncInfo(number, info, env.num_envs)
        row = Transition(
            obs=obs,
            action=decision.action,
            reward=reward,
            terminated=flag,
            truncated=flag,
            next_obs=obs,
            mask=flag,
            episode_id=number,
            episode_return=reward,
            episode_length=number,
            extras=decision.extras,
            info=info if collector.num_ready is None else served,
            final_value=(
                policy.value(params, obs, decision.state) if policy.has_value else ()
            ),
        )
        accumulators = collector.accumulators
        nothing = accumulate_nothing(accumulators, env.num_envs)
        rows = jax.tree.map(lambda x: x[None], (row, number))
        return record_rows(accumulators, collector.record_fn, nothing, *rows)[1]

    rows = jax.eval_shape(make, params, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)


@programs.shared
def recorder(accumulators: Accumulators, record_fn: RecordFn | None) -> Any:
    """Jits `record_rows` for a collector's accumulators and recorded fields."""
    return jax.jit(functools.partial(record_rows, accumulators, record_fn))


def fold(
    fn: Callable[[Acc, Transition], Acc], acc: Acc, trajectory: Transition, num: int
) -> Acc:
    """Folds the first `num` rows of a trajectory into `acc`."""
    # `num` is data, so that the last block of a call needs no program of its own.
    known = programs.static(fn, acc)
    run = _fold if known is None else _fold_jitted
    return run(known or fn, acc, trajectory, num)


def _fold(
    fn: Callable[[Acc, Transition], Acc], acc: Acc, trajectory: Transition, num: Any
) -> Acc:
    def step(row: jax.Array, acc: Acc) -> Acc:
        return fn(acc, jax.tree.map(lambda x: x[row], trajectory))

    return lax.fori_loop(0, num, step, acc)


_fold_jitted = jax.jit(_fold, static_argnums=0)

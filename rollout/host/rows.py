"""Stores rows of host transitions and records them in one jitted call.

A row has one column per lane. With `num_ready`, it has one column per environment that
completed a step.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout.base import checks, programs, trees
from rollout.base.platform import to_host
from rollout.envs.host.types import HostStep
from rollout.envs.spaces import as_space
from rollout.envs.types import ArrayTree
from rollout.kernel.state import (
    accumulate,
    accumulate_nothing,
    init_policy_state,
    mask_out,
    record,
)
from rollout.policies import base
from rollout.types import Accumulators, AsyncInfo, RecordFn, Transition

Acc = TypeVar("Acc")

# Fields of a `Transition` that are `[T, B]` columns.
_COLUMNS = "reward terminated truncated mask episode_id episode_return episode_length"


class Rows:
    """Memory for rows `[B, ...]`; the first written row defines the shapes.

    The caller counts the complete rows. Columns that are not written are masked out.

    Args:
        width: B, number of columns.
        capacity: T, maximum number of rows.

    Attributes:
        lane: `[T, B]` int32, lane of each column.
        reward, terminated, truncated, mask, episode_id, episode_return,
            episode_length: `[T, B]`, as in `Transition`.
        is_cut: `[T, B]` bool, True if only `max_episode_steps` ended the episode.
    """

    def __init__(self, width: int, capacity: int) -> None:
        # The operating system allocates pages of `np.zeros` at the first write, so
        # unused rows take no memory.
        self._shape = shape = capacity, width
        # Extras of the policy by row, possibly on the device.
        self._extras: list[ArrayTree] = []
        self.reward, self.episode_return = np.zeros((2, *shape), np.float32)
        self.episode_id, self.episode_length = np.zeros((2, *shape), np.int32)
        self.terminated, self.truncated = np.zeros((2, *shape), bool)
        self.mask, self.is_cut = np.zeros((2, *shape), bool)
        self.lane = np.zeros(shape, np.int32) + np.arange(width, dtype=np.int32)
        # Structure and leaves of each field.
        self._trees: dict[str, tuple[Any, list[np.ndarray]]] = {}

    def write(self, row: int, name: str, tree: ArrayTree) -> ArrayTree:
        """Writes a field of a row.

        Returns:
            The field in memory, `[B, ...]`, which later rows do not overwrite.
        """
        if name not in self._trees:
            leaves, structure = jax.tree.flatten(tree)
            arrays = [np.zeros(self._shape + x.shape[1:], x.dtype) for x in leaves]
            self._trees[name] = structure, arrays
        structure, arrays = self._trees[name]
        if not arrays:  # an empty info
            return tree
        if isinstance(tree, np.ndarray):  # the usual case, kept fast
            view = arrays[0][row]
            view[: len(tree)] = tree
            return view
        views = [array[row] for array in arrays]
        for view, leaf in zip(views, structure.flatten_up_to(tree), strict=True):
            view[: len(leaf)] = leaf
        return structure.unflatten(views)

    def write_extras(self, row: int, extras: ArrayTree) -> None:
        """Stores the extras of a row, which may be on the device."""
        # Assign a slice, which replaces the extras of an interrupted row.
        self._extras[row:] = [extras]

    def write_step(
        self,
        row: int,
        result: HostStep,
        *,
        terminated: np.ndarray,
        truncated: np.ndarray,
        mask: np.ndarray,
        is_cut: np.ndarray | bool,
        episode_id: np.ndarray,
        episode_return: np.ndarray,
        episode_length: np.ndarray,
    ) -> None:
        """Writes the results of a step to the first columns of a row."""
        # Copy: the environments overwrite these arrays.
        columns = slice(len(result.reward))
        self.reward[row, columns] = result.reward
        self.terminated[row, columns] = terminated
        self.truncated[row, columns] = truncated
        self.mask[row, columns] = mask
        self.is_cut[row, columns] = is_cut
        self.episode_id[row, columns] = episode_id
        self.episode_return[row, columns] = episode_return
        self.episode_length[row, columns] = episode_length
        self.write(row, "next_obs", result.obs)
        self.write(row, "info", result.info)

    def mask_out(self, num_rows: int, episode_ids: np.ndarray) -> int:
        """Masks out the rows of some episodes; returns the number of these rows."""
        # Match ids: a lane may have several episodes in the rows, and with `num_ready`
        # the rows of a lane may be in any column.
        mask, episode_id = self.mask[:num_rows], self.episode_id[:num_rows]
        rows = mask & np.isin(episode_id, episode_ids)
        mask[rows] = False
        return int(rows.sum())

    def read(self, num_rows: int) -> Transition:
        """Returns all rows, `[T, B, ...]`, not copied; zero if masked out.

        Rows from `num_rows` on are masked out.
        """
        # Transfer all extras together at the end, when they are usually computed.
        for row, extras in enumerate(to_host(self._extras[:num_rows])):
            self.write(row, "extras", extras)
        self.mask[num_rows:] = False  # discard an incomplete row
        fields: dict[str, Any] = {x: vars(self)[x] for x in _COLUMNS.split()}
        for name, (structure, arrays) in self._trees.items():
            fields[name] = structure.unflatten(arrays)
        rows, is_masked = Transition(**fields), ~self.mask
        if is_masked[:num_rows].any():
            for array in jax.tree.leaves(rows):
                array[is_masked] = 0
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
        accumulators: custom values to accumulate per episode, by name.
        record_fn: function that maps a transition to its recorded fields; None records
            all fields.
        accumulated: values of all lanes before the first row.
        rows: `[T, B, ...]` transitions.
        lane: `[T, B]` int32, lane of each column.

    Returns:
        The values after the last row, and the recorded rows.
    """
    initial = accumulate_nothing(accumulators, lane.shape[1])

    def step(accumulated: ArrayTree, xs: tuple) -> tuple[ArrayTree, Transition]:
        row, lane = xs
        if accumulators:
            old = jax.tree.map(lambda x: x[lane], accumulated)  # [B, ...] of the row
            old = trees.select(row.first, initial, old)
            row = accumulate(accumulators, old, row)
            # Masked-out rows get a lane that does not exist, so `drop` applies.
            index = jnp.where(row.mask, lane, jnp.iinfo(lane.dtype).max)
            accumulated = jax.tree.map(
                lambda x, new: x.at[index].set(new, mode="drop"),
                accumulated,
                row.accumulated,
            )
        recorded = record(record_fn, row)
        if isinstance(row.info, AsyncInfo) and not isinstance(recorded.info, AsyncInfo):
            raise ValueError(
                "`record_fn` must keep the `AsyncInfo` in `info` with `num_ready`, "
                f"got {checks.describe(recorded.info)}. `regroup_by_env` reads it. To "
                "drop the infos of the environments, set `info.info` to `()`."
            )
        return accumulated, mask_out(recorded)

    return lax.scan(step, accumulated, (rows, lane))


def row_shape(collector: Any, width: int, params: Any) -> Transition:
    """Returns the shapes and dtypes of a `HostCollector`'s row, `[width, ...]`."""
    env, policy = collector.env, collector.policy
    info = jax.tree.map(lambda x: x[:width], env.info)
    action_space = as_space(env.action_space)

    def make_row(params: Any, key: chex.PRNGKey) -> Transition:
        key, *keys = jax.random.split(key, 3)
        obs_keys, episode_keys = (jax.random.split(x, width) for x in keys)
        obs = jax.vmap(as_space(env.observation_space).sample)(obs_keys)
        state = init_policy_state(policy, episode_keys)
        decision = base.act(policy, action_space, width, params, obs, state, key)
        flag, number = jnp.zeros(width, bool), jnp.zeros(width, jnp.int32)
        reward = jnp.zeros(width, jnp.float32)
        async_info = AsyncInfo(number, info, env.num_envs)
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
            info=info if collector.num_ready is None else async_info,
            final_value=(
                policy.value(params, obs, decision.state) if policy.has_value else ()
            ),
        )
        accumulators = collector.accumulators
        initial = accumulate_nothing(accumulators, env.num_envs)
        rows = jax.tree.map(lambda x: x[None], (row, number))
        return record_rows(accumulators, collector.record_fn, initial, *rows)[1]

    rows = jax.eval_shape(make_row, params, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)


@programs.shared
def recorder(accumulators: Accumulators, record_fn: RecordFn | None) -> Any:
    """Jits `record_rows` for a collector's accumulators and recorded fields."""
    return jax.jit(functools.partial(record_rows, accumulators, record_fn))


def fold(
    fn: Callable[[Acc, Transition], Acc], acc: Acc, trajectory: Transition, num: int
) -> Acc:
    """Folds the first `num` rows of a trajectory into `acc`."""
    # `num` is not static, so that the last block of a call shares the program.
    static_fn = programs.static(fn, acc)
    run = _fold if static_fn is None else _fold_jitted
    return run(static_fn or fn, acc, trajectory, num)


def _fold(
    fn: Callable[[Acc, Transition], Acc], acc: Acc, trajectory: Transition, num: Any
) -> Acc:
    def step(row: jax.Array, acc: Acc) -> Acc:
        return fn(acc, jax.tree.map(lambda x: x[row], trajectory))

    return lax.fori_loop(0, num, step, acc)


_fold_jitted = jax.jit(_fold, static_argnums=0)


def regroup_by_env(rows: Transition) -> Transition:
    """Sorts the rows of a `HostCollector` with `num_ready` by environment and time.

    Call it before you compute targets that look ahead, such as `gae`. It works inside
    and outside of `jit`.

    Args:
        rows: `[T, num_ready, ...]` transitions, in the order of completion.

    Returns:
        `[T, B, ...]` transitions. Column b has the transitions of environment b in
        order of time, followed by masked-out rows of zeros. `info` is the info of the
        environment, without the `AsyncInfo`.

    Raises:
        ValueError: if `rows` are not from a collector with `num_ready`.
    """
    message = (
        "`rows` must come from a `HostCollector` with `num_ready`, with its `info`"
    )
    info: Any = rows.info if isinstance(rows, Transition) else rows
    checks.check_type(message, info, AsyncInfo)
    rows = _by_env(rows)
    return rows.replace(info=rows.info.info)


@jax.jit
def _by_env(rows: Transition) -> Transition:
    num_rows, num_envs = rows.mask.shape[0], rows.info.num_envs
    # Move masked-out rows to column B, which `put` drops.
    env_id = jnp.where(rows.mask, rows.info.env_id, num_envs).reshape(-1)
    # The result needs T rows: an environment may be in every row.
    order = jnp.argsort(env_id, stable=True)  # stable: keeps the order of time
    env_id = env_id[order]
    # Row of a transition: its rank among the transitions of the environment.
    first = jnp.searchsorted(env_id, env_id, side="left")
    index = (jnp.arange(env_id.size) - first, env_id)

    def put(leaf: jax.Array) -> jax.Array:
        leaf = leaf.reshape(-1, *leaf.shape[2:])[order]
        zeros = jnp.zeros((num_rows, num_envs, *leaf.shape[1:]), leaf.dtype)
        return zeros.at[index].set(leaf, mode="drop")

    return jax.tree.map(put, rows)

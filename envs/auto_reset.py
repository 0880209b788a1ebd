"""Auto-reset: starts new episodes in the done lanes.

All methods return the same bits, for any number of done lanes. `"select"`, the
reference method, resets all `B` lanes without a loop and selects the result in the done
lanes. `"compact"` resets only done lanes, `K` at a time, in lane order. `"auto"`
chooses by the platform that the program is lowered for:

| platform | cheap reset | costly reset |
|---|---|---|
| CPU | compact | compact |
| GPU | select | switch |
| TPU and others | select | compact |

`"auto"` calls `masked_update`, which applies a function only to the lanes that need it.
The kernel also evaluates critics with `masked_update`. It chooses one of three
functions, which return the same bits:

- `select` computes all lanes.
- `rounds` computes `K` lanes at a time in a loop, with zero rounds if no flag is set.
  It suits CPUs, and TPUs, which control loops on the device.
- `switch` computes no lane, up to `K` lanes, or all lanes. It suits GPUs, on which a
  loop of unknown length waits for the host.

`merge_mapped` adapts `rounds` or `switch` to `vmap`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rollout.base import trees
from rollout.base.jaxprs import estimate_cost, hoist
from rollout.envs.types import ALL_LANES, ArrayTree, Env, LaneIndex, Lanes

_Fn = Callable[[LaneIndex], ArrayTree]
_UpdateFn = Callable[[jax.Array, _Fn, ArrayTree], ArrayTree]

_WORD = 32  # bits of a word of lane flags
# Upper bounds of a cheap function.
_FEW_OPERATIONS = 5_000  # per lane: a step of Breakout and the generation of its keys
_FEW_IN_ALL = 30_000_000  # operations of all lanes together
_FEW_ROUNDS = 8


def select(flag: jax.Array, fn: _Fn, lanes: ArrayTree) -> ArrayTree:
    """Computes all lanes and selects the result in lanes whose flag is set.

    Args:
        flag: `[B]` bool, the lanes to replace.
        fn: maps an index of `K` lanes to new values, `[K, ...]`. It is called with
            `ALL_LANES`.
        lanes: `[B, ...]`, the old values; may contain typed keys.

    Returns:
        `[B, ...]`, a tree with the structure of `lanes`.
    """
    return trees.select(flag, fn(ALL_LANES), lanes)


def rounds(flag: jax.Array, fn: _Fn, lanes: ArrayTree) -> ArrayTree:
    """Replaces the lanes whose flag is set, `K` at a time, in lane order.

    Args:
        flag: `[B]` bool, the lanes to replace.
        fn: maps `[K]` int32 lane numbers to new values, `[K, ...]`. If fewer than `K`
            lanes remain, the unused lane numbers are arbitrary.
        lanes: `[B, ...]`, the old values, with words instead of typed keys.

    Returns:
        `[B, ...]`, a tree with the structure of `lanes`.
    """

    def replace(state: tuple[jax.Array, ArrayTree]) -> tuple[jax.Array, ArrayTree]:
        return _replace_first(state[0], fn, state[1])

    return lax.while_loop(lambda state: jnp.any(state[0]), replace, (flag, lanes))[1]


def switch(flag: jax.Array, fn: _Fn, lanes: ArrayTree) -> ArrayTree:
    """Replaces no lane, replaces up to `K` lanes, or computes all lanes and selects.

    Args:
        flag: `[B]` bool, the lanes to replace.
        fn: maps lane numbers as in `rounds`, or `ALL_LANES`, to new values.
        lanes: the old values, as in `rounds`.

    Returns:
        `[B, ...]`, a tree with the structure of `lanes`.
    """

    def replace_first(lanes: ArrayTree) -> ArrayTree:
        return _replace_first(flag, fn, lanes)[1]

    def select_all(lanes: ArrayTree) -> ArrayTree:
        return select(flag, fn, lanes)

    count = jnp.sum(flag, dtype=jnp.int32)
    # Branch 0: no lane; branch 1: up to K lanes; branch 2: more lanes.
    is_any, is_more = count > 0, count > _num_slots(flag)
    branch = is_any.astype(jnp.int32) + is_more.astype(jnp.int32)
    return lax.switch(branch, (lambda lanes: lanes, replace_first, select_all), lanes)


def masked_update(flag: jax.Array, fn: _Fn, lanes: ArrayTree) -> ArrayTree:
    """Chooses `rounds`, `select` or `switch` by the platform and the cost of `fn`.

    A CPU runs `rounds`. Other platforms run `select` if `fn` is cheap. If `fn` is
    costly, a GPU runs `switch`, and a TPU or any other platform runs `rounds`.

    A cheap `fn` has at most 5,000 operations, about a step of Breakout, or at most 30
    million in all lanes together; on a GPU it also has no loop of more than 8 rounds.
    Operations are counted in the jaxpr (`rollout.envs.auto_reset`). A loop of
    unknown length is costly.

    Args:
        flag: `[B]` bool, the lanes to replace.
        fn: computes new values, as in `switch`.
        lanes: the old values, as in `rounds`.

    Returns:
        `[B, ...]`, a tree with the structure of `lanes`.
    """
    # Trace `fn` for a single lane: all lanes have the same cost.
    work = estimate_cost(fn, jnp.zeros((1,), jnp.int32))
    # The second limit is for all lanes together: with few lanes, each may cost more.
    is_cheap = work.operations <= max(_FEW_OPERATIONS, _FEW_IN_ALL / flag.size)
    all_lanes, switched, compact = (
        functools.partial(update, flag, fn) for update in (select, switch, rounds)
    )
    # On a GPU each round of a loop is a kernel launch, and `select` runs at every step.
    gpu = all_lanes if is_cheap and work.rounds <= _FEW_ROUNDS else switched
    tpu = all_lanes if is_cheap else compact
    return lax.platform_dependent(lanes, cpu=compact, cuda=gpu, rocm=gpu, default=tpu)


def merge_mapped(update_fn: _UpdateFn) -> _UpdateFn:
    """Adapts `rounds` or `switch` to `vmap`: V members of B lanes become V * B lanes.

    Plain `vmap` would run the loop for all lanes while any lane of any member needs it,
    and it would run every branch of the conditional. Values that `fn` closes over may
    differ between members, for example environment parameters. The result has no
    derivative: apply `stop_gradient` to differentiated values first.
    """

    def update(flag: jax.Array, fn: _Fn, lanes: ArrayTree) -> ArrayTree:
        # `custom_vmap` rejects closures over mapped values, so pass them explicitly.
        lane_fn, lane_consts = hoist(
            lambda lane: jax.tree.map(lambda x: x[0], fn(lane[None])), jnp.int32(0)
        )
        run, run_consts = hoist(lambda flag, old: update_fn(flag, fn, old), flag, lanes)

        @jax.custom_batching.custom_vmap
        def call(
            flag: jax.Array, lanes: ArrayTree, run_consts: list, lane_consts: list
        ) -> ArrayTree:
            del lane_consts  # read only under `vmap`
            return run(run_consts, flag, lanes)

        @call.def_vmap
        def call_merged(
            size: int, mapped: list, flag: jax.Array, lanes: ArrayTree, *consts: list
        ) -> tuple[ArrayTree, ArrayTree]:
            num_lanes = flag.shape[-1]

            # Reshapes `[V, B, ...]` to `[V * B, ...]`; broadcasts a shared `[B, ...]`.
            def merge(x: jax.Array, is_mapped: bool) -> jax.Array:
                x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
                return x.reshape(-1, *x.shape[2:])

            flag, lanes = jax.tree.map(merge, (flag, lanes), tuple(mapped[:2]))
            # The values that `fn` closes over may be shared by all members.
            lane_consts, axes = consts[1], [0 if x else None for x in mapped[3]]

            def member_fn(index: LaneIndex) -> ArrayTree:
                number = jnp.arange(size * num_lanes, dtype=jnp.int32)[index]
                member, lane = jnp.divmod(number, num_lanes)
                values = [
                    x if axis is None else x[member]
                    for x, axis in zip(lane_consts, axes, strict=True)
                ]
                return jax.vmap(lane_fn, (axes, 0))(values, lane)

            new = jax.tree.map(
                lambda x: x.reshape(size, num_lanes, *x.shape[1:]),
                update(flag, member_fn, lanes),
            )
            return new, jax.tree.map(lambda _: True, new)

        return call(flag, lanes, run_consts, lane_consts)

    return update


def _num_slots(flag: jax.Array) -> int:
    """Returns K, the number of lanes computed per round.

    K is large enough that one round nearly always suffices, and small enough that a
    round is cheap. If K is 1, there is no scatter, and XLA:CPU compiles the loop to one
    kernel.
    """
    return max(1, flag.shape[0] // 16)


def _replace_first(
    flag: jax.Array, fn: _Fn, lanes: ArrayTree
) -> tuple[jax.Array, ArrayTree]:
    """Replaces the first `K` lanes with a flag; returns remaining flags and lanes."""
    num_lanes, num_slots = flag.shape[0], _num_slots(flag)
    lane, is_used = _first_true(flag, num_slots)
    new_lanes = fn(lane)
    # Each unused slot writes to a different lane out of range, since `_write` promises
    # XLA unique, ascending indices.
    target = jnp.where(is_used, lane, num_lanes + jnp.arange(num_slots))
    lanes = jax.tree.map(lambda old, new: _write(old, target, new), lanes, new_lanes)
    return _write(flag, target, jnp.zeros((num_slots,), bool)), lanes


def _write(old: jax.Array, lane: jax.Array, new: jax.Array) -> jax.Array:
    """Writes `new[k]` to `old[lane[k]]`; discards it if the lane is out of range."""
    rows = old.at[lane]
    return rows.set(new, mode="drop", unique_indices=True, indices_are_sorted=True)


def _first_true(flag: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Finds the first `size` positions where `flag` is True.

    `jnp.nonzero` needs a cumulative sum and a scatter over all lanes. This function
    packs the flags into words, which needs one small reduction. Then it looks up the
    word of each rank and finds the bit by a binary search in five steps.

    Returns:
        `[size]` int32 positions, ascending and in range; and `[size]` bool, False for
        positions beyond the last True.
    """
    num_words = -(-flag.shape[0] // _WORD)
    padding = num_words * _WORD - flag.shape[0]
    bits = jnp.pad(flag, (0, padding)).reshape(num_words, _WORD).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(_WORD, dtype=jnp.uint32)[None], axis=1)
    count = lax.population_count(words).astype(jnp.int32)
    number = jnp.arange(num_words)
    # Count the flags before each word with a masked sum over pairs of words: it fuses,
    # unlike a cumulative sum, and the number of words is small.
    precedes = number[None, :] < number[:, None]
    offset = jnp.sum(jnp.where(precedes, count[None, :], 0), axis=1)

    rank = jnp.arange(size, dtype=jnp.int32)
    # `offset` ascends, so this is the last word with at most `rank` flags before it. An
    # empty word has the same offset as the next word and is skipped.
    word_index = jnp.sum(offset[None, :] <= rank[:, None], axis=1) - 1
    position = word_index * _WORD + _select_bit(
        words[word_index], rank - offset[word_index]
    )
    # A rank beyond the last flag yields an arbitrary position: clip it, so that it can
    # be gathered.
    position = jnp.minimum(position, flag.shape[0] - 1).astype(jnp.int32)
    return position, rank < jnp.sum(count)


def _select_bit(word: jax.Array, rank: jax.Array) -> jax.Array:
    """Finds the position of the rank-th set bit (from 0) of each word."""
    position = jnp.zeros_like(rank)
    # Binary search: continue in the lower half if it contains the bit, otherwise in the
    # upper half.
    for half in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << half) - 1)
        num_low = lax.population_count(low).astype(jnp.int32)
        upper = rank >= num_low
        rank = jnp.where(upper, rank - num_low, rank)
        position = jnp.where(upper, position + half, position)
        word = jnp.where(upper, word >> jnp.uint32(half), low)
    return position


def reset(
    method: str,
    env: Env,
    start_fn: Callable[[Env, LaneIndex], Lanes],
    done: jax.Array,
    lanes: Lanes,
) -> Lanes:
    """Starts new episodes in the done lanes.

    Derivatives pass through all lanes except the done lanes. A `while_loop` has no
    reverse-mode derivative, so only `"select"` differentiates a reset with respect to
    `env`.

    Args:
        method: a name in `BY_NAME`.
        env: parameters of the environments, passed to `start_fn`.
        start_fn: maps an index of `K` lanes to new lanes, `[K, ...]`.
        done: `[B]` bool, the lanes to reset.
        lanes: the current lanes.
    """
    if method == "select":
        return BY_NAME[method](done, functools.partial(start_fn, env), lanes)
    # Pass key words instead of typed keys: the key-reuse checker treats a key that a
    # loop or a branch returns as consumed.
    words = trees.unwrap_keys(lanes)
    # The reset does not depend on differentiated values, so the `while_loop` is never
    # transposed. `_attach` adds the derivative outside the loop.
    fixed_env, fixed_words = lax.stop_gradient((env, words))
    replace = merge_mapped(BY_NAME[method])
    new_words = replace(
        done, lambda lane: trees.unwrap_keys(start_fn(fixed_env, lane)), fixed_words
    )
    return trees.wrap_keys(_attach(new_words, words, done), lanes)


BY_NAME = {
    "auto": masked_update,
    "compact": rounds,
    "select": select,
}


@jax.custom_jvp
def _attach(new: ArrayTree, lanes: ArrayTree, done: jax.Array) -> ArrayTree:
    """Returns `new` and defines its derivative with respect to `lanes`."""
    del lanes, done  # read only by the derivative
    return new


@_attach.defjvp
def _attach_jvp(primals: tuple, tangents: tuple) -> tuple:
    new, _, done = primals

    # Reset lanes are constant: set the tangent to zero. All other lanes keep it.
    def mask_tangent(x: jax.Array, tangent: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return tangent  # an integer has a float0 tangent, which `select` rejects
        return trees.select(done, jnp.zeros_like(x), tangent)

    return new, jax.tree.map(mask_tangent, new, tangents[1])

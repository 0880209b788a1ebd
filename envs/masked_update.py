"""Computes something, such as a reset, for the few lanes that need it.

Each function here calls another one with lanes to compute, and writes the result to the
lanes whose flag is set; the bits are the same. `select` computes all lanes. `rounds`
computes `K` at a time, in a loop that runs no round if no flag is set: for a CPU, and
for a TPU, which controls loops by itself. `switch` computes no lane, up to `K`, or all,
whichever suffices: for a GPU, where a loop of unknown length waits for the host.
`merged` makes either of the two fit for `vmap`. `by_platform` takes the one that suits
the platform that the program is lowered for.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from rollout.envs import cost_estimate, trees
from rollout.envs.types import ALL_LANES, ArrayTree, LaneIndex

_Fn = Callable[[LaneIndex], ArrayTree]
_Way = Callable[[jax.Array, _Fn, ArrayTree], ArrayTree]

_WORD = 32  # bits of a word of lane flags
# Bounds of cheap work.
_FEW_OPERATIONS = 5_000  # of one lane: a step of Breakout and its keys
_FEW_IN_ALL = 30_000_000  # of all lanes together
_FEW_ROUNDS = 8


def select(flag: jax.Array, fn: _Fn, lanes: ArrayTree) -> ArrayTree:
    """Calls `fn` with `ALL_LANES` and keeps the result where the flag is set.

    Args:
        flag: `[B]` bool, the lanes that are replaced.
        fn: maps an index of `K` lanes to their new values, `[K, ...]`.
        lanes: `[B, ...]`, the old values, which the others keep; it may hold typed
            keys.

    Returns:
        `[B, ...]`, of the structure of `lanes`.
    """
    return trees.select(flag, fn(ALL_LANES), lanes)


def rounds(flag: jax.Array, fn: _Fn, lanes: ArrayTree) -> ArrayTree:
    """Replaces the lanes with a flag, `K` at a time, in lane order.

    Args:
        flag: `[B]` bool, the lanes that are replaced.
        fn: maps the numbers of lanes, `[K]` int32, to their new values, `[K, ...]`. If
            fewer lanes are left, the other numbers are arbitrary.
        lanes: `[B, ...]`, the old values, which the others keep; words instead of typed
            keys.

    Returns:
        `[B, ...]`, of the structure of `lanes`.
    """

    def replace(state: tuple[jax.Array, ArrayTree]) -> tuple[jax.Array, ArrayTree]:
        return _replace_some(state[0], fn, state[1])

    return lax.while_loop(lambda state: jnp.any(state[0]), replace, (flag, lanes))[1]


def switch(flag: jax.Array, fn: _Fn, lanes: ArrayTree) -> ArrayTree:
    """Replaces no lane, replaces up to `K` lanes, or computes all and selects.

    Args:
        flag: `[B]` bool, the lanes that are replaced.
        fn: maps an index of lanes, numbers as in `rounds` or all, to their new values.
        lanes: as in `rounds`.

    Returns:
        `[B, ...]`, of the structure of `lanes`.
    """

    def some(lanes: ArrayTree) -> ArrayTree:
        return _replace_some(flag, fn, lanes)[1]

    def every(lanes: ArrayTree) -> ArrayTree:
        return select(flag, fn, lanes)

    count = jnp.sum(flag, dtype=jnp.int32)
    # 0: no lane, 1: up to K, 2: more.
    is_any, is_more = count > 0, count > _num_slots(flag)
    branch = is_any.astype(jnp.int32) + is_more.astype(jnp.int32)
    return lax.switch(branch, (lambda lanes: lanes, some, every), lanes)


def by_platform(flag: jax.Array, fn: _Fn, lanes: ArrayTree) -> ArrayTree:
    """Takes `rounds` on a CPU, elsewhere `select` if `fn` is cheap.

    If not, a GPU takes `switch`, and others `rounds`. Cheap are at most 5,000
    operations, about a step of Breakout, or 30 million in all lanes together; on a GPU
    there may also be no loop of more than 8 rounds. Operations are counted in the jaxpr
    (`rollout.envs.cost_estimate`); a loop of unknown length is costly.

    Args:
        flag: `[B]` bool, the lanes that are replaced.
        fn: as in `switch`.
        lanes: as in `rounds`.

    Returns:
        `[B, ...]`, of the structure of `lanes`.
    """
    # Traced for one lane, which stands for all of them.
    work = cost_estimate.estimate(fn, jnp.zeros((1,), jnp.int32))
    # Few lanes may do more each: what counts is the work of all together.
    is_cheap = work.operations <= max(_FEW_OPERATIONS, _FEW_IN_ALL / flag.size)
    all_lanes, some, compact = (
        functools.partial(way, flag, fn) for way in (select, switch, rounds)
    )
    # On a GPU each round of a loop is a launch, and select runs it at every step.
    gpu = all_lanes if is_cheap and work.rounds <= _FEW_ROUNDS else some
    other = all_lanes if is_cheap else compact
    return lax.platform_dependent(lanes, cpu=compact, cuda=gpu, rocm=gpu, default=other)


def merged(way: _Way) -> _Way:
    """Lets `rounds` or `switch` take V members of B lanes under `vmap` as V * B lanes.

    `vmap` itself would run the loop for all lanes while one lane of one member needs
    it, and every branch of the conditional. What `fn` closes over may differ between
    members, as parameters of an environment do. It has no derivative: what is
    differentiated must pass `stop_gradient` before.
    """

    def update(flag: jax.Array, fn: _Fn, lanes: ArrayTree) -> ArrayTree:
        # Functions without closures, since `custom_vmap` takes no others.
        one, of_one = hoist(
            lambda lane: jax.tree.map(lambda x: x[0], fn(lane[None])), jnp.int32(0)
        )
        run, of_run = hoist(lambda flag, lanes: way(flag, fn, lanes), flag, lanes)

        @jax.custom_batching.custom_vmap
        def call(
            flag: jax.Array, lanes: ArrayTree, of_run: list, of_one: list
        ) -> ArrayTree:
            del of_one  # only for many members
            return run(of_run, flag, lanes)

        @call.def_vmap
        def call_merged(
            size: int, mapped: list, flag: jax.Array, lanes: ArrayTree, *closed: list
        ) -> tuple[ArrayTree, ArrayTree]:
            num_lanes = flag.shape[-1]

            # `[V, B, ...]`, or `[B, ...]` of all V members, to `[V * B, ...]`.
            def merge(x: jax.Array, is_mapped: bool) -> jax.Array:
                x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
                return x.reshape(-1, *x.shape[2:])

            flag, lanes = jax.tree.map(merge, (flag, lanes), tuple(mapped[:2]))
            # Of what `fn` closes over, only some values differ between members.
            of_one, axes = closed[1], [0 if x else None for x in mapped[3]]

            def of_members(at: LaneIndex) -> ArrayTree:
                number = jnp.arange(size * num_lanes, dtype=jnp.int32)[at]
                member, lane = jnp.divmod(number, num_lanes)
                values = [
                    x if axis is None else x[member]
                    for x, axis in zip(of_one, axes, strict=True)
                ]
                return jax.vmap(one, (axes, 0))(values, lane)

            new = jax.tree.map(
                lambda x: x.reshape(size, num_lanes, *x.shape[1:]),
                update(flag, of_members, lanes),
            )
            return new, jax.tree.map(lambda _: True, new)

        return call(flag, lanes, of_run, of_one)

    return update


def hoist(
    fn: Callable[..., ArrayTree], *args: ArrayTree
) -> tuple[Callable[..., ArrayTree], list[jax.Array]]:
    """Returns `fn` with what it closes over as its first argument, and those values.

    They are words instead of typed keys. `custom_jvp` and `custom_vmap` take no
    functions that close over what is differentiated or mapped.
    """
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    structure, consts = jax.tree.structure(shape), jax.eval_shape(lambda: closed.consts)

    def hoisted(values: list[jax.Array], *args: ArrayTree) -> ArrayTree:
        values = trees.wrap_keys(values, trees.blank(consts))
        whole = core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, values))
        return structure.unflatten(whole(*jax.tree.leaves(args)))

    return hoisted, trees.unwrap_keys(closed.consts)


def _num_slots(flag: jax.Array) -> int:
    """Returns K, the number of lanes that are computed at once.

    It is large enough that one round nearly always suffices, and small enough to cost
    little. With one slot there is no scatter, and XLA:CPU compiles the loop to one
    kernel.
    """
    return max(1, flag.shape[0] // 16)


def _replace_some(
    flag: jax.Array, fn: _Fn, lanes: ArrayTree
) -> tuple[jax.Array, ArrayTree]:
    """Replaces the first `K` lanes with a flag; returns the other flags, and lanes."""
    num_lanes, num_slots = flag.shape[0], _num_slots(flag)
    lane, found = _first_true(flag, num_slots)
    fresh = fn(lane)
    # Slots that are left over write to lanes that do not exist, a different one each:
    # `_write` promises XLA unique, ascending indices.
    target = jnp.where(found, lane, num_lanes + jnp.arange(num_slots))
    lanes = jax.tree.map(lambda old, new: _write(old, target, new), lanes, fresh)
    return _write(flag, target, jnp.zeros((num_slots,), bool)), lanes


def _write(old: jax.Array, lane: jax.Array, new: jax.Array) -> jax.Array:
    """Writes `new[k]` to `old[lane[k]]`; drops it if there is no such lane."""
    at = old.at[lane]
    return at.set(new, mode="drop", unique_indices=True, indices_are_sorted=True)


def _first_true(flag: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Finds the first `size` positions where `flag` is True.

    `jnp.nonzero` costs a cumulative sum and a scatter over all lanes. Packing the flags
    into words costs one small reduction; then each rank looks up its word and finds its
    bit in five halvings.

    Returns:
        `[size]` int32 positions, ascending and in range, and `[size]` bool, False where
        no True was left.
    """
    num_words = -(-flag.shape[0] // _WORD)
    padding = num_words * _WORD - flag.shape[0]
    bits = jnp.pad(flag, (0, padding)).reshape(num_words, _WORD).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(_WORD, dtype=jnp.uint32)[None], axis=1)
    count = lax.population_count(words).astype(jnp.int32)
    number = jnp.arange(num_words)
    # Flags before each word. A masked sum over pairs of words: unlike a cumulative sum,
    # it fuses, and there are few words.
    earlier = number[None, :] < number[:, None]
    before = jnp.sum(jnp.where(earlier, count[None, :], 0), axis=1)

    rank = jnp.arange(size, dtype=jnp.int32)
    # `before` ascends, so this is the last word with at most `rank` flags before it: an
    # empty word has as many as the next one, and is passed over.
    word_index = jnp.sum(before[None, :] <= rank[:, None], axis=1) - 1
    position = word_index * _WORD + _select_bit(
        words[word_index], rank - before[word_index]
    )
    # A rank with no flag left yields any position; it must be one that can be gathered.
    position = jnp.minimum(position, flag.shape[0] - 1).astype(jnp.int32)
    return position, rank < jnp.sum(count)


def _select_bit(word: jax.Array, rank: jax.Array) -> jax.Array:
    """Finds the position of the rank-th set bit (from 0) of each word."""
    position = jnp.zeros_like(rank)
    # Binary search: go on in the lower half if it holds the bit, else in the upper one.
    for half in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << half) - 1)
        num_low = lax.population_count(low).astype(jnp.int32)
        upper = rank >= num_low
        rank = jnp.where(upper, rank - num_low, rank)
        position = jnp.where(upper, position + half, position)
        word = jnp.where(upper, word >> jnp.uint32(half), low)
    return position

"""Takes gradient steps on shuffled minibatches of a trajectory, also inside `jit`.

`permutation` samples the order of an epoch. `jax.random.permutation` sorts twice, which
would take a third of the time of a PPO update.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rollout.base import checks, prng, programs
from rollout.envs.types import ArrayTree

_MAX_ROUNDS = 16
_MICROBATCH_SIZE = 512  # rows on a CPU: measured as the fastest for PPO
_MAX_PAIRS = 2.0**-10  # expected number of neighbors that keep their distance


def permutation(key: chex.PRNGKey, n: int) -> jax.Array:
    """Samples a random order of the numbers from 0 to n - 1, without a sort.

    Every number occurs exactly once. The order is a Feistel network over a product of
    ranges: with n = a * b and a number (x, y), x < a and y < b, each round adds a hash
    of one coordinate and a random word to the other coordinate, modulo the range. Each
    round is invertible, so the network is a permutation for every key.

    Two numbers that differ only in y keep their distance if the hashes agree in all
    R / 2 rounds that change x, with probability a ** (-R / 2). R is the least even
    number for which the expected number of such pairs among n neighbors is at most
    2 ** -10: 8 for n = 8,192 and 131,072, and 6 for n = 2 ** 20. If this takes more
    than 16 rounds, for example if n is prime, `jax.random.permutation` sorts instead.

    Args:
        key: one typed key.
        n: the number of items, at least 1. Static.

    Returns:
        `[n]` int32, each number once.

    Raises:
        ValueError: if `key` is not one typed key, or `n` not an int of at least 1.

    Source:
        "Ciphers with Arbitrary Finite Domains" (Black & Rogaway, 2002), the generalized
        Feistel construction; as a shuffle in "Bandwidth-Optimal Random Shuffling for
        GPUs", arXiv:2106.06161. The hash: `lowbias32`, from "Prospecting for Hash
        Functions" (Wellons, 2018).
    """
    checks.check_key(key)
    return _permutation(key, checks.check_int("n", n))


# Jitted: otherwise a call from Python would compile a program for each operation.
@functools.partial(jax.jit, static_argnums=1)
def _permutation(key: chex.PRNGKey, n: int) -> jax.Array:
    """Samples a permutation; see `permutation`."""
    # Choose the most balanced factors: a small factor would need many rounds.
    a = next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
    b, rounds = n // a, math.inf
    if a > 1:
        rounds = 2 * math.ceil(math.log(n / _MAX_PAIRS, a))
    if rounds > _MAX_ROUNDS:
        return jax.random.permutation(key, n)
    x, y = jnp.divmod(jnp.arange(n, dtype=jnp.uint32), b)
    words = prng.bits(key, (int(rounds) // 2, 2))
    for word in words:
        x = _add(x, _hash(y ^ word[0]), a)
        y = _add(y, _hash(x ^ word[1]), b)
    order = x * b + y
    if a % 2 and b % 2:
        # Every round consists of cycles of odd length, so it is an even permutation.
        # Swap the items 0 and 1 with probability 1/2 to also sample odd permutations.
        swap = _hash(words[0, 0] ^ words[-1, 1]) >> 31
        order = jnp.where(order < 2, order ^ swap, order)
    return order.astype(jnp.int32)


def scan_minibatches(
    update_fn: Callable[[Any, Any], tuple[Any, Any]],
    init: ArrayTree,
    key: chex.PRNGKey,
    tree: ArrayTree,
    *,
    num_minibatches: int,
    num_epochs: int = 1,
    axis: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[Any, Any]:
    """Scans an update over shuffled minibatches. Use it for the epochs of PPO.

        learner, losses = scan_minibatches(
            update, learner, key, (t, advantage), num_minibatches=4, num_epochs=4
        )

    One minibatch is in memory at a time. Every step is in exactly one minibatch of
    each epoch, and each epoch is shuffled again. Minibatches include masked-out steps,
    with their `mask`.

    If lanes are sharded over devices, pass the `mesh`: each device then shuffles the
    steps of its lanes and contributes an equal share to each minibatch, so that no
    step moves to another device. `update_fn` receives whole minibatches, sharded over
    their rows, so that a mean over a minibatch is the mean over all devices.

    Args:
        update_fn: `(carry, minibatch) -> (carry, output)`, as the function of a
            `jax.lax.scan`. Outside of `jit`, every new function object is compiled.
            A minibatch is `tree` with leaves `[T * B / M, ...]`; with axis 1 `[T, B /
            M, ...]`, with axis 0 `[T / M, ...]`.
        init: the initial carry, such as `(params, opt_state)`.
        key: one typed key. The order of epoch e is `permutation(keys[e], items)` with
            `keys = jax.random.split(key, num_epochs)`.
        tree: any pytree of `[T, B, ...]`, such as `(trajectory, advantages)`.
        num_minibatches: M, minibatches of an epoch, at least 1; it must divide the
            number of items to shuffle.
        num_epochs: E, at least 1.
        axis: None shuffles all `T * B` steps; 1 shuffles whole lanes, for recurrent
            policies, and T may differ between leaves; 0 shuffles the leading axis of
            any tree. With axis 1, pass an initial state `[B, ...]` as `state[None]`:
            otherwise axis 1 of the state is a feature axis.
        mesh: devices over which axis 1 of `tree` is sharded, or axis 0 with `axis=0`.
            The order of device d is `permutation(jax.random.fold_in(keys[e], d), n)`
            with its share n of the items. A mesh of one device equals None.

    Returns:
        The last carry, and the outputs `[E * M, ...]`.

    Raises:
        ValueError: if a count is not an int of at least 1, if `axis` is any other
            value, if the leaves differ in the shuffled axes, if the number of items of
            a device is 0 or no multiple of M, or if `mesh` is None and arrays outside
            of `jit` are sharded. Inside of `jit`, shardings are unknown.
    """
    checks.check_key(key)
    num_minibatches = checks.check_int("num_minibatches", num_minibatches)
    num_epochs = checks.check_int("num_epochs", num_epochs)
    checks.check_choice("axis", axis, (None, 0, 1))
    num_items, num_devices, lanes = _count_items(tree, axis), 1, None
    if mesh is not None:
        lanes = checks.check_mesh(mesh)
        num_devices = mesh.shape[lanes[1]]
        size = jnp.shape(jax.tree.leaves(tree)[0])[0 if axis == 0 else 1]
        label = f"the {num_devices} devices of `mesh`"
        checks.check_multiple(
            "len(tree)" if axis == 0 else "num_envs", size, num_devices, label
        )
    elif any(map(_is_sharded, jax.tree.leaves(tree))):
        raise ValueError(
            "`mesh` must be given for a `tree` that is sharded over devices, got None: "
            "every device would compute the updates of all rows."
        )
    share = num_items // num_devices
    items = "items" if num_devices == 1 else "items of each device"
    _check_divides(num_minibatches, share, items)
    # Never cache a function that closes over tracers: the cache would keep them alive.
    static_fn = programs.static(update_fn, init, key, tree)
    scan: Any = _scan if static_fn is None else _scan_jitted
    fn = static_fn or update_fn
    sizes = num_minibatches, num_epochs, share
    return scan(fn, init, key, tree, sizes, axis, lanes if num_devices > 1 else None)


def mean_gradient(
    loss_fn: Callable[[Any, Any], tuple[jax.Array, ArrayTree]],
    params: ArrayTree,
    batch: ArrayTree,
    weight: jax.Array,
    *,
    axis: int = 0,
    microbatch_size: int | str | None = "auto",
    mesh: Mesh | None = None,
) -> tuple[Any, Any]:
    """Differentiates the weighted mean of the losses of single rows.

    Equivalent, up to rounding, to `jax.grad` of

        sum_i weight_i loss_i / sum_i weight_i

    where `jax.vmap` maps `loss_fn` over the rows. A loss cannot read other rows, so
    that the size of microbatches does not change its meaning. Values that depend on the
    whole batch, such as normalized advantages, are fields of the rows.

    On a GPU the forward pass saves every intermediate value, so that XLA does not
    recompute activations in the backward pass.

    Args:
        loss_fn: `(params, row) -> (loss, metrics)`. `row` is one row of `batch`,
            without a batch axis. `loss` and the leaves of the pytree `metrics` are
            `()`. For rows that are sequences, they are `[T]`.
        params: any pytree of float arrays.
        batch: a pytree of `[M, ...]`, or of `[T, M, ...]` with `axis=1`.
        weight: `[M]`, or `[T, M]` with `axis=1`, at least 0. Rows of weight 0 are
            ignored, but must be finite: collectors set masked-out rows to zero.
        axis: axis of the rows; 1 for sequences.
        microbatch_size: minimum number of rows per microbatch. Gradients are
            accumulated over equal microbatches, in float32 at least. This takes less
            memory, and on a CPU less time, since the intermediate values of few rows
            fit into a cache. "auto" is 512 on a CPU, and None elsewhere. None uses a
            single batch.
        mesh: devices over which the rows are sharded. Each device differentiates the
            losses of its rows, and a single all-reduce adds gradients, metrics and
            weights.

    Returns:
        The gradient, of the structure of `params`, and the weighted means of `metrics`,
        `()` each. They are zero if all weights are zero.

    Raises:
        ValueError: if the loss or a metric of one row has a wrong shape, or if
            `microbatch_size` is invalid.
    """
    sum_gradient = functools.partial(
        _sum_gradient, loss_fn, axis=axis, microbatch_size=microbatch_size
    )
    if mesh is not None:
        mesh, name = checks.check_mesh(mesh)
        if mesh.shape[name] > 1:
            rows = PartitionSpec(*[None] * axis, name)
            return jax.shard_map(
                functools.partial(_mean_over_devices, sum_gradient, name),
                mesh=mesh,
                in_specs=(PartitionSpec(), rows, rows),
                out_specs=PartitionSpec(),
                check_vma=False,  # otherwise jax also adds the gradients of devices
            )(params, batch, weight)
    total = jnp.sum(weight, dtype=jnp.float32)
    return sum_gradient(params, batch, weight, jnp.where(total > 0, total, 1.0))


def normalize(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Shifts and scales rows to mean 0 and standard deviation 1, as for advantages.

    Args:
        x: `[...]` float.
        weight: weights of the rows, of the shape of `x`; rows of weight 0 are ignored.

    Returns:
        The normalized rows, of the shape of `x`; zeros if all rows are equal, up to the
        rounding of their mean.
    """
    total = jnp.where(weight.sum() > 0, weight.sum(), 1.0)
    mean = (x * weight).sum() / total
    var = ((x - mean) ** 2 * weight).sum() / total
    # If all rows lie on one side of their mean, they differ by its rounding error only.
    # NaN lies on both sides. Several devices exchange these sums together with `var`.
    below = jnp.where(x >= mean, 0.0, weight).sum()
    above = jnp.where(x <= mean, 0.0, weight).sum()
    normalized = (x - mean) / (jnp.sqrt(var) + 1e-8)
    return jnp.where((below > 0) & (above > 0), normalized, 0.0)


def _mean_over_devices(
    sum_gradient: Callable[..., tuple[Any, Any]],
    axis_name: str,
    params: ArrayTree,
    batch: ArrayTree,
    weight: jax.Array,
) -> tuple[Any, Any]:
    """Adds the weighted sums of all devices in one all-reduce, for `mean_gradient`."""
    # Divided by the number of rows, because float16 would overflow.
    sums = sum_gradient(params, batch, weight, weight.size)
    total = jnp.sum(weight, dtype=jnp.float32) / weight.size
    flat, unravel = jax.flatten_util.ravel_pytree((sums, total))
    flat = jax.lax.psum(flat, axis_name)
    return unravel(flat / jnp.where(flat[-1] > 0, flat[-1], 1.0))[0]


def _sum_gradient(
    loss_fn: Callable[[Any, Any], tuple[jax.Array, ArrayTree]],
    params: ArrayTree,
    batch: ArrayTree,
    weight: jax.Array,
    divisor: jax.typing.ArrayLike,
    *,
    axis: int,
    microbatch_size: int | str | None,
) -> tuple[Any, Any]:
    """Differentiates the weighted sum of the losses of single rows over `divisor`."""
    num_microbatches = _count_microbatches(weight.shape[axis], microbatch_size)
    if any(jax.typeof(weight).sharding.spec):  # a scan cannot divide a sharded axis
        num_microbatches = 1
    sum_loss = _make_sum_loss(loss_fn, divisor, axis)
    policy = jax.checkpoint_policies.everything_saveable
    grad_fn = jax.grad(sum_loss, has_aux=True)
    saving_grad_fn = jax.grad(jax.checkpoint(sum_loss, policy=policy), has_aux=True)
    on_gpu, elsewhere, on_cpu = saving_grad_fn, grad_fn, {}
    if num_microbatches > 1:
        accumulate = functools.partial(_accumulate, num_microbatches, axis)
        if microbatch_size == "auto":
            on_cpu = {"cpu": functools.partial(accumulate, grad_fn)}
        else:
            on_gpu = functools.partial(accumulate, saving_grad_fn)
            elsewhere = functools.partial(accumulate, grad_fn)
    return jax.lax.platform_dependent(
        params, batch, weight, cuda=on_gpu, rocm=on_gpu, default=elsewhere, **on_cpu
    )


def _make_sum_loss(
    loss_fn: Callable[[Any, Any], tuple[jax.Array, ArrayTree]],
    divisor: jax.typing.ArrayLike,
    axis: int,
) -> Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]:
    """Makes the weighted sum of the losses and metrics of rows, over `divisor`."""

    def weighted_sum(x: jax.Array, weight: jax.Array) -> jax.Array:
        axes = tuple(range(-weight.ndim, 0))
        weight = jnp.broadcast_to(weight, x.shape)
        return jnp.sum(jnp.where(weight > 0, x, 0.0) * weight, axes) / divisor

    # Jitted, so that `jax.grad` and `jax.checkpoint` trace it once; inlined into the
    # program.
    @functools.partial(jax.jit, inline=True)
    def sum_loss(params: Any, batch: Any, weight: jax.Array) -> tuple[jax.Array, Any]:
        row_shape = weight.shape[:axis] + weight.shape[axis + 1 :]
        row_loss = functools.partial(_row_loss, loss_fn, row_shape)
        loss, metrics = jax.vmap(row_loss, (None, axis), axis)(params, batch)
        leaves, structure = jax.tree.flatten(metrics)
        if leaves:
            # One reduction for all metrics compiles faster than one for each.
            leaves = list(weighted_sum(jnp.stack(leaves), weight))
        return weighted_sum(loss, weight), structure.unflatten(leaves)

    return sum_loss


def _row_loss(
    loss_fn: Callable[[Any, Any], tuple[jax.Array, ArrayTree]],
    shape: tuple[int, ...],
    params: ArrayTree,
    row: ArrayTree,
) -> tuple[jax.Array, ArrayTree]:
    """Computes the loss of one row, and checks the shapes of the loss and metrics."""
    loss, metrics = loss_fn(params, row)
    _check_shape("loss", loss, shape)
    for path, metric in jax.tree.leaves_with_path(metrics):
        _check_shape(f"metrics{jax.tree_util.keystr(path)}", metric, shape)
    return loss, metrics


def _accumulate(
    num_microbatches: int,
    axis: int,
    grad_fn: Callable[..., tuple[Any, Any]],
    params: ArrayTree,
    batch: ArrayTree,
    weight: jax.Array,
) -> tuple[Any, Any]:
    """Sums the gradients and the metrics of microbatches."""
    # One sum of a flat array compiles faster than one sum per parameter.
    zeros, unravel = jax.flatten_util.ravel_pytree(
        jax.tree.map(
            lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)),
            params,
        )
    )

    def add(total: jax.Array, microbatch: Any) -> tuple[jax.Array, Any]:
        grads, metrics = grad_fn(params, *microbatch)
        return total + jax.flatten_util.ravel_pytree(grads)[0], metrics

    microbatches = jax.tree.map(
        lambda x: _divide(x, num_microbatches, axis), (batch, weight)
    )
    total, metrics = jax.lax.scan(add, zeros, microbatches)
    grads = jax.tree.map(lambda x, y: x.astype(y.dtype), unravel(total), params)
    return grads, jax.tree.map(lambda x: x.sum(0), metrics)


def _count_microbatches(num_rows: int, microbatch_size: int | str | None) -> int:
    """Returns the largest number of equal microbatches of at least this size."""
    if microbatch_size is None:
        return 1
    if microbatch_size == "auto":
        microbatch_size = _MICROBATCH_SIZE
    microbatch_size = checks.check_int("microbatch_size", microbatch_size)
    count = max(1, num_rows // microbatch_size)
    while num_rows % count:
        count -= 1
    return count


def _divide(x: jax.Array, count: int, axis: int) -> jax.Array:
    """Moves microbatches to a leading axis."""
    shape = jnp.shape(x)
    shape = *shape[:axis], count, shape[axis] // count, *shape[axis + 1 :]
    return jnp.moveaxis(jnp.reshape(x, shape), axis, 0)


def _check_divides(num_minibatches: int, num_items: int, items: str) -> None:
    """Raises unless the items can be divided into equal minibatches."""
    if num_items % num_minibatches:
        divisors = [x for x in range(1, num_items + 1) if num_items % x == 0]
        below = max(x for x in divisors if x <= num_minibatches)
        above = [x for x in divisors if x > num_minibatches][:1]
        nearest = f"are {below} and {above[0]}" if above else f"is {below}"
        raise ValueError(
            f"`num_minibatches` must divide the {num_items} {items}, got "
            f"{num_minibatches}; the nearest {nearest}."
        )


def _check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raises unless a row has one value, or one per step of a sequence."""
    if jnp.shape(value) != shape:
        kind = "one value per step of the sequence" if shape else "a scalar"
        raise ValueError(
            f"`{name}` of one row must be {kind}, of shape {shape}, got shape "
            f"{jnp.shape(value)}. A loss receives a single row without a batch axis; "
            "the caller computes the mean over the rows."
        )


def _scan(
    update_fn: Callable[[Any, Any], tuple[Any, Any]],
    init: ArrayTree,
    key: chex.PRNGKey,
    tree: ArrayTree,
    sizes: tuple[int, int, int],
    axis: int | None,
    lanes: tuple[Mesh, str] | None,
) -> tuple[Any, Any]:
    """Scans an update; `sizes` are minibatches, epochs, and items per device."""
    num_minibatches, num_epochs, num_items = sizes
    keys = prng.split(key, num_epochs)

    def make_order(keys: chex.PRNGKey) -> jax.Array:
        if lanes is not None:
            device = jax.lax.axis_index(lanes[1])
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, device)
        order = jax.vmap(lambda key: permutation(key, num_items))(keys)
        return order.reshape(num_epochs * num_minibatches, -1)  # M per epoch

    def flatten(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.collapse(jnp.asarray(x), 0, 2), tree)

    def take(tree: Any, items: jax.Array) -> Any:
        return jax.tree.map(
            lambda x: jnp.take(x, items, axis=axis or 0, mode="clip"), tree
        )

    if lanes is not None:
        first, second = PartitionSpec(lanes[1]), PartitionSpec(None, lanes[1])
        rows = second if axis == 1 else first
        on_devices = functools.partial(jax.shard_map, mesh=lanes[0], check_vma=False)
        make_order = on_devices(make_order, in_specs=PartitionSpec(), out_specs=second)
        flatten = on_devices(flatten, in_specs=second, out_specs=first)
        take = on_devices(take, in_specs=(rows, first), out_specs=rows)
    order = make_order(keys)
    if axis is None:
        tree = flatten(tree)

    def step(carry: Any, items: jax.Array) -> tuple[Any, Any]:
        return update_fn(carry, take(tree, items))

    return jax.lax.scan(step, init, order)


_scan_jitted = jax.jit(_scan, static_argnums=(0, 4, 5, 6))


def _is_sharded(x: Any) -> bool:
    """Returns whether an array is known to be divided among devices."""
    is_known = isinstance(x, jax.Array) and checks.is_concrete(x)
    return is_known and not x.sharding.is_fully_replicated


def _add(x: jax.Array, y: jax.Array, n: int) -> jax.Array:
    """Returns (x + y) % n of uint32, where x < n."""
    total = x + y % n
    return jnp.minimum(total, total - n)  # uint32 below 0 wraps around


def _hash(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _count_items(tree: ArrayTree, axis: int | None) -> int:
    """Counts the items to shuffle; raises if the leaves disagree."""
    first, last = (0, 2) if axis is None else (axis, axis + 1)
    counts = {jnp.shape(x)[first:last] for x in jax.tree.leaves(tree)}
    if len(counts) != 1 or len(min(counts)) != last - first or 0 in min(counts):
        axes = "`[T, ...]`" if axis == 0 else "`[T, B, ...]`"
        shapes = sorted({jnp.shape(x) for x in jax.tree.leaves(tree)})
        got = ", ".join(map(str, shapes)) or "none"
        raise ValueError(
            f"`tree` must have leaves {axes} with equal, nonempty shuffled axes, got "
            f"{got}."
        )
    return math.prod(min(counts))

"""Minibatches: every row once per epoch, whole lanes, masks kept; random orders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import raw
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rollout

T, B = 6, 8
IDS = np.arange(T * B, dtype=np.int32).reshape(T, B)
TREE = {"id": IDS, "row": np.stack([IDS, IDS + 1000], axis=-1), "mask": IDS % 5 > 0}


def split(tree, num_minibatches, num_epochs=1, **options):
    """All minibatches, stacked."""

    @jax.jit
    def scan(key, tree):
        step = lambda carry, minibatch: (carry, minibatch)  # noqa: E731
        return rollout.scan_minibatches(
            step,
            (),
            key,
            tree,
            num_minibatches=num_minibatches,
            num_epochs=num_epochs,
            **options,
        )[1]

    return jax.device_get(scan(jax.random.key(0), tree))


def test_every_row_is_in_one_minibatch_of_each_epoch():
    minibatches = split(TREE, 4, 3)
    assert minibatches["id"].shape == (12, 12)
    assert minibatches["row"].shape == (12, 12, 2)
    epochs = minibatches["id"].reshape(3, -1)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(T * B))
    assert (epochs[0] != epochs[1]).any()
    assert (epochs[0] != np.arange(T * B)).any()
    np.testing.assert_array_equal(minibatches["row"][..., 1], minibatches["id"] + 1000)
    np.testing.assert_array_equal(minibatches["mask"], minibatches["id"] % 5 > 0)


def test_whole_lanes_stay_in_the_order_of_time():
    start = np.arange(B)[None]  # one row for each lane
    tree, first = split((TREE, start), 2, 2, axis=1)
    ids = tree["id"]
    assert ids.shape == (4, T, B // 2)
    assert tree["row"].shape == (4, T, B // 2, 2)
    np.testing.assert_array_equal(ids // B, np.arange(T)[None, :, None] + 0 * ids)
    np.testing.assert_array_equal(ids[:, :1] % B, first)
    for epoch in ids[:, 0].reshape(2, -1):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(B))


def test_leading_axis_of_any_tree_is_shuffled():
    minibatches = split(np.arange(10), 5, axis=0)
    assert minibatches.shape == (5, 2)
    np.testing.assert_array_equal(np.sort(minibatches.ravel()), np.arange(10))


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_each_device_shuffles_its_own_share(axis):
    """A plain loop: the order of device d is the permutation of the key for d."""
    num_devices, num_minibatches, num_epochs = 2, 2, 3
    mesh = jax.make_mesh((2,), ("lanes",), devices=jax.devices()[:2])
    tree = IDS if axis != 0 else IDS.ravel()
    options = {"axis": axis, "mesh": mesh}
    got = split(tree, num_minibatches, num_epochs, **options)

    # Rows of each device: half of the lanes, or half of the leading axis.
    shares = np.split(tree, num_devices, axis=0 if axis == 0 else 1)
    if axis is None:
        shares = [share.ravel() for share in shares]
    expected = []
    for key in jax.random.split(jax.random.key(0), num_epochs):
        parts = []
        for device, share in enumerate(shares):
            size = share.shape[axis or 0]
            order = rollout.permutation(jax.random.fold_in(key, device), size)
            part = np.take(share, order, axis=axis or 0)
            parts.append(np.split(part, num_minibatches, axis=axis or 0))
        for minibatch in zip(*parts, strict=True):
            expected.append(np.concatenate(minibatch, axis=axis or 0))
    np.testing.assert_array_equal(got, expected)
    for x in (None, jax.make_mesh((1,), ("lanes",), devices=jax.devices()[:1])):
        single = split(tree, num_minibatches, num_epochs, axis=axis, mesh=x)
        np.testing.assert_array_equal(single, split(tree, 2, 3, axis=axis))


def test_sharded_rows_need_the_mesh():
    mesh = jax.make_mesh(
        (2,), ("lanes",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,)
    )
    rows = jax.device_put(IDS, NamedSharding(mesh, P(None, "lanes")))
    step = lambda carry, minibatch: (carry, minibatch)  # noqa: E731
    options = {"num_minibatches": 2, "num_epochs": 1}
    scan = functools.partial(rollout.scan_minibatches, step, (), jax.random.key(0))
    with pytest.raises(ValueError, match="`mesh` must be given for a `tree`"):
        scan(rows, **options)
    ids = scan(rows, **options, mesh=mesh)[1]
    assert ids.sharding.spec == P(None, "lanes")
    np.testing.assert_array_equal(np.sort(np.ravel(ids)), np.arange(T * B))
    with pytest.raises(ValueError, match=r"`num_envs` must .* 2 devices .*3.*2 or 4"):
        scan(IDS[:, :3], **options, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"the 24 items of each device, got 7.*are 6 and 8\."
    ):
        scan(rows, num_minibatches=7, mesh=mesh)


def test_keys_go_with_their_rows_and_none_stays_none():
    keys = jax.random.split(jax.random.key(2), (T, B))
    got = split({"id": IDS, "key": keys, "none": None}, 4)
    assert got["none"] is None
    want = np.asarray(raw(keys)).reshape(T * B, -1)[got["id"]]
    np.testing.assert_array_equal(raw(got["key"]), want)


def test_one_minibatch_is_in_memory_beside_the_rows():
    rows = np.zeros((16, 16, 2048), np.float32)
    step = lambda total, x: (total + jnp.tanh(x).sum(axis=0), ())  # noqa: E731
    scan = lambda key, rows: rollout.scan_minibatches(  # noqa: E731
        step, jnp.zeros(2048), key, rows, num_minibatches=8, num_epochs=4
    )
    memory = jax.jit(scan).lower(jax.random.key(0), rows).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2.5 * rows.nbytes / 8


def test_order_of_an_epoch_is_the_permutation_of_its_key():
    draw = jax.vmap(lambda key: rollout.permutation(key, T * B))
    want = jax.jit(lambda key: draw(jax.random.split(key, 2)))(jax.random.key(0))
    np.testing.assert_array_equal(split(TREE, 4, 2)["id"].reshape(2, -1), want)


# One item, a square, a product, a power of two, and a prime, which sorts.
@pytest.mark.parametrize("n", [1, 64, 60, 4096, 97])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_permutation_has_every_number_once_and_differs_by_key(n, impl):
    keys = jax.random.split(jax.random.key(1, impl=impl), 8)
    draw = jax.jit(jax.vmap(lambda key: rollout.permutation(key, n)))
    orders = np.asarray(draw(keys))
    assert orders.dtype == np.int32
    np.testing.assert_array_equal(np.sort(orders), np.arange(n) + 0 * orders)
    assert len(np.unique(orders, axis=0)) == (1 if n == 1 else 8)


def statistics(orders, b):
    """Statistics of `[K, n]` orders, each about standard normal if all are as likely.

    Their means and variances are exact, for orders that are drawn evenly, but for those
    whose variance is taken from the `K` samples.
    """
    num, n = orders.shape
    every = np.arange(n)

    def z(samples, mean, variance=None):
        variance = samples.var() if variance is None else variance
        return (samples.mean() - mean) / np.sqrt(variance / num)

    def chi(counts, mean, freedom):
        return (((counts - mean) ** 2 / mean).sum() - freedom) / np.sqrt(2 * freedom)

    found = {"fixed points": z((orders == every).sum(axis=1), 1, 1)}
    # Position by item: a matrix whose rows and columns have known sums.
    counts = np.zeros((n, n), int)
    np.add.at(counts, (np.broadcast_to(every, orders.shape), orders), 1)
    found["positions"] = chi(counts, num / n, (n - 1) ** 2)
    for apart in (1, 2, b):  # pairs at these distances that become neighbours, or rows
        distance = abs(orders[:, apart:] - orders[:, :-apart])
        for new in (1, b):
            mean = (n - apart) * 2 * (n - new) / (n * (n - 1))
            found[f"{apart} to {new}"] = z((distance == new).sum(axis=1), mean)
    quarter = n // 4  # the mean of a minibatch, and its variance without replacement
    means = orders[:, :quarter].mean(axis=1)
    variance = (n * n - 1) / 12 / quarter * (n - quarter) / (n - 1)
    found["minibatch"] = z(means, (n - 1) / 2, variance)
    found["spread"] = z((means - (n - 1) / 2) ** 2, variance)
    found["successive keys"] = z((orders[1:] == orders[:-1]).sum(axis=1), 1, 1)
    return found


def is_odd(order):
    """Whether the number of swaps that sort it is odd, by its cycles."""
    seen, num_swaps = set(), 0
    for start in range(len(order)):
        item = start
        while item not in seen:
            seen.add(item)
            item = int(order[item])
            num_swaps += item != start
    return bool(num_swaps % 2)


@pytest.mark.parametrize("n", [9, 225])
def test_half_of_the_permutations_are_odd(n):
    keys = jax.random.split(jax.random.key(n), 256)
    draw = jax.jit(jax.vmap(lambda key: rollout.permutation(key, n)))
    num_odd = sum(map(is_odd, np.asarray(draw(keys))))
    assert abs(num_odd - 128) < 5 * 8  # five standard deviations


@pytest.mark.parametrize(
    ("n", "b", "num"),
    [
        (64, 8, 40_000),
        (100, 10, 20_000),
        pytest.param(1000, 40, 4_000, marks=pytest.mark.slow),
        pytest.param(1024, 32, 4_000, marks=pytest.mark.slow),
    ],
)
def test_permutation_is_as_random_as_one_that_sorts(n, b, num):
    keys = jax.random.split(jax.random.key(2), num)
    draw = jax.jit(jax.vmap(lambda key: rollout.permutation(key, n)))
    found = statistics(np.asarray(draw(keys)), b)
    # A normal number is beyond 5 once in 1.7 million draws.
    assert max(map(abs, found.values())) < 5, found

"""Tests of minibatches and of random permutations."""

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
    """Returns all minibatches, stacked."""

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


def test_epoch_contains_every_row_once():
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


def test_lanes_keep_their_time_order():
    start = np.arange(B)[None]  # one row for each lane
    tree, first = split((TREE, start), 2, 2, axis=1)
    ids = tree["id"]
    assert ids.shape == (4, T, B // 2)
    assert tree["row"].shape == (4, T, B // 2, 2)
    np.testing.assert_array_equal(ids // B, np.arange(T)[None, :, None] + 0 * ids)
    np.testing.assert_array_equal(ids[:, :1] % B, first)
    for epoch in ids[:, 0].reshape(2, -1):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(B))


def test_leading_axis_is_shuffled():
    minibatches = split(np.arange(10), 5, axis=0)
    assert minibatches.shape == (5, 2)
    np.testing.assert_array_equal(np.sort(minibatches.ravel()), np.arange(10))


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_each_device_shuffles_its_rows(axis):
    """Device d uses the permutation of its key, as in a plain loop."""
    num_devices, num_minibatches, num_epochs = 2, 2, 3
    mesh = jax.make_mesh((2,), ("lanes",), devices=jax.devices()[:2])
    tree = IDS if axis != 0 else IDS.ravel()
    options = {"axis": axis, "mesh": mesh}
    got = split(tree, num_minibatches, num_epochs, **options)

    # Rows of each device: half of the lanes, or half of the leading axis.
    rows_by_device = np.split(tree, num_devices, axis=0 if axis == 0 else 1)
    if axis is None:
        rows_by_device = [device_rows.ravel() for device_rows in rows_by_device]
    expected = []
    for key in jax.random.split(jax.random.key(0), num_epochs):
        shuffled_by_device = []
        for device, device_rows in enumerate(rows_by_device):
            size = device_rows.shape[axis or 0]
            order = rollout.permutation(jax.random.fold_in(key, device), size)
            shuffled = np.take(device_rows, order, axis=axis or 0)
            shuffled_by_device.append(
                np.split(shuffled, num_minibatches, axis=axis or 0)
            )
        for minibatch in zip(*shuffled_by_device, strict=True):
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


def test_keys_and_none_are_valid_leaves():
    keys = jax.random.split(jax.random.key(2), (T, B))
    got = split({"id": IDS, "key": keys, "none": None}, 4)
    assert got["none"] is None
    want = np.asarray(raw(keys)).reshape(T * B, -1)[got["id"]]
    np.testing.assert_array_equal(raw(got["key"]), want)


def test_only_one_minibatch_is_materialized():
    rows = np.zeros((16, 16, 2048), np.float32)
    step = lambda total, x: (total + jnp.tanh(x).sum(axis=0), ())  # noqa: E731
    scan = lambda key, rows: rollout.scan_minibatches(  # noqa: E731
        step, jnp.zeros(2048), key, rows, num_minibatches=8, num_epochs=4
    )
    memory = jax.jit(scan).lower(jax.random.key(0), rows).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2.5 * rows.nbytes / 8


def test_order_is_the_permutation_of_the_epoch_key():
    permute = jax.vmap(lambda key: rollout.permutation(key, T * B))
    want = jax.jit(lambda key: permute(jax.random.split(key, 2)))(jax.random.key(0))
    np.testing.assert_array_equal(split(TREE, 4, 2)["id"].reshape(2, -1), want)


# The lengths are 1, a square, a product, a power of two and a prime.
@pytest.mark.parametrize("n", [1, 64, 60, 4096, 97])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_permutation_contains_every_number_once(n, impl):
    keys = jax.random.split(jax.random.key(1, impl=impl), 8)
    permute = jax.jit(jax.vmap(lambda key: rollout.permutation(key, n)))
    orders = np.asarray(permute(keys))
    assert orders.dtype == np.int32
    np.testing.assert_array_equal(np.sort(orders), np.arange(n) + 0 * orders)
    assert len(np.unique(orders, axis=0)) == (1 if n == 1 else 8)


def statistics(orders, b):
    """Computes scores of `[K, n]` orders, standard normal for uniform permutations.

    The means are exact. The variances are exact or estimated from the `K` samples.
    """
    num, n = orders.shape
    index = np.arange(n)

    def z(samples, mean, variance=None):
        variance = samples.var() if variance is None else variance
        return (samples.mean() - mean) / np.sqrt(variance / num)

    def chi(counts, mean, freedom):
        return (((counts - mean) ** 2 / mean).sum() - freedom) / np.sqrt(2 * freedom)

    scores = {"fixed points": z((orders == index).sum(axis=1), 1, 1)}
    # Counts of positions by item: the sums of rows and columns are fixed.
    counts = np.zeros((n, n), int)
    np.add.at(counts, (np.broadcast_to(index, orders.shape), orders), 1)
    scores["positions"] = chi(counts, num / n, (n - 1) ** 2)
    for old_distance in (1, 2, b):  # pairs of items at two distances
        distance = abs(orders[:, old_distance:] - orders[:, :-old_distance])
        for new_distance in (1, b):
            mean = (n - old_distance) * 2 * (n - new_distance) / (n * (n - 1))
            scores[f"{old_distance} to {new_distance}"] = z(
                (distance == new_distance).sum(axis=1), mean
            )
    quarter = n // 4  # mean of a minibatch without replacement
    means = orders[:, :quarter].mean(axis=1)
    variance = (n * n - 1) / 12 / quarter * (n - quarter) / (n - 1)
    scores["minibatch"] = z(means, (n - 1) / 2, variance)
    scores["spread"] = z((means - (n - 1) / 2) ** 2, variance)
    scores["successive keys"] = z((orders[1:] == orders[:-1]).sum(axis=1), 1, 1)
    return scores


def is_odd(order):
    """Returns whether the permutation has odd parity, from its cycles."""
    visited, num_swaps = set(), 0
    for start in range(len(order)):
        item = start
        while item not in visited:
            visited.add(item)
            item = int(order[item])
            num_swaps += item != start
    return bool(num_swaps % 2)


@pytest.mark.parametrize("n", [9, 225])
def test_half_of_the_permutations_are_odd(n):
    keys = jax.random.split(jax.random.key(n), 256)
    permute = jax.jit(jax.vmap(lambda key: rollout.permutation(key, n)))
    num_odd = sum(map(is_odd, np.asarray(permute(keys))))
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
def test_permutation_statistics_are_normal(n, b, num):
    keys = jax.random.split(jax.random.key(2), num)
    permute = jax.jit(jax.vmap(lambda key: rollout.permutation(key, n)))
    scores = statistics(np.asarray(permute(keys)), b)
    # A normal number is above 5 with probability 1 in 1.7 million.
    assert max(map(abs, scores.values())) < 5, scores

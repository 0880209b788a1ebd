"""Minibatches: every row once per epoch, whole lanes, masks kept."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import collect, raw

import rollout

T, B = 6, 8
IDS = np.arange(T * B, dtype=np.int32).reshape(T, B)
TREE = {"id": IDS, "row": np.stack([IDS, IDS + 1000], axis=-1), "mask": IDS % 5 > 0}


def split(tree, *counts, **options):
    """All minibatches, stacked."""

    @jax.jit
    def scan(key, tree):
        step = lambda carry, minibatch: (carry, minibatch)  # noqa: E731
        return rollout.scan_minibatches(step, (), key, tree, *counts, **options)[1]

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
        step, jnp.zeros(2048), key, rows, 8, epochs=4
    )
    memory = jax.jit(scan).lower(jax.random.key(0), rows).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2.5 * rows.nbytes / 8


def test_trajectory_is_scanned_over():
    trajectory = collect("count")[1]
    step = lambda total, rows: (total + rows.reward.sum(), ())  # noqa: E731
    scan = jax.jit(lambda *x: rollout.scan_minibatches(step, 0.0, *x, 8)[0])
    total = scan(jax.random.key(1), trajectory)
    assert total == np.asarray(trajectory.reward).sum()

"""Minibatches: every row once per epoch, whole lanes, masks kept."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import collect

import rollout

T, B = 6, 8
IDS = jnp.arange(T * B).reshape(T, B)
TREE = {"id": IDS, "row": jnp.stack([IDS, IDS + 1000], axis=-1), "mask": IDS % 5 > 0}


def test_every_row_is_in_one_minibatch_of_each_epoch():
    key = jax.random.key(0)
    split = jax.jit(lambda key: rollout.minibatches(key, TREE, 4, 3))(key)
    assert split["id"].shape == (12, 12)
    assert split["row"].shape == (12, 12, 2)
    epochs = np.asarray(split["id"]).reshape(3, -1)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(T * B))
    assert (epochs[0] != epochs[1]).any()
    assert (epochs[0] != np.arange(T * B)).any()
    np.testing.assert_array_equal(split["row"][..., 1], split["id"] + 1000)
    np.testing.assert_array_equal(split["mask"], split["id"] % 5 > 0)


def test_whole_lanes_stay_in_the_order_of_time():
    split = rollout.minibatches(jax.random.key(0), TREE, 2, 2, axis=1)
    ids = np.asarray(split["id"])
    assert ids.shape == (4, T, B // 2)
    assert split["row"].shape == (4, T, B // 2, 2)
    np.testing.assert_array_equal(ids // B, np.arange(T)[None, :, None] + 0 * ids)
    for epoch in ids[:, 0].reshape(2, -1):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(B))


def test_leading_axis_of_any_tree_is_shuffled():
    split = rollout.minibatches(jax.random.key(0), jnp.arange(10), 5, axis=0)
    assert split.shape == (5, 2)
    np.testing.assert_array_equal(np.sort(split.ravel()), np.arange(10))


def test_trajectory_is_scanned_over():
    trajectory = collect("count")[1]
    batches = rollout.minibatches(jax.random.key(1), trajectory, 8)
    total = jax.lax.scan(lambda acc, b: (acc + b.reward.sum(), None), 0.0, batches)[0]
    assert total == trajectory.reward.sum()

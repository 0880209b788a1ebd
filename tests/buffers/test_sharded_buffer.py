"""A buffer sharded over devices, compared with the same buffer on one device."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_collector, quick_jit

import rollout
from rollout import buffers

NUM_ENVS = 8
NUM_SLOTS = 6
NUM_DEVICES = 4


def make_mesh():
    return jax.make_mesh(
        (NUM_DEVICES,), ("lanes",), devices=jax.devices()[:NUM_DEVICES]
    )


def make_buffers():
    plain = buffers.ReplayBuffer(NUM_SLOTS * NUM_ENVS, NUM_ENVS)
    return plain, buffers.shard(plain, make_mesh())


def make_state(buffer, num_rows=NUM_SLOTS, mask=None):
    """Returns a state in which every row stores its row number."""
    number = np.arange(num_rows * NUM_ENVS, dtype=np.int32).reshape(num_rows, NUM_ENVS)
    flags = np.zeros((num_rows, NUM_ENVS), bool)
    rows = {"number": number, "terminated": flags, "truncated": flags}
    if mask is not None:
        rows["mask"] = mask
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))
    return quick_jit(buffer.add)(state, rows)


def test_sharded_state_equals_plain_state():
    plain, sharded = make_buffers()
    # The sizes of lanes differ.
    mask = np.arange(NUM_ENVS) % 3 + np.arange(NUM_SLOTS)[:, None] < NUM_SLOTS
    chex.assert_trees_all_equal(
        make_state(sharded, NUM_SLOTS, mask), make_state(plain, NUM_SLOTS, mask)
    )
    chex.assert_trees_all_equal(
        make_state(sharded, NUM_SLOTS + 3), make_state(plain, NUM_SLOTS + 3)
    )
    empty = sharded.init({"number": jnp.zeros((NUM_ENVS, 2))})
    shards = empty.experience["number"].addressable_shards
    assert {x.data.shape for x in shards} == {(NUM_SLOTS, NUM_ENVS // NUM_DEVICES, 2)}
    assert {x.data.shape for x in empty.size.addressable_shards} == {
        (NUM_ENVS // NUM_DEVICES,)
    }


def test_device_samples_from_its_lanes():
    plain, sharded = make_buffers()
    state = make_state(sharded)
    batch = sharded.sample(state, jax.random.key(0), 64)
    np.testing.assert_array_equal(batch.experience["number"], batch.indices)
    device = np.asarray(batch.indices) % NUM_ENVS // (NUM_ENVS // NUM_DEVICES)
    np.testing.assert_array_equal(
        device, np.repeat(np.arange(NUM_DEVICES), 64 // NUM_DEVICES)
    )
    np.testing.assert_array_equal(batch.weights, 1.0)
    # The devices sample different rows, as numbered within each device.
    num_lanes = NUM_ENVS // NUM_DEVICES
    slot, lane = np.divmod(batch.indices, NUM_ENVS)
    local_rows = (slot * num_lanes + lane % num_lanes).reshape(NUM_DEVICES, -1)
    assert len(np.unique(local_rows, axis=0)) == NUM_DEVICES
    sequences = sharded.sample_sequences(state, jax.random.key(0), 16, 3)
    first = np.asarray(sequences.indices)
    want = first + NUM_ENVS * np.minimum(
        np.arange(3)[:, None], NUM_SLOTS - 1 - first // NUM_ENVS
    )
    np.testing.assert_array_equal(sequences.experience["number"], want)
    assert bool(sharded.can_sample(state, NUM_SLOTS * NUM_ENVS))
    assert not bool(sharded.can_sample(make_state(plain, 1), 2 * NUM_ENVS))


def test_sharded_buffer_keeps_options():
    """Samples n-step returns and stacked frames with a traced discount."""
    plain = buffers.ReplayBuffer(
        NUM_SLOTS * NUM_ENVS, NUM_ENVS, n_step=2, gamma=0.5, stack=2
    )
    sharded = buffers.shard(plain, make_mesh())
    flags = np.zeros((NUM_SLOTS, NUM_ENVS), bool)
    number = np.arange(NUM_SLOTS * NUM_ENVS, dtype=np.float32).reshape(
        NUM_SLOTS, NUM_ENVS
    )
    rows = {"obs": number, "reward": number, "terminated": flags, "truncated": flags}
    state = sharded.init(jax.tree.map(lambda x: x[0], rows))
    state = quick_jit(sharded.add)(state, rows)

    @quick_jit
    def sample(gamma):
        return sharded.replace(gamma=gamma).sample(state, jax.random.key(0), 32)

    batch = sample(0.25)
    slot, first = batch.indices // NUM_ENVS, number.ravel()[batch.indices]
    # The newest row has no next row.
    second = np.where(slot + 1 < NUM_SLOTS, first + NUM_ENVS, 0.0)
    np.testing.assert_allclose(batch.experience["reward"], first + 0.25 * second)
    want = np.where(slot + 1 < NUM_SLOTS, 0.25**2, 0.25)
    np.testing.assert_allclose(batch.discount, want)
    previous = np.where(slot > 0, first - NUM_ENVS, first)
    np.testing.assert_array_equal(
        batch.experience["obs"], np.stack([previous, first], axis=1)
    )


@pytest.mark.slow
def test_weights_correct_for_unequal_devices():
    _, sharded = make_buffers()
    mask = np.arange(NUM_SLOTS)[:, None] < np.array([6, 6, 3, 3, 2, 1, 1, 1])
    state = make_state(sharded, mask=mask)
    num_samples = 4096 * NUM_DEVICES
    batch = sharded.sample(state, jax.random.key(1), num_samples)
    probability = (
        np.bincount(batch.indices, batch.weights, minlength=NUM_SLOTS * NUM_ENVS)
        / num_samples
    )
    stored = np.asarray(mask).ravel()
    assert not probability[~stored].any()
    # A row has at most half of the 4,096 samples per device: three deviations are 6 %.
    np.testing.assert_allclose(probability[stored], 1 / stored.sum(), rtol=0.15)


@pytest.mark.slow
def test_rows_stay_on_their_device():
    _, sharded = make_buffers()
    state = make_state(sharded)
    rows = jax.tree.map(lambda x: x[:2], state.experience)
    key = jax.random.key(0)

    def collectives(program):
        text = jax.jit(program).lower(state).compile().as_text()
        return re.findall(r"= (\S+) (?:all-|collective-|reduce-scatter)", text)

    assert collectives(lambda state: sharded.add(state, rows)) == []
    # The only collective sums the number of rows.
    assert set(collectives(lambda state: sharded.sample(state, key, 16))) == {"f32[]"}


@pytest.mark.slow
def test_collector_folds_into_sharded_buffer():
    def fold_rows(collector, buffer):
        carry = collector.init(jax.random.key(0))
        empty = buffer.init(collector)
        return collector.fold_steps(
            carry, None, buffer.add, empty, num_steps=NUM_SLOTS + 1
        )[1]

    collector = make_collector("count", NUM_ENVS)
    plain, sharded = make_buffers()
    got = fold_rows(rollout.shard(collector, make_mesh()), sharded)
    chex.assert_trees_all_equal(got, fold_rows(collector, plain))

"""A buffer over devices, against the same one on one device."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_collector, quick_jit

import rollout
from rollout import buffers

B = 8
N = 6
D = 4


def make_mesh():
    return jax.make_mesh((D,), ("lanes",), devices=jax.devices()[:D])


def make_pair():
    plain = buffers.ReplayBuffer(N * B, B)
    return plain, buffers.shard(plain, make_mesh())


def filled(buffer, num_rows=N, mask=None):
    """A buffer in which every row holds its slot and its lane."""
    number = np.arange(num_rows * B, dtype=np.int32).reshape(num_rows, B)
    flags = np.zeros((num_rows, B), bool)
    rows = {"number": number, "terminated": flags, "truncated": flags}
    if mask is not None:
        rows["mask"] = mask
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))
    return quick_jit(buffer.add)(state, rows)


def test_state_has_the_bits_of_one_device_and_is_sharded_from_the_start():
    plain, sharded = make_pair()
    mask = np.arange(B) % 3 + np.arange(N)[:, None] < N  # lanes drift apart
    chex.assert_trees_all_equal(filled(sharded, N, mask), filled(plain, N, mask))
    chex.assert_trees_all_equal(filled(sharded, N + 3), filled(plain, N + 3))
    empty = sharded.init({"number": jnp.zeros((B, 2))})
    shards = empty.experience["number"].addressable_shards
    assert {x.data.shape for x in shards} == {(N, B // D, 2)}
    assert {x.data.shape for x in empty.size.addressable_shards} == {(B // D,)}


def test_device_draws_its_share_from_its_own_lanes():
    plain, sharded = make_pair()
    state = filled(sharded)
    batch = sharded.sample(state, jax.random.key(0), 64)
    np.testing.assert_array_equal(batch.experience["number"], batch.indices)
    device = np.asarray(batch.indices) % B // (B // D)
    np.testing.assert_array_equal(device, np.repeat(np.arange(D), 64 // D))
    np.testing.assert_array_equal(batch.weights, 1.0)
    pieces = sharded.sample_sequences(state, jax.random.key(0), 16, 3)
    first = np.asarray(pieces.indices)
    want = first + B * np.minimum(np.arange(3)[:, None], N - 1 - first // B)
    np.testing.assert_array_equal(pieces.experience["number"], want)
    assert bool(sharded.can_sample(state, N * B))
    assert not bool(sharded.can_sample(filled(plain, 1), 2 * B))


def test_options_of_a_sharded_buffer_are_those_of_the_plain_one():
    """A sample of n steps and stacked frames, with a traced discount."""
    plain = buffers.ReplayBuffer(N * B, B, n_step=2, gamma=0.5, stack=2)
    sharded = buffers.shard(plain, make_mesh())
    flags = np.zeros((N, B), bool)
    number = np.arange(N * B, dtype=np.float32).reshape(N, B)
    rows = {"obs": number, "reward": number, "terminated": flags, "truncated": flags}
    state = sharded.init(jax.tree.map(lambda x: x[0], rows))
    state = quick_jit(sharded.add)(state, rows)

    @quick_jit
    def draw(gamma):
        return sharded.replace(gamma=gamma).sample(state, jax.random.key(0), 32)

    batch = draw(0.25)
    slot, first = batch.indices // B, number.ravel()[batch.indices]
    second = np.where(slot + 1 < N, first + B, 0.0)  # there is no row after the last
    np.testing.assert_allclose(batch.experience["reward"], first + 0.25 * second)
    want = np.where(slot + 1 < N, 0.25**2, 0.25)
    np.testing.assert_allclose(batch.discount, want)
    before = np.where(slot > 0, first - B, first)
    np.testing.assert_array_equal(
        batch.experience["obs"], np.stack([before, first], axis=1)
    )


@pytest.mark.slow
def test_weights_make_the_draw_even_where_devices_hold_unlike_numbers():
    _, sharded = make_pair()
    mask = np.arange(N)[:, None] < np.array([6, 6, 3, 3, 2, 1, 1, 1])
    state = filled(sharded, mask=mask)
    num_samples = 4096 * D
    batch = sharded.sample(state, jax.random.key(1), num_samples)
    chance = np.bincount(batch.indices, batch.weights, minlength=N * B) / num_samples
    stored = np.asarray(mask).ravel()
    assert not chance[~stored].any()
    # Of a device's 4,096 draws a row gets at most half: three deviations are 6 %.
    np.testing.assert_allclose(chance[stored], 1 / stored.sum(), rtol=0.15)


@pytest.mark.slow
def test_rows_stay_on_their_device():
    _, sharded = make_pair()
    state = filled(sharded)
    rows = jax.tree.map(lambda x: x[:2], state.experience)
    key = jax.random.key(0)

    def sent(program):
        text = jax.jit(program).lower(state).compile().as_text()
        return re.findall(r"= (\S+) (?:all-|collective-|reduce-scatter)", text)

    assert sent(lambda state: sharded.add(state, rows)) == []
    # Only the number of rows is summed.
    assert set(sent(lambda state: sharded.sample(state, key, 16))) == {"f32[]"}


@pytest.mark.slow
def test_collector_folds_into_it():
    def fold(collector, buffer):
        carry = collector.init(jax.random.key(0))
        empty = buffer.init(collector)
        return collector.fold_steps(carry, None, buffer.add, empty, num_steps=N + 1)[1]

    collector = make_collector("count", B)
    plain, sharded = make_pair()
    got = fold(rollout.shard(collector, make_mesh()), sharded)
    chex.assert_trees_all_equal(got, fold(collector, plain))

"""The uniform replay buffer, against a slow model: one deque per lane."""

import collections
import functools

import jax
import numpy as np
import pytest
from cases import make_collector, quick_jit
from flax import struct
from scipy import stats as scipy_stats

from rollout import buffers


@struct.dataclass(kw_only=True)
class Row:
    """Every leaf says the same number, so that one that slips shows."""

    number: jax.Array
    pair: jax.Array
    byte: jax.Array
    mask: jax.Array


def encode(number, mask):
    number = np.asarray(number)
    return Row(
        number=number.astype(np.int32),
        pair=np.stack([number, -number], axis=-1).astype(np.float32),
        byte=(number % 251).astype(np.uint8),
        mask=np.asarray(mask, bool),
    )


def decode(rows):
    number = np.asarray(rows.number)
    np.testing.assert_array_equal(rows.pair[..., 0], number)
    np.testing.assert_array_equal(rows.pair[..., 1], -number)
    np.testing.assert_array_equal(rows.byte, number % 251)
    return number


class Model:
    """The rows that the buffer must hold, in plain Python."""

    def __init__(self, num_slots, num_envs):
        self.lanes = [collections.deque(maxlen=num_slots) for _ in range(num_envs)]
        self.next_number = 1

    def make_chunk(self, num_rows):
        shape = (num_rows, len(self.lanes))
        size = num_rows * len(self.lanes)
        number = self.next_number + np.arange(size).reshape(shape)
        self.next_number += size
        return number

    def add(self, number, mask):
        for row, flags in zip(number, mask, strict=True):
            for lane, value, flag in zip(self.lanes, row, flags, strict=True):
                if flag:
                    lane.append(value)


@functools.cache
def programs(num_slots, num_envs):
    buffer = buffers.ReplayBuffer(num_slots * num_envs, num_envs)
    return buffer, jax.jit(buffer.add), jax.jit(buffer.sample, static_argnums=2)


def start(num_slots, num_envs):
    row = encode(np.zeros(num_envs, int), np.ones(num_envs, bool))
    buffer = programs(num_slots, num_envs)[0]
    return buffer.init(row), Model(num_slots, num_envs)


def check(state, model):
    """Every row of every lane, oldest to newest."""
    held = decode(state.experience)
    num_slots = held.shape[0]
    for lane, want in enumerate(model.lanes):
        size, head = int(state.size[lane]), int(state.head[lane])
        slots = (head - size + np.arange(size)) % num_slots
        np.testing.assert_array_equal(held[slots, lane], list(want))


def add(state, model, num_rows, mask=None):
    num_slots, num_envs = state.experience.number.shape
    number = model.make_chunk(num_rows)
    mask = np.ones(number.shape, bool) if mask is None else mask
    model.add(number, mask)
    return programs(num_slots, num_envs)[1](state, encode(number, mask))


# Three lanes for every length, one lane for those that are written in other ways.
@pytest.mark.parametrize(
    ("num_rows", "num_envs"),
    [(1, 3), (2, 3), (5, 3), (7, 3), (17, 3), (1, 1), (5, 1)],
)
def test_chunks_are_held_over_exact_fill_one_past_and_many_wraps(num_rows, num_envs):
    num_slots = 7  # coprime to all chunks but its own length
    state, model = start(num_slots, num_envs)
    for _ in range(10):
        state = add(state, model, num_rows)
        check(state, model)
    assert (state.size == num_slots).all()


def test_step_is_a_chunk_of_one_row():
    state, model = start(5, 3)
    buffer, add_jit, _ = programs(5, 3)
    for _ in range(7):
        number = model.make_chunk(1)
        mask = np.array([[True, False, True]])
        model.add(number, mask)
        state = add_jit(state, encode(number[0], mask[0]))
        check(state, model)
    assert buffer.size(state) == 10


def test_sampling_is_even_where_lanes_hold_different_numbers():
    state, model = start(6, 3)
    lane, row = np.arange(3)[None], np.arange(9)[:, None]
    mask = (lane == 0) | ((lane == 1) & (row < 2)) | ((lane == 2) & (row == 4))
    state = add(state, model, 9, mask)
    np.testing.assert_array_equal(state.size, [6, 2, 1])
    sample = programs(6, 3)[2]
    batch = sample(state, jax.random.key(3), 9000)
    np.testing.assert_array_equal(batch.weights, np.ones(9000, np.float32))
    held = [value for lane in model.lanes for value in lane]
    values, count = np.unique(decode(batch.experience), return_counts=True)
    np.testing.assert_array_equal(values, np.sort(held))
    # Even odds over nine rows; a fixed seed, so the test cannot fail by chance later.
    assert scipy_stats.chisquare(count).pvalue > 0.01


def test_can_sample_counts_what_is_stored():
    state, model = start(5, 3)
    buffer = programs(5, 3)[0]
    assert not buffer.can_sample(state, 1)
    state = add(state, model, 1)
    assert buffer.can_sample(state, 3)
    assert not buffer.can_sample(state, 4)
    assert buffer.size(buffer.clear(state)) == 0


def test_steps_of_a_collector_fill_it_in_one_program():
    collector = make_collector("count", 4)
    buffer = buffers.ReplayBuffer(64 * 4, 4)

    @quick_jit
    def fill(key):
        carry = collector.init(key)
        _, transition = jax.eval_shape(collector.step, carry, None)
        state = buffer.init(transition)
        return collector.fold_steps(carry, None, buffer.add, state, num_steps=20)[1]

    state = fill(jax.random.key(0))
    np.testing.assert_array_equal(state.size, [20] * 4)
    held = jax.tree.map(lambda x: np.asarray(x)[:20], state.experience)
    # Step n of an episode has reward n, and counts are observed.
    length = held.episode_length
    np.testing.assert_array_equal(held.reward, length)
    np.testing.assert_array_equal(held.obs[..., 0], length - 1)
    np.testing.assert_array_equal(held.next_obs[..., 0], length)
    done = held.terminated | held.truncated
    assert done.any(axis=0).all()
    want = np.where(done[:-1], 1, length[:-1] + 1)
    np.testing.assert_array_equal(length[1:], want)
    np.testing.assert_array_equal(np.diff(held.episode_id, axis=0) != 0, done[:-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "`capacity` must be an int of at least 1, got 0"),
        ((4, 0), "`num_envs` must be an int of at least 1, got 0"),
        ((3, 4), "`capacity` must be an int of at least 4, got 3"),
    ],
)
def test_capacity_must_hold_a_step(arguments, message):
    with pytest.raises(ValueError, match=message):
        buffers.ReplayBuffer(*arguments)


def test_rows_unlike_those_of_init_are_named():
    state, model = start(5, 3)
    buffer = programs(5, 3)[0]
    good = encode(model.make_chunk(2), np.ones((2, 3), bool))
    for change, message in (
        (
            {"byte": good.byte.astype(np.int32)},
            r"uint8 of shape .* at \.byte, got int",
        ),
        ({"pair": good.pair[..., :1]}, r"\(2, 3, 2\) at \.pair, got .* \(2, 3, 1\)"),
        ({"byte": good.byte[:1]}, r"\(2, 3\) at \.byte, got uint8 of shape \(1, 3\)"),
        ({"number": ()}, "at .number, got another structure: float32 .* at .pair"),
    ):
        with pytest.raises(ValueError, match=message):
            buffer.add(state, good.replace(**change))
    with pytest.raises(
        ValueError, match=r"number` must be .* leading axis num_envs=3, g"
    ):
        buffer.init(jax.tree.map(lambda x: x[0, :2], good))
    with pytest.raises(ValueError, match="`batch_size` must be an int of at least 1"):
        buffer.sample(state, jax.random.key(0), 0)

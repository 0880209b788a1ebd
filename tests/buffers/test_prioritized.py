"""Prioritized replay: proportional samples, weights, updates and unusable rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_checks import check, indices, init_case, programs
from cases import quick_jit
from ring_model import encode
from scipy import stats as scipy_stats

from rollout import buffers
from rollout.buffers import sum_tree

ALPHA = 0.6
VALUES = ([0.0, 1.0, -1.0, np.nan], [0.0, 0.5, 2.0, 9.0, np.inf])


@functools.cache
def update_program(successor):
    return quick_jit(programs("prioritized", successor)[0].update_priorities)


NUM_LANES, NUM_SAMPLES = 8, 256


def small_row():
    """Returns a small transition for tests of sampling."""
    return {"number": np.arange(NUM_LANES, dtype=np.int32)}


@functools.cache
def small_programs(alpha=ALPHA):
    """Returns a buffer with two rows per lane, and its compiled functions."""
    buffer = buffers.PrioritizedReplayBuffer(2 * NUM_LANES, NUM_LANES, alpha=alpha)

    @quick_jit
    def sample(state, key, beta):
        batch = buffer.sample(state, key, NUM_SAMPLES, beta=beta)
        return batch, buffer.can_sample(state, 1)

    return buffer, quick_jit(buffer.add), quick_jit(buffer.update_priorities), sample


def make_state(priorities, alpha=ALPHA):
    """Stores one row per lane with these priorities; other lanes have priority 0."""
    buffer, add, update, _ = small_programs(alpha)
    state = add(buffer.init(small_row()), small_row())
    all_priorities = np.zeros(NUM_LANES, np.float32)
    all_priorities[: len(priorities)] = priorities
    return update(state, np.arange(NUM_LANES), all_priorities)


def sample(state, beta=0.4, alpha=ALPHA):
    """Returns a batch of 256 rows and the result of `can_sample`."""
    return small_programs(alpha)[3](state, jax.random.key(0), jnp.float32(beta))


def count_samples(batch):
    return np.bincount(batch.indices, minlength=NUM_LANES)


def check_sums(tree):
    """Checks that every level contains the sums of the level below."""
    for level, above in itertools.pairwise(tree):
        want = np.asarray(level).reshape(-1, sum_tree.WIDTH).sum(axis=1)
        np.testing.assert_allclose(above[: want.size], want, rtol=1e-6)
        assert not np.any(above[want.size :])


def run_adds_and_updates(successor, seed):
    """Compares random adds and updates with the model."""
    rng = np.random.default_rng(seed)
    _, add, _ = programs("prioritized", successor)
    update = update_program(successor)
    state, model = init_case("prioritized", successor)
    priority, largest, rejected = {}, 1.0, 0
    values = VALUES[rng.integers(2)]
    for _ in range(1 + seed % 7):
        if rng.integers(2):
            steps, mask = model.make_chunk(rng, rng.choice([1, 3]), mask_rate=0.2)
            model.add(steps, mask)
            state = add(state, encode(steps, mask))
            new_numbers = (steps[t][i].number for t, i in np.argwhere(mask))
            priority |= dict.fromkeys(new_numbers, largest)
            continue
        # Row numbers may be invalid or repeated; the last value of a row counts.
        row_numbers = rng.integers(-2, 17, size=6)
        value = rng.choice(values, size=6)
        state = update(state, row_numbers.astype(np.int32), value.astype(np.float32))
        row_of = {i: row for row, i in indices(state, model).items()}
        for index, priority_value in zip(row_numbers, value, strict=True):
            if not np.isfinite(priority_value) or priority_value < 0:
                rejected += 1
            elif index in row_of:
                priority[model.step(row_of[index]).number] = priority_value
                largest = max(largest, priority_value)
    state = jax.device_get(state)
    want = np.zeros(state.priorities[0].size)
    for row, index in indices(state, model).items():
        want[index] = priority[model.step(row).number] ** ALPHA
    np.testing.assert_allclose(state.priorities[0], want, rtol=1e-5)
    check_sums(state.priorities)
    assert state.max_priority == largest
    assert state.num_rejected == rejected
    # If priorities differ, 256 samples may miss a row: samples are checked only if all
    # nonzero priorities are equal.
    is_uniform = set(priority.values()) <= {0.0, largest}
    return state, model, lambda row: priority[model.step(row).number] > 0, is_uniform


# Reading and sampling compile a large program: the slow cases check them.
@pytest.mark.parametrize(
    ("successor", "num_runs", "checks_samples"),
    [
        ("shared", 16, False),
        pytest.param("shared", 40, True, marks=pytest.mark.slow),
        pytest.param("stored", 40, True, marks=pytest.mark.slow),
    ],
)
def test_random_adds_and_updates_match_the_model(successor, num_runs, checks_samples):
    num_checked, (_, _, read) = 0, programs("prioritized", successor)
    for seed in range(num_runs):
        state, model, has_priority, is_uniform = run_adds_and_updates(successor, seed)
        if checks_samples and is_uniform:
            num_checked += 1
            got = jax.device_get(read(state, jax.random.key(seed)))
            check(state, model, got, has_priority)
    assert num_checked >= 10 * checks_samples


@pytest.mark.parametrize(
    ("priorities", "alpha"),
    [
        (0.25 * np.arange(1, 9), ALPHA),
        # `alpha` 0 samples nonzero priorities uniformly.
        pytest.param(
            np.array([0.0, 1.0, 100.0, 1e-6, 0.0]), 0.0, marks=pytest.mark.slow
        ),
        (np.full(NUM_LANES, 3.0), ALPHA),  # every stratum lies within one row
    ],
)
def test_sample_counts_and_weights_follow_priorities(priorities, alpha):
    state = make_state(priorities, alpha)
    share = np.zeros(NUM_LANES)
    share[: len(priorities)] = np.where(priorities > 0, priorities**alpha, 0)
    share /= share.sum()
    for beta in (0.0, 0.4, 1.0):
        batch, can_sample = sample(state, beta, alpha)
        assert can_sample
        count = count_samples(batch)
        # A row contains all strata within its share, and at most two partial strata.
        assert (np.abs(count - share * NUM_SAMPLES) < 2).all()
        assert (count == share * NUM_SAMPLES).all() or len({*priorities}) > 1
        assert not count[share == 0].any()
        sampled_share = share[np.asarray(batch.indices)]
        want = (sampled_share / sampled_share.min()) ** -beta  # largest weight is 1
        np.testing.assert_allclose(batch.weights, want, rtol=1e-5)


@pytest.mark.slow
def test_sampling_is_proportional_among_usable_rows():
    """Usable rows next to unusable rows are not sampled more often."""
    buffer, add, _ = programs("prioritized", "shared")
    state, model = init_case("prioritized", "shared")
    rng = np.random.default_rng(1)
    for _ in range(4):
        steps, mask = model.make_chunk(rng, 3, done_rate=0.3)
        model.add(steps, mask)
        state = add(state, encode(steps, mask))
    row_numbers = indices(state, model)
    priority = np.linspace(0.1, 3, 15)
    state = buffer.update_priorities(
        state, jnp.arange(15), jnp.asarray(priority, jnp.float32)
    )
    usable = np.sort([row_numbers[row] for row in model.usable_rows()])
    assert 6 < len(usable) < 15
    sample_fn = jax.jit(lambda key: buffer.sample(state, key, 16, beta=1.0).indices)
    samples = jax.lax.map(sample_fn, jax.random.split(jax.random.key(2), 2000))
    values, count = np.unique(np.asarray(samples), return_counts=True)
    np.testing.assert_array_equal(values, usable)
    share = priority[usable] ** ALPHA
    want = share / share.sum() * count.sum()
    assert scipy_stats.chisquare(count, want).pvalue > 0.01


def test_zero_priorities_leave_no_row_to_sample():
    batch, can_sample = sample(make_state([0.0, 0.0, 0.0]))
    assert not can_sample
    assert not np.any(batch.weights)


def test_large_sum_tree_samples_proportionally():
    """Tests a tree with a million leaves, which alternate between 0, 1, 2 and 3."""

    @quick_jit
    def sample_tree(keys):
        tree = sum_tree.build((jnp.arange(1_000_000) % 4).astype(jnp.float32))
        samples = [sum_tree.sample_stratified(tree, keys[0], 9999)]
        samples.append(sum_tree.sample_iid(tree, keys[1], 9999))
        return tree[-1].sum(), samples

    total, samples_by_method = sample_tree(jax.random.split(jax.random.key(0)))
    assert total == 1_500_000
    for samples in map(np.asarray, samples_by_method):
        num_zero_samples, *count = np.bincount(samples % 4)
        assert num_zero_samples == 0
        want = 9999 * np.arange(1, 4) / 6
        assert scipy_stats.chisquare(count, want).pvalue > 0.01
        count = np.histogram(samples, bins=20, range=(0, 1_000_000))[0]
        assert scipy_stats.chisquare(count).pvalue > 0.01


def test_sum_tree_writes_update_all_levels():
    """`set_leaves` recomputes only the sums above the written leaves."""
    rng = np.random.default_rng(0)
    leaf = rng.random(1000).astype(np.float32)
    row_numbers = np.int32([3, 999, 3, 500, 2000, 64])  # repeated and invalid rows
    value = np.float32([1, 2, 3, 4, 5, 6])
    want = leaf.copy()
    want[702:709] = want[0:2] = 7
    want[[3, 999, 500, 64]] = [3, 2, 4, 6]

    @quick_jit
    def write(leaf):
        rows = jnp.concatenate([jnp.arange(702, 709), jnp.arange(2)])
        tree = sum_tree.build(leaf)
        tree = sum_tree.set_distinct_leaves(tree, rows, jnp.float32(7))
        return sum_tree.set_leaves(tree, row_numbers, value)

    tree = write(leaf)
    np.testing.assert_array_equal(tree[0][:1000], want)
    check_sums(tree)

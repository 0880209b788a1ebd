"""Priorities: proportional draws, weights, updates, and rows that must not be drawn."""

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


NUM_LANES, NUM_DRAWS = 8, 256


def numbers():
    """A small transition, for tests of the draws alone."""
    return {"number": np.arange(NUM_LANES, dtype=np.int32)}


@functools.cache
def small_programs(alpha=ALPHA):
    """A buffer of two rows per lane, and its compiled functions."""
    buffer = buffers.PrioritizedReplayBuffer(2 * NUM_LANES, NUM_LANES, alpha=alpha)

    @quick_jit
    def draw(state, key, beta):
        batch = buffer.sample(state, key, NUM_DRAWS, beta=beta)
        return batch, buffer.can_sample(state, 1)

    return buffer, quick_jit(buffer.add), quick_jit(buffer.update_priorities), draw


def filled(priorities, alpha=ALPHA):
    """One row per lane with these priorities, and 0 in the lanes that are left."""
    buffer, add, update, _ = small_programs(alpha)
    state = add(buffer.init(numbers()), numbers())
    every = np.zeros(NUM_LANES, np.float32)
    every[: len(priorities)] = priorities
    return update(state, np.arange(NUM_LANES), every)


def sample(state, beta=0.4, alpha=ALPHA):
    """256 draws, and whether there is anything to draw."""
    return small_programs(alpha)[3](state, jax.random.key(0), jnp.float32(beta))


def count_draws(batch):
    return np.bincount(batch.indices, minlength=NUM_LANES)


def check_sums(tree):
    """Every level holds the sums of the level below, and nothing else."""
    for level, above in itertools.pairwise(tree):
        want = np.asarray(level).reshape(-1, sum_tree.WIDTH).sum(axis=1)
        np.testing.assert_allclose(above[: want.size], want, rtol=1e-6)
        assert not np.any(above[want.size :])


def run_adds_and_updates(successor, seed):
    """Adds and updates at random, against the model."""
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
            fresh = (steps[t][i].number for t, i in np.argwhere(mask))
            priority |= dict.fromkeys(fresh, largest)
            continue
        # Any row number, stored or not, with duplicates; the last one counts.
        chosen = rng.integers(-2, 17, size=6)
        value = rng.choice(values, size=6)
        state = update(state, chosen.astype(np.int32), value.astype(np.float32))
        row_of = {i: row for row, i in indices(state, model).items()}
        for index, each in zip(chosen, value, strict=True):
            if not np.isfinite(each) or each < 0:
                rejected += 1
            elif index in row_of:
                priority[model.step(row_of[index]).number] = each
                largest = max(largest, each)
    state = jax.device_get(state)
    want = np.zeros(state.priorities[0].size)
    for row, index in indices(state, model).items():
        want[index] = priority[model.step(row).number] ** ALPHA
    np.testing.assert_allclose(state.priorities[0], want, rtol=1e-5)
    check_sums(state.priorities)
    assert state.max_priority == largest
    assert state.num_rejected == rejected
    # 256 draws do not reach every row where priorities differ: those of no priority are
    # out, and the rest is checked where all are alike.
    alike = set(priority.values()) <= {0.0, largest}
    return state, model, lambda row: priority[model.step(row).number] > 0, alike


# Reads and draws after them are a large program, for the slow part.
@pytest.mark.parametrize(
    ("successor", "num_runs", "reads"),
    [
        ("shared", 16, False),
        pytest.param("shared", 40, True, marks=pytest.mark.slow),
        pytest.param("stored", 40, True, marks=pytest.mark.slow),
    ],
)
def test_any_sequence_of_adds_and_updates_agrees_with_the_model(
    successor, num_runs, reads
):
    num_read, (_, _, read) = 0, programs("prioritized", successor)
    for seed in range(num_runs):
        state, model, is_drawn, alike = run_adds_and_updates(successor, seed)
        if reads and alike:
            num_read += 1
            got = jax.device_get(read(state, jax.random.key(seed)))
            check(state, model, got, is_drawn)
    assert num_read >= 10 * reads


@pytest.mark.parametrize(
    ("priorities", "alpha"),
    [
        (0.25 * np.arange(1, 9), ALPHA),
        (np.array([0.0, 1.0, 100.0, 1e-6, 0.0]), 0.0),  # uniform but for priority zero
        (np.full(NUM_LANES, 3.0), ALPHA),  # each row has whole strata of its own
    ],
)
def test_rows_get_their_shares_of_the_draws_and_the_weights_of_the_paper(
    priorities, alpha
):
    state = filled(priorities, alpha)
    share = np.zeros(NUM_LANES)
    share[: len(priorities)] = np.where(priorities > 0, priorities**alpha, 0)
    share /= share.sum()
    for beta in (0.0, 0.4, 1.0):
        batch, can_sample = sample(state, beta, alpha)
        assert can_sample
        count = count_draws(batch)
        # A share of so many strata holds all that lie inside, and cuts two at most.
        assert (np.abs(count - share * NUM_DRAWS) < 2).all()
        assert (count == share * NUM_DRAWS).all() or len({*priorities}) > 1
        assert not count[share == 0].any()
        drawn = share[np.asarray(batch.indices)]
        want = (drawn / drawn.min()) ** -beta  # over the largest
        np.testing.assert_allclose(batch.weights, want, rtol=1e-5)


@pytest.mark.slow
def test_draws_are_proportional_among_the_rows_whose_successor_is_there():
    """Where much of a share is unusable, its usable rows are not favoured."""
    buffer, add, _ = programs("prioritized", "shared")
    state, model = init_case("prioritized", "shared")
    rng = np.random.default_rng(1)
    for _ in range(4):
        steps, mask = model.make_chunk(rng, 3, done_rate=0.3)
        model.add(steps, mask)
        state = add(state, encode(steps, mask))
    place = indices(state, model)
    priority = np.linspace(0.1, 3, 15)
    state = buffer.update_priorities(
        state, jnp.arange(15), jnp.asarray(priority, jnp.float32)
    )
    usable = np.sort([place[row] for row in model.usable_rows()])
    assert 6 < len(usable) < 15
    draw = jax.jit(lambda key: buffer.sample(state, key, 16, beta=1.0).indices)
    drawn = jax.lax.map(draw, jax.random.split(jax.random.key(2), 2000))
    values, count = np.unique(np.asarray(drawn), return_counts=True)
    np.testing.assert_array_equal(values, usable)
    share = priority[usable] ** ALPHA
    want = share / share.sum() * count.sum()
    assert scipy_stats.chisquare(count, want).pvalue > 0.01


def test_nothing_of_priority_is_nothing_to_sample():
    batch, can_sample = sample(filled([0.0, 0.0, 0.0]))
    assert not can_sample
    assert not np.any(batch.weights)


def test_draws_of_a_large_tree_are_proportional_in_every_part():
    """A million leaves: 0, 1, 2 and 3 in turn."""

    @quick_jit
    def draw_both(keys):
        tree = sum_tree.build((jnp.arange(1_000_000) % 4).astype(jnp.float32))
        samples = [sum_tree.sample_stratified(tree, keys[0], 9999)]
        samples.append(sum_tree.sample_iid(tree, keys[1], 9999))
        return tree[-1].sum(), samples

    total, draws = draw_both(jax.random.split(jax.random.key(0)))
    assert total == 1_500_000
    for samples in map(np.asarray, draws):
        none, *count = np.bincount(samples % 4)
        assert none == 0
        want = 9999 * np.arange(1, 4) / 6
        assert scipy_stats.chisquare(count, want).pvalue > 0.01
        count = np.histogram(samples, bins=20, range=(0, 1_000_000))[0]
        assert scipy_stats.chisquare(count).pvalue > 0.01


def test_sums_of_a_large_tree_follow_what_is_written():
    """Only the sums above written leaves are computed again."""
    rng = np.random.default_rng(0)
    leaf = rng.random(1000).astype(np.float32)
    chosen = np.int32([3, 999, 3, 500, 2000, 64])  # one twice, one beyond the leaves
    value = np.float32([1, 2, 3, 4, 5, 6])
    want = leaf.copy()
    want[702:709] = want[0:2] = 7
    want[[3, 999, 500, 64]] = [3, 2, 4, 6]

    @quick_jit
    def write(leaf):
        rows = jnp.concatenate([jnp.arange(702, 709), jnp.arange(2)])
        tree = sum_tree.build(leaf)
        tree = sum_tree.set_distinct_leaves(tree, rows, jnp.float32(7))
        return sum_tree.set_leaves(tree, chosen, value)

    tree = write(leaf)
    np.testing.assert_array_equal(tree[0][:1000], want)
    check_sums(tree)

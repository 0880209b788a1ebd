"""Priorities: proportional draws, weights, updates, and rows that must not be drawn."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_checks import check, indices, programs, start
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ring_model import encode
from scipy import stats as scipy_stats

import buffers
from buffers import sum_tree

ALPHA = 0.6
VALUES = ([0.0, 1.0, -1.0, np.nan], [0.0, 0.5, 2.0, 9.0, np.inf])


@functools.cache
def update_program(successor):
    return jax.jit(programs("prioritized", successor)[0].update)


def numbers(num_rows):
    """A transition with `num_rows` lanes: small, for tests of the draws alone."""
    return {"number": jnp.arange(num_rows, dtype=jnp.int32)}


def filled(priorities, alpha=ALPHA):
    """A full buffer of one row per lane with these priorities."""
    priorities = jnp.asarray(priorities, jnp.float32)
    num_rows = priorities.shape[0]
    buffer = buffers.PrioritizedReplayBuffer(num_rows, num_rows, alpha=alpha)

    @jax.jit
    def fill():
        state = buffer.add(buffer.init(numbers(num_rows)), numbers(num_rows))
        return buffer.update(state, jnp.arange(num_rows), priorities)

    return buffer, fill()


def sample(buffer, state, num_draws, beta=0.4, seed=0):
    draw = jax.jit(buffer.sample, static_argnums=2)
    return draw(state, jax.random.key(seed), num_draws, beta=beta)


def check_sums(tree):
    """Every level holds the sums of the level below, and nothing else."""
    for level, above in itertools.pairwise(tree):
        want = np.asarray(level).reshape(-1, sum_tree.WIDTH).sum(axis=1)
        np.testing.assert_allclose(above[: want.size], want, rtol=1e-6)
        assert not np.any(above[want.size :])


@pytest.mark.parametrize("successor", ["stored", "shared"])
def test_any_sequence_of_adds_and_updates_agrees_with_the_model(successor):
    _, add, read = programs("prioritized", successor)
    update = update_program(successor)

    @settings(max_examples=30, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(data=st.data())
    def run(data):
        state, model = start("prioritized", successor)
        rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
        priority, largest, rejected = {}, 1.0, 0
        values = data.draw(st.sampled_from(VALUES))
        for _ in range(data.draw(st.integers(1, 7))):
            if data.draw(st.booleans()):
                steps, mask = model.make_chunk(
                    rng, data.draw(st.sampled_from([1, 3])), mask_rate=0.2
                )
                model.add(steps, mask)
                state = add(state, encode(steps, mask))
                fresh = (steps[t][i].number for t, i in np.argwhere(mask))
                priority |= dict.fromkeys(fresh, largest)
                continue
            # Any row number, stored or not, with duplicates; the last one counts.
            chosen = rng.integers(-2, 17, size=6)
            value = rng.choice(values, size=6)
            state = update(state, jnp.asarray(chosen), jnp.asarray(value, jnp.float32))
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
        got = jax.device_get(read(state, jax.random.key(rng.integers(2**31))))
        # 256 draws do not reach every row where priorities differ: those of no
        # priority are out, and the rest is checked where all are alike.
        if set(priority.values()) <= {0.0, largest}:
            check(state, model, got, lambda row: priority[model.step(row).number] > 0)

    run()


def test_draws_are_proportional_to_priority_to_the_alpha():
    priorities = 0.25 * np.arange(1, 9)
    buffer, state = filled(priorities)
    draw = jax.jit(buffer.sample, static_argnums=2)
    # 40 draws a call: strata of unequal rows, so that shares are cut in all ways.
    keys = jax.random.split(jax.random.key(0), 500)
    drawn = jax.vmap(lambda key: draw(state, key, 40, beta=0.4).indices)(keys)
    count = np.bincount(np.ravel(drawn), minlength=8)
    share = priorities**ALPHA / (priorities**ALPHA).sum()
    # Stratified draws vary less than independent ones, so p is close to 1.
    assert scipy_stats.chisquare(count, share * count.sum()).pvalue > 0.01


def test_draws_from_the_whole_are_proportional_too():
    leaf = jnp.asarray([0.0, 1.0, 2.0, 3.0, 0.0, 0.5] * 20)
    drawn = sum_tree.draw_apart(sum_tree.build(leaf), jax.random.key(1), 50_000)
    count = np.bincount(np.asarray(drawn), minlength=120)
    want = np.asarray(leaf, float)
    assert not count[want == 0].any()
    want = want[want > 0] / want.sum() * count.sum()  # in double precision
    assert scipy_stats.chisquare(count[count > 0], want).pvalue > 0.01


def test_draws_are_proportional_among_the_rows_whose_successor_is_there():
    """A share of which much may not be used does not favour what is left of it."""
    buffer, add, _ = programs("prioritized", "shared")
    state, model = start("prioritized", "shared")
    rng = np.random.default_rng(1)
    for _ in range(4):
        steps, mask = model.make_chunk(rng, 3, done_rate=0.3)
        model.add(steps, mask)
        state = add(state, encode(steps, mask))
    place = indices(state, model)
    priority = np.linspace(0.1, 3, 15)
    state = buffer.update(state, jnp.arange(15), jnp.asarray(priority, jnp.float32))
    usable = np.sort([place[row] for row in model.usable()])
    assert 6 < len(usable) < 15
    draw = jax.jit(lambda key: buffer.sample(state, key, 16, beta=1.0).indices)
    drawn = jax.lax.map(draw, jax.random.split(jax.random.key(2), 2000))
    values, count = np.unique(np.asarray(drawn), return_counts=True)
    np.testing.assert_array_equal(values, usable)
    share = priority[usable] ** ALPHA
    want = share / share.sum() * count.sum()
    assert scipy_stats.chisquare(count, want).pvalue > 0.01


def test_equal_priorities_are_drawn_once_each():
    """Stratified: with as many draws as rows of one priority, each has its share."""
    buffer, state = filled(np.full(100, 3.0))
    batch = sample(buffer, state, 100)
    np.testing.assert_array_equal(np.sort(batch.indices), np.arange(100))


def test_weights_are_those_of_the_paper_over_the_largest():
    priorities = 0.25 * np.arange(1, 9)
    buffer, state = filled(priorities)
    for beta in (0.4, 1.0):
        batch = sample(buffer, state, 256, beta)
        share = priorities**ALPHA / (priorities**ALPHA).sum()
        want = (8 * share) ** -beta
        # 256 draws from 8 rows hold the one of the largest weight.
        want = want / want.max()
        got = np.asarray(batch.weights)
        np.testing.assert_allclose(got, want[np.asarray(batch.indices)], rtol=1e-5)


def test_beta_may_be_annealed_inside_a_compiled_step():
    buffer, state = filled([1.0, 4.0])
    draw = jax.jit(lambda beta: buffer.sample(state, jax.random.key(0), 64, beta=beta))
    np.testing.assert_array_equal(draw(0.0).weights, np.ones(64))
    low, high = draw(0.4).weights.min(), draw(1.0).weights.min()
    np.testing.assert_allclose([low, high], [0.25**0.24, 0.25**0.6], rtol=1e-5)


def test_alpha_zero_is_uniform_but_for_priority_zero():
    buffer, state = filled([0.0, 1.0, 100.0, 1e-6], alpha=0.0)
    batch = sample(buffer, state, 300, 1.0)
    np.testing.assert_array_equal(np.unique(batch.indices), [1, 2, 3])
    np.testing.assert_array_equal(np.bincount(batch.indices)[1:], [100] * 3)
    np.testing.assert_array_equal(batch.weights, np.ones(300))


def test_cleared_buffer_gives_only_what_came_later():
    """Tianshou keeps the tree: after `reset` it samples rows that are gone."""
    buffer = buffers.PrioritizedReplayBuffer(8, 1)
    one = numbers(1)
    state, add = buffer.init(one), jax.jit(buffer.add)
    for _ in range(8):
        state = add(state, one)
    state = buffer.update(state, jnp.arange(8), jnp.full((8,), 9.0))
    state = buffer.clear(state)
    assert not buffer.can_sample(state, 1)
    assert not np.any(sample(buffer, state, 4).weights)
    state = add(state, one)
    batch = sample(buffer, state, 32)
    np.testing.assert_array_equal(batch.indices, np.zeros(32))
    assert state.max_priority == 1


def test_nothing_of_priority_is_nothing_to_sample():
    buffer, state = filled([0.0, 0.0, 0.0])
    assert not buffer.can_sample(state, 1)
    assert not np.any(sample(buffer, state, 4).weights)


def test_large_tree_draws_no_zero_and_every_part():
    """A million leaves: half of them zero, the others alike."""
    leaf = (jnp.arange(1_000_000) % 2).astype(jnp.float32)
    tree = sum_tree.build(leaf)
    assert sum_tree.total(tree) == 500_000
    for draw in (sum_tree.draw, sum_tree.draw_apart):
        drawn = np.asarray(
            jax.jit(draw, static_argnums=2)(tree, jax.random.key(0), 9999)
        )
        assert (drawn % 2 == 1).all()
        count = np.histogram(drawn, bins=20, range=(0, 1_000_000))[0]
        assert scipy_stats.chisquare(count).pvalue > 0.01


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_alpha_and_beta_lie_between_0_and_1(value):
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[0, 1\], got"):
        buffers.PrioritizedReplayBuffer(8, 1, alpha=value)
    buffer, state = filled([1.0, 1.0])
    with pytest.raises(ValueError, match=r"`beta` must lie in \[0, 1\], got"):
        buffer.sample(state, jax.random.key(0), 4, beta=value)


def test_update_wants_one_priority_per_index():
    buffer, state = filled([1.0, 1.0])
    with pytest.raises(AssertionError):
        buffer.update(state, jnp.arange(2), jnp.ones((1,)))

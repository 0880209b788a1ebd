"""The loops and rows of a GPU, run here, have the bits of those of a CPU."""

from unittest import mock

import chex
import jax
import pytest
from cases import make_collector, raw
from jax import lax


def as_on_a_gpu(*args, default=None, cuda=None, **others):
    """Stands for `lax.platform_dependent`, and takes the branch of a GPU."""
    del others  # of other platforms
    return (cuda or default)(*args)


def collect(kind):
    collector = make_collector("count", 5, "select")
    carry = collector.init(jax.random.key(3))
    if kind == "steps":
        return raw(collector.collect_steps(carry, None, 9))
    if kind == "padded":
        return raw(collector.collect_padded_episodes(carry, None, 7, max_length=11))
    count = lambda acc, row: acc + 1  # noqa: E731  (also rows that are void)
    args = carry, None, count, 0
    return raw(collector.fold_episodes(*args, num_episodes=7, max_steps=11))


@pytest.mark.slow  # it clears compiled programs
@pytest.mark.parametrize("kind", ["steps", "padded", "fold"])
def test_programs_of_a_gpu_have_the_same_bits(kind):
    expected = collect(kind)
    jax.clear_caches()
    with mock.patch.object(lax, "platform_dependent", as_on_a_gpu):
        got = collect(kind)
    jax.clear_caches()
    chex.assert_trees_all_equal(got, expected)

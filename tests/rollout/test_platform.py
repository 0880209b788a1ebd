"""The loops and rows of a GPU, run here, have the bits of those of a CPU."""

import chex
import jax
import pytest
from cases import make_collector, on_a_gpu, raw


def collect(kind):
    collector = make_collector("count", 5, "select")
    carry = collector.init(jax.random.key(3))
    if kind == "steps":
        return raw(collector.collect_steps(carry, None, 9))
    if kind == "padded":
        return raw(
            collector.collect_episodes(
                carry, None, 7, max_episode_steps=11, return_trajectory=True
            )
        )
    count = lambda acc, row: acc + 1  # noqa: E731  (also rows that are void)
    args = carry, None, count, 0
    return raw(collector.fold_episodes(*args, num_episodes=7, max_episode_steps=11))


@pytest.mark.slow  # it clears compiled programs
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("kind", ["steps", "padded", "fold"])
def test_programs_of_a_gpu_have_the_same_bits(kind):
    expected = collect(kind)
    jax.clear_caches()
    with on_a_gpu():
        got = collect(kind)
    jax.clear_caches()
    chex.assert_trees_all_equal(got, expected)

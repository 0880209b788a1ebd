"""Inline keys: the bits of jax.random, and only where they are safe."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit

from rollout.base import prng, trees

pytestmark = pytest.mark.usefixtures("key_reuse")

BITS = [((), "uint32"), ((5,), "uint32"), ((3, 4), "uint8"), ((3, 4), "uint16")]
DRAWS = {
    "uniform": lambda key: jax.random.uniform(key, (7,)),
    "normal": lambda key: jax.random.normal(key, (2, 3)),
    "permutation": lambda key: jax.random.permutation(key, 6),
    "split": lambda key: jax.random.key_data(jax.random.split(key, 5)),
    "fold_in": lambda key: jax.random.key_data(jax.random.fold_in(key, 123)),
    **{
        f"{dtype} {shape}": functools.partial(jax.random.bits, shape=shape, dtype=dtype)
        for shape, dtype in BITS
    },
}
NUM_LANES = 4


def words(key):
    return np.asarray(jax.random.key_data(key))


@functools.cache
def drawn():
    """What one and all of some keys draw, inline and not, in one program."""

    def draw(key):
        return {name: fn(key) for name, fn in DRAWS.items()}

    @quick_jit
    def draw_all(keys):
        inline = prng.inline(keys)
        return draw(inline[0]), jax.vmap(draw)(inline), jax.vmap(draw)(keys)

    return jax.device_get(draw_all(jax.random.split(jax.random.key(2), NUM_LANES)))


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_jax_also_under_vmap(name):
    one, got, want = (found[name] for found in drawn())
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(one, want[0])
    assert (want[0] != want[1]).any()


@pytest.mark.parametrize("impl", ["threefry2x32", "philox2x32", "rbg"])
def test_fold_in_is_that_of_jax_for_every_implementation(impl):
    @quick_jit
    def fold(key):
        folded = prng.fold_in(key, jnp.arange(6))
        again = prng.fold_in(folded, 3)
        want = [jax.random.fold_in(key, i) for i in range(6)]
        return folded, again, want, [jax.random.fold_in(k, 3) for k in want]

    key = jax.random.key(1, impl=impl)
    folded, again, want, want_again = fold(key)
    assert folded.dtype == again.dtype == key.dtype
    np.testing.assert_array_equal(words(folded), [words(key) for key in want])
    np.testing.assert_array_equal(words(again), [words(key) for key in want_again])


def test_plain_takes_back_inline_and_leaves_other_keys_alone():
    key = jax.random.key(5)
    assert jax.random.key_impl(prng.inline(key)) != "threefry2x32"
    assert prng.plain(prng.inline(key)).dtype == key.dtype
    np.testing.assert_array_equal(words(prng.plain(prng.inline(key))), words(key))
    other = jax.random.key(5, impl="philox2x32")
    assert prng.inline(other) is other
    assert prng.plain(other) is other


def test_inline_gives_way_where_jax_lays_out_the_bits_in_another_order():
    key = jax.random.key(5)
    with jax.threefry_partitionable(False):
        assert prng.inline(key) is key


def test_product_of_two_words_is_exact():
    words = np.random.default_rng(0).integers(2**32, size=1000, dtype=np.uint32)
    factors = np.uint32([0, 1, 7, 2**16, 2**31 - 1, 2**32 - 1])[:, None]
    high, low = jax.jit(jax.vmap(prng.product, (None, 0)))(words, factors)
    want = words.astype(np.uint64) * factors
    np.testing.assert_array_equal(high, want >> np.uint64(32))
    np.testing.assert_array_equal(low, want.astype(np.uint32))


def test_select_and_barrier_take_trees_with_typed_keys():
    old = {"key": jax.random.split(jax.random.key(0), 3), "x": jnp.zeros((3, 2))}
    new = {"key": jax.random.split(jax.random.key(1), 3), "x": jnp.ones((3, 2))}
    flag = jnp.array([True, False, True])
    mixed = trees.select(flag, new, trees.barrier(old))
    np.testing.assert_array_equal(mixed["x"][:, 0], [1, 0, 1])
    want = np.where(np.asarray(flag)[:, None], words(new["key"]), words(old["key"]))
    np.testing.assert_array_equal(words(mixed["key"]), want)

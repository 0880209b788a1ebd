"""Inline keys: equal bits to `jax.random`, and the conditions for their use."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit

from rollout.base import prng, trees

pytestmark = pytest.mark.usefixtures("key_reuse")

BITS = [((), "uint32"), ((5,), "uint32"), ((3, 4), "uint8"), ((3, 4), "uint16")]
SAMPLERS = {
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


def key_words(key):
    return np.asarray(jax.random.key_data(key))


@functools.cache
def sample_keys():
    """Returns samples of a single inline key, of all inline keys, and of plain keys."""

    def sample(key):
        return {name: fn(key) for name, fn in SAMPLERS.items()}

    @quick_jit
    def sample_all(keys):
        inline = prng.inline(keys)
        return sample(inline[0]), jax.vmap(sample)(inline), jax.vmap(sample)(keys)

    return jax.device_get(sample_all(jax.random.split(jax.random.key(2), NUM_LANES)))


@pytest.mark.parametrize("name", SAMPLERS)
def test_inline_keys_sample_as_jax(name):
    first_key_sample, got, want = (results[name] for results in sample_keys())
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(first_key_sample, want[0])
    assert (want[0] != want[1]).any()


@pytest.mark.parametrize(
    "impl", ["threefry2x32", "rbg", pytest.param("philox2x32", marks=pytest.mark.slow)]
)
def test_fold_in_equals_jax(impl):
    @quick_jit
    def fold(key):
        folded = prng.fold_in(key, jnp.arange(6))
        folded_twice = prng.fold_in(folded, 3)
        want = [jax.random.fold_in(key, i) for i in range(6)]
        return folded, folded_twice, want, [jax.random.fold_in(k, 3) for k in want]

    key = jax.random.key(1, impl=impl)
    folded, folded_twice, want, want_twice = fold(key)
    assert folded.dtype == folded_twice.dtype == key.dtype
    np.testing.assert_array_equal(key_words(folded), [key_words(key) for key in want])
    np.testing.assert_array_equal(
        key_words(folded_twice), [key_words(key) for key in want_twice]
    )


def test_plain_reverts_inline():
    key = jax.random.key(5)
    assert jax.random.key_impl(prng.inline(key)) != "threefry2x32"
    assert prng.plain(prng.inline(key)).dtype == key.dtype
    np.testing.assert_array_equal(
        key_words(prng.plain(prng.inline(key))), key_words(key)
    )
    philox_key = jax.random.key(5, impl="philox2x32")
    assert prng.inline(philox_key) is philox_key
    assert prng.plain(philox_key) is philox_key


def test_inline_requires_partitionable_threefry():
    key = jax.random.key(5)
    with jax.threefry_partitionable(False):
        assert prng.inline(key) is key


def test_product_of_words_is_exact():
    integers = np.random.default_rng(0).integers(2**32, size=1000, dtype=np.uint32)
    factors = np.uint32([0, 1, 7, 2**16, 2**31 - 1, 2**32 - 1])[:, None]
    high, low = jax.jit(jax.vmap(prng.product, (None, 0)))(integers, factors)
    want = integers.astype(np.uint64) * factors
    np.testing.assert_array_equal(high, want >> np.uint64(32))
    np.testing.assert_array_equal(low, want.astype(np.uint32))


def test_select_and_barrier_accept_typed_keys():
    old = {"key": jax.random.split(jax.random.key(0), 3), "x": jnp.zeros((3, 2))}
    new = {"key": jax.random.split(jax.random.key(1), 3), "x": jnp.ones((3, 2))}
    flag = jnp.array([True, False, True])
    mixed = trees.select(flag, new, trees.barrier(old))
    np.testing.assert_array_equal(mixed["x"][:, 0], [1, 0, 1])
    want = np.where(
        np.asarray(flag)[:, None], key_words(new["key"]), key_words(old["key"])
    )
    np.testing.assert_array_equal(key_words(mixed["key"]), want)

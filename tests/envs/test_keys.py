"""Inline keys: the bits of jax.random, and only where they are safe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs import keys

pytestmark = pytest.mark.usefixtures("key_reuse")


def words(key):
    return np.asarray(jax.random.key_data(key))


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4)])
def test_bits_are_those_of_jax(shape, dtype):
    key = jax.random.key(11)
    want = jax.random.bits(key, shape, dtype)
    np.testing.assert_array_equal(jax.random.bits(keys.inline(key), shape, dtype), want)


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: jax.random.uniform(key, (7,)),
        lambda key: jax.random.normal(key, (2, 3)),
        lambda key: jax.random.randint(key, (9,), 0, 5),
        lambda key: jax.random.permutation(key, 6),
        lambda key: jax.random.key_data(jax.random.split(key, 5)),
        lambda key: jax.random.key_data(jax.random.fold_in(key, 123)),
    ],
)
def test_draws_are_those_of_jax_also_under_vmap(draw):
    batch = jax.random.split(jax.random.key(2), 4)
    np.testing.assert_array_equal(draw(keys.inline(batch[0])), draw(batch[0]))
    got = jax.jit(jax.vmap(draw))(keys.inline(batch))
    np.testing.assert_array_equal(got, jax.vmap(draw)(batch))


def test_seed_of_the_inline_implementation_is_that_of_threefry():
    impl = jax.random.key_impl(keys.inline(jax.random.key(0)))
    np.testing.assert_array_equal(
        words(jax.random.key(42, impl=impl)), words(jax.random.key(42))
    )


@pytest.mark.parametrize("impl", ["threefry2x32", "philox2x32", "rbg"])
def test_fold_in_is_that_of_jax_for_every_implementation(impl):
    key = jax.random.key(1, impl=impl)
    data = jnp.arange(6)
    want = jnp.stack([jax.random.key_data(jax.random.fold_in(key, i)) for i in data])
    folded = keys.fold_in(key, data)
    np.testing.assert_array_equal(words(folded), want)
    assert jax.random.key_impl(folded) == impl
    again = keys.fold_in(folded, 3)
    want = jax.vmap(lambda k: jax.random.key_data(jax.random.fold_in(k, 3)))(folded)
    np.testing.assert_array_equal(words(again), want)


def test_plain_takes_back_inline_and_leaves_other_keys_alone():
    key = jax.random.key(5)
    assert jax.random.key_impl(keys.inline(key)) != "threefry2x32"
    assert keys.plain(keys.inline(key)).dtype == key.dtype
    np.testing.assert_array_equal(words(keys.plain(keys.inline(key))), words(key))
    other = jax.random.key(5, impl="philox2x32")
    assert keys.inline(other) is other
    assert keys.plain(other) is other


def test_inline_gives_way_where_jax_lays_out_the_bits_in_another_order():
    key = jax.random.key(5)
    with jax.threefry_partitionable(False):
        assert keys.inline(key) is key


def test_select_and_barrier_take_trees_with_typed_keys():
    old = {"key": jax.random.split(jax.random.key(0), 3), "x": jnp.zeros((3, 2))}
    new = {"key": jax.random.split(jax.random.key(1), 3), "x": jnp.ones((3, 2))}
    flag = jnp.array([True, False, True])
    mixed = keys.select(flag, new, keys.barrier(old))
    np.testing.assert_array_equal(mixed["x"][:, 0], [1, 0, 1])
    want = np.where(np.asarray(flag)[:, None], words(new["key"]), words(old["key"]))
    np.testing.assert_array_equal(words(mixed["key"]), want)

"""Fast random keys: the same bits as jax.random, compiled as straight-line code.

On CPU, jax lowers threefry to a rolled loop of five iterations, which is a fusion
boundary at every sample. The same twenty rounds written in `jnp` fuse with the
operations that read them, and the bits are equal. `inline` returns a key that samples
in this way, and `plain` converts it back.

A key of another implementation (`philox2x32`, `rbg`) passes through both functions
unchanged: the caller's key determines the generator.

Inline keys do not support every distribution: `jax.random.poisson` raises an error for
them, and `jax.random.gamma` is slow. The kernel therefore uses inline keys internally
and passes plain keys to policies and environments. An adapter whose environment samples
from supported distributions only may inline the keys again.

Source:
    "Parallel random numbers: as easy as 1, 2, 3" (Salmon et al., SC 2011), Threefry-
    2x32-20, with the counter layout of `jax_threefry_partitionable`.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as extend_random

from rollout.base import trees

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # bits, in groups of four rounds
_HALF = 512  # words in half a block of random words
_NUM_PARTS = contextvars.ContextVar("num_parts", default=1)
_PARITY = np.uint32(0x1BD11BDA)  # a constant of Threefry's key schedule


def inline(key: chex.PRNGKey) -> chex.PRNGKey:
    """Converts a threefry key to one that compiles to straight-line code.

    The random bits are unchanged.
    """
    # If the counters are not partitionable, jax lays out the bits in another order.
    is_partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if _is_threefry(key) and is_partitionable:
        return jax.random.wrap_key_data(jax.random.key_data(key), impl=_INLINE)
    return key


def plain(key: chex.PRNGKey) -> chex.PRNGKey:
    """Converts an inline key back to a key of jax's threefry implementation."""
    if jax.random.key_impl(key) == _INLINE:
        return jax.random.wrap_key_data(jax.random.key_data(key), impl="threefry2x32")
    return key


def split(key: chex.PRNGKey, num: int) -> chex.PRNGKey:
    """Returns the keys of `jax.random.split(key, num)`, `[num]`."""
    return plain(jax.random.split(inline(key), num))


def fold_in(key: chex.PRNGKey, data: jax.typing.ArrayLike) -> chex.PRNGKey:
    """Folds integers into keys elementwise and computes each new key only once.

    Args:
        key: `[...]` typed keys, or a scalar key.
        data: `[...]` integers, or a scalar integer. A scalar is broadcast to the shape
            of the other argument.

    Returns:
        `[...]` keys, equal to `jax.random.fold_in(key, data)` for each element.
    """
    data = jnp.asarray(data)
    fold = jax.random.fold_in
    # Apply one `vmap` per axis; a scalar argument is shared along all axes.
    for _ in range(max(key.ndim, data.ndim)):
        fold = jax.vmap(fold, (0 if key.ndim else None, 0 if data.ndim else None))
    new_key = fold(inline(key), data)
    # The barrier keeps XLA from copying the hash into every consumer of the key, and a
    # chain of two hashes into every element of a large sample.
    return plain(trees.barrier(new_key))


def bits(key: chex.PRNGKey, shape: tuple[int, ...]) -> jax.Array:
    """Samples `shape` uint32 words.

    A sample with a longer leading axis begins with the same words.

    Threefry computes two words at once, and `jax.random.bits` combines them into one
    word. This function returns both words: the first words fill one half of a block,
    and the second words fill the other half. Interleaving the words in memory would
    cost more than the hashes.
    """
    size = math.prod(shape)
    if not _is_threefry(key):
        return jax.random.bits(key, shape, jnp.uint32)
    words = jax.random.key_data(key)
    # A sample of at most half a block needs only the first words.
    if size <= _HALF:
        return _hash(words, *_counters((size,)))[0].reshape(shape)
    parts = num_parts()
    if parts > 1 and size % (2 * _HALF * parts):
        # A device's part ends within a block: compute every word at its position.
        block, position = jnp.divmod(lax.iota(jnp.uint32, size), np.uint32(2 * _HALF))
        counter = block * np.uint32(_HALF) + position % np.uint32(_HALF)
        pair = _hash(words, jnp.zeros_like(counter), counter)
        return jnp.where(position < _HALF, *pair).reshape(shape)
    pairs = _hash(words, *_counters((-(-size // (2 * _HALF)), _HALF)))
    return jnp.stack(pairs, axis=1).reshape(-1)[:size].reshape(shape)


@contextlib.contextmanager
def in_parts(number: int) -> Iterator[None]:
    """Makes `bits` sample for lanes sharded equally over `number` devices."""
    token = _NUM_PARTS.set(number)
    try:
        yield
    finally:
        _NUM_PARTS.reset(token)


def num_parts() -> int:
    """Returns the number of devices that the lanes are sharded over; see `in_parts`."""
    return _NUM_PARTS.get()


def sample_uniform(
    key: chex.PRNGKey,
    low: jax.typing.ArrayLike,
    high: jax.typing.ArrayLike,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Samples uniformly between bounds: floats, integers of at most 32 bits, or bools.

    Args:
        key: one typed key.
        low: lowest values, finite, broadcast to `shape`.
        high: highest values, included, finite and at least `low`, broadcast to `shape`.
        shape: shape of the sample; see `bits`.
        dtype: dtype of the sample, in which the bounds must be representable.
    """
    if jnp.issubdtype(dtype, jnp.floating):
        return uniform(key, low, high, shape).astype(dtype)
    low, high = (
        jnp.broadcast_to(jnp.asarray(x).astype(dtype), shape).astype(jnp.uint32)
        for x in (low, high)
    )
    # Unsigned words wrap around, so `high - low` is correct for bounds of either sign.
    words, num = bits(key, (*shape, 2)), high - low + 1  # 0 stands for 2**32
    # Two words form a 64-bit fraction in [0, 1). The offset is the integer part of the
    # fraction times `num`. This needs no division and no rejection, and the bias is at
    # most 2**-64 per value.
    first, second = words[..., 0], words[..., 1]
    integer, remainder = product(first, num)
    carry = remainder + product(second, num)[0] < remainder  # the sum overflowed
    offset = jnp.where(num == 0, first, integer + carry.astype(jnp.uint32))
    return (low + offset).astype(jnp.int32).astype(dtype)


def uniform(
    key: chex.PRNGKey,
    low: jax.typing.ArrayLike,
    high: jax.typing.ArrayLike,
    shape: tuple[int, ...],
) -> jax.Array:
    """Samples float32 uniformly between finite bounds of any distance."""
    low, high = (
        jnp.broadcast_to(jnp.asarray(x).astype(jnp.float32), shape) for x in (low, high)
    )
    # Use 24 bits: float32 represents every multiple of 2**-24 in [0, 1) exactly.
    unit = (bits(key, shape) >> 8).astype(jnp.float32) * jnp.float32(2**-24)
    # Avoid `low + (high - low) * unit`: the difference may overflow.
    return jnp.clip(low * (1.0 - unit) + high * unit, low, high)


def _is_threefry(key: chex.PRNGKey) -> bool:
    return jax.random.key_impl(key) == "threefry2x32"


def _hash(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, ...]:
    """Hashes the counters (high, low) with twenty rounds of Threefry-2x32."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x, y = high + schedule[0], low + schedule[1]
    # Python unrolls the twenty rounds: a `fori_loop` would not fuse with the operations
    # that read the bits. Every four rounds, two of the three key words are added.
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            x = x + y
            y = (y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))
            y = x ^ y
        x = x + schedule[(i + 1) % 3]
        y = y + schedule[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def product(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the high word and the low word of the product of two words."""
    # JAX has no 64-bit integers by default, so multiply 16-bit digits: no sum of such
    # products overflows.
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    low, high = (x & mask), (x >> half)
    first = low * (y & mask)
    second = high * (y & mask) + (first >> half)
    third = low * (y >> half) + (second & mask)
    return high * (y >> half) + (second >> half) + (third >> half), x * y


def _counters(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"`shape` must have fewer than 2**32 elements, got {shape}.")
    # The high word of a counter is 0 for fewer than 2**32 elements.
    low = lax.iota(jnp.uint32, size).reshape(shape)
    return jnp.zeros(shape, jnp.uint32), low


def _seed(seed: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.stack(_hash(key, *_counters(shape)), axis=-1)


def _fold_in(key: jax.Array, data: jax.typing.ArrayLike) -> jax.Array:
    low = jnp.asarray(data).astype(jnp.uint32)
    return jnp.stack(_hash(key, jnp.zeros_like(low), low))


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    x, y = _hash(key, *_counters(shape))
    # Combine two words in the same way as jax, so that the bits are equal.
    if bit_width == 64:
        return (x.astype(jnp.uint64) << np.uint64(32)) | y.astype(jnp.uint64)
    return (x ^ y).astype(f"uint{bit_width}")


_INLINE = extend_random.define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="threefry2x32_inline",
    tag="fryi",
)

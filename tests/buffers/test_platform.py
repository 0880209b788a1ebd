"""Programs compiled for a GPU and for a CPU have the same bits when run on a CPU.

`test_buffers.py` holds the programs of a CPU against the slow models.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_checks import (
    CASES,
    GAMMA,
    KINDS,
    N_STEP,
    NUM_ENVS,
    NUM_SLOTS,
    STACK,
    SUCCESSORS,
    random_chunk,
    row_like,
)
from cases import quick_jit
from ring_model import Model, encode

from rollout import platform

NUM_DRAWS = 32
# Slots and lanes: those of the models, a single row, and chunks that always wrap.
SIZES = [(*case, (NUM_SLOTS, NUM_ENVS)) for case in CASES]
SIZES += [(kind, "shared", (1, 1)) for kind in KINDS]
SIZES += [(kind, "stored", (2, 4)) for kind in KINDS]


def straight(fn):
    """Traces `fn` as for a GPU."""
    chosen = []

    def choose(loop_fn, straight_fn, *args):
        del loop_fn  # unused
        chosen.append(straight_fn)
        return straight_fn(*args)

    def run(*args):
        with mock.patch.object(platform, "choose", choose):
            result = fn(*args)
        assert chosen, "traced before, as for a CPU"
        return result

    return run


@functools.cache
def programs(kind, successor, num_slots, num_envs):
    """A buffer; its `add`, and a program that draws, both compiled both ways."""
    make, _, options = KINDS[kind]
    options = {**options, **SUCCESSORS[successor][0]}
    if kind == "episodes":
        options["max_length"] = min(options["max_length"], num_slots)
    # Another class, so that none of its methods has been traced before.
    twin = type(make.__name__, (make,), {})
    both = [kind(num_slots * num_envs, num_envs, **options) for kind in (make, twin)]

    def read(buffer, state, seed):
        keys = jax.random.split(jax.random.key(seed))
        stacked = buffer.replace(n_step=N_STEP, gamma=GAMMA, stack=STACK)
        return {
            "sample": buffer.sample(state, keys[0], NUM_DRAWS),
            "stacked": stacked.sample(state, keys[1], NUM_DRAWS),
            "can_sample": [
                variant.can_sample(state, n)
                for n in range(1, 4)
                for variant in (buffer, stacked)
            ],
        }

    adds = quick_jit(both[0].add), quick_jit(straight(both[1].add))
    reads = (functools.partial(read, buffer) for buffer in both)
    return both[0], adds, [quick_jit(next(reads)), quick_jit(straight(next(reads)))]


def check_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((one, other)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "successor", "size"), SIZES)
def test_any_sequence_of_chunks_has_the_same_bits(kind, successor, size):
    """Every state and every draw; chunks are added both ways."""
    num_slots, num_envs = size
    buffer, adds, reads = programs(kind, successor, num_slots, num_envs)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        states = [buffer.init(row_like(num_envs))] * 2
        model = Model(num_slots, num_envs)
        for number in range(4):
            chunk = encode(*random_chunk(model, rng))
            states = [
                add(state, chunk) for add, state in zip(adds, states, strict=True)
            ]
            check_equal(*states)
            if kind == "prioritized":  # some rows of no priority, some twice
                indices = rng.integers(num_slots * num_envs, size=4).astype(np.int32)
                priorities = jnp.asarray([0.0, 0.0, 0.5, 2.0])
                states = [buffer.update_priorities(states[0], indices, priorities)] * 2
            check_equal(*(read(states[0], 4 * seed + number) for read in reads))


def test_program_follows_the_platform_and_not_the_process():
    """Lowering a program makes the choice, for the platform it is lowered for."""

    def double(x):
        return platform.choose(lambda x: x + x, lambda x: x * 2, x)

    def text(name):
        traced = jax.jit(double).trace(1.5)
        return traced.lower(lowering_platforms=(name,)).as_text()

    for name in ("cpu", "tpu"):
        assert "stablehlo.add" in text(name)
        assert "stablehlo.multiply" not in text(name)
    for name in ("cuda", "rocm"):
        assert "stablehlo.multiply" in text(name)
        assert "stablehlo.add" not in text(name)

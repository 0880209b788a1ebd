"""All buffers: random sequences of operations compared with a slow model."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_checks import (
    BETA,
    CASES,
    CHUNKS,
    GAMMA,
    KINDS,
    NUM_ENVS,
    NUM_SLOTS,
    STACK,
    EpisodeModel,
    check,
    example_row,
    indices,
    init_case,
    programs,
    random_chunk,
)
from cases import on_a_gpu, quick_jit
from ring_model import Model, encode
from scipy import stats as scipy_stats

from rollout import buffers
from rollout.base import platform

pytestmark = pytest.mark.usefixtures("quick_compile")
slow = pytest.mark.slow
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("buffer_kind", "successor"),
    [CASES[0], *(pytest.param(*case, marks=slow) for case in CASES[1:])],
)
def test_random_operations_match_the_model(buffer_kind, successor):
    _, add, read = programs(buffer_kind, successor)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        state, model = init_case(buffer_kind, successor)
        for _ in range(1 + seed % 6):
            steps, mask = random_chunk(model, rng, masks=seed % 2)
            model.add(steps, mask)
            state = add(state, encode(steps, mask))
        got = read(state, jax.random.key(seed))
        check(jax.device_get(state), model, jax.device_get(got))


@pytest.mark.parametrize("successor", ["stored", pytest.param("shared", marks=slow)])
def test_uniform_sampling_is_even_over_usable_rows(successor):
    buffer, add, _ = programs("uniform", successor)
    state, model = init_case("uniform", successor)
    rng = np.random.default_rng(3)
    for _ in range(4):
        steps, mask = model.make_chunk(rng, 3, mask_rate=0.4)
        model.add(steps, mask)
        state = add(state, encode(steps, mask))
    usable = [indices(state, model)[row] for row in model.usable_rows()]
    batch = quick_jit(buffer.sample, static_argnums=2)(state, jax.random.key(0), 30_000)
    np.testing.assert_array_equal(batch.weights, np.ones(30_000))
    values, count = np.unique(np.asarray(batch.indices), return_counts=True)
    np.testing.assert_array_equal(values, np.sort(usable))
    assert scipy_stats.chisquare(count).pvalue > 0.01


@slow
@pytest.mark.usefixtures("key_reuse")  # both programs use one key
@pytest.mark.parametrize(("buffer_kind", "successor"), CASES)
def test_gpu_branches_return_equal_bits(buffer_kind, successor):
    twin_programs = (
        programs(buffer_kind, successor),
        programs(buffer_kind, successor, is_twin=True),
    )
    state = init_case(buffer_kind, successor)[0]
    for num_rows in CHUNKS:  # trace the CPU branches before `on_a_gpu`
        chunk = encode(*Model(NUM_SLOTS, NUM_ENVS).make_chunk(RNG, num_rows))
        twin_programs[0][2](twin_programs[0][1](state, chunk), jax.random.key(0))
    with on_a_gpu():
        for seed in range(20):
            rng = np.random.default_rng(seed)
            model = Model(NUM_SLOTS, NUM_ENVS)
            states = [init_case(buffer_kind, successor)[0]] * 2
            for number in range(4):
                chunk = encode(*random_chunk(model, rng))
                states = [
                    add(state, chunk)
                    for (_, add, _), state in zip(twin_programs, states, strict=True)
                ]
                chex.assert_trees_all_equal(*states)
                key = jax.random.fold_in(jax.random.key(seed), number)
                chex.assert_trees_all_equal(
                    *(x[2](states[0], key) for x in twin_programs)
                )


def test_platform_branch_is_chosen_at_lowering():

    def double(x):
        return platform.choose(lambda x: x + x, lambda x: x * 2, x)

    for name, expected in (("cpu", "add"), ("tpu", "add"), ("cuda", "multiply")):
        traced = jax.jit(double).trace(1.5)
        text = traced.lower(lowering_platforms=(name,)).as_text()
        operations = {op for op in ("add", "multiply") if f"stablehlo.{op}" in text}
        assert operations == {expected}


def make_large_state(buffer_kind, successor, num_envs, num_rows):
    """Returns a buffer with 4,099 slots per lane, an empty state and a chunk."""
    num_slots = 4099  # no other array has this dimension
    options = {} if successor == "stored" else {"next_obs": "shared"}
    buffer = KINDS[buffer_kind][0](num_slots * num_envs, num_envs, **options)
    steps = Model(num_slots, num_envs).make_chunk(np.random.default_rng(0), num_rows)
    chunk = encode(*steps)
    return buffer, buffer.init(jax.tree.map(lambda x: x[0], chunk)), chunk


def check_in_place(fn, state, *args):
    """Checks that a donated state is aliased and that no ring array is copied."""
    program = jax.jit(fn, donate_argnums=0).lower(state, *args).compile()
    memory = program.memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.99 * size
    shapes = {
        str(list(leaf.shape)).replace(" ", "")
        for leaf in jax.tree.leaves(state)
        if leaf.size > 1000
    }
    copies = [line for line in program.as_text().splitlines() if " copy(" in line]
    assert not [line for line in copies if any(shape in line for shape in shapes)]
    return memory.temp_size_in_bytes / size


@pytest.mark.parametrize(
    ("buffer_kind", "successor", "num_envs", "num_rows"),
    [
        ("uniform", "stored", 4, 1),
        ("uniform", "shared", 4, 4),
        ("episodes", "stored", 1, 1),
        pytest.param("episodes", "shared", 4, 4, marks=slow),
        pytest.param("prioritized", "shared", 4, 1, marks=slow),
    ],
)
def test_add_writes_in_place(buffer_kind, successor, num_envs, num_rows):
    """In a buffer with a single lane, XLA could move reads after the write."""
    buffer, state, chunk = make_large_state(buffer_kind, successor, num_envs, num_rows)
    assert check_in_place(buffer.add, state, chunk) < 0.05


@pytest.mark.parametrize(
    ("buffer_kind", "successor"),
    [
        ("uniform", "stored"),
        pytest.param("prioritized", "shared", marks=slow),
        pytest.param("episodes", "shared", marks=slow),
    ],
)
def test_add_and_sample_in_one_scan_write_in_place(buffer_kind, successor):
    """Samples and updates priorities between two writes of the same program."""
    buffer, state, chunk = make_large_state(buffer_kind, successor, 4, 1)
    buffer = buffer.replace(n_step=2, gamma=GAMMA)
    beta = {"beta": BETA} if buffer_kind == "prioritized" else {}

    def train(state, key):
        def step(state, key):
            state = buffer.add(state, chunk)
            batch = buffer.sample(state, key, 8, **beta)
            if buffer_kind == "prioritized":
                state = buffer.update_priorities(state, batch.indices, batch.weights)
            return state, batch.experience.reward.sum()

        return jax.lax.scan(step, state, jax.random.split(key, 5))

    check_in_place(train, state, jax.random.key(0))


@pytest.mark.parametrize(
    ("buffer_type", "num_slots", "num_rows", "length"),
    [
        (buffers.ReplayBuffer, 4, 4, 9),
        pytest.param(buffers.EpisodeBuffer, 9, 18, 4, marks=slow),
    ],
)
def test_rows_with_overwritten_history_are_not_sampled(
    buffer_type, num_slots, num_rows, length
):
    """The oldest row of a full lane may be a later step of its episode."""
    buffer = buffer_type(num_slots, 1, stack=3)

    def row(number):
        ends = (number % length == length - 1)[None]
        return {"obs": number[None], "terminated": ends, "truncated": ~ends & ends}

    def step(state, number):
        state = buffer.add(state, row(number))
        return state, buffer.can_sample(state, 3)

    @quick_jit
    def fill():
        state = buffer.init(row(jnp.int32(0)))
        state, can_sample = jax.lax.scan(step, state, jnp.arange(num_rows))
        return can_sample, buffer.sample(state, jax.random.key(0), 500)

    can_sample, batch = fill()
    assert batch.weights.all()
    stacks = np.unique(np.asarray(batch.experience["obs"]), axis=0)
    newest = stacks[:, -1:]
    want = np.maximum(newest - [[2, 1, 0]], newest // length * length)
    np.testing.assert_array_equal(stacks, want)
    if buffer_type is buffers.ReplayBuffer:
        # In a full lane, only the two newest rows have two predecessors.
        np.testing.assert_array_equal(can_sample, [False, False, True, False])
        np.testing.assert_array_equal(newest[:, 0], [2, 3])


@slow
def test_pending_rows_are_not_sampled():
    """Complete rows have lost their history; pending row 0 still has its history."""
    buffer, add, read = programs("episodes", "stored")
    state = buffer.init(example_row(NUM_ENVS))
    model = EpisodeModel(NUM_SLOTS, NUM_ENVS)
    steps, mask = model.make_chunk(
        np.random.default_rng(2116), 8, done_rate=0.2, break_rate=0.0
    )
    model.add(steps, mask)
    assert model.rows()
    assert not model.usable_rows(STACK)
    state = add(state, encode(steps, mask))
    assert state.ring.experience.episode_length[0, 0] == 1
    batch = read(state, jax.random.key(0))["n_step"]
    assert not np.any(batch.weights)
    assert not np.any(batch.experience.mask)


def test_empty_leaves_are_stored():
    buffer = buffers.ReplayBuffer(8, 2)
    rows = {"nothing": np.zeros((3, 2, 0), np.float32)}
    rows["id"] = np.arange(6, dtype=np.int32).reshape(3, 2)
    state = buffer.add(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    gathered = jax.jit(lambda state: buffer.gather(state, [0, 5]))(state)
    assert gathered["nothing"].shape == (2, 0)
    assert gathered["id"].tolist() == [0, 5]


def test_named_tuples_and_dicts_are_stored():
    class PlainRow(NamedTuple):
        obs: jax.Array
        mask: jax.Array

    buffer = buffers.ReplayBuffer(8, 2)
    plain = PlainRow(np.float32([0, 1]), np.array([True, False]))
    for row in (plain, plain._asdict()):
        state = buffer.add(buffer.init(row), row)
        np.testing.assert_array_equal(state.size, [1, 0])
        rows = buffer.sample(state, jax.random.key(0), 3).experience
        assert type(rows) is type(row)
        chex.assert_trees_all_equal(rows, jax.tree.map(lambda x: x[[0] * 3], row))


def test_n_step_vector_rewards_with_vmapped_gamma():
    flag = np.zeros((4, 1), bool)
    reward = np.arange(8, dtype=np.float32).reshape(4, 1, 2)
    rows = {"reward": reward, "terminated": flag, "truncated": flag}
    buffer = buffers.ReplayBuffer(8, 1, n_step=3, gamma=0.9)
    state = buffer.add(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    gammas = np.float32([0.5, 0.9, 1.0])

    @quick_jit
    @jax.vmap
    def sample(gamma):
        return buffer.replace(gamma=gamma).sample(state, jax.random.key(0), 64)

    batch = sample(gammas)
    # `[gamma, row, component]`: the return of a row ends with the newest row, row 3.
    want = np.zeros((3, 4, 2), np.float32)
    num_steps = np.minimum(3, 4 - np.arange(4))
    for row, length in enumerate(num_steps):
        for k in range(length):
            want[:, row] += gammas[:, None] ** k * reward[row + k, 0]
    index = np.asarray(batch.indices)
    assert set(np.unique(index)) == {0, 1, 2, 3}
    got = batch.experience["reward"]
    gamma_index = np.arange(3)[:, None]
    np.testing.assert_allclose(got, want[gamma_index, index], rtol=1e-6)
    want_discount = gammas[:, None] ** num_steps[index]
    np.testing.assert_allclose(batch.discount, want_discount, rtol=1e-6)
    assert buffer == buffers.ReplayBuffer(8, 1, n_step=3, gamma=0.9)

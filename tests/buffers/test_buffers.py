"""Every buffer against a slow model: random sequences of operations, row by row."""

from typing import NamedTuple

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
    check_more,
    indices,
    programs,
    row_like,
    start,
)
from cases import make_collector, quick_jit
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ring_model import Model, encode
from scipy import stats as scipy_stats

from rollout import buffers

RATES = {
    "mask_rate": [0.0, 0.0, 0.3, 0.8],
    "done_rate": [0.0, 0.2, 0.5, 1.0],
    "break_rate": [0.0, 0.0, 0.3],
}


def run_operations(kind, successor, rng, num_operations, choose, more=True):
    """Adds and clears at random; at the end all must be as the model says.

    `choose` takes one of a list. How often a row is masked, ends an episode, or breaks
    one off, changes from chunk to chunk.
    """
    buffer, add, read, read_more = programs(kind, successor)
    state, model = start(kind, successor)
    for _ in range(num_operations):
        if choose(range(8)) == 0:
            state = buffer.clear(state)
            model.clear()
            continue
        rates = {name: choose(values) for name, values in RATES.items()}
        steps, mask = model.make_chunk(rng, choose(CHUNKS), **rates)
        model.add(steps, mask)
        state = add(state, encode(steps, mask))
    keys = [jax.random.key(seed) for seed in rng.integers(2**31, size=2)]
    check(jax.device_get(state), model, jax.device_get(read(state, keys[0])))
    if more:
        got = read_more(state, keys[1])
        check_more(jax.device_get(state), model, jax.device_get(got))


# Each way of the successor once; a buffer of episodes draws as the uniform one does.
@pytest.mark.parametrize(
    ("kind", "successor", "more"),
    [
        pytest.param("prioritized", "shared", False, marks=pytest.mark.slow),
        pytest.param("episodes", "stored", True, marks=pytest.mark.slow),
    ],
)
def test_short_sequences_of_operations_agree_with_the_model(kind, successor, more):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        choose = lambda values, rng=rng: values[rng.integers(len(values))]  # noqa: E731
        run_operations(kind, successor, rng, 1 + seed % 5, choose, more)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_pieces_and_episodes_are_read_from_their_first_row_on(kind):
    length = np.array([1, 2, 3, 1, 2, 1, 2])  # the third episode is unfinished
    last = np.array([3, 3, 3, 5, 5, 7, 7])  # where the episode of a row stops
    rows = {
        "number": np.arange(7, dtype=np.int32)[:, None],
        "terminated": np.isin(np.arange(7), [2, 4])[:, None],
        "truncated": np.zeros((7, 1), bool),
        "episode_length": length.astype(np.int32)[:, None],
    }
    buffer = KINDS[kind][0](8, 1)

    @quick_jit
    def draw(keys):
        state = buffer.init(jax.tree.map(lambda x: x[0], rows))
        state = buffer.add(state, jax.tree.map(jnp.asarray, rows))
        pieces = buffer.sample_sequences(state, keys[0], 64, 2)
        return pieces, buffer.sample_episodes(state, keys[1], 64, 3)

    batches = draw(jax.random.split(jax.random.key(0)))
    for batch, longest, first in zip(batches, (2, 3), (range(7), (0, 3)), strict=True):
        start = np.asarray(batch.indices)
        assert set(start) == set(first)
        step = start[None] + np.arange(longest)[:, None]
        np.testing.assert_array_equal(batch.mask, step < last[start])
        want = np.minimum(step, last[start] - 1)  # the last row again
        np.testing.assert_array_equal(batch.experience["number"], want)
        np.testing.assert_array_equal(batch.weights, np.ones(64))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "successor"), CASES)
def test_any_sequence_of_operations_agrees_with_the_model(kind, successor):
    @settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(data=st.data())
    def run(data):
        rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
        choose = lambda values: data.draw(st.sampled_from(values))  # noqa: E731
        # Other cases check the remaining draws of these two.
        more = (kind, successor) not in (
            ("uniform", "shared"),
            ("prioritized", "shared"),
        )
        number = data.draw(st.integers(1, 6))
        run_operations(kind, successor, rng, number, choose, more)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("successor", ["stored", "shared"])
def test_uniform_draws_are_even_over_the_rows_that_may_be_used(successor):
    buffer, add, *_ = programs("uniform", successor)
    state, model = start("uniform", successor)
    rng = np.random.default_rng(3)
    for _ in range(4):
        steps, mask = model.make_chunk(rng, 3, mask_rate=0.4)
        model.add(steps, mask)
        state = add(state, encode(steps, mask))
    usable = [indices(state, model)[row] for row in model.usable()]
    batch = quick_jit(buffer.sample, static_argnums=2)(state, jax.random.key(0), 30_000)
    values, count = np.unique(np.asarray(batch.indices), return_counts=True)
    np.testing.assert_array_equal(values, np.sort(usable))
    assert scipy_stats.chisquare(count).pvalue > 0.01


def copies(program, state):
    """Copies of large leaves of the state in a compiled program."""
    shapes = {
        str(list(leaf.shape)).replace(" ", "")
        for leaf in jax.tree.leaves(state)
        if leaf.size > 1000
    }
    lines = [line for line in program.as_text().splitlines() if " copy(" in line]
    return [line for line in lines if any(shape in line for shape in shapes)]


def slow_but(quick, cases):
    """Marks all cases as slow that are not among the quick ones."""
    slow = pytest.mark.slow
    return [x if x in quick else pytest.param(*x, marks=slow) for x in cases]


@pytest.mark.parametrize(
    ("kind", "successor", "num_rows"),
    slow_but(
        [("uniform", "stored", 1), ("episodes", "shared", 1), ("uniform", "shared", 4)],
        [*((*case, 1) for case in CASES), *((kind, "shared", 4) for kind in KINDS)],
    ),
)
def test_add_writes_in_place(kind, successor, num_rows):
    """Donated, the state is aliased whole, and no leaf of the ring is copied."""
    num_slots, num_envs = 4099, 4  # no other array has these dimensions
    make = KINDS[kind][0]
    options = {} if successor == "stored" else {"next_obs": "shared"}
    buffer = make(num_slots * num_envs, num_envs, **options)
    model = Model(num_slots, num_envs)
    chunk = encode(*model.make_chunk(np.random.default_rng(0), num_rows))
    state = buffer.init(jax.tree.map(lambda x: x[0], chunk))
    program = jax.jit(buffer.add, donate_argnums=0).lower(state, chunk).compile()
    memory = program.memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.99 * size
    assert memory.temp_size_in_bytes < 0.05 * size
    assert not copies(program, state)


@pytest.mark.parametrize(
    ("kind", "successor"),
    slow_but(
        [("uniform", "stored")],
        [("uniform", "stored"), ("prioritized", "shared"), ("episodes", "shared")],
    ),
)
def test_training_step_of_add_and_sample_writes_in_place(kind, successor):
    """Also with a sample, and an update, between two writes in one program."""
    num_slots, num_envs = 4099, 4
    options = {} if successor == "stored" else {"next_obs": "shared"}
    buffer = KINDS[kind][0](num_slots * num_envs, num_envs, **options)
    steps = Model(num_slots, num_envs).make_chunk(np.random.default_rng(0), 1)
    chunk = jax.tree.map(jnp.asarray, encode(*steps))
    state = buffer.init(jax.tree.map(lambda x: x[0], chunk))
    beta = {"beta": BETA} if kind == "prioritized" else {}

    def train(state, key):
        def step(state, key):
            state = buffer.add(state, chunk)
            batch = buffer.sample(state, key, 8, n_step=2, gamma=GAMMA, **beta)
            if kind == "prioritized":
                state = buffer.update(state, batch.indices, batch.weights)
            return state, batch.experience.reward.sum()

        return jax.lax.scan(step, state, jax.random.split(key, 5))

    program = jax.jit(train, donate_argnums=0).lower(state, jax.random.key(0)).compile()
    memory = program.memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= 0.99 * size
    assert not copies(program, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "successor"),
    [("uniform", "shared"), ("episodes", "stored")],
)
def test_kernel_fills_it_in_one_program(kind, successor):
    collector = make_collector("count", 4)
    carry = collector.init(jax.random.key(0))
    options = {} if successor == "stored" else {"next_obs": "shared"}
    buffer = KINDS[kind][0](64 * 4, 4, **options)
    _, transition = jax.eval_shape(collector.step, carry, None)

    @jax.jit
    def fill(carry):
        state = buffer.init(transition)
        carry, state = collector.fold_steps(
            carry, None, buffer.add, state, num_steps=20
        )
        carry, state, episodes = collector.fold_episodes(
            carry, None, buffer.add, state, num_episodes=6, max_steps=99
        )
        return state, episodes

    state, episodes = fill(carry)
    _, trajectory = collector.collect_steps(carry, None, 20)
    ended = int(trajectory.done.sum())
    assert buffer.count_episodes(state, 9) == ended + 6
    if kind == "episodes":
        # Unfinished episodes were given up for the six of the queue.
        assert state.num_abandoned == 4 - int(trajectory.done[-1].sum())
        assert state.num_too_long == 0
    else:
        # Idle rows are not stored; episodes of the queue have ids below 0.
        assert buffer.size(state) == 80 + episodes.num_steps
        every = jnp.arange(buffer.capacity)
        rows = jax.jit(lambda state: buffer.get(state, every))(state)
        stored = np.arange(64)[:, None] < np.asarray(state.size)[None]
        from_queue = (rows.episode_id < 0) & stored.reshape(-1)
        assert from_queue.sum() == episodes.num_steps


def test_history_tells_frames_apart_that_were_evicted():
    """Without `episode_length` a full lane's oldest rows may have lost their past."""
    buffer = buffers.ReplayBuffer(4, 1)
    row = {"obs": jnp.zeros((1,)), "terminated": jnp.zeros((1,), bool)}
    row["truncated"] = row["terminated"]

    def step(state, number):
        state = buffer.add(state, {**row, "obs": number[None]})
        return state, buffer.can_sample(state, 3, stack=3)

    @quick_jit
    def fill():
        state, can_sample = jax.lax.scan(step, buffer.init(row), jnp.arange(4.0))
        return can_sample, buffer.sample(state, jax.random.key(0), 32, stack=3)

    can_sample, batch = fill()
    # Row 0 begins an episode; once it is full, only two rows have two before them.
    np.testing.assert_array_equal(can_sample, [False, False, True, False])
    assert set(np.asarray(batch.experience["obs"])[:, -1]) == {2.0, 3.0}


@pytest.mark.slow
def test_no_row_under_way_is_drawn_where_no_other_may_be():
    """Visible rows have lost their history; row 0 is pending, and would serve."""
    buffer, add, read, _ = programs("episodes", "stored")
    state = buffer.init(row_like(NUM_ENVS))
    model = EpisodeModel(NUM_SLOTS, NUM_ENVS)
    steps, mask = model.make_chunk(
        np.random.default_rng(2116), 8, done_rate=0.2, break_rate=0.0
    )
    model.add(steps, mask)
    assert model.rows()
    assert not model.usable(STACK)
    state = add(state, encode(steps, mask))
    assert state.ring.experience.episode_length[0, 0] == 1
    batch = read(state, jax.random.key(0))["n_step"]
    assert not np.any(batch.weights)
    assert not np.any(batch.experience.mask)


def test_leaf_may_be_empty():
    buffer = buffers.ReplayBuffer(8, 2)
    rows = {"nothing": jnp.zeros((3, 2, 0)), "id": jnp.arange(6).reshape(3, 2)}
    state = buffer.add(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    read = buffer.get(state, [0, 5])  # indices may be a list
    assert read["nothing"].shape == (2, 0)
    assert read["id"].tolist() == [0, 5]


def test_containers_of_other_kinds_serve_as_well():
    class Plain(NamedTuple):
        obs: jax.Array
        mask: jax.Array

    for row in (
        Plain(jnp.arange(2.0), jnp.array([True, False])),
        {"obs": jnp.arange(2.0), "mask": jnp.array([True, False])},
    ):
        buffer = buffers.ReplayBuffer(8, 2)

        @quick_jit
        def fill(row, buffer=buffer):
            state = buffer.add(buffer.init(row), row)
            return state, buffer.sample(state, jax.random.key(0), 3)

        state, batch = fill(row)
        np.testing.assert_array_equal(state.size, [1, 0])
        assert type(batch.experience) is type(row)
        rows = batch.experience if isinstance(row, dict) else batch.experience._asdict()
        np.testing.assert_array_equal(rows["obs"], np.zeros(3))
        np.testing.assert_array_equal(rows["mask"], np.ones(3, bool))


def test_vector_rewards_sum_component_by_component():
    buffer = buffers.ReplayBuffer(6, 1)
    flag = np.zeros((3, 1), bool)
    reward = np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    rows = {"reward": reward, "terminated": flag, "truncated": flag}

    @quick_jit
    def fill(rows):
        state = buffer.init(jax.tree.map(lambda x: x[0], rows))
        state = buffer.add(state, rows)
        return buffer.sample(state, jax.random.key(0), 64, n_step=2, gamma=0.5)

    batch = fill(rows)
    # Rows 0, 1 and 2: the last one has no further step.
    want = np.array([[0 + 1, 1 + 1.5], [2 + 2, 3 + 2.5], [4, 5]])
    np.testing.assert_array_equal(batch.experience["reward"], want[batch.indices])
    np.testing.assert_array_equal(
        batch.discount, np.array([0.25, 0.25, 0.5])[batch.indices]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"next_obs": "none"}, '`next_obs` must be "stored" or "shared", got'),
        ({"final_obs_capacity": 9}, 'goes with next_obs="shared", got 9 with "stored"'),
        (
            {"next_obs": "shared", "final_obs_capacity": 3},
            "`final_obs_capacity` must be an int of at least 4, got 3",
        ),
        (
            {"next_obs": "shared", "final_obs_capacity": 0},
            "`final_obs_capacity` must be an int of at least 4, got 0",
        ),
    ],
)
def test_successors_are_kept_one_way_or_the_other(options, message):
    with pytest.raises(ValueError, match=message):
        buffers.ReplayBuffer(40, 4, **options)


def test_episode_fits_into_a_lane():
    with pytest.raises(ValueError, match="`max_length` must be at most 10, got 11"):
        buffers.EpisodeBuffer(40, 4, max_length=11)


def test_rows_number_fits_into_int32():
    with pytest.raises(ValueError, match=f"`capacity` must be at most {2**30}, got"):
        buffers.ReplayBuffer(2**30 + 1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_step": 3}, "`n_step` and `gamma` go together, got only `n_step`"),
        ({"gamma": 0.9}, "`n_step` and `gamma` go together, got only `gamma`"),
        ({"n_step": 0, "gamma": 0.9}, "`n_step` must be an int of at least 1, got 0"),
        ({"n_step": 1, "gamma": 1.5}, r"`gamma` must be a number in \[0, 1\], got 1.5"),
        ({"stack": 0}, "`stack` must be an int of at least 1, got 0"),
    ],
)
def test_targets_that_make_no_sense_are_refused(options, message):
    buffer = programs("uniform", "stored").buffer
    state = buffer.init(row_like(NUM_ENVS))
    with pytest.raises(ValueError, match=message):
        buffer.sample(state, jax.random.key(0), 4, **options)


def test_fields_that_are_needed_are_named():
    buffer = buffers.ReplayBuffer(8, 2)
    state = buffer.init({"reward": jnp.zeros((2,))})
    index = jnp.zeros((1,), jnp.int32)
    for call, message in (
        (lambda: buffer.previous(state, index), "needs the field `terminated`"),
        (lambda: buffer.following(state, index), "needs the field `terminated`"),
        (lambda: buffer.unfinished(state), "needs the field `terminated`"),
        (
            lambda: buffer.sample(state, jax.random.key(0), 1, n_step=1, gamma=1.0),
            "needs the field `terminated`",
        ),
        (
            lambda: buffer.sample(state, jax.random.key(0), 1, stack=2),
            "needs the field `terminated`",
        ),
        (
            lambda: buffer.sample_sequences(state, jax.random.key(0), 1, 2),
            "needs the field `terminated`",
        ),
        (
            lambda: buffer.sample_episodes(state, jax.random.key(0), 1, 2),
            "needs the field `episode_length`",
        ),
        (
            lambda: buffers.EpisodeBuffer(8, 2).init({"reward": jnp.zeros((2,))}),
            "`EpisodeBuffer` needs the field `terminated`",
        ),
        (
            lambda: buffers.ReplayBuffer(8, 2, next_obs="shared").init(
                {"obs": jnp.zeros((2,))}
            ),
            'next_obs="shared" needs the field `next_obs`',
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()

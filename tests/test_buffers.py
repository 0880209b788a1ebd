"""Every buffer against a slow model: random sequences of operations, row by row."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_collector
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ring_model import Model, decode_obs, encode
from scipy import stats as scipy_stats

import buffers

NUM_SLOTS, NUM_ENVS = 5, 3
NUM_FINALS = 4
STACK, N_STEP, GAMMA = 3, 3, 0.5  # powers of a half are exact
LENGTH, MAX_LENGTH = 3, 4
NUM_DRAWS = 256  # of at most 15 rows: one is missed once in three million samples
BETA = 0.5
# Lengths are few, so that few programs are compiled; 8 is longer than the ring.
CHUNKS = (1, 3, 8)


class EpisodeModel(Model):
    """Rows of an episode under way wait apart, and take the room of the oldest ones."""

    def __init__(self, num_slots, num_envs, num_finals=None, max_length=MAX_LENGTH):
        super().__init__(num_slots, num_envs, num_finals)
        self.max_length = max_length
        self.waiting = [[] for _ in range(num_envs)]
        self.too_long = [None] * num_envs  # the last row of one that is passed over
        self.num_too_long = self.num_abandoned = 0

    def add(self, steps, mask):
        for t, lane in np.argwhere(mask):
            self.append(int(lane), steps[t][lane])

    def append(self, lane, step):
        waiting = self.waiting[lane]
        last = waiting[-1] if waiting else self.too_long[lane]
        if last and last.number + 1 != step.number:
            self.num_abandoned += bool(waiting)
            waiting.clear()
            self.too_long[lane] = None
        if len(waiting) == self.max_length:
            self.num_too_long += 1
            waiting.clear()
            self.too_long[lane] = step
        if self.too_long[lane]:
            self.too_long[lane] = None if step.done else step
            return
        waiting.append(step)
        while len(self.lanes[lane]) + len(waiting) > self.num_slots:
            self.lanes[lane].popleft()
        if step.done:
            if self.finals is not None:
                self.finals.append(step.number)
            self.lanes[lane].extend(waiting)
            waiting.clear()

    def clear(self):
        super().clear()
        self.num_too_long = self.num_abandoned = 0
        for lane in range(self.num_envs):
            self.waiting[lane].clear()
            self.too_long[lane] = None


KINDS = {
    "uniform": (buffers.ReplayBuffer, Model, {}),
    "prioritized": (buffers.PrioritizedReplayBuffer, Model, {}),
    "episodes": (buffers.EpisodeBuffer, EpisodeModel, {"max_length": MAX_LENGTH}),
}
SUCCESSORS = {
    "stored": ({}, None),
    "shared": ({"successor": "shared", "final_capacity": NUM_FINALS}, NUM_FINALS),
}
CASES = [(kind, successor) for kind in KINDS for successor in SUCCESSORS]


def row_like(num_envs):
    model = Model(1, num_envs)
    steps, mask = model.make_chunk(np.random.default_rng(0), 1)
    return jax.tree.map(lambda x: x[0], encode(steps, mask))


@functools.cache
def programs(kind, successor):
    """The buffer, its compiled `add`, and one program that reads all there is."""
    make, _, options = KINDS[kind]
    buffer = make(NUM_SLOTS * NUM_ENVS, NUM_ENVS, **options, **SUCCESSORS[successor][0])
    beta = {"beta": BETA} if kind == "prioritized" else {}

    def read(state, key):
        keys = jax.random.split(key, 4)
        every = jnp.arange(NUM_SLOTS * NUM_ENVS)
        draw = functools.partial(buffer.sample, state, batch_size=NUM_DRAWS, **beta)
        return {
            "size": buffer.size(state),
            "get": buffer.get(state, every),
            "previous": buffer.previous(state, every),
            "following": buffer.following(state, every),
            "unfinished": buffer.unfinished(state),
            "plain": draw(keys[0]),
            "n_step": draw(keys[1], n_step=N_STEP, gamma=GAMMA, stack=STACK),
            "sequences": buffer.sample_sequences(
                state, keys[2], NUM_DRAWS, LENGTH, **beta
            ),
            "episodes": buffer.sample_episodes(state, keys[3], NUM_DRAWS, MAX_LENGTH),
            "num_lost": buffer.count_lost(state),
            "num_episodes": buffer.count_episodes(state, MAX_LENGTH),
            "can_sample": [buffer.can_sample(state, n) for n in (1, 2, 5, 9, 15)],
            "can_stack": [
                buffer.can_sample(state, n, stack=STACK) for n in (1, 2, 5, 9, 15)
            ],
        }

    return buffer, jax.jit(buffer.add), jax.jit(read)


def start(kind, successor):
    buffer = programs(kind, successor)[0]
    model = KINDS[kind][1](NUM_SLOTS, NUM_ENVS, SUCCESSORS[successor][1])
    return buffer.init(row_like(NUM_ENVS)), model


def indices(state, model):
    """The row number of every row of the model."""
    ring, found = state.ring, {}
    for lane, position in model.rows():
        held, head = len(model.lanes[lane]), int(ring.head[lane])
        slot = (head - held + position) % NUM_SLOTS
        found[lane, position] = slot * NUM_ENVS + lane
    return found


def check_held(state, model, got):
    """Every row that is stored, where it goes on to and where it comes from."""
    index = indices(state, model)
    assert got["size"] == len(index)
    held = np.array([index[row] for row in model.rows()], int)
    number = np.array([model.step(row).number for row in model.rows()], int)
    rows = jax.tree.map(lambda x: np.asarray(x)[held], got["get"])
    usable = np.array([model.has_successor(row) for row in model.rows()], bool)
    np.testing.assert_array_equal(decode_obs(rows.obs), number)
    np.testing.assert_array_equal(rows.extras["policy_state"], number * 2)
    np.testing.assert_array_equal(decode_obs(rows.next_obs)[usable], number[usable] + 1)
    mask = np.zeros(NUM_SLOTS * NUM_ENVS, bool)
    mask[held] = usable
    np.testing.assert_array_equal(got["get"].mask, mask)
    ended = np.array([model.step(row).done for row in model.rows()], bool)
    assert got["num_lost"] == np.sum(ended & ~usable)
    for name in ("previous", "following"):
        want = [index[getattr(model, name)(row) or row] for row in model.rows()]
        np.testing.assert_array_equal(got[name][held], want)


def check_unfinished(state, model, got):
    row, mask = got["unfinished"]
    for lane in range(NUM_ENVS):
        held = len(model.lanes[lane])
        want = bool(held) and not model.step((lane, held - 1)).done
        assert mask[lane] == want
        if held:
            assert row[lane] == indices(state, model)[lane, held - 1]


def drawn(state, model, batch, allowed):
    """The rows of the model that were drawn, which must be all that are allowed."""
    if not allowed:
        assert not np.any(batch.weights)
        return []
    row_of = {index: row for row, index in indices(state, model).items()}
    rows = [row_of[int(index)] for index in batch.indices]
    assert set(rows) == set(allowed)
    assert np.all(batch.weights > 0)
    return rows


def check_transitions(state, model, got, allowed):
    rows = drawn(state, model, got["plain"], allowed(1))
    if rows:
        steps = [model.step(row) for row in rows]
        number = np.array([step.number for step in steps])
        experience = got["plain"].experience
        np.testing.assert_array_equal(decode_obs(experience.obs), number)
        np.testing.assert_array_equal(decode_obs(experience.next_obs), number + 1)
        np.testing.assert_array_equal(
            experience.truncated, [step.truncated for step in steps]
        )
        assert experience.mask.all()


def check_n_step(state, model, got, allowed):
    rows = drawn(state, model, got["n_step"], allowed(STACK))
    if not rows:
        return
    experience = jax.tree.map(np.asarray, got["n_step"].experience)
    obs, next_obs = decode_obs(experience.obs), decode_obs(experience.next_obs)
    wanted = {row: n_step_of(model, row) for row in set(rows)}
    for k, row in enumerate(rows):
        want = wanted[row]
        assert experience.reward[k] == want["reward"]  # sums of quarters are exact
        assert got["n_step"].discount[k] == want["discount"]
        assert experience.terminated[k] == want["last"].terminated
        assert experience.truncated[k] == want["last"].truncated
        assert experience.episode_length[k] == model.step(row).episode_length
    for name, number in (("obs", obs), ("next_obs", next_obs)):
        want = np.array([wanted[row][name] for row in rows])
        np.testing.assert_array_equal(number, want.reshape(number.shape))


def n_step_of(model, row):
    total, discount, last = model.n_step(row, N_STEP, GAMMA)
    step = model.step(last)
    return {
        "reward": total,
        "discount": discount,
        "last": step,
        "obs": model.history(row, STACK),
        "next_obs": [*model.history(last, STACK)[1:], step.number + 1],
    }


def check_pieces(batch, pieces):
    """Pieces of the model against `[L, S]` rows and their mask."""
    number = decode_obs(batch.experience.obs)
    successor = decode_obs(batch.experience.next_obs)
    mask = np.asarray(batch.mask)
    np.testing.assert_array_equal(mask.sum(axis=0), [len(piece) for piece in pieces])
    np.testing.assert_array_equal(batch.experience.mask, mask)
    longest = mask.shape[0]
    want = np.array([piece + piece[-1:] * (longest - len(piece)) for piece in pieces]).T
    np.testing.assert_array_equal(number, want)
    np.testing.assert_array_equal(successor, want + 1)
    np.testing.assert_array_equal(mask, np.arange(longest)[:, None] < mask.sum(axis=0))
    np.testing.assert_array_equal(batch.policy_state, 2 * want[0])


def check_sequences(state, model, got, allowed):
    rows = drawn(state, model, got["sequences"], allowed(1))
    piece_of = {
        row: [model.step(each).number for each in model.window(row, LENGTH)]
        for row in set(rows)
    }
    if rows:
        check_pieces(got["sequences"], [piece_of[row] for row in rows])


def check_episodes(model, got):
    whole = model.whole_episodes(MAX_LENGTH)
    assert got["num_episodes"] == len(whole)
    batch = got["episodes"]
    if not whole:
        assert not np.any(batch.mask)
        assert not np.any(batch.weights)
        return
    first = decode_obs(batch.experience.obs)[0]
    assert set(first) == set(whole)
    check_pieces(
        batch,
        [[model.step(row).number for row in whole[number]] for number in first],
    )


def check(state, model, got, positive=lambda row: True):
    """All that the buffer says; `positive` tells which rows have a priority."""

    def allowed(stack):
        return [row for row in model.usable(stack) if positive(row)]

    check_held(state, model, got)
    check_unfinished(state, model, got)
    check_transitions(state, model, got, allowed)
    check_n_step(state, model, got, allowed)
    check_sequences(state, model, got, allowed)
    check_episodes(model, got)
    for name, stack in (("can_sample", 1), ("can_stack", STACK)):
        want = [len(allowed(stack)) >= n for n in (1, 2, 5, 9, 15)]
        np.testing.assert_array_equal(got[name], want)
    if isinstance(model, EpisodeModel):
        assert state.num_too_long == model.num_too_long
        assert state.num_abandoned == model.num_abandoned


def draw_rates(data):
    """How often a row is masked, ends an episode, or breaks one off."""
    return {
        "mask_rate": data.draw(st.sampled_from([0.0, 0.0, 0.3, 0.8])),
        "done_rate": data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])),
        "break_rate": data.draw(st.sampled_from([0.0, 0.0, 0.3])),
    }


@pytest.mark.parametrize(("kind", "successor"), CASES)
def test_any_sequence_of_operations_agrees_with_the_model(kind, successor):
    buffer, add, read = programs(kind, successor)

    @settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(data=st.data())
    def run(data):
        state, model = start(kind, successor)
        rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
        for _ in range(data.draw(st.integers(1, 6))):
            if data.draw(st.integers(0, 7)) == 0:
                state = buffer.clear(state)
                model.clear()
                continue
            num_rows = data.draw(st.sampled_from(CHUNKS))
            steps, mask = model.make_chunk(rng, num_rows, **draw_rates(data))
            model.add(steps, mask)
            state = add(state, encode(steps, mask))
        got = read(state, jax.random.key(rng.integers(2**31)))
        check(jax.device_get(state), model, jax.device_get(got))

    run()


@pytest.mark.parametrize("successor", ["stored", "shared"])
def test_uniform_draws_are_even_over_the_rows_that_may_be_used(successor):
    buffer, add, _ = programs("uniform", successor)
    state, model = start("uniform", successor)
    rng = np.random.default_rng(3)
    for _ in range(4):
        steps, mask = model.make_chunk(rng, 3, mask_rate=0.4)
        model.add(steps, mask)
        state = add(state, encode(steps, mask))
    usable = [indices(state, model)[row] for row in model.usable()]
    batch = jax.jit(buffer.sample, static_argnums=2)(state, jax.random.key(0), 30_000)
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


@pytest.mark.parametrize(
    ("kind", "successor", "num_rows"),
    [*((*case, 1) for case in CASES), *((kind, "shared", 4) for kind in KINDS)],
)
def test_add_writes_in_place(kind, successor, num_rows):
    """Donated, the state is aliased whole, and no leaf of the ring is copied."""
    num_slots, num_envs = 4099, 4  # no other array has these dimensions
    make = KINDS[kind][0]
    options = {} if successor == "stored" else {"successor": "shared"}
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
    [("uniform", "stored"), *((kind, "shared") for kind in KINDS)],
)
def test_training_step_of_add_and_sample_writes_in_place(kind, successor):
    """Also with a sample, and an update, between two writes in one program."""
    num_slots, num_envs = 4099, 4
    options = {} if successor == "stored" else {"successor": "shared"}
    buffer = KINDS[kind][0](num_slots * num_envs, num_envs, **options)
    steps = Model(num_slots, num_envs).make_chunk(np.random.default_rng(0), 1)
    chunk = encode(*steps)
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


@pytest.mark.parametrize(
    ("kind", "successor"),
    [("uniform", "shared"), ("prioritized", "stored"), ("episodes", "stored")],
)
def test_kernel_fills_it_in_one_program(kind, successor):
    collector = make_collector("count", 4)
    carry = collector.init(jax.random.key(0))
    options = {} if successor == "stored" else {"successor": "shared"}
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
        # Those under way were given up for the six of the queue.
        assert state.num_abandoned == 4 - int(trajectory.done[-1].sum())
        assert state.num_too_long == 0
    else:
        assert buffer.size(state) == 80 + episodes.num_steps


def test_history_tells_frames_apart_that_were_evicted():
    """Without `episode_length` a full lane's oldest rows may have lost their past."""
    buffer = buffers.ReplayBuffer(4, 1)
    row = {"obs": jnp.zeros((1,)), "terminated": jnp.zeros((1,), bool)}
    row["truncated"] = row["terminated"]
    state = buffer.init(row)
    add = jax.jit(buffer.add)
    can_sample = jax.jit(
        functools.partial(buffer.can_sample, stack=3), static_argnums=1
    )
    for n in range(3):
        state = add(state, {**row, "obs": jnp.full((1,), float(n))})
        assert can_sample(state, n + 1)  # the first row begins an episode
    state = add(state, {**row, "obs": jnp.full((1,), 3.0)})
    assert can_sample(state, 2)
    assert not can_sample(state, 3)
    batch = jax.jit(functools.partial(buffer.sample, batch_size=32, stack=3))(
        state, jax.random.key(0)
    )
    assert set(np.asarray(batch.experience["obs"])[:, -1]) == {2.0, 3.0}


def test_no_row_under_way_is_drawn_where_no_other_may_be():
    """What is visible has lost its history; row 0 is pending, and would serve."""
    buffer, add, read = programs("episodes", "stored")
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


def test_containers_of_other_kinds_serve_as_well():
    class Plain(NamedTuple):
        obs: jax.Array
        mask: jax.Array

    for row in (
        Plain(jnp.arange(2.0), jnp.array([True, False])),
        {"obs": jnp.arange(2.0), "mask": jnp.array([True, False])},
    ):
        buffer = buffers.ReplayBuffer(8, 2)
        state = buffer.add(buffer.init(row), row)
        np.testing.assert_array_equal(state.size, [1, 0])
        batch = buffer.sample(state, jax.random.key(0), 3)
        assert type(batch.experience) is type(row)
        rows = batch.experience if isinstance(row, dict) else batch.experience._asdict()
        np.testing.assert_array_equal(rows["obs"], np.zeros(3))
        np.testing.assert_array_equal(rows["mask"], np.ones(3, bool))


def test_vector_rewards_sum_component_by_component():
    buffer = buffers.ReplayBuffer(6, 1)
    flag = jnp.zeros((3, 1), bool)
    reward = jnp.arange(6.0).reshape(3, 1, 2)
    rows = {"reward": reward, "terminated": flag, "truncated": flag}
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))
    state = jax.jit(buffer.add)(state, rows)
    sample = jax.jit(
        functools.partial(buffer.sample, batch_size=64, n_step=2, gamma=0.5)
    )
    batch = sample(state, jax.random.key(0))
    # Rows 0, 1 and 2: the last one has no further step.
    want = np.array([[0 + 1, 1 + 1.5], [2 + 2, 3 + 2.5], [4, 5]])
    np.testing.assert_array_equal(batch.experience["reward"], want[batch.indices])
    np.testing.assert_array_equal(
        batch.discount, np.array([0.25, 0.25, 0.5])[batch.indices]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"successor": "none"}, '`successor` must be "stored" or "shared", got'),
        ({"final_capacity": 9}, '`final_capacity` goes with successor="shared", got 9'),
        (
            {"successor": "shared", "final_capacity": 3},
            "`final_capacity` must hold one step of all lanes, num_envs=4, got 3",
        ),
        (
            {"successor": "shared", "final_capacity": 0},
            "`final_capacity` must be an int of at least 1, got 0",
        ),
    ],
)
def test_successors_are_kept_one_way_or_the_other(options, message):
    with pytest.raises(ValueError, match=message):
        buffers.ReplayBuffer(40, 4, **options)


def test_episode_fits_into_a_lane():
    with pytest.raises(ValueError, match="`max_length` must be at most the slots"):
        buffers.EpisodeBuffer(40, 4, max_length=11)


def test_rows_number_fits_into_int32():
    with pytest.raises(ValueError, match=r"`capacity` must be at most 2\*\*30, got"):
        buffers.ReplayBuffer(2**30 + 1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_step": 3}, "`n_step` and `gamma` go together, got n_step=3, gamma=None"),
        ({"gamma": 0.9}, "`n_step` and `gamma` go together, got n_step=None, gamma"),
        ({"n_step": 0, "gamma": 0.9}, "`n_step` must be an int of at least 1, got 0"),
        ({"n_step": 1, "gamma": 1.5}, r"`gamma` must lie in \[0, 1\], got 1.5"),
        ({"stack": 0}, "`stack` must be an int of at least 1, got 0"),
    ],
)
def test_targets_that_make_no_sense_are_refused(options, message):
    buffer = programs("uniform", "stored")[0]
    state = buffer.init(row_like(NUM_ENVS))
    with pytest.raises(ValueError, match=message):
        buffer.sample(state, jax.random.key(0), 4, **options)


def test_fields_that_are_needed_are_named():
    buffer = buffers.ReplayBuffer(8, 2)
    state = buffer.init({"reward": jnp.zeros((2,))})
    index = jnp.zeros((1,), jnp.int32)
    for call, message in (
        (lambda: buffer.previous(state, index), "`previous` needs the field `termin"),
        (lambda: buffer.following(state, index), "`following` needs the field `term"),
        (lambda: buffer.unfinished(state), "`unfinished` needs the field `terminate"),
        (
            lambda: buffer.sample(state, jax.random.key(0), 1, n_step=1, gamma=1.0),
            "`n_step` needs the field `terminated`",
        ),
        (
            lambda: buffer.sample(state, jax.random.key(0), 1, stack=2),
            "`stack` needs the field `obs`",
        ),
        (
            lambda: buffer.sample_sequences(state, jax.random.key(0), 1, 2),
            "sample of sequences needs the field `terminated`",
        ),
        (
            lambda: buffer.sample_episodes(state, jax.random.key(0), 1, 2),
            "sample of episodes needs the field `terminated`",
        ),
        (
            lambda: buffers.EpisodeBuffer(8, 2).init({"reward": jnp.zeros((2,))}),
            "`EpisodeBuffer` needs the field `terminated`",
        ),
        (
            lambda: buffers.ReplayBuffer(8, 2, successor="shared").init(
                {"obs": jnp.zeros((2,))}
            ),
            'successor="shared" needs the field `next_obs`',
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()

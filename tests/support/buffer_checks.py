"""Compares buffers with the models of `ring_model`: programs and checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases import quick_jit
from ring_model import Model, decode_obs, encode

from rollout import buffers

NUM_SLOTS, NUM_ENVS = 5, 3
NUM_FINALS = 4
STACK, N_STEP, GAMMA = 3, 3, 0.5  # powers of a half are exact
LENGTH, MAX_LENGTH = 3, 4
NUM_SAMPLES = 256  # misses one of 15 rows with a probability of 3e-7
BETA = 0.5
COUNTS = (1, 7, 15)  # batch sizes for `can_sample`
# Use few lengths to compile few programs; 5 rows fill the ring, and 8 rows exceed it.
CHUNKS = (1, 3, 5, 8)
RATES = {
    "mask_rate": [0.0, 0.0, 0.3, 0.9],
    "done_rate": [0.0, 0.2, 0.5, 1.0],
    "break_rate": [0.0, 0.0, 0.3],
}


class EpisodeModel(Model):
    """A model that exposes complete episodes only.

    Rows of an unfinished episode are pending and evict the oldest rows.
    """

    def __init__(self, num_slots, num_envs, num_finals=None, max_length=MAX_LENGTH):
        super().__init__(num_slots, num_envs, num_finals)
        self.max_length = max_length
        self.pending_rows = [[] for _ in range(num_envs)]
        self.skipped_row = [None] * num_envs  # last row of the episode to skip
        self.num_too_long = self.num_abandoned = 0

    def add(self, steps, mask):
        for t, lane in np.argwhere(mask):
            self.append(int(lane), steps[t][lane])

    def append(self, lane, step):
        pending_rows = self.pending_rows[lane]
        last = pending_rows[-1] if pending_rows else self.skipped_row[lane]
        if last and last.number + 1 != step.number:
            self.num_abandoned += bool(pending_rows)
            pending_rows.clear()
            self.skipped_row[lane] = None
        if len(pending_rows) == self.max_length:
            self.num_too_long += 1
            pending_rows.clear()
            self.skipped_row[lane] = step
        if self.skipped_row[lane]:
            self.skipped_row[lane] = None if step.done else step
            return
        pending_rows.append(step)
        while len(self.lanes[lane]) + len(pending_rows) > self.num_slots:
            self.lanes[lane].popleft()
        if step.done:
            if self.final_obs is not None:
                self.final_obs.append(step.number)
            self.lanes[lane].extend(pending_rows)
            pending_rows.clear()


KINDS = {
    "uniform": (buffers.ReplayBuffer, Model, {}),
    "prioritized": (buffers.PrioritizedReplayBuffer, Model, {}),
    "episodes": (buffers.EpisodeBuffer, EpisodeModel, {"max_length": MAX_LENGTH}),
}
SUCCESSORS = {
    "stored": ({}, None),
    "shared": ({"next_obs": "shared", "final_obs_capacity": NUM_FINALS}, NUM_FINALS),
}
CASES = [(buffer_kind, successor) for buffer_kind in KINDS for successor in SUCCESSORS]


def random_chunk(model, rng, masks=True):
    """Returns a chunk with random rates of masked rows, endings and gaps."""
    rates = {name: rng.choice(values) for name, values in RATES.items()}
    rates["mask_rate"] *= masks
    return model.make_chunk(rng, rng.choice(CHUNKS), **rates)


def lane_rows(buffer, state):
    """Returns the rows of each lane, oldest first."""
    rows, mask = jax.device_get(buffer.to_trajectory(state))
    return [
        jax.tree.map(lambda x, lane=lane: x[mask[:, lane], lane], rows)
        for lane in range(buffer.num_envs)
    ]


def example_row(num_envs):
    model = Model(1, num_envs)
    steps, mask = model.make_chunk(np.random.default_rng(0), 1)
    return jax.tree.map(lambda x: x[0], encode(steps, mask))


@functools.cache
def programs(buffer_kind, successor, is_twin=False):
    """Returns a buffer, its jitted `add`, and a program that calls all reading methods.

    A twin has a new class, so that none of its methods has been traced before.
    """
    make, _, options = KINDS[buffer_kind]
    make = type(make.__name__, (make,), {}) if is_twin else make
    buffer = make(NUM_SLOTS * NUM_ENVS, NUM_ENVS, **options, **SUCCESSORS[successor][0])
    beta = {"beta": BETA} if buffer_kind == "prioritized" else {}

    stacked = buffer.replace(n_step=N_STEP, gamma=GAMMA, stack=STACK)
    all_rows = jnp.arange(NUM_SLOTS * NUM_ENVS)

    def read(state, key):
        keys = jax.random.split(key, 3)
        return {
            "size": buffer.size(state),
            "get": buffer.gather(state, all_rows),
            "n_step": stacked.sample(state, keys[0], NUM_SAMPLES, **beta),
            "num_lost": buffer.num_evicted(state),
            "num_episodes": buffer.count_episodes(state, MAX_LENGTH),
            "can_stack": [stacked.can_sample(state, n) for n in COUNTS],
            "sequences": buffer.sample_sequences(
                state, keys[1], NUM_SAMPLES, LENGTH, **beta
            ),
            "episodes": buffer.sample_episodes(state, keys[2], NUM_SAMPLES, MAX_LENGTH),
            "can_sample": [buffer.can_sample(state, n) for n in COUNTS],
        }

    return buffer, quick_jit(buffer.add), quick_jit(read)


def init_case(buffer_kind, successor):
    buffer = programs(buffer_kind, successor)[0]
    model = KINDS[buffer_kind][1](NUM_SLOTS, NUM_ENVS, SUCCESSORS[successor][1])
    return buffer.init(example_row(NUM_ENVS)), model


def indices(state, model):
    """Returns the row number of every row of the model."""
    ring, row_numbers = state.ring, {}
    for lane, position in model.rows():
        size, head = len(model.lanes[lane]), int(ring.head[lane])
        slot = (head - size + position) % NUM_SLOTS
        row_numbers[lane, position] = slot * NUM_ENVS + lane
    return row_numbers


def check_stored_rows(state, model, outputs):
    """Checks all stored rows, their successors and their mask."""
    index = indices(state, model)
    assert outputs["size"] == len(index)
    stored = np.array([index[row] for row in model.rows()], int)
    number = np.array([model.step(row).number for row in model.rows()], int)
    rows = jax.tree.map(lambda x: np.asarray(x)[stored], outputs["get"])
    usable = np.array([model.has_successor(row) for row in model.rows()], bool)
    np.testing.assert_array_equal(decode_obs(rows.obs), number)
    np.testing.assert_array_equal(rows.extras["policy_state"], number * 2)
    np.testing.assert_array_equal(decode_obs(rows.next_obs)[usable], number[usable] + 1)
    mask = np.zeros(NUM_SLOTS * NUM_ENVS, bool)
    mask[stored] = usable
    np.testing.assert_array_equal(outputs["get"].mask, mask)
    is_end = np.array([model.step(row).done for row in model.rows()], bool)
    assert outputs["num_lost"] == np.sum(is_end & ~usable)


def sampled_rows(state, model, batch, usable_rows):
    """Returns the sampled rows of the model; checks that every usable row occurs."""
    if not usable_rows:
        assert not np.any(batch.weights)
        return []
    row_of = {index: row for row, index in indices(state, model).items()}
    rows = [row_of[int(index)] for index in batch.indices]
    assert set(rows) == set(usable_rows)
    assert np.all(batch.weights > 0)
    return rows


def check_n_step(state, model, outputs, usable_fn):
    rows = sampled_rows(state, model, outputs["n_step"], usable_fn(STACK))
    if not rows:
        return
    experience = jax.tree.map(np.asarray, outputs["n_step"].experience)
    obs, next_obs = decode_obs(experience.obs), decode_obs(experience.next_obs)
    expected = {row: n_step_of(model, row) for row in set(rows)}
    for k, row in enumerate(rows):
        target = expected[row]
        # Sums of quarters are exact.
        assert experience.reward[k] == target["reward"]
        assert outputs["n_step"].discount[k] == target["discount"]
        assert experience.terminated[k] == target["last"].terminated
        assert experience.truncated[k] == target["last"].truncated
        assert experience.episode_length[k] == model.step(row).episode_length
    for name, number in (("obs", obs), ("next_obs", next_obs)):
        frames = np.array([expected[row][name] for row in rows])
        np.testing.assert_array_equal(number, frames.reshape(number.shape))


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


def check_rows_of_sequences(batch, sequences):
    """Compares `[L, S]` rows and their mask with sequences of the model."""
    number = decode_obs(batch.experience.obs)
    successor = decode_obs(batch.experience.next_obs)
    mask = np.asarray(batch.mask)
    np.testing.assert_array_equal(mask.sum(axis=0), [len(x) for x in sequences])
    np.testing.assert_array_equal(batch.experience.mask, mask)
    max_length = mask.shape[0]
    expected = np.array([x + x[-1:] * (max_length - len(x)) for x in sequences]).T
    np.testing.assert_array_equal(number, expected)
    np.testing.assert_array_equal(successor, expected + 1)
    np.testing.assert_array_equal(
        mask, np.arange(max_length)[:, None] < mask.sum(axis=0)
    )
    state = batch.experience.extras["policy_state"][0]
    np.testing.assert_array_equal(state, 2 * expected[0])


def check_sequences(state, model, outputs, usable_fn):
    rows = sampled_rows(state, model, outputs["sequences"], usable_fn(1))
    numbers_of = {
        row: [model.step(x).number for x in model.window(row, LENGTH)]
        for row in set(rows)
    }
    if rows:
        check_rows_of_sequences(outputs["sequences"], [numbers_of[row] for row in rows])


def check_episodes(model, outputs):
    episodes = model.complete_episodes(MAX_LENGTH)
    batch = outputs["episodes"]
    if not episodes:
        assert not np.any(batch.mask)
        assert not np.any(batch.weights)
        return
    first = decode_obs(batch.experience.obs)[0]
    assert set(first) == set(episodes)
    check_rows_of_sequences(
        batch,
        [[model.step(row).number for row in episodes[number]] for number in first],
    )


def check(state, model, outputs, positive_fn=lambda row: True):
    """Checks the outputs; `positive_fn` selects rows with a positive priority."""

    def usable_rows(stack):
        return [row for row in model.usable_rows(stack) if positive_fn(row)]

    check_stored_rows(state, model, outputs)
    check_n_step(state, model, outputs, usable_rows)
    check_sequences(state, model, outputs, usable_rows)
    check_episodes(model, outputs)
    assert outputs["num_episodes"] == len(model.complete_episodes(MAX_LENGTH))
    for name, stack in (("can_stack", STACK), ("can_sample", 1)):
        assert list(outputs[name]) == [len(usable_rows(stack)) >= n for n in COUNTS]
    if isinstance(model, EpisodeModel):
        assert state.num_too_long == model.num_too_long
        assert state.num_abandoned == model.num_abandoned

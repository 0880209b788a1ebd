"""Compares buffers with the slow models: their programs, and the checks."""

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
NUM_DRAWS = 256  # of at most 15 rows: one is missed once in three million samples
BETA = 0.5
COUNTS = (1, 7, 15)  # transitions that `can_sample` is asked for
# Lengths are few, so that few programs are compiled; 5 fill the ring, 8 are longer.
CHUNKS = (1, 3, 5, 8)
RATES = {
    "mask_rate": [0.0, 0.0, 0.3, 0.9],
    "done_rate": [0.0, 0.2, 0.5, 1.0],
    "break_rate": [0.0, 0.0, 0.3],
}


class EpisodeModel(Model):
    """Rows of an unfinished episode wait apart, and replace the oldest ones."""

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
            if self.final_obs is not None:
                self.final_obs.append(step.number)
            self.lanes[lane].extend(waiting)
            waiting.clear()


KINDS = {
    "uniform": (buffers.ReplayBuffer, Model, {}),
    "prioritized": (buffers.PrioritizedReplayBuffer, Model, {}),
    "episodes": (buffers.EpisodeBuffer, EpisodeModel, {"max_length": MAX_LENGTH}),
}
SUCCESSORS = {
    "stored": ({}, None),
    "shared": ({"next_obs": "shared", "final_obs_capacity": NUM_FINALS}, NUM_FINALS),
}
CASES = [(kind, successor) for kind in KINDS for successor in SUCCESSORS]


def random_chunk(model, rng, masks=True):
    """A chunk, with other rates of masked rows, of endings and of breaks each time."""
    rates = {name: rng.choice(values) for name, values in RATES.items()}
    rates["mask_rate"] *= masks
    return model.make_chunk(rng, rng.choice(CHUNKS), **rates)


def dumped(buffer, state):
    """The rows of each lane, the oldest first."""
    rows, mask = jax.device_get(buffer.to_trajectory(state))
    return [
        jax.tree.map(lambda x, lane=lane: x[mask[:, lane], lane], rows)
        for lane in range(buffer.num_envs)
    ]


def row_like(num_envs):
    model = Model(1, num_envs)
    steps, mask = model.make_chunk(np.random.default_rng(0), 1)
    return jax.tree.map(lambda x: x[0], encode(steps, mask))


@functools.cache
def programs(kind, successor, is_twin=False):
    """A buffer, its `add`, and a program that reads all there is.

    A twin is of another class, so that none of its methods has been traced before.
    """
    make, _, options = KINDS[kind]
    make = type(make.__name__, (make,), {}) if is_twin else make
    buffer = make(NUM_SLOTS * NUM_ENVS, NUM_ENVS, **options, **SUCCESSORS[successor][0])
    beta = {"beta": BETA} if kind == "prioritized" else {}

    stacked = buffer.replace(n_step=N_STEP, gamma=GAMMA, stack=STACK)
    every = jnp.arange(NUM_SLOTS * NUM_ENVS)

    def read(state, key):
        keys = jax.random.split(key, 3)
        return {
            "size": buffer.size(state),
            "get": buffer.gather(state, every),
            "n_step": stacked.sample(state, keys[0], NUM_DRAWS, **beta),
            "num_lost": buffer.num_evicted(state),
            "num_episodes": buffer.count_episodes(state, MAX_LENGTH),
            "can_stack": [stacked.can_sample(state, n) for n in COUNTS],
            "sequences": buffer.sample_sequences(
                state, keys[1], NUM_DRAWS, LENGTH, **beta
            ),
            "episodes": buffer.sample_episodes(state, keys[2], NUM_DRAWS, MAX_LENGTH),
            "can_sample": [buffer.can_sample(state, n) for n in COUNTS],
        }

    return buffer, quick_jit(buffer.add), quick_jit(read)


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
    state = batch.experience.extras["policy_state"][0]
    np.testing.assert_array_equal(state, 2 * want[0])


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
    """Checks what was read; `positive` marks the rows with a priority."""

    def allowed(stack):
        return [row for row in model.usable(stack) if positive(row)]

    check_held(state, model, got)
    check_n_step(state, model, got, allowed)
    check_sequences(state, model, got, allowed)
    check_episodes(model, got)
    assert got["num_episodes"] == len(model.whole_episodes(MAX_LENGTH))
    for name, stack in (("can_stack", STACK), ("can_sample", 1)):
        assert list(got[name]) == [len(allowed(stack)) >= n for n in COUNTS]
    if isinstance(model, EpisodeModel):
        assert state.num_too_long == model.num_too_long
        assert state.num_abandoned == model.num_abandoned

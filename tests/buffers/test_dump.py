"""Dumps, merges, and later rows of episodes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import collect, make_collector, quick_jit, raw
from compiles import count_compiles

from rollout import buffers

B = 16
KINDS = {
    "replay": buffers.ReplayBuffer,
    "prioritized": buffers.PrioritizedReplayBuffer,
    "episodic": buffers.EpisodeBuffer,
}


@functools.cache
def fill(kind="replay", capacity=40 * B, num_rows=64, **options):
    """A buffer with rows of a trajectory, the trajectory, and which of them it has."""
    collector, trajectory = make_collector("count", B), collect("count")[1]
    buffer = KINDS[kind](capacity, B, **options)
    chunk = jax.tree.map(lambda x: x[:num_rows], jax.device_get(trajectory))
    add = quick_jit(lambda chunk: buffer.add(buffer.init(collector), chunk))
    return buffer, add(chunk), chunk


SHARED = {"next_obs": "shared"}
slow = pytest.mark.slow
CASES = [
    ("replay", 64, SHARED),
    ("episodic", 64, {}),
    pytest.param("replay", 7, {}, marks=slow),
    pytest.param("prioritized", 64, {}, marks=slow),
    pytest.param("prioritized", 7, SHARED, marks=slow),
    pytest.param("episodic", 64, SHARED, marks=slow),
]


@pytest.mark.parametrize(("kind", "num_rows", "options"), CASES)
def test_dump_is_the_newest_rows_in_the_order_of_time(kind, num_rows, options):
    buffer, state, chunk = fill(kind, num_rows=num_rows, **options)
    rows, mask = jax.device_get(buffer.dump(state))
    np.testing.assert_array_equal(rows.mask, mask)
    seen = jax.tree.map(np.asarray, raw(chunk))
    done = seen.terminated | seen.truncated
    for lane in range(B):
        last = num_rows
        if kind == "episodic":  # unfinished episodes do not show, and take slots
            last = np.flatnonzero(done[:, lane]).max(initial=-1) + 1
        first = max(0, num_rows - 40)
        if options:  # a row within an episode needs the next one
            last = last if last and done[last - 1, lane] else last - 1
        got = jax.tree.map(lambda x, i=lane: np.asarray(x)[mask[:, i], i], raw(rows))
        want = jax.tree.map(lambda x, at=(slice(first, last), lane): x[at], seen)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_merged_rows_come_after_those_before(kind):
    buffer, state, _ = fill(kind, capacity=200 * B, num_rows=30)
    other, their_state, _ = fill(kind, num_rows=64)
    merged = buffer.merge(state, their_state)
    parts = [buffer.dump(state), other.dump(their_state), buffer.dump(merged)]
    ids = [np.asarray(rows.reward) for rows, _ in parts]
    masks = [np.asarray(mask) for _, mask in parts]
    for lane in range(B):
        ours, theirs, both = (
            x[m[:, lane], lane] for x, m in zip(ids, masks, strict=True)
        )
        np.testing.assert_array_equal(both, np.concatenate([ours, theirs]))


def test_goals_are_later_rows_of_the_same_episode():
    buffer, state, _ = fill()
    horizon, size = 3, 4000

    def relabel(key, rows, future):
        ahead = future.episode_length - rows.episode_length
        same = future.episode_id == rows.episode_id
        return rows.replace(reward=ahead.astype(jnp.float32), truncated=same)

    @quick_jit
    def draw(state, key):
        batch = buffer.sample(state, key, size, relabel_fn=relabel, horizon=horizon)
        rows, later = buffer.get(state, batch.indices), [batch.indices]
        for _ in range(horizon):
            later.append(buffer.following(state, later[-1]))
        return batch, rows, later

    batch, rows, later = jax.device_get(draw(state, jax.random.key(0)))
    ahead = batch.experience.reward
    assert batch.experience.truncated.all()
    assert set(np.unique(ahead)) == {0, 1, 2, 3}
    assert not ahead[rows.terminated | rows.truncated].any()
    # Far from the end each of the four rows has the same chance.
    far = (rows.episode_length == 1) & (later[3] != later[2])
    counts = np.bincount(ahead[far].astype(int), minlength=4)
    assert counts.min() > 0.7 * far.sum() / 4


def test_relabelling_by_a_bound_method_reads_what_its_object_has_now():
    buffer, state, _ = fill()

    class Goals:
        def relabel(self, key, rows, future):
            return rows.replace(reward=jnp.full_like(rows.reward, self.goal))

    goals = Goals()

    def draw(state, goal):
        goals.goal = goal  # a tracer
        batch = buffer.sample(state, jax.random.key(0), 8, relabel_fn=goals.relabel)
        return batch.experience.reward

    for number in (1.0, 2.0):
        fresh = lambda *args: draw(*args)  # noqa: E731  # traced again
        assert (quick_jit(fresh)(state, number) == number).all()


def test_rows_whose_history_was_overwritten_are_not_stacked():
    # One lane, nine slots, episodes of four, no episode length to mark the first row.
    def row(number):
        return {
            "obs": jnp.float32(number)[None],
            "terminated": jnp.asarray(number % 4 == 3)[None],
            "truncated": jnp.array([False]),
        }

    buffer = buffers.EpisodeBuffer(9, 1)

    @quick_jit
    def fill_and_draw(key):
        state = buffer.init(row(0))
        step = lambda state, number: (buffer.add(state, row(number)), None)  # noqa: E731
        state, _ = jax.lax.scan(step, state, jnp.arange(18))
        return buffer.sample(state, key, 500, stack=4)

    batch = jax.device_get(fill_and_draw(jax.random.key(0)))
    assert batch.weights.all()
    for stacked in np.unique(np.asarray(batch.experience["obs"]), axis=0):
        start = stacked[-1] // 4 * 4
        np.testing.assert_array_equal(
            stacked, np.maximum(stacked[-1] - np.arange(3, -1, -1), start)
        )


def test_methods_are_compiled_once():
    buffer, state, chunk = fill()
    step, keys = (
        jax.tree.map(lambda x: x[0], chunk),
        jax.random.split(jax.random.key(0), 4),
    )

    def use(state, key):
        state = buffer.add(state, step)
        batch = buffer.sample(state, key, 8, n_step=2, gamma=0.9)
        return state, batch, buffer.can_sample(state, 8)

    use(state, keys[0])
    keys = list(keys)
    with count_compiles() as compiled:
        for key in keys[1:]:
            state = use(state, key)[0]
    assert not compiled

"""Dumps, and later rows of episodes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_checks import lane_rows
from cases import collect, make_collector, quick_jit, raw
from compiles import count_compiles

from rollout import buffers
from rollout.buffers import neighbours

pytestmark = pytest.mark.usefixtures("quick_compile")
B = 16
REPLAY, EPISODIC = buffers.ReplayBuffer, buffers.EpisodeBuffer
PRIORITIZED = buffers.PrioritizedReplayBuffer


@functools.cache
def fill(kind=REPLAY, capacity=40 * B, num_rows=64, **options):
    """A buffer with rows of a trajectory, the trajectory, and which of them it has."""
    collector, trajectory = make_collector("count", B), collect("count")[1]
    buffer = kind(capacity, B, **options)
    chunk = jax.tree.map(lambda x: x[:num_rows], jax.device_get(trajectory))
    add = quick_jit(lambda chunk: buffer.add(buffer.init(collector), chunk))
    return buffer, add(chunk), chunk


SHARED = {"next_obs": "shared"}
slow = pytest.mark.slow
CASES = [
    (REPLAY, 64, SHARED),
    (EPISODIC, 64, {}),
    pytest.param(PRIORITIZED, 7, {}, marks=slow),
    pytest.param(EPISODIC, 64, SHARED, marks=slow),
]


@pytest.mark.parametrize(("kind", "num_rows", "options"), CASES)
def test_dump_is_the_newest_rows_in_the_order_of_time(kind, num_rows, options):
    buffer, state, chunk = fill(kind, num_rows=num_rows, **options)
    rows, mask = buffer.to_trajectory(state)
    np.testing.assert_array_equal(rows.mask, mask)
    seen = jax.tree.map(np.asarray, raw(chunk))
    done = seen.terminated | seen.truncated
    for lane, got in enumerate(lane_rows(buffer, state)):
        last = num_rows
        if kind is EPISODIC:  # unfinished episodes do not show, and take slots
            last = np.flatnonzero(done[:, lane]).max(initial=-1) + 1
        first = max(0, num_rows - 40)
        if options:  # a row within an episode needs the next one
            last = last if last and done[last - 1, lane] else last - 1
        want = jax.tree.map(lambda x, at=(slice(first, last), lane): x[at], seen)
        jax.tree.map(np.testing.assert_array_equal, raw(got), want)


def test_goals_are_later_rows_of_the_same_episode():
    buffer, state, _ = fill()
    horizon, size = 3, 4000

    def relabel(key, rows, future):
        ahead = future.episode_length - rows.episode_length
        same = future.episode_id == rows.episode_id
        return rows.replace(reward=ahead.astype(jnp.float32), truncated=same)

    @quick_jit
    def draw(state, key):
        options = {"relabel_fn": relabel, "relabel_horizon": horizon}
        batch = buffer.replace(**options).sample(state, key, size)
        later, _ = neighbours.window(state, batch.indices, horizon + 1)
        return batch, buffer.gather(state, batch.indices), later

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
        relabelled = buffer.replace(relabel_fn=goals.relabel)
        return relabelled.sample(state, jax.random.key(0), 8).experience.reward

    for number in (1.0, 2.0):
        fresh = lambda *args: draw(*args)  # noqa: E731  # traced again
        assert (quick_jit(fresh)(state, number) == number).all()


def test_methods_are_compiled_once():
    buffer, state, chunk = fill()
    buffer = buffer.replace(n_step=2, gamma=0.9)
    step = jax.tree.map(lambda x: x[0], chunk)

    def use(state, key):
        state = buffer.add(state, step)
        batch = buffer.sample(state, key, 8)
        counts = buffer.can_sample(state, 8), buffer.count_episodes(state, 3)
        return state, batch, counts

    first, *keys = list(jax.random.split(jax.random.key(0), 4))
    use(state, first)
    with count_compiles() as compiled:
        for key in keys:
            state = use(state, key)[0]
    assert not compiled

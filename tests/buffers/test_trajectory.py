"""Export to trajectories, and hindsight goals from later rows of an episode."""

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
NUM_ENVS = 16
REPLAY, EPISODIC = buffers.ReplayBuffer, buffers.EpisodeBuffer
PRIORITIZED = buffers.PrioritizedReplayBuffer


@functools.cache
def fill_buffer(buffer_type=REPLAY, capacity=40 * NUM_ENVS, num_rows=64, **options):
    """Returns a buffer, a state with rows of a trajectory, and these rows."""
    collector, trajectory = make_collector("count", NUM_ENVS), collect("count")[1]
    buffer = buffer_type(capacity, NUM_ENVS, **options)
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


@pytest.mark.parametrize(("buffer_type", "num_rows", "options"), CASES)
def test_to_trajectory_returns_newest_rows_in_order(buffer_type, num_rows, options):
    buffer, state, chunk = fill_buffer(buffer_type, num_rows=num_rows, **options)
    exported, mask = buffer.to_trajectory(state)
    np.testing.assert_array_equal(exported.mask, mask)
    rows = jax.tree.map(np.asarray, raw(chunk))
    done = rows.terminated | rows.truncated
    for lane, lane_data in enumerate(lane_rows(buffer, state)):
        last = num_rows
        if buffer_type is EPISODIC:  # unfinished episodes take slots and are hidden
            last = np.flatnonzero(done[:, lane]).max(initial=-1) + 1
        first = max(0, num_rows - 40)
        if options:  # a row within an episode needs the next one
            last = last if last and done[last - 1, lane] else last - 1
        want = jax.tree.map(lambda x, index=(slice(first, last), lane): x[index], rows)
        jax.tree.map(np.testing.assert_array_equal, raw(lane_data), want)


def test_hindsight_goals_come_from_same_episode():
    buffer, state, _ = fill_buffer()
    horizon, size = 3, 4000

    def relabel(key, rows, future):
        num_ahead = future.episode_length - rows.episode_length
        is_same_episode = future.episode_id == rows.episode_id
        return rows.replace(
            reward=num_ahead.astype(jnp.float32), truncated=is_same_episode
        )

    @quick_jit
    def sample(state, key):
        options = {"relabel_fn": relabel, "relabel_horizon": horizon}
        batch = buffer.replace(**options).sample(state, key, size)
        next_rows, _ = neighbours.window(state, batch.indices, horizon + 1)
        return batch, buffer.gather(state, batch.indices), next_rows

    batch, rows, next_rows = jax.device_get(sample(state, jax.random.key(0)))
    num_ahead = batch.experience.reward
    assert batch.experience.truncated.all()
    assert set(np.unique(num_ahead)) == {0, 1, 2, 3}
    assert not num_ahead[rows.terminated | rows.truncated].any()
    # Far from the end of the episode, the four rows have equal probability.
    is_far = (rows.episode_length == 1) & (next_rows[3] != next_rows[2])
    counts = np.bincount(num_ahead[is_far].astype(int), minlength=4)
    assert counts.min() > 0.7 * is_far.sum() / 4


def make_rows(lengths):
    """Returns rows of terminated episodes in one lane; row i has observation i."""
    number = np.arange(sum(lengths), dtype=np.int32)
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    last = np.repeat(np.cumsum(lengths) - 1, lengths)
    return {
        "obs": np.float32(number)[:, None],
        "reward": np.float32(2**number)[:, None],
        "terminated": (number == last)[:, None],
        "truncated": np.zeros((len(number), 1), bool),
        "episode_length": (number - first + 1).astype(np.int32)[:, None],
    }


def store(buffer, rows):
    """Returns the state of a new buffer that stores the rows."""
    return buffer.add(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)


def test_hindsight_goals_include_the_last_row_of_an_episode():
    """The goal of a row is each row from itself to the end of its episode."""
    buffer = REPLAY(
        16, 1, relabel_fn=lambda _, x, future: x | {"reward": future["obs"]}
    )

    @quick_jit
    def sample(rows, key):
        return buffer.sample(store(buffer, rows), key, 1000).experience

    lengths = [3, 1, 4]
    batch = jax.device_get(sample(make_rows(lengths), jax.random.key(0)))
    goals = set(zip(batch["obs"].tolist(), batch["reward"].tolist(), strict=True))
    last = np.repeat(np.cumsum(lengths) - 1, lengths)
    assert goals == {(i, j) for i in range(8) for j in range(i, last[i] + 1)}


def test_choices_of_relabel_fn_do_not_depend_on_the_goal():
    """`relabel_fn` guesses the offset of the goal, one of 4, with its key."""

    def relabel(key, rows, future):
        guess = jax.random.randint(key, rows["obs"].shape, 0, 4)
        return rows | {"reward": jnp.float32(future["obs"] - rows["obs"] == guess)}

    buffer = REPLAY(64, 1, relabel_fn=relabel, relabel_horizon=3)

    @quick_jit
    def sample(rows, key):
        return buffer.sample(store(buffer, rows), key, 1000).experience

    batch = jax.device_get(sample(make_rows([64]), jax.random.key(0)))
    assert 0.15 < batch["reward"].mean() < 0.35


def test_newest_row_is_not_followed_by_the_oldest():
    """A full lane of rows without marks of their episode."""
    names = "obs", "reward", "terminated", "truncated"
    rows = {name: make_rows([9])[name][:4] for name in names}
    rows |= {"next_obs": rows["obs"] + 1}
    buffer = REPLAY(4, 1, n_step=2, gamma=1.0)

    @quick_jit
    def sample(rows, key):
        return buffer.sample(store(buffer, rows), key, 64).experience["reward"]

    # The rewards are 1, 2, 4 and 8.
    assert set(np.unique(sample(rows, jax.random.key(0)))) == {3, 6, 12, 8}


def test_episodes_of_at_most_max_length_are_counted():
    buffer = REPLAY(16, 1)

    @quick_jit
    def count(rows):
        state = store(buffer, rows)
        return [buffer.count_episodes(state, n) for n in (1, 2, 3, 4)]

    assert list(map(int, count(make_rows([3, 1, 4])))) == [1, 1, 2, 3]


def test_unfinished_episode_replaces_only_the_oldest_rows():
    """A lane of 4 rows: an episode of 2 rows, then 2 and 3 rows of the next one."""
    buffer = EPISODIC(4, 1)

    @quick_jit
    def sizes(rows):
        states = [
            store(buffer, jax.tree.map(lambda x, n=n: x[:n], rows)) for n in (4, 5)
        ]
        return [buffer.size(state) for state in states]

    assert list(map(int, sizes(make_rows([2, 9])))) == [2, 1]


def test_relabel_fn_may_be_a_bound_method():
    buffer, state, _ = fill_buffer()

    class Goals:
        def relabel(self, key, rows, future):
            return rows.replace(reward=jnp.full_like(rows.reward, self.goal))

    goals = Goals()

    def sample(state, goal):
        goals.goal = goal  # a tracer
        relabelled = buffer.replace(relabel_fn=goals.relabel)
        return relabelled.sample(state, jax.random.key(0), 8).experience.reward

    for number in (1.0, 2.0):
        untraced_fn = lambda *args: sample(*args)  # noqa: E731  # traced again
        assert (quick_jit(untraced_fn)(state, number) == number).all()


def test_buffer_methods_compile_once():
    buffer, state, chunk = fill_buffer()
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


def test_rewards_of_missing_rows_end_an_n_step_return():
    """Steps 3 and 4 of an episode were not stored: step 2 has no successor."""
    collector, _ = make_collector("count", 1), None
    row = jax.tree.map(lambda x: x[:1, :1], jax.device_get(collect("count")[1]))
    steps = np.array([[1], [2], [5], [6]], np.int32)
    rows = jax.tree.map(lambda x: np.repeat(x, 4, axis=0), row).replace(
        episode_length=steps,
        episode_id=np.zeros((4, 1), np.int32),
        reward=steps.astype(np.float32),
        terminated=np.zeros((4, 1), bool),
        truncated=np.zeros((4, 1), bool),
        mask=np.ones((4, 1), bool),
    )
    buffer = REPLAY(16, 1, n_step=2, gamma=1.0)
    state = quick_jit(lambda rows: buffer.add(buffer.init(collector), rows))(rows)
    batch = buffer.sample(state, jax.random.key(0), 64).experience
    rewards = set(
        zip(batch.episode_length.tolist(), batch.reward.tolist(), strict=True)
    )
    assert (1, 3.0) in rewards
    assert (2, 7.0) not in rewards

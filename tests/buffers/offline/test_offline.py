"""Recorded data in a buffer, and datasets of Minari, against the data itself."""

import operator
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit

from rollout import buffers

KINDS = {
    "replay": buffers.ReplayBuffer,
    "prioritized": buffers.PrioritizedReplayBuffer,
    "episodic": buffers.EpisodeBuffer,
}


def make_data(lengths, open_end=False, seed=0):
    """Episodes of the given lengths; every leaf of a row says the same number.

    Numbers go on by one in an episode and leave a gap to the next one, so no row has
    the successor of another. Endings terminate, truncate or do both, in turn.
    """
    length = np.asarray(lengths, int)
    episode = np.repeat(np.arange(len(length)), length)
    number = np.arange(length.sum()) + 10 * episode
    last = np.zeros(len(number), bool)
    last[np.cumsum(length)[: len(length) - open_end] - 1] = True
    return {
        "obs": encode_obs(number),
        "action": (number % 251).astype(np.uint8),
        "reward": number.astype(np.float32),
        "terminated": last & (episode % 3 != 1),
        "truncated": last & (episode % 3 != 0),
        "next_obs": encode_obs(number + 1),
    }


def encode_obs(number):
    return {
        "pair": np.stack([number, -number], axis=-1).astype(np.float32),
        "short": number.astype(np.int16),
    }


def decode(rows):
    """The numbers of rows, each leaf checked."""
    number = np.asarray(rows.reward).astype(int)
    for obs, want in ((rows.obs, number), (rows.next_obs, number + 1)):
        want = encode_obs(want)
        jax.tree.map(np.testing.assert_array_equal, obs, want)
    np.testing.assert_array_equal(rows.action, number % 251)
    return number


def lane_rows(state):
    """Row numbers of each lane, the oldest first."""
    num_slots, num_envs = state.ring.num_slots, state.ring.num_envs
    size, head = np.asarray(state.ring.size), np.asarray(state.ring.head)
    return [
        (head[lane] - size[lane] + np.arange(size[lane])) % num_slots * num_envs + lane
        for lane in range(num_envs)
    ]


@pytest.mark.parametrize("num_rows", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_one_lane_of_episodes_is_written_in_place(num_rows):
    """With one lane XLA moves reads after the write unless something stops it."""
    buffer = buffers.EpisodeBuffer(4099, 1)
    data = make_data([num_rows])
    marks = {
        "episode_id": np.zeros(num_rows, np.int32),
        "episode_length": np.arange(1, num_rows + 1, dtype=np.int32),
    }
    chunk = jax.tree.map(lambda x: jnp.asarray(x)[:, None], data | marks)
    state = buffer.init(jax.tree.map(lambda x: x[0], chunk))
    program = jax.jit(buffer.add, donate_argnums=0).lower(state, chunk).compile()
    copies = [line for line in program.as_text().splitlines() if " copy(" in line]
    assert not [line for line in copies if "[4099,1" in line]


ONE = buffers.ReplayBuffer(12, 1)  # the same object: its programs are traced once


def options(successor):
    return (
        {"next_obs": "shared", "final_obs_capacity": 8} if successor == "shared" else {}
    )


CASES = [
    ("replay", "shared"),
    ("prioritized", "stored"),
    ("episodic", "shared"),
]


@pytest.mark.parametrize(
    ("kind", "successor"),
    [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.slow), CASES[2]],
)
def test_one_lane_keeps_the_order(kind, successor):
    buffer = KINDS[kind](12, 1, **options(successor))
    data = make_data([3, 1, 5])
    state = buffers.from_data(buffer, **data)
    (rows,) = lane_rows(state)

    @quick_jit
    def look(state):
        steps = buffer.following(state, rows), buffer.previous(state, rows)
        return buffer.get(state, rows), steps, buffer.count_episodes(state, 5)

    held, (following, previous), num_episodes = look(state)
    np.testing.assert_array_equal(following, rows[[1, 2, 2, 3, 5, 6, 7, 8, 8]])
    np.testing.assert_array_equal(previous, rows[[0, 0, 1, 3, 4, 4, 5, 6, 7]])
    np.testing.assert_array_equal(decode(held), data["reward"])
    np.testing.assert_array_equal(held.terminated, data["terminated"])
    np.testing.assert_array_equal(held.truncated, data["truncated"])
    np.testing.assert_array_equal(held.episode_id, [0, 0, 0, 1, 2, 2, 2, 2, 2])
    np.testing.assert_array_equal(held.episode_length, [1, 2, 3, 1, 1, 2, 3, 4, 5])
    assert held.mask.all()
    assert num_episodes == 3


def test_jax_arrays_are_taken_too():
    data = make_data([3, 1, 5])
    got = buffers.from_data(ONE, **jax.tree.map(jnp.asarray, data))
    want = buffers.from_data(ONE, **data)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(  # a full ring, and one with room
    ("kind", "capacity"),
    [("replay", 9), ("replay", 12), ("episodic", 9)],
)
def test_last_episode_that_is_open_is_linked_to_nothing(kind, capacity):
    buffer = KINDS[kind](capacity, 1)
    state = buffers.from_data(buffer, **make_data([3, 1, 5], open_end=True))

    @quick_jit
    def look(state):
        ends = jnp.array([7, 8]), jnp.array([0, 4])
        following, previous = (
            buffer.following(state, ends[0]),
            buffer.previous(state, ends[1]),
        )
        return following, previous, buffer.count_episodes(state, 9)

    following, previous, num_episodes = look(state)
    np.testing.assert_array_equal(previous, [0, 4])
    assert num_episodes == 2
    if kind == "episodic":  # shows whole episodes only
        assert buffer.size(state) == 4
        assert state.pending == 5
        return
    assert buffer.size(state) == 9
    np.testing.assert_array_equal(following, [8, 8])


@pytest.mark.slow
def test_windows_and_stacks_stay_inside_an_episode():
    buffer = buffers.ReplayBuffer(9, 1, **options("shared"))
    data = make_data([3, 1, 5], open_end=True)
    state = buffers.from_data(buffer, **data)
    sample = lambda s, k: buffer.sample(s, k, 64, n_step=4, gamma=1.0, stack=3)  # noqa: E731
    batch = quick_jit(sample)(state, jax.random.key(0))
    slot = np.asarray(batch.indices)
    last = np.minimum(slot + 3, np.array([2, 2, 2, 3, *[8] * 5])[slot])
    assert (slot < 8).all()  # the successor of the open row is not there
    last = np.minimum(last, 7)
    number = data["reward"].astype(int)
    stacks = batch.experience.next_obs["short"]
    np.testing.assert_array_equal(stacks[:, -1], number[last] + 1)
    first = np.array([0, 0, 0, 3, *[4] * 5])[last]
    np.testing.assert_array_equal(stacks[:, 0], number[np.maximum(last - 1, first)])


@pytest.mark.parametrize(
    ("kind", "successor", "num_envs"),
    [
        ("replay", "shared", 2),
        pytest.param("episodic", "shared", 4, marks=pytest.mark.slow),
    ],
)
def test_lanes_hold_whole_episodes_in_order(kind, successor, num_envs):
    lengths = [4, 1, 9, 2, 2, 6, 3, 1]
    buffer = KINDS[kind](num_envs * 16, num_envs, **options(successor))
    data = make_data(lengths)
    state = buffers.from_data(buffer, **data)
    get, seen, sizes = jax.jit(buffer.get), [], []
    for rows in lane_rows(state):
        padded = np.concatenate([rows, np.zeros(16 - len(rows), int)])
        held = jax.device_get(get(state, padded))
        held = jax.tree.map(operator.itemgetter(slice(len(rows))), held)
        number = decode(held)
        seen.extend(number)
        sizes.append(len(number))
        assert (np.diff(held.episode_id) >= 0).all()
        inside = np.asarray(held.episode_length)[1:] > 1
        np.testing.assert_array_equal(np.diff(number) == 1, inside)
    assert sorted(seen) == data["reward"].astype(int).tolist()
    count = jax.jit(buffer.count_episodes, static_argnums=1)
    assert count(state, 9) == len(lengths)
    # The longest first to the emptiest lane: within 4/3 of the best that is possible.
    assert max(sizes) <= 4 / 3 * max(9, -(-sum(lengths) // num_envs))


def test_episode_that_is_open_is_the_newest_of_its_lane():
    """It is the longest, and dealt first."""
    buffer = buffers.ReplayBuffer(60, 2)
    state = buffers.from_data(buffer, **make_data([2, 1, 1, 5], open_end=True))

    @quick_jit
    def look(state):
        row, is_open = buffer.unfinished(state)
        return row, is_open, buffer.following(state, row)

    row, is_open, following = look(state)
    assert is_open.sum() == 1
    np.testing.assert_array_equal(following, row)
    (row,) = np.asarray(row)[np.asarray(is_open)]
    assert np.asarray(state.experience.episode_id).reshape(-1)[row] == 3


@pytest.mark.slow
def test_data_of_many_chunks_makes_the_state_of_one():
    """64 MiB go to the device at a time; the last chunk is the shorter one."""
    length = [4, 1, 9, 2, 2, 6, 3, 8]
    buffer = buffers.PrioritizedReplayBuffer(40, 1)
    data = make_data(length, open_end=True)
    data["obs"] = data["reward"][:, None]
    data["next_obs"] = data["obs"] + 1
    small = buffers.from_data(buffer, **data)
    for name in ("obs", "next_obs"):
        data[name] = np.broadcast_to(data[name], (sum(length), 1 << 18))  # 1 MiB each
    large = buffers.from_data(buffer, **data)
    rows = large.ring.experience
    for leaf in (rows.obs, rows.next_obs):
        np.testing.assert_array_equal(leaf.min(axis=2), leaf.max(axis=2))
    rows = rows.replace(obs=rows.obs[:, :, :1], next_obs=rows.next_obs[:, :, :1])
    large = large.replace(ring=large.ring.replace(experience=rows))
    jax.tree.map(np.testing.assert_array_equal, large, small)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_an_empty_state(kind, num_envs):
    buffer = KINDS[kind](12, num_envs)
    state = buffers.from_data(buffer, **make_data([]))
    assert buffer.size(state) == 0
    assert state.ring.experience.obs["pair"].shape == (12 // num_envs, num_envs, 2)
    assert state.ring.experience.reward.dtype == jnp.float32


def test_rows_can_be_added_afterwards():
    state = buffers.from_data(ONE, **make_data([3, 1, 5]))
    rows = jax.tree.map(lambda x: x[:1], state.experience)

    @jax.jit
    def add(state):
        marked = rows.replace(episode_id=rows.episode_id + 99)
        state = ONE.add(state, marked)
        return ONE.size(state), ONE.following(state, jnp.array([8]))

    size, following = add(state)
    assert size == 10
    assert following == 8


def test_types_are_those_that_jax_keeps():
    data = make_data([3])
    data["obs"] = data["obs"]["pair"].astype(np.float64)
    data["next_obs"] = data["next_obs"]["pair"].astype(np.float64)
    data["action"] = data["action"].astype(np.int64)
    data["reward"] = data["reward"].astype(np.float64)
    data["terminated"] = data["terminated"].astype(np.int8)
    data["truncated"] = data["truncated"].astype(np.float32)
    state = buffers.from_data(buffers.ReplayBuffer(4, 1), **data)
    rows = state.experience
    got = [rows.obs, rows.action, rows.reward, rows.terminated, rows.truncated]
    want = ["float32", "int32", "float32", "bool", "bool"]
    assert [leaf.dtype.name for leaf in got] == want
    np.testing.assert_array_equal(rows.terminated[:, 0], [False, False, True, False])


def change(name, value):
    return lambda data: {**data, name: value(data[name])}


REFUSED = [
    (change("reward", lambda x: x[:, None]), r"`reward` must have shape \(5,\), one"),
    (change("reward", lambda x: x * 1e40), "`reward` must fit into float32, got"),
    (change("truncated", lambda x: x[:4]), r"`truncated` must have shape \(5,\), .*4"),
    (change("terminated", lambda x: x * 2), "`terminated` must hold 0 and 1 only, g"),
    (
        change("action", lambda x: x[:4]),
        "`action` must have 5 rows, like `reward`, got",
    ),
    (change("action", lambda x: x + 2**40), "`action` must fit into int32, got 10995"),
    (change("action", lambda x: x.astype(str)), "`action` must hold numbers, got <U"),
    (
        change("obs", lambda x: {**x, "short": x["short"][:2]}),
        r"`obs\['short'\]` must have 5 rows, like `reward`, got shape \(2,\)",
    ),
    (
        change("next_obs", lambda x: x["pair"]),
        r"`next_obs` must be like `obs`: .* \['pair'\], got another structure",
    ),
    (
        change("next_obs", lambda x: {**x, "short": x["short"].astype(np.int8)}),
        r"`next_obs` must be like `obs`: int16 of .*, got int8 of .* \['short'\]",
    ),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_data_unlike_the_contract_is_refused(changed, message):
    data = make_data([3, 2])
    data["action"], data["reward"] = data["action"].astype(int), data["reward"] * 1.0
    data["reward"] = data["reward"].astype(np.float64) + 1
    data["terminated"] = data["terminated"].astype(int)
    with pytest.raises(ValueError, match=message):
        buffers.from_data(buffers.ReplayBuffer(8, 1), **changed(data))


def test_buffer_that_is_too_small_is_told_what_is_needed():
    data = make_data([4, 4, 4, 3])
    with pytest.raises(ValueError, match="`capacity` must be at least 16 for 15 rows"):
        buffers.from_data(buffers.ReplayBuffer(15, 2), **data)
    state = buffers.from_data(buffers.ReplayBuffer(16, 2), **data)
    np.testing.assert_array_equal(np.sort(state.size), [7, 8])
    buffer = buffers.ReplayBuffer(15, 1, next_obs="shared", final_obs_capacity=3)
    with pytest.raises(
        ValueError, match="`final_obs_capacity` must hold the ends of all 4"
    ):
        buffers.from_data(buffer, **data)


def test_successors_that_cannot_be_shared_are_refused():
    data = make_data([3, 1, 5])
    data["next_obs"]["short"][5] += 1
    shared = buffers.ReplayBuffer(12, 1, **options("shared"))
    with pytest.raises(
        ValueError, match=r"`next_obs\['short'\]` must .* got another one in row 5"
    ):
        buffers.from_data(shared, **data)
    state = buffers.from_data(ONE, **data)
    assert state.experience.next_obs["short"][5, 0] == data["next_obs"]["short"][5]
    data = make_data([3, 1, 5])
    data["obs"]["pair"][1] = data["next_obs"]["pair"][0] = np.nan  # equal to itself
    buffers.from_data(shared, **data)


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return {
        "author": "A. Nonymous",
        "author_email": "a@example.org",
        "code_permalink": "https://example.org/code",
        "algorithm_name": "counting",
        "description": "numbers",
    }


def episodes(data):
    """The rows of data, cut after the flags: one dict of bytes per episode."""
    end = np.flatnonzero(data["terminated"] | data["truncated"]) + 1
    return sorted(
        [
            [(x.dtype.name, x[first:last].tobytes()) for x in jax.tree.leaves(data)]
            for first, last in zip([0, *end[:-1]], end, strict=True)
        ]
    )


def rows_of(state):
    """The rows of a state, lane by lane and the oldest first, as data."""
    names = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
    index = np.concatenate(lane_rows(state))

    def flat(x):
        return np.asarray(x).reshape(-1, *x.shape[2:])[index]

    return {n: jax.tree.map(flat, getattr(state.ring.experience, n)) for n in names}


@pytest.mark.parametrize(
    ("kind", "successor"),
    [("replay", "stored"), pytest.param(*CASES[2], marks=pytest.mark.slow)],
)
def test_episodes_go_to_minari_and_back(datasets, kind, successor):
    data = make_data([3, 1, 5, 2])
    buffer = KINDS[kind](24, 2, **options(successor))
    state = buffers.from_data(buffer, **data)
    made = buffers.to_minari(buffer, state, "numbers/test-v0", **datasets)
    assert made.total_episodes == 4
    assert made.total_steps == 11
    for dataset in ("numbers/test-v0", made):
        back = buffers.from_minari(buffers.ReplayBuffer(12, 1), dataset)
        assert episodes(rows_of(back)) == episodes(data)


def test_images_tuples_and_flags_keep_their_bits(datasets):
    """Minari would keep images as JPEG, which loses bits."""
    data = make_data([3, 2])
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (7, 16, 16, 3)).astype(np.uint8)
    side = rng.standard_normal((7, 2)).astype(np.float16)
    rows, after = [0, 1, 2, 4, 5], [1, 2, 3, 5, 6]
    data["obs"], data["next_obs"] = (
        (image[rows], side[rows]),
        (image[after], side[after]),
    )
    data["action"] = {"a": rng.random((5, 2)) < 0.5, "b": np.arange(5, dtype=np.int32)}
    buffer = buffers.ReplayBuffer(8, 1)
    state = buffers.from_data(buffer, **data)
    buffers.to_minari(buffer, state, "images-v0", **datasets)
    back = buffers.from_minari(buffer, "images-v0")
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_episodes_that_are_not_whole_are_left_out(datasets):
    buffer = buffers.ReplayBuffer(10, 1)
    state = buffers.from_data(buffer, **make_data([4, 3, 2], open_end=True))
    made = buffers.to_minari(buffer, state, "open-v0", **datasets)
    assert made.total_episodes == 2
    assert buffer.size(state) - made.total_steps == 2
    rows = jax.tree.map(lambda x: x[:3], state.experience)  # replaces the oldest two
    state = jax.jit(buffer.add)(state, rows.replace(episode_id=rows.episode_id + 9))
    made = buffers.to_minari(buffer, state, "cut-v0", **datasets)
    assert made.total_episodes == 1
    empty = buffers.from_data(buffer, **make_data([]))
    with pytest.raises(
        ValueError, match="`state` must hold at least one whole episode"
    ):
        buffers.to_minari(buffer, empty, "none-v0", **datasets)


def test_spaces_are_those_given_or_have_no_bounds(datasets):
    spaces = pytest.importorskip("gymnasium").spaces
    data = make_data([3])
    data["obs"], data["next_obs"] = data["obs"]["pair"], data["next_obs"]["pair"]
    buffer = buffers.ReplayBuffer(4, 1)
    state = buffers.from_data(buffer, **data)
    made = buffers.to_minari(
        buffer, state, "given-v0", action_space=spaces.Discrete(9), **datasets
    )
    assert made.action_space == spaces.Discrete(9)
    assert made.observation_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)


def make_minari(datasets, name, *episodes):
    import minari
    from gymnasium import spaces

    with pytest.warns(UserWarning, match="env"):
        return minari.create_dataset_from_buffers(
            name,
            [minari.data_collector.EpisodeBuffer(**episode) for episode in episodes],
            observation_space=spaces.Box(-9, 9, (1,), np.float64),
            action_space=spaces.Discrete(5),
            **datasets,
        )


def test_dataset_of_others_is_read(datasets):
    """T+1 observations, 64 bits, and an episode without a flag at its end."""
    episode = {
        "observations": np.arange(3.0)[:, None],
        "actions": np.array([1, 2]),
        "rewards": np.array([0.5, 1.5]),
        "terminations": np.zeros(2, bool),
        "truncations": np.zeros(2, bool),
    }
    ended = episode | {"terminations": np.array([False, True])}
    dataset = make_minari(datasets, "others-v0", episode, ended)
    state = buffers.from_minari(buffers.ReplayBuffer(5, 1), dataset)
    rows = rows_of(state)
    np.testing.assert_array_equal(rows["obs"][:, 0], [0, 1, 0, 1])
    np.testing.assert_array_equal(rows["next_obs"][:, 0], [1, 2, 1, 2])
    np.testing.assert_array_equal(rows["action"], [1, 2, 1, 2])
    np.testing.assert_array_equal(rows["truncated"], [False, True, False, False])
    np.testing.assert_array_equal(rows["terminated"], [False, False, False, True])
    np.testing.assert_array_equal(state.experience.episode_id[:4, 0], [0, 0, 1, 1])
    assert rows["obs"].dtype == np.float32
    broken = episode | {"observations": np.zeros((2, 1))}
    dataset = make_minari(datasets, "broken-v0", broken)
    with pytest.raises(
        ValueError, match="`dataset` must have 3 observations in episod"
    ):
        buffers.from_minari(buffers.ReplayBuffer(5, 1), dataset)


def test_minari_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    buffer = buffers.ReplayBuffer(4, 1)
    for call in (
        lambda: buffers.from_minari(buffer, "any-v0"),
        lambda: buffers.to_minari(buffer, None, "any-v0"),
    ):
        with pytest.raises(ModuleNotFoundError, match="the extra `minari` installs"):
            call()


@pytest.mark.slow
def test_what_minari_cannot_hold_is_refused(datasets):
    data = make_data([3])
    buffer = buffers.ReplayBuffer(4, 1)
    listed = [np.zeros(3, np.int8)]
    for changed, message in (
        ({"action": jnp.zeros(3, jnp.bfloat16)}, "`action` must be .* got bfloat16"),
        ({"obs": listed, "next_obs": listed}, "`obs` must be made .*, got list"),
    ):
        state = buffers.from_data(buffer, **{**data, **changed})
        with pytest.raises(ValueError, match=message):
            buffers.to_minari(buffer, state, "refused-v0", **datasets)

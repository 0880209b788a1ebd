"""Recorded data in buffers and Minari datasets, compared with the recorded data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_checks import lane_rows
from cases import quick_jit
from ring_model import decode_obs, encode_obs

from rollout import buffers
from rollout.types import Transition

pytestmark = pytest.mark.usefixtures("quick_compile")
REPLAY, EPISODIC = buffers.ReplayBuffer, buffers.EpisodeBuffer
PRIORITIZED = buffers.PrioritizedReplayBuffer


def make_data(lengths, open_end=False, seed=0):
    """Makes episodes of the given lengths; every leaf of a row encodes one number.

    Numbers increase by one within an episode and leave a gap between episodes, so
    that rows of different episodes have different successors. Endings alternate
    between termination, truncation and both.
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


def decode(rows):
    """Returns the row numbers and checks that all leaves encode them."""
    number = decode_obs(rows.obs)
    np.testing.assert_array_equal(decode_obs(rows.next_obs), number + 1)
    np.testing.assert_array_equal(rows.reward, number)
    np.testing.assert_array_equal(rows.action, number % 251)
    return number


def data_from_state(buffer, state):
    """Returns the rows of a state, lane by lane, in the format of `make_data`."""
    rows = jax.tree.map(lambda *x: np.concatenate(x), *lane_rows(buffer, state))
    return {name: getattr(rows, name) for name in make_data([])}


BUFFER, SMALL_BUFFER = (
    REPLAY(12, 1),
    REPLAY(4, 1),
)  # reuse the objects: each is traced once


def successor_options(successor):
    shared = {"next_obs": "shared", "final_obs_capacity": 8}
    return shared if successor == "shared" else {}


LANES = REPLAY(32, 2, **successor_options("shared"))
LENGTHS = [4, 1, 9, 2, 2, 6, 3, 2]  # lanes of 14 and 15 rows


@pytest.mark.parametrize(
    ("make", "successor", "open_end"),
    [
        (REPLAY, "shared", False),
        (EPISODIC, "stored", True),
    ],
)
def test_single_lane_equals_rows_added_in_order(make, successor, open_end):
    buffer = make(12, 1, **successor_options(successor))
    data = make_data([3, 1, 5], open_end=open_end)
    rows = Transition(
        **jax.tree.map(lambda x: x[:, None], data),
        **dict.fromkeys(("episode_return", "extras", "info"), ()),
        episode_id=np.int32([[0], [0], [0], [1], *[[2]] * 5]),
        episode_length=np.int32([[1], [2], [3], [1], [1], [2], [3], [4], [5]]),
        mask=np.ones((9, 1), bool),
    )
    want = quick_jit(buffer.add)(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    for arrays in (data, jax.tree.map(jnp.asarray, data)):
        state = buffers.from_data(buffer, **arrays)
        jax.tree.map(np.testing.assert_array_equal, state, want)


def test_lanes_store_complete_episodes_in_order():
    buffer, lengths = LANES, LENGTHS
    data = make_data(lengths)
    state = buffers.from_data(buffer, **data)
    numbers, sizes = [], []
    for rows in lane_rows(buffer, state):
        number = decode(rows)
        numbers.extend(number)
        sizes.append(len(number))
        assert (np.diff(rows.episode_id) >= 0).all()
        is_later_step = rows.episode_length[1:] > 1
        np.testing.assert_array_equal(np.diff(number) == 1, is_later_step)
    assert sorted(numbers) == data["reward"].astype(int).tolist()
    assert buffer.count_episodes(state, 9) == len(lengths)
    # Assigning the longest episode first to the emptiest lane is within 4/3 of optimal.
    assert max(sizes) <= 4 / 3 * max(9, -(-sum(lengths) // buffer.num_envs))


def test_unfinished_episode_is_newest_in_its_lane():
    """The unfinished episode is the longest, so it is assigned to a lane first."""
    buffer = REPLAY(60, 2)
    state = buffers.from_data(buffer, **make_data([2, 1, 1, 5], open_end=True))
    newest = [lane[-1:] for lane in map(decode, lane_rows(buffer, state))]
    assert 38 in np.concatenate(newest)


@pytest.mark.parametrize(
    "buffer", [BUFFER, pytest.param(PRIORITIZED(12, 1), marks=pytest.mark.slow)]
)
def test_chunked_transfer_gives_equal_state(buffer, monkeypatch):
    """Data is transferred in chunks; the last chunk is shorter than the first."""
    data = make_data([3, 1, 5], open_end=True)
    want = buffers.from_data(buffer, **data)
    monkeypatch.setattr("rollout.buffers.offline._CHUNK_BYTES", 200)
    got = buffers.from_data(buffer, **data)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(("make", "num_envs"), [(REPLAY, 1), (EPISODIC, 3)])
def test_empty_data_gives_empty_state(make, num_envs):
    buffer = make(12, num_envs)
    state = buffers.from_data(buffer, **make_data([]))
    assert buffer.size(state) == 0
    assert state.ring.experience.obs["pair"].shape == (12 // num_envs, num_envs, 2)
    assert state.ring.experience.reward.dtype == jnp.float32


def test_dtypes_are_converted_to_32_bits():
    data = make_data([3])
    input_dtypes = ("float64", "int64", "float64", "int8", "float32")
    expected_dtypes = ("float32", "int32", "float32", "bool", "bool")
    names = ("obs", "action", "reward", "terminated", "truncated")
    data |= {name: data[name]["pair"] for name in ("obs", "next_obs")}
    data |= {x: data[x].astype(t) for x, t in zip(names, input_dtypes, strict=True)}
    data["next_obs"] = data["next_obs"].astype("float64")
    rows = buffers.from_data(SMALL_BUFFER, **data).experience
    assert tuple(getattr(rows, x).dtype.name for x in names) == expected_dtypes
    np.testing.assert_array_equal(rows.terminated[:, 0], [False, False, True, False])


def test_successors_may_differ_or_be_nan():
    data = make_data([3, 1, 5])
    data["next_obs"]["byte"][5] += 1
    state = buffers.from_data(BUFFER, **data)
    assert state.experience.next_obs["byte"][5, 0] == data["next_obs"]["byte"][5]
    data = make_data([3, 1, 5])
    data["obs"]["pair"][1] = data["next_obs"]["pair"][0] = np.nan  # equal to itself
    buffers.from_data(REPLAY(12, 1, **successor_options("shared")), **data)


def test_episode_ends_without_flags_are_truncated():
    data = make_data([3, 1, 5])
    reference = buffers.from_data(BUFFER, **data).experience
    zero_flags = {x: np.zeros_like(data[x]) for x in ("terminated", "truncated")}
    state = buffers.from_data(BUFFER, **{**data, **zero_flags}).experience
    for name in ("episode_id", "episode_length"):
        np.testing.assert_array_equal(getattr(state, name), getattr(reference, name))
    ends = data["terminated"] | data["truncated"]
    # Nothing marks the end of the last episode.
    np.testing.assert_array_equal(state.truncated[: len(ends) - 1, 0], ends[:-1])
    assert not state.terminated.any()


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


def episode_bytes(data):
    """Splits data at the flags and returns the bytes of every episode."""
    end = np.flatnonzero(data["terminated"] | data["truncated"]) + 1
    return sorted(
        [
            [(x.dtype.name, x[first:last].tobytes()) for x in jax.tree.leaves(data)]
            for first, last in zip([0, *end[:-1]], end, strict=True)
        ]
    )


def test_episodes_round_trip_through_minari(datasets):
    data = make_data(LENGTHS)
    state = buffers.from_data(LANES, **data)
    dataset = buffers.offline.to_minari(LANES, state, "numbers/test-v0", **datasets)
    assert dataset.total_episodes == len(LENGTHS)
    assert dataset.total_steps == sum(LENGTHS)
    for source in ("numbers/test-v0", dataset):
        state = buffers.offline.from_minari(LANES, source)
        assert episode_bytes(data_from_state(LANES, state)) == episode_bytes(data)
    with pytest.raises(ValueError, match="`dataset_id` must be new"):
        buffers.offline.to_minari(LANES, None, "numbers/test-v0", **datasets)


def test_minari_preserves_images_tuples_and_flags(datasets):
    """Minari compresses images as JPEG by default, which is lossy."""
    data = make_data([3, 2])
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (7, 16, 16, 3)).astype(np.uint8)
    vector = rng.standard_normal((7, 2)).astype(np.float16)
    indices, successors = [0, 1, 2, 4, 5], [1, 2, 3, 5, 6]
    data["obs"] = image[indices], vector[indices]
    data["next_obs"] = image[successors], vector[successors]
    data["action"] = {"a": rng.random((5, 2)) < 0.5, "b": np.arange(5, dtype=np.int32)}
    buffer = REPLAY(8, 1)
    state = buffers.from_data(buffer, **data)
    buffers.offline.to_minari(buffer, state, "images-v0", **datasets)
    restored = buffers.offline.from_minari(buffer, "images-v0")
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_minari_export_skips_incomplete_episodes(datasets):
    buffer = BUFFER
    state = buffers.from_data(buffer, **make_data([4, 3, 2], open_end=True))
    dataset = buffers.offline.to_minari(buffer, state, "open-v0", **datasets)
    assert dataset.total_episodes == 2
    assert buffer.size(state) - dataset.total_steps == 2
    # Three slots are free: five rows of two unfinished episodes overwrite two rows.
    rows = jax.tree.map(lambda x: x[[0, 1, 2, 4, 5]], jax.device_get(state.experience))
    state = quick_jit(buffer.add)(state, rows.replace(episode_id=rows.episode_id + 9))
    dataset = buffers.offline.to_minari(buffer, state, "cut-v0", **datasets)
    assert dataset.total_episodes == 1
    empty = buffers.from_data(buffer, **make_data([]))
    with pytest.raises(ValueError, match="`state` must hold"):
        buffers.offline.to_minari(buffer, empty, "none-v0", **datasets)


def test_form_of_dataset_id_is_checked_before_the_buffer_is_read(datasets):
    for wrong in ("a/walk-v0", "walk", "team/walk", "my team/walk-v0", "team/wa.lk-v0"):
        with pytest.raises(ValueError, match=r"`dataset_id` must have the form"):
            buffers.offline.to_minari(BUFFER, None, wrong, **datasets)


def test_minari_spaces_default_to_unbounded_boxes(datasets):
    spaces = pytest.importorskip("gymnasium").spaces
    data = make_data([3])
    data["obs"], data["next_obs"] = data["obs"]["pair"], data["next_obs"]["pair"]
    data["action"] = data["action"].astype(np.int32)  # shares a compiled program
    buffer = SMALL_BUFFER
    state = buffers.from_data(buffer, **data)
    dataset = buffers.offline.to_minari(
        buffer, state, "given-v0", action_space=spaces.Discrete(9), **datasets
    )
    assert dataset.action_space == spaces.Discrete(9)
    assert dataset.observation_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)


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


def test_external_minari_dataset_is_read(datasets):
    """The dataset has T+1 observations, 64-bit arrays and an episode without flags."""
    episode = {
        "observations": np.arange(3.0)[:, None],
        "actions": np.array([1, 2]),
        "rewards": np.array([0.5, 1.5]),
        "terminations": np.zeros(2, bool),
        "truncations": np.zeros(2, bool),
    }
    terminated_episode = episode | {"terminations": np.array([False, True])}
    dataset = make_minari(datasets, "others-v0", episode, terminated_episode)
    state = buffers.offline.from_minari(BUFFER, dataset)
    rows = data_from_state(BUFFER, state)
    np.testing.assert_array_equal(rows["obs"][:, 0], [0, 1, 0, 1])
    np.testing.assert_array_equal(rows["next_obs"][:, 0], [1, 2, 1, 2])
    np.testing.assert_array_equal(rows["action"], [1, 2, 1, 2])
    np.testing.assert_array_equal(rows["truncated"], [False, True, False, False])
    np.testing.assert_array_equal(rows["terminated"], [False, False, False, True])
    np.testing.assert_array_equal(state.experience.episode_id[:4, 0], [0, 0, 1, 1])
    assert rows["obs"].dtype == np.float32
    broken = episode | {"observations": np.zeros((2, 1))}
    dataset = make_minari(datasets, "broken-v0", broken)
    with pytest.raises(ValueError, match="`dataset` must have 3 observations"):
        buffers.offline.from_minari(REPLAY(5, 1), dataset)

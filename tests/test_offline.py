"""Recorded data in a buffer, and datasets of Minari, against the data itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import buffers

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


@pytest.mark.parametrize("num_rows", [1, 4])
def test_one_lane_of_episodes_is_written_in_place(num_rows):
    """With one lane XLA moves reads that are not held back behind the write."""
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

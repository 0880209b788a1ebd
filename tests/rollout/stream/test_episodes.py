"""Batches of complete episodes, and `split_trajectories`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import raw
from streams import EPISODES, B, host, make_learner, make_stream, reference_rows

import rollout


@pytest.mark.parametrize("prefetch", [0, 1])
def test_batches_equal_collect_episodes(prefetch):
    stream = make_stream(prefetch=prefetch, **EPISODES)
    batches = [next(stream) for _ in range(3)]
    collector, params = make_learner(), {"odds": jnp.float32(0.5)}
    carry = collector.init(jax.random.key(7))
    for number, batch in enumerate(batches):
        carry, episodes = collector.collect_episodes(
            carry, params, 5, max_episode_steps=6, return_trajectory=True
        )
        trajectory = episodes.trajectory
        chex.assert_trees_all_equal(raw(batch.trajectory), raw(trajectory))
        episodes = episodes.replace(trajectory=())
        chex.assert_trees_all_equal(batch.episodes, episodes)
        assert batch.steps == int(trajectory.mask.sum()) == int(batch.stats.num_steps)
        # Episode e of the queue has the id -1 - e.
        ids = batch.trajectory.episode_id[0]
        np.testing.assert_array_equal(ids, -1 - np.arange(5 * number, 5 * number + 5))
    assert stream.stats.collected.num_episodes == 15
    assert stream.stats.steps == sum(batch.steps for batch in batches)


def test_total_steps_ends_a_stream_of_episodes():
    steps = [batch.steps for batch in make_stream(total_steps=50, **EPISODES)]
    assert sum(steps) >= 50 > sum(steps[:-1])


def test_at_batch_end_does_not_change_batches_of_episodes():
    plain = make_stream(**EPISODES)
    stream = make_stream(at_batch_end="reset", **EPISODES)
    chex.assert_trees_all_equal(host(next(stream)), host(next(plain)))
    state, want = plain.state(), host(next(plain))
    chex.assert_trees_all_equal(host(next(stream)), want)
    plain.restore(state)
    chex.assert_trees_all_equal(host(next(plain)), want)


def test_split_trajectories_equals_a_plain_loop():
    trajectory = reference_rows()
    expected = []
    for lane in range(B):
        for t in range(len(trajectory.mask)):
            if trajectory.mask[t, lane]:
                episode_id = trajectory.episode_id[t, lane]
                if not expected or expected[-1][:2] != (lane, episode_id):
                    expected.append((lane, episode_id, []))
                expected[-1][2].append(t)
    pieces = rollout.trajectories.split_trajectories(trajectory)
    longest = max(len(steps) for *_, steps in expected)
    assert pieces.mask.shape == (longest, len(expected))
    assert pieces.mask.sum() == trajectory.mask.size
    for n, (lane, episode_id, steps) in enumerate(expected):
        assert (pieces.lane[n], pieces.episode_id[n]) == (lane, episode_id)
        assert pieces.mask[:, n].sum() == len(steps)
        for field in ("obs", "action", "reward", "next_obs", "episode_length"):
            got = getattr(pieces.trajectory, field)[:, n]
            want = getattr(trajectory, field)[steps, lane]
            np.testing.assert_array_equal(got[: len(steps)], want)
            assert not got[len(steps) :].any()


def test_select_fields_keeps_only_the_named_fields():
    trajectory = reference_rows()
    selected = rollout.trajectories.select_fields(trajectory, ("obs", "mask"))
    for name, value in vars(trajectory).items():
        expected = value if name in ("obs", "mask") else ()
        assert getattr(selected, name) is expected


def test_split_trajectories_of_a_masked_trajectory_is_empty():
    masked_out = reference_rows().replace(mask=np.zeros((12, B), bool))
    pieces = rollout.trajectories.split_trajectories(masked_out)
    assert pieces.mask.shape == (0, 0)
    assert pieces.trajectory.obs.shape == (0, 0, 1)

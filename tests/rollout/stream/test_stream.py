"""Streams of steps: counts, limits and ends of batches."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import WithCritic, make_collector
from host_count import KEY, in_jax, on_host
from streams import B, host, join, make_stream, reference_rows

import rollout


@pytest.mark.parametrize(
    ("per_batch", "total", "steps"), [(8, 28, [8, 8, 8, 4]), (8, 4, [4])]
)
def test_batches_have_the_rows_of_collect_steps(per_batch, total, steps):
    stream = make_stream(steps_per_batch=per_batch, total_steps=total)
    assert len(stream) == len(steps)
    batches = list(stream)
    assert [batch.steps for batch in batches] == steps
    assert [int(batch.stats.num_steps) for batch in batches] == steps
    shapes = [batch.trajectory.mask.shape for batch in batches]
    assert shapes == [(number // B, B) for number in steps]
    assert stream.stats.steps == total
    want = jax.tree.map(lambda x: x[: total // B], reference_rows())
    chex.assert_trees_all_equal(join(batches), want)


WARMUP = 12  # steps, which end within a batch


@functools.cache
def warmed_up():
    """All rows of a stream with a warm-up, a limit and a critic."""
    traces = []

    def lowest(params, obs, state, key):
        """Action 0, a count of steps in its memory, and an extra."""
        traces.append(1)
        action, log_prob = jnp.zeros(B, jnp.int32), jnp.full(B, -0.5)
        return action, state + 1, {"log_prob": log_prob}

    collector = make_collector("count", B)
    policy = rollout.recurrent_policy(
        lowest, jnp.zeros, value_fn=lambda params, obs, state: 10 * state
    )
    policy = rollout.policies.RandomWarmup(
        policy, collector.env.action_space, WARMUP // B
    )
    options = {"key": jax.random.key(7), "max_episode_steps": 3}
    stream = rollout.Stream(
        collector.replace(policy=policy), steps_per_batch=8, **options
    )
    batches = [next(stream), next(stream)]
    num_traces = len(traces)
    batches += [next(stream), next(stream)]
    assert len(traces) == num_traces  # one program serves all batches
    with pytest.raises(TypeError, match="`total_steps`"):
        len(stream)  # it is endless
    return join(batches)


def test_warmup_takes_the_given_number_of_random_steps():
    rows = warmed_up()
    assert rows.action[: WARMUP // B].any()
    assert not rows.action[WARMUP // B :].any()
    np.testing.assert_array_equal(rows.extras["log_prob"], np.float32(-0.5))


def test_critic_receives_the_policy_state_during_the_warmup():
    rows = warmed_up()
    is_cut = rows.truncated & ~rows.terminated
    assert is_cut[:3].any()
    assert is_cut[3:].any()
    want = np.where(is_cut, 10.0 * rows.episode_length, 0.0)
    np.testing.assert_array_equal(rows.final_value, want)


def test_max_episode_steps_counts_across_batches():
    # Batches of 2 rows, a limit of 3: the first episode of a lane that the
    # environment does not end before has its third step in the second batch.
    trajectory = warmed_up()
    at_limit = trajectory.episode_length == 3
    assert trajectory.episode_length.max() == 3
    assert trajectory.truncated[at_limit].all()
    assert trajectory.truncated[~at_limit].sum() == 0
    # Every row after a limit is the first of a new episode.
    assert trajectory.first[1:][trajectory.done[:-1]].all()
    # Lengths are 2 to 9: an episode of length 3 sets both flags.
    assert (trajectory.terminated & at_limit).any()


def record_cut(t):
    final_value = jax.tree.map(lambda x: x / 10, t.final_value)  # or ()
    return t.replace(extras={"truncated": t.truncated}, final_value=final_value)


@pytest.mark.parametrize("make", [in_jax, on_host])
def test_truncation_at_a_batch_end_is_recorded_and_accumulated(make):
    num_cuts = rollout.Accumulator(jnp.zeros, lambda x, t: x + t.truncated)
    changes = {"record_fn": record_cut, "accumulators": {"num_cuts": num_cuts}}
    collector, options = make(), {"steps_per_batch": 4 * 5, "at_batch_end": "truncate"}
    value_fn = lambda params, obs, state: obs[:, 0]  # noqa: E731
    changes["policy"] = WithCritic(collector.policy, value_fn)
    stream = rollout.Stream(collector.replace(**changes), key=KEY, **options)
    first, second = host(next(stream)), host(next(stream))
    stream.close()
    for rows in first, second:
        cut = rows.truncated[-1] & ~rows.terminated[-1]
        assert np.any(rows.episode_length[-1][cut] < 7)  # not by the environment
        np.testing.assert_array_equal(rows.extras["truncated"], rows.truncated)
        np.testing.assert_array_equal(rows.accumulated["num_cuts"], rows.truncated)
        want = rows.next_obs[-1, :, 0] / np.float32(10)
        np.testing.assert_array_equal(rows.final_value[-1][cut], want[cut])
    assert second.first[0].all()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_reset_at_a_batch_end_sets_no_flag():
    trajectory = join(make_stream(total_steps=48, at_batch_end="reset"))
    assert (trajectory.episode_length[::2] == 1).all()  # the first row of a batch
    # The ends are the environment's own.
    np.testing.assert_array_equal(trajectory.truncated, trajectory.episode_length == 7)
    ids = trajectory.episode_id
    new = (ids[1:] != ids[:-1]).sum(axis=0)
    # One more for each of the 5 later batches that does not begin after an ending.
    fresh = (trajectory.done[:-1] | (np.arange(1, 12) % 2 == 0)[:, None]).sum(axis=0)
    np.testing.assert_array_equal(new, fresh)
    assert set(np.diff(ids, axis=0).flat) == {0, B}

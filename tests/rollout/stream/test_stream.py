"""Streams of steps: exact counts, with every option."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, WithCritic, make_collector
from host_count import KEY, in_jax, on_host
from streams import B, by_lane, host, join, make_stream, straight

import rollout
from rollout import envs
from rollout.stream.batch import Options, make_batch

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("per_batch", "total", "steps"),
    [(8, 28, [8, 8, 8, 4]), (8, 4, [4]), (4, 8, [4, 4])],
)
def test_batches_have_exactly_their_steps_the_rows_of_collect_steps(
    per_batch, total, steps
):
    stream = make_stream(steps_per_batch=per_batch, total_steps=total)
    assert len(stream) == len(steps)
    batches = list(stream)
    assert [batch.steps for batch in batches] == steps
    assert [int(batch.stats.num_steps) for batch in batches] == steps
    shapes = [batch.trajectory.mask.shape for batch in batches]
    assert shapes == [(number // B, B) for number in steps]
    assert stream.stats.steps == total
    want = jax.tree.map(lambda x: x[: total // B], straight())
    chex.assert_trees_all_equal(join(batches), want)


def test_stream_without_a_total_is_endless_and_has_no_length():
    stream = make_stream()
    assert [next(stream).steps for _ in range(3)] == [8] * 3
    with pytest.raises(TypeError, match="`total_steps`"):
        len(stream)


def lowest(params, obs, state, key):
    """Action 0, a count of steps in its memory, and an extra."""
    lowest.traces += 1
    action = jnp.zeros(obs.shape[0], jnp.int32)
    return action, state + 1, {"log_prob": jnp.full(obs.shape[0], -0.5)}


lowest.traces = 0
WARMUP = 12  # steps, which end within a batch
LOWEST = rollout.recurrent_policy(lowest, lambda num_envs: jnp.zeros(num_envs))


@functools.cache
def warmed_up():
    """All batches of a stream with a warm-up and a limit, and the traces of each."""
    collector = make_collector("count", B)
    policy = WithCritic(LOWEST, lambda params, obs, state: 10 * state)
    policy = rollout.policies.RandomWarmup(
        policy, collector.env.action_space, WARMUP // B
    )
    collector = collector.replace(policy=policy)
    options = {"steps_per_batch": 8, "total_steps": 28}
    options |= {"key": jax.random.key(7), "max_episode_steps": 3}
    batches, traces = [], []
    for batch in rollout.Stream(collector, **options):
        batches.append(batch)
        traces.append(lowest.traces)
    return batches, join(batches), traces


def test_warmup_takes_exactly_so_many_random_steps():
    batches, trajectory, traces = warmed_up()
    assert traces[1] == traces[2]  # one program serves batches of equally many rows
    plan = [8, 8, 8, 4]
    assert [batch.steps for batch in batches] == plan
    assert trajectory.action[: WARMUP // B].any()
    assert not trajectory.action[WARMUP // B :].any()
    np.testing.assert_array_equal(trajectory.extras["log_prob"], np.float32(-0.5))


def test_value_function_gets_the_policys_own_state_in_the_warmup_and_after():
    _, rows, _ = warmed_up()
    is_cut = rows.truncated & ~rows.terminated
    assert is_cut[:3].any()
    assert is_cut[3:].any()
    want = np.where(is_cut, 10.0 * rows.episode_length, 0.0)
    np.testing.assert_array_equal(rows.final_value, want)


def test_episodes_are_truncated_across_batches():
    # Batches of 2 rows, a limit of 3: the first episode of a lane that the
    # environment does not end before has its third step in the second batch.
    _, trajectory, _ = warmed_up()
    at_limit = trajectory.episode_length == 3
    assert trajectory.episode_length.max() == 3
    assert trajectory.truncated[at_limit].all()
    assert trajectory.truncated[~at_limit].sum() == 0
    # Every row after a limit is the first of a new episode.
    assert trajectory.first[1:][trajectory.done[:-1]].all()
    # Lengths are 2 to 9: one that is 3 ends both ways.
    assert (trajectory.terminated & at_limit).any()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_cut_at_the_end_of_a_batch_is_a_truncation():
    options = {"steps_per_batch": 8, "total_steps": 28}
    seen = set()
    for batch in make_stream(at_batch_end="truncate", **options):
        trajectory = host(batch)
        ids = set(trajectory.episode_id[trajectory.mask].tolist())
        assert not ids & seen  # nothing goes on from the batch before
        seen |= ids
        for lane in range(B):
            steps = by_lane(trajectory, lane)
            if steps.mask.any():
                assert steps.done[-1]
                assert steps.first[0]
                # The true successor is one more than the observation.
                np.testing.assert_array_equal(steps.next_obs, steps.obs + 1)


def record_cut(t):
    final_value = jax.tree.map(lambda x: x / 10, t.final_value)  # or ()
    return t.replace(extras={"truncated": t.truncated}, final_value=final_value)


@pytest.mark.parametrize("make", [in_jax, on_host])
def test_cut_at_the_end_of_a_batch_is_recorded_and_accumulated(make):
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
def test_reset_at_the_end_of_a_batch_starts_new_episodes_and_marks_nothing():
    trajectory = join(make_stream(total_steps=48, at_batch_end="reset"))
    assert (trajectory.episode_length[::2] == 1).all()  # the first row of a batch
    # The ends are the environment's own.
    np.testing.assert_array_equal(trajectory.truncated, trajectory.episode_length == 7)
    ids = trajectory.episode_id
    new = (ids[1:] != ids[:-1]).sum(axis=0)
    # One more for each of the 5 later batches that does not begin after an ending.
    fresh = (trajectory.done[:-1] | (np.arange(1, 12) % 2 == 0)[:, None]).sum(axis=0)
    np.testing.assert_array_equal(new, fresh)
    assert len(np.unique(ids)) == B + new.sum()


def total(trajectory):
    total.traces += 1
    return {"reward": trajectory.reward.sum(), "mask": trajectory.mask}


total.traces = 0


@pytest.mark.slow
def test_postprocess_runs_in_the_same_program():
    options = {"steps_per_batch": 8, "total_steps": 24}
    stream = make_stream(postprocess=total, **options)
    stream.compile()
    traces = total.traces
    for got, want in zip(stream, make_stream(**options), strict=True):
        assert got.trajectory["reward"] == want.trajectory.reward.sum()
        np.testing.assert_array_equal(got.trajectory["mask"], want.trajectory.mask)
        chex.assert_trees_all_equal(got.stats, want.stats)
    assert total.traces == traces


@slow
@pytest.mark.usefixtures("quick_compile")
def test_field_that_a_postprocess_does_not_read_has_no_array():
    env = envs.TransformObs(CountEnv(), lambda obs: jnp.broadcast_to(obs, (5,)))
    collector = make_collector("count", B).replace(env=envs.vectorize(env, B))
    carry, window = collector.init(jax.random.key(7)), rollout.EpisodeWindow.init(9)
    defaults = dict.fromkeys(x.name for x in dataclasses.fields(Options))
    defaults |= {"num_envs": B, "steps_per_batch": 13 * B, "device": None}
    defaults |= {"reuse_memory": False, "check_finite": False, "prefetch": 0}
    defaults |= {"at_batch_end": "continue", "on_fault": "raise"}

    def text(**changes):
        program = jax.jit(make_batch, static_argnums=(0, 1))
        args = Options(**defaults | changes), 13, collector, carry, None, window, ()
        return program.lower(*args).compile().as_text()

    stored = f"[13,{B},5]"  # 13 rows of observations
    assert stored in text()
    assert stored not in text(postprocess=lambda t: t.reward)

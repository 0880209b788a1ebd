"""Tests that `record_fn` changes rows and neither policies nor statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit

import rollout
from rollout import envs

NUM_STEPS = 12


def act(params, obs, key):
    # The actions depend on the observations, so changed observations have an effect.
    return obs[:, 0].astype(jnp.int32) % 3, {"obs": obs[:, 0]}


POLICY = rollout.stateless_policy(act)


def record(transition):
    return transition.replace(
        obs=(10 * transition.obs).astype(jnp.uint8),
        next_obs=(),
        reward=jnp.clip(transition.reward, -1.0, 1.0),
        extras={**transition.extras, "double": 2 * transition.reward},
    )


def drop_fields(transition):
    return transition.replace(reward=(), action=(), info=())


def add_double(total, transition):
    return total + transition.extras["double"].sum()


def make_collector(record_fn):
    env = envs.vectorize(CountEnv(), 4, auto_reset="select")
    return rollout.Collector(env=env, policy=POLICY, record_fn=record_fn)


@pytest.fixture(scope="module")
def results():
    """Collects with three `record_fn` from one carry, by every method."""
    collectors = raw, recording, _ = [
        make_collector(x) for x in (None, record, drop_fields)
    ]

    @quick_jit
    def run(key):
        start = raw.init(key), None
        rows = [x.collect_steps(*start, NUM_STEPS)[1] for x in collectors]
        row = recording.step(*start)[1]
        total = recording.fold_steps(*start, add_double, 0.0, num_steps=NUM_STEPS)[1]
        counts = {"max_episode_steps": 7, "return_trajectory": True}
        episodes = recording.collect_episodes(*start, 5, **counts)[1]
        return rows, [rollout.summarize(x) for x in rows], row, total, episodes

    return jax.device_get(run(jax.random.key(0)))


def check_rows(recorded, raw):
    assert recorded.obs.dtype == np.uint8
    np.testing.assert_array_equal(recorded.obs, 10 * raw.obs)
    assert recorded.next_obs == ()
    np.testing.assert_array_equal(recorded.reward, np.minimum(raw.reward, 1))
    np.testing.assert_array_equal(recorded.extras["double"], 2 * raw.reward)
    np.testing.assert_array_equal(recorded.extras["obs"], raw.extras["obs"])
    for name in ("action", "terminated", "truncated", "episode_return"):
        np.testing.assert_array_equal(getattr(recorded, name), getattr(raw, name))


def test_record_fn_changes_steps_but_not_statistics(results):
    (raw, recorded, dropped), stats, row, total, _ = results
    check_rows(recorded, raw)
    check_rows(row, jax.tree.map(lambda x: x[0], raw))
    np.testing.assert_allclose(total, 2 * raw.reward.sum())
    assert recorded.reward.max() == 1 < raw.reward.max()
    assert dropped.reward == dropped.action == ()
    want = stats[0]
    assert want.returns.mean > 1
    for got in stats[1:]:
        assert got.returns.mean == want.returns.mean
        assert got.num_episodes == want.num_episodes > 0
        assert got.num_nonfinite == 0


def test_record_fn_changes_episodes_but_not_returns(results):
    *_, episodes = results
    padded = episodes.trajectory
    length = episodes.episode_length
    np.testing.assert_array_equal(episodes.episode_return, length * (length + 1) / 2)
    step = np.arange(1, 8)[:, None]
    mask = step <= length
    np.testing.assert_array_equal(padded.mask, mask)
    assert padded.obs.dtype == np.uint8
    for got, want in (
        (padded.obs[..., 0], 10 * (step - 1)),
        (padded.reward, 1),
        (padded.action, (step - 1) % 3),
        (padded.extras["double"], 2 * step),
        (padded.extras["obs"], step - 1),
    ):
        np.testing.assert_array_equal(got, np.where(mask, want, 0))

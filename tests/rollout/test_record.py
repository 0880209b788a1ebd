"""`record_fn` changes stored rows, and not what the policy and statistics see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit

import rollout
from rollout import envs

NUM_STEPS = 12


def act(params, obs, key):
    # It acts on what it sees, so that a changed observation would change the actions.
    return obs[:, 0].astype(jnp.int32) % 3, {"seen": obs[:, 0]}


POLICY = rollout.stateless_policy(act)


def record(transition):
    return transition.replace(
        obs=(10 * transition.obs).astype(jnp.uint8),
        next_obs=(),
        reward=jnp.clip(transition.reward, -1.0, 1.0),
        extras={**transition.extras, "double": 2 * transition.reward},
    )


def make_collector(record_fn):
    env = envs.vectorize(CountEnv(), 4, auto_reset="select")
    return rollout.Collector(env=env, policy=POLICY, record_fn=record_fn)


@quick_jit
def collect_steps(collector, carry):
    return collector.collect_steps(carry, None, NUM_STEPS)[1]


@pytest.fixture(scope="module")
def raw():
    collector = make_collector(None)
    carry = collector.init(jax.random.key(0))
    trajectory = collect_steps(collector, carry)
    return carry, jax.device_get(trajectory)


summarize = jax.jit(rollout.summarize)


def check(recorded, raw):
    assert recorded.obs.dtype == jnp.uint8
    np.testing.assert_array_equal(recorded.obs, 10 * np.asarray(raw.obs))
    assert recorded.next_obs == ()
    np.testing.assert_array_equal(recorded.reward, np.minimum(raw.reward, 1))
    np.testing.assert_array_equal(recorded.extras["double"], 2 * np.asarray(raw.reward))
    np.testing.assert_array_equal(recorded.extras["seen"], raw.extras["seen"])
    np.testing.assert_array_equal(recorded.action, raw.action)
    np.testing.assert_array_equal(recorded.terminated, raw.terminated)
    np.testing.assert_array_equal(recorded.truncated, raw.truncated)
    np.testing.assert_array_equal(recorded.episode_return, raw.episode_return)


def test_steps_are_stored_as_recorded_and_statistics_count_the_raw_rewards(raw):
    carry, raw = raw
    recorded = collect_steps(make_collector(record), carry)
    check(recorded, raw)
    assert np.max(recorded.reward) == 1 < np.max(raw.reward)
    got, want = summarize(recorded), summarize(raw)
    assert got.returns.mean == want.returns.mean > 1
    assert got.num_episodes == want.num_episodes > 0


def test_fields_that_are_not_recorded_are_not_missed(raw):
    carry, raw = raw
    collector = make_collector(lambda t: t.replace(reward=(), action=(), info=()))
    recorded = collect_steps(collector, carry)
    assert recorded.reward == recorded.action == ()
    got, want = summarize(recorded), summarize(raw)
    assert got.returns.mean == want.returns.mean
    assert got.num_nonfinite == 0


@pytest.mark.slow
def test_episodes_are_evaluated_without_what_is_not_recorded():
    collector = make_collector(lambda t: t.replace(reward=(), action=(), info=()))
    assert rollout.evaluate(collector, jax.random.key(0), None, 3).num_episodes == 3


def test_single_steps_and_folds_hand_out_what_is_recorded(raw):
    carry, raw = raw
    collector = make_collector(record)

    def note(acc, transition):
        return acc + transition.extras["double"].sum()

    @quick_jit
    def run(carry):
        _, transition = collector.step(carry, None)
        return transition, collector.fold_steps(
            carry, None, note, 0.0, num_steps=NUM_STEPS
        )

    transition, (_, total) = run(carry)
    raw = jax.tree.map(np.asarray, raw)
    check(transition, jax.tree.map(lambda x: x[0], raw))
    np.testing.assert_allclose(total, 2 * raw.reward.sum())


def test_episodes_are_stored_as_recorded_and_counted_raw(raw):
    @quick_jit
    def play(collector, carry):
        return collector.collect_padded_episodes(carry, None, 5, max_length=7)[1:]

    padded, episodes = jax.device_get(play(make_collector(record), raw[0]))
    length = np.asarray(episodes.episode_length)
    np.testing.assert_array_equal(episodes.episode_return, length * (length + 1) / 2)
    step = np.arange(1, 8)[:, None]
    mask = step <= length
    np.testing.assert_array_equal(padded.mask, mask)
    assert padded.obs.dtype == jnp.uint8
    for got, want in (
        (padded.obs[..., 0], 10 * (step - 1)),
        (padded.reward, 1),
        (padded.action, (step - 1) % 3),
        (padded.extras["double"], 2 * step),
        (padded.extras["seen"], step - 1),
    ):
        np.testing.assert_array_equal(got, np.where(mask, want, 0))

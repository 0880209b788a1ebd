"""`HostCollector` against the kernel: the same rows, from NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_count import (
    KEY,
    OPTIONS,
    POLICY,
    HostCount,
    SeedCount,
    assert_same,
    assert_same_carry,
    in_jax,
    on_host,
)

import rollout
from rollout import envs
from rollout.host import HostCollector


def test_steps_are_those_of_the_kernel():
    collectors = on_host(), in_jax()
    carries = [x.init(KEY) for x in collectors]
    assert_same_carry(*carries)
    for _ in range(2):
        pairs = [
            x.collect_steps(c, None, 40)
            for x, c in zip(collectors, carries, strict=True)
        ]
        carries, trajectories = zip(*pairs, strict=True)
        assert_same(*trajectories)
        assert_same_carry(*carries)
    assert trajectories[0].terminated.any()
    assert trajectories[0].truncated.any()


def test_one_call_is_two_calls_is_single_steps():
    whole, parts = on_host(), on_host()
    _, expected = whole.collect_steps(whole.init(KEY), None, 20)
    carry, first = parts.collect_steps(parts.init(KEY), None, 13)
    rows = [jax.tree.map(lambda x, i=i: x[i], first) for i in range(13)]
    for _ in range(7):
        carry, row = parts.step(carry, None)
        rows.append(row)
    assert_same(jax.tree.map(lambda *x: jnp.stack(x), *rows), expected)


@pytest.mark.parametrize("num_episodes", [1, 3, 4, 11])
def test_episodes_are_those_of_the_kernel(num_episodes):
    length = np.arange(2, 6)
    lengths = {"min_length": length, "max_length": length, "limit": 100}
    fixed = envs.vectorize_each(
        SeedCount(**{k: jnp.broadcast_to(v, 4) for k, v in lengths.items()}), 4,
        auto_reset="select",
    )  # fmt: skip
    kernel, host = rollout.Collector(env=fixed, **OPTIONS), on_host(**lengths)
    options = {"num_episodes": num_episodes, "max_steps": 4}
    carries = [x.init(KEY) for x in (host, kernel)]
    for _ in range(2):
        pairs = [
            x.collect_episodes(c, None, **options)
            for x, c in zip((host, kernel), carries, strict=True)
        ]
        carries, episodes = zip(*pairs, strict=True)
        assert_same(*episodes)
        assert_same_carry(*carries)


def test_episodes_per_env_are_those_of_the_kernel():
    collectors = on_host(), in_jax()
    pairs = [
        x.collect_episodes_per_env(x.init(KEY), None, 3, max_steps=6)
        for x in collectors
    ]
    carries, episodes = zip(*pairs, strict=True)
    assert_same(*episodes)
    assert_same_carry(*carries)


def test_enough_steps_are_those_of_the_kernel():
    for min_steps in (1, 17, 30):
        pairs = [
            x.collect_episodes(x.init(KEY), None, 9, max_steps=6, min_steps=min_steps)
            for x in (on_host(), in_jax())
        ]
        carries, episodes = zip(*pairs, strict=True)
        assert_same(*episodes)
        assert_same_carry(*carries)


def test_padded_episodes_are_those_of_the_kernel():
    pairs = [
        x.collect_padded_episodes(x.init(KEY), None, 7, max_length=6)
        for x in (on_host(), in_jax())
    ]
    for host, kernel in zip(*pairs, strict=True):
        if isinstance(host, rollout.Carry):
            assert_same_carry(host, kernel)
        else:
            assert_same(host, kernel)


def count_rows(acc, transition):
    return {
        "steps": acc["steps"] + transition.mask.sum(dtype=jnp.int32),
        "reward": acc["reward"] + jnp.where(transition.mask, transition.reward, 0),
        "noise": acc["noise"] + jnp.where(transition.mask, transition.extras["two"], 0),
    }


def nothing():
    zeros = jnp.zeros(4)
    return {"steps": jnp.int32(0), "reward": zeros, "noise": zeros}


def test_folds_are_those_of_the_kernel():
    for num_steps in (3, 64, 150):
        pairs = [
            x.fold_steps(x.init(KEY), None, count_rows, nothing(), num_steps=num_steps)
            for x in (on_host(), in_jax())
        ]
        carries, accs = zip(*pairs, strict=True)
        assert_same(*accs)
        assert_same_carry(*carries)
    folds = [
        x.fold_episodes(
            x.init(KEY), None, count_rows, nothing(), num_episodes=40, max_steps=6
        )
        for x in (on_host(), in_jax())
    ]
    assert_same(folds[0][1:], folds[1][1:])


def lane_of(trajectory, mask, lane):
    """The first rows of a lane that are not masked out."""
    return jax.tree.map(lambda x: x[mask[:, lane], lane][:40], trajectory)


def test_environment_that_resets_itself_gives_masked_out_rows():
    """Its rows, without masked-out ones, are those of one that resets on request."""
    collectors = on_host(2), on_host(2, resets_itself=True)
    rows = []
    for collector in collectors:
        _, t = collector.collect_steps(collector.init(KEY), None, 60)
        mask = np.asarray(t.mask)
        assert all(not np.any(x[~mask]) for x in jax.tree.leaves(jax.device_get(t)))
        t = t.replace(extras={"count": t.extras["count"]}, action=(), info=())
        rows.append([lane_of(t, mask, lane) for lane in (0, 1)])
        if collector is collectors[1]:
            over = np.asarray(t.done)[:-1]
            np.testing.assert_array_equal(~mask[1:], over)
    assert_same(rows[1], rows[0])


@pytest.mark.slow
def test_policy_that_draws_per_episode_gets_the_kernels_keys():
    def apply(params, obs, state, key):
        drawn = jax.vmap(jax.random.uniform)(state.value)
        action = jnp.zeros(len(obs), jnp.int32)
        return rollout.PolicyStep(action, state, {"drawn": drawn})

    policy = rollout.Policy(init=lambda num_envs: rollout.EpisodeKey(), apply=apply)
    env = envs.vectorize(SeedCount(), 4, auto_reset="select")
    kernel = rollout.Collector(env=env, policy=policy)
    host = HostCollector(env=HostCount(4), policy=policy)
    with jax.debug_key_reuse(False):
        rows = [x.collect_steps(x.init(KEY), None, 20)[1] for x in (host, kernel)]
        assert_same(*rows)
        episodes = [
            x.collect_padded_episodes(x.init(KEY), None, 5, max_length=5)[1:]
            for x in (host, kernel)
        ]
        assert_same(*episodes)


def test_only_the_last_carry_is_taken():
    collector = on_host()
    first = collector.init(KEY)
    second, _ = collector.step(first, None)
    with pytest.raises(ValueError, match="`carry` must be the one that the last call"):
        collector.step(first, None)
    collector.step(second, None)
    other = on_host()
    with pytest.raises(ValueError, match="`carry` must be the one that the last call"):
        other.step(collector.init(KEY), None)


def test_carry_is_rejected_once_another_collector_has_stepped_the_environments():
    env = HostCount(4)
    training, testing = (HostCollector(env=env, policy=POLICY) for _ in range(2))
    carry, _ = training.step(training.init(KEY), None)
    rollout.evaluate(testing, KEY, None, 3, max_steps=6)
    with pytest.raises(ValueError, match="another one has stepped it since"):
        training.step(carry, None)
    carry, _ = training.step(training.init(KEY), None)
    training.step(carry, None)


def test_rows_of_a_call_that_was_cut_short_outlive_another_collector():
    env = HostCount(4)
    training, testing = (HostCollector(env=env, policy=POLICY) for _ in range(2))
    carry = training.init(KEY)
    with pytest.raises(ZeroDivisionError):
        training.fold_steps(carry, None, lambda acc, row: 1 // 0, 0, num_steps=5)
    rollout.evaluate(testing, KEY, None, 3, max_steps=6)
    carry, rows = training.recover()
    assert rows.mask.sum() == 20
    _, rows = training.step(carry, None)
    assert rows.first.all()  # their episodes are gone


def test_wrong_arguments_are_rejected():
    env = envs.make_vec("CartPole-v1", 2)
    with pytest.raises(ValueError, match="`env` must be a `HostVectorEnv`"):
        HostCollector(env=env, policy=POLICY)
    with pytest.raises(ValueError, match="`on_fault` must be"):
        HostCollector(env=HostCount(2), policy=POLICY, on_fault="drop")
    collector = on_host()
    carry = collector.init(KEY)
    with pytest.raises(ValueError, match="called outside of `jit`"):
        jax.jit(lambda p: collector.step(carry, p)[1].reward)(1.0)
    with pytest.raises(ValueError, match="`num_steps` must be"):
        collector.collect_steps(carry, None, 0)
    with pytest.raises(ValueError, match="`max_steps` must be"):
        collector.collect_episodes(carry, None, 3, max_steps=0)
    collector.step(carry, None)  # nothing has used it up
    with pytest.raises(ValueError, match="made and called outside of `jit`"):
        jax.jit(lambda x: on_host().num_envs + x)(1.0)
    with pytest.raises(ValueError, match="made and called outside of `jit`"):
        jax.jit(lambda x: x + collector.init(KEY).step)(1.0)  # nothing is traced


def test_collector_with_a_change_is_a_new_one():
    total = rollout.Accumulator(jnp.zeros, lambda total, t: total + t.reward)
    host = rollout.HostCollector(
        env=HostCount(4),
        policy=rollout.random_policy(HostCount.action_space),
        accumulators={"total": total},
        max_restarts=3,
    )
    _, before = host.collect_steps(host.init(KEY), None, 20)
    other = host.replace(env=HostCount(4), record_fn=lambda t: t.replace(next_obs=()))
    assert (other.policy, other.max_restarts) == (host.policy, 3)
    _, after = other.collect_steps(other.init(KEY), None, 20)
    assert_same(after, before.replace(next_obs=()))
    with pytest.raises(TypeError, match="'envs'"):
        host.replace(envs=HostCount(4))
    with pytest.raises(ValueError, match="`max_restarts` must be"):
        host.replace(max_restarts=-1)


def test_change_without_other_environments_takes_them_over():
    host = on_host()
    carry, _ = host.collect_steps(host.init(KEY), None, 3)
    other = host.replace(record_fn=lambda t: t.replace(next_obs=()))
    carry, _ = host.collect_steps(carry, None, 3)  # they still are the first one's
    other.init(KEY)
    with pytest.raises(ValueError, match="`carry` must be"):
        host.collect_steps(carry, None, 3)

"""Tests of invariants of the collector: split calls, lanes, resets and `jit`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import NUM_STEPS, CountEnv, collect, make_collector, on_a_gpu, raw
from flax import struct

import rollout
from rollout import envs

slow = pytest.mark.slow
# Both environments terminate and truncate.
each_env = pytest.mark.parametrize(
    "name", ["count", pytest.param("CartPole-v1", marks=slow)]
)
PHILOX = {"impl": "philox2x32"}


def test_env_and_policy_are_positional():
    collector = make_collector("count")
    assert rollout.Collector(collector.env, collector.policy) == collector


@each_env
def test_split_calls_have_the_bits_of_one_call(name):
    collector = make_collector(name)
    half = NUM_STEPS // 2
    carry = collector.init(jax.random.key(7))
    carry, first = collector.collect_steps(carry, None, half)
    carry, second = collector.collect_steps(carry, None, half)
    halves = jax.tree.map(lambda x, y: np.concatenate([x, y]), raw(first), raw(second))
    chex.assert_trees_all_equal((raw(carry), halves), raw(collect(name)))


def test_collect_steps_ends_episodes_at_the_limit_and_at_the_end_of_the_call():
    collector = make_collector("count")
    carry = collector.init(jax.random.key(7))
    carry, rows = collector.collect_steps(
        carry, None, 5, max_episode_steps=3, at_batch_end="truncate"
    )
    assert rows.done[-1].all()
    assert rows.episode_length.max() == 3
    np.testing.assert_array_equal(carry.episode.episode_length, 0)
    carry, _ = collector.collect_steps(carry, None, 1)
    _, rows = collector.collect_steps(carry, None, 1, at_batch_end="reset")
    assert rows.first.all()


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({}, {}),
        ({"min_length": 3, "max_length": 3}, {}),  # all lanes end together
        pytest.param({}, PHILOX, marks=slow),
    ],
)
def test_compact_reset_has_the_bits_of_select(params, options):
    results = []
    for auto_reset in ("compact", "select"):
        env = envs.vectorize(CountEnv(**params), 16, auto_reset=auto_reset)
        collector = make_collector("count").replace(env=env)  # with compiled programs
        carry = collector.init(jax.random.key(7, **options))
        results.append(raw(collector.collect_steps(carry, None, NUM_STEPS)))
    chex.assert_trees_all_equal(*results)
    all_done = np.asarray(results[0][1].done).all(axis=1)
    assert all_done[2] == bool(params)


@pytest.mark.parametrize(
    ("num_envs", "options"),
    [
        (48, {}),  # several lanes reset in the same step
        pytest.param(1, PHILOX, marks=slow),
    ],
)
def test_lane_does_not_depend_on_the_number_of_lanes(num_envs, options):
    want, got = (
        jax.tree.map(lambda x: np.asarray(x)[:, : min(num_envs, 16)], trajectory)
        for _, trajectory in (collect("count", n, **options) for n in (16, num_envs))
    )
    chex.assert_trees_all_equal(got.replace(episode_id=()), want.replace(episode_id=()))


def test_carry_keeps_structure_shapes_and_dtypes():
    carry, _ = collect("count")
    fresh = make_collector("count").init(jax.random.key(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(carry, fresh)
    assert jax.tree.structure(carry) == jax.tree.structure(fresh)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(raw((carry, fresh))))


@pytest.mark.compiles(200)  # without jit each operation is a program
def test_steps_are_equal_without_jit():
    want = _, rows = raw(jax.device_get(collect("count", 4, num_steps=2)))
    collector = make_collector("count", 4)
    with jax.disable_jit():
        start = collector.init(jax.random.key(7))
        got = raw(collector.collect_steps(start, None, 2))
        _, transition = collector.step(start, None)
    chex.assert_trees_all_equal(got, want)
    first = jax.tree.map(lambda x: x[0], rows)
    chex.assert_trees_all_equal(raw(transition), first)


def test_outer_jit_has_the_same_bits():
    @jax.jit
    def run(collector, key):
        return collector.collect_steps(collector.init(key), None, NUM_STEPS)

    got = run(make_collector("CartPole-v1"), jax.random.key(7))
    chex.assert_trees_all_equal(raw(got), raw(collect("CartPole-v1")))


@slow  # operation by operation
def test_episodes_are_equal_without_jit():
    collector = make_collector("count", 4)

    def sum_rewards(total, transition):
        return total + jnp.where(transition.mask, transition.reward, 0)

    def run():
        carry = collector.init(jax.random.key(7))
        counts = {"num_episodes": 5, "max_episode_steps": 4}
        collected = collector.collect_episodes(carry, None, **counts)
        zero = np.zeros(4, np.float32)
        folded = collector.fold_episodes(carry, None, sum_rewards, zero, **counts)
        return raw((collected, folded))

    want = run()
    with jax.disable_jit():
        got = run()
    chex.assert_trees_all_equal(got, want)
    (_, episodes), (_, rewards, folded) = got
    assert 0 < np.sum(episodes.finished) < 5  # some episodes reach the limit
    chex.assert_trees_all_equal(folded, episodes)
    assert rewards.sum() == episodes.episode_return.sum()


def test_new_params_do_not_retrace():
    traces = []

    def act(params, obs, key):
        traces.append(1)
        action = jnp.full(obs.shape[0], params["action"], jnp.int32)
        return action, {"value": obs[:, 0] * 2.0}

    policy = rollout.stateless_policy(act)
    # The carry is valid for every policy without a state.
    random_collector = make_collector("count", 16)
    carry = random_collector.init(jax.random.key(0))
    collector = random_collector.replace(policy=policy)
    for action in (2, 0, 1):
        params = {"action": np.int32(action)}
        carry, trajectory = collector.collect_steps(carry, params, 6)
        assert (np.asarray(trajectory.action) == action).all()
        value, obs = trajectory.extras["value"], np.asarray(trajectory.obs)
        np.testing.assert_array_equal(value, obs[..., 0] * 2.0)
    assert len(traces) == 1


def test_environment_classes_have_different_structures():
    @struct.dataclass(kw_only=True)
    class TwinEnv(CountEnv):
        pass

    collector = make_collector("count")
    twin_env = envs.vectorize(TwinEnv(), collector.env.num_envs)
    twin_collector = collector.replace(env=twin_env)
    # The structure is the cache key of `jit`.
    assert jax.tree.structure(collector) != jax.tree.structure(twin_collector)


def test_replaced_env_changes_the_structure():
    old, new = make_collector("count"), make_collector("CartPole-v1")
    policy = old.policy
    replaced = old.replace(env=new.env)
    rebuilt = rollout.Collector(env=new.env, policy=policy)
    assert jax.tree.structure(replaced) == jax.tree.structure(rebuilt)
    chex.assert_trees_all_equal_structs(jax.tree.map(jnp.asarray, rebuilt), rebuilt)


def test_fold_steps_equals_collect_steps():
    collector = make_collector("count")

    def total(acc, transition):
        return acc[0] + transition.reward.sum(), transition.episode_return

    carry = collector.init(jax.random.key(7))
    acc = (np.zeros((), np.float32), np.zeros(16, np.float32))
    carry, acc = collector.fold_steps(carry, None, total, acc, num_steps=NUM_STEPS)
    acc = jax.tree.map(np.asarray, acc)
    want_carry, want = collect("count")
    chex.assert_trees_all_equal(raw(carry), raw(want_carry))
    # Sums of small integers are exact in float32.
    assert acc[0] == np.asarray(want.reward).sum()
    np.testing.assert_array_equal(acc[1], want.episode_return[-1])


def test_unread_fields_are_not_stored():
    env = envs.TransformObs(CountEnv(), lambda obs: jnp.broadcast_to(obs, (400,)))
    collector = make_collector("count").replace(env=envs.vectorize(env, 16))
    carry = jax.eval_shape(collector.init, jax.random.key(0))

    def memory(field):
        def run(carry):
            _, trajectory = collector.collect_steps(carry, None, 100)
            return getattr(trajectory, field)

        return jax.jit(run).lower(carry).compile().memory_analysis()

    # One observation of 16 lanes is 26 kB; 100 of them are 2.56 MB.
    assert memory("reward").temp_size_in_bytes < 500_000
    obs_memory = memory("obs")
    assert obs_memory.output_size_in_bytes <= 1.02 * 2_560_000
    assert obs_memory.temp_size_in_bytes < 500_000


def test_fold_fn_may_be_a_method_of_a_module():
    """A module of NNX is the same object in every trace, with different tracers."""

    class Module:
        def fold(self, acc, transition):
            return acc + (self.scale * transition.reward).sum()

    collector, module = make_collector("count", 4), Module()

    @jax.jit
    def train(carry, scale, shape):
        del shape  # a new shape causes a new trace
        module.scale = scale
        acc = jnp.float32(0)
        return collector.fold_steps(carry, None, module.fold, acc, num_steps=3)[1]

    @jax.jit
    def run(key):
        carry = collector.init(key)
        reward = collector.collect_steps(carry, None, 3)[1].reward.sum()
        return reward, [train(carry, jnp.float32(n), jnp.zeros(n)) for n in (2, 5)]

    reward, sums = jax.device_get(run(jax.random.key(0)))
    assert sums == pytest.approx([2 * reward, 5 * reward])


def collect_with(method):
    collector = make_collector("count", 5, "select")
    carry = collector.init(jax.random.key(3))
    if method == "steps":
        return raw(collector.collect_steps(carry, None, 9))
    if method == "padded":
        return raw(
            collector.collect_episodes(
                carry, None, 7, max_episode_steps=11, return_trajectory=True
            )
        )
    count = lambda acc, row: acc + 1  # noqa: E731  (also masked rows)
    args = carry, None, count, 0
    return raw(collector.fold_episodes(*args, num_episodes=7, max_episode_steps=11))


@pytest.mark.slow  # clears compiled programs
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("method", ["steps", "padded", "fold"])
def test_gpu_branches_have_the_same_bits(method):
    expected = collect_with(method)
    jax.clear_caches()
    with on_a_gpu():
        got = collect_with(method)
    jax.clear_caches()
    chex.assert_trees_all_equal(got, expected)

"""The invariants of `collect_steps`, most of them on two environments."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import NUM_STEPS, CountEnv, collect, make_collector, raw
from flax import struct

import rollout
from rollout import envs

slow = pytest.mark.slow
# Both terminate and truncate.
each_env = pytest.mark.parametrize(
    "name", ["count", pytest.param("CartPole-v1", marks=slow)]
)
PHILOX = {"impl": "philox2x32"}


def test_environments_and_policy_may_be_given_by_position():
    collector = make_collector("count")
    assert rollout.Collector(collector.env, collector.policy) == collector


@each_env
def test_two_halves_equal_the_whole_bit_for_bit(name):
    collector = make_collector(name)
    half = NUM_STEPS // 2
    carry = collector.init(jax.random.key(7))
    carry, first = collector.collect_steps(carry, None, half)
    carry, second = collector.collect_steps(carry, None, half)
    halves = jax.tree.map(lambda x, y: np.concatenate([x, y]), raw(first), raw(second))
    chex.assert_trees_all_equal((raw(carry), halves), raw(collect(name)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("count", {}),
        pytest.param("CartPole-v1", {}, marks=slow),
        pytest.param("count", PHILOX, marks=slow),
    ],
)
def test_compact_reset_equals_select_bit_for_bit(name, options):
    compact, select = (collect(name, 16, x, **options) for x in ("compact", "select"))
    chex.assert_trees_all_equal(raw(compact), raw(select))


def test_compact_reset_equals_select_when_all_lanes_end_together():
    results = []
    for auto_reset in ("compact", "select"):
        env = envs.vectorize(
            CountEnv(min_length=3, max_length=3), 16, auto_reset=auto_reset
        )
        collector = make_collector("count").replace(env=env)  # with compiled programs
        carry = collector.init(jax.random.key(0))
        results.append(raw(collector.collect_steps(carry, None, NUM_STEPS)))
    chex.assert_trees_all_equal(*results)
    every = np.asarray(results[0][1].done).all(axis=1)
    np.testing.assert_array_equal(every, np.arange(1, NUM_STEPS + 1) % 3 == 0)


@pytest.mark.parametrize(
    ("name", "num_envs", "options"),
    [
        ("count", 48, {}),  # enough lanes that several are reset at once
        pytest.param("CartPole-v1", 1024, {}, marks=slow),
        pytest.param("count", 1, PHILOX, marks=slow),
    ],
)
def test_lane_gives_the_same_stream_among_any_number(name, num_envs, options):
    want, got = (
        jax.tree.map(lambda x: np.asarray(x)[:, : min(num_envs, 16)], trajectory)
        for _, trajectory in (collect(name, n, **options) for n in (16, num_envs))
    )
    chex.assert_trees_all_equal(got.replace(episode_id=()), want.replace(episode_id=()))


def test_carry_keeps_structure_shapes_and_dtypes():
    carry, _ = collect("count")
    fresh = make_collector("count").init(jax.random.key(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(carry, fresh)
    assert jax.tree.structure(carry) == jax.tree.structure(fresh)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(raw((carry, fresh))))


@pytest.mark.compiles(200)  # without jit each operation is a program
@each_env
def test_steps_without_jit_equal_those_under_jit(name):
    want = carry, rows = raw(jax.device_get(collect(name, 4, num_steps=3)))
    collector = make_collector(name, 4)
    with jax.disable_jit():
        start = collector.init(jax.random.key(7))
        got = raw(collector.collect_steps(start, None, 3))
        _, transition = collector.step(start, None)
    first = jax.tree.map(lambda x: x[0], rows)
    for one, other in ((got, want), (raw(transition), first)):
        if name == "count":
            chex.assert_trees_all_equal(one, other)
        # Operation by operation XLA cannot contract a multiply and an add into one
        # rounding as it does in a fused step: a few units in the last place.
        chex.assert_trees_all_close(one, other, rtol=1e-5, atol=1e-6)
    for field in ("action", "terminated", "truncated", "episode_id", "episode_length"):
        np.testing.assert_array_equal(getattr(got[1], field), getattr(rows, field))
    np.testing.assert_array_equal(got[0].key, carry.key)


@slow  # operation by operation
def test_episodes_without_jit_equal_those_under_jit():
    collector = make_collector("count", 4)

    def sum_rewards(total, transition):
        return total + jnp.where(transition.mask, transition.reward, 0)

    def play():
        carry = collector.init(jax.random.key(7))
        counts = {"num_episodes": 5, "max_episode_steps": 4}
        played = collector.collect_episodes(carry, None, **counts)
        zero = np.zeros(4, np.float32)
        return raw(
            (played, collector.fold_episodes(carry, None, sum_rewards, zero, **counts))
        )

    want = play()
    with jax.disable_jit():
        got = play()
    chex.assert_trees_all_equal(got, want)
    (_, episodes), (_, rewards, folded) = got
    assert 0 < np.sum(episodes.finished) < 5  # the others are cut
    chex.assert_trees_all_equal(folded, episodes)
    assert rewards.sum() == episodes.episode_return.sum()


@pytest.mark.parametrize("is_argument", [False, pytest.param(True, marks=slow)])
def test_outer_jit_gives_the_same_bits(is_argument):
    collector = make_collector("CartPole-v1")

    def run(collector, key):
        return collector.collect_steps(collector.init(key), None, NUM_STEPS)

    inside = jax.jit(lambda key: run(collector, key))
    key = jax.random.key(7)
    got = jax.jit(run)(collector, key) if is_argument else inside(key)
    chex.assert_trees_all_equal(raw(got), raw(collect("CartPole-v1")))


def test_collect_steps_traces_once_and_params_reach_the_policy():
    traces = []

    def act(params, obs, key):
        traces.append(1)
        action = jnp.full(obs.shape[0], params["action"], jnp.int32)
        return action, {"value": obs[:, 0] * 2.0}

    policy = rollout.stateless_policy(act)
    # Its carry is the same whatever a policy without a state is.
    start = make_collector("count", 16)
    collector, carry = start.replace(policy=policy), start.init(jax.random.key(0))
    for action in (2, 0, 1):
        params = {"action": np.int32(action)}
        carry, trajectory = collector.collect_steps(carry, params, 6)
        assert (np.asarray(trajectory.action) == action).all()
        value, obs = trajectory.extras["value"], np.asarray(trajectory.obs)
        np.testing.assert_array_equal(value, obs[..., 0] * 2.0)
    assert len(traces) == 1


def test_making_an_environment_twice_does_not_trace_again():
    traces = []

    def act(params, obs, key):
        traces.append(1)
        return jnp.zeros(obs.shape[0], jnp.int32)

    def run(collector, key):
        return collector.collect_steps(collector.init(key), None, 3)

    policy = rollout.stateless_policy(act)
    for limit in (10, 20):
        env = envs.make_vec("CartPole-v1", 2, max_steps_in_episode=limit)
        collector = rollout.Collector(env=env, policy=policy)
        jax.eval_shape(run, collector, jax.random.key(0))  # traces, no compiling
    assert len(traces) == 1


def test_environments_that_differ_by_class_alone_share_no_program():
    @struct.dataclass(kw_only=True)
    class TwinEnv(CountEnv):
        pass

    one = make_collector("count")
    other = one.replace(env=envs.vectorize(TwinEnv(), one.env.num_envs))
    # `jit` looks its programs up by this structure.
    assert jax.tree.structure(one) != jax.tree.structure(other)


def test_collector_that_is_rebuilt_has_the_structure_of_its_new_environment():
    old, new = make_collector("count"), make_collector("CartPole-v1")
    policy = old.policy
    replaced = old.replace(env=new.env)
    made = rollout.Collector(env=new.env, policy=policy)
    assert jax.tree.structure(replaced) == jax.tree.structure(made)
    chex.assert_trees_all_equal_structs(jax.tree.map(jnp.asarray, made), made)


def test_fold_steps_sees_the_transitions_of_collect_steps():
    collector = make_collector("count")

    def total(acc, transition):
        return acc[0] + transition.reward.sum(), transition.episode_return

    carry = collector.init(jax.random.key(7))
    acc = (np.zeros((), np.float32), np.zeros(16, np.float32))
    carry, acc = collector.fold_steps(carry, None, total, acc, num_steps=NUM_STEPS)
    acc = jax.tree.map(np.asarray, acc)
    want_carry, want = collect("count")
    chex.assert_trees_all_equal(raw(carry), raw(want_carry))
    # Sums of small integers: exact in float32.
    assert acc[0] == np.asarray(want.reward).sum()
    np.testing.assert_array_equal(acc[1], want.episode_return[-1])


@slow
def test_collector_vmaps_over_environment_parameters():
    def last_length(limit):
        env = envs.vectorize(CountEnv(limit=limit), 3)
        collector = make_collector("count", 3).replace(env=env)
        start = collector.init(jax.random.key(0))
        return collector.collect_steps(start, None, 30)[1].episode_length.max()

    lengths = jax.vmap(last_length)(jnp.array([2, 4, 6]))
    np.testing.assert_array_equal(lengths, [2, 4, 6])


def test_unread_fields_leave_no_buffer():
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
    one = memory("obs")
    assert one.output_size_in_bytes <= 1.02 * 2_560_000
    assert one.temp_size_in_bytes < 500_000


@slow
def test_peak_memory_is_what_is_returned():
    collector = make_collector("Breakout-MinAtar", 256)
    carry = jax.eval_shape(collector.init, jax.random.key(0))

    def run(carry):
        return collector.collect_steps(carry, None, 256)

    memory = jax.jit(run).lower(carry).compile().memory_analysis()
    returned = memory.output_size_in_bytes
    assert returned + memory.temp_size_in_bytes <= 1.1 * returned


def test_fold_may_be_a_method_of_an_object_that_holds_tracers():
    """Such as a module of NNX: it is the same in every trace, its arrays are not."""

    class Module:
        def fold(self, acc, transition):
            return acc + (self.scale * transition.reward).sum()

    collector, module = make_collector("count", 4), Module()

    @jax.jit
    def train(carry, scale, shape):
        del shape  # another one is another trace
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

"""The invariants of `collect_steps`, each on two to four environments."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ENVS, NUM_STEPS, CountEnv, collect, make_collector, raw
from flax import struct

import rollout
from rollout import envs

slow = pytest.mark.slow
FAST = ("count", "CartPole-v1")
each_env = pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=slow) for name in ENVS],
)
# For tests that compile a program of their own; both terminate and truncate, as
# "count" does.
SLOW = ("CartPole-v1", "Breakout-MinAtar")
each_env_again = pytest.mark.parametrize(
    "name", ["count", *(pytest.param(name, marks=slow) for name in SLOW)]
)


def rows(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


@each_env
def test_case_has_endings_of_the_kinds_it_can_have(name):
    _, trajectory = collect(name)
    assert trajectory.truncated.any()
    assert trajectory.terminated.any() == (name != "Pendulum-v1")
    if name == "count":
        assert (trajectory.truncated & trajectory.terminated).any()


@each_env
def test_next_obs_is_the_next_row_within_an_episode(name):
    _, trajectory = collect(name)
    within = ~np.asarray(trajectory.done[:-1])
    np.testing.assert_array_equal(
        np.asarray(trajectory.next_obs[:-1])[within],
        np.asarray(trajectory.obs[1:])[within],
    )


@each_env
def test_next_row_after_an_ending_is_a_fresh_reset(name):
    _, trajectory = collect(name)
    ended = np.asarray(trajectory.done[:-1])
    after = np.asarray(trajectory.obs[1:])[ended]
    final = np.asarray(trajectory.next_obs[:-1])[ended]
    assert (after != final).reshape(len(after), -1).any(axis=1).all()
    assert (np.asarray(trajectory.episode_length[1:])[ended] == 1).all()
    assert np.asarray(trajectory.first[1:])[ended].all()
    assert not np.asarray(trajectory.first[1:])[~ended].any()


def test_every_value_of_the_counting_env_is_as_known():
    _, trajectory = collect("count")
    n = np.asarray(trajectory.episode_length)
    lengths = np.asarray(trajectory.episode_length)[np.asarray(trajectory.done)]
    np.testing.assert_array_equal(trajectory.obs[..., 0], n - 1)
    np.testing.assert_array_equal(trajectory.next_obs[..., 0], n)
    np.testing.assert_array_equal(trajectory.reward, n)
    np.testing.assert_array_equal(trajectory.episode_return, n * (n + 1) / 2)
    np.testing.assert_array_equal(trajectory.truncated, n == 7)
    np.testing.assert_array_equal(trajectory.info["action"], trajectory.action)
    assert trajectory.mask.all()
    assert set(lengths) == {2, 3, 4, 5, 6, 7}


@each_env
def test_episode_ids_are_never_reused_and_stay_through_an_episode(name):
    _, trajectory = collect(name)
    episode_id = np.asarray(trajectory.episode_id)
    changed = episode_id[1:] != episode_id[:-1]
    np.testing.assert_array_equal(changed, np.asarray(trajectory.done[:-1]))
    starts = episode_id[np.asarray(trajectory.first)]
    assert len(np.unique(starts)) == len(starts)


@each_env_again
def test_two_halves_equal_the_whole_bit_for_bit(name):
    collector = make_collector(name)
    half = NUM_STEPS // 2
    carry = collector.init(jax.random.key(7))
    carry, first = collector.collect_steps(carry, None, half)
    carry, second = collector.collect_steps(carry, None, half)
    halves = jax.tree.map(lambda x, y: np.concatenate([x, y]), raw(first), raw(second))
    chex.assert_trees_all_equal((raw(carry), halves), raw(collect(name)))


@each_env_again
def test_compact_reset_equals_select_bit_for_bit(name):
    chex.assert_trees_all_equal(raw(collect(name)), raw(collect(name, 16, "select")))


def test_compact_reset_equals_select_when_all_lanes_end_together():
    results = []
    for auto_reset in ("compact", "select"):
        collector = make_collector("count", 16, auto_reset)
        env = CountEnv(min_length=3, max_length=3)
        vector_env = envs.vectorize(env, 16, auto_reset=auto_reset)
        collector = collector.replace(env=vector_env)  # its programs are compiled
        carry = collector.init(jax.random.key(0))
        results.append(raw(collector.collect_steps(carry, None, NUM_STEPS)))
    chex.assert_trees_all_equal(*results)
    done = np.asarray(results[0][1].done)
    np.testing.assert_array_equal(
        done.all(axis=1), [(t + 1) % 3 == 0 for t in range(NUM_STEPS)]
    )


@pytest.mark.parametrize(
    ("name", "num_envs"),
    [
        ("count", 1024),
        pytest.param("CartPole-v1", 1024, marks=slow),
        pytest.param("count", 1, marks=slow),
    ],
)
def test_lane_gives_the_same_stream_among_any_number(name, num_envs):
    few = min(num_envs, 16)
    kept = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
    want, got = (
        {field: np.asarray(getattr(trajectory, field))[:, :few] for field in kept}
        for _, trajectory in (collect(name), collect(name, num_envs))
    )
    chex.assert_trees_all_equal(got, want)


@each_env
def test_carry_keeps_structure_shapes_and_dtypes(name):
    carry, _ = collect(name)
    fresh = make_collector(name).init(jax.random.key(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(carry, fresh)
    assert jax.tree.structure(carry) == jax.tree.structure(fresh)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(raw((carry, fresh))))


@each_env_again
def test_step_without_jit_agrees_with_the_scan(name):
    collector = make_collector(name)
    carry = collector.init(jax.random.key(7))
    carry, transition = collector.step(carry, None)
    want = rows(collect(name)[1], 0)
    # Operation by operation XLA cannot contract a multiply and an add into one
    # rounding as it does in a fused step: a few units in the last place.
    chex.assert_trees_all_close(raw(transition), raw(want), rtol=1e-5, atol=1e-6)
    exact = ("action", "terminated", "truncated", "episode_id", "episode_length")
    for field in exact:
        np.testing.assert_array_equal(getattr(transition, field), getattr(want, field))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("CartPole-v1", "closed over"),
        pytest.param("CartPole-v1", "argument", marks=slow),
    ],
)
def test_outer_jit_gives_the_same_bits(name, how):
    collector = make_collector(name)

    def run(collector, key):
        return collector.collect_steps(collector.init(key), None, NUM_STEPS)

    if how == "argument":
        got = jax.jit(run)(collector, jax.random.key(7))
    else:
        got = jax.jit(lambda key: run(collector, key))(jax.random.key(7))
    chex.assert_trees_all_equal(raw(got), raw(collect(name)))


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
        env = envs.vectorize(CountEnv(limit=limit), 3, auto_reset="select")
        policy = rollout.random_policy(env.action_space)
        collector = rollout.Collector(env=env, policy=policy)
        _, trajectory = collector.collect_steps(
            collector.init(jax.random.key(0)), None, 30
        )
        return trajectory.episode_length.max()

    lengths = jax.vmap(last_length)(jnp.array([2, 4, 6]))
    np.testing.assert_array_equal(lengths, [2, 4, 6])


def test_unread_fields_leave_no_buffer():
    def spread(obs):
        return jnp.broadcast_to(obs, (400,))

    env = envs.vectorize(envs.TransformObs(CountEnv(), spread), 16)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry = jax.eval_shape(collector.init, jax.random.key(0))

    def memory(select):
        def run(carry):
            carry, trajectory = collector.collect_steps(carry, None, 100)
            return select(trajectory)

        return jax.jit(run).lower(carry).compile().memory_analysis()

    rewards = memory(lambda trajectory: trajectory.reward)
    # One observation of 16 lanes is 25 kB; 100 of them would be 2.5 MB.
    assert rewards.temp_size_in_bytes < 500_000
    both = memory(lambda trajectory: (trajectory.obs, trajectory.next_obs))
    one = memory(lambda trajectory: trajectory.obs)
    assert one.output_size_in_bytes <= 0.51 * both.output_size_in_bytes
    assert one.temp_size_in_bytes < 500_000


@pytest.mark.parametrize(
    "name", ["CartPole-v1", pytest.param("Breakout-MinAtar", marks=slow)]
)
def test_peak_memory_is_what_is_returned(name):
    collector = make_collector(name, 256)
    carry = jax.eval_shape(collector.init, jax.random.key(0))

    def run(carry):
        return collector.collect_steps(carry, None, 256)

    memory = jax.jit(run).lower(carry).compile().memory_analysis()
    returned = memory.output_size_in_bytes
    assert returned + memory.temp_size_in_bytes <= 1.1 * returned


@slow
def test_philox_keys_keep_compact_equal_to_select():
    whole = collect("count", impl="philox2x32")
    select = collect("count", 16, "select", impl="philox2x32")
    chex.assert_trees_all_equal(raw(whole), raw(select))
    assert np.any(np.asarray(whole[1].action) != collect("count")[1].action)


@slow
def test_philox_keys_keep_a_lane_apart_from_the_number_of_lanes():
    alone = collect("count", 1, impl="philox2x32")[1]
    among = collect("count", impl="philox2x32")[1]
    for field in ("obs", "action", "terminated"):
        got, want = getattr(alone, field)[:, 0], getattr(among, field)[:, 0]
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(alone.info["noise"][:, 0], among.info["noise"][:, 0])


def test_other_seed_gives_other_data():
    collector = make_collector("count")
    _, other = collector.collect_steps(
        collector.init(jax.random.key(8)), None, NUM_STEPS
    )
    _, trajectory = collect("count")
    assert (other.action != trajectory.action).any()
    assert (other.info["noise"] != trajectory.info["noise"]).mean() > 0.99


@pytest.mark.parametrize("num_steps", [0, -3, 2.0, True])
def test_bad_num_steps_is_refused(num_steps):
    collector = make_collector("count")
    carry, _ = collect("count")
    message = "`num_steps` must be an int of at least 1, got"
    with pytest.raises(ValueError, match=message):
        collector.collect_steps(carry, None, num_steps)
    with pytest.raises(ValueError, match=message):
        collector.fold_steps(carry, None, lambda a, t: a, 0, num_steps=num_steps)


def test_fold_may_be_a_method_of_an_object_that_holds_tracers():
    """Such as a module of NNX: it is the same in every trace, its arrays are not."""

    class Module:
        def fold(self, acc, transition):
            return acc + (self.scale * transition.reward).sum()

    collector, module = make_collector("count", 4), Module()
    carry = collector.init(jax.random.key(0))
    reward = collector.collect_steps(carry, None, 3)[1].reward.sum()

    @jax.jit
    def train(scale, shape):
        del shape  # another one is another trace
        module.scale = scale
        acc = jnp.float32(0)
        return collector.fold_steps(carry, None, module.fold, acc, num_steps=3)[1]

    for number in (2, 5):
        got = train(jnp.float32(number), jnp.zeros(number))
        assert got == pytest.approx(number * reward)

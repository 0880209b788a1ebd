"""`HostCollector` compared with `Collector`, and its carries, actions and rewards."""

import functools

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PlainPolicy, quick_jit
from host_count import (
    CALLS,
    KEY,
    POLICY,
    HostCount,
    SeedCount,
    assert_same,
    assert_same_carry,
    in_jax,
    on_host,
)
from space_envs import SampledVectorEnv

import rollout
from rollout import envs
from rollout.host import HostCollector

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("name", CALLS)
def test_call_equals_the_kernel(name):
    kernel, host = in_jax(), on_host()
    run = quick_jit(lambda carry: CALLS[name](kernel, carry))
    kernel_carry, carry = kernel.init(KEY), host.init(KEY)
    assert_same_carry(carry, kernel_carry)
    for _ in range(2):  # the second call continues from the first
        kernel_carry, *expected = run(kernel_carry)
        carry, *results = CALLS[name](host, carry)
        assert_same_carry(carry, kernel_carry)
        assert_same(results, expected)


def test_only_policy_state_of_a_carry_may_be_replaced():
    def collect(collector):
        carry, _ = collector.collect_steps(collector.init(KEY), None, 5)
        carry = carry.replace(policy_state=carry.policy_state + 100)
        return collector.collect_steps(carry, None, 9)

    host = on_host()
    (carry, rows), (kernel_carry, expected) = collect(host), collect(in_jax())
    assert_same(rows, expected)
    assert_same_carry(carry, kernel_carry)
    assert rows.extras["count"].max() >= 100
    changes = {"obs": carry.obs + 1, "step": 3, "key": jax.random.key(9)}
    changes["episode"] = carry.episode.replace(episode_length=np.zeros(4, np.int32))
    for name, value in changes.items():
        with pytest.raises(ValueError, match=rf"`carry.{name}` must .*`policy_state`"):
            host.collect_steps(carry.replace(**{name: value}), None, 1)
    host.collect_steps(jax.device_get(carry), None, 1)  # a copy is valid


def test_short_calls_and_single_steps_equal_one_long_call():
    collector = on_host()
    _, expected = collector.collect_steps(collector.init(KEY), None, 20)
    expected, collector = jax.device_get(expected), on_host()
    carry, *parts = collector.collect_steps(collector.init(KEY), None, 13)
    for _ in range(7):
        carry, row = collector.step(carry, None)
        parts.append(jax.tree.map(lambda x: np.asarray(x)[None], row))
    rows = jax.tree.map(lambda *x: np.concatenate(x), *jax.device_get(parts))
    assert_same(rows, expected)
    assert expected.terminated.any()
    assert expected.truncated.any()


@pytest.mark.compiles(200)
def test_a_row_has_arrays_of_jax_without_jit():
    host = on_host().replace(accumulators={}, record_fn=None)
    with jax.disable_jit():
        _, row = host.step(host.init(KEY), None)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(row))


class UnknownDistance(gymnasium.Env):
    """An info is NaN, for example a distance that is unknown."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {"distance": np.nan}


@pytest.mark.parametrize("num_steps", [1, 2])
def test_infos_may_be_nan_with_debug_nans(num_steps):
    info = {"distance": np.float32(0)}
    env = envs.from_gymnasium(UnknownDistance, 2, record_info=info)
    collector = HostCollector(env, rollout.random_policy(env.action_space))
    with jax.debug_nans(True):
        carry = collector.init(KEY)
        _, rows = collector.collect_steps(carry, None, num_steps)
    assert np.isnan(rows.info["distance"]).all()


def test_automatic_resets_only_add_masked_out_rows():
    valid_rows = []
    for resets_itself in (False, True):
        collector = on_host(2, resets_itself=resets_itself)
        _, rows = collector.collect_steps(collector.init(KEY), None, 60)
        rows = jax.device_get(rows)
        assert all(not np.any(x[~rows.mask]) for x in jax.tree.leaves(rows))
        # The noise and the actions of the policy depend on the number of the row.
        rows = rows.replace(extras=rows.extras["count"], action=(), info=())
        lane_rows = [
            jax.tree.map(lambda x, i=i, m=rows.mask: x[m[:, i], i][:40], rows)
            for i in range(2)
        ]
        valid_rows.append(lane_rows)
    np.testing.assert_array_equal(~rows.mask[1:], rows.done[:-1])
    assert_same(valid_rows[1], valid_rows[0])


class NanAtReset(HostCount):
    """Returns NaN as the reward of steps that only reset an environment."""

    def step(self, action):
        result = super().step(action)
        return result._replace(reward=np.where(result.mask, result.reward, np.nan))


def test_reward_of_a_masked_out_row_is_ignored():
    host = HostCollector(env=NanAtReset(2, resets_itself=True), policy=POLICY)
    rows = host.collect_steps(host.init(KEY), None, 20)[1]
    assert not np.all(rows.mask)
    n = np.asarray(rows.episode_length)
    np.testing.assert_array_equal(rows.episode_return, n * (n + 1) / 2)


@pytest.mark.slow
def test_episode_keys_of_a_policy_equal_the_kernel():
    def apply(params, obs, state, key):
        noise = jax.vmap(jax.random.uniform)(state.value)
        action = jnp.zeros(len(obs), jnp.int32)
        return rollout.types.PolicyStep(action, state, {"noise": noise})

    policy = PlainPolicy(lambda num_envs: rollout.types.EpisodeKey(), apply)
    env = envs.vectorize(SeedCount(), 4, auto_reset="select")
    kernel = rollout.Collector(env=env, policy=policy)
    host = HostCollector(env=HostCount(4), policy=policy)
    options = {"max_episode_steps": 5, "return_trajectory": True}
    with jax.debug_key_reuse(False):
        rows = [x.collect_steps(x.init(KEY), None, 20) for x in (host, kernel)]
        episodes = [
            x.collect_episodes(carry, None, 5, **options)[1]
            for x, (carry, _) in zip((host, kernel), rows, strict=True)
        ]
        assert_same(*[x for _, x in rows])
        assert_same(*episodes)


def test_stale_carry_raises():
    def check_stale(collector, carry):
        with pytest.raises(ValueError, match=r"`carry` must .* latest call"):
            collector.step(carry, None)

    collector, separate_collector = on_host(), on_host()
    old_carry = collector.init(KEY)
    carry, _ = collector.step(old_carry, None)
    sharing_collector = collector.replace(record_fn=lambda t: t.replace(next_obs=()))
    # The carry remains valid until `init` of the collector that shares environments.
    carry, rows = collector.collect_steps(carry, None, 3)
    assert rows.next_obs.size > 0
    check_stale(collector, old_carry)
    check_stale(separate_collector, carry)
    new_carry = sharing_collector.init(KEY)
    _, rows = sharing_collector.collect_steps(new_carry, None, 4)
    check_stale(collector, carry)
    new_carry = separate_collector.init(KEY)
    _, expected = separate_collector.collect_steps(new_carry, None, 4)
    assert_same(rows.replace(extras=()), expected.replace(next_obs=(), extras=()))


def test_recover_returns_a_carry_that_began_no_call():
    collector, carry = on_host(), in_jax().init(KEY)
    collector.init(KEY)
    recovered_carry, rows = collector.recover(carry)
    assert recovered_carry is carry
    assert rows is None


def test_recover_keeps_rows_after_another_collector_steps():
    env = HostCount(4)
    training, testing = (HostCollector(env=env, policy=POLICY) for _ in range(2))
    carry = training.init(KEY)
    with pytest.raises(ZeroDivisionError):
        training.fold_steps(carry, None, lambda acc, row: 1 // 0, 0, num_steps=5)
    rollout.evaluate(testing, None, KEY, 3, max_episode_steps=6)
    carry, rows = training.recover()
    assert rows.mask.sum() == 20
    _, rows = training.step(carry, None)
    assert rows.first.all()  # all lanes begin new episodes


def test_stale_carry_keeps_its_observations():
    """The environments overwrite the memory of their observations."""
    host = on_host()
    carry, rows = host.collect_steps(host.init(KEY), None, 3)
    host.collect_steps(carry, None, 1)
    expected = np.where(rows.done[-1, :, None], 0, rows.next_obs[-1])
    np.testing.assert_array_equal(carry.obs, expected)


def test_episodes_of_a_lane_have_different_seeds():
    seeds = []

    class Recording(HostCount):
        def reset(self, values, mask):
            seeds.append(int(values[0]))
            return super().reset(values, mask)

    env = Recording(1, min_length=1, max_length=1)
    host = HostCollector(env=env, policy=POLICY)
    host.collect_steps(host.init(KEY), None, 300)
    assert len(seeds) == len(set(seeds)) == 301


def test_reset_at_a_batch_end_skips_lanes_at_the_start_of_an_episode():
    host = on_host(min_length=5, max_length=5)
    carry, _ = host.collect_steps(host.init(KEY), None, 5)
    _, rows = host.collect_steps(carry, None, 1, at_batch_end="reset")
    np.testing.assert_array_equal(rows.episode_id[0], 4 + np.arange(4))


def test_no_episode_starts_after_min_steps():
    host = on_host(2, min_length=5, max_length=5)
    carry, episodes = host.collect_episodes(host.init(KEY), None, 9, min_steps=10)
    assert np.sum(episodes.mask) == 2
    assert carry.step == 5


def test_compile_does_not_change_later_rows():
    rows = []
    for compiles in (False, True):
        host = on_host()
        carry, _ = host.collect_steps(host.init(KEY), None, 520)
        if compiles:
            host.compile(carry, None)
        rows.append(host.step(carry, None)[1])
    assert_same(*rows)


def test_time_limit_at_max_episode_steps_finishes_the_episode():
    host = on_host(min_length=9, max_length=9, limit=6)
    _, episodes = host.collect_episodes(host.init(KEY), None, 5, max_episode_steps=6)
    assert episodes.truncated.all()
    assert episodes.finished.all()


# Action space, function that computes actions from a flag, and message. The actions
# are valid if the flag is 0.
INVALID_ACTIONS = {
    "start": (
        gymnasium.spaces.Discrete(2, start=10),
        lambda is_invalid: jnp.int32([10, 11, 10]) - 10 * is_invalid,
        r"lane 0 `action` .*\[10, 11\], got 0.*`space.start`",
    ),
    "nan": (
        gymnasium.spaces.Box(-np.inf, np.inf, ()),
        lambda is_invalid: jnp.float32([0, jnp.where(is_invalid, jnp.nan, 1e30), 0]),
        r"lane 1 `action` .*finite, got nan",
    ),
    "component": (
        gymnasium.spaces.Dict(
            a=gymnasium.spaces.MultiDiscrete([2, 3]), b=gymnasium.spaces.Box(0, 1, ())
        ),
        lambda is_invalid: {
            "a": jnp.int32([[1, 2], [0, 0], [0, 2 + is_invalid]]),
            "b": jnp.float32([0, 1, 1]),
        },
        r"lane 2 `action\['a'\]\[1\]` .*\[0, 2\], got 3",
    ),
}


@pytest.mark.parametrize("name", INVALID_ACTIONS)
def test_invalid_action_raises_before_the_step(name):
    space, action_fn, message = INVALID_ACTIONS[name]

    def act(first_invalid, obs, step, key):
        return action_fn((step[0] >= first_invalid).astype(jnp.int32)), step + 1

    policy = rollout.recurrent_policy(act, lambda num_envs: jnp.zeros(num_envs, int))
    host = HostCollector(env=SampledVectorEnv(space), policy=policy)
    carry = host.init(KEY)
    with pytest.raises(ValueError, match=message):
        host.collect_steps(carry, np.int32(2), 3)
    carry, rows = host.recover()
    np.testing.assert_array_equal(rows.episode_length[:, 0], [1, 2])
    _, rows = host.collect_steps(carry, np.int32(9), 2)
    np.testing.assert_array_equal(rows.episode_length[:, 0], [3, 4])


def test_action_bounds_allow_rounding_errors():
    env = HostCount(3)
    env.action_space = envs.Box(-0.3, 0.7, ())
    action = np.nextafter(np.float32([-0.3, 0.7, 0.7]), np.float32([-1, 1, 0]))
    policy = rollout.stateless_policy(
        lambda scale, obs, key: jnp.asarray(action) * scale
    )
    host = HostCollector(env=env, policy=policy)
    carry, _ = host.collect_steps(host.init(KEY), np.float32(1), 2)
    with pytest.raises(ValueError, match=r"lane 0 `action` .*\[-0.3, 0.7\]"):
        host.collect_steps(carry, np.float32(1.00001), 1)


def normalizing_collectors():
    """Returns a `Collector` and a `HostCollector` with normalization."""
    env = envs.NormalizeReward(envs.NormalizeObs(in_jax().env), gamma=0.9)
    kernel = rollout.Collector(env=env, policy=POLICY)
    env = envs.NormalizeHostEnv(HostCount(4), gamma=0.9)
    return kernel, HostCollector(env=env, policy=POLICY)


def test_normalization_equals_the_kernel():
    collectors = normalizing_collectors()
    carries = [x.init(KEY) for x in collectors]
    for _ in range(2):
        pairs = zip(collectors, carries, strict=True)
        results = [x.collect_steps(carry, None, 20) for x, carry in pairs]
        carries = [carry for carry, _ in results]
        rows = [x.replace(info=()) for _, x in results]
        # The tolerance allows for another order of the sums over four lanes.
        chex.assert_trees_all_close(*rows, rtol=1e-4, atol=1e-5)
        chex.assert_trees_all_equal(*[x.episode_return for x in rows])
    # `normalize_obs` accepts one observation, for example of a robot, or several.
    statistics = jax.device_get(carries[0].env_state.env_state.statistics.value)
    for raw in (np.float32([3.0]), np.float32([[[1.0], [5.0]]])):
        expected = (raw - statistics.mean) / np.sqrt(statistics.var + 1e-8)
        for collector, carry in zip(collectors, carries, strict=True):
            env = collector.freeze(carry).env
            obs = quick_jit(env.normalize_obs)(raw)
            np.testing.assert_allclose(obs, expected, rtol=1e-4)
            with pytest.raises(ValueError, match=r"`raw` .* shape"):
                env.normalize_obs(np.zeros(2, np.float32))
            with pytest.raises(ValueError, match=r"`normalize_obs` .* statistics"):
                collector.env.normalize_obs(raw)


class HalvedReward(HostCount):
    """A `HostCount` with half the reward, and the original reward as raw reward."""

    def step(self, action):
        result = super().step(action)
        return result._replace(reward=result.reward / 2, raw_reward=result.reward)


def test_episode_return_sums_raw_rewards():
    host = HostCollector(env=envs.NormalizeHostEnv(HalvedReward(4)), policy=POLICY)
    rows = host.collect_steps(host.init(KEY), None, 6)[1]
    length = np.asarray(rows.episode_length)
    np.testing.assert_array_equal(rows.episode_return, length * (length + 1) / 2)


@pytest.mark.slow
def test_evaluate_uses_frozen_normalization_statistics():
    kernel, host = normalizing_collectors()
    carries = [x.collect_steps(x.init(KEY), None, 20)[0] for x in (kernel, host)]
    with pytest.raises(ValueError, match=r"`collector` .* statistics, got a Norm"):
        rollout.evaluate(host, None, KEY, 9)
    with pytest.raises(ValueError, match=r"`env_state` .* statistics"):
        host.freeze(carries[0])
    frozen = host.freeze(carries[1])
    stats = rollout.evaluate(frozen, None, KEY, 9)
    expected = rollout.evaluate(kernel.freeze(carries[0]), None, KEY, 9)
    assert stats.returns.mean == expected.returns.mean
    statistics = [x.env_state[1].statistics for x in (frozen.init(KEY), carries[1])]
    chex.assert_trees_all_equal(*statistics)
    with pytest.raises(ValueError, match=r"`carry` must .* latest call"):
        host.step(carries[1], None)


def test_normalization_ignores_faulty_observations():
    def fault_fn(number, env):
        return "nan" if (number, env) == (4, 1) else None

    env = envs.NormalizeHostEnv(HostCount(2, fault_fn=fault_fn))
    host = HostCollector(env=env, policy=POLICY, on_fault="restart")
    carry, _ = host.collect_steps(host.init(KEY), None, 10)
    assert host.fault_stats.restarts == 1
    leaves = jax.tree.leaves(carry.env_state)
    assert all(np.isfinite(x).all() for x in leaves)


CART_POLE = functools.partial(gymnasium.make, "CartPole-v1")
RECORD_INFO = {"record_info": {"lives": np.int64(0)}}
RECORD_FN = {
    "policy": POLICY,
    "record_fn": lambda t: t.replace(next_obs=(), info={"square": t.reward**2}),
    "accumulators": {"length": rollout.Accumulator(jnp.zeros, lambda x, t: x + 1)},
}


@pytest.mark.parametrize(
    ("make_env", "options"),
    [
        pytest.param(lambda: HostCount(4), RECORD_FN, id="record_fn"),
        pytest.param(
            lambda: envs.from_gymnasium(CART_POLE, num_envs=4, **RECORD_INFO),
            {},
            id="record_info",
        ),
        pytest.param(
            lambda: envs.make_worker_envs([CART_POLE] * 4, **RECORD_INFO),
            {"num_ready": 2},
            id="num_ready",
        ),
    ],
)
def test_row_shape_equals_collected_rows(make_env, options):
    env = make_env()
    options = {"policy": rollout.random_policy(env.action_space), **options}
    collector = HostCollector(env=env, **options)
    try:
        carry = collector.init(KEY)
        num_columns = options.get("num_ready") or 4
        buffer = rollout.buffers.ReplayBuffer(40, num_columns)
        state = buffer.init(collector)
        carry, trajectory = collector.collect_steps(carry, None, 3)
        state = buffer.add(state, trajectory)
        assert buffer.size(state) == np.sum(trajectory.mask)
        row = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), trajectory
        )
        assert collector.row_shape(None) == row
    finally:
        collector.close()


def test_limit_of_the_environment_is_no_unfinished_episode():
    """Both limits are five steps: the environment truncates the episodes itself."""
    env = HostCount(3, min_length=100, max_length=100, limit=5)
    policy = rollout.stateless_policy(lambda params, obs, key: jnp.zeros(3, jnp.int32))
    collector = HostCollector(env=env, policy=policy)
    for limit, unfinished in ((5, 0), (4, 6)):
        stats = rollout.evaluate(
            collector, None, jax.random.key(0), 6, max_episode_steps=limit
        )
        assert (stats.num_episodes, stats.num_unfinished) == (6, unfinished)

"""Normalized observations and rewards, compared with a plain NumPy loop."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit, raw
from suite_checks import KEY, check_successors, play

import rollout
from rollout import envs
from rollout.envs.wrappers.wrapper import VectorWrapper

NUM_LANES, NUM_STEPS = 16, 24
KEYS = jax.random.split(jax.random.key(0), 2)
EPSILON = 1e-3


def count_as_tree(obs):
    """Returns the count of `CountEnv` as a tree of several dtypes."""
    n = obs[0].astype(jnp.int32)
    table = jnp.full((2, 3), n, jnp.float16)
    return {"n": n, "odd": (n % 2 == 1, jnp.uint8(2) + n.astype("uint8"), table)}


TREE = envs.TransformObs(CountEnv(), count_as_tree)


def make_normalized(**options):
    numbers = ("n", "odd/1", "odd/2")
    return envs.NormalizeObs(make_inner(**options), only=numbers, epsilon=EPSILON)


def make_inner(num_envs=NUM_LANES, auto_reset="compact"):
    return envs.vectorize(TREE, num_envs, auto_reset=auto_reset)


def make_collector(env):
    """Uses the random policy, which ignores observations."""
    return rollout.Collector(env=env, policy=rollout.random_policy(env.action_space))


def make_half_rollout(collector):
    return lambda carry: collector.collect_steps(carry, None, NUM_STEPS // 2)


@functools.cache
def collect():
    """Collects two halves; returns the three carries and the trajectory."""
    collector = make_collector(make_normalized())
    collect_half = quick_jit(make_half_rollout(collector))
    carries = [quick_jit(collector.init)(KEY)]
    halves = []
    for _ in range(2):
        carry, half = collect_half(carries[-1])
        carries.append(carry)
        halves.append(half)
    return carries, jax.tree.map(lambda *x: np.concatenate(x), *halves)


def run_steps(env, num_steps):
    """Returns the result of the last step, without auto-reset."""

    @quick_jit
    def run(key):
        reset_keys, *step_keys = jax.random.split(key, (1 + num_steps, env.num_envs))
        state, _ = env.reset(reset_keys)
        for keys in step_keys:
            result = env.step(keys, state, jnp.zeros(env.num_envs, jnp.int32))
            state = result.state
        return result

    return run(KEY)


def index_tree(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def reference_mean_and_var(batches):
    """Returns float64 statistics of all batches and of a prior with count 1e-4."""
    x = np.concatenate(batches).astype(np.float64)
    count = 1e-4 + len(x)
    mean = x.sum(axis=0) / count
    # The prior has mean 0 and variance 1.
    spread = 1e-4 * (1.0 + mean**2) + ((x - mean) ** 2).sum(axis=0)
    return mean, spread / count


def assert_close(got, want):
    """Compares with float64.

    Float32 has an error of 6e-8 per operation, which grows over 25 updates. The divisor
    may be as small as sqrt(EPSILON) = 0.03. Half precision has an error of 5e-4.
    """
    tolerance = 1e-3 if np.asarray(got).dtype == np.float16 else 1e-4
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_rows_and_statistics_equal_numpy_loop():
    carries, trajectory = collect()
    info = trajectory.info
    leaves = info["raw_obs"], info["raw_next_obs"], trajectory.obs, trajectory.next_obs
    raw_obs, raw_next_obs, obs, next_obs = map(jax.tree.leaves, leaves)
    is_first = np.asarray(trajectory.first) & (np.arange(NUM_STEPS) > 0)[:, None]
    is_last = np.asarray(trajectory.done[-1])
    assert is_first.any()
    statistics = carries[-1].env_state.statistics.value
    means, variances = (
        jax.tree.leaves(x, is_leaf=lambda x: x is None)
        for x in (statistics.mean, statistics.var)
    )
    for leaf in range(len(obs)):
        if raw_obs[leaf].dtype == bool:  # flags are not normalized
            np.testing.assert_array_equal(obs[leaf], raw_obs[leaf])
            np.testing.assert_array_equal(next_obs[leaf], raw_next_obs[leaf])
            assert means[leaf] is variances[leaf] is None
            continue
        batches = [raw_obs[leaf][0]]

        def check(got, raw_values, batches=batches):
            mean, var = reference_mean_and_var(batches)
            assert_close(got, (np.float64(raw_values) - mean) / np.sqrt(var + EPSILON))
            return mean, var

        # Statistics are updated before observations are normalized.
        for t in range(NUM_STEPS):
            is_new = is_first[t]
            check(obs[leaf][t][~is_new], raw_obs[leaf][t][~is_new])
            batches.append(raw_obs[leaf][t][is_new])
            if is_new.any():
                check(obs[leaf][t][is_new], raw_obs[leaf][t][is_new])
            batches.append(raw_next_obs[leaf][t])
            check(next_obs[leaf][t], raw_next_obs[leaf][t])
        last = np.asarray(jax.tree.leaves(carries[-1].env_state.memory)[leaf])
        batches.append(last[is_last])  # resets after the last row
        mean, var = reference_mean_and_var(batches)
        assert_close(means[leaf], mean)
        assert_close(variances[leaf], var)
    num_seen = NUM_LANES * (NUM_STEPS + 1) + is_first.sum() + is_last.sum()
    assert_close(statistics.count, num_seen + 1e-4)
    check_successors(trajectory)


def test_raw_observations_equal_unwrapped_environment():
    _, trajectory = collect()
    _, plain = play(make_inner(), NUM_STEPS)
    info = dict(trajectory.info)
    chex.assert_trees_all_equal(info.pop("raw_obs"), plain.obs)
    chex.assert_trees_all_equal(info.pop("raw_next_obs"), plain.next_obs)
    rows = trajectory.replace(obs=(), next_obs=(), info=info)
    chex.assert_trees_all_equal(rows, plain.replace(obs=(), next_obs=()))


def test_split_calls_and_auto_reset_give_equal_bits():
    """Collects all steps with one call and another auto-reset strategy."""
    carry, trajectory_at_once = play(make_normalized(auto_reset="select"), NUM_STEPS)
    carries, trajectory = collect()
    chex.assert_trees_all_equal(
        raw((carry, trajectory_at_once)), raw((carries[-1], trajectory))
    )


def test_statistics_are_shared_and_float32():
    carries, trajectory = collect()
    dtypes = jax.tree.map(lambda x: x.dtype.name, trajectory.obs)
    assert dtypes == {"n": "float32", "odd": ("bool", "float32", "float16")}
    raw_dtypes = jax.tree.map(lambda x: x.dtype.name, trajectory.info["raw_obs"])
    assert raw_dtypes == {"n": "int32", "odd": ("bool", "uint8", "float16")}
    statistics = carries[-1].env_state.statistics.value
    assert {x.dtype.name for x in jax.tree.leaves(statistics)} == {"float32"}
    for statistic in (statistics.mean, statistics.var):
        assert [x.shape for x in jax.tree.leaves(statistic)] == [(), (), (2, 3)]
    space = make_normalized().observation_space
    assert (space.spaces["odd"].spaces[2].shape, space.spaces["n"].dtype) == (
        (2, 3),
        "float32",
    )
    assert space.contains(index_tree(trajectory.obs, (0, 0)))
    assert not any(x.weak_type for x in jax.tree.leaves(raw(carries)))


def test_frozen_statistics_do_not_change():
    carries, trajectory = collect()
    collector = make_collector(make_normalized().freeze(carries[1].env_state))

    @quick_jit
    def run(carry, key):
        carry, frozen_rows = make_half_rollout(collector)(carry)
        normalized_obs = collector.env.normalize_obs(frozen_rows.info["raw_obs"])
        return carry, frozen_rows, normalized_obs, collector.init(key)

    carry, frozen_rows, normalized_obs, new_carry = run(carries[1], jax.random.key(1))
    chex.assert_trees_all_equal_shapes_and_dtypes(carry, carries[1])
    statistics = carries[1].env_state.statistics.value
    chex.assert_trees_all_equal(carry.env_state.statistics.value, statistics)
    expected_rows = index_tree(trajectory, slice(NUM_STEPS // 2, None))
    chex.assert_trees_all_equal(frozen_rows.info, expected_rows.info)
    # The first row was normalized before the last resets updated the statistics.
    rows = index_tree((normalized_obs, frozen_rows.obs), slice(1, None))
    chex.assert_trees_all_close(*rows, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal(
        index_tree(frozen_rows.obs, 0), index_tree(expected_rows.obs, 0)
    )
    scale = np.sqrt(np.float64(statistics.var["n"]) + EPSILON)
    for got, name in (
        (frozen_rows.obs, "raw_obs"),
        (frozen_rows.next_obs, "raw_next_obs"),
    ):
        centered = np.asarray(frozen_rows.info[name]["n"]) - np.float64(
            statistics.mean["n"]
        )
        assert_close(got["n"][1:], (centered / scale)[1:])
    chex.assert_trees_all_equal(new_carry.env_state.statistics.value, statistics)
    # The first observation of an episode is 0.
    assert_close(new_carry.obs["n"], np.full(NUM_LANES, -statistics.mean["n"] / scale))
    chex.assert_trees_all_equal_shapes_and_dtypes(new_carry, carries[0])


def test_unread_raw_observations_have_no_buffer():
    collector = make_collector(envs.NormalizeObs(make_inner()))
    carry = jax.eval_shape(collector.init, jax.random.key(0))

    def rewards(carry):
        return collector.collect_steps(carry, None, 1000)[1].reward

    memory = quick_jit(rewards).lower(carry).compile().memory_analysis()
    # A raw observation of 16 lanes has 288 bytes: 1000 observations have 288 kB.
    assert memory.temp_size_in_bytes < 100_000


@pytest.mark.parametrize(("dtype", "want"), [(bool, "bool"), (jnp.int32, "float32")])
def test_single_leaf_flags_are_not_normalized(dtype, want):
    env = envs.TransformObs(CountEnv(), lambda obs: obs.astype(dtype))
    normalized = envs.NormalizeObs(envs.vectorize(env, 2))
    assert jax.eval_shape(normalized.reset, KEYS)[1].dtype == want


MIXED_SPACES = {
    "action_mask": envs.Box(0.0, 1.0, (3,)),
    "mask": envs.spaces.MultiBinary((3,)),
    "place": envs.Discrete(9),
    "places": envs.spaces.MultiDiscrete([9, 9]),
    "number": envs.Box(0, 9, (), jnp.int32),
    "pixels": envs.Box(0, 255, (2, 2), jnp.uint8),
    "speed": envs.Box(0.0, 9.0, (1,)),
    "speeds": envs.Box(0.0, 9.0, (1,)),
}


def count_as_mixed(obs):
    """Returns the count of `CountEnv` as an element of all spaces."""
    return {
        name: jnp.broadcast_to(
            obs[0] % 2 if "mask" in name else obs[0], space.shape
        ).astype(space.dtype)
        for name, space in MIXED_SPACES.items()
    }


@pytest.mark.parametrize(
    ("only", "want"),
    [
        (None, {"pixels", "speed", "speeds"}),
        (("number", "speed"), {"number", "speed"}),
    ],
)
def test_masks_and_categories_are_not_normalized(only, want):
    env = envs.vectorize(envs.TransformObs(CountEnv(), count_as_mixed, MIXED_SPACES), 2)
    env = envs.NormalizeObs(env, only=only)
    result = run_steps(env, 2)
    raw_obs = result.info["raw_next_obs"]
    is_raw = {x: np.array_equal(result.obs[x], raw_obs[x]) for x in MIXED_SPACES}
    assert {name for name in MIXED_SPACES if not is_raw[name]} == want
    unbounded = {x: envs.Box(-np.inf, np.inf, MIXED_SPACES[x].shape) for x in want}
    assert env.observation_space.spaces == MIXED_SPACES | unbounded
    for name in ("action_mask", "mask", "place", "places"):
        with pytest.raises(ValueError, match=r"\(number, pixels, speed, speeds\), got"):
            jax.eval_shape(envs.NormalizeObs(env.env, only=[name]).reset, KEYS)


class CustomWrapper(VectorWrapper):
    """A custom wrapper with an additional state."""

    def reset(self, keys):
        state, obs = self.env.reset(keys)
        return (jnp.zeros(self.num_envs), state), obs

    def step(self, keys, state, action):
        result = self.env.step(keys, state[1], action)
        return result.replace(state=(state[0], result.state))

    def reset_done(self, key_fn, done, lanes):
        inner = self.env.reset_done(key_fn, done, lanes._replace(state=lanes.state[1]))
        return inner._replace(state=(lanes.state[0], inner.state))


NESTED = [
    (envs.NormalizeReward, envs.NormalizeObs),
    (envs.NormalizeObs, CustomWrapper, envs.NormalizeReward),
    (CustomWrapper, envs.NormalizeReward, CustomWrapper, envs.NormalizeObs),
]


def make_nested(wrappers, num_envs=2):
    env = envs.vectorize(CountEnv(), num_envs)
    for wrapper in reversed(wrappers):
        env = wrapper(env)
    return env


@pytest.mark.parametrize("wrappers", NESTED)
def test_freeze_applies_to_nested_wrappers(wrappers):
    env = make_nested(wrappers)
    updated_state = quick_jit(first_step_state)(env, jax.random.key(0))
    # The frozen environment may have another number of lanes.
    frozen = make_nested(wrappers, num_envs=3).freeze(updated_state)
    assert env.learns
    assert not frozen.learns
    frozen_state = quick_jit(first_step_state)(frozen, jax.random.key(1))
    assert len(shared_statistics(frozen_state)) == 2
    chex.assert_trees_all_equal(
        shared_statistics(frozen_state), shared_statistics(updated_state)
    )


def first_step_state(env, key):
    """Returns the state after the first step."""
    keys = jax.random.split(key, env.num_envs)
    state, _ = env.reset(keys)
    return env.step(keys, state, jnp.zeros(env.num_envs, jnp.int32)).state


def shared_statistics(tree):
    is_shared = lambda x: isinstance(x, envs.types.Shared)  # noqa: E731
    return list(filter(is_shared, jax.tree.leaves(tree, is_leaf=is_shared)))


@pytest.mark.parametrize("other_wrappers", [NESTED[1], ()])
def test_freeze_with_other_statistics_raises(other_wrappers):
    carry = jax.eval_shape(
        make_collector(make_nested(other_wrappers)).init, jax.random.key(0)
    )
    with pytest.raises(ValueError, match="`env_state` must"):
        make_collector(make_nested(NESTED[0])).freeze(carry)


def test_rewards_are_scaled_by_deviation_of_returns():
    env = envs.NormalizeReward(envs.vectorize(CountEnv(), 4), gamma=0.9)
    carry, rows = play(env, 30)
    raw_reward = rows.info["raw_reward"]
    # Step n of an episode has reward n and observation n - 1.
    np.testing.assert_array_equal(raw_reward, rows.episode_length)
    np.testing.assert_array_equal(rows.obs[..., 0], rows.episode_length - 1)
    total, return_batches, scales = np.zeros(4), [], []
    for reward, done in zip(raw_reward, rows.done, strict=True):
        total = 0.9 * total + reward
        return_batches.append(total)
        scales.append(np.sqrt(reference_mean_and_var(return_batches)[1] + 1e-8))
        total = np.where(done, 0.0, total)
    # The tolerance covers float32 rounding of thirty updates.
    np.testing.assert_allclose(
        rows.reward, raw_reward / np.array(scales)[:, None], rtol=1e-4
    )
    result = run_steps(env.freeze(carry.env_state), 2)
    np.testing.assert_array_equal(
        result.state.statistics.value.var, carry.env_state.statistics.value.var
    )
    np.testing.assert_allclose(result.reward, 2.0 / scales[-1], rtol=1e-4)


def test_statistics_ignore_nan():
    nan_env = envs.TransformObs(
        CountEnv(), lambda obs: jnp.where(obs >= 3, jnp.nan, obs)
    )
    result = run_steps(envs.NormalizeObs(envs.vectorize(nan_env, 4)), 3)
    assert np.isnan(result.obs).all()
    # The observations 0, 1 and 2 have the mean 1 and the variance 2/3.
    assert_close(result.state.statistics.value.mean, [1.0])
    assert_close(result.state.statistics.value.var, [2 / 3])

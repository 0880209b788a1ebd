"""Normalised observations against a plain NumPy loop over the raw ones."""

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


def show(obs):
    """The count of `CountEnv` as a tree of several dtypes."""
    n = obs[0].astype(jnp.int32)
    table = jnp.full((2, 3), n, jnp.float16)
    return {"n": n, "odd": (n % 2 == 1, jnp.uint8(2) + n.astype("uint8"), table)}


TREE = envs.TransformObs(CountEnv(), show)


def normalizing(**options):
    numbers = ("n", "odd/1", "odd/2")
    return envs.NormalizeObs(make_inner(**options), only=numbers, epsilon=EPSILON)


def make_inner(num_envs=NUM_LANES, auto_reset="compact"):
    return envs.vectorize(TREE, num_envs, auto_reset=auto_reset)


def collector_of(env):
    """The random policy does not look at the observation."""
    return rollout.Collector(env=env, policy=rollout.random_policy(env.action_space))


def half_of(collector):
    return lambda carry: collector.collect_steps(carry, None, NUM_STEPS // 2)


@functools.cache
def collect():
    """Carries before, between and after two halves, and the trajectory."""
    collector = collector_of(normalizing())
    collect_half = quick_jit(half_of(collector))
    carries = [quick_jit(collector.init)(KEY)]
    halves = []
    for _ in range(2):
        carry, half = collect_half(carries[-1])
        carries.append(carry)
        halves.append(half)
    return carries, jax.tree.map(lambda *x: np.concatenate(x), *halves)


def at(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def plain_mean_and_var(seen):
    """Of all batches that were seen, in float64, after a prior that counts 1e-4."""
    x = np.concatenate(seen).astype(np.float64)
    count = 1e-4 + len(x)
    mean = x.sum(axis=0) / count
    # The prior has mean 0 and variance 1.
    spread = 1e-4 * (1.0 + mean**2) + ((x - mean) ** 2).sum(axis=0)
    return mean, spread / count


def assert_close(got, want):
    """Compares with float64.

    Float32 has an error of 6e-8 per operation, which grows over 25 updates, and the
    divisor may be as small as sqrt(EPSILON) = 0.03; half precision rounds the result
    by 5e-4 of itself.
    """
    tolerance = 1e-3 if np.asarray(got).dtype == np.float16 else 1e-4
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_every_row_agrees_with_a_plain_loop():
    carries, trajectory = collect()
    info = trajectory.info
    seen = info["raw_obs"], info["raw_next_obs"], trajectory.obs, trajectory.next_obs
    raw_obs, raw_next_obs, obs, next_obs = map(jax.tree.leaves, seen)
    is_first = np.asarray(trajectory.first) & (np.arange(NUM_STEPS) > 0)[:, None]
    is_last = np.asarray(trajectory.done[-1])
    assert is_first.any()
    statistics = carries[-1].env_state.statistics.value
    means, variances = (
        jax.tree.leaves(x, is_leaf=lambda x: x is None)
        for x in (statistics.mean, statistics.var)
    )
    for leaf in range(len(obs)):
        if raw_obs[leaf].dtype == bool:  # flags stay
            np.testing.assert_array_equal(obs[leaf], raw_obs[leaf])
            np.testing.assert_array_equal(next_obs[leaf], raw_next_obs[leaf])
            assert means[leaf] is variances[leaf] is None
            continue
        seen = [raw_obs[leaf][0]]

        def check(got, given, seen=seen):
            mean, var = plain_mean_and_var(seen)
            assert_close(got, (np.float64(given) - mean) / np.sqrt(var + EPSILON))
            return mean, var

        # Observations count before they are normalized.
        for t in range(NUM_STEPS):
            is_new = is_first[t]
            check(obs[leaf][t][~is_new], raw_obs[leaf][t][~is_new])
            seen.append(raw_obs[leaf][t][is_new])
            if is_new.any():
                check(obs[leaf][t][is_new], raw_obs[leaf][t][is_new])
            seen.append(raw_next_obs[leaf][t])
            check(next_obs[leaf][t], raw_next_obs[leaf][t])
        last = np.asarray(jax.tree.leaves(carries[-1].env_state.memory)[leaf])
        seen.append(last[is_last])  # of the resets after the last row
        mean, var = plain_mean_and_var(seen)
        assert_close(means[leaf], mean)
        assert_close(variances[leaf], var)
    num_seen = NUM_LANES * (NUM_STEPS + 1) + is_first.sum() + is_last.sum()
    assert_close(statistics.count, num_seen + 1e-4)
    check_successors(trajectory)


def test_raw_observations_are_those_of_the_unwrapped_environment():
    _, trajectory = collect()
    _, plain = play(make_inner(), NUM_STEPS)
    info = dict(trajectory.info)
    chex.assert_trees_all_equal(info.pop("raw_obs"), plain.obs)
    chex.assert_trees_all_equal(info.pop("raw_next_obs"), plain.next_obs)
    rest = trajectory.replace(obs=(), next_obs=(), info=info)
    chex.assert_trees_all_equal(rest, plain.replace(obs=(), next_obs=()))


def test_halves_and_auto_reset_do_not_change_a_bit():
    """One call of all steps, with the other auto-reset."""
    carry, whole = play(normalizing(auto_reset="select"), NUM_STEPS)
    carries, trajectory = collect()
    chex.assert_trees_all_equal(raw((carry, whole)), raw((carries[-1], trajectory)))


def test_lanes_share_float32_statistics_and_leaves_keep_float_dtypes():
    carries, trajectory = collect()
    dtypes = jax.tree.map(lambda x: x.dtype.name, trajectory.obs)
    assert dtypes == {"n": "float32", "odd": ("bool", "float32", "float16")}
    kinds = jax.tree.map(lambda x: x.dtype.name, trajectory.info["raw_obs"])
    assert kinds == {"n": "int32", "odd": ("bool", "uint8", "float16")}
    statistics = carries[-1].env_state.statistics.value
    assert {x.dtype.name for x in jax.tree.leaves(statistics)} == {"float32"}
    for part in (statistics.mean, statistics.var):
        assert [x.shape for x in jax.tree.leaves(part)] == [(), (), (2, 3)]
    space = normalizing().observation_space
    assert (space.spaces["odd"].spaces[2].shape, space.spaces["n"].dtype) == (
        (2, 3),
        "float32",
    )
    assert space.contains(at(trajectory.obs, (0, 0)))
    assert not any(x.weak_type for x in jax.tree.leaves(raw(carries)))


def test_frozen_statistics_do_not_change_in_an_old_carry_and_a_new_one():
    carries, trajectory = collect()
    collector = collector_of(normalizing().freeze(carries[1].env_state))

    @quick_jit
    def run(carry, key):
        carry, rest = half_of(collector)(carry)
        shown = collector.env.normalize_obs(rest.info["raw_obs"])
        return carry, rest, shown, collector.init(key)

    carry, rest, shown, fresh = run(carries[1], jax.random.key(1))
    chex.assert_trees_all_equal_shapes_and_dtypes(carry, carries[1])
    statistics = carries[1].env_state.statistics.value
    chex.assert_trees_all_equal(carry.env_state.statistics.value, statistics)
    second = at(trajectory, slice(NUM_STEPS // 2, None))
    chex.assert_trees_all_equal(rest.info, second.info)
    # The first row was normalized before the last resets counted.
    rows = at((shown, rest.obs), slice(1, None))
    chex.assert_trees_all_close(*rows, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal(at(rest.obs, 0), at(second.obs, 0))
    scale = np.sqrt(np.float64(statistics.var["n"]) + EPSILON)
    for got, name in ((rest.obs, "raw_obs"), (rest.next_obs, "raw_next_obs")):
        centred = np.asarray(rest.info[name]["n"]) - np.float64(statistics.mean["n"])
        assert_close(got["n"][1:], (centred / scale)[1:])
    chex.assert_trees_all_equal(fresh.env_state.statistics.value, statistics)
    # Every episode starts with the count 0.
    assert_close(fresh.obs["n"], np.full(NUM_LANES, -statistics.mean["n"] / scale))
    chex.assert_trees_all_equal_shapes_and_dtypes(fresh, carries[0])


def test_unread_raw_observations_leave_no_buffer():
    collector = collector_of(envs.NormalizeObs(make_inner()))
    carry = jax.eval_shape(collector.init, jax.random.key(0))

    def rewards(carry):
        return collector.collect_steps(carry, None, 1000)[1].reward

    memory = quick_jit(rewards).lower(carry).compile().memory_analysis()
    # One raw observation of 16 lanes is 288 bytes; 1000 of them would be 288 kB.
    assert memory.temp_size_in_bytes < 100_000


@pytest.mark.parametrize(("dtype", "want"), [(bool, "bool"), (jnp.int32, "float32")])
def test_flags_alone_stay_and_integers_alone_are_normalised(dtype, want):
    env = envs.TransformObs(CountEnv(), lambda obs: obs.astype(dtype))
    normalized = envs.NormalizeObs(envs.vectorize(env, 2))
    assert jax.eval_shape(normalized.reset, KEYS)[1].dtype == want


MARKED = {
    "action_mask": envs.Box(0.0, 1.0, (3,)),
    "mask": envs.spaces.MultiBinary((3,)),
    "place": envs.Discrete(9),
    "places": envs.spaces.MultiDiscrete([9, 9]),
    "number": envs.Box(0, 9, (), jnp.int32),
    "pixels": envs.Box(0, 255, (2, 2), jnp.uint8),
    "speed": envs.Box(0.0, 9.0, (1,)),
    "speeds": envs.Box(0.0, 9.0, (1,)),
}


def mark(obs):
    """The count of `CountEnv` as an element of every kind of space."""
    return {
        name: jnp.broadcast_to(
            obs[0] % 2 if "mask" in name else obs[0], space.shape
        ).astype(space.dtype)
        for name, space in MARKED.items()
    }


@pytest.mark.parametrize(
    ("only", "want"),
    [
        (None, {"pixels", "speed", "speeds"}),
        (("number", "speed"), {"number", "speed"}),
    ],
)
def test_what_numbers_or_marks_things_is_not_normalised(only, want):
    env = envs.vectorize(envs.TransformObs(CountEnv(), mark, MARKED), 2)
    env = envs.NormalizeObs(env, only=only)
    _, rows = play(env, 5)
    is_raw = {x: np.array_equal(rows.obs[x], rows.info["raw_obs"][x]) for x in MARKED}
    assert {name for name in MARKED if not is_raw[name]} == want
    unbounded = {x: envs.Box(-np.inf, np.inf, MARKED[x].shape) for x in want}
    assert env.observation_space.spaces == MARKED | unbounded
    for name in ("action_mask", "mask", "place", "places"):
        with pytest.raises(ValueError, match=r"\(number, pixels, speed, speeds\), got"):
            jax.eval_shape(envs.NormalizeObs(env.env, only=[name]).reset, KEYS)


class Passing(VectorWrapper):
    """A user's wrapper, with a state of its own."""

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
    (envs.NormalizeObs, Passing, envs.NormalizeReward),
    (Passing, envs.NormalizeReward, Passing, envs.NormalizeObs),
]


def nested(wrappers, num_envs=2):
    env = envs.vectorize(CountEnv(), num_envs)
    for wrapper in reversed(wrappers):
        env = wrapper(env)
    return env


@pytest.mark.parametrize("wrappers", NESTED)
def test_one_call_freezes_all_normalisers(wrappers):
    env = nested(wrappers)
    learnt = quick_jit(state_after)(env, jax.random.key(0))
    # Of another number of lanes.
    frozen = nested(wrappers, num_envs=3).freeze(learnt)
    assert env.learns
    assert not frozen.learns
    after = quick_jit(state_after)(frozen, jax.random.key(1))
    assert len(statistics_in(after)) == 2
    chex.assert_trees_all_equal(statistics_in(after), statistics_in(learnt))


def state_after(env, key):
    """The state after a step."""
    keys = jax.random.split(key, env.num_envs)
    state, _ = env.reset(keys)
    return env.step(keys, state, jnp.zeros(env.num_envs, jnp.int32)).state


def statistics_in(tree):
    is_shared = lambda x: isinstance(x, envs.types.Shared)  # noqa: E731
    return list(filter(is_shared, jax.tree.leaves(tree, is_leaf=is_shared)))


@pytest.mark.parametrize("other", [NESTED[1], ()])
def test_statistics_of_another_kind_are_refused(other):
    carry = jax.eval_shape(collector_of(nested(other)).init, jax.random.key(0))
    with pytest.raises(ValueError, match=r"`env_state` must (have|be the `c)"):
        collector_of(nested(NESTED[0])).freeze(carry)


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    inner = envs.vectorize(CountEnv(), 4)
    normalized = envs.NormalizeReward(inner, gamma=0.9)
    (carry, got), (_, plain) = play(normalized, 30), play(inner, 30)
    np.testing.assert_array_equal(got.info["raw_reward"], plain.reward)
    np.testing.assert_array_equal(got.obs, plain.obs)
    total, seen, scales = np.zeros(4), [], []
    for reward, done in zip(plain.reward, plain.done, strict=True):
        total = 0.9 * total + reward
        seen.append(total)
        scales.append(np.sqrt(plain_mean_and_var(seen)[1] + 1e-8))
        total = np.where(done, 0.0, total)
    # Float32 against float64, over thirty updates.
    np.testing.assert_allclose(
        got.reward, plain.reward / np.array(scales)[:, None], rtol=1e-4
    )
    end, later = play(normalized.freeze(carry.env_state), 30, jax.random.key(1))
    np.testing.assert_array_equal(
        end.env_state.statistics.value.var, carry.env_state.statistics.value.var
    )
    scale = later.info["raw_reward"] / later.reward
    np.testing.assert_allclose(scale, scales[-1], rtol=1e-4)


def test_one_nan_does_not_poison_the_statistics():
    late = envs.TransformObs(CountEnv(), lambda obs: jnp.where(obs >= 3, jnp.nan, obs))
    carry, trajectory = play(envs.NormalizeObs(envs.vectorize(late, 4)), 30)
    assert np.isnan(trajectory.next_obs).any()
    assert np.isfinite(carry.env_state.statistics.value.mean).all()
    assert np.isfinite(carry.env_state.statistics.value.var).all()

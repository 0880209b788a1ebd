"""Each wrapper against a plain loop or a closed form; properties of all of them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import suite_checks
from cases import CountEnv, make_env, quick_jit, raw
from flax import struct
from plain_suites import side_by_side

import rollout
from rollout import envs
from rollout.envs.wrappers.actions import TanhSpace

NUM_LANES, NUM_STEPS = 16, 24


@struct.dataclass
class BoxEnv:
    """Shows the action it was sent; the box of actions is its parameter."""

    low: jax.typing.ArrayLike = -2.0
    high: jax.typing.ArrayLike = 0.5

    @property
    def observation_space(self):
        return self.action_space

    @property
    def action_space(self):
        return envs.Box(self.low, self.high, (2,))

    def reset(self, key):
        return jnp.int32(0), jax.random.uniform(key, (2,), maxval=0.5)

    def step(self, key, state, action):
        return envs.EnvStep(
            state=state + 1,
            obs=action,
            reward=action.sum(),
            terminated=action[0] < -1.5,
            truncated=state == 5,
            info={"noise": jax.random.uniform(key)},
        )


def observed(obs):
    return {"twice": 2.0 * obs, "first": obs[0] > 0.5}


def cube(reward):
    return reward**3


def all_info(info):
    return info


def no_noise(state, obs):
    return {"noise": jnp.float32(-1.0), "action": jnp.int32(-1)}


def no_discount(state, obs):
    return {"discount": jnp.float32(1.0)}


def short_pendulum():
    return envs.make("Pendulum-v1", max_steps_in_episode=9)


# Each wrapper once; the inner environments are small.
WRAPPED = {
    "limit": lambda: envs.TimeLimit(CountEnv(), 5),
    "clip": lambda: envs.RescaleAction(BoxEnv()),
    "tanh": lambda: envs.RescaleAction(short_pendulum(), bound="tanh"),
    "stack": lambda: envs.FrameStack(CountEnv(), 3),
    "repeat": lambda: envs.ActionRepeat(CountEnv(), 2),
    "obs": lambda: envs.TransformObs(BoxEnv(), observed),
    "reward": lambda: envs.TransformReward(CountEnv(), cube),
    "info": lambda: envs.ObserveInfo(CountEnv(), all_info, no_noise),
}
each_wrapper = pytest.mark.parametrize("name", WRAPPED)


def stack_pendulum():
    env = envs.ObserveInfo(short_pendulum(), all_info, no_discount)
    env = envs.RescaleAction(envs.TransformObs(env, lambda obs: obs["obs"]), "tanh")
    return envs.FrameStack(envs.TimeLimit(env, 7), 4)


def only_noise(state, obs):
    return {"noise": jnp.float32(-1.0)}


def stack_all():
    env = envs.TransformObs(envs.RescaleAction(BoxEnv()), observed)
    env = envs.ObserveInfo(envs.TransformReward(env, cube), all_info, only_noise)
    return envs.TimeLimit(envs.ActionRepeat(envs.FrameStack(env, 2), 2), 3)


# Every wrapper at once; and over an environment that computes, in another order.
CASES = {"all": stack_all, "Pendulum": stack_pendulum}
each_case = pytest.mark.parametrize(
    "name", ["all", pytest.param("Pendulum", marks=pytest.mark.slow)]
)


@functools.cache
def wrapped(name):
    return CASES[name]()


def collector_of(env, num_envs, auto_reset="compact"):
    vector_env = envs.vectorize(env, num_envs, auto_reset=auto_reset)
    policy = rollout.random_policy(vector_env.action_space)
    return rollout.Collector(env=vector_env, policy=policy)


@functools.cache
def collect(name):
    """The trajectory of a case, collected in two halves."""
    collector = collector_of(wrapped(name), NUM_LANES)

    @quick_jit
    def half(carry):
        return collector.collect_steps(carry, None, NUM_STEPS // 2)

    carry, first = half(quick_jit(collector.init)(suite_checks.KEY))
    _, second = half(carry)
    return jax.tree.map(lambda *x: np.concatenate(x), first, second)


def at(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


# Properties of every wrapper.


@each_case
def test_next_obs_is_the_next_row_but_at_an_ending(name):
    done = collect(name).done
    assert 0 < done.sum() < done.size
    suite_checks.check_successors(collect(name))


@each_case
def test_every_row_agrees_with_a_plain_loop(name):
    env = wrapped(name)

    def advance(_, key, state, action):
        result = env.step(key, state, action)
        ends = result.terminated, result.truncated
        return result.state, result.obs, result.reward, *ends, result.info

    plain = side_by_side(env, lambda _, key: env.reset(key), advance)
    suite_checks.check_is_as_in_plain_loop(collect(name), plain, atol=1e-5)


@each_case
def test_halves_lanes_and_auto_reset_do_not_change_a_bit(name):
    """One call of all steps, in twice the lanes, with the other auto-reset."""
    collector = collector_of(wrapped(name), 2 * NUM_LANES, "select")

    @quick_jit
    def run(key):
        return collector.collect_steps(collector.init(key), None, NUM_STEPS)[1]

    whole = run(suite_checks.KEY)
    # Episode ids count lanes.
    want, got = (x.replace(episode_id=()) for x in (collect(name), whole))
    chex.assert_trees_all_equal(at(got, (slice(None), slice(NUM_LANES))), want)


@each_case
def test_spaces_are_those_of_what_is_recorded(name):
    suite_checks.check_spaces(wrapped(name), collect(name))


# The wrappers as pytrees.


@each_wrapper
@pytest.mark.usefixtures("key_reuse")
def test_wrapper_is_a_pytree_of_its_parameters(name):
    env, key = WRAPPED[name](), jax.random.key(0)
    start = jax.jit(lambda env, key: env.reset(key)[1])
    want = env.reset(key)[1]
    for again in (env, WRAPPED[name]()):
        chex.assert_trees_all_close(start(again, key), want, rtol=1e-6)
    assert start._cache_size() == 1
    stacked = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), env)
    for axes in (0, jax.tree.map(lambda x: 0, env)):
        got = jax.vmap(lambda env: env.reset(key)[1], (axes,))(stacked)
        for lane in range(2):
            chex.assert_trees_all_close(at(got, lane), want, rtol=1e-6)
    for value in (None, object(), "x", 0):
        replaced = jax.tree.map(lambda x, value=value: value, env)
        assert all(leaf is value for leaf in jax.tree.leaves(replaced))
        assert type(replaced) is type(env)


# Each wrapper alone.


def play(env, actions=(0,) * 9):
    """Plays one episode; what it showed first, and its steps."""
    root, take = jax.random.key(0), quick_jit(env.step)
    state, obs = env.reset(jax.random.fold_in(root, 0))
    steps = []
    for n, action in enumerate(actions, 1):
        step = take(jax.random.fold_in(root, n), state, jnp.int32(action))
        state = step.state
        steps.append(step.replace(state=()))
        if step.terminated | step.truncated:
            break
    return obs, jax.tree.map(lambda *x: np.stack(x), *steps)


@pytest.mark.parametrize("length", [3, 4, 9])
def test_time_limit_truncates_and_keeps_both_flags(length):
    env = CountEnv(min_length=length, max_length=length)
    _, steps = play(envs.TimeLimit(env, 4))
    n = np.arange(1, min(length, 4) + 1)
    np.testing.assert_array_equal(steps.obs[:, 0], n)
    np.testing.assert_array_equal(steps.truncated, n == 4)
    np.testing.assert_array_equal(steps.terminated, n == length)


def test_time_limit_leaves_the_own_limit_of_the_environment():
    _, steps = play(envs.TimeLimit(CountEnv(min_length=9), 100))
    np.testing.assert_array_equal(steps.truncated, np.arange(1, 8) == 7)


LOW, HIGH = np.array([-2.0, 0.1], np.float32), np.array([0.5, 0.7], np.float32)


def sent(env, action):
    """What reaches the environment, which shows it."""
    return jax.vmap(lambda a: env.step(jax.random.key(0), jnp.int32(0), a).obs)(action)


@pytest.mark.parametrize("bound", ["clip", "tanh"])
def test_action_is_mapped_to_the_bounds(bound):
    action = np.linspace(-4.0, 4.0, 33, dtype=np.float32)[:, None] * np.ones(2)
    squashed = np.clip(action, -1.0, 1.0) if bound == "clip" else np.tanh(action)
    want = LOW + (HIGH - LOW) * (squashed + 1.0) / 2.0
    got = sent(envs.RescaleAction(BoxEnv(LOW, HIGH), bound), jnp.float32(action))
    # A few roundings of numbers of at most 2, in float32.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bound", ["clip", "tanh"])
def test_action_never_leaves_the_bounds_by_rounding(bound):
    rng = np.random.default_rng(0)
    ends = np.sort(rng.normal(size=(2, 500, 2)) * 10.0 ** rng.integers(-9, 9), axis=0)
    low, high = jnp.float32(ends[0]), jnp.float32(ends[1])
    near = 1.0 - np.float32(2.0**-24)
    action = jnp.float32([-1e30, -20.0, -1.0, -near, near, 1.0, 20.0, 1e30])

    def send(low, high):
        return sent(envs.RescaleAction(BoxEnv(low, high), bound), pairs)

    pairs = jnp.stack([action, action], axis=1)
    got = jax.jit(jax.vmap(send, out_axes=1))(low, high)
    assert ((got >= low[None]) & (got <= high[None])).all()
    np.testing.assert_array_equal(got[0], low)
    np.testing.assert_array_equal(got[-1], high)
    widest = envs.RescaleAction(BoxEnv(-3e38, 3e38), bound)
    np.testing.assert_array_equal(sent(widest, jnp.zeros((1, 2))), 0.0)


@pytest.mark.parametrize("bound", ["clip", "tanh"])
def test_random_policy_covers_the_box_uniformly(bound):
    def send(key):
        env = envs.RescaleAction(BoxEnv(LOW, HIGH), bound)
        action = rollout.random_policy(env.action_space).apply(
            None, jnp.zeros((4096, 2)), (), key
        )
        return action.action, sent(env, action.action)

    action, got = jax.jit(send)(jax.random.key(0))
    assert np.isfinite(action).all()
    share = np.sort((np.asarray(got) - LOW) / (HIGH - LOW), axis=0)
    # Kolmogorov-Smirnov at 4096 draws: 1.95 / sqrt(4096) = 0.03 is exceeded by chance
    # once in a thousand times; the key is fixed.
    even = np.linspace(0.0, 1.0, 4096)[:, None]
    assert np.abs(share - even).max() < 0.03


def test_recorded_action_is_what_the_policy_chose():
    trajectory = collect("all")
    # The case repeats an action until an ending, and shows it twice in two frames.
    action, shown = trajectory.action, trajectory.next_obs["obs"]["twice"][:, :, -1]
    assert (np.abs(action) <= 1.0).all()
    np.testing.assert_allclose(
        shown, 2.0 * (-2.0 + 2.5 * (action + 1.0) / 2.0), atol=2e-6
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("drawn", [-1.0, 1.0])
def test_tanh_space_never_draws_an_infinity(monkeypatch, dtype, drawn):
    def uniform(key, shape, dtype, *bounds):
        return jnp.full(shape, drawn, dtype)

    monkeypatch.setattr(jax.random, "uniform", uniform)
    space = TanhSpace((2,), jnp.dtype(dtype))
    sample = space.sample(jax.random.key(0))
    assert sample.dtype == dtype
    assert np.isfinite(np.asarray(sample, np.float32)).all()
    assert space.contains(sample)
    assert not space.contains(jnp.array([jnp.inf, 0.0], dtype))
    assert not hasattr(space, "low")


def test_frames_are_the_last_ones_oldest_first():
    first, steps = play(envs.FrameStack(CountEnv(min_length=9), 3))
    np.testing.assert_array_equal(first, np.zeros((3, 1)))
    # Observation n is n, and what lies before the first one is the first one, 0.
    want = np.maximum(np.arange(1, 8)[:, None] + np.arange(-2, 1), 0)
    np.testing.assert_array_equal(steps.obs[..., 0], want)


def test_frames_of_a_tree_are_stacked_leaf_by_leaf():
    env = envs.FrameStack(envs.TransformObs(BoxEnv(LOW, HIGH), observed), 2)
    state, first = env.reset(jax.random.key(0))
    obs = env.step(jax.random.key(1), state, jnp.array([0.25, 0.5])).obs
    np.testing.assert_array_equal(obs["twice"], [first["twice"][1], [0.5, 1.0]])
    np.testing.assert_array_equal(obs["first"], [first["first"][1], False])
    space = env.observation_space
    shapes = {name: part.shape for name, part in space.spaces.items()}
    assert shapes == {"twice": (2, 2), "first": (2,)}
    assert space.contains(obs)


def test_space_of_frames_has_the_bounds_of_each_frame():
    space = envs.FrameStack(BoxEnv(LOW, HIGH), 4).observation_space
    assert (space.shape, space.dtype) == ((4, 2), jnp.float32)
    np.testing.assert_array_equal(space.low, np.tile(LOW, (4, 1)))
    np.testing.assert_array_equal(space.high, np.tile(HIGH, (4, 1)))
    assert space.contains(space.sample(jax.random.key(0)))


def test_space_of_frames_of_integers_draws_each_frame():
    env = envs.TransformObs(CountEnv(), lambda obs: obs[0], envs.Discrete(3))
    space = envs.FrameStack(env, 50).observation_space
    sample = space.sample(jax.random.key(0))
    assert (
        (space.shape, space.dtype) == ((50,), jnp.int32) == (sample.shape, sample.dtype)
    )
    assert set(np.asarray(sample)) == {0, 1, 2}
    assert space.contains(sample)
    assert not space.contains(sample + 1)


@pytest.mark.parametrize("name", ["count", "CartPole-v1"])
def test_repetition_agrees_with_a_plain_loop(name):
    env, num_repeats = make_env(name), 3
    one = jax.jit(env.step)
    repeat = jax.jit(envs.ActionRepeat(env, num_repeats).step)
    endings = 0
    for seed in range(4):
        root = jax.random.key(seed)
        state, _ = env.reset(jax.random.fold_in(root, 0))
        done, n = False, 0
        while not done:
            n += 1
            key, action = jax.random.fold_in(root, n), jnp.int32(n % 2)
            got = repeat(key, state, action)
            reward, taken = np.float32(0.0), 0
            while taken < num_repeats and not done:
                want = one(jax.random.fold_in(key, taken), state, action)
                state, taken = want.state, taken + 1
                reward += np.float32(want.reward)
                done = bool(want.terminated | want.truncated)
            # Two programs: units in the last place.
            chex.assert_trees_all_close(raw(got.state), raw(state), rtol=1e-6)
            chex.assert_trees_all_close((got.obs, got.info), (want.obs, want.info))
            assert got.reward == reward
            assert got.reward.dtype == jnp.float32
            assert (got.terminated, got.truncated) == (want.terminated, want.truncated)
            endings += done and taken < num_repeats
    assert endings > 0


def test_observation_is_what_fn_makes_of_it():
    first, steps = play(envs.TransformObs(CountEnv(min_length=9), observed))
    assert (first["twice"], first["first"]) == (0.0, False)
    np.testing.assert_array_equal(steps.obs["twice"][:, 0], 2.0 * np.arange(1, 8))
    assert steps.obs["first"].all()


def test_space_of_a_transformed_observation_is_derived_or_given():
    derived = envs.TransformObs(CountEnv(), lambda obs: obs[0]).observation_space
    assert (derived.shape, derived.dtype) == ((), jnp.float32)
    assert derived.contains(jnp.float32(1e30))
    parts = envs.TransformObs(CountEnv(), observed).observation_space.spaces
    assert (parts["first"].shape, parts["first"].dtype) == ((), bool)
    given = envs.Box(0.0, 5.0, ())
    assert envs.TransformObs(CountEnv(), cube, given).observation_space == given


def test_sample_of_a_space_of_parts_draws_each():
    box = envs.Box(0.0, 1.0, (2,))
    space = envs.spaces.Composite({"a": box, "b": (envs.Discrete(3), box)})
    sample = space.sample(jax.random.key(0))
    assert space.contains(sample)
    assert (sample["a"] != sample["b"][1]).all()
    assert not space.contains({**sample, "a": sample["a"] + 1.0})


def test_reward_is_what_fn_makes_of_it():
    _, steps = play(envs.TransformReward(CountEnv(min_length=9), cube))
    np.testing.assert_array_equal(steps.reward, np.arange(1, 8) ** 3)
    env = envs.TransformReward(CountEnv(), lambda reward: reward > 0)
    state, _ = env.reset(jax.random.key(0))
    reward = env.step(jax.random.key(1), state, jnp.int32(0)).reward
    assert (reward, reward.dtype) == (1.0, jnp.float32)


def test_info_of_the_last_step_stands_beside_the_observation():
    env = envs.ObserveInfo(CountEnv(min_length=9), all_info, no_noise)
    first, steps = play(env, (2, 0, 1))
    assert first == {"obs": 0.0, "info": {"noise": -1.0, "action": -1}}
    np.testing.assert_array_equal(steps.obs["obs"][:, 0], [1, 2, 3])
    np.testing.assert_array_equal(steps.obs["info"]["action"], [2, 0, 1])
    chex.assert_trees_all_equal(steps.obs["info"], steps.info)


# Wrappers over wrappers.


def test_time_limit_counts_the_steps_it_sees():
    env = CountEnv(min_length=9)
    _, outside = play(envs.TimeLimit(envs.ActionRepeat(env, 2), 3))
    _, inside = play(envs.ActionRepeat(envs.TimeLimit(env, 3), 2))
    # Three actions of two steps each; three steps, so that the fourth is not taken.
    np.testing.assert_array_equal(outside.obs[:, 0], [2, 4, 6])
    np.testing.assert_array_equal(outside.truncated, [False, False, True])
    np.testing.assert_array_equal(outside.reward, [1 + 2, 3 + 4, 5 + 6])
    np.testing.assert_array_equal(inside.obs[:, 0], [2, 3])
    np.testing.assert_array_equal(inside.truncated, [False, True])
    np.testing.assert_array_equal(inside.reward, [1 + 2, 3])


def test_reward_is_transformed_before_or_after_the_sum():
    env = CountEnv(min_length=9)
    _, after = play(envs.TransformReward(envs.ActionRepeat(env, 2), cube), (0, 0))
    _, before = play(envs.ActionRepeat(envs.TransformReward(env, cube), 2), (0, 0))
    np.testing.assert_array_equal(after.reward, [3**3, 7**3])
    np.testing.assert_array_equal(before.reward, [1 + 2**3, 3**3 + 4**3])


def test_frames_and_info_combine_in_both_orders():
    env = CountEnv(min_length=9)
    both = envs.FrameStack(envs.ObserveInfo(env, all_info, no_noise), 2)
    beside = envs.ObserveInfo(envs.FrameStack(env, 2), all_info, no_noise)
    (_, both), (_, beside) = (play(env, (2, 0, 1)) for env in (both, beside))
    np.testing.assert_array_equal(both.obs["obs"], beside.obs["obs"])
    np.testing.assert_array_equal(both.obs["info"]["action"], [[-1, 2], [2, 0], [0, 1]])
    np.testing.assert_array_equal(beside.obs["info"]["action"], [2, 0, 1])


def test_observation_is_transformed_before_or_after_stacking():
    env = CountEnv(min_length=9)
    before = envs.FrameStack(envs.TransformObs(env, lambda obs: obs + 1.0), 2)
    after = envs.TransformObs(envs.FrameStack(env, 2), lambda obs: obs.sum())
    n = np.arange(1, 4)
    np.testing.assert_array_equal(play(after, (0,) * 3)[1].obs, n + n - 1)
    np.testing.assert_array_equal(play(before, (0,) * 3)[1].obs[:, 0, 0], n)
    assert after.observation_space.shape == ()


def test_action_is_rescaled_for_all_its_repeats():
    scaled = envs.RescaleAction(BoxEnv(LOW, HIGH))
    results = []
    for env in (
        envs.ActionRepeat(scaled, 2),
        envs.RescaleAction(envs.ActionRepeat(BoxEnv(LOW, HIGH), 2)),
    ):
        state, _ = env.reset(jax.random.key(0))
        results.append(env.step(jax.random.key(1), state, jnp.ones(2)))
        assert env.action_space == envs.Box(-1.0, 1.0, (2,))
    chex.assert_trees_all_equal(*results)
    # Both steps get the upper bounds, 0.5 and 0.7.
    np.testing.assert_allclose(results[0].reward, 2 * 1.2, rtol=1e-6)

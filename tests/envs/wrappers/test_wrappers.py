"""Wrappers of single environments, compared with plain loops and closed forms."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import suite_checks
from cases import CountEnv, in_one_program, quick_jit
from flax import struct
from plain_suites import make_plain

import rollout
from rollout import envs
from rollout.envs.wrappers.actions import TanhSpace

NUM_LANES, NUM_STEPS = 16, 24


@struct.dataclass
class BoxEnv:
    """Returns its action as the observation; the bounds of actions are parameters."""

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


def count_features(obs):
    return {"twice": 2.0 * obs, "first": obs[0] > 0.5}


def cube(reward):
    return reward**3


def all_info(info):
    return info


def no_noise(state, obs):
    return {"noise": jnp.float32(-1.0), "action": jnp.int32(-1)}


def only_noise(state, obs):
    return {"noise": jnp.float32(-1.0)}


def make_all_wrappers():
    env = envs.TransformObs(envs.RescaleAction(BoxEnv()), count_features)
    env = envs.ObserveInfo(envs.TransformReward(env, cube), all_info, only_noise)
    return envs.TimeLimit(envs.ActionRepeat(envs.FrameStack(env, 2), 2), 3)


ALL_WRAPPERS = make_all_wrappers()


@functools.cache
def collect():
    """Collects a trajectory of an environment with all wrappers."""
    return suite_checks.play(envs.vectorize(ALL_WRAPPERS, NUM_LANES), NUM_STEPS)[1]


def index_tree(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def test_nested_wrappers_equal_plain_loop():
    rows = collect()
    assert 0 < rows.done.sum() < rows.done.size
    suite_checks.check_successors(rows)
    suite_checks.check_spaces(ALL_WRAPPERS, rows)

    def advance(_, key, state, action):
        result = ALL_WRAPPERS.step(key, state, action)
        ends = result.terminated, result.truncated
        return result.state, result.obs, result.reward, *ends, result.info

    plain = make_plain(ALL_WRAPPERS, lambda _, key: ALL_WRAPPERS.reset(key), advance)
    suite_checks.check_plain_loop_parity(rows, plain, atol=3e-5)


SEVEN_STEPS = CountEnv(min_length=9)  # truncates at 7
REPEATED = envs.ActionRepeat(SEVEN_STEPS, 2)
CASES = {
    **{
        f"limit_{n}": envs.TimeLimit(CountEnv(min_length=n, max_length=n), 4)
        for n in (3, 4, 9)
    },
    "frames": envs.FrameStack(SEVEN_STEPS, 3),
    "obs": envs.TransformObs(SEVEN_STEPS, count_features),
    "reward": envs.TransformReward(SEVEN_STEPS, cube),
    "flags": envs.TransformReward(SEVEN_STEPS, lambda reward: reward > 0),
    "info": envs.ObserveInfo(SEVEN_STEPS, all_info, no_noise),
    "repeat": REPEATED,
    "limit_outside": envs.TimeLimit(REPEATED, 3),
    "limit_inside": envs.ActionRepeat(envs.TimeLimit(SEVEN_STEPS, 3), 2),
    "frames_of_tree": envs.FrameStack(
        envs.TransformObs(SEVEN_STEPS, count_features), 2
    ),
    "previous": envs.wrappers.ObservePrevious(SEVEN_STEPS),
    "forced": envs.wrappers.FixedLength(CountEnv(min_length=9, limit=4), 6),
    "no_repeat": envs.wrappers.NoRepeat(SEVEN_STEPS),
    **{f"history_{n}": envs.wrappers.History(SEVEN_STEPS, n) for n in (1, 3)},
    "history_boxes": envs.wrappers.History(BoxEnv(), 2),
}
ACTIONS = np.array([2, 0, 1, 0, 0, 0, 0, 0, 0], np.int32)
BOX_ACTION = np.float32([0.1, 0.2])  # multiplied by `ACTIONS`


@functools.cache
def step_cases():
    """Returns reset observations, nine steps and results of `contains` of all cases.

    All cases run in one loop with the same keys, so that they share random numbers.
    """

    def step(states, inputs):
        key, action = inputs
        results = {}
        for name, env in CASES.items():
            is_box = isinstance(env.action_space, envs.Box)
            env_action = action * BOX_ACTION if is_box else action
            results[name] = env.step(key, states[name], env_action)
        states = {name: result.state for name, result in results.items()}
        return states, {name: x.replace(state=()) for name, x in results.items()}

    def contains_all(env, obs, next_obs):
        obs_sequence = jax.tree.map(
            lambda x, y: jnp.append(x[None], y, 0), obs, next_obs
        )
        return jax.vmap(env.observation_space.contains)(obs_sequence)

    @quick_jit
    def run(key, keys):
        reset_results = {name: env.reset(key) for name, env in CASES.items()}
        states = {name: state for name, (state, _) in reset_results.items()}
        first = {name: obs for name, (_, obs) in reset_results.items()}
        _, steps = jax.lax.scan(step, states, (keys, ACTIONS))
        is_contained = {
            x: contains_all(CASES[x], first[x], steps[x].obs) for x in CASES
        }
        return first, steps, is_contained

    key, *keys = jax.random.split(jax.random.key(0), 1 + len(ACTIONS))
    with jax.debug_key_reuse(False):
        return jax.device_get(run(key, jnp.stack(keys)))


def first_episode(name):
    """Returns the reset observation and the steps of the first episode."""
    first, steps = (results[name] for results in step_cases()[:2])
    ends = np.flatnonzero(steps.terminated | steps.truncated)
    return first, index_tree(steps, slice(ends[0] + 1))


def test_wrapped_spaces_contain_observations():
    for name, is_contained in step_cases()[-1].items():
        assert is_contained.all(), name


def test_wrapper_leaves_may_have_any_type():
    for env in (*CASES.values(), envs.RescaleAction(BoxEnv())):
        for value in (None, object(), "x", 0):
            replaced = jax.tree.map(lambda x, value=value: value, env)
            assert all(leaf is value for leaf in jax.tree.leaves(replaced))
            assert type(replaced) is type(env)


@pytest.mark.parametrize("length", [3, 4, 9])
def test_time_limit_truncates_and_keeps_both_flags(length):
    _, steps = first_episode(f"limit_{length}")
    n = np.arange(1, min(length, 4) + 1)
    np.testing.assert_array_equal(steps.obs[:, 0], n)
    np.testing.assert_array_equal(steps.truncated, n == 4)
    np.testing.assert_array_equal(steps.terminated, n == length)


LOW, HIGH = np.array([-2.0, 0.1], np.float32), np.array([0.5, 0.7], np.float32)


BOUNDS = ("clip", "tanh")
all_bounds = pytest.mark.parametrize("bound", BOUNDS)


def step_actions(env, action):
    """Returns the actions that the environment receives."""
    return jax.vmap(lambda a: env.step(jax.random.key(0), jnp.int32(0), a).obs)(action)


@functools.cache
def rescale_actions():
    """Returns actions, bounds and rescaled actions by kind of bound.

    Bounds and actions are arguments, so that XLA does not fold them as constants.
    """
    rng = np.random.default_rng(0)
    bounds = np.sort(rng.normal(size=(2, 500, 2)) * 10.0 ** rng.integers(-9, 9), axis=0)
    largest_below_one = 1.0 - np.float32(2.0**-24)
    limit_actions = np.float32(
        [-1e30, -20.0, -1.0, -largest_below_one, largest_below_one, 1.0, 20.0, 1e30]
    )
    actions = np.linspace(-4.0, 4.0, 33, dtype=np.float32)
    actions, limit_actions = (np.stack([x, x], 1) for x in (actions, limit_actions))

    def step_env(bound, low, high, action):
        return step_actions(envs.RescaleAction(BoxEnv(low, high), bound), action)

    @jax.jit
    def run(key, bounds, actions, limit_actions):
        results = {}
        for bound, policy_key in zip(BOUNDS, jax.random.split(key), strict=True):
            space = envs.RescaleAction(BoxEnv(LOW, HIGH), bound).action_space
            policy = rollout.random_policy(space)
            samples = policy.apply(None, jnp.zeros((4096, 2)), (), policy_key).action
            step_bounds = jax.vmap(functools.partial(step_env, bound), (0, 0, None), 1)
            results[bound] = {
                "mapped": step_env(bound, LOW, HIGH, actions),
                "limits": step_bounds(*bounds, limit_actions),
                "widest": step_env(bound, -3e38, 3e38, jnp.zeros((1, 2))),
                "samples": samples,
                "env_actions": step_env(bound, LOW, HIGH, samples),
            }
        return results

    bounds = tuple(np.float32(bounds))
    results = run(jax.random.key(0), bounds, actions, limit_actions)
    return actions, *bounds, jax.device_get(results)


@all_bounds
def test_action_is_rescaled_to_bounds(bound):
    action, *_, got = rescale_actions()
    squashed = np.clip(action, -1.0, 1.0) if bound == "clip" else np.tanh(action)
    want = LOW + (HIGH - LOW) * (squashed + 1.0) / 2.0
    # The tolerance covers a few float32 roundings of numbers up to 2.
    np.testing.assert_allclose(got[bound]["mapped"], want, rtol=0, atol=1e-6)


@all_bounds
def test_rounding_keeps_action_within_bounds(bound):
    _, low, high, got = rescale_actions()
    limit_actions = got[bound]["limits"]
    assert ((limit_actions >= low[None]) & (limit_actions <= high[None])).all()
    np.testing.assert_array_equal(limit_actions[0], low)
    np.testing.assert_array_equal(limit_actions[-1], high)
    np.testing.assert_array_equal(got[bound]["widest"], 0.0)


@all_bounds
def test_random_policy_is_uniform_in_the_box(bound):
    got = rescale_actions()[-1][bound]
    assert np.isfinite(got["samples"]).all()
    fraction = np.sort((got["env_actions"] - LOW) / (HIGH - LOW), axis=0)
    # Kolmogorov-Smirnov test of 4096 samples: the probability of a distance above
    # 1.95 / sqrt(4096) = 0.03 is 1/1000. The key is fixed.
    uniform = np.linspace(0.0, 1.0, 4096)[:, None]
    assert np.abs(fraction - uniform).max() < 0.03


def test_recorded_action_is_the_policy_action():
    trajectory = collect()
    # The environment repeats an action, so both frames contain twice the action.
    action, expected_obs = (
        trajectory.action,
        trajectory.next_obs["obs"]["twice"][:, :, -1],
    )
    assert (np.abs(action) <= 1.0).all()
    np.testing.assert_allclose(
        expected_obs, 2.0 * (-2.0 + 2.5 * (action + 1.0) / 2.0), atol=2e-6
    )


def test_tanh_space_samples_are_finite(monkeypatch):
    def uniform(ends, shape, dtype, *bounds):
        return jnp.full(shape, ends, dtype)  # `ends` replaces a key

    monkeypatch.setattr(jax.random, "uniform", uniform)
    dtypes = ("float32", "float16", "bfloat16")
    spaces = {dtype: TanhSpace((2,), jnp.dtype(dtype)) for dtype in dtypes}

    def sample_at(space, end):
        sample = space.sample(end)
        outside = jnp.array([jnp.inf, 0.0], sample.dtype)
        return sample, space.contains(sample), space.contains(outside)

    @jax.jit
    def run(end):
        return {dtype: sample_at(space, end) for dtype, space in spaces.items()}

    for end in (-1.0, 1.0):
        for dtype, (sample, inside, outside) in jax.device_get(run(end)).items():
            assert sample.dtype == dtype
            assert np.isfinite(sample.astype(np.float32)).all(), dtype
            assert inside, dtype
            assert not outside, dtype
    assert not hasattr(spaces["float32"], "low")


def test_frame_stack_is_ordered_oldest_first():
    first, steps = first_episode("frames")
    np.testing.assert_array_equal(first, np.zeros((3, 1)))
    # Observation n is n. The first observation, 0, fills missing frames.
    want = np.maximum(np.arange(1, 8)[:, None] + np.arange(-2, 1), 0)
    np.testing.assert_array_equal(steps.obs[..., 0], want)


def test_frame_stack_stacks_each_leaf():
    first, steps = first_episode("frames_of_tree")
    assert not first["twice"].any()
    assert not first["first"].any()
    n = np.arange(7)[:, None] + np.arange(2)
    np.testing.assert_array_equal(steps.obs["twice"][..., 0], 2.0 * n)
    np.testing.assert_array_equal(steps.obs["first"], n > 0)
    space = CASES["frames_of_tree"].observation_space
    shapes = {name: part.shape for name, part in space.spaces.items()}
    assert shapes == {"twice": (2, 1), "first": (2,)}


BOX = envs.Box(0.0, 1.0, (2,))
INDEX = envs.TransformObs(CountEnv(), lambda obs: obs[0], envs.Discrete(3))
SPACES = {
    "boxes": envs.FrameStack(BoxEnv(LOW, HIGH), 4).observation_space,
    "integers": envs.FrameStack(INDEX, 50).observation_space,
    "parts": envs.spaces.Composite({"a": BOX, "b": (envs.Discrete(3), BOX)}),
}


def test_composite_spaces_contain_samples_only():
    def sample_space(space, key):
        sample = space.sample(key)
        outside = jax.tree.map(lambda x: x + 1, sample)
        return sample, space.contains(sample), space.contains(outside)

    samples = in_one_program(sample_space, SPACES)
    assert all(sample[1:] == (True, False) for sample in samples.values())
    boxes, integers = SPACES["boxes"], SPACES["integers"]
    assert (boxes.shape, boxes.dtype) == ((4, 2), jnp.float32)
    np.testing.assert_array_equal(boxes.low, np.tile(LOW, (4, 1)))
    np.testing.assert_array_equal(boxes.high, np.tile(HIGH, (4, 1)))
    # Frames and parts are sampled independently.
    for frames in (integers, samples["integers"][0]):
        assert (frames.shape, frames.dtype) == ((50,), jnp.int32)
    assert set(samples["integers"][0]) == {0, 1, 2}
    assert (samples["parts"][0]["a"] != samples["parts"][0]["b"][1]).all()


def test_action_repeat_uses_separate_keys():
    _, steps = first_episode("repeat")
    keys = jax.random.split(jax.random.key(0), 1 + len(ACTIONS))[1:]
    sample_noise = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1)))
    # The fourth action is applied once, because the episode ends after seven steps.
    np.testing.assert_array_equal(steps.info["noise"][:3], sample_noise(keys)[:3])
    np.testing.assert_array_equal(steps.obs[:, 0], [2, 4, 6, 7])
    assert steps.reward.dtype == jnp.float32


def test_transform_obs_applies_fn():
    first, steps = first_episode("obs")
    assert (first["twice"], first["first"]) == (0.0, False)
    np.testing.assert_array_equal(steps.obs["twice"][:, 0], 2.0 * np.arange(1, 8))
    assert steps.obs["first"].all()


def test_transformed_observation_space():
    derived = envs.TransformObs(CountEnv(), lambda obs: obs[0]).observation_space
    assert (derived.shape, derived.dtype) == ((), jnp.float32)
    assert derived.contains(jnp.float32(1e30))
    parts = envs.TransformObs(CountEnv(), count_features).observation_space.spaces
    assert (parts["first"].shape, parts["first"].dtype) == ((), bool)
    space = envs.Box(0.0, 5.0, ())
    assert envs.TransformObs(CountEnv(), cube, space).observation_space == space


def test_transform_reward_applies_fn():
    np.testing.assert_array_equal(
        first_episode("reward")[1].reward, np.arange(1, 8) ** 3
    )
    reward = first_episode("flags")[1].reward
    assert (reward == 1.0).all()
    assert reward.dtype == jnp.float32


def test_observe_info_adds_info_to_observation():
    first, steps = first_episode("info")
    assert first == {"obs": 0.0, "info": {"noise": -1.0, "action": -1}}
    np.testing.assert_array_equal(steps.obs["obs"][:, 0], np.arange(1, 8))
    np.testing.assert_array_equal(steps.obs["info"]["action"][:3], [2, 0, 1])
    chex.assert_trees_all_equal(steps.obs["info"], steps.info)


def test_observe_previous_adds_action_and_reward():
    first, steps = first_episode("previous")
    assert first == {"obs": 0.0, "action": 0, "reward": 0.0, "first": True}
    np.testing.assert_array_equal(steps.obs["action"], ACTIONS[:7])
    np.testing.assert_array_equal(steps.obs["reward"], np.arange(1, 8))
    assert not steps.obs["first"].any()


@pytest.mark.parametrize("name", ["history_1", "history_3", "history_boxes"])
def test_history_equals_plain_list(name):
    first, steps = first_episode(name)
    window = CASES[name].window
    actions = ACTIONS[:, None] * BOX_ACTION if "box" in name else ACTIONS
    assert first["length"] == 0
    observations = [
        first,
        *(index_tree(steps.obs, n) for n in range(len(steps.reward))),
    ]
    for n, obs in enumerate(observations):
        length = min(window, n)
        assert obs["length"] == length
        for name, values in (("actions", actions), ("rewards", steps.reward)):
            np.testing.assert_array_equal(obs[name][:length], values[n - length : n])
            assert not obs[name][length:].any()


def test_no_repeat_masks_previous_actions():
    first, steps = first_episode("no_repeat")
    np.testing.assert_array_equal(steps.obs["obs"][:, 0], np.arange(1, 8))
    masks = [first["action_mask"], *steps.obs["action_mask"]]
    for n, mask in enumerate(masks):
        assert mask.tolist() == [x not in ACTIONS[:n] for x in range(3)]


def test_no_repeat_counts_actions_from_their_start():
    @struct.dataclass
    class Items(CountEnv):
        """Its actions are the items 5, 6 and 7; the first observation is item 5."""

        action_space = envs.Discrete(3, start=5)
        observation_space = envs.spaces.Dict({"item": action_space})

        def reset(self, key):
            return super().reset(key)[0], {"item": jnp.int32(5)}

        def step(self, key, state, action):
            return super().step(key, state, action).replace(obs={"item": action})

    env = envs.wrappers.NoRepeat(Items())

    @quick_jit
    def play(key):
        state, obs = env.reset(key)
        step = env.step(key, state, jnp.int32(7))
        return obs["action_mask"], step.obs["action_mask"]

    first, second = play(jax.random.key(0))
    assert first.tolist() == [False, True, True]
    assert second.tolist() == [False, True, False]


def test_fixed_length_continues_after_termination():
    _, steps = first_episode("forced")
    assert not steps.terminated.any()
    assert steps.truncated.tolist() == [*5 * [False], True]
    assert steps.info["left"].tolist() == [*3 * [False], *3 * [True]]
    np.testing.assert_array_equal(steps.reward, np.arange(1, 7))


def test_time_limit_counts_wrapped_steps():
    _, limit_outside = first_episode("limit_outside")
    _, limit_inside = first_episode("limit_inside")
    # The outer limit counts 3 actions of 2 steps. The inner limit counts 3 steps.
    np.testing.assert_array_equal(limit_outside.obs[:, 0], [2, 4, 6])
    np.testing.assert_array_equal(limit_outside.truncated, [False, False, True])
    np.testing.assert_array_equal(limit_outside.reward, [1 + 2, 3 + 4, 5 + 6])
    np.testing.assert_array_equal(limit_inside.obs[:, 0], [2, 3])
    np.testing.assert_array_equal(limit_inside.truncated, [False, True])
    np.testing.assert_array_equal(limit_inside.reward, [1 + 2, 3])

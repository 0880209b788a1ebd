"""Each wrapper against a plain loop or a closed form; properties of all of them."""

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


def only_noise(state, obs):
    return {"noise": jnp.float32(-1.0)}


def stack_all():
    env = envs.TransformObs(envs.RescaleAction(BoxEnv()), observed)
    env = envs.ObserveInfo(envs.TransformReward(env, cube), all_info, only_noise)
    return envs.TimeLimit(envs.ActionRepeat(envs.FrameStack(env, 2), 2), 3)


ALL = stack_all()


@functools.cache
def collect():
    """The trajectory of every wrapper at once."""
    return suite_checks.play(envs.vectorize(ALL, NUM_LANES), NUM_STEPS)[1]


def at(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def test_rows_agree_with_a_plain_loop_and_are_in_the_spaces():
    rows = collect()
    assert 0 < rows.done.sum() < rows.done.size
    suite_checks.check_successors(rows)
    suite_checks.check_spaces(ALL, rows)

    def advance(_, key, state, action):
        result = ALL.step(key, state, action)
        ends = result.terminated, result.truncated
        return result.state, result.obs, result.reward, *ends, result.info

    plain = make_plain(ALL, lambda _, key: ALL.reset(key), advance)
    suite_checks.check_plain_loop_parity(rows, plain, atol=3e-5)


# Each wrapper alone.


SEVEN = CountEnv(min_length=9)  # its own limit is 7
REPEATED = envs.ActionRepeat(SEVEN, 2)
PLAYED = {
    **{
        f"limit {n}": envs.TimeLimit(CountEnv(min_length=n, max_length=n), 4)
        for n in (3, 4, 9)
    },
    "frames": envs.FrameStack(SEVEN, 3),
    "obs": envs.TransformObs(SEVEN, observed),
    "reward": envs.TransformReward(SEVEN, cube),
    "flags": envs.TransformReward(SEVEN, lambda reward: reward > 0),
    "info": envs.ObserveInfo(SEVEN, all_info, no_noise),
    "repeat": REPEATED,
    "limit outside": envs.TimeLimit(REPEATED, 3),
    "limit inside": envs.ActionRepeat(envs.TimeLimit(SEVEN, 3), 2),
    "frames of a tree": envs.FrameStack(envs.TransformObs(SEVEN, observed), 2),
    "previous": envs.wrappers.ObservePrevious(SEVEN),
    "forced": envs.wrappers.FixedLength(CountEnv(min_length=9, limit=4), 6),
    "no repeat": envs.wrappers.NoRepeat(SEVEN),
    **{f"history {n}": envs.wrappers.History(SEVEN, n) for n in (1, 3)},
    "history of boxes": envs.wrappers.History(BoxEnv(), 2),
}
ACTIONS = np.array([2, 0, 1, 0, 0, 0, 0, 0, 0], np.int32)
BOX_ACTION = np.float32([0.1, 0.2])  # times those


@functools.cache
def played():
    """Nine steps of each, and whether the spaces have what is shown.

    Side by side in one loop, with the same keys, so that one draw serves all.
    """

    def step(states, given):
        key, action = given
        results = {}
        for name, env in PLAYED.items():
            is_box = isinstance(env.action_space, envs.Box)
            sent = action * BOX_ACTION if is_box else action
            results[name] = env.step(key, states[name], sent)
        states = {name: result.state for name, result in results.items()}
        return states, {name: x.replace(state=()) for name, x in results.items()}

    def contained(env, obs, after):
        every = jax.tree.map(lambda x, y: jnp.append(x[None], y, 0), obs, after)
        return jax.vmap(env.observation_space.contains)(every)

    @quick_jit
    def run(key, keys):
        begun = {name: env.reset(key) for name, env in PLAYED.items()}
        states = {name: state for name, (state, _) in begun.items()}
        first = {name: obs for name, (_, obs) in begun.items()}
        _, steps = jax.lax.scan(step, states, (keys, ACTIONS))
        inside = {x: contained(PLAYED[x], first[x], steps[x].obs) for x in PLAYED}
        return first, steps, inside

    key, *keys = jax.random.split(jax.random.key(0), 1 + len(ACTIONS))
    with jax.debug_key_reuse(False):
        return jax.device_get(run(key, jnp.stack(keys)))


def play(name):
    """One episode: what it showed first, and its steps."""
    first, steps = (found[name] for found in played()[:2])
    ends = np.flatnonzero(steps.terminated | steps.truncated)
    return first, at(steps, slice(ends[0] + 1))


def test_observations_are_in_the_spaces_of_the_wrappers():
    assert {name for name, inside in played()[-1].items() if not inside.all()} == set()


def test_leaves_of_a_wrapper_may_be_replaced_by_anything():
    for env in (*PLAYED.values(), envs.RescaleAction(BoxEnv())):
        for value in (None, object(), "x", 0):
            replaced = jax.tree.map(lambda x, value=value: value, env)
            assert all(leaf is value for leaf in jax.tree.leaves(replaced))
            assert type(replaced) is type(env)


@pytest.mark.parametrize("length", [3, 4, 9])
def test_time_limit_truncates_and_keeps_both_flags(length):
    _, steps = play(f"limit {length}")
    n = np.arange(1, min(length, 4) + 1)
    np.testing.assert_array_equal(steps.obs[:, 0], n)
    np.testing.assert_array_equal(steps.truncated, n == 4)
    np.testing.assert_array_equal(steps.terminated, n == length)


LOW, HIGH = np.array([-2.0, 0.1], np.float32), np.array([0.5, 0.7], np.float32)


BOUNDS = ("clip", "tanh")
each_bound = pytest.mark.parametrize("bound", BOUNDS)


def sent(env, action):
    """What reaches the environment, which shows it."""
    return jax.vmap(lambda a: env.step(jax.random.key(0), jnp.int32(0), a).obs)(action)


@functools.cache
def rescaled():
    """Actions, boxes and what is sent, by bound; XLA folds no arguments."""
    rng = np.random.default_rng(0)
    ends = np.sort(rng.normal(size=(2, 500, 2)) * 10.0 ** rng.integers(-9, 9), axis=0)
    below = 1.0 - np.float32(2.0**-24)
    near = np.float32([-1e30, -20.0, -1.0, -below, below, 1.0, 20.0, 1e30])
    even = np.linspace(-4.0, 4.0, 33, dtype=np.float32)
    action, near = (np.stack([x, x], axis=1) for x in (even, near))

    def send(bound, low, high, action):
        return sent(envs.RescaleAction(BoxEnv(low, high), bound), action)

    @jax.jit
    def both(key, ends, action, near):
        found = {}
        for bound, own in zip(BOUNDS, jax.random.split(key), strict=True):
            space = envs.RescaleAction(BoxEnv(LOW, HIGH), bound).action_space
            policy = rollout.random_policy(space)
            drawn = policy.apply(None, jnp.zeros((4096, 2)), (), own).action
            each = jax.vmap(functools.partial(send, bound), (0, 0, None), 1)
            found[bound] = {
                "mapped": send(bound, LOW, HIGH, action),
                "near": each(*ends, near),
                "widest": send(bound, -3e38, 3e38, jnp.zeros((1, 2))),
                "drawn": drawn,
                "sent": send(bound, LOW, HIGH, drawn),
            }
        return found

    ends = tuple(np.float32(ends))
    return action, *ends, jax.device_get(both(jax.random.key(0), ends, action, near))


@each_bound
def test_action_is_mapped_to_the_bounds(bound):
    action, *_, got = rescaled()
    squashed = np.clip(action, -1.0, 1.0) if bound == "clip" else np.tanh(action)
    want = LOW + (HIGH - LOW) * (squashed + 1.0) / 2.0
    # A few roundings of numbers of at most 2, in float32.
    np.testing.assert_allclose(got[bound]["mapped"], want, rtol=0, atol=1e-6)


@each_bound
def test_action_never_leaves_the_bounds_by_rounding(bound):
    _, low, high, got = rescaled()
    near = got[bound]["near"]
    assert ((near >= low[None]) & (near <= high[None])).all()
    np.testing.assert_array_equal(near[0], low)
    np.testing.assert_array_equal(near[-1], high)
    np.testing.assert_array_equal(got[bound]["widest"], 0.0)


@each_bound
def test_random_policy_covers_the_box_uniformly(bound):
    got = rescaled()[-1][bound]
    assert np.isfinite(got["drawn"]).all()
    share = np.sort((got["sent"] - LOW) / (HIGH - LOW), axis=0)
    # Kolmogorov-Smirnov at 4096 draws: 1.95 / sqrt(4096) = 0.03 is exceeded by chance
    # once in a thousand times; the key is fixed.
    even = np.linspace(0.0, 1.0, 4096)[:, None]
    assert np.abs(share - even).max() < 0.03


def test_recorded_action_is_what_the_policy_chose():
    trajectory = collect()
    # The case repeats an action until an ending, and shows it twice in two frames.
    action, shown = trajectory.action, trajectory.next_obs["obs"]["twice"][:, :, -1]
    assert (np.abs(action) <= 1.0).all()
    np.testing.assert_allclose(
        shown, 2.0 * (-2.0 + 2.5 * (action + 1.0) / 2.0), atol=2e-6
    )


def test_tanh_space_never_draws_an_infinity(monkeypatch):
    def uniform(ends, shape, dtype, *bounds):
        return jnp.full(shape, ends, dtype)  # in place of a key

    monkeypatch.setattr(jax.random, "uniform", uniform)
    kinds = ("float32", "float16", "bfloat16")
    spaces = {dtype: TanhSpace((2,), jnp.dtype(dtype)) for dtype in kinds}

    def draw(space, end):
        sample = space.sample(end)
        beyond = jnp.array([jnp.inf, 0.0], sample.dtype)
        return sample, space.contains(sample), space.contains(beyond)

    @jax.jit
    def every(end):
        return {dtype: draw(space, end) for dtype, space in spaces.items()}

    for end in (-1.0, 1.0):
        for dtype, (sample, inside, beyond) in jax.device_get(every(end)).items():
            assert sample.dtype == dtype
            assert np.isfinite(sample.astype(np.float32)).all(), dtype
            assert inside, dtype
            assert not beyond, dtype
    assert not hasattr(spaces["float32"], "low")


def test_frames_are_the_last_ones_oldest_first():
    first, steps = play("frames")
    np.testing.assert_array_equal(first, np.zeros((3, 1)))
    # Observation n is n, and what lies before the first one is the first one, 0.
    want = np.maximum(np.arange(1, 8)[:, None] + np.arange(-2, 1), 0)
    np.testing.assert_array_equal(steps.obs[..., 0], want)


def test_frames_of_a_tree_are_stacked_leaf_by_leaf():
    first, steps = play("frames of a tree")
    assert not first["twice"].any()
    assert not first["first"].any()
    n = np.arange(7)[:, None] + np.arange(2)
    np.testing.assert_array_equal(steps.obs["twice"][..., 0], 2.0 * n)
    np.testing.assert_array_equal(steps.obs["first"], n > 0)
    space = PLAYED["frames of a tree"].observation_space
    shapes = {name: part.shape for name, part in space.spaces.items()}
    assert shapes == {"twice": (2, 1), "first": (2,)}


BOX = envs.Box(0.0, 1.0, (2,))
INDEX = envs.TransformObs(CountEnv(), lambda obs: obs[0], envs.Discrete(3))
SPACES = {
    "boxes": envs.FrameStack(BoxEnv(LOW, HIGH), 4).observation_space,
    "integers": envs.FrameStack(INDEX, 50).observation_space,
    "parts": envs.spaces.Composite({"a": BOX, "b": (envs.Discrete(3), BOX)}),
}


def test_spaces_of_frames_and_parts_have_what_they_draw_and_nothing_beyond():
    def draw(space, key):
        sample = space.sample(key)
        beyond = jax.tree.map(lambda x: x + 1, sample)
        return sample, space.contains(sample), space.contains(beyond)

    drawn = in_one_program(draw, SPACES)
    assert all(found[1:] == (True, False) for found in drawn.values())
    boxes, integers = SPACES["boxes"], SPACES["integers"]
    assert (boxes.shape, boxes.dtype) == ((4, 2), jnp.float32)
    np.testing.assert_array_equal(boxes.low, np.tile(LOW, (4, 1)))
    np.testing.assert_array_equal(boxes.high, np.tile(HIGH, (4, 1)))
    # Frames and parts are sampled independently.
    for each in (integers, drawn["integers"][0]):
        assert (each.shape, each.dtype) == ((50,), jnp.int32)
    assert set(drawn["integers"][0]) == {0, 1, 2}
    assert (drawn["parts"][0]["a"] != drawn["parts"][0]["b"][1]).all()


def test_repeated_steps_have_keys_of_their_own():
    _, steps = play("repeat")
    keys = jax.random.split(jax.random.key(0), 1 + len(ACTIONS))[1:]
    draw = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1)))
    # The fourth action is taken once: the episode ends after seven steps.
    np.testing.assert_array_equal(steps.info["noise"][:3], draw(keys)[:3])
    np.testing.assert_array_equal(steps.obs[:, 0], [2, 4, 6, 7])
    assert steps.reward.dtype == jnp.float32


def test_observation_is_what_fn_makes_of_it():
    first, steps = play("obs")
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


def test_reward_is_what_fn_makes_of_it():
    np.testing.assert_array_equal(play("reward")[1].reward, np.arange(1, 8) ** 3)
    reward = play("flags")[1].reward
    assert (reward == 1.0).all()
    assert reward.dtype == jnp.float32


def test_info_of_the_last_step_stands_beside_the_observation():
    first, steps = play("info")
    assert first == {"obs": 0.0, "info": {"noise": -1.0, "action": -1}}
    np.testing.assert_array_equal(steps.obs["obs"][:, 0], np.arange(1, 8))
    np.testing.assert_array_equal(steps.obs["info"]["action"][:3], [2, 0, 1])
    chex.assert_trees_all_equal(steps.obs["info"], steps.info)


def test_previous_action_and_reward_are_in_view():
    first, steps = play("previous")
    assert first == {"obs": 0.0, "action": 0, "reward": 0.0, "first": True}
    np.testing.assert_array_equal(steps.obs["action"], ACTIONS[:7])
    np.testing.assert_array_equal(steps.obs["reward"], np.arange(1, 8))
    assert not steps.obs["first"].any()


@pytest.mark.parametrize("name", ["history 1", "history 3", "history of boxes"])
def test_history_is_that_of_a_plain_list(name):
    first, steps = play(name)
    window = PLAYED[name].window
    actions = ACTIONS[:, None] * BOX_ACTION if "box" in name else ACTIONS
    assert first["length"] == 0
    shown = [first, *(at(steps.obs, n) for n in range(len(steps.reward)))]
    for n, obs in enumerate(shown):
        length = min(window, n)
        assert obs["length"] == length
        for name, values in (("actions", actions), ("rewards", steps.reward)):
            np.testing.assert_array_equal(obs[name][:length], values[n - length : n])
            assert not obs[name][length:].any()


def test_no_repeat_masks_the_actions_of_the_episode():
    first, steps = play("no repeat")
    np.testing.assert_array_equal(steps.obs["obs"][:, 0], np.arange(1, 8))
    masks = [first["action_mask"], *steps.obs["action_mask"]]
    for n, mask in enumerate(masks):
        assert mask.tolist() == [x not in ACTIONS[:n] for x in range(3)]


def test_forced_length_goes_on_after_the_end():
    _, steps = play("forced")
    assert not steps.terminated.any()
    assert steps.truncated.tolist() == [*5 * [False], True]
    assert steps.info["left"].tolist() == [*3 * [False], *3 * [True]]
    np.testing.assert_array_equal(steps.reward, np.arange(1, 7))


# Wrappers over wrappers.


def test_time_limit_counts_the_steps_it_sees():
    _, outside = play("limit outside")
    _, inside = play("limit inside")
    # Three actions of two steps each; three steps, so that the fourth is not taken.
    np.testing.assert_array_equal(outside.obs[:, 0], [2, 4, 6])
    np.testing.assert_array_equal(outside.truncated, [False, False, True])
    np.testing.assert_array_equal(outside.reward, [1 + 2, 3 + 4, 5 + 6])
    np.testing.assert_array_equal(inside.obs[:, 0], [2, 3])
    np.testing.assert_array_equal(inside.truncated, [False, True])
    np.testing.assert_array_equal(inside.reward, [1 + 2, 3])

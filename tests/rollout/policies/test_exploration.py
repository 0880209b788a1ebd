"""Exploration: how often, how much, which actions, and over episode ends."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CountEnv, quick_jit

import rollout
from rollout import envs
from rollout.policies import (
    EpsilonGreedy,
    GaussianNoise,
    LinearSchedule,
    OrnsteinUhlenbeck,
    RandomWarmup,
)

NUM_STEPS = 40  # at least five episodes of at most 7 steps in every lane
NUM_LANES = 8
NUM_DRAWS = 20_000
DISCRETE = envs.Discrete(5)
BOX = envs.Box(-1.0, 1.0, (2,))


FREE = envs.Box(-jnp.inf, jnp.inf, (2,))


def constant_policy(value, space):
    def act(params, obs, key):
        return jnp.full((num_lanes(obs), *space.shape), value, space.dtype)

    return rollout.stateless_policy(act)


def num_lanes(obs):
    return jax.tree.leaves(obs)[0].shape[0]


def apply(policy, obs, seed=0, state=None):
    """One step of a policy, jitted; without a state at the start of an episode."""
    state = policy.init(num_lanes(obs)) if state is None else state
    return quick_jit(policy.apply)(None, obs, state, jax.random.key(seed))


def assert_uniform(action, n):
    count = np.bincount(action, minlength=n)
    assert len(count) == n
    expected = len(action) / n
    # Chi-squared with n - 1 degrees of freedom: mean n - 1, variance 2 (n - 1); five
    # standard deviations and room for the skew at small n.
    limit = n - 1 + 5 * np.sqrt(2 * n) + 10
    assert ((count - expected) ** 2 / expected).sum() < limit


def first_allowed(obs):
    """Allows action 0 only, and every action in lanes whose episode just began."""
    return (obs == 0) | (jnp.arange(DISCRETE.n) == 0)[None]


# 32 is a power of two, so that no step of the schedule is rounded.
decay = optax.linear_schedule(1.0, 0.0, 32)
halt = optax.piecewise_constant_schedule(1.0, {10: 0.0})
greedy = constant_policy(2, DISCRETE)
still = constant_policy(0.0, BOX)
free = constant_policy(0.0, FREE)
upper = constant_policy(1.0, BOX)  # a random entry of the box is below 1


def every_fifth(step):
    return jnp.where(step % 5 == 2, 1.0, 0.0)


def counting_policy(space):
    """Counts the steps of the episode, and records its observations in the extras."""

    def act(params, obs, state, key):
        action = jnp.zeros((num_lanes(obs), *space.shape), space.dtype)
        words = jax.random.key_data(key)[None]
        words = jnp.broadcast_to(words, (num_lanes(obs), 2))
        return action, state + 1, {"count": state, "words": words}

    return rollout.recurrent_policy(act, lambda n: jnp.zeros((n,), jnp.int32))


WRAPS = {
    "epsilon": (lambda p: EpsilonGreedy(p, DISCRETE, 0.5), DISCRETE),
    "epsilon decay": (
        lambda p: EpsilonGreedy(p, DISCRETE, decay),
        DISCRETE,
    ),
    "warmup": (lambda p: RandomWarmup(p, DISCRETE, 20), DISCRETE),
    "gaussian": (lambda p: GaussianNoise(p, BOX, 0.5), BOX),
    "ornstein": (lambda p: OrnsteinUhlenbeck(p, BOX, decay), BOX),
}
epsilon_masked = EpsilonGreedy(greedy, DISCRETE, decay, action_mask_fn=first_allowed)
POLICIES = {
    "epsilon": EpsilonGreedy(greedy, DISCRETE, 0.5),
    "epsilon masked": epsilon_masked,
    "epsilon every fifth": EpsilonGreedy(upper, BOX, every_fifth),
    "warmup": RandomWarmup(upper, BOX, 10),
    "warmup masked": RandomWarmup(
        epsilon_masked, DISCRETE, 10, action_mask_fn=first_allowed
    ),
    "gaussian": GaussianNoise(free, FREE, 1.0),
    "gaussian decay": GaussianNoise(free, FREE, decay),
    "ornstein": OrnsteinUhlenbeck(free, FREE, 0.3, theta=0.4, dt=0.5),
    # θ dt = 1: no memory is left, so that the noise of every step stands by itself.
    "white": OrnsteinUhlenbeck(free, FREE, 1.0, theta=1.0, dt=1.0),
    "white decay": OrnsteinUhlenbeck(free, FREE, decay, theta=1.0, dt=1.0),
    **{f"count {name}": wrap(counting_policy(s)) for name, (wrap, s) in WRAPS.items()},
}


def side_by_side(policies):
    """Applies all policies to the same observations and records what they return.

    So that one compiled collector serves all; the environment reads no action.
    """

    def act(params, obs, state, key):
        steps = {
            name: policy.apply(params, obs, state[name], key)
            for name, policy in policies.items()
        }
        state = {name: step.state for name, step in steps.items()}
        record = {name: (step.action, step.extras) for name, step in steps.items()}
        return jnp.zeros(num_lanes(obs), jnp.int32), state, record

    def init(num_envs):
        return {name: policy.init(num_envs) for name, policy in policies.items()}

    return rollout.recurrent_policy(act, init)


def make_collector(policies):
    env = envs.vectorize(CountEnv(), NUM_LANES, auto_reset="select")
    return rollout.Collector(env=env, policy=side_by_side(policies))


@functools.cache
def collect():
    """NUM_STEPS steps of every policy, in two halves: last carry and trajectory."""
    collector = make_collector(POLICIES)
    run = quick_jit(lambda carry: collector.collect_steps(carry, None, NUM_STEPS // 2))
    carry, halves = collector.init(jax.random.key(7)), []
    for _ in range(2):
        carry, half = run(carry)
        halves.append(half)
    return carry, jax.tree.map(lambda *x: np.concatenate(x), *halves)


def collected(name):
    """`[T, B, ...]` actions and extras of one policy, and `[T, B]` starts."""
    _, trajectory = collect()
    return *trajectory.extras[name], trajectory.first


# How often, how much


def draw_normal(params, obs, key):
    return jax.random.normal(key, (num_lanes(obs), 2))


NARROW = envs.Box(jnp.array([-0.1, -2.0]), jnp.array([0.2, 0.5]), (2,))
near = constant_policy(0.3, BOX)
noisy = GaussianNoise(rollout.stateless_policy(draw_normal), FREE, 1.0)
SAMPLED = {
    "epsilon": EpsilonGreedy(greedy, DISCRETE, 0.3),
    "epsilon 0": EpsilonGreedy(greedy, DISCRETE, 0.0),
    "epsilon 1": EpsilonGreedy(greedy, DISCRETE, 1),
    "epsilon in a box": EpsilonGreedy(upper, BOX, 0.5),
    "gaussian": GaussianNoise(constant_policy(3.0, FREE), FREE, 0.7),
    "gaussian clipped": GaussianNoise(still, NARROW, 1.0),
    "ornstein clipped": OrnsteinUhlenbeck(still, NARROW, 1.0, dt=1.0),
    "gaussian 0": GaussianNoise(near, BOX, 0),
    "ornstein 0": OrnsteinUhlenbeck(near, BOX, 0),
    "noise on noise on noise": GaussianNoise(noisy, FREE, 1.0),
}


@functools.cache
def draw_all():
    """The first actions of all of `SAMPLED`, in one program."""
    decision = apply(side_by_side(SAMPLED), np.zeros((NUM_DRAWS, 1), np.float32))
    return {name: np.asarray(action) for name, (action, _) in decision.extras.items()}


@pytest.mark.slow
def test_epsilon_is_the_probability_of_a_uniform_action():
    action = draw_all()["epsilon"]
    other = action[action != 2]
    # A random action is another one than the policy's in 4 of 5 cases.
    p = 0.3 * 4 / 5
    error = np.sqrt(p * (1 - p) / NUM_DRAWS)
    assert abs(len(other) / NUM_DRAWS - p) < 5 * error
    assert_uniform(np.searchsorted([0, 1, 3, 4], other), 4)


def test_epsilon_zero_never_explores_and_one_always_does():
    assert (draw_all()["epsilon 0"] == 2).all()
    assert_uniform(draw_all()["epsilon 1"], 5)


def test_random_box_actions_fill_the_box():
    action = draw_all()["epsilon in a box"]
    random = (action != 1.0).all(axis=1)
    assert abs(random.mean() - 0.5) < 5 * np.sqrt(0.25 / NUM_DRAWS)
    assert ((action == 1.0).all(axis=1) | random).all()  # both entries or none
    # Uniform on [-1, 1]: variance 1/3, so the mean of n has error sqrt(1 / 3 n).
    assert (np.abs(action[random].mean(axis=0)) < 5 * np.sqrt(1 / 3 / 9000)).all()
    assert (np.abs(action) <= 1.0).all()


def test_gaussian_noise_has_mean_zero_and_the_scale():
    scale = 0.7
    noise = draw_all()["gaussian"] - 3.0
    n = noise.size
    assert abs(noise.mean()) < 5 * scale / np.sqrt(n)
    # The variance of a Gaussian sample has relative error sqrt(2 / n).
    assert abs(noise.var() / scale**2 - 1) < 5 * np.sqrt(2 / n)
    assert abs(np.corrcoef(noise.T)[0, 1]) < 5 / np.sqrt(NUM_DRAWS)
    # Within one standard deviation: 68.27 %.
    p = 0.6827
    within = (np.abs(noise) < scale).mean()
    assert abs(within - p) < 5 * np.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("name", ["gaussian clipped", "ornstein clipped"])
def test_noisy_action_is_clipped_to_the_bounds(name):
    action = draw_all()[name]
    np.testing.assert_array_equal(action.min(axis=0), np.float32([-0.1, -2.0]))
    np.testing.assert_array_equal(action.max(axis=0), np.float32([0.2, 0.5]))
    assert len(np.unique(action)) > 100  # and between them


def test_scale_zero_leaves_the_action():
    for name in ("gaussian 0", "ornstein 0"):
        np.testing.assert_array_equal(draw_all()[name], np.float32(0.3))


# Over episode ends


def test_ornstein_uhlenbeck_is_the_loop_that_restarts_with_each_episode():
    action, _, first = collected("ornstein")
    # With scale 1 the other wrapper's actions are the Gaussians themselves.
    normal = collected("gaussian")[0]
    theta, dt, scale = 0.4, 0.5, 0.3
    x = np.zeros((NUM_LANES, 2))
    for t in range(NUM_STEPS):
        x[first[t]] = 0.0
        x = x - theta * x * dt + scale * np.sqrt(dt) * normal[t]
        # float32 against float64 over at most seven steps.
        np.testing.assert_allclose(action[t], x, rtol=1e-5, atol=1e-6)


def test_schedule_of_epsilon_is_read_at_the_step_of_the_lane():
    action, _, _ = collected("epsilon every fifth")
    explored = (action != 1.0).all(axis=-1)
    step = np.arange(NUM_STEPS)[:, None]
    expected = np.broadcast_to(step % 5 == 2, explored.shape)
    np.testing.assert_array_equal(explored, expected)


@pytest.mark.parametrize("name", ["gaussian", "white"])
def test_schedule_of_scale_is_read_at_the_step_of_the_lane(name):
    scheduled, fixed = collected(f"{name} decay")[0], collected(name)[0]
    scale = np.maximum(1 - np.arange(NUM_STEPS) / 32, 0)[:, None, None]
    # Two roundings of the product against one.
    np.testing.assert_allclose(scheduled, scale * fixed, rtol=1e-6)
    assert (scheduled[32:] == 0.0).all()


def test_linear_schedule_has_the_bits_of_optax():
    steps = np.array([0, 1, 7, 99, 100, 1_000_000], np.int32)
    schedules = LinearSchedule(1.0, 0.05, 100), optax.linear_schedule(1.0, 0.05, 100)
    got, expected = quick_jit(lambda steps: [fn(steps) for fn in schedules])(steps)
    np.testing.assert_array_equal(got, expected)


def test_policies_with_equal_linear_schedules_are_equal():
    pair = [EpsilonGreedy(greedy, DISCRETE, LinearSchedule(1, 0, 9)) for _ in "ab"]
    assert pair[0] == pair[1]
    assert hash(pair[0]) == hash(pair[1])
    assert pair[0] != EpsilonGreedy(greedy, DISCRETE, LinearSchedule(1, 0, 8))


def test_each_lane_counts_its_steps_up_to_the_largest_integer():
    policy, largest = GaussianNoise(free, FREE, halt), np.iinfo(np.int32).max
    steps = np.array([0, 9, 10, largest], np.int32)
    state = policy.init(4).replace(step=rollout.types.Persistent(steps))
    decision = apply(policy, np.zeros((4, 1), np.float32), state=state)
    np.testing.assert_array_equal(
        (decision.action != 0).all(axis=1), [True, True, False, False]
    )
    np.testing.assert_array_equal(decision.state.step.value, [1, 10, 11, largest])


def test_warmup_is_random_for_the_given_number_of_steps():
    action, _, _ = collected("warmup")
    assert (action[:10] != 1.0).all()
    assert (action[10:] == 1.0).all()
    assert len(np.unique(action[:10])) == 10 * NUM_LANES * 2


@pytest.mark.parametrize("name", WRAPS)
def test_wrapped_policy_remembers_forgets_and_gives_its_extras(name):
    _, extras, _ = collected(f"count {name}")
    assert set(extras) == {"count", "words"}
    # The state of the wrapped policy goes on under the wrapper, and back to 0 with
    # the episode.
    length = collect()[1].episode_length
    np.testing.assert_array_equal(extras["count"], length - 1)


def test_wrapped_policy_gets_a_key_of_its_own_at_every_step():
    words = [collected(f"count {name}")[1]["words"][:, 0] for name in WRAPS]
    assert len(np.unique(words[0], axis=0)) == NUM_STEPS
    for other in words:  # the same in every wrapper
        np.testing.assert_array_equal(other, words[0])
    policy = GaussianNoise(counting_policy(BOX), BOX, 0.5)
    words = apply(policy, jnp.zeros((1, 1)), seed=5).extras["words"][0]
    assert (words != jax.random.key_data(jax.random.key(5))).all()


def test_what_is_drawn_does_not_depend_on_what_the_policy_draws():
    # Three independent Gaussians of variance 1; relative error sqrt(2 / n).
    noise = draw_all()["noise on noise on noise"]
    assert abs(noise.var() / 3 - 1) < 5 * np.sqrt(2 / noise.size)


# The mode


def policy_with_mode(value, mode, space):
    """Draws `value`, and has `mode` as its mode."""

    def always(value):
        def fn(params, obs, key):
            action = jnp.full((num_lanes(obs), *space.shape), value, space.dtype)
            return action, {"of": action}

        return fn

    return rollout.stateless_policy(always(value), mode_fn=always(mode))


two = policy_with_mode(2, 3, DISCRETE)
within, beyond = (policy_with_mode(0.0, mode, BOX) for mode in (0.5, 3.0))


# With their modes; by a number and by a schedule, all explore in the first step.
EXPLORING = {
    "epsilon": (EpsilonGreedy(two, DISCRETE, 1.0), 3),
    "warmup": (RandomWarmup(EpsilonGreedy(two, DISCRETE, decay), DISCRETE, 9), 3),
    "gaussian": (GaussianNoise(within, BOX, 1.0), 0.5),
    "gaussian decay": (GaussianNoise(beyond, BOX, decay), 1.0),
    "ornstein": (OrnsteinUhlenbeck(beyond, BOX, 1.0), 1.0),
    "ornstein decay": (OrnsteinUhlenbeck(within, BOX, decay), 0.5),
}


def test_mode_takes_no_random_action_has_no_noise_and_keeps_to_the_bounds():
    obs = np.zeros((1000, 1), np.float32)

    @quick_jit
    def run(key, later_key):
        found = {}
        for name, (policy, _) in EXPLORING.items():
            step = policy.apply(None, obs, policy.init(1000), key)
            found[name] = step, policy.mode(None, obs, step.state, later_key)
        return found

    found = jax.device_get(run(*jax.random.split(jax.random.key(0))))
    for name, (step, decision) in found.items():
        mode = EXPLORING[name][1]
        assert len(np.unique(step.action)) >= DISCRETE.n
        assert (decision.action == mode).all()
        assert (decision.extras["of"] == (3 if mode == 1.0 else mode)).all()
        chex.assert_trees_all_equal_shapes_and_dtypes(step, decision)


def test_mode_keeps_to_what_is_allowed():
    mask = random_mask(1000, 5, seed=3)
    policy = EpsilonGreedy(two, DISCRETE, 1.0, action_mask_fn=lambda mask: mask)
    decision = quick_jit(policy.mode)(None, mask, (), jax.random.key(0))
    action = np.asarray(decision.action)
    some = mask.any(axis=1)
    assert mask[np.arange(1000), action][some].all()
    assert (action[mask[:, 3]] == 3).all()


def test_policy_without_a_mode_has_none_when_it_explores():
    assert not EpsilonGreedy(greedy, DISCRETE, 0.5).has_mode
    assert not EpsilonGreedy(greedy, DISCRETE, decay).has_mode
    assert not RandomWarmup(greedy, DISCRETE, 3).has_mode
    assert not GaussianNoise(still, BOX, 0.5).has_mode
    assert not OrnsteinUhlenbeck(still, BOX, decay).has_mode


# Masks


def random_mask(num_lanes, n, seed):
    """Masks of every density, some of them empty."""
    rng = np.random.default_rng(seed)
    return rng.random((num_lanes, n)) < rng.random((num_lanes, 1))


def random_part(obs):
    return obs["random"]


def not_in_lane(lane):
    return lambda obs: jnp.broadcast_to(obs["lane"] != lane, (NUM_DRAWS, 5))


OBS = {
    "lane": np.arange(NUM_DRAWS)[:, None],
    "all": np.ones((NUM_DRAWS, 5), bool),
    "random": random_mask(NUM_DRAWS, 5, seed=7),
}


MASKED_POLICIES = {
    # The wrapped policies ignore the mask and sample from all actions.
    "epsilon": EpsilonGreedy(
        rollout.random_policy(DISCRETE), DISCRETE, 0.5, action_mask_fn=random_part
    ),
    "warmup": RandomWarmup(
        rollout.random_policy(DISCRETE), DISCRETE, 1, action_mask_fn=random_part
    ),
    # Two wrappers; each allows nothing in one lane.
    "twice": RandomWarmup(
        EpsilonGreedy(greedy, DISCRETE, 0.5, action_mask_fn=not_in_lane(1)),
        *(DISCRETE, 5),
        action_mask_fn=not_in_lane(2),
    ),
    "random twice": EpsilonGreedy(
        rollout.random_policy(DISCRETE, action_mask_fn=not_in_lane(3)),
        *(DISCRETE, 0.5),
        action_mask_fn=not_in_lane(0),
    ),
    "counting": EpsilonGreedy(
        counting_policy(DISCRETE), DISCRETE, 0.5, action_mask_fn=lambda obs: obs["all"]
    ),
}


@functools.cache
def draw_masked():
    """Actions and extras of all of them, in one program."""
    extras = apply(side_by_side(MASKED_POLICIES), OBS).extras
    return jax.tree.map(np.asarray, extras)


@pytest.mark.parametrize("name", ["epsilon", "warmup"])
def test_action_is_allowed_or_none_is(name):
    action, extras = draw_masked()[name]
    mask = OBS["random"]
    none = ~mask.any(axis=1)
    assert none.any()
    assert ((action >= 0) & (action < DISCRETE.n)).all()
    np.testing.assert_array_equal(extras["no_valid_action"], none)
    assert mask[np.arange(NUM_DRAWS), action][~none].all()


def test_either_of_two_wrappers_says_that_none_is_allowed():
    for name, lanes in (("twice", [1, 2]), ("random twice", [0, 3])):
        flag = draw_masked()[name][1]["no_valid_action"]
        np.testing.assert_array_equal(np.flatnonzero(flag), lanes)


def test_flag_joins_the_extras_of_the_policy():
    _, extras = draw_masked()["counting"]
    assert set(extras) == {"count", "words", "no_valid_action"}
    assert not extras["no_valid_action"].any()


def test_nested_wrappers_explore_within_the_mask_over_episode_ends():
    action, extras, first = collected("warmup masked")
    # Only the first action of an episode is free, see `first_allowed`.
    assert (action[~first] == 0).all()
    assert len(np.unique(action[:10][first[:10]])) > 2
    assert (action[32:][first[32:]] == 2).all()  # epsilon has come to 0
    assert not extras["no_valid_action"].any()


# All wrappers

NAMES = ("epsilon", "epsilon masked", "warmup masked", "gaussian decay", "ornstein")
KINDS = {name: POLICIES[name] for name in NAMES}
kinds = side_by_side(KINDS)


@functools.cache
def draw_kinds(num_lanes):
    return apply(kinds, np.zeros((num_lanes, 1), np.float32))


@pytest.mark.slow
def test_lane_draws_the_same_among_any_number_of_lanes():
    few, many = (draw_kinds(num).extras for num in (16, 1024))
    for name in KINDS:
        action, want = (np.asarray(extras[name][0]) for extras in (many, few))
        np.testing.assert_array_equal(action[:16], want)
        assert len(np.unique(want, axis=0)) > 1


def test_step_is_traced_once_and_keeps_its_state():
    obs, traces = np.zeros((16, 1), np.float32), []

    @jax.jit
    def apply(*args):
        traces.append(args)
        return kinds.apply(*args)

    state = kinds.init(16)
    for seed in range(3):
        step = apply(None, obs, state, jax.random.key(seed))
        chex.assert_trees_all_equal_shapes_and_dtypes(step.state, state)
        assert not any(x.weak_type for x in jax.tree.leaves(step))
        state = step.state
    assert len(traces) == 1


def test_no_dtype_is_promoted_in_silence():
    with jax.numpy_dtype_promotion("strict"):
        step = apply(kinds, np.zeros((16, 1), np.float32))
    chex.assert_trees_all_equal(step, draw_kinds(16))

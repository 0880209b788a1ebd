"""Tests of exploration: rates, scales, masks, modes and episode boundaries."""

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
NUM_SAMPLES = 20_000
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
    """Applies a policy to its initial state or to a given state."""
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


def mask_fn(obs):
    """Allows every action in the first step of an episode, and only action 0 later."""
    return (obs == 0) | (jnp.arange(DISCRETE.n) == 0)[None]


# 32 is a power of two: the values of the schedule are exact.
decay = optax.linear_schedule(1.0, 0.0, 32)
stop = optax.piecewise_constant_schedule(1.0, {10: 0.0})
greedy = constant_policy(2, DISCRETE)
zero = constant_policy(0.0, BOX)
free = constant_policy(0.0, FREE)
upper = constant_policy(1.0, BOX)  # a random entry of the box is below 1


def explore_each_fifth_step(step):
    return jnp.where(step % 5 == 2, 1.0, 0.0)


def counting_policy(space):
    """Returns a policy that counts the steps of the episode and records its keys."""

    def act(params, obs, state, key):
        action = jnp.zeros((num_lanes(obs), *space.shape), space.dtype)
        words = jax.random.key_data(key)[None]
        words = jnp.broadcast_to(words, (num_lanes(obs), 2))
        return action, state + 1, {"count": state, "words": words}

    return rollout.recurrent_policy(act, lambda n: jnp.zeros((n,), jnp.int32))


WRAPPERS = {
    "epsilon": (lambda p: EpsilonGreedy(p, DISCRETE, 0.5), DISCRETE),
    "epsilon decay": (
        lambda p: EpsilonGreedy(p, DISCRETE, decay),
        DISCRETE,
    ),
    "warmup": (lambda p: RandomWarmup(p, DISCRETE, 20), DISCRETE),
    "gaussian": (lambda p: GaussianNoise(p, BOX, 0.5), BOX),
    "ornstein": (lambda p: OrnsteinUhlenbeck(p, BOX, decay), BOX),
}
epsilon_masked = EpsilonGreedy(greedy, DISCRETE, decay, action_mask_fn=mask_fn)
POLICIES = {
    "epsilon": EpsilonGreedy(greedy, DISCRETE, 0.5),
    "epsilon masked": epsilon_masked,
    "epsilon every fifth": EpsilonGreedy(upper, BOX, explore_each_fifth_step),
    "warmup": RandomWarmup(upper, BOX, 10),
    "warmup masked": RandomWarmup(epsilon_masked, DISCRETE, 10, action_mask_fn=mask_fn),
    "gaussian": GaussianNoise(free, FREE, 1.0),
    "gaussian decay": GaussianNoise(free, FREE, decay),
    "ornstein": OrnsteinUhlenbeck(free, FREE, 0.3, theta=0.4, dt=0.5),
    # θ dt = 1: the process has no memory.
    "white": OrnsteinUhlenbeck(free, FREE, 1.0, theta=1.0, dt=1.0),
    "white decay": OrnsteinUhlenbeck(free, FREE, decay, theta=1.0, dt=1.0),
    **{
        f"count {name}": wrap(counting_policy(s))
        for name, (wrap, s) in WRAPPERS.items()
    },
}


def parallel_policy(policies):
    """Applies all policies to the same observations and records their steps.

    All policies share one compiled collector. The environment ignores actions.
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
    return rollout.Collector(env=env, policy=parallel_policy(policies))


@functools.cache
def collect():
    """Collects NUM_STEPS steps in two calls. Returns the last carry and all rows."""
    collector = make_collector(POLICIES)
    run = quick_jit(lambda carry: collector.collect_steps(carry, None, NUM_STEPS // 2))
    carry, halves = collector.init(jax.random.key(7)), []
    for _ in range(2):
        carry, half = run(carry)
        halves.append(half)
    return carry, jax.tree.map(lambda *x: np.concatenate(x), *halves)


def collected(name):
    """Returns actions and extras `[T, B, ...]` of one policy and starts `[T, B]`."""
    _, trajectory = collect()
    return *trajectory.extras[name], trajectory.first


def sample_normal(params, obs, key):
    return jax.random.normal(key, (num_lanes(obs), 2))


NARROW = envs.Box(jnp.array([-0.1, -2.0]), jnp.array([0.2, 0.5]), (2,))
constant = constant_policy(0.3, BOX)
noisy = GaussianNoise(rollout.stateless_policy(sample_normal), FREE, 1.0)
SAMPLED = {
    "epsilon": EpsilonGreedy(greedy, DISCRETE, 0.3),
    "epsilon 0": EpsilonGreedy(greedy, DISCRETE, 0.0),
    "epsilon 1": EpsilonGreedy(greedy, DISCRETE, 1),
    "epsilon in a box": EpsilonGreedy(upper, BOX, 0.5),
    "gaussian": GaussianNoise(constant_policy(3.0, FREE), FREE, 0.7),
    "gaussian clipped": GaussianNoise(zero, NARROW, 1.0),
    "ornstein clipped": OrnsteinUhlenbeck(zero, NARROW, 1.0, dt=1.0),
    "gaussian 0": GaussianNoise(constant, BOX, 0),
    "ornstein 0": OrnsteinUhlenbeck(constant, BOX, 0),
    "noise on noise on noise": GaussianNoise(noisy, FREE, 1.0),
}


@functools.cache
def sample_first_actions():
    """Samples the first actions of all `SAMPLED` policies in one program."""
    decision = apply(parallel_policy(SAMPLED), np.zeros((NUM_SAMPLES, 1), np.float32))
    return {name: np.asarray(action) for name, (action, _) in decision.extras.items()}


@pytest.mark.slow
def test_epsilon_is_the_rate_of_uniform_actions():
    action = sample_first_actions()["epsilon"]
    exploratory_action = action[action != 2]
    # A uniform action differs from the policy's action with probability 4/5.
    p = 0.3 * 4 / 5
    error = np.sqrt(p * (1 - p) / NUM_SAMPLES)
    assert abs(len(exploratory_action) / NUM_SAMPLES - p) < 5 * error
    assert_uniform(np.searchsorted([0, 1, 3, 4], exploratory_action), 4)


def test_epsilon_zero_is_greedy_and_one_is_uniform():
    assert (sample_first_actions()["epsilon 0"] == 2).all()
    assert_uniform(sample_first_actions()["epsilon 1"], 5)


def test_random_box_actions_fill_the_box():
    action = sample_first_actions()["epsilon in a box"]
    is_random = (action != 1.0).all(axis=1)
    assert abs(is_random.mean() - 0.5) < 5 * np.sqrt(0.25 / NUM_SAMPLES)
    assert ((action == 1.0).all(axis=1) | is_random).all()  # both entries or none
    # Uniform on [-1, 1]: variance 1/3, so the mean of n has error sqrt(1 / 3 n).
    assert (np.abs(action[is_random].mean(axis=0)) < 5 * np.sqrt(1 / 3 / 9000)).all()
    assert (np.abs(action) <= 1.0).all()


def test_gaussian_noise_has_mean_zero_and_the_given_scale():
    scale = 0.7
    noise = sample_first_actions()["gaussian"] - 3.0
    n = noise.size
    assert abs(noise.mean()) < 5 * scale / np.sqrt(n)
    # The variance of a Gaussian sample has relative error sqrt(2 / n).
    assert abs(noise.var() / scale**2 - 1) < 5 * np.sqrt(2 / n)
    assert abs(np.corrcoef(noise.T)[0, 1]) < 5 / np.sqrt(NUM_SAMPLES)
    # Within one standard deviation: 68.27 %.
    p = 0.6827
    share = (np.abs(noise) < scale).mean()
    assert abs(share - p) < 5 * np.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("name", ["gaussian clipped", "ornstein clipped"])
def test_noisy_action_is_clipped_to_the_bounds(name):
    action = sample_first_actions()[name]
    np.testing.assert_array_equal(action.min(axis=0), np.float32([-0.1, -2.0]))
    np.testing.assert_array_equal(action.max(axis=0), np.float32([0.2, 0.5]))
    assert len(np.unique(action)) > 100  # and between them


def test_scale_zero_adds_no_noise():
    for name in ("gaussian 0", "ornstein 0"):
        np.testing.assert_array_equal(sample_first_actions()[name], np.float32(0.3))


def test_ornstein_uhlenbeck_equals_a_plain_loop():
    action, _, first = collected("ornstein")
    # `GaussianNoise` with scale 1 returns the Gaussian samples.
    normal = collected("gaussian")[0]
    theta, dt, scale = 0.4, 0.5, 0.3
    x = np.zeros((NUM_LANES, 2))
    for t in range(NUM_STEPS):
        x[first[t]] = 0.0
        x = x - theta * x * dt + scale * np.sqrt(dt) * normal[t]
        # float32 against float64 over at most seven steps.
        np.testing.assert_allclose(action[t], x, rtol=1e-5, atol=1e-6)


def test_epsilon_schedule_takes_the_step_of_the_lane():
    action, _, _ = collected("epsilon every fifth")
    explored = (action != 1.0).all(axis=-1)
    step = np.arange(NUM_STEPS)[:, None]
    expected = np.broadcast_to(step % 5 == 2, explored.shape)
    np.testing.assert_array_equal(explored, expected)


@pytest.mark.parametrize("name", ["gaussian", "white"])
def test_scale_schedule_takes_the_step_of_the_lane(name):
    scheduled, fixed = collected(f"{name} decay")[0], collected(name)[0]
    scale = np.maximum(1 - np.arange(NUM_STEPS) / 32, 0)[:, None, None]
    # The products have one or two roundings.
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


def test_step_counter_saturates_per_lane():
    policy, largest = GaussianNoise(free, FREE, stop), np.iinfo(np.int32).max
    steps = np.array([0, 9, 10, largest], np.int32)
    state = policy.init(4).replace(step=rollout.types.Persistent(steps))
    decision = apply(policy, np.zeros((4, 1), np.float32), state=state)
    np.testing.assert_array_equal(
        (decision.action != 0).all(axis=1), [True, True, False, False]
    )
    np.testing.assert_array_equal(decision.state.step.value, [1, 10, 11, largest])


def test_warmup_is_random_for_num_steps():
    action, _, _ = collected("warmup")
    assert (action[:10] != 1.0).all()
    assert (action[10:] == 1.0).all()
    assert len(np.unique(action[:10])) == 10 * NUM_LANES * 2


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper_keeps_state_and_extras_of_the_policy(name):
    _, extras, _ = collected(f"count {name}")
    assert set(extras) == {"count", "words"}
    # The state continues inside the wrapper and resets with the episode.
    length = collect()[1].episode_length
    np.testing.assert_array_equal(extras["count"], length - 1)


def test_wrapped_policy_receives_a_separate_key():
    words = [collected(f"count {name}")[1]["words"][:, 0] for name in WRAPPERS]
    assert len(np.unique(words[0], axis=0)) == NUM_STEPS
    for wrapper_words in words:  # equal in every wrapper
        np.testing.assert_array_equal(wrapper_words, words[0])
    policy = GaussianNoise(counting_policy(BOX), BOX, 0.5)
    words = apply(policy, jnp.zeros((1, 1)), seed=5).extras["words"][0]
    assert (words != jax.random.key_data(jax.random.key(5))).all()


def test_noise_of_nested_wrappers_is_independent():
    # Three independent Gaussians of variance 1; relative error sqrt(2 / n).
    noise = sample_first_actions()["noise on noise on noise"]
    assert abs(noise.var() / 3 - 1) < 5 * np.sqrt(2 / noise.size)


def policy_with_mode(value, mode, space):
    """Returns a policy that samples `value` and has the mode `mode`."""

    def constant_fn(value):
        def fn(params, obs, key):
            action = jnp.full((num_lanes(obs), *space.shape), value, space.dtype)
            return action, {"action": action}

        return fn

    return rollout.stateless_policy(constant_fn(value), mode_fn=constant_fn(mode))


mode_policy = policy_with_mode(2, 3, DISCRETE)
inner_mode, outer_mode = (policy_with_mode(0.0, mode, BOX) for mode in (0.5, 3.0))


# Policies that explore in the first step, and their modes.
EXPLORING = {
    "epsilon": (EpsilonGreedy(mode_policy, DISCRETE, 1.0), 3),
    "warmup": (
        RandomWarmup(EpsilonGreedy(mode_policy, DISCRETE, decay), DISCRETE, 9),
        3,
    ),
    "gaussian": (GaussianNoise(inner_mode, BOX, 1.0), 0.5),
    "gaussian decay": (GaussianNoise(outer_mode, BOX, decay), 1.0),
    "ornstein": (OrnsteinUhlenbeck(outer_mode, BOX, 1.0), 1.0),
    "ornstein decay": (OrnsteinUhlenbeck(inner_mode, BOX, decay), 0.5),
}


def test_mode_is_clipped_and_has_no_noise():
    obs = np.zeros((1000, 1), np.float32)

    @quick_jit
    def run(key, later_key):
        results = {}
        for name, (policy, _) in EXPLORING.items():
            step = policy.apply(None, obs, policy.init(1000), key)
            results[name] = step, policy.mode(None, obs, step.state, later_key)
        return results

    results = jax.device_get(run(*jax.random.split(jax.random.key(0))))
    for name, (step, decision) in results.items():
        mode = EXPLORING[name][1]
        assert len(np.unique(step.action)) >= DISCRETE.n
        assert (decision.action == mode).all()
        assert (decision.extras["action"] == (3 if mode == 1.0 else mode)).all()
        chex.assert_trees_all_equal_shapes_and_dtypes(step, decision)


def test_mode_is_a_valid_action():
    mask = random_mask(1000, 5, seed=3)
    policy = EpsilonGreedy(mode_policy, DISCRETE, 1.0, action_mask_fn=lambda mask: mask)
    decision = quick_jit(policy.mode)(None, mask, (), jax.random.key(0))
    action = np.asarray(decision.action)
    has_valid = mask.any(axis=1)
    assert mask[np.arange(1000), action][has_valid].all()
    assert (action[mask[:, 3]] == 3).all()


def test_wrapper_has_no_mode_if_the_policy_has_none():
    assert not EpsilonGreedy(greedy, DISCRETE, 0.5).has_mode
    assert not EpsilonGreedy(greedy, DISCRETE, decay).has_mode
    assert not RandomWarmup(greedy, DISCRETE, 3).has_mode
    assert not GaussianNoise(zero, BOX, 0.5).has_mode
    assert not OrnsteinUhlenbeck(zero, BOX, decay).has_mode


def random_mask(num_lanes, n, seed):
    """Returns masks of different densities. Some are empty."""
    rng = np.random.default_rng(seed)
    return rng.random((num_lanes, n)) < rng.random((num_lanes, 1))


def random_part(obs):
    return obs["random"]


def not_in_lane(lane):
    return lambda obs: jnp.broadcast_to(obs["lane"] != lane, (NUM_SAMPLES, 5))


OBS = {
    "lane": np.arange(NUM_SAMPLES)[:, None],
    "all": np.ones((NUM_SAMPLES, 5), bool),
    "random": random_mask(NUM_SAMPLES, 5, seed=7),
}


MASKED_POLICIES = {
    # The wrapped policies ignore the mask and sample from all actions.
    "epsilon": EpsilonGreedy(
        rollout.random_policy(DISCRETE), DISCRETE, 0.5, action_mask_fn=random_part
    ),
    "warmup": RandomWarmup(
        rollout.random_policy(DISCRETE), DISCRETE, 1, action_mask_fn=random_part
    ),
    # Each of two wrappers has an empty mask in one lane.
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
def sample_masked_actions():
    """Samples actions and extras of `MASKED_POLICIES` in one program."""
    extras = apply(parallel_policy(MASKED_POLICIES), OBS).extras
    return jax.tree.map(np.asarray, extras)


@pytest.mark.parametrize("name", ["epsilon", "warmup"])
def test_action_is_valid_unless_the_mask_is_empty(name):
    action, extras = sample_masked_actions()[name]
    mask = OBS["random"]
    is_empty = ~mask.any(axis=1)
    assert is_empty.any()
    assert ((action >= 0) & (action < DISCRETE.n)).all()
    np.testing.assert_array_equal(extras["no_valid_action"], is_empty)
    assert mask[np.arange(NUM_SAMPLES), action][~is_empty].all()


def test_nested_wrappers_combine_their_flags():
    for name, lanes in (("twice", [1, 2]), ("random twice", [0, 3])):
        flag = sample_masked_actions()[name][1]["no_valid_action"]
        np.testing.assert_array_equal(np.flatnonzero(flag), lanes)


def test_flag_is_added_to_the_extras_of_the_policy():
    _, extras = sample_masked_actions()["counting"]
    assert set(extras) == {"count", "words", "no_valid_action"}
    assert not extras["no_valid_action"].any()


def test_nested_wrappers_explore_valid_actions():
    action, extras, first = collected("warmup masked")
    # `mask_fn` allows all actions in the first step of an episode.
    assert (action[~first] == 0).all()
    assert len(np.unique(action[:10][first[:10]])) > 2
    assert (action[32:][first[32:]] == 2).all()  # epsilon is 0
    assert not extras["no_valid_action"].any()


NAMES = ("epsilon", "epsilon masked", "warmup masked", "gaussian decay", "ornstein")
MIXED_POLICIES = {name: POLICIES[name] for name in NAMES}
mixed_policy = parallel_policy(MIXED_POLICIES)


@functools.cache
def sample_num_lanes(num_lanes):
    return apply(mixed_policy, np.zeros((num_lanes, 1), np.float32))


@pytest.mark.slow
def test_lane_does_not_depend_on_the_number_of_lanes():
    small_batch, large_batch = (sample_num_lanes(num).extras for num in (16, 1024))
    for name in MIXED_POLICIES:
        action, want = (
            np.asarray(extras[name][0]) for extras in (large_batch, small_batch)
        )
        np.testing.assert_array_equal(action[:16], want)
        assert len(np.unique(want, axis=0)) > 1


def test_step_is_traced_once():
    obs, traces = np.zeros((16, 1), np.float32), []

    @jax.jit
    def apply(*args):
        traces.append(args)
        return mixed_policy.apply(*args)

    state = mixed_policy.init(16)
    for seed in range(3):
        step = apply(None, obs, state, jax.random.key(seed))
        chex.assert_trees_all_equal_shapes_and_dtypes(step.state, state)
        assert not any(x.weak_type for x in jax.tree.leaves(step))
        state = step.state
    assert len(traces) == 1


def test_dtypes_are_not_promoted():
    with jax.numpy_dtype_promotion("strict"):
        step = apply(mixed_policy, np.zeros((16, 1), np.float32))
    chex.assert_trees_all_equal(step, sample_num_lanes(16))

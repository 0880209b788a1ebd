"""Spaces: what is drawn covers them evenly, bounds included."""

import types

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit
from flax import struct

import rollout
from rollout import envs
from rollout.envs import prng
from rollout.envs.suites.gymnax import from_gymnax

NUM_DRAWS = 20_000
KEY = jax.random.key(5)
INTEGERS = {
    "int32": (0, 3, jnp.int32),
    "uint8": (0, 255, jnp.uint8),
    "around zero": (-1, 1, jnp.int32),
    "five": (-2, 2, jnp.int8),
    "one": (7, 7, jnp.int32),
    "flags": (False, True, jnp.bool_),
}


def sample(space):
    draw = jax.jit(jax.vmap(space.sample))
    return np.asarray(draw(jax.random.split(jax.random.key(0), NUM_DRAWS)))


def act(space, num_envs=NUM_DRAWS):
    return actions(rollout.random_policy(space), num_envs, jax.random.key(1))


def actions(policy, num_envs, key):
    act = quick_jit(lambda obs, key: policy.apply(None, obs, (), key).action)
    return np.asarray(act(np.zeros((num_envs, 1), np.float32), key))


@pytest.mark.parametrize("draw", [sample, act])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_drawn_evenly_with_both_bounds(name, draw):
    low, high, dtype = INTEGERS[name]
    drawn = draw(envs.Box(low, high, (), jnp.dtype(dtype)))
    assert drawn.dtype == dtype
    counts = np.bincount(drawn.astype(int) - int(low), minlength=int(high) - int(low))
    n = int(high) - int(low) + 1
    assert len(counts) == n
    # Chi-squared: mean n - 1, variance 2 (n - 1); five standard deviations and room.
    chi_squared = ((counts - NUM_DRAWS / n) ** 2 / (NUM_DRAWS / n)).sum()
    assert chi_squared < n - 1 + 5 * np.sqrt(2 * n) + 10


@pytest.mark.slow
@pytest.mark.parametrize("draw", [sample, act])
@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (-(2**31), 2**31 - 1, jnp.int32),
        (0, 2**32 - 1, jnp.uint32),
        (-3e38, 3e38, jnp.float32),
    ],
)
def test_widest_ranges_are_drawn_evenly(low, high, dtype, draw):
    low, high = np.asarray(low, dtype), np.asarray(high, dtype)
    drawn = draw(envs.Box(low, high, (), jnp.dtype(dtype))).astype(np.float64)
    place = (drawn - float(low)) / (float(high) - float(low))
    assert np.isfinite(drawn).all()
    assert place.min() >= 0
    assert place.max() <= 1
    counts = np.histogram(place, 16, (0, 1))[0]
    assert ((counts - NUM_DRAWS / 16) ** 2 / (NUM_DRAWS / 16)).sum() < 15 + 5 * 5.7 + 10


def test_bounds_of_each_entry_hold():
    low, high = np.array([-1, 0, 5]), np.array([1, 0, 9])
    drawn = sample(envs.Box(low, high, (3,), jnp.dtype(jnp.int32)))
    np.testing.assert_array_equal(drawn.min(0), low)
    np.testing.assert_array_equal(drawn.max(0), high)


def test_discrete_space_starts_where_it_says():
    space = envs.Discrete(4, start=3)
    for drawn in (sample(space), act(space)):
        np.testing.assert_array_equal(np.unique(drawn), [3, 4, 5, 6])
    contained = [bool(space.contains(jnp.int32(x))) for x in (2, 3, 6, 7)]
    assert contained == [False, True, True, False]


def test_mask_counts_from_the_start_of_the_space():
    space, allowed = envs.Discrete(3, start=5), jnp.array([[True, False, True]])

    def mask(obs):
        return jnp.broadcast_to(allowed, (obs.shape[0], 3))

    policy = rollout.random_policy(space, mask_fn=mask)
    key = jax.random.key(0)
    assert set(np.unique(actions(policy, 500, key))) == {5, 7}
    wrong = rollout.stateless_policy(lambda params, obs, key: jnp.full((500,), 6))
    masked = rollout.epsilon_greedy(wrong, space, 0.0, mask_fn=mask)
    assert set(np.unique(actions(masked, 500, key))) == {5, 7}


@pytest.mark.parametrize("size", [7, 257, 513])
def test_words_of_more_lanes_begin_with_those_of_fewer(size):
    key = jax.random.key(3)
    many, few = prng.bits(key, (1500, 2)), prng.bits(key, (size, 2))
    np.testing.assert_array_equal(many[:size], few)
    assert len(np.unique(many)) == many.size


def foreign(space):
    """A space of Gymnasium, as an environment in gymnax's style would return it."""
    env = types.SimpleNamespace(action_space=lambda params: None)
    for name in ("reset_env", "step_env", "observation_space"):
        setattr(env, name, lambda *args: None)
    env.action_space = lambda params: space
    return from_gymnax(env, {}).action_space


def test_spaces_of_gymnasium_keep_what_they_say():
    discrete = foreign(gymnasium.spaces.Discrete(4, start=3))
    np.testing.assert_array_equal(np.unique(act(discrete)), [3, 4, 5, 6])
    several = foreign(gymnasium.spaces.MultiDiscrete([2, 5]))
    drawn = act(several)
    np.testing.assert_array_equal(drawn.min(0), [0, 0])
    np.testing.assert_array_equal(drawn.max(0), [1, 4])
    binary = foreign(gymnasium.spaces.MultiBinary(3))
    assert act(binary).shape == (NUM_DRAWS, 3)
    assert set(np.unique(act(binary))) == {0, 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: envs.Discrete(0), "`n` must be an int of at least 1, got 0"),
        (lambda: envs.Discrete(2.7), "`n` must be an int of at least 1, got 2.7"),
        (lambda: envs.Discrete(2, start=0.5), "`start` must be an int, got 0.5"),
        (
            lambda: envs.Discrete(300, dtype=jnp.uint8),
            "`dtype` must hold the integers from 0 to 299, got uint8, which",
        ),
        (lambda: envs.Discrete(2, dtype=bool), "`dtype` must be an integer dtype"),
        (lambda: envs.Box(1.0, 0.0, ()), "`low` must be at most `high`, got low=1.0"),
        (
            lambda: envs.Box(np.nan, 0.0, ()),
            "`low` must be at most `high`, got low=nan",
        ),
    ],
)
def test_space_that_is_none_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_counts_may_be_numpy_integers():
    assert envs.Discrete(np.int64(3)) == envs.Discrete(3)
    assert envs.Discrete(256, dtype=jnp.uint8).n == 256
    env = envs.make_vec("CartPole-v1", np.int32(2))
    assert env.num_envs == 2
    assert type(env.num_envs) is int


@pytest.mark.parametrize("draw", [sample, act])
def test_integers_of_several_ranges_are_drawn_evenly(draw):
    nvec, start = np.array([[2, 3], [1, 4]]), np.array([[0, 5], [7, 0]])
    space = envs.spaces.MultiDiscrete(nvec, start=start)
    drawn = draw(space)
    assert drawn.shape == (NUM_DRAWS, 2, 2)
    assert drawn.dtype == np.int32
    assert jax.vmap(space.contains)(drawn).all()
    places = np.ravel_multi_index((drawn - space.low).reshape(-1, 4).T, (2, 3, 1, 4))
    counts = np.bincount(places, minlength=24)
    assert len(counts) == 24
    assert np.abs(counts - NUM_DRAWS / 24).max() < 5 * np.sqrt(NUM_DRAWS / 24)
    assert not space.contains(space.high + 1)
    assert not space.contains(space.low - 1)


@pytest.mark.parametrize("draw", [sample, act])
def test_flags_are_drawn_evenly(draw):
    space = envs.spaces.MultiBinary((3,))
    drawn = draw(space)
    assert drawn.dtype == np.int8
    counts = np.bincount(drawn @ np.array([1, 2, 4]), minlength=8)
    assert np.abs(counts - NUM_DRAWS / 8).max() < 5 * np.sqrt(NUM_DRAWS / 8)
    assert jax.vmap(space.contains)(drawn).all()
    assert not space.contains(jnp.array([0, 2, 1]))


def test_equal_spaces_of_integers_are_equal_and_static():
    made = (
        envs.spaces.MultiDiscrete([3, 4], start=1),
        envs.spaces.MultiDiscrete((3, 4), start=(1, 1)),
    )
    assert made[0] == made[1]
    assert hash(made[0]) == hash(made[1])
    assert jax.tree.leaves(made[0]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((3, 0),), "`nvec` must be an array of ints of at least 1, got .3, 0."),
        ((5,), "`nvec` must be an array of ints"),
        (((1.5, 2),), "`nvec` must be an array of ints"),
        (((3, 4), jnp.int32, (1, 2, 3)), "`start` must be an int, or an array of ints"),
        (((3, 4), jnp.int32, 0.5), "`start` must be an int, or an array of ints"),
    ],
)
def test_bad_ranges_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        envs.spaces.MultiDiscrete(*arguments)


def test_box_without_bounds_draws_as_gymnasium_does():
    low, high = (
        np.array([-np.inf, 2.0, -np.inf, 0.0]),
        np.array([np.inf, np.inf, 3.0, 1.0]),
    )
    space = envs.Box(low, high, (4,))

    sample = jax.jit(jax.vmap(space.sample))
    drawn = np.asarray(sample(jax.random.split(jax.random.key(0), 4000)))

    assert np.isfinite(drawn).all()
    assert jax.jit(jax.vmap(space.contains))(drawn).all()
    # Means and deviations of a normal, two exponential and a uniform distribution; the
    # tolerance is five standard errors of the mean of 4,000.
    np.testing.assert_allclose(drawn.mean(axis=0), [0.0, 3.0, 2.0, 0.5], atol=0.08)
    np.testing.assert_allclose(drawn.std(axis=0), [1.0, 1.0, 1.0, 12**-0.5], atol=0.12)


@pytest.mark.parametrize("name", ["terminated", "truncated"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: env,
        lambda env: envs.TimeLimit(env, 5),
        lambda env: envs.wrappers.ForceLength(env, 5),
        envs.EndOnFault,
        lambda env: envs.ActionRepeat(env, 2),
    ],
    ids=["plain", "TimeLimit", "ForceLength", "EndOnFault", "ActionRepeat"],
)
def test_flag_of_a_step_is_no_float(name, wrap):
    @struct.dataclass
    class Doubtful(CountEnv):
        def step(self, key, state, action):
            return super().step(key, state, action).replace(**{name: jnp.float32(0.3)})

    env = envs.vectorize(wrap(Doubtful()), 2)
    collector = rollout.Collector(
        env=env, policy=rollout.random_policy(env.action_space)
    )
    with pytest.raises(
        ValueError, match=f"`env.step` must return `{name}` as bool, got"
    ):
        collector.collect_steps(collector.init(jax.random.key(0)), None, 3)


BOUNDS = {
    "finite": ([-1.0, 0.0], [1.0, 5.0]),
    "infinite": ([-np.inf, 2.0], [np.inf, np.inf]),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_box_whose_bounds_are_not_known_draws_the_same(name):
    low, high = map(np.float32, BOUNDS[name])
    key = jax.random.key(3)
    want = envs.Box(low, high, (2,)).sample(key)
    got = jax.jit(lambda low, high: envs.Box(low, high, (2,)).sample(key))(low, high)
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()


@struct.dataclass
class Bounded(CountEnv):
    bound: jax.Array = np.float32(1.0)

    @property
    def observation_space(self):
        return envs.Box(-self.bound, self.bound, (3,))


@pytest.mark.usefixtures("key_reuse")
def test_each_of_several_environments_may_have_infinite_bounds():
    bounds = np.float32([np.inf, 1.0])
    each = jax.vmap(lambda bound: Bounded(bound=bound))(bounds)
    env = envs.vectorize_each(each, len(bounds))
    drawn = jax.jit(lambda env, key: env.observation_space.sample(key))(env, KEY)
    assert np.isfinite(drawn).all()


def test_spaces_of_gymnax_are_taken_anywhere():
    from gymnax.environments import spaces as gymnax_spaces

    theirs = gymnax_spaces.Dict({"a": gymnax_spaces.Discrete(3)})
    nested = theirs, {"b": gymnasium.spaces.Discrete(2)}
    ours = envs.Tuple(
        (envs.Dict({"a": envs.Discrete(3)}), envs.Dict({"b": envs.Discrete(2)}))
    )
    drawn = [
        rollout.random_policy(space).apply(None, np.zeros((50, 1)), (), KEY).action
        for space in (nested, ours)
    ]
    jax.tree.map(np.testing.assert_array_equal, *drawn)

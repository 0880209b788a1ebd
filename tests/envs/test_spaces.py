"""Spaces: what is drawn covers them evenly, bounds included."""

import functools
import itertools
import json

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit
from gymnax.environments import spaces as gymnax_spaces

import rollout
from rollout import envs
from rollout.base import prng
from rollout.envs.spaces import EnvSpec, as_space, env_spec

NUM_DRAWS = 8_000
KEY = jax.random.key(5)


def sample(space):
    draw = jax.jit(jax.vmap(space.sample))
    return np.asarray(draw(jax.random.split(jax.random.key(0), NUM_DRAWS)))


def act(space):
    policy = rollout.random_policy(space)
    act = quick_jit(lambda obs, key: policy.apply(None, obs, (), key).action)
    return np.asarray(act(np.zeros((NUM_DRAWS, 1), np.float32), jax.random.key(1)))


def integers(low, high, dtype):
    return envs.Box(low, high, np.shape(low), jnp.dtype(dtype))


STARTS, ENDS = np.array([[0, 5], [7, 0]]), np.array([[1, 7], [7, 3]])
SEVERAL = envs.spaces.MultiDiscrete(ENDS - STARTS + 1, start=STARTS)
ENTRIES = np.array([-1, 0, 5]), np.array([1, 0, 9])
# A space, the lowest and the highest of its elements.
INTEGERS = {
    "int32": (integers(0, 3, "int32"), 0, 3),
    "uint8": (integers(0, 255, "uint8"), 0, 255),
    "five": (integers(-2, 2, "int8"), -2, 2),
    "flags": (integers(False, True, "bool"), 0, 1),
    "entries": (integers(*ENTRIES, "int32"), *ENTRIES),
    "start": (envs.Discrete(4, start=3), 3, 6),
    "several": (SEVERAL, STARTS, ENDS),
    "binary": (envs.spaces.MultiBinary((3,)), [0] * 3, [1] * 3),
}


@functools.cache
def drawn_integers():
    """What each space and the random policy draw, and whether the space has it.

    All from the same keys, so that many share their random bits.
    """

    @quick_jit
    def draw(key, keys):
        found = {}
        for name, (space, *_) in INTEGERS.items():
            policy, obs = rollout.random_policy(space), jnp.zeros((NUM_DRAWS, 1))
            action = policy.apply(None, obs, (), key).action
            for kind, x in (("sample", jax.vmap(space.sample)(keys)), ("act", action)):
                found[name, kind] = x, jax.vmap(space.contains)(x)
        return found

    with jax.debug_key_reuse(False):
        return jax.device_get(draw(KEY, jax.random.split(KEY, NUM_DRAWS)))


@pytest.mark.parametrize("draw", ["sample", "act"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_drawn_evenly_with_both_bounds(name, draw):
    space, low, high = INTEGERS[name]
    drawn, contained = drawn_integers()[name, draw]
    assert drawn.shape[1:] == np.shape(low)
    assert drawn.dtype == space.dtype
    assert contained.all()
    rows = drawn.reshape(NUM_DRAWS, -1).astype(int)
    found, counts = np.unique(rows, axis=0, return_counts=True)
    ranges = map(lambda x, y: range(x, y + 1), np.ravel(low), np.ravel(high))
    np.testing.assert_array_equal(found, list(itertools.product(*ranges)))
    num = len(counts)
    # Chi-squared: mean n - 1, variance 2 (n - 1); five standard deviations and room.
    chi_squared = ((counts - NUM_DRAWS / num) ** 2 / (NUM_DRAWS / num)).sum()
    assert chi_squared < num - 1 + 5 * np.sqrt(2 * num) + 10


@pytest.mark.parametrize("name", ["start", "several", "binary"])
def test_integers_beyond_the_bounds_are_not_contained(name):
    space, low, high = INTEGERS[name]
    for beyond in (np.asarray(low) - 1, np.asarray(high) + 1):
        assert not jax.jit(space.contains)(beyond.astype(space.dtype))


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


def test_mask_counts_from_the_start_of_the_space():
    space, allowed = envs.Discrete(3, start=5), np.array([[True, False, True]])

    def mask(obs):
        return jnp.broadcast_to(allowed, (obs.shape[0], 3))

    policy = rollout.random_policy(space, action_mask_fn=mask)
    wrong = rollout.stateless_policy(lambda params, obs, key: jnp.full((500,), 6))
    masked = rollout.policies.EpsilonGreedy(wrong, space, 0.0, action_mask_fn=mask)

    @quick_jit
    def act(obs, keys):
        pairs = zip((policy, masked), keys, strict=True)
        return [x.apply(None, obs, (), key).action for x, key in pairs]

    for found in act(np.zeros((500, 1), np.float32), jax.random.split(KEY)):
        assert set(np.unique(found)) == {5, 7}


def test_words_of_more_lanes_begin_with_those_of_fewer():
    sizes = 1500, 7, 257, 513
    with jax.debug_key_reuse(False):
        draw = jax.jit(lambda key: [prng.bits(key, (size, 2)) for size in sizes])
        many, *fewer = jax.device_get(draw(jax.random.key(3)))
    for few in fewer:
        np.testing.assert_array_equal(many[: len(few)], few)
    assert len(np.unique(many)) == many.size


BOX = envs.Box(-1.0, np.array([1.0, np.inf]), (2,))
EQUAL = {
    "Discrete": (envs.Discrete(3), envs.Discrete(np.int64(3), jnp.dtype("int32"))),
    "Gymnasium's": (envs.Discrete(3, start=2), gymnasium.spaces.Discrete(3, start=2)),
    "MultiDiscrete": (
        envs.spaces.MultiDiscrete([3, 4], start=1),
        envs.spaces.MultiDiscrete((3, 4), start=(1, 1)),
    ),
    "of jax": (BOX, envs.Box(jnp.float32(-1), jnp.array([1.0, jnp.inf]), (2,))),
    "negative zero": (envs.Box(-0.0, 1.0, ()), envs.Box(0.0, 1.0, ())),
    "Dict": (
        envs.spaces.Dict({"a": BOX, "b": envs.Discrete(2)}),
        envs.spaces.Dict({"b": envs.Discrete(2), "a": BOX}),
    ),
}


def make_different():
    """Spaces, made anew, each of which differs from all others."""
    box, two = envs.Box(-1.0, np.array([1.0, np.inf]), (2,)), envs.Discrete(2)
    return [
        two,
        envs.Discrete(2, start=1),
        envs.Discrete(2, jnp.dtype("int8")),
        envs.spaces.MultiDiscrete([2]),
        envs.spaces.MultiDiscrete([2], start=[1]),
        envs.spaces.MultiBinary((2,)),
        box,
        envs.Box(-1.0, np.array([1.0, 9.0]), (2,)),
        envs.Box(-1.0, 1.0, (1, 2)),
        envs.Box(-1.0, 1.0, (1, 2), jnp.dtype("int32")),
        envs.spaces.Dict({"a": box}),
        envs.spaces.Dict({"c": box}),
        envs.spaces.Tuple((box, two)),
        envs.spaces.Tuple((two, box)),
        envs.spaces.Repeated(box, 2),
        envs.spaces.Repeated(box, 3),
        EnvSpec(box, two, 4),
        EnvSpec(box, two, 5),
    ]


@pytest.mark.parametrize("name", EQUAL)
def test_spaces_with_equal_elements_are_equal(name):
    space, same = EQUAL[name][0], as_space(EQUAL[name][1])
    assert space == same
    assert hash(space) == hash(same)


def test_spaces_are_equal_only_to_those_made_alike():
    made, again = make_different(), make_different()
    for i, j in itertools.product(range(len(made)), repeat=2):
        assert (made[i] == again[j]) == (i == j), (made[i], again[j])
        assert i != j or hash(made[i]) == hash(again[j])
    spec = EnvSpec(BOX, envs.Discrete(2), 4)
    assert spec == EnvSpec(BOX, envs.Discrete(2), 4)
    assert envs.Discrete(3) != 3


def test_equal_spaces_are_one_static_argument():
    """Also those of an environment that was made twice."""
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def trace(spec, x):
        traces.append(spec)
        return x

    for _ in range(2):
        env = envs.vectorize(CountEnv(), np.int64(4))
        spec = env_spec(env)
        assert spec == EnvSpec(env.observation_space, env.action_space, 4)
        trace(spec, np.float32(0))
        trace(EnvSpec(as_space(BOX), as_space({"a": BOX})), np.float32(0))
    assert len(traces) == 2


def test_box_without_bounds_draws_as_gymnasium_does():
    low, high = (
        np.array([-np.inf, 2.0, -np.inf, 0.0]),
        np.array([np.inf, np.inf, 3.0, 1.0]),
    )
    space = envs.Box(low, high, (4,))

    @quick_jit
    def draw(key):
        drawn = jax.vmap(space.sample)(jax.random.split(key, 4000))
        return drawn, jax.vmap(space.contains)(drawn)

    drawn, contained = map(np.asarray, draw(jax.random.key(0)))
    assert np.isfinite(drawn).all()
    assert contained.all()
    # Means and deviations of a normal, two exponential and a uniform distribution; the
    # tolerance is five standard errors of the mean of 4,000.
    np.testing.assert_allclose(drawn.mean(axis=0), [0.0, 3.0, 2.0, 0.5], atol=0.08)
    np.testing.assert_allclose(drawn.std(axis=0), [1.0, 1.0, 1.0, 12**-0.5], atol=0.12)


def test_box_whose_bounds_are_not_known_draws_the_same():
    finite = np.float32([-1.0, 0.0]), np.float32([1.0, 5.0])
    infinite = np.float32([-np.inf, 2.0]), np.float32([np.inf, np.inf])

    def draw(*bounds):
        return [envs.Box(*x, (2,)).sample(KEY) for x in bounds]

    with jax.debug_key_reuse(False):
        got = jax.jit(draw)(finite, infinite)
        want = jax.jit(lambda: draw(finite, infinite))()
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()


def test_spaces_of_gymnax_are_taken_anywhere():
    theirs = gymnax_spaces.Dict({"a": gymnax_spaces.Discrete(3)})
    nested = theirs, {"b": gymnasium.spaces.Discrete(2)}
    ours = envs.spaces.Tuple(
        (
            envs.spaces.Dict({"a": envs.Discrete(3)}),
            envs.spaces.Dict({"b": envs.Discrete(2)}),
        )
    )
    assert as_space(nested) == ours


def test_bounds_beyond_int32_are_arguments_of_jitted_functions():
    space = envs.Box(2**32 - 2000, 2**32 - 1, (2,), np.uint32)
    assert jax.jit(lambda box: box.contains(jnp.uint32([2**32 - 1] * 2)))(space)


def test_spaces_come_back_from_json():
    spaces = envs.spaces
    space = spaces.Dict(
        {
            "box": spaces.Box(np.float32([-np.inf, 0]), np.float32([1, np.inf]), (2,)),
            "parts": spaces.Tuple(
                (spaces.Discrete(3, start=-1), spaces.MultiBinary((2,)))
            ),
            "many": spaces.Repeated(spaces.MultiDiscrete([[2, 3]]), 2),
        }
    )
    numbers = spaces.Dict({2: spaces.Discrete(3), 10: spaces.Discrete(4)})
    shapes = spaces.space_of({"parts": (jax.ShapeDtypeStruct((2,), jnp.float32),)})
    for one in (space, numbers, shapes):
        assert spaces.from_json(json.loads(json.dumps(spaces.to_json(one)))) == one


def test_box_of_many_entries_is_printed_in_one_line():
    low = jnp.zeros((4, 400))
    text = "Box(low=0.0, high=float32[4, 400] in [1.0, 2.0], shape=(4, 400), "
    box = envs.Box(low, (low + 1).at[0].set(2.0), (4, 400))
    assert repr(box) == text + "dtype=float32)"
    assert "low=[-1.0, 0.0], high=1," in repr(envs.Box(np.array([-1.0, 0.0]), 1, (2,)))
    assert "low=[], " in repr(envs.Box(np.zeros(0), 1.0, (0,)))
    deleted = jnp.ones(2)
    box_of_deleted = envs.Box(0.0, deleted, (2,))
    deleted.delete()
    assert "high=float32 of shape (2,), " in repr(box_of_deleted)
    # Bounds without a value.
    assert "low=NoneType," in repr(jax.tree.map(lambda x: None, box))
    jax.make_jaxpr(lambda box: "float32 of shape (4, 400)" in repr(box) or 1 / 0)(box)
    with pytest.raises(ValueError, match="at most `high`, got Box") as raised:
        envs.Box(low + 1, low, (4, 400))
    assert len(str(raised.value)) < 200

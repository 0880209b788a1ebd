"""Spaces: uniform samples, `contains`, equality, conversion and `repr`."""

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

NUM_SAMPLES = 8_000
KEY = jax.random.key(5)


def sample_space(space):
    fn = jax.jit(jax.vmap(space.sample))
    return np.asarray(fn(jax.random.split(jax.random.key(0), NUM_SAMPLES)))


def sample_policy(space):
    policy = rollout.random_policy(space)
    act = quick_jit(lambda obs, key: policy.apply(None, obs, (), key).action)
    return np.asarray(act(np.zeros((NUM_SAMPLES, 1), np.float32), jax.random.key(1)))


def integer_box(low, high, dtype):
    return envs.Box(low, high, np.shape(low), jnp.dtype(dtype))


STARTS, ENDS = np.array([[0, 5], [7, 0]]), np.array([[1, 7], [7, 3]])
MULTI_DISCRETE = envs.spaces.MultiDiscrete(ENDS - STARTS + 1, start=STARTS)
ENTRIES = np.array([-1, 0, 5]), np.array([1, 0, 9])
# A space, its lowest element and its highest element.
INTEGERS = {
    "int32": (integer_box(0, 3, "int32"), 0, 3),
    "uint8": (integer_box(0, 255, "uint8"), 0, 255),
    "five": (integer_box(-2, 2, "int8"), -2, 2),
    "flags": (integer_box(False, True, "bool"), 0, 1),
    "entries": (integer_box(*ENTRIES, "int32"), *ENTRIES),
    "start": (envs.Discrete(4, start=3), 3, 6),
    "several": (MULTI_DISCRETE, STARTS, ENDS),
    "binary": (envs.spaces.MultiBinary((3,)), [0] * 3, [1] * 3),
}


@functools.cache
def sample_integers():
    """Returns samples of spaces and of random policies, and the results of `contains`.

    All spaces use the same keys, so that the compiled program shares random bits.
    """

    @quick_jit
    def run(key, keys):
        results = {}
        for name, (space, *_) in INTEGERS.items():
            policy, obs = rollout.random_policy(space), jnp.zeros((NUM_SAMPLES, 1))
            action = policy.apply(None, obs, (), key).action
            for method, x in (
                ("sample", jax.vmap(space.sample)(keys)),
                ("act", action),
            ):
                results[name, method] = x, jax.vmap(space.contains)(x)
        return results

    with jax.debug_key_reuse(False):
        return jax.device_get(run(KEY, jax.random.split(KEY, NUM_SAMPLES)))


@pytest.mark.parametrize("method", ["sample", "act"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_sampled_uniformly_with_bounds(name, method):
    space, low, high = INTEGERS[name]
    samples, contained = sample_integers()[name, method]
    assert samples.shape[1:] == np.shape(low)
    assert samples.dtype == space.dtype
    assert contained.all()
    rows = samples.reshape(NUM_SAMPLES, -1).astype(int)
    values, counts = np.unique(rows, axis=0, return_counts=True)
    ranges = map(lambda x, y: range(x, y + 1), np.ravel(low), np.ravel(high))
    np.testing.assert_array_equal(values, list(itertools.product(*ranges)))
    num = len(counts)
    # Chi-squared has mean n - 1 and variance 2 (n - 1): allow five standard deviations.
    chi_squared = ((counts - NUM_SAMPLES / num) ** 2 / (NUM_SAMPLES / num)).sum()
    assert chi_squared < num - 1 + 5 * np.sqrt(2 * num) + 10


@pytest.mark.parametrize("name", ["start", "several", "binary"])
def test_integers_outside_bounds_are_not_contained(name):
    space, low, high = INTEGERS[name]
    for outside in (np.asarray(low) - 1, np.asarray(high) + 1):
        assert not jax.jit(space.contains)(outside.astype(space.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("sample_fn", [sample_space, sample_policy])
@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (-(2**31), 2**31 - 1, jnp.int32),
        (0, 2**32 - 1, jnp.uint32),
        (-3e38, 3e38, jnp.float32),
    ],
)
def test_widest_boxes_are_sampled_uniformly(low, high, dtype, sample_fn):
    low, high = np.asarray(low, dtype), np.asarray(high, dtype)
    samples = sample_fn(envs.Box(low, high, (), jnp.dtype(dtype))).astype(np.float64)
    fraction = (samples - float(low)) / (float(high) - float(low))
    assert np.isfinite(samples).all()
    assert fraction.min() >= 0
    assert fraction.max() <= 1
    counts = np.histogram(fraction, 16, (0, 1))[0]
    assert (
        (counts - NUM_SAMPLES / 16) ** 2 / (NUM_SAMPLES / 16)
    ).sum() < 15 + 5 * 5.7 + 10


def test_action_mask_respects_start():
    space, action_mask = envs.Discrete(3, start=5), np.array([[True, False, True]])

    def mask(obs):
        return jnp.broadcast_to(action_mask, (obs.shape[0], 3))

    policy = rollout.random_policy(space, action_mask_fn=mask)
    constant = rollout.stateless_policy(lambda params, obs, key: jnp.full((500,), 6))
    masked = rollout.policies.EpsilonGreedy(constant, space, 0.0, action_mask_fn=mask)

    @quick_jit
    def act(obs, keys):
        pairs = zip((policy, masked), keys, strict=True)
        return [x.apply(None, obs, (), key).action for x, key in pairs]

    for action in act(np.zeros((500, 1), np.float32), jax.random.split(KEY)):
        assert set(np.unique(action)) == {5, 7}


def test_random_bits_do_not_depend_on_size():
    sizes = 1500, 7, 257, 513
    with jax.debug_key_reuse(False):
        sample_words = jax.jit(
            lambda key: [prng.bits(key, (size, 2)) for size in sizes]
        )
        words, *prefixes = jax.device_get(sample_words(jax.random.key(3)))
    for prefix in prefixes:
        np.testing.assert_array_equal(words[: len(prefix)], prefix)
    assert len(np.unique(words)) == words.size


BOX = envs.Box(-1.0, np.array([1.0, np.inf]), (2,))
EQUAL = {
    "Discrete": (envs.Discrete(3), envs.Discrete(np.int64(3), jnp.dtype("int32"))),
    "gymnasium": (envs.Discrete(3, start=2), gymnasium.spaces.Discrete(3, start=2)),
    "MultiDiscrete": (
        envs.spaces.MultiDiscrete([3, 4], start=1),
        envs.spaces.MultiDiscrete((3, 4), start=(1, 1)),
    ),
    "jax_arrays": (BOX, envs.Box(jnp.float32(-1), jnp.array([1.0, jnp.inf]), (2,))),
    "negative_zero": (envs.Box(-0.0, 1.0, ()), envs.Box(0.0, 1.0, ())),
    "Dict": (
        envs.spaces.Dict({"a": BOX, "b": envs.Discrete(2)}),
        envs.spaces.Dict({"b": envs.Discrete(2), "a": BOX}),
    ),
}


def make_different_spaces():
    """Returns new spaces that all differ."""
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
    space, equal_space = EQUAL[name][0], as_space(EQUAL[name][1])
    assert space == equal_space
    assert hash(space) == hash(equal_space)


def test_different_spaces_are_not_equal():
    spaces, space_copies = make_different_spaces(), make_different_spaces()
    for i, j in itertools.product(range(len(spaces)), repeat=2):
        assert (spaces[i] == space_copies[j]) == (i == j), (spaces[i], space_copies[j])
        assert i != j or hash(spaces[i]) == hash(space_copies[j])
    spec = EnvSpec(BOX, envs.Discrete(2), 4)
    assert spec == EnvSpec(BOX, envs.Discrete(2), 4)
    assert envs.Discrete(3) != 3


def test_equal_spaces_share_jit_cache():
    """Compares spaces of two equal environments."""
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


def test_unbounded_box_samples_as_gymnasium():
    low, high = (
        np.array([-np.inf, 2.0, -np.inf, 0.0]),
        np.array([np.inf, np.inf, 3.0, 1.0]),
    )
    space = envs.Box(low, high, (4,))

    @quick_jit
    def run(key):
        samples = jax.vmap(space.sample)(jax.random.split(key, 4000))
        return samples, jax.vmap(space.contains)(samples)

    samples, contained = map(np.asarray, run(jax.random.key(0)))
    assert np.isfinite(samples).all()
    assert contained.all()
    # The columns are normal, exponential, exponential and uniform. The tolerance is
    # five standard errors of the mean of 4,000 samples.
    np.testing.assert_allclose(samples.mean(axis=0), [0.0, 3.0, 2.0, 0.5], atol=0.08)
    np.testing.assert_allclose(
        samples.std(axis=0), [1.0, 1.0, 1.0, 12**-0.5], atol=0.12
    )


def test_traced_bounds_give_equal_samples():
    finite = np.float32([-1.0, 0.0]), np.float32([1.0, 5.0])
    infinite = np.float32([-np.inf, 2.0]), np.float32([np.inf, np.inf])

    def sample_boxes(*bounds):
        return [envs.Box(*x, (2,)).sample(KEY) for x in bounds]

    with jax.debug_key_reuse(False):
        got = jax.jit(sample_boxes)(finite, infinite)
        want = jax.jit(lambda: sample_boxes(finite, infinite))()
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()


def test_nested_gymnax_spaces_are_converted():
    gymnax_space = gymnax_spaces.Dict({"a": gymnax_spaces.Discrete(3)})
    nested = gymnax_space, {"b": gymnasium.spaces.Discrete(2)}
    expected = envs.spaces.Tuple(
        (
            envs.spaces.Dict({"a": envs.Discrete(3)}),
            envs.spaces.Dict({"b": envs.Discrete(2)}),
        )
    )
    assert as_space(nested) == expected


def test_uint32_bounds_are_jit_arguments():
    space = envs.Box(2**32 - 2000, 2**32 - 1, (2,), np.uint32)
    assert jax.jit(lambda box: box.contains(jnp.uint32([2**32 - 1] * 2)))(space)


def test_spaces_round_trip_through_json():
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
    for example in (space, numbers, shapes):
        assert (
            spaces.from_json(json.loads(json.dumps(spaces.to_json(example)))) == example
        )


def test_box_repr_is_short():
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
    # Bounds without values.
    assert "low=NoneType," in repr(jax.tree.map(lambda x: None, box))
    jax.make_jaxpr(lambda box: "float32 of shape (4, 400)" in repr(box) or 1 / 0)(box)
    with pytest.raises(ValueError, match="`high`, got Box") as error:
        envs.Box(low + 1, low, (4, 400))
    assert len(str(error.value)) < 200

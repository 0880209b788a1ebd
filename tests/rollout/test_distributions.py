"""Compares action distributions with SciPy and closed forms for every space."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from cases import quick_jit

from rollout.distributions import ActionDistribution, TanhNormal
from rollout.envs import spaces
from rollout.envs.wrappers.actions import TanhSpace

INF = np.inf
SPACES = {
    "Discrete": spaces.Discrete(4, start=-1),
    "MultiDiscrete": spaces.MultiDiscrete([2, 4, 3], start=[0, -1, 5]),
    "MultiBinary": spaces.MultiBinary((2, 2)),
    "Box": spaces.Box(-2.0, np.float32([3, 4]), (2,)),
    "Box from 3": spaces.Box(3.0, INF, (2,)),
    "Box up to -3": spaces.Box(-INF, -3.0, (2, 1)),
    "unbounded Box": spaces.Box(-INF, INF, ()),
    "Dict": spaces.Dict({"go": spaces.Box(0.0, INF, (2,)), "turn": spaces.Discrete(3)}),
    "Tuple": spaces.Tuple(
        (
            spaces.MultiDiscrete([3, 2]),
            spaces.Box(-1.0, 1.0, (1,)),
            spaces.Discrete(2),
        )
    ),
}
NUM_ROWS = 5


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def log_prob_and_entropy(space, outputs, raw_action, allowed=None):
    """Computes log-probability and entropy of one row in plain Python."""
    parts = space.leaves()
    leaves = jax.tree.leaves(raw_action)
    is_float = [jnp.issubdtype(part.dtype, jnp.floating) for part in parts]
    counts = []
    for part, floats in zip(parts, is_float, strict=True):
        low, high = (np.broadcast_to(x, part.shape) for x in part.bounds)
        counts.append(
            np.zeros(part.shape, int) if floats else (high - low + 1).astype(int)
        )
    sizes = [x.size * max(1, x.max(initial=0)) for x in counts]
    num_log_stds = sum(n for n, floats in zip(sizes, is_float, strict=True) if floats)
    values = np.split(outputs[: len(outputs) - num_log_stds], np.cumsum(sizes)[:-1])
    log_stds = list(outputs[len(outputs) - num_log_stds :])
    flags = list(np.ones(99, bool) if allowed is None else allowed)
    log_prob = entropy = 0.0
    for floats, count, leaf, value in zip(
        is_float, counts, leaves, values, strict=True
    ):
        entries = np.reshape(leaf, -1)
        if floats:
            for mean, x in zip(value, entries, strict=True):
                normal = scipy.stats.norm(mean, np.exp(log_stds.pop(0)))
                log_prob, entropy = (
                    log_prob + normal.logpdf(x),
                    entropy + normal.entropy(),
                )
            continue
        rows = value.reshape(count.size, -1)
        for row, num, index in zip(rows, count.ravel(), entries, strict=True):
            valid = np.array([flags.pop(0) for _ in range(num)])
            valid |= not valid.any()  # an empty mask is ignored
            probs = softmax(np.where(valid, row[:num], -1e9))
            log_prob += np.log(probs[index])
            entropy += scipy.stats.entropy(probs)
    return log_prob, entropy


@pytest.mark.parametrize("masked", [False, True])
def test_log_probs_and_entropies_equal_scipy(masked):
    rng = np.random.default_rng(0)
    cases = {}
    for name, space in SPACES.items():
        distribution = ActionDistribution(space)
        outputs = rng.normal(size=(NUM_ROWS, distribution.num_params)) / 2
        mask = None
        if masked and distribution.num_mask_flags:
            mask = rng.random((NUM_ROWS, distribution.num_mask_flags)) < 0.6
            mask[0] = False
        cases[name] = distribution, np.float32(outputs), mask

    @quick_jit
    def compute(key):
        results = {}
        for number, (name, case) in enumerate(cases.items()):
            distribution, outputs, mask = case
            raw = distribution.sample(outputs, jax.random.fold_in(key, number), mask)
            log_prob = distribution.log_prob(outputs, raw, mask)
            entropy = distribution.entropy(outputs, mask)
            action = distribution.postprocess(raw)
            mode = distribution.mode(outputs, mask)
            results[name] = raw, log_prob, entropy, action, mode
        return results

    for name, result in jax.device_get(compute(jax.random.key(1))).items():
        distribution, outputs, mask = cases[name]
        raw, log_prob, entropy, action, mode = result
        for row in range(NUM_ROWS):

            def pick(tree, row=row):
                return jax.tree.map(lambda leaf: leaf[row], tree)

            allowed = None if mask is None else mask[row]
            args = SPACES[name], np.float64(outputs[row])
            expected = log_prob_and_entropy(*args, pick(raw), allowed)
            np.testing.assert_allclose(log_prob[row], expected[0], rtol=2e-4, atol=1e-5)
            np.testing.assert_allclose(entropy[row], expected[1], rtol=2e-4, atol=1e-5)
            # No sampled action is more likely than the mode.
            mode_log_prob = log_prob_and_entropy(*args, pick(mode), allowed)[0]
            assert mode_log_prob >= expected[0] - 1e-9
            assert SPACES[name].contains(pick(action)), name
        dtypes = [part.dtype for part in SPACES[name].leaves()]
        assert [x.dtype for x in jax.tree.leaves(action)] == dtypes


def test_integers_are_sampled_by_probability():
    distribution = ActionDistribution(spaces.Discrete(3, start=10))
    outputs = np.log(np.float32([0.2, 0.5, 0.3]))

    @quick_jit
    def sample(keys):
        raw = jax.vmap(lambda key: distribution.sample(outputs, key))(keys)
        return distribution.postprocess(raw)

    actions = np.asarray(sample(jax.random.split(jax.random.key(0), 4000)))
    counts = np.bincount(actions - 10, minlength=3)
    expected = 4000 * softmax(np.float64(outputs))
    assert scipy.stats.chisquare(counts, expected).pvalue > 1e-3


def test_raw_actions_are_scaled_to_the_box():
    """-1 and 1 map to finite bounds. An infinite bound is replaced, see docstring."""
    bounds = np.float32([[-2, 3, -INF, -INF], [4, INF, -3, INF]])
    distribution = ActionDistribution(spaces.Box(bounds[0], bounds[1], (4,)))
    raw = np.float32([[-9] * 4, [-1] * 4, [0] * 4, [1] * 4, [9] * 4])
    expected = [
        [-2, 3, -13, -9],
        [-2, 3, -5, -1],
        [1, 4, -4, 0],
        [4, 5, -3, 1],
        [4, 13, -3, 9],
    ]
    np.testing.assert_allclose(distribution.postprocess(raw), expected)


def test_entropy_of_float16_logits_is_finite():
    logits = np.float16([1.0, 2.0, -1.0, 0.5, 3.0])
    choice = ActionDistribution(spaces.Discrete(5))
    pair = ActionDistribution(spaces.MultiDiscrete([3, 2]))
    mask = np.array([True, False, True, True, False])

    @quick_jit
    def compute(logits):
        grad = jax.grad(lambda x: choice.entropy(x, mask).sum())(logits)
        outputs = jnp.append(logits, 0)  # the last logit has no value
        return choice.entropy(logits, mask), pair.entropy(outputs), grad

    masked, paired, grad = compute(logits)
    probs = [softmax(np.float64(logits[x])) for x in (mask, slice(3), slice(3, None))]
    expected = [scipy.stats.entropy(x) for x in probs]
    np.testing.assert_allclose(masked, expected[0], rtol=5e-3)
    np.testing.assert_allclose(paired, sum(expected[1:]), rtol=5e-3)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_largest_float_is_no_bound(dtype):
    most = np.finfo(dtype).max
    space = spaces.Box(np.array([-most, 3], dtype), most, (2,), dtype)
    raw = np.array([[-9, -1], [0.5, 2]], dtype)
    expected = [[-9, 3], [0.5, 6]]  # as a box without an upper bound
    np.testing.assert_array_equal(ActionDistribution(space).postprocess(raw), expected)
    squashed = TanhNormal(space)
    assert not squashed.is_bounded
    np.testing.assert_array_equal(squashed.postprocess(raw), expected)
    assert TanhNormal(spaces.Box(-0.9 * most, 0.9 * most, (2,), dtype)).is_bounded


def test_integers_of_wide_dtypes():
    for low, high, dtype in (
        (2**32 - 4, 2**32 - 1, "uint32"),
        (2**31 - 4, 2**31 - 1, "int32"),
        (-(2**31), 3 - 2**31, "int32"),
        (-128, 127, "int8"),
    ):
        distribution = ActionDistribution(spaces.Box(low, high, (), np.dtype(dtype)))
        num_values = high - low + 1
        assert distribution.num_params == num_values
        action = distribution.postprocess(np.arange(num_values, dtype=np.int32))
        assert action.tolist() == list(range(low, high + 1))
    for low, high, dtype in ((0, 2**32 - 1, "uint32"), (-(2**31), 2**31 - 1, "int32")):
        with pytest.raises(ValueError, match="at most 16,777,216 values per integer"):
            ActionDistribution(spaces.Box(low, high, (), np.dtype(dtype)))
    space = gymnasium.spaces.Box(2**40, 2**40 + 3, (), np.int64)
    with pytest.raises(ValueError, match="fit into int32"):
        ActionDistribution(space)


def test_tanh_space_keeps_raw_actions():
    space = TanhSpace((2,), jnp.dtype(jnp.float32))
    distribution = ActionDistribution(space)
    assert (distribution.num_params, distribution.num_log_stds) == (4, 2)
    raw = np.float32([[-9, 0.5], [3, 7]])
    np.testing.assert_array_equal(distribution.postprocess(raw), raw)


def test_wrong_sizes_raise():
    distribution = ActionDistribution(spaces.MultiDiscrete([2, 3]))
    assert (distribution.num_params, distribution.num_mask_flags) == (6, 5)
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"`params` must have shape \[\.\.\., 6\]"):
        distribution.sample(jnp.zeros((1, 5)), key)
    with pytest.raises(ValueError, match="`action_mask` must have 5 flags"):
        distribution.sample(jnp.zeros((1, 6)), key, jnp.ones((1, 6)))
    with pytest.raises(ValueError, match="must be a Box of floats"):
        TanhNormal(spaces.Discrete(2))
    assert distribution == ActionDistribution(spaces.MultiDiscrete([2, 3]))
    assert hash(distribution) == hash(ActionDistribution(spaces.MultiDiscrete([2, 3])))


def test_squashed_density_equals_a_change_of_variables():
    """The derivatives of `squash` give the density for every kind of bound."""
    low, high = np.float32([-2, 3, -INF, -INF]), np.float32([4, INF, -3, INF])
    distribution = TanhNormal(spaces.Box(low, high, (4,)))
    rng = np.random.default_rng(0)
    outputs = np.float32(rng.normal(size=(6, 8)))
    raw = np.float32(rng.normal(size=(6, 4)))

    @quick_jit
    def compute(outputs, raw):
        squash = distribution.squash
        slopes = jax.vmap(
            jax.vmap(
                jax.grad(lambda x, i: squash(jnp.zeros(4).at[i].set(x))[i]), (0, 0)
            ),
            (0, None),
        )
        normalized = squash(raw)
        action = distribution.postprocess(normalized)
        restored = distribution.normalize(action)
        slope = slopes(raw, jnp.arange(4))
        return distribution.log_prob(outputs, raw), slope, normalized, action, restored

    log_prob, slope, normalized, action, restored = jax.device_get(
        compute(outputs, raw)
    )
    mean, log_std = outputs[:, :4], np.clip(outputs[:, 4:], -5, 2)
    density = scipy.stats.norm(mean, np.exp(log_std)).logpdf(raw)
    np.testing.assert_allclose(log_prob, (density - np.log(slope)).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(restored, normalized, rtol=1e-4, atol=1e-5)
    assert ((action >= low) & (action <= high)).all()
    limit = distribution.postprocess(distribution.squash(np.float32([[30.0] * 4])))
    assert limit[0, 1] > 25
    assert limit[0, 3] == 30


def test_parts_of_an_action_are_sampled_independently():
    space = spaces.Tuple(
        (spaces.Discrete(2), spaces.Discrete(2), spaces.Box(-1, 1, ()))
    )
    distribution = ActionDistribution(space)
    outputs = jnp.zeros((400, distribution.num_params))
    first, second, value = distribution.sample(outputs, jax.random.key(0))
    assert 0.4 < np.mean(first == second) < 0.6
    assert abs(np.corrcoef(first, value)[0, 1]) < 0.2


@pytest.mark.parametrize(("log_std", "limit"), [(-20.0, -5.0), (20.0, 2.0)])
def test_tanh_normal_limits_the_standard_deviation(log_std, limit):
    """The logarithm is from -5 to 2, as in CleanRL's SAC."""
    distribution = TanhNormal(spaces.Box(-1.0, 1.0, ()))
    outputs = jnp.broadcast_to(jnp.array([0.0, log_std]), (1000, 2))
    raw_action = distribution.sample(outputs, jax.random.key(0))
    np.testing.assert_allclose(np.std(raw_action), np.exp(limit), rtol=0.1)


def test_normalized_actions_are_clipped_to_finite_bounds():
    low, high = np.float32([-2, 3, -INF, -INF]), np.float32([4, INF, -3, INF])
    distribution = TanhNormal(spaces.Box(low, high, (4,)))
    actions = np.float32([[-9] * 4, [0.5] * 4, [9] * 4])
    expected = [[-1, -1, -9, -9], [0.5] * 4, [1, 9, 1, 9]]
    np.testing.assert_array_equal(distribution.clip(actions), expected)

"""Policies: the random one draws evenly, and wrong ones raise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, make_collector

import rollout
from rollout import envs


def even(obs):
    return jnp.broadcast_to(jnp.arange(6) % 2 == 0, (obs.shape[0], 6))


def all_allowed(obs):
    return jnp.ones((obs.shape[0], 7), bool)


class Pair(envs.Space):
    """A space of two parts, without shape and dtype."""

    def sample(self, key):
        return {"a": jax.random.bits(key), "b": jax.random.uniform(key, (2,))}


LARGE = (1 << 16) + 3
BOX = envs.Box(jnp.array([-1.0, 0.0]), jnp.array([1.0, 5.0]), (2,))
POLICIES = {
    **{n: rollout.random_policy(envs.Discrete(n)) for n in (2, 3, 7, 1000, 1 << 20)},
    "box": rollout.random_policy(BOX),
    "pair": rollout.random_policy(Pair()),
    "even": rollout.random_policy(envs.Discrete(6), mask_fn=even),
    "all allowed": rollout.random_policy(envs.Discrete(7), mask_fn=all_allowed),
}


@functools.cache
def draw(num_envs):
    """The first step of every policy, in one program."""

    @jax.jit
    def run(obs, key):
        return [policy.apply(None, obs, (), key) for policy in POLICIES.values()]

    assert all(policy.init(num_envs) == () for policy in POLICIES.values())
    with jax.debug_key_reuse(False):  # `Pair` draws twice from one
        steps = run(np.zeros((num_envs, 1), np.float32), jax.random.key(0))
    return dict(zip(POLICIES, jax.tree.map(np.asarray, steps), strict=True))


@pytest.mark.parametrize("n", [2, 3, 7, 1000])
def test_discrete_actions_are_uniform(n):
    num_draws = 100_000
    step = draw(num_draws)[n]
    assert step.state == step.extras == ()
    count = np.bincount(step.action, minlength=n)
    assert len(count) == n
    expected = num_draws / n
    chi_squared = ((count - expected) ** 2 / expected).sum()
    # Chi-squared with n - 1 degrees of freedom: mean n - 1, variance 2 (n - 1); five
    # standard deviations and room for the skew at small n.
    assert chi_squared < n - 1 + 5 * np.sqrt(2 * n) + 10


def test_random_policy_of_the_same_space_is_the_same_object():
    # So that it does not trace again.
    assert rollout.random_policy(envs.Discrete(5)) is rollout.random_policy(
        envs.Discrete(5)
    )


def test_random_policy_of_the_same_space_and_mask_is_the_same_object():
    space = envs.Discrete(6)
    masked = rollout.random_policy(space, mask_fn=even)
    assert masked is rollout.random_policy(envs.Discrete(6), mask_fn=even)
    assert masked is not rollout.random_policy(space, mask_fn=all_allowed)
    assert masked is not rollout.random_policy(space)


def test_mask_that_allows_everything_changes_no_draw():
    step = draw(100_000)["all allowed"]
    np.testing.assert_array_equal(step.action, draw(100_000)[7].action)
    assert step.action.dtype == jnp.int32
    assert not step.extras["none_allowed"].any()


@pytest.mark.slow  # a loop over all the actions
def test_masked_draw_in_a_space_too_large_for_one_word():
    mask = np.zeros((8, LARGE), bool)
    mask[:, [5, LARGE - 1]] = True
    policy = rollout.random_policy(envs.Discrete(LARGE), mask_fn=lambda obs: obs)
    run = jax.jit(policy.apply)
    actions = [run(None, mask, (), jax.random.key(seed)).action for seed in range(8)]
    # 64 draws of two: one of them never comes with probability 2 ** -63.
    assert set(np.concatenate(actions).tolist()) == {5, LARGE - 1}


def test_mask_of_a_box_is_refused():
    message = "`action_space` must be discrete .* where `mask_fn` is given, got Box"
    with pytest.raises(ValueError, match=message):
        rollout.random_policy(envs.Box(0.0, 1.0, (2,)), mask_fn=even)


def test_mask_of_another_shape_is_refused():
    policy = rollout.random_policy(envs.Discrete(4), mask_fn=even)
    message = r"`mask_fn` must return .* shape \(3, 4\), got bool of shape \(3, 6\)"
    with pytest.raises(ValueError, match=message):
        policy.apply(None, jnp.zeros((3, 1)), (), jax.random.key(0))


def test_discrete_space_too_large_for_one_word_still_draws():
    action = draw(100_000)[1 << 20].action
    assert action.min() >= 0
    assert (1 << 19) < action.max() < (1 << 20)


def test_box_actions_fill_the_box():
    action = draw(100_000)["box"].action
    assert action.shape == (100_000, 2)
    # The mean of 100,000 uniforms of width w has standard error w / sqrt(1,200,000).
    np.testing.assert_allclose(action.mean(axis=0), [0.0, 2.5], atol=5 * 0.0046)
    assert (action.min(axis=0) >= [-1.0, 0.0]).all()
    assert (action.max(axis=0) <= [1.0, 5.0]).all()


@pytest.mark.parametrize("name", [3, "box", "even", "pair"])
def test_lane_draws_the_same_among_any_number_of_lanes(name):
    few, many = (draw(num)[name].action for num in (7, 100_000))
    jax.tree.map(
        lambda few, many: np.testing.assert_array_equal(few, many[:7]), few, many
    )


def test_space_of_several_parts_is_drawn_lane_by_lane():
    action = draw(100_000)["pair"].action
    assert action["b"].shape == (100_000, 2)
    assert len(np.unique(action["a"][:50])) == 50


def test_unbounded_box_is_refused():
    message = "`action_space` must have finite bounds"
    with pytest.raises(ValueError, match=message):
        rollout.random_policy(envs.Box(-jnp.inf, 1.0, (2,)))


def run(policy, env=None):
    """Traces a collection; wrong policies raise before anything is compiled."""
    env = envs.vectorize(env or CountEnv(), 4)
    collector = rollout.Collector(env=env, policy=policy)

    def collect(key):
        return collector.collect_steps(collector.init(key), None, 3)

    return jax.eval_shape(collect, jax.random.key(0))


@pytest.mark.parametrize(
    ("make_action", "got"),
    [
        (lambda b: jnp.zeros(b), r"float32 of shape \(4,\)"),
        (lambda b: jnp.zeros((b, 1), jnp.int32), r"int32 of shape \(4, 1\)"),
        (lambda b: jnp.int32(0), r"int32 of shape \(\)"),
    ],
)
def test_action_of_wrong_shape_or_dtype_is_refused(make_action, got):
    policy = rollout.stateless_policy(lambda p, obs, key: make_action(obs.shape[0]))
    message = r"must return actions as int32 of shape \(4,\), got " + got
    with pytest.raises(ValueError, match=message):
        run(policy)


def recurrent(change, init):
    def act(params, obs, state, key):
        return jnp.zeros(obs.shape[0], jnp.int32), change(state)

    return rollout.recurrent_policy(act, init)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda h: (h, h), "structure"),
        (lambda h: h[:, :1], r"float32 of shape \(4, 1\)"),
        (lambda h: h.astype(jnp.bfloat16), r"bfloat16 of shape \(4, 3\)"),
    ],
)
def test_policy_state_that_changes_is_refused(change, got):
    policy = recurrent(change, lambda num_envs: jnp.zeros((num_envs, 3)))
    with pytest.raises(
        ValueError, match="must return a state like the one it takes.*" + got
    ):
        run(policy)


def test_initial_policy_state_without_lanes_is_refused():
    policy = recurrent(lambda h: h, lambda num_envs: {"h": jnp.zeros(3)})
    message = r"`policy.init` must return leaves .* num_envs=4, got shape \(3,\) at"
    with pytest.raises(ValueError, match=message):
        run(policy)


def test_extras_without_lanes_are_refused():
    def act(params, obs, key):
        return jnp.zeros(obs.shape[0], jnp.int32), {"temperature": jnp.ones(())}

    message = r"extras with the leading axis num_envs=4, got shape \(\) at"
    with pytest.raises(ValueError, match=message):
        run(rollout.stateless_policy(act))


def test_recurrent_function_that_forgets_its_state_is_refused():
    def act(params, obs, state, key):
        return jnp.zeros(obs.shape[0], jnp.int32)

    policy = rollout.recurrent_policy(act, lambda num_envs: jnp.zeros((num_envs, 3)))
    with pytest.raises(ValueError, match=r"must return \(action, state\) .* no tuple"):
        run(policy)


def test_policy_that_is_no_policy_step_is_refused():
    policy = rollout.Policy(
        init=lambda num_envs: (),
        apply=lambda params, obs, state, key: jnp.zeros(obs.shape[0], jnp.int32),
    )
    with pytest.raises(ValueError, match=r"`policy\.apply` must return a `PolicyStep`"):
        run(policy)


@pytest.mark.parametrize(
    ("key", "got"),
    [
        (0, r"int32 of shape \(\)"),
        (np.zeros(2, np.uint32), r"uint32 of shape \(2,\)"),
        (None, "NoneType None"),
    ],
)
def test_key_that_is_not_typed_is_refused(key, got):
    with pytest.raises(ValueError, match="`key` must be one typed key .*, got " + got):
        make_collector("count").init(key)


def test_several_keys_are_refused():
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(ValueError, match=r"`key` must be one .* of shape \(3,\)"):
        make_collector("count").init(keys)


def test_environment_whose_state_changes_is_refused():
    class Drifting(CountEnv):
        def step(self, key, state, action):
            step = super().step(key, state, action)
            return step.replace(state={**step.state, "n": step.obs[0]})

    jax.tree_util.register_static(Drifting)
    message = r"must return the state as `env.reset` does: int32 of shape \(4,\) at"
    with pytest.raises(ValueError, match=message):
        run(rollout.random_policy(Drifting().action_space), Drifting())


def test_greedy_policy_takes_the_mode_and_is_equal_for_an_equal_policy():
    def always(action):
        return lambda params, obs, key: jnp.full(obs.shape[0], action, jnp.int32)

    policy = rollout.stateless_policy(always(1), mode_fn=always(2))
    mode = rollout.greedy(policy)
    assert mode == rollout.greedy(policy) == rollout.greedy(mode)
    step = mode.apply(None, np.zeros((4, 1), np.float32), mode.init(4), None)
    np.testing.assert_array_equal(step.action, [2, 2, 2, 2])


def test_greedy_policy_of_one_without_a_mode_is_refused():
    policy = rollout.random_policy(envs.Discrete(3))
    with pytest.raises(ValueError, match="`policy` must have a `mode`"):
        rollout.greedy(policy)

"""Objects and values of another kind are refused where they are given."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv
from host_count import HostCount

import rollout
from rollout import buffers, envs

KEY = jax.random.key(0)
ENV, VECTOR = CountEnv(), envs.vectorize(CountEnv(), 2)
POLICY, DISCRETE, BOX = rollout.random_policy, envs.Discrete(2), envs.Box(0, 1, ())


@functools.cache
def rows():
    """Four rows of two lanes, with the value 0 of each."""
    collector = rollout.Collector(env=VECTOR, policy=POLICY(ENV.action_space))
    trajectory = collector.collect_steps(collector.init(KEY), None, 4)[1]
    return trajectory.replace(extras={"value": jnp.zeros((4, 2))})


def sample(make, *args, **options):
    """Draws from a buffer with these rows."""
    buffer = make(16, 2)
    state = buffer.add(buffer.init(jax.tree.map(lambda x: x[0], rows())), rows())
    return buffer.sample(state, KEY, 4, *args, **options)


NO_FRACTION = ["0.6", True, None, 1.5, np.nan, jnp.bool_(True)]
FRACTIONS = {
    "alpha": lambda x: buffers.PrioritizedReplayBuffer(16, 2, alpha=x),
    "beta": lambda x: sample(buffers.PrioritizedReplayBuffer, x),
    "gamma": lambda x: rollout.discounted_returns(rows(), gamma=x),
    "lam": lambda x: rollout.gae(rows(), jnp.zeros((4, 2)), gamma=0.9, lam=x),
}


@pytest.mark.parametrize("value", NO_FRACTION, ids=str)
@pytest.mark.parametrize("name", FRACTIONS)
def test_what_is_no_fraction_is_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a number in"):
        FRACTIONS[name](value)


@pytest.mark.parametrize("value", ["0.9", True, 1.5])
def test_discount_of_other_places_is_a_fraction(value):
    with pytest.raises(ValueError, match="`gamma` must be a number in"):
        sample(buffers.ReplayBuffer, n_step=2, gamma=value)
    with pytest.raises(ValueError, match="`gamma` must be a number in"):
        envs.NormalizeReward(VECTOR, value)


@pytest.mark.parametrize("value", [np.float32(0.5), jnp.float32(0.5), 1, np.int32(0)])
def test_fraction_may_be_of_any_number_type(value):
    hash(buffers.PrioritizedReplayBuffer(16, 2, alpha=value))  # static, in `jit`
    rollout.discounted_returns(rows(), gamma=value)


CASES = {
    "epsilon": (
        lambda: envs.NormalizeObs(VECTOR, epsilon="1e-8"),
        "`epsilon` must be above",
    ),
    "item_policy": (
        lambda: rollout.recommendation.item_policy(jnp.add, sample="no"),
        "`sample` must be a bool, got 'no'",
    ),
    "scores": (
        lambda: rollout.recommendation.item_policy(3),
        "`fn` must be a function, got int 3",
    ),
    "mask_fn": (
        lambda: POLICY(DISCRETE, mask_fn=[True, False]),
        "`mask_fn` must be a function, got list",
    ),
    "mask": (
        lambda: rollout.recommendation.choose_items(
            jnp.zeros((2, 3)), jnp.ones((2, 3), int)
        ),
        r"`mask` must be bool of the shape \[B, I\] of `scores`, got int32",
    ),
    "stateless": (lambda: rollout.stateless_policy(3), "`fn` must be a function"),
    "mode": (
        lambda: rollout.stateless_policy(jnp.add, mode_fn=3),
        "`mode_fn` must be a function",
    ),
    "recurrent": (
        lambda: rollout.recurrent_policy(jnp.add, 3),
        "`init` must be a function",
    ),
    "greedy": (lambda: rollout.greedy(3), "`policy` must be a `Policy`"),
    "epsilon_greedy": (
        lambda: rollout.epsilon_greedy(jnp.add, DISCRETE, 0.1),
        "`policy` must be a `Policy`",
    ),
    "random_warmup": (
        lambda: rollout.random_warmup(3, DISCRETE, 2),
        "`policy` must be a `Policy`",
    ),
    "gaussian_noise": (
        lambda: rollout.gaussian_noise(3, BOX, 0.1),
        "`policy` must be a `Policy`",
    ),
    "ornstein_uhlenbeck": (
        lambda: rollout.ornstein_uhlenbeck(3, BOX, 0.1),
        "`policy` must be a `Policy`",
    ),
    "for_policy rows": (
        lambda: rollout.agents.for_policy(rows(), "a"),
        "`rows` must be the dict by group .* got Transition",
    ),
    "for_policy groups": (
        lambda: rollout.agents.for_policy({"a": 3}, "a"),
        "`rows` must be of a `policy_map`",
    ),
    "make": (lambda: envs.make(None), "`env_id` must be an id, .* got NoneType"),
    "make_agents": (lambda: envs.make_agents(ENV), "`env_id` must be an id, .* Count"),
    "max_steps": (
        lambda: envs.make_vec("CartPole-v1", 2, max_steps=200),
        "got max_steps. A limit .* `max_steps_in_episode`, or `rollout.envs.TimeLimit`",
    ),
    "probe": (lambda: rollout.probe(ENV), "`env` must be a `HostVectorEnv`"),
    "NormalizeObs": (
        lambda: envs.NormalizeObs(HostCount(2)),
        "`env` must be a `VectorEnv` in JAX, .* got HostCount: environments that step",
    ),
    "NormalizeReward": (
        lambda: envs.NormalizeReward(HostCount(2)),
        "`env` must be a `VectorEnv` in JAX",
    ),
    "TransformObs": (lambda: envs.TransformObs(ENV, 3), "`fn` must be a function"),
    "TransformReward": (
        lambda: envs.TransformReward(ENV, 3),
        "`fn` must be a function, got int 3",
    ),
    "ObserveInfo": (
        lambda: envs.ObserveInfo(ENV, jnp.add, 3),
        "`initial` must be a function",
    ),
    "bounds": (lambda: envs.Box("0", 1.0, ()), "`low` and `high` must be numbers"),
    "shape": (lambda: envs.Box(0.0, 1.0, 3), "`shape` must be a tuple of ints, got 3"),
    "binary": (lambda: envs.spaces.MultiBinary("3"), "`shape` must be a tuple of ints"),
    "Dict": (lambda: envs.Dict([DISCRETE]), "`spaces` must be a dict of spaces"),
    "Tuple": (lambda: envs.Tuple({"a": BOX}), "`spaces` must be a tuple of spaces"),
    "Repeated": (
        lambda: envs.spaces.Repeated(BOX, "3"),
        "`num` must be an int of at least",
    ),
    "leave": (
        lambda: envs.RecommendationEnv([[1.0]], leave=jnp.add),
        "`leave` must be a rule with `window` and `leaves`",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_kind_is_named(name):
    make, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_mask_and_scores_may_be_lists():
    scores, mask = [[0.0, 2.0, 1.0]], [[True, False, True]]
    assert rollout.recommendation.choose_items(scores, mask)[0].tolist() == [2]


@pytest.mark.parametrize("value", [HostCount, "CartPole-v1", [HostCount, "b"], 3])
def test_workers_need_a_function_for_each_environment(value):
    with pytest.raises(ValueError, match=r"one for each environment, such as `\[make"):
        envs.workers(value, 2)

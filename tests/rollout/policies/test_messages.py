"""Tests of the error messages of policies."""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, PlainPolicy

import rollout
from rollout import envs
from rollout.policies import (
    EpsilonGreedy,
    GaussianNoise,
    Greedy,
    OrnsteinUhlenbeck,
    RandomWarmup,
)

B, N = 4, 5
KEY, OBS, INTS = jax.random.key(0), np.zeros((B, 1), np.float32), np.zeros(B, np.int32)
INF = float("nan"), float("inf")
DISCRETE, BOX = envs.Discrete(N), envs.Box(-1.0, 1.0, (2,))
UNBOUNDED = envs.Box(-jnp.inf, jnp.inf, (2,))
PAIR = envs.spaces.MultiDiscrete((2, 3))
MIXED = envs.spaces.Tuple((envs.Discrete(2), envs.Box(0.0, 1.0, ())))
ALL_VALID, TWO = jnp.ones((B, N), bool), jnp.ones((B, 2), bool)


def policy(action=INTS, extras=()):
    return rollout.stateless_policy(lambda params, obs, key: (action, extras))


STILL = policy(jnp.zeros((B, 2)))
NO_STEP = PlainPolicy(lambda num_envs: (), lambda *args: INTS)
STATELESS_RESULT = rollout.recurrent_policy(lambda *args: INTS, jnp.zeros)
warm_up = partial(RandomWarmup, STILL)
epsilon_greedy = partial(EpsilonGreedy, policy(), DISCRETE)
gaussian = partial(GaussianNoise, STILL, BOX)
ornstein_uhlenbeck = partial(OrnsteinUhlenbeck, STILL, BOX)
item_policy, random_policy = rollout.recommendation.item_policy, rollout.random_policy


def act(policy, obs=OBS):
    """Traces `policy.apply`. Errors are raised before compilation."""
    return jax.eval_shape(lambda: policy.apply(None, obs, policy.init(B), KEY))


def masked(mask, space=DISCRETE, make=random_policy):
    return act(make(space, action_mask_fn=lambda obs: mask))


def explore_masked(*args):
    """Traces a policy that explores with a mask."""
    wrap = partial(EpsilonGreedy, policy(*args), epsilon=0.5)
    return masked(ALL_VALID, make=wrap)


def collect(policy, env=None):
    """Traces a step of a collector. Errors are raised before compilation."""
    env = envs.vectorize(env or CountEnv(), B)
    collector = rollout.Collector(env=env, policy=policy)
    return jax.eval_shape(lambda: collector.step(collector.init(KEY), None))


def transform_obs(fn):
    """Returns an environment with transformed observations."""
    return envs.TransformObs(CountEnv(), fn)


def stateful(change=lambda h: h, init=lambda num_envs: jnp.zeros((num_envs, 3))):
    act = lambda params, obs, state, key: (INTS, change(state))  # noqa: E731
    return collect(rollout.recurrent_policy(act, init))


def invalid_values(fn, message, *values):
    """Returns cases for invalid values of one argument."""
    return [(partial(fn, x), f"{message}, got {x!r}.") for x in values]


ACTIONS = "must return actions as int32 of shape (4,), got"
SCALARS = "(). Each observation is a scalar. A network of dense layers needs flat"
MASK = "`action_mask_fn` must return one flag per lane and action, an array of shape"
STEP = "`policy.apply` must return a `PolicyStep`"
BOUNDS = "`action_space` must have finite bounds"
MASKED = (
    "`action_space` must be discrete or have discrete parts if `action_mask_fn` is "
    "given"
)
FLOATS = "`action_space` must have a float dtype"
EPSILON, LEAST = "`epsilon` must be in [0, 1]", "must be at least 0 and finite"
PROCESS = "`theta` * `dt` below 2, or the noise grows without bound, got"
INNER_FLAG = "`no_valid_action` must be one bool per lane: bool of shape (4,)"
CASES = [
    # Results of policies.
    (lambda: collect(policy(jnp.zeros(B))), f"{ACTIONS} float32 of shape (4,)"),
    (lambda: collect(policy(INTS[:, None])), f"{ACTIONS} int32 of shape (4, 1)"),
    (
        lambda: collect(policy(INTS, {"v": INTS[0]})),
        "axes (4,), got int32 of shape () at ['v']",
    ),
    (
        lambda: stateful(lambda h: h[:, :1]),
        "must return a state like its input state: float32 of shape (4, 3), got float",
    ),
    (lambda: stateful(init=lambda n: {"h": jnp.ones(3)}), "`policy.init` must return"),
    (lambda: collect(STATELESS_RESULT), "must return (action, state)"),
    (lambda: collect(NO_STEP), STEP),
    (
        lambda: explore_masked(INTS[:, None]),
        "wrapped `policy.apply` must return actions as",
    ),
    (lambda: collect(policy(INTS[0]), transform_obs(lambda x: x[0])), SCALARS),
    (lambda: act(GaussianNoise(NO_STEP, BOX, 0.5)), f"wrapped {STEP}"),
    (lambda: Greedy(random_policy(DISCRETE)), "`policy` must have a `mode`"),
    # Action spaces.
    (lambda: random_policy(UNBOUNDED), BOUNDS),
    (lambda: EpsilonGreedy(STILL, UNBOUNDED, 0.1), BOUNDS),
    (lambda: masked(ALL_VALID, BOX), f"{MASKED}, got Box"),
    (lambda: masked(ALL_VALID, BOX, partial(warm_up, num_steps=1)), MASKED),
    (lambda: GaussianNoise(policy(), DISCRETE, 0.1), FLOATS),
    # Masks.
    (lambda: masked(TWO), f"{MASK} (4, 5), got bool of shape (4, 2)"),
    (lambda: masked(ALL_VALID[:1]), "got bool of shape (1, 5)"),
    (lambda: masked([True] * N), "got list"),
    (lambda: masked(jnp.ones((B, 3, 2), bool), PAIR), f"{MASK} (4, 2, 3), got bool"),
    (lambda: masked((TWO, TWO), PAIR), f"{MASK} (4, 3), got bool of shape (4, 2)"),
    (lambda: masked((TWO, TWO), MIXED), "must return None for a part"),
    (lambda: explore_masked(INTS, (OBS,)), "extras must be () or a dict, got"),
    (lambda: explore_masked(INTS, {"no_valid_action": INTS}), INNER_FLAG),
    # Exploration options.
    *invalid_values(
        epsilon_greedy, f"{EPSILON}, or a schedule", -0.1, 1.5, float("nan"), "0.1"
    ),
    (partial(warm_up, BOX, 2.5), "`num_steps` must be an int of at least 0, got 2.5"),
    *invalid_values(gaussian, f"`scale` {LEAST}, or a schedule", -0.1, INF),
    (partial(ornstein_uhlenbeck, 1.0, theta=-1.0, dt=0.1), f"{PROCESS} -1.0 and 0.1."),
    (partial(ornstein_uhlenbeck, 1.0, theta=4.0, dt=0.5), f"{PROCESS} 4.0 and 0.5."),
    # Items.
    (
        lambda: item_policy(jnp.add, sample=True, items=OBS),
        "`sample` must be False if",
    ),
    (
        lambda: act(item_policy(lambda p, obs: OBS), {"action_mask": TWO}),
        "one flag per lane",
    ),
]


@pytest.mark.parametrize(("call", "message"), CASES)
def test_invalid_call_raises(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.filterwarnings("ignore:shape requires:DeprecationWarning")
@pytest.mark.parametrize(
    ("transform_fn", "network"),
    [(lambda x: {"a": x}, nn.Dense(2)), (lambda x: (x, x), nn.Conv(2, (3,)))],
)
def test_tree_observation_error_names_flatten(transform_fn, network):
    act = lambda params, obs, key: network.apply({}, obs)  # noqa: E731
    with pytest.raises((AttributeError, IndexError, TypeError)) as error:
        collect(rollout.stateless_policy(act), transform_obs(transform_fn))
    notes = "".join(error.value.__notes__)
    assert "needs flat observations. Wrap the environment in `rollout.envs." in notes

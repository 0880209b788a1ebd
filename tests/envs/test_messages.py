"""Wrong calls of what is in `envs`, and by which message they are refused.

`test_bad_input.py` has more of them.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import ChanceEnv
from cases import CountEnv

import rollout
from rollout import envs
from rollout.envs import make, ratings, vectorize, vectorize_each
from rollout.envs.recommendation import LeaveByCategory, LeaveByDistance
from rollout.envs.spaces import MultiDiscrete
from rollout.envs.wrappers import FixedLength, NoRepeat

KEY = jax.random.key(0)
B = 3
TABLE = np.arange(12, dtype=np.float32).reshape(3, 4)
HOLES = np.where(TABLE == 3, np.nan, TABLE)
FLAGS = np.ones((5, 2), bool)
FEW = {"two": np.zeros((1, 3)), "one": np.zeros((1, 1))}


class Agents:
    """A `ChanceEnv` with some attributes or methods replaced."""

    def __init__(self, **changes):
        vars(self).update(changes)

    def __getattr__(self, name):
        return getattr(ChanceEnv(), name)


jax.tree_util.register_static(Agents)


def agents(action=None, **changes):
    """Traces a step, with the action that the space draws."""
    lanes = envs.vectorize(Agents(**changes), B)

    def play(key):
        keys = jax.random.split(key, B)
        state, _ = lanes.reset(keys)
        drawn = jax.vmap(lanes.action_space.sample)(keys)
        return lanes.step(keys, state, drawn if action is None else action)

    return jax.eval_shape(play, KEY)


def agents_returning(**changes):
    return agents(step=lambda *args: ChanceEnv().step(*args).replace(**changes))


def groups(**groups):
    return agents(groups={"two": ("a", "c"), **groups})


def acting():
    """One group of the name that the lanes need."""
    spaces = {"acting": envs.Discrete(2)}
    members = {"acting": ("a", "b", "c")}
    return agents(groups=members, action_spaces=spaces, observation_spaces=spaces)


def step(env):
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    return jax.eval_shape(lambda key: collector.step(collector.init(key), None), KEY)


def observe_info(initial):
    env = envs.ObserveInfo(CountEnv(), lambda info: info["noise"], lambda *_: initial)
    return step(vectorize(env, 2))


def uneven():
    lanes = jax.tree.map(lambda x: np.full(3, x), CountEnv())
    return lanes.replace(limit=np.full(4, 9))


def returning(**changes):
    """A `CountEnv` whose step returns something else."""

    class Changed(CountEnv):
        def step(self, key, state, action):
            return super().step(key, state, action).replace(**changes)

    return jax.tree_util.register_static(Changed)()


def normalize(info, **options):
    env = vectorize(returning(info=info), 2)
    return step(envs.NormalizeObs(env, **options))


def return_float(wrap):
    return step(vectorize(wrap(returning(truncated=jnp.float32(0.3))), 2))


def rescale_integers():
    class Steps(CountEnv):
        action_space = envs.Box(0, 9, (1,), jnp.dtype(jnp.int32))

    return envs.RescaleAction(jax.tree_util.register_static(Steps)())


def pendulum(**params):
    return make("Pendulum-v1", **params)


def picture(obs):
    """A `mask` that is not about actions."""
    return {"obs": obs, "action_mask": jnp.ones((3, 3), bool)}


def mask_picture():
    env = NoRepeat(envs.TransformObs(CountEnv(), picture))
    return jax.eval_shape(env.reset, KEY)


def log(users=(1, 2), items=(3, 4), column=(1.0, 2.0), **options):
    columns = {"user_id": users, "item_id": items, "feedback": column}
    return ratings.from_interactions(columns, **{"missing": 0, **options})


def recommend(*args, **options):
    return envs.recommendation.RecommendationEnv(*args, **options)


def show(item):
    env = recommend(TABLE)
    return env.step(KEY, jax.jit(env.reset)(KEY)[0], np.int32(item))


GROUPS = "every agent in exactly one group and no empty group, got {"
WRAPPERS = [
    lambda env: env,
    lambda env: envs.TimeLimit(env, 5),
    lambda env: FixedLength(env, 5),
    lambda env: envs.ActionRepeat(env, 2),
    envs.wrappers.TruncateOnNonFinite,
]
MESSAGES = [
    # `make`, `env_ids`, `render_gif`
    (lambda: make("ant"), "Ids of other suites begin with the suite name, for exampl"),
    (lambda: make("gymnasium:A-v1"), "with `rollout.envs.from_gymnasium` and"),
    (lambda: make("CartPole-v1", size=2, color=1), "; got color, size."),
    (lambda: make("CartPole-v1", gravity=np.ones(3)), "`gravity` must have shape ()"),
    (lambda: make("CartPole-v1", max_steps_in_episode=1.5), "be an integer, got 1.5"),
    (lambda: make("pgx:2048", speed=[3]), "pgx:2048 with speed=[3] fails"),
    (lambda: make("pgx:go"), "got 'pgx:go'. The nearest"),
    (lambda: envs.env_ids("zzz"), "`suite` must be one of installed, gymnax, "),
    (lambda: envs.render_gif(CountEnv(), {}, TABLE), "`render_frames`, got CountEnv."),
    # Spaces
    (lambda: envs.Discrete(300, dtype=jnp.uint8), "integers from 0 to 299, got uint8"),
    (lambda: envs.Box(np.zeros(2), np.ones(3), (2,)), "got a bound of shape (3,)"),
    (lambda: envs.Box(0, 300, (), np.uint8), "values of `dtype`, got 300 and uint8."),
    (lambda: envs.Box(-np.inf, 0, (), np.int32), "got -inf and int32."),
    (lambda: envs.Box(0, 1, (), np.complex64), "a float, integer or bool dtype, got"),
    (lambda: MultiDiscrete((3, 0)), "`nvec` must be an array of ints of at least 1"),
    (lambda: MultiDiscrete((3, 4), start=(1, 2, 3)), "`start` an int or as many ints"),
    # `vectorize`, `vectorize_each`
    (lambda: vectorize_each(uneven()), "got (3,), (4,). For equal environments"),
    (lambda: vectorize_each(Agents()), "one per lane, got no leaves"),
    (lambda: groups(), GROUPS),
    (lambda: groups(one=("b", "a")), GROUPS),
    (lambda: groups(one=("b",), no=()), GROUPS),
    (lambda: agents(agents=("a", "b", "b")), GROUPS),
    (lambda: agents(action_spaces={"two": 0}), "have the groups two, one, got two"),
    (acting, 'must not contain the name "acting"'),
    (lambda: agents(reset=lambda key: (0, 1)), "return (state, obs, acting)"),
    (lambda: agents(step=lambda *args: 3), "MultiAgentStep`, got int"),
    (lambda: agents_returning(reward=np.ones(2)), "value per agent, shape (3,), got"),
    (lambda: agents_returning(obs={"two": TABLE}), "the groups one, two, got ['two']"),
    (lambda: agents_returning(obs=FEW), "must have agents with the leading axes (2,)"),
    # Wrappers
    *[
        (functools.partial(return_float, wrap), "return `truncated` as bool, got")
        for wrap in WRAPPERS
    ],
    (lambda: envs.RescaleAction(CountEnv()), "with finite bounds, got Discrete"),
    (lambda: envs.RescaleAction(pendulum(max_torque=np.inf)), "bounds, got Box"),
    (rescale_integers, "must be a box of floats with finite bounds, got Box"),
    (lambda: observe_info(jnp.int32(0)), "must return `obs` as `env.reset` does"),
    (mask_picture, "`action_mask` in the observation must be bool of shape (3,)"),
    (lambda: normalize(()), "`info` must be a dict without the names raw_obs"),
    (lambda: normalize({"raw_obs": jnp.zeros(2)}), "raw_next_obs, got ['raw_obs']"),
    (lambda: normalize({}, only="x"), "`only` must be names, such as"),
    # `from_interactions`
    (lambda: log(feedback="stars"), "have the columns ['stars'], got ['user_id'"),
    (lambda: log(column=["1", "five"]), "five"),
    (lambda: log([None, None]), "must have a record"),
    (lambda: log(missing=np.nan), "item_mean, mask, got nan"),
    (lambda: log([1, 2**24 + 0.5]), "integers or text, got the float 16777216.5"),
    (lambda: log(np.array([2.0**53, np.nan])), "0992.0: floats from 9007199254740992"),
    (lambda: log(np.float32([2**24, 1])), "float 16777216.0: floats from 16777216"),
    # `RecommendationEnv` and its rules
    (lambda: recommend(HOLES), "`feedback` must be finite, got NaN or inf"),
    (lambda: recommend(TABLE[0]), "`feedback` must be [U, I]"),
    (lambda: recommend(TABLE, num_users=7), "is an array, got (7, None)"),
    (lambda: recommend(TABLE, LeaveByCategory(FLAGS, 5, 1)), "`leave` must be for"),
    (lambda: recommend(TABLE, known=FLAGS), "`known` must be bool of shape (3, 4)"),
    (lambda: recommend(TABLE, known=TABLE), "bool of shape (3, 4), got float32"),
    (lambda: show(4), "from 0 to 3, got 4"),
    (lambda: show(-1), "from 0 to 3, got -1"),
    (lambda: LeaveByCategory(TABLE, 5, 1), "`categories` must be [I, C] bool"),
    (lambda: LeaveByDistance(HOLES, 5, 1.0), "`features` must be finite"),
]


@pytest.mark.filterwarnings("ignore:Dropped .* missing_id")
@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize(("call", "message"), MESSAGES)
def test_wrong_call_is_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()

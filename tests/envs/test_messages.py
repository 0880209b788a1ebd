"""Bad input to `rollout.envs`: each error message, and a call that raises it.

`test_bad_input.py` contains more cases.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import ChanceEnv
from cases import CountEnv
from flax import struct

import rollout
from rollout import envs
from rollout.envs import make, ratings, vectorize, vectorize_each
from rollout.envs.recommendation import LeaveByCategory, LeaveByDistance
from rollout.envs.spaces import MultiDiscrete
from rollout.envs.wrappers import FixedLength, NoRepeat, TimeLimit

KEY = jax.random.key(0)
NUM_ENVS = 3
TABLE = np.arange(12, dtype=np.float32).reshape(3, 4)
TABLE_WITH_NAN = np.where(TABLE == 3, np.nan, TABLE)
FLAGS = np.ones((5, 2), bool)
FEWER_AGENTS = {"two": np.zeros((1, 3)), "one": np.zeros((1, 1))}


class PatchedAgents:
    """A `ChanceEnv` with some attributes or methods replaced."""

    def __init__(self, **changes):
        vars(self).update(changes)

    def __getattr__(self, name):
        return getattr(ChanceEnv(), name)


jax.tree_util.register_static(PatchedAgents)


def step_agents(action=None, **changes):
    """Traces a step with an action sampled from the space."""
    lanes = envs.vectorize(PatchedAgents(**changes), NUM_ENVS)

    def play(key):
        keys = jax.random.split(key, NUM_ENVS)
        state, _ = lanes.reset(keys)
        sampled_action = jax.vmap(lanes.action_space.sample)(keys)
        return lanes.step(keys, state, sampled_action if action is None else action)

    return jax.eval_shape(play, KEY)


def step_with_fields(**changes):
    return step_agents(step=lambda *args: ChanceEnv().step(*args).replace(**changes))


def step_groups(**groups):
    return step_agents(groups={"two": ("a", "c"), **groups})


def acting_group():
    """Traces agents with a group that has a reserved name."""
    spaces = {"acting": envs.Discrete(2)}
    members = {"acting": ("a", "b", "c")}
    return step_agents(groups=members, action_spaces=spaces, observation_spaces=spaces)


def step_env(env):
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    return jax.eval_shape(lambda key: collector.step(collector.init(key), None), KEY)


def observe_info(initial):
    env = envs.ObserveInfo(CountEnv(), lambda info: info["noise"], lambda *_: initial)
    return step_env(vectorize(env, 2))


def make_uneven_lanes():
    lanes = jax.tree.map(lambda x: np.full(3, x), CountEnv())
    return lanes.replace(limit=np.full(4, 9))


@struct.dataclass
class LeveledEnv(CountEnv):
    def at_episode(self, number):
        return self


@struct.dataclass
class Holder:
    """Holds an environment and does not forward `at_episode`."""

    inner: envs.types.Env

    def reset(self, key):
        return self.inner.reset(key)

    def step(self, key, state, action):
        return self.inner.step(key, state, action)


def make_returning_env(**changes):
    """Returns a `CountEnv` whose step has other fields."""

    class ChangedEnv(CountEnv):
        def step(self, key, state, action):
            return super().step(key, state, action).replace(**changes)

    return jax.tree_util.register_static(ChangedEnv)()


def normalize_info(info, **options):
    env = vectorize(make_returning_env(info=info), 2)
    return step_env(envs.NormalizeObs(env, **options))


def step_with_float_flag(wrap):
    return step_env(vectorize(wrap(make_returning_env(truncated=jnp.float32(0.3))), 2))


def rescale_integer_actions():
    class IntegerActions(CountEnv):
        action_space = envs.Box(0, 9, (1,), jnp.dtype(jnp.int32))

    return envs.RescaleAction(jax.tree_util.register_static(IntegerActions)())


def make_pendulum(**params):
    return make("Pendulum-v1", **params)


def add_image_mask(obs):
    """Adds an `action_mask` with the shape of an image."""
    return {"obs": obs, "action_mask": jnp.ones((3, 3), bool)}


def reset_with_image_mask():
    env = NoRepeat(envs.TransformObs(CountEnv(), add_image_mask))
    return jax.eval_shape(env.reset, KEY)


def read_log(users=(1, 2), items=(3, 4), column=(1.0, 2.0), **options):
    columns = {"user_id": users, "item_id": items, "feedback": column}
    return ratings.from_interactions(columns, **{"missing": 0, **options})


def make_recommendation_env(*args, **options):
    return envs.recommendation.RecommendationEnv(*args, **options)


def step_item(item):
    env = make_recommendation_env(TABLE)
    return env.step(KEY, jax.jit(env.reset)(KEY)[0], np.int32(item))


GROUPS = "every agent in exactly one group"
WRAPPERS = [
    lambda env: env,
    lambda env: envs.TimeLimit(env, 5),
    lambda env: FixedLength(env, 5),
    lambda env: envs.ActionRepeat(env, 2),
    envs.wrappers.TruncateOnNonFinite,
]
MESSAGES = [
    # `make`, `env_ids`, `render_gif`
    (lambda: make("ant"), "got 'ant'"),
    (lambda: make("gymnasium:A-v1"), "`rollout.envs.from_gymnasium`"),
    (lambda: make("CartPole-v1", size=2, color=1), "color, size"),
    (lambda: make("CartPole-v1", gravity=np.ones(3)), "`gravity` must have shape ()"),
    (lambda: make("CartPole-v1", max_steps_in_episode=1.5), "integer, got 1.5"),
    (lambda: make("pgx:2048", speed=[3]), "pgx:2048 with speed=[3] fails"),
    (lambda: make("pgx:go"), "got 'pgx:go'"),
    (lambda: envs.env_ids("zzz"), "`suite` must be"),
    (lambda: envs.render_gif(CountEnv(), {}, TABLE), "`render_frames`, got CountEnv"),
    # Spaces
    (lambda: envs.Discrete(300, dtype=jnp.uint8), "integers from 0 to 299, got uint8"),
    (lambda: envs.Box(np.zeros(2), np.ones(3), (2,)), "shape (3,)"),
    (lambda: envs.Box(0, 300, (), np.uint8), "values of `dtype`, got 300 and uint8."),
    (lambda: envs.Box(-np.inf, 0, (), np.int32), "got -inf and int32."),
    (lambda: vectorize(Holder(LeveledEnv()), 2), "`Holder` must have the method"),
    (
        lambda: vectorize(TimeLimit(Holder(TimeLimit(LeveledEnv(), 3)), 3), 2),
        "`at_episode` of its field `inner`, a TimeLimit, got none",
    ),
    (lambda: envs.Box(0, 1, (), np.complex64), "`dtype` must be"),
    (lambda: MultiDiscrete((3, 0)), "`nvec` must be"),
    (lambda: envs.spaces.MultiBinary(3), "got 3. Write `(3,)`."),
    (lambda: envs.Box(0.0, 1.0, 3), "got 3. Write `(3,)`."),
    (lambda: envs.Box(0.0, 1.0, (2, -1)), "got (2, -1)."),
    (lambda: MultiDiscrete((3, 4), start=(1, 2, 3)), "`start`"),
    # `vectorize`, `vectorize_each`
    (lambda: vectorize_each(make_uneven_lanes()), "got (3,), (4,)"),
    (lambda: vectorize_each(PatchedAgents()), "no leaves"),
    (lambda: step_groups(), GROUPS),
    (lambda: step_groups(one=("b", "a")), GROUPS),
    (lambda: step_groups(one=("b",), no=()), GROUPS),
    (lambda: step_agents(agents=("a", "b", "b")), GROUPS),
    (lambda: step_agents(action_spaces={"two": 0}), "groups two, one, got two"),
    (acting_group, '"acting"'),
    (lambda: step_agents(reset=lambda key: (0, 1)), "return (state, obs, acting)"),
    (lambda: step_agents(step=lambda *args: 3), "MultiAgentStep`, got int"),
    (lambda: step_with_fields(reward=np.ones(2)), "shape (3,), got"),
    (lambda: step_with_fields(obs={"two": TABLE}), "groups one, two, got ['two']"),
    (lambda: step_with_fields(obs=FEWER_AGENTS), "leading axes (2,)"),
    # Wrappers
    *[
        (functools.partial(step_with_float_flag, wrap), "`truncated` as bool")
        for wrap in WRAPPERS
    ],
    (lambda: envs.RescaleAction(CountEnv()), "bounds, got Discrete"),
    (lambda: envs.RescaleAction(make_pendulum(max_torque=np.inf)), "bounds, got Box"),
    (rescale_integer_actions, "finite bounds, got Box"),
    (lambda: observe_info(jnp.int32(0)), "must return `obs`"),
    (reset_with_image_mask, "bool of shape (3,)"),
    (lambda: normalize_info(()), "`info` must be a dict"),
    (
        lambda: normalize_info({"raw_obs": jnp.zeros(2)}),
        "raw_next_obs, got ['raw_obs']",
    ),
    (lambda: normalize_info({}, only="x"), "`only` must be names"),
    # `from_interactions`
    (lambda: read_log(feedback="stars"), "columns ['stars'], got ['user_id'"),
    (lambda: read_log(column=["1", "five"]), "five"),
    (lambda: read_log([None, None]), "must have a record"),
    (lambda: read_log(missing=np.nan), "item_mean, mask, got nan"),
    (lambda: read_log([1, 2**24 + 0.5]), "got the float 16777216.5"),
    (lambda: read_log(np.array([2.0**53, np.nan])), "float 9007199254740992.0"),
    (lambda: read_log(np.float32([2**24, 1])), "float 16777216.0"),
    # `RecommendationEnv` and leave rules
    (lambda: make_recommendation_env(TABLE_WITH_NAN), "`feedback` must be finite"),
    (lambda: make_recommendation_env(TABLE[0]), "`feedback` must be [U, I]"),
    (lambda: make_recommendation_env(TABLE, num_users=7), "got (7, None)"),
    (
        lambda: make_recommendation_env(TABLE, LeaveByCategory(FLAGS, 5, 1)),
        "`leave` must",
    ),
    (
        lambda: make_recommendation_env(TABLE, known=FLAGS),
        "`known` must be bool of shape (3, 4)",
    ),
    (
        lambda: make_recommendation_env(TABLE, known=TABLE),
        "bool of shape (3, 4), got float32",
    ),
    (lambda: step_item(4), "from 0 to 3, got 4"),
    (lambda: step_item(-1), "from 0 to 3, got -1"),
    (lambda: LeaveByCategory(TABLE, 5, 1), "`categories` must"),
    (lambda: LeaveByDistance(TABLE_WITH_NAN, 5, 1.0), "`features` must be finite"),
]


@pytest.mark.filterwarnings("ignore:Dropped .* missing_id")
@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize(("call", "message"), MESSAGES)
def test_error_names_the_argument(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_dataclass_around_environment_without_levels_is_accepted():
    assert vectorize(Holder(TimeLimit(CountEnv(), 3)), 2).num_envs == 2

"""One environment becomes B of them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, quick_jit, raw
from flax import struct

import rollout
from rollout import envs


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, True, None])
def test_bad_num_envs_is_refused(num_envs):
    message = "`num_envs` must be an int of at least 1, got"
    with pytest.raises(ValueError, match=message):
        envs.vectorize(CountEnv(), num_envs)
    with pytest.raises(ValueError, match=message):
        envs.make_vec("CartPole-v1", num_envs)


def test_unknown_auto_reset_is_refused():
    message = '`auto_reset` must be "auto" or "compact" or "select", got \'lazy\'.'
    with pytest.raises(ValueError, match=message):
        envs.vectorize(CountEnv(), 2, auto_reset="lazy")


@pytest.mark.parametrize("name", ["reward", "terminated", "truncated"])
def test_flag_or_reward_that_is_no_scalar_is_refused(name):
    class Wide(CountEnv):
        def step(self, key, state, action):
            step = super().step(key, state, action)
            return step.replace(**{name: jnp.zeros((3,), bool)})

    jax.tree_util.register_static(Wide)
    env = envs.vectorize(Wide(), 2)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    message = rf"`env.step` must return `{name}` as .* \(2,\), got .* shape \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        collector.step(collector.init(jax.random.key(0)), None)


def test_rewards_and_flags_are_cast_and_nothing_stays_weakly_typed():
    env = envs.vectorize(CountEnv(), 2)
    state, obs = env.reset(jax.random.split(jax.random.key(0)))
    action = jnp.zeros(2, jnp.int32)
    step = env.step(jax.random.split(jax.random.key(1)), state, action)
    assert step.reward.dtype == jnp.float32
    assert step.terminated.dtype == step.truncated.dtype == bool
    state.pop("key"), step.state.pop("key")
    assert not any(x.weak_type for x in jax.tree.leaves((state, obs, step)))


def test_vector_env_is_a_pytree_of_the_parameters():
    env = envs.make_vec("CartPole-v1", 2, gravity=1.25)
    assert 1.25 in jax.tree.leaves(env)
    assert env.num_envs == 2
    assert env.observation_space.shape == (4,)


def of_each(length, limit, auto_reset="compact"):
    """Lanes that terminate after a length, which a reset sets, or stop at a limit."""
    make = jax.vmap(lambda x, y: CountEnv(min_length=x, max_length=x, limit=y))
    return envs.vectorize_each(make(length, limit), len(limit), auto_reset=auto_reset)


# That both resets give the same bits is tested elsewhere too.
@pytest.mark.parametrize(
    "auto_reset", ["compact", pytest.param("select", marks=pytest.mark.slow)]
)
def test_every_lane_has_parameters_of_its_own(auto_reset):
    length, limit = np.array([3, 9, 2] * 6), np.array([9, 4, 9] * 6)
    env = of_each(length, limit, auto_reset)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)

    @quick_jit
    def run(key):
        return collector.collect_steps(collector.init(key), None, 12)[1]

    trajectory = run(jax.random.key(0))
    step = np.arange(1, 13)[:, None]  # a multiple of 2, 3 and 4
    length, limit = length[None], limit[None]
    np.testing.assert_array_equal(
        trajectory.terminated, (step % length == 0) & (length < limit)
    )
    np.testing.assert_array_equal(
        trajectory.truncated, (step % limit == 0) & (limit < length)
    )
    steps = (step - 1) % np.minimum(length, limit) + 1
    np.testing.assert_array_equal(trajectory.episode_length, steps)


@pytest.mark.usefixtures("key_reuse")
def test_lanes_with_equal_parameters_are_those_of_vectorize():
    each = of_each(jnp.full(4, 9), jnp.full(4, 5))
    same = envs.vectorize(CountEnv(min_length=9, max_length=9, limit=5), 4)
    assert each.action_space == same.action_space

    @quick_jit
    def run(keys):
        results = []
        for env in (each, same):
            state, obs = env.reset(keys)
            step = env.step(keys, state, jnp.arange(4) % 3)
            lanes = envs.types.Lanes(episode_key=keys, state=step.state, obs=step.obs)
            fresh = env.reset_done(lambda lane: keys[lane], jnp.arange(4) < 2, lanes)
            results.append(raw((obs, step, fresh)))
        return results

    chex.assert_trees_all_equal(*run(jax.random.split(jax.random.key(0), 4)))


@struct.dataclass
class NoParameters:
    """An environment without a leaf."""

    reset = step = None


@pytest.mark.parametrize(
    ("env", "got"),
    [
        (CountEnv(), r"shape \(\)"),
        (jax.tree.map(lambda x: jnp.full(3, x), CountEnv()), r"shape \(3,\)"),
        (NoParameters(), "no leaves"),
    ],
)
def test_parameters_without_lanes_are_refused(env, got):
    message = r"leaves with the leading axis num_envs=4, got " + got
    with pytest.raises(ValueError, match=message):
        envs.vectorize_each(env, 4)

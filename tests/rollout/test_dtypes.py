"""Tests of dtypes with 64-bit numbers and with strict promotion."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import OneAgent
from cases import CountEnv, collect

import rollout
from rollout import buffers, envs

KEY = jax.random.key(3)


def categorical(params, obs, key):
    return jax.random.categorical(key, obs * params[None])


def gaussian(params, obs, key):
    return {"push": jax.random.normal(key, (4,)), "turn": obs[:, 0].astype(int) % 3}


@jax.tree_util.register_static
class TwoPart(CountEnv):
    """An environment with a float and an integer action, recorded in `info`."""

    action_space = envs.spaces.Dict(
        {"push": envs.Box(-9.0, 9.0, ()), "turn": envs.Discrete(3)}
    )

    def step(self, key, state, action):
        result = super().step(key, state, action["turn"])
        return result.replace(info={"action": action})


@pytest.mark.compiles(40)
@pytest.mark.parametrize(
    ("env", "act", "dtypes"),
    [
        (CountEnv(), categorical, {"int32"}),
        (TwoPart(), gaussian, {"int32", "float32"}),
    ],
)
def test_actions_are_cast_to_the_dtype_of_the_space(env, act, dtypes):
    def play():
        lanes = envs.vectorize(env, 4)
        policy = rollout.stateless_policy(act)
        collector = rollout.Collector(env=lanes, policy=policy)
        params = jnp.arange(3.0)
        rows = collector.collect_steps(collector.init(KEY), params, 6)[1]
        return jax.device_get(rows)

    with jax.enable_x64(True):
        rows = play()
        raw_action = jax.eval_shape(act, jnp.arange(3.0), rows.obs[0], KEY)
    assert {x.dtype.name for x in jax.tree.leaves(rows.action)} == dtypes
    assert any(x.dtype.itemsize == 8 for x in jax.tree.leaves(raw_action))
    chex.assert_trees_all_equal(rows.info["action"], rows.action)


@jax.tree_util.register_static
class Level(CountEnv):
    """An environment with equal levels."""

    def at_episode(self, number):
        assert number.dtype == "int32"
        return self


def test_policy_and_episode_ids_are_int32():
    policy = rollout.random_policy(envs.Discrete(3))

    def sample_mapping(key, names):
        return jax.random.randint(key, (1,), 0, 2)

    with jax.enable_x64(True):
        levels = envs.vectorize(envs.wrappers.Trials(Level(), 2), 4)
        rollout.Collector(env=levels, policy=policy).row_shape(None)
        agents = envs.vectorize(OneAgent(CountEnv()), 4)
        policies = {"one": policy, "two": policy}
        policy = rollout.agents.policy_map(policies, sample_mapping, agents)
        row = rollout.Collector(agents, policy).row_shape(dict.fromkeys(policies))
    assert row.extras.policy_id.dtype == "int32"


BUFFERS = [
    buffers.ReplayBuffer(64, 4),
    buffers.ReplayBuffer(64, 4, next_obs="shared"),
    buffers.PrioritizedReplayBuffer(64, 4),
    buffers.EpisodeBuffer(64, 4),
]


@pytest.mark.filterwarnings("error::FutureWarning")
@jax.debug_key_reuse(False)
@pytest.mark.compiles(60)
@pytest.mark.parametrize("buffer", BUFFERS, ids=lambda x: f"{type(x).__name__}")
def test_buffers_keep_dtypes(buffer):
    rows = jax.tree.map(lambda x: x[:12, :4], collect("count")[1])

    def use(key):
        state = buffer.init(jax.tree.map(lambda x: x[0], rows))
        state = buffer.add(state, rows)
        n_step = {"n_step": 3, "gamma": 0.9} if buffer.next_obs == "stored" else {}
        keep = lambda key, rows, future: rows  # noqa: E731
        return state, [
            buffer.replace(**n_step).sample(state, key, 8),
            buffer.replace(stack=2).sample(state, key, 8),
            buffer.replace(relabel_fn=keep).sample(state, key, 8),
            buffer.sample_sequences(state, key, 8, 3),
            buffer.sample_episodes(state, key, 8, 9),
            buffer.can_sample(state, 8),
            buffer.size(state),
        ]

    with jax.numpy_dtype_promotion("strict"):
        want = jax.eval_shape(use, KEY)
    with jax.enable_x64(True):
        chex.assert_trees_all_equal_dtypes(jax.eval_shape(use, KEY), want)


@pytest.mark.compiles(60)
def test_targets_and_statistics_keep_dtypes():
    env = envs.vectorize(CountEnv(), 4)
    collector = rollout.Collector(
        env=env, policy=rollout.random_policy(env.action_space)
    )
    with jax.numpy_dtype_promotion("strict"):
        rows = collector.collect_steps(collector.init(KEY), None, 12)[1]
        flags, value = (rows.terminated, rows.truncated), jnp.zeros(rows.mask.shape)
        advantage = rollout.gae(
            rows.reward, value, value, *flags, gamma=0.9, lambda_=0.9, mask=rows.mask
        )
        rollout.scan_minibatches(
            lambda *x: x, (), KEY, (rows, advantage), num_minibatches=4
        )
        stats = rollout.evaluate(collector, None, KEY, 5)
    assert advantage.dtype == np.float32
    assert stats.num_episodes == 5

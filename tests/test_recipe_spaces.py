"""Tests of agents in all spaces, in JAX and in host environments.

`rollout/test_distributions.py` tests the distributions over all kinds of spaces.
"""

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from cases import quick_jit
from flax import struct
from recipe_cases import MaskedEnv, make_agent

import rollout
from rollout import envs
from rollout.distributions import ActionDistribution
from rollout.envs import spaces
from rollout.recipes import dqn, ppo, pqn, recurrent_ppo, sac, td3

TREE = spaces.Dict(
    {"turn": envs.Discrete(2, start=3), "pull": spaces.Tuple((envs.Box(2.0, 6.0, ()),))}
)
HALF_OPEN = envs.Box(jnp.array([0.0, -jnp.inf]), jnp.array([jnp.inf, 3.0]), (2,))
BOX = envs.Box(-2.0, 3.0, (2, 1))
NUM_ENVS = 16
CONFIG = ppo.Config(num_updates=12, num_steps=32, hidden_layer_sizes=(16, 16))
SAC_CONFIG = sac.Config(
    num_updates=2,
    num_steps=200,
    gradient_steps=4,
    learning_starts=256,
    gamma=0.0,
    reward_scale=1.0,
)
TD3_CONFIG = td3.Config(
    num_updates=2,
    num_steps=400,
    learning_starts=256,
    batch_size=128,
    gamma=0.0,
    hidden_layer_sizes=(64, 64),
)


@struct.dataclass
class TargetEnv:
    """Rewards an action by 1 minus its distance from `_best`.

    The observation is an element of a space, sampled at each of five steps.
    """

    action_space: Any
    observation_space: Any

    def reset(self, key):
        return jnp.int32(0), self.observation_space.sample(key)

    def step(self, key, state, action):
        leaves = jax.tree.leaves(action)
        rewards = [
            1 - jnp.abs(_best(part) - x.astype(float)).sum() / max(x.size, 1)
            for part, x in zip(self.action_space.leaves(), leaves, strict=True)
        ]
        return envs.EnvStep(
            state=state + 1,
            obs=self.observation_space.sample(key),
            reward=sum(rewards) / len(rewards),
            terminated=jnp.bool_(False),
            truncated=state == 4,
            info={},
        )


def _best(part):
    """Returns the largest integer, or the float closest to 1."""
    low, high = (
        jnp.broadcast_to(jnp.asarray(x, float), part.shape) for x in part.bounds
    )
    is_float = jnp.issubdtype(part.dtype, jnp.floating)
    return jnp.clip(1.0, low, high) if is_float else high


@pytest.mark.very_slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize(
    ("agent_class", "config", "space", "num_envs", "min_return"),
    [
        (ppo.PPO, CONFIG, TREE, NUM_ENVS, 4.5),
        (sac.SAC, SAC_CONFIG, HALF_OPEN, 4, 4),
        (td3.TD3, TD3_CONFIG, BOX, 4, 4),
    ],
)
def test_agents_learn_any_space(agent_class, config, space, num_envs, min_return):
    agent = agent_class(envs.vectorize(TargetEnv(space, TREE), num_envs), config)
    state, _ = jax.jit(lambda key: agent.train(agent.init(key)))(jax.random.key(0))
    collector = agent.collector.replace(policy=agent.eval_policy)
    key = jax.random.key(1)
    stats = rollout.evaluate(collector, state.params, key, num_episodes=20)
    assert stats.returns.mean > min_return
    obs = jax.tree.map(lambda x: x[0], state.carry.obs)
    assert space.contains(agent.predict(state.params, obs))


def test_floats_are_sampled_from_a_normal_distribution():
    distribution = ActionDistribution(envs.Box(-1.0, 1.0, ()))
    params = jnp.array([0.5, -1.0])  # mean, log standard deviation
    keys = jax.random.split(jax.random.key(0), 2000)
    raw = quick_jit(jax.vmap(lambda key: distribution.sample(params, key)))(keys)
    normal = scipy.stats.norm(0.5, np.exp(-1.0))
    assert scipy.stats.kstest(np.asarray(raw), normal.cdf).pvalue > 1e-3


# Policies return a tuple of action and extras. This action is also a tuple.
PAIR = spaces.Tuple((TREE, envs.Box(0.0, 10.0, (2,))))


@pytest.mark.parametrize(
    ("name", "action_space"),
    [("ppo", None), ("ppo", PAIR), ("recurrent_ppo", None), ("sac", None)],
)
def test_actions_are_elements_of_the_space(name, action_space, key_reuse):
    env = envs.vectorize(TargetEnv(action_space, TREE), 2) if action_space else None
    agent = make_agent(name, env)

    @quick_jit
    def act(key):
        obs = jax.vmap(agent.spec.observation_space.sample)(jax.random.split(key, 64))
        first_obs = jax.tree.map(lambda x: x[:2], obs)
        params = agent.init_learner(key, first_obs).params
        params = jax.tree.map(lambda x: 3 * x, params)
        state = agent.policy.init(64)
        return obs, [
            policy.apply(params, obs, state, key).action
            for policy in (agent.policy, agent.eval_policy)
        ]

    obs, actions = jax.device_get(act(jax.random.key(0)))
    for action in actions:
        assert jax.vmap(agent.spec.action_space.contains)(action).all()
        if "action_mask" in obs:
            mask = obs["action_mask"]
            is_valid = np.take_along_axis(mask, action[:, None] + 2, axis=1)[:, 0]
            assert (is_valid == mask.any(axis=1)).all()


class MemoryEnv(gymnasium.Env):
    """Rewards the turn of the previous step. The last of three actions is masked."""

    action_space = gymnasium.spaces.Discrete(3, start=-2)
    observation_space = gymnasium.spaces.Dict(
        {
            "turn": gymnasium.spaces.Discrete(2, start=3),
            "action_mask": gymnasium.spaces.Box(0, 1, (3,), np.int8),
        }
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.turn = 0, 3
        return self.observe(), {}

    def step(self, action):
        reward = float(action == self.turn - 5)
        self.number, self.turn = self.number + 1, self.next_turn
        return self.observe(), reward, False, self.number == 8, {}

    def observe(self):
        self.next_turn = int(self.np_random.integers(3, 5))
        mask = np.array([1, 1, 0], np.int8)
        return {"turn": self.next_turn, "action_mask": mask}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
def test_recurrent_ppo_uses_its_memory():
    """Trains in host environments. The page of the recipe trains in JAX."""
    config = recurrent_ppo.Config(
        num_updates=30,
        num_steps=32,
        learning_rate=1e-2,
        memory_size=16,
        hidden_layer_sizes=(16, 16),
    )
    env = envs.from_gymnasium(MemoryEnv, NUM_ENVS)
    agent = recurrent_ppo.RecurrentPPO(env, config)
    state, metrics = agent.train(agent.init(jax.random.key(0)))
    assert metrics["return_mean"][-1] > 7  # without a memory 4.5
    _, t = agent.collector.collect_steps(state.carry, state.params, 16)
    assert set(np.unique(t.action).tolist()) <= {-2, -1}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize(
    ("agent_class", "make", "changes"),
    [
        (ppo.PPO, envs.make_vec, {"num_steps": 64, "num_minibatches": 4}),
        (ppo.PPO, envs.from_gymnasium, {"num_steps": 64, "num_minibatches": 4}),
        (dqn.DQN, envs.from_gymnasium, {"num_updates": 150, "anneal_lr": False}),
    ],
)
def test_agents_learn_cartpole(agent_class, make, changes):
    config = agent_class.config.replace(**{"num_updates": 45} | changes)
    agent = agent_class(make("CartPole-v1", NUM_ENVS), config)
    state, metrics = agent.train(agent.init(jax.random.key(0)))
    assert np.nanmax(metrics["return_mean"]) > 120
    assert state.num_updates == config.num_updates


def test_advantages_at_time_limits_equal_a_plain_loop():
    """Episodes in host environments have at most four steps."""
    env = envs.from_gymnasium(
        lambda: gymnasium.wrappers.TimeLimit(
            gymnasium.make("CartPole-v1").unwrapped, 4
        ),
        num_envs=2,
    )
    agent = ppo.PPO(env, CONFIG)
    state = agent.init(jax.random.key(0))
    carry, t = agent.collector.collect_steps(state.carry, state.params, 10)
    last_value = agent.collector.value(carry, state.params)

    @quick_jit
    def advantages(params, t, last_value):
        value = t.extras["value"]
        next_value = rollout.next_values(t, value, last_value)
        flags = t.terminated, t.truncated
        advantage = rollout.gae(
            t.reward, value, next_value, *flags, gamma=0.9, lambda_=0.8
        )
        return advantage, agent.model.apply(params, t.next_obs)[1]

    t, (advantage, true_next_value) = jax.device_get(
        (t, advantages(state.params, t, last_value))
    )
    assert t.truncated.sum() == 4
    next_advantage, expected = np.zeros(2), np.zeros((10, 2))
    for step in reversed(range(10)):
        value = t.extras["value"][step]
        bootstrap = 0.9 * ~t.terminated[step] * true_next_value[step]
        delta = t.reward[step] + bootstrap - value
        next_advantage = delta + 0.72 * ~t.done[step] * next_advantage
        expected[step] = next_advantage
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize(
    ("agent_class", "options"),
    [
        pytest.param(
            dqn.DQN, {"num_steps": 8, "gradient_steps": 8}, marks=pytest.mark.very_slow
        ),
        (pqn.PQN, {"num_updates": 30}),
    ],
)
def test_q_learning_finds_the_best_valid_action(agent_class, options):
    """The best action is the largest valid number."""
    sizes = {"num_updates": 60, "hidden_layer_sizes": (16, 16)}
    env = envs.vectorize(MaskedEnv(), NUM_ENVS)
    agent = agent_class(env, agent_class.config.replace(**sizes | options))
    state, _ = jax.jit(lambda key: agent.train(agent.init(key)))(jax.random.key(0))
    collector = agent.collector.replace(policy=agent.eval_policy)
    carry = collector.init(jax.random.key(1))
    _, t = collector.collect_steps(carry, state.params, 32)
    best = np.where(t.obs["action_mask"], np.arange(-2, 1), -3).max(axis=-1)
    assert (t.action == best).mean() > 0.95


EMPTY_BOX, FORCE = envs.Box(-1.0, 1.0, (0,)), envs.Box(-1.0, 1.0, (2,))
PART = spaces.Dict({"nothing": EMPTY_BOX, "pair": FORCE})


@pytest.mark.parametrize("name", ["ppo", "recurrent_ppo", "dqn", "pqn", "sac", "td3"])
def test_agents_raise_for_spaces_without_entries(name):
    action_space = envs.Discrete(2) if name in ("dqn", "pqn") else FORCE
    env = envs.vectorize(TargetEnv(action_space, EMPTY_BOX), 2)
    with pytest.raises(ValueError, match=r"observation_space` must have .* \(0,\)"):
        make_agent(name, env).init(jax.random.key(0))
    env = envs.vectorize(TargetEnv(EMPTY_BOX, FORCE), 2)
    with pytest.raises(ValueError, match=r"action_space` must have .* shape \(0,\)"):
        make_agent(name, env).init(jax.random.key(0))


def test_parts_without_entries_train():
    agent = make_agent("ppo", envs.vectorize(TargetEnv(PART, PART), 2))
    state = jax.eval_shape(agent.init, jax.random.key(0))
    state, _ = jax.eval_shape(lambda state: agent.train(state, 1), state)
    assert state.carry.obs["nothing"].shape == (2, 0)
    assert rollout.check_env(TargetEnv(EMPTY_BOX, EMPTY_BOX)) == ()

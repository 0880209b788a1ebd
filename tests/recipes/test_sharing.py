"""Agents that share one policy: every recipe equals its own rows and updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo_envs import Crowd, Duel

import rollout
from rollout import agents, envs
from rollout.recipes import load, run
from rollout.recipes.ppo import PPO, Config
from rollout.recipes.recurrent_ppo import RecurrentPPO

B, A = 4, 3
CONFIG = Config(num_updates=2, num_steps=8, num_minibatches=2, num_epochs=1)


@jax.tree_util.register_static
class Walk:
    """Three agents walk; agent i ends after 4 + i steps, the last by truncation."""

    agents = "a", "b", "c"
    groups = {"agents": agents}  # noqa: RUF012
    simultaneous = True
    observation_spaces = {"agents": envs.Box(-100.0, 100.0, (2,))}  # noqa: RUF012
    action_spaces = {"agents": envs.Discrete(2)}  # noqa: RUF012

    def reset(self, key):
        position = jax.random.randint(key, (A,), -2, 3)
        state = position, jnp.int32(0)
        return state, self.observe(state), jnp.ones(A, bool)

    def observe(self, state):
        position, n = state
        n = jnp.broadcast_to(n, A)
        return {"agents": jnp.stack([position, n], -1).astype(jnp.float32)}

    def step(self, key, state, action):
        position, n = state
        state = position + 2 * action["agents"] - 1, n + 1
        ended = n + 1 == 4 + jnp.arange(A)
        is_last = jnp.arange(A) == A - 1
        return envs.multi_agent.MultiAgentStep(
            state=state,
            obs=self.observe(state),
            acting=jnp.ones(A, bool),
            reward=-jnp.abs(state[0]).astype(jnp.float32),
            terminated=ended & ~is_last,
            truncated=ended & is_last,
            episode_terminated=False,
            episode_truncated=False,
        )


@pytest.mark.compiles(60)
def test_shared_ppo_equals_learning_from_agent_transitions():
    env = envs.vectorize(Walk(), B)
    agent = PPO(env, CONFIG)
    state, metrics = jax.jit(agent.train)(agent.init(jax.random.key(0)))

    policy = agents.policy_map(
        {"shared": agent.policy}, agents.static_mapping("shared"), env
    )
    collector = rollout.Collector(env=env, policy=policy)

    @jax.jit
    def update(state):
        params = {"shared": state.params}
        carry, t = collector.collect_steps(state.carry, params, CONFIG.num_steps)
        rows = agents.agent_transitions((), t)[1]["agents"]
        last = agents.last_values((), collector.value(carry, params))["agents"]
        state, metrics = agent.learn(state.replace(carry=()), rows, last)
        return state.replace(carry=carry), metrics

    want = agent.init(jax.random.key(0))
    for n in range(CONFIG.num_updates):
        want, want_metrics = update(want)
        want_metrics["return_mean"] *= A  # of the team
        for name, value in want_metrics.items():
            np.testing.assert_allclose(metrics[name][n], value, rtol=1e-4, atol=1e-6)
    for x, y in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(want.params), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    assert agent.spec.num_envs == B * A
    assert agent.env_steps(2) == 2 * CONFIG.num_steps * B
    assert agent.predict(state.params, np.zeros(2, np.float32)).shape == ()


@pytest.mark.compiles(80)
def test_agents_in_python_share_a_policy():
    class Reds(Crowd):
        possible_agents = "red_0", "red_1", "red_2"

    env = envs.from_pettingzoo(Reds, B, late=False)
    agent = PPO(env, CONFIG)
    state, metrics = agent.train(agent.init(jax.random.key(0)))
    assert np.isfinite(metrics["return_mean"][-1])
    collector = agent.make_collector(env, agent.eval_policy)
    stats = rollout.evaluate(collector, state.params, jax.random.key(1), 3)
    assert stats.num_episodes == 3


@pytest.mark.parametrize("make", [Crowd, Duel], ids=["groups", "turns"])
def test_agents_that_cannot_share_a_policy_raise(make):
    env = envs.from_pettingzoo(make, 2)
    with pytest.raises(ValueError, match="policy_map"):
        PPO(env, CONFIG).init(jax.random.key(0))


def test_recurrent_ppo_and_normalized_rewards_need_one_agent():
    env = envs.from_pettingzoo(Crowd, 2)
    with pytest.raises(ValueError, match="one agent"):
        RecurrentPPO(env)
    with pytest.raises(ValueError, match="one agent"):
        envs.NormalizeHostEnv(env)


@pytest.mark.very_slow
def test_several_seeds_of_agents_that_share_a_policy(tmp_path):
    config = CONFIG.replace(normalize_observations=True)
    agent = PPO(envs.vectorize(Walk(), B), config)
    keys = jax.random.split(jax.random.key(0), 2)
    _, stats = run(agent, keys, folder=tmp_path / "a", num_eval_episodes=B)
    assert stats.returns.mean.shape == (2,)
    loaded, state = load(tmp_path / "a", seed=1)
    assert loaded.predict(state.params, np.zeros(2, np.float32)).shape == ()


@pytest.mark.very_slow
def test_agents_that_share_a_policy_train_on_two_devices():
    returns = []
    for mesh in (None, jax.make_mesh((2,), ("lanes",))):
        agent = PPO(envs.vectorize(Walk(), B), CONFIG, mesh=mesh)
        _, metrics = jax.jit(agent.train)(agent.init(jax.random.key(0)))
        returns.append(metrics["return_mean"])
    np.testing.assert_allclose(*returns, rtol=1e-6)

"""Agents that share one policy: every recipe equals its own rows and updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import Walk
from cases import quick_jit
from recipe_cases import in_ci
from zoo_envs import Crowd, Duel

import rollout
from rollout import agents, envs
from rollout.envs.spaces import EnvSpec
from rollout.recipes import dqn, load, pqn, run, sac, td3
from rollout.recipes.ppo import PPO, Config
from rollout.recipes.recurrent_ppo import RecurrentPPO

B, A = 4, len(Walk.agents)
CONFIG = Config(num_updates=2, num_steps=8, num_minibatches=2, num_epochs=1)


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


@jax.tree_util.register_static
class Drift(Walk):
    """Three agents walk by steps of any size."""

    action_spaces = {"agents": envs.Box(0.0, 1.0, ())}  # noqa: RUF012

    def reset(self, key):
        position = jax.random.uniform(key, (A,), minval=-2.0, maxval=2.0)
        state = position, jnp.int32(0)
        return state, self.observe(state), jnp.ones(A, bool)


def plain_rows(t, name, total, length):
    """Computes the rows of all agents in a loop, from observations and actions.

    `total` and `length` are `[B * A]`, of the episodes so far, and are updated.
    """
    obs, action, next_obs = jax.device_get(
        (t.obs["agents"], t.action["agents"], t.next_obs["agents"])
    )
    shape = len(obs), B * A
    flags = {x: np.zeros(shape, bool) for x in ("mask", "terminated", "truncated")}
    reward, returns = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    lengths = np.zeros(shape, np.int32)
    for step, lane, agent in np.ndindex(len(obs), B, A):
        row = step, lane * A + agent
        number = obs[step, lane, agent, 1]
        if number == 0:
            total[row[1]] = length[row[1]] = 0
        if number < 4 + agent:
            is_end = number + 1 == 4 + agent
            reward[row] = -abs(next_obs[step, lane, agent, 0])
            flags["mask"][row] = True
            flags["truncated" if agent == A - 1 else "terminated"][row] = is_end
            total[row[1]] += reward[row]
            length[row[1]] += 1
        returns[row], lengths[row] = A * total[row[1]], length[row[1]]  # of the team
    merge = lambda x: x.reshape(*shape, *x.shape[3:])  # noqa: E731
    extras = merge(t.extras.agents["agents"]["value"]) if name == "pqn" else ()
    return rollout.Transition(
        obs=merge(obs),
        action=merge(action),
        next_obs=merge(next_obs),
        reward=reward,
        **flags,
        episode_id=np.repeat(t.episode_id, A, axis=1),
        episode_return=returns,
        episode_length=lengths,
        extras={"value": extras} if name == "pqn" else (),
        info=(),
        final_value=merge(t.final_value["agents"]) if name == "pqn" else (),
    )


SHORT = {"num_updates": 2, "num_steps": 8, "hidden_layer_sizes": (8,)}
REPLAY = SHORT | {"learning_starts": 30, "batch_size": 16, "buffer_size": 600}
RECIPES = {
    "dqn": (dqn.DQN, Walk(), REPLAY | {"gradient_steps": 2}),
    "pqn": (pqn.PQN, Walk(), SHORT | {"num_minibatches": 2, "num_epochs": 1}),
    "sac": (sac.SAC, Drift(), REPLAY),
    "td3": (td3.TD3, Drift(), REPLAY),
}


@pytest.mark.compiles(60)
@pytest.mark.parametrize("name", in_ci("pqn", of=RECIPES))
def test_update_of_a_shared_policy_equals_one_agent_on_plain_rows(name, key_reuse):
    agent_class, env, config = RECIPES[name]
    spaces = env.observation_spaces["agents"], env.action_spaces["agents"]
    env, config = envs.vectorize(env, B), agent_class.config.replace(**config)
    agent = agent_class(env, config)
    single = agent_class(EnvSpec(*spaces, B * A), config)
    policy = agents.share_policy(agent.policy, env)
    collector = rollout.Collector(env=env, policy=policy)
    total, length = np.zeros(B * A, np.float32), np.zeros(B * A, np.int32)
    state = quick_jit(agent.init)(jax.random.key(0))
    expected = state
    if name == "pqn":
        carry = state.carry
    else:  # the first 8 steps of 4 environments are stored before the first update
        carry = collector.init(jax.random.split(jax.random.key(0), 3)[0])
        carry, t = collector.collect_steps(carry, state.params, 8)
        rows = plain_rows(t, name, total, length)
        expected = quick_jit(single.init_buffer)(
            state.replace(window=rollout.EpisodeWindow.init(100)), rows
        )
    learn = quick_jit(single.learn)
    state, metrics = quick_jit(agent.train)(state)
    size = 1 if name in ("sac", "td3") else config.num_steps
    returns, masks = [], []
    for _ in range(config.num_updates):
        for _ in range(config.num_steps // size):
            carry, t = collector.collect_steps(carry, expected.params, size)
            rows = plain_rows(t, name, total, length)
            masks.append(rows.mask)
            if name == "pqn":
                last = collector.value(carry, expected.params)["agents"]
                expected, _ = learn(expected, rows, last.reshape(-1))
            elif name == "dqn":
                expected, _ = learn(expected, expected.buffer_state, rows)
            else:
                window = expected.window.add(rows)
                memory = expected.buffer_state
                expected, memory, _ = learn(expected, memory, rows)
                expected = expected.replace(window=window, buffer_state=memory)
        returns.append(expected.window.returns.mean)
    np.testing.assert_allclose(metrics["return_mean"], returns, rtol=1e-5)
    names = ["params", "opt_state", "window", "target_params", "buffer_state"]
    names = names[:3] if name == "pqn" else names
    got, expected = (
        jax.tree.leaves([getattr(x, name) for name in names]) for x in (state, expected)
    )
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
    assert 0.5 < np.mean(masks) < 1


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
        PPO(env, CONFIG)


def test_a_single_environment_with_several_agents_raises():
    with pytest.raises(ValueError, match="vectorize"):
        PPO(Walk(), CONFIG)


def test_bounds_of_agents_may_be_computed_inside_jit():
    @jax.tree_util.register_static
    class Bounded(Drift):
        @property
        def action_spaces(self):
            return {"agents": envs.Box(jnp.float32(0), jnp.float32(1), ())}

    @jax.jit
    def read():
        agent = td3.TD3(envs.vectorize(Bounded(), B), td3.Config())
        return agent.distribution.postprocess(jnp.array([[-2.0], [0.0], [2.0]]))

    np.testing.assert_allclose(read(), [0.0, 0.5, 1.0])


def test_observation_without_entries_raises():
    @jax.tree_util.register_static
    class Blind(Walk):
        observation_spaces = {"agents": envs.Box(0.0, 1.0, (0,))}  # noqa: RUF012

    with pytest.raises(ValueError, match="at least one entry"):
        PPO(envs.vectorize(Blind(), B), CONFIG)


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

"""TD3's losses are the paper's, and `update` applies exactly their gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import quick_jit

import rollout
from rollout import envs
from rollout.envs.spaces import EnvSpec
from rollout.recipes.td3 import MLP, TD3, Batch, Config, Policy
from rollout.types import Transition

CONFIG = Config(
    num_updates=2,
    num_steps=4,
    learning_starts=16,
    batch_size=8,
    buffer_size=64,
    gamma=0.9,
    tau=0.25,
    hidden_layer_sizes=(8,),
)


def make_agent(**changes):
    return TD3(envs.make_vec("Pendulum-v1", 2), CONFIG.replace(**changes))


def relu_mlp(params, *inputs):
    """A network of one hidden layer in NumPy, `[M, n]` to `[M, k]`."""
    first, last = params["params"]["Dense_0"], params["params"]["Dense_1"]
    x = np.concatenate(inputs, axis=-1)
    hidden = np.maximum(x @ first["kernel"] + first["bias"], 0)
    return hidden @ last["kernel"] + last["bias"]


def critics(params, obs, action):
    return np.stack(
        [
            relu_mlp(jax.tree.map(lambda x, i=i: x[i], params), obs, action)[:, 0]
            for i in range(2)
        ]
    )


@pytest.fixture(scope="module")
def case():
    """An agent, two sets of parameters that differ, and rows."""
    agent, rng = make_agent(), np.random.default_rng(0)
    spec = rng.normal(size=(3, 6, 3)).astype(np.float32)

    @quick_jit
    def init(key):
        keys = jax.random.split(key)
        return [agent.init_learner(x, jnp.asarray(spec[0, :2])).params for x in keys]

    params, target_params = jax.device_get(init(jax.random.key(0)))
    recorded = {
        "obs": spec[0],
        "action": rng.uniform(-2, 2, size=(6, 1)).astype(np.float32),
        "reward": rng.normal(size=6).astype(np.float32),
        "terminated": np.arange(6) % 3 == 0,
        "next_obs": spec[1],
        "mask": np.ones(6, bool),
    }
    not_stored = dict.fromkeys(Transition.__dataclass_fields__, ())
    return agent, params, target_params, Transition(**not_stored | recorded)


def test_target_smooths_the_action_and_takes_the_smaller_critic(case):
    agent, _, target_params, experience = case
    config = CONFIG.replace(target_policy_noise=2.0, target_noise_clip=1.5)
    noisy = agent.replace(config=config)
    key = jax.random.key(3)
    got = quick_jit(lambda: noisy.target(target_params, experience, key))()
    noise = np.clip(2.0 * np.asarray(jax.random.normal(key, (6, 1))), -1.5, 1.5)
    assert (np.abs(noise) == 1.5).any()
    assert (np.abs(noise) < 1.5).any()
    action = np.tanh(relu_mlp(target_params["actor"], experience.next_obs))
    assert (np.abs(action + noise) > 1).any()
    action = np.clip(action + noise, -1, 1)
    values = critics(target_params["critic"], experience.next_obs, action)
    expected = experience.reward + 0.9 * ~experience.terminated * values.min(0)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_losses_are_those_of_the_paper(case):
    agent, params, _, experience = case
    target = np.float32(np.random.default_rng(1).normal(size=6))
    action = experience.action / 2
    batch = Batch(obs=experience.obs, action=action, target=target)

    @quick_jit
    def losses(params):
        critic_loss, metrics = agent.critic_loss(params["critic"], batch)
        actor_loss, _ = agent.actor_loss(params["critic"], params["actor"], batch)
        return critic_loss, actor_loss, metrics

    critic_loss, actor_loss, metrics = losses(params)
    values = critics(params["critic"], experience.obs, action)
    expected = ((values - target) ** 2).sum(0)
    np.testing.assert_allclose(critic_loss, expected, rtol=1e-4)
    np.testing.assert_allclose(metrics["value"], values.mean(0), rtol=1e-4, atol=1e-5)
    chosen = np.tanh(relu_mlp(params["actor"], experience.obs))
    expected = -critics(params["critic"], experience.obs, chosen)[0]
    np.testing.assert_allclose(actor_loss, expected, rtol=1e-4, atol=1e-5)


def test_actor_and_targets_are_delayed_and_steps_are_those_of_optax():
    """Replays three gradient steps in a plain loop, of which the second is due."""
    agent = make_agent(num_steps=3, policy_delay=2)

    @quick_jit
    def both(key):
        state = agent.init(key)
        start = state.replace(carry=(), buffer_state=())
        results, expected, memory = [], [], state.buffer_state
        adam = optax.adam(CONFIG.learning_rate)
        params, target_params = state.params, state.target_params
        opt_state = {name: adam.init(x) for name, x in params.items()}
        current = start
        for number in (1, 2, 3):
            step_key = jax.random.fold_in(key, number)
            current, _ = agent.gradient_step(current, memory, step_key)
            results.append((current.params, current.target_params))
            sample_key, target_key = jax.random.split(step_key)
            rows = agent.buffer.sample(memory, sample_key, 8).experience
            target = agent.target(target_params, rows, target_key)
            batch = Batch(obs=rows.obs, action=rows.action / 2, target=target)
            names = ["critic", "actor"] if number == 2 else ["critic"]
            for name in names:
                critic_params = params["critic"]

                def loss(x, name=name, critic_params=critic_params, batch=batch):
                    if name == "critic":
                        return agent.critic_loss(x, batch)[0].mean()
                    return agent.actor_loss(critic_params, x, batch)[0].mean()

                grads = jax.grad(loss)(params[name])
                updates, new = adam.update(grads, opt_state[name])
                opt_state = opt_state | {name: new}
                params = params | {name: optax.apply_updates(params[name], updates)}
            if number == 2:
                target_params = jax.tree.map(
                    lambda x, y: 0.25 * x + 0.75 * y, params, target_params
                )
            expected.append((params, target_params))
        return state.params, results, expected

    first, results, expected = jax.device_get(both(jax.random.key(0)))
    near = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(near, results, expected)
    equal = np.testing.assert_array_equal
    jax.tree.map(equal, results[0][0]["actor"], first["actor"])
    jax.tree.map(equal, results[0][1], first)  # the targets began as copies
    jax.tree.map(equal, results[2], (results[2][0], results[1][1]))


def test_exploration_adds_noise_within_the_bounds(case):
    agent, params, _, experience = case
    key = jax.random.key(5)
    loud = Policy(agent.actor, agent.distribution, 0.8)

    @quick_jit
    def act(params):
        apply = lambda policy: policy.apply(params, experience.obs, (), key).action  # noqa: E731
        return apply(loud), apply(agent.eval_policy)

    noisy, plain = act(params)
    expected = np.tanh(relu_mlp(params["actor"], experience.obs))
    np.testing.assert_allclose(plain, 2 * expected, rtol=1e-4, atol=1e-5)
    noise = 0.8 * np.asarray(jax.random.normal(key, (6, 1)))
    assert (np.abs(expected + noise) > 1).any()
    expected = 2 * np.clip(expected + noise, -1, 1)
    np.testing.assert_allclose(noisy, expected, rtol=1e-4, atol=1e-4)


def test_first_actions_are_random():
    """The actor is zero everywhere and adds no noise; it acts after 8 steps."""
    agent = make_agent(exploration_noise=0.0)

    @quick_jit
    def play(key):
        carry = agent.collector.init(key)
        zeros = jax.tree.map(jnp.zeros_like, agent.init_learner(key, carry.obs).params)
        return agent.collector.collect_steps(carry, zeros, 10)[1].action

    with jax.debug_key_reuse(False):
        action = np.asarray(play(jax.random.key(0)))
    assert len(np.unique(action[:8])) == 16
    assert np.abs(action[:8]).max() > 1
    np.testing.assert_array_equal(action[8:], 0)
    spec = EnvSpec(agent.spec.observation_space, envs.Box(0.0, np.inf, (2,)), 2)
    unbounded = TD3(spec, CONFIG)  # no uniform distribution, so none is random
    assert unbounded.eval_policy == rollout.policies.Greedy(unbounded.policy)


def test_seeds_and_learning_rates_train_side_by_side():
    agent = make_agent()

    def train(key, rate):
        config = CONFIG.replace(learning_rate=rate, num_updates=1)
        changed = agent.replace(config=config)
        return changed.train(changed.init(key))

    keys = jax.random.split(jax.random.key(0))
    rates = jnp.float32([1e-3, 1e-2])
    state, metrics = quick_jit(jax.vmap(train))(keys, rates)
    assert metrics["critic_loss"].shape == (2, 1)
    assert np.isfinite(metrics["critic_loss"]).all()
    assert state.num_gradient_steps.tolist() == [4, 4]
    assert agent.env_steps(2) == 16 + 2 * 4 * 2
    assert agent.env_steps(np.array([1, 2**31]))[1] == 16 + 2**34


def test_agents_compare_by_value_and_reject_other_spaces():
    agent = make_agent()
    assert make_agent() == agent
    assert make_agent().policy == agent.policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        agent.config = CONFIG
    with pytest.raises(ValueError, match="must be a Box of floats"):
        TD3(envs.make_vec("CartPole-v1", 2), CONFIG)
    own = MLP(1, agent.spec.observation_space, (4,), "tanh")
    assert agent.replace(actor_network=own).actor is own


@pytest.mark.slow
def test_td3_learns_the_pendulum():
    config = Config(num_updates=10, batch_size=128, hidden_layer_sizes=(64, 64))
    agent = TD3(envs.make_vec("Pendulum-v1", 1), config)
    state, _ = jax.jit(agent.train)(agent.init(jax.random.key(0)))
    collector = agent.collector.replace(policy=agent.eval_policy)
    key = jax.random.key(1)
    stats = rollout.evaluate(collector, state.params, key, num_episodes=20)
    assert stats.returns.mean > -300

"""SAC's losses are the paper's, and `update` applies exactly their gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from cases import quick_jit

import rollout
from rollout import envs
from rollout.recipes.sac import SAC, Batch, Config, Experience

CONFIG = Config(
    num_updates=2,
    num_steps=4,
    learning_starts=16,
    batch_size=8,
    buffer_size=64,
    gamma=0.9,
    reward_scale=0.5,
    tau=0.25,
    target_entropy=-0.3,
    hidden_layer_sizes=(8,),
)
ROWS = 6


def make_agent(**changes):
    return SAC(envs.make_vec("Pendulum-v1", 2), CONFIG.replace(**changes))


def relu_mlp(params, *inputs):
    """A network of one hidden layer in NumPy, `[M, n]` to `[M, k]`."""
    first, last = params["params"]["Dense_0"], params["params"]["Dense_1"]
    x = np.concatenate(inputs, axis=-1)
    hidden = np.maximum(x @ first["kernel"] + first["bias"], 0)
    return hidden @ last["kernel"] + last["bias"]


def critics(params, obs, action):
    pick = lambda i: jax.tree.map(lambda x: x[i], params)  # noqa: E731
    return np.stack([relu_mlp(pick(i), obs, action)[:, 0] for i in range(2)])


def squashed(params, obs, noise):
    """The paper's action and its log-probability, appendix C."""
    outputs = relu_mlp(params["actor"], obs)
    mean, log_std = outputs[:, :1], np.clip(outputs[:, 1:], -5, 2)
    raw = mean + np.exp(log_std) * noise
    density = scipy.stats.norm(mean, np.exp(log_std)).logpdf(raw)
    return np.tanh(raw), (density - np.log(1 - np.tanh(raw) ** 2)).sum(-1)


@pytest.fixture(scope="module")
def case():
    """An agent, two sets of parameters that differ, and rows."""
    agent, rng = make_agent(), np.random.default_rng(0)
    obs = rng.normal(size=(2, ROWS, 3)).astype(np.float32)

    @quick_jit
    def init(key):
        keys = jax.random.split(key)
        return [agent.init_learner(x, jnp.asarray(obs[0, :2])).params for x in keys]

    params, others = jax.device_get(init(jax.random.key(0)))
    params["log_alpha"] = np.float32(-0.7)
    experience = Experience(
        obs=obs[0],
        action=rng.uniform(-2, 2, size=(ROWS, 1)).astype(np.float32),
        reward=rng.normal(size=ROWS).astype(np.float32),
        terminated=np.arange(ROWS) % 3 == 0,
        next_obs=obs[1],
        mask=np.ones(ROWS, bool),
    )
    return agent, params, others["critic"], experience


def test_target_is_the_soft_value_of_the_smaller_critic(case):
    agent, params, target_params, experience = case
    key = jax.random.key(3)
    got = quick_jit(lambda: agent.target(params, target_params, experience, key))()
    noise = np.asarray(jax.random.normal(key, (ROWS, 1)))
    action, log_prob = squashed(params, experience.next_obs, noise)
    values = critics(target_params, experience.next_obs, action)
    soft = values.min(0) - np.exp(-0.7) * log_prob
    expected = 0.5 * experience.reward + 0.9 * ~experience.terminated * soft
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_losses_and_the_parameters_that_they_move_are_those_of_the_paper(case):
    agent, params, _, experience = case
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(ROWS, 1)).astype(np.float32)
    target = rng.normal(size=ROWS).astype(np.float32)
    action = experience.action / 2
    batch = Batch(obs=experience.obs, action=action, target=target, noise=noise)

    def critic_loss(part):
        return (
            (0.5 * (agent.value(part, batch.obs, action) - target[None]) ** 2)
            .sum(0)
            .mean()
        )

    def actor_loss(part):
        outputs = agent.actor.apply(part, batch.obs)
        mean, log_std = outputs[:, :1], jnp.clip(outputs[:, 1:], -5, 2)
        raw = mean + jnp.exp(log_std) * noise
        log_prob = jax.scipy.stats.norm.logpdf(raw, mean, jnp.exp(log_std))
        log_prob = (log_prob - jnp.log(1 - jnp.tanh(raw) ** 2)).sum(-1)
        value = agent.value(params["critic"], batch.obs, jnp.tanh(raw)).min(0)
        return (jnp.exp(params["log_alpha"]) * log_prob - value).mean()

    @quick_jit
    def compute(params):
        loss, metrics = agent.loss(params, batch)
        grads = jax.grad(lambda x: agent.loss(x, batch)[0].mean())(params)
        parts = (
            jax.grad(critic_loss)(params["critic"]),
            jax.grad(actor_loss)(params["actor"]),
        )
        return loss, metrics, grads, parts

    loss, metrics, grads, parts = jax.device_get(compute(params))
    values = critics(params["critic"], experience.obs, action)
    expected_critic = (0.5 * (values - target) ** 2).sum(0)
    chosen, log_prob = squashed(params, experience.obs, noise)
    value = critics(params["critic"], experience.obs, chosen).min(0)
    expected_actor = np.exp(-0.7) * log_prob - value
    expected_alpha = -0.7 * (-log_prob + 0.3)
    near = lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4)  # noqa: E731
    near(metrics["critic_loss"], expected_critic)
    near(metrics["actor_loss"], expected_actor)
    near(metrics["entropy"], -log_prob)
    near(loss, expected_critic + expected_actor + expected_alpha)
    jax.tree.map(near, grads["critic"], parts[0])
    jax.tree.map(near, grads["actor"], parts[1])
    near(grads["log_alpha"], (-log_prob + 0.3).mean())


def test_target_entropy_is_by_default_minus_the_number_of_entries(case):
    agent, params, _, experience = case
    batch = Batch(
        obs=experience.obs,
        action=experience.action / 2,
        target=experience.reward,
        noise=experience.reward[:, None],
    )

    def gradient(agent):
        total = lambda x: agent.loss(x, batch)[0].mean()  # noqa: E731
        return jax.grad(total)(params)["log_alpha"]

    default = agent.replace(config=CONFIG.replace(target_entropy=None))
    one, other = quick_jit(lambda: (gradient(default), gradient(agent)))()
    np.testing.assert_allclose(one - other, 1.0 - 0.3, rtol=1e-3)


def test_gradient_steps_are_those_of_optax(case):
    """Replays two gradient steps in a plain loop."""
    agent = make_agent()

    @quick_jit
    def both(key):
        state = agent.init(key)
        memory, current = state.buffer_state, state.replace(carry=(), buffer_state=())
        params, target_params = state.params, state.target_params
        adam = optax.adam(CONFIG.learning_rate)
        opt_state, results, expected = adam.init(params), [], []
        for number in (1, 2):
            step_key = jax.random.fold_in(key, number)
            current, _ = agent.gradient_step(current, memory, step_key)
            results.append((current.params, current.target_params))
            sample_key, target_key, noise_key = jax.random.split(step_key, 3)
            rows = agent.buffer.sample(memory, sample_key, 8).experience
            batch = Batch(
                obs=rows.obs,
                action=rows.action / 2,
                target=agent.target(params, target_params, rows, target_key),
                noise=jax.random.normal(noise_key, (8, 1)),
            )
            grads = jax.grad(lambda x, batch=batch: agent.loss(x, batch)[0].mean())(
                params
            )
            updates, opt_state = adam.update(grads, opt_state)
            params = optax.apply_updates(params, updates)
            target_params = jax.tree.map(
                lambda x, y: 0.25 * x + 0.75 * y, params["critic"], target_params
            )
            expected.append((params, target_params))
        return results, expected

    results, expected = jax.device_get(both(jax.random.key(0)))
    near = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(near, results, expected)


def test_seeds_and_learning_rates_train_side_by_side():
    agent = make_agent()

    def train(key, rate):
        config = CONFIG.replace(learning_rate=rate, num_updates=1)
        changed = agent.replace(config=config)
        return changed.train(changed.init(key))

    keys = jax.random.split(jax.random.key(0))
    state, metrics = quick_jit(jax.vmap(train))(keys, jnp.float32([1e-3, 1e-2]))
    assert metrics["critic_loss"].shape == (2, 1)
    assert np.isfinite(metrics["critic_loss"]).all()
    assert (state.params["log_alpha"] != 0).all()
    assert agent.env_steps(2) == 16 + 2 * 4 * 2
    assert agent.env_steps(np.array([1, 2**31]))[1] == 16 + 2**34


def test_agents_compare_by_value_and_reject_other_spaces():
    agent = make_agent()
    assert make_agent() == agent
    assert make_agent().policy is agent.policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        agent.config = CONFIG
    with pytest.raises(ValueError, match="must be a Box of floats"):
        SAC(envs.make_vec("CartPole-v1", 2), CONFIG)


@pytest.mark.slow
def test_sac_learns_the_pendulum():
    agent = SAC(envs.make_vec("Pendulum-v1", 1), Config(num_updates=10))
    state, _ = jax.jit(agent.train)(agent.init(jax.random.key(0)))
    collector = agent.collector.replace(policy=agent.eval_policy)
    key = jax.random.key(1)
    stats = rollout.evaluate(collector, key, state.params, num_episodes=20)
    assert stats.returns.mean > -300

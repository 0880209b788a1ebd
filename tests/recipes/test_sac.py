"""Compares SAC with the losses of the paper and a plain loop with optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import quick_jit
from recipe_cases import AimEnv, aim_features, check_update, critic_values, mlp

from rollout import envs
from rollout.recipes.sac import SAC, Config, Row

CONFIG = Config(
    num_updates=2,
    num_steps=3,
    gradient_steps=2,
    learning_starts=7,  # 4 steps of 2 environments
    batch_size=16,
    learning_rate=0.03,
    buffer_size=64,
    gamma=0.9,
    reward_scale=0.5,
    tau=0.25,
    hidden_layer_sizes=(8,),
)
ADAM = optax.adam(CONFIG.learning_rate)


def make_agent(**changes) -> SAC:
    return SAC(envs.vectorize(AimEnv(), 2), CONFIG.replace(**changes))


def act(actor, obs, noise):
    """Actions in [-1, 1] and their log-probabilities, appendix C of the paper."""
    mean, log_std = jnp.split(mlp(actor, aim_features(obs), xp=jnp), 2, axis=-1)
    log_std = jnp.minimum(jnp.maximum(log_std, -5.0), 2.0)
    raw = mean + jnp.exp(log_std) * noise
    log_normal = -(noise**2) / 2 - log_std - np.log(2 * np.pi) / 2
    # 1 - tanh(x)^2 = 1 / cosh(x)^2
    return jnp.tanh(raw), (log_normal + 2 * jnp.log(jnp.cosh(raw))).sum(-1)


def min_value(critics, obs, action):
    pair = critic_values(critics, obs, action)
    return jnp.where(pair[0] < pair[1], *pair)


def plain_target(params, critics, rows, noise):
    """Eq. 3 and 5."""
    action, log_prob = act(params["actor"], rows.next_obs, noise)
    value = min_value(critics, rows.next_obs, action)
    value -= jnp.exp(params["log_alpha"]) * log_prob
    return 0.5 * rows.reward + jnp.where(rows.terminated, 0.0, 0.9 * value)


def plain_loss(params, constants, batch):
    """Eq. 5, 7 and 18. `constants` are the parameters without a gradient."""
    values = critic_values(params["critic"], batch.obs, batch.action)
    critic_loss = ((values - batch.target[None]) ** 2).sum(0) / 2
    action, log_prob = act(params["actor"], batch.obs, batch.noise)
    value = min_value(constants["critic"], batch.obs, action)
    actor_loss = jnp.exp(constants["log_alpha"]) * log_prob - value
    _, constant_log_prob = act(constants["actor"], batch.obs, batch.noise)
    # The target entropy is minus the number of entries of an action.
    temperature_loss = -params["log_alpha"] * (constant_log_prob - 2)
    metrics = {
        "critic_loss": critic_loss,
        "actor_loss": actor_loss,
        "entropy": -log_prob,
        "q_value": values.mean(0),
        "td_error": jnp.abs(values - batch.target[None]).mean(0),
    }
    loss = critic_loss + actor_loss + temperature_loss
    return loss.mean(), jax.tree.map(jnp.mean, metrics)


@quick_jit
def plain_step(learner, buffer_state, key):
    """Computes a gradient step and updates the target critics."""
    params, critics, opt_state = learner
    sample_key, *noise_keys = jax.random.split(key, 3)
    rows = make_agent().buffer.sample(buffer_state, sample_key, 16).experience
    target_noise, noise = (jax.random.normal(x, (16, 2)) for x in noise_keys)
    action = (rows.action.reshape(-1, 2) + 2) / 2.5 - 1  # -2 and 3 are -1 and 1
    target = plain_target(params, critics, rows, target_noise)
    batch = Row(rows.obs, action, target, noise)
    grads, metrics = jax.grad(plain_loss, has_aux=True)(params, params, batch)
    updates, opt_state = ADAM.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    metrics["alpha"] = jnp.exp(params["log_alpha"])
    critics = jax.tree.map(lambda x, y: 0.25 * x + 0.75 * y, params["critic"], critics)
    return (params, critics, opt_state), metrics


def test_update_equals_a_plain_loop(key_reuse):
    """Each of three steps of two environments has two gradient steps."""
    # Adam amplifies rounding errors of small gradients.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=3e-3)

    def init(state):
        return state.params, state.target_params, ADAM.init(state.params)

    metrics = check_update(make_agent(), plain_step, init, close)
    assert abs(metrics["alpha"] - np.exp(0.5)) > 0.01


def test_target_entropy_is_an_option():
    @quick_jit
    def losses(key):
        obs = jax.vmap(AimEnv().observation_space.sample)(jax.random.split(key, 2))
        params = make_agent().init_learner(key, obs).params
        params = params | {"log_alpha": jnp.float32(0.5)}
        batch = Row(obs, jnp.zeros((2, 2)), jnp.zeros(2), jnp.ones((2, 2)))
        row = jax.tree.map(lambda x: x[0], batch)
        agents = make_agent(), make_agent(target_entropy=0.7)
        return [agent.loss(params, row)[0] for agent in agents]

    with jax.debug_key_reuse(False):
        default, custom = losses(jax.random.key(0))
    np.testing.assert_allclose(default - custom, 0.5 * (2 + 0.7), rtol=1e-4)


def test_critics_have_different_parameters():
    critics = quick_jit(make_agent().init)(jax.random.key(0)).params["critic"]
    kernels = [x for x in jax.tree.leaves(critics) if x.ndim == 3]  # [2, in, out]
    assert kernels
    assert all(np.abs(x[0] - x[1]).max() > 0.01 for x in kernels)

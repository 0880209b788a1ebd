"""Compares TD3 with the losses of the paper and a plain loop with optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import quick_jit
from recipe_cases import AimEnv, aim_features, check_update, critic_values, mlp

import rollout
from rollout import envs
from rollout.envs.spaces import EnvSpec
from rollout.recipes.td3 import TD3, Config, Policy

CONFIG = Config(
    num_updates=2,
    num_steps=3,
    learning_starts=7,  # 4 steps of 2 environments
    batch_size=16,
    buffer_size=64,
    learning_rate=0.01,
    gamma=0.9,
    tau=0.25,
    target_policy_noise=1.0,
    target_noise_clip=0.7,
    exploration_noise=0.8,
    hidden_layer_sizes=(8,),
)
ADAM = optax.adam(CONFIG.learning_rate)


def make_agent(**changes) -> TD3:
    return TD3(envs.vectorize(AimEnv(), 2), CONFIG.replace(**changes))


def act(actor, obs):
    """Actions in [-1, 1]."""
    return jnp.tanh(mlp(actor, aim_features(obs), xp=jnp))


@quick_jit
def plain_step(learner, buffer_state, key):
    """Computes a gradient step of the critics, and every second time of the actor."""
    params, target_params, opt_state, number = learner
    sample_key, target_key = jax.random.split(key)
    rows = make_agent().buffer.sample(buffer_state, sample_key, 16).experience
    noise = jnp.clip(jax.random.normal(target_key, (16, 2)), -0.7, 0.7)
    next_action = jnp.clip(act(target_params["actor"], rows.next_obs) + noise, -1, 1)
    pair = critic_values(target_params["critic"], rows.next_obs, next_action)
    next_value = jnp.where(pair[0] < pair[1], *pair)
    target = rows.reward + jnp.where(rows.terminated, 0.0, 0.9 * next_value)
    action = (rows.action.reshape(-1, 2) + 2) / 2.5 - 1  # -2 and 3 are -1 and 1

    def critic_loss(critics):
        values = critic_values(critics, rows.obs, action)
        loss = ((values - target[None]) ** 2).sum(0).mean()
        return loss, {"critic_loss": loss, "value": values.mean()}

    def actor_loss(actor):
        action = act(actor, rows.obs)
        return -critic_values(params["critic"], rows.obs, action)[0].mean()

    def step(name, grads):
        updates, new_opt_state = ADAM.update(grads, opt_state[name])
        new_params = optax.apply_updates(params[name], updates)
        return params | {name: new_params}, opt_state | {name: new_opt_state}

    grads, metrics = jax.grad(critic_loss, has_aux=True)(params["critic"])
    params, opt_state = step("critic", grads)
    updated = step("actor", jax.grad(actor_loss)(params["actor"]))
    average = jax.tree.map(lambda x, y: 0.25 * x + 0.75 * y, updated[0], target_params)
    params, opt_state, target_params = jax.tree.map(
        lambda x, y: jnp.where(number % 2 == 0, x, y),
        (*updated, average),
        (params, opt_state, target_params),
    )
    return (params, target_params, opt_state, number + 1), metrics


def test_update_equals_a_plain_loop(key_reuse):
    """The second of three gradient steps trains the actor."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)

    def init(state):
        opt_state = {name: ADAM.init(x) for name, x in state.params.items()}
        return state.params, state.target_params, opt_state, jnp.int32(1)

    check_update(make_agent(), plain_step, init, close)


def test_actions_are_random_and_later_have_clipped_noise(key_reuse):
    agent = make_agent()
    noisy_policy = Policy(agent.actor, agent.distribution, 0.8)

    @quick_jit
    def compute(key):
        carry = agent.collector.init(key)
        params = agent.init_learner(key, carry.obs).params
        zeros = jax.tree.map(jnp.zeros_like, params)
        noiseless_collector = make_agent(exploration_noise=0.0).collector
        first_actions = noiseless_collector.collect_steps(carry, zeros, 6)[1].action
        obs = jax.vmap(AimEnv().observation_space.sample)(jax.random.split(key, 16))
        apply = lambda policy: policy.apply(params, obs, (), key).action  # noqa: E731
        noise = 0.8 * jax.random.normal(key, (16, 2))
        expected = act(params["actor"], obs)
        return (
            first_actions,
            apply(noisy_policy),
            apply(agent.eval_policy),
            expected,
            noise,
        )

    first_actions, noisy, plain, expected, noise = jax.device_get(
        compute(jax.random.key(0))
    )
    assert len(np.unique(first_actions[:4])) == 16  # random
    assert np.abs(first_actions[:4] - 0.5).max() > 1
    # The outputs of the actor are 0.
    np.testing.assert_array_equal(first_actions[4:], 0.5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    close(plain[..., 0], 0.5 + 2.5 * expected)
    assert (np.abs(expected + noise) > 1).any()
    close(noisy[..., 0], 0.5 + 2.5 * np.clip(expected + noise, -1, 1))
    spec = EnvSpec(agent.spec.observation_space, envs.Box(0.0, np.inf, (2,)), 2)
    unbounded = TD3(spec, CONFIG)  # an unbounded space has no uniform distribution
    assert unbounded.eval_policy == rollout.policies.Greedy(unbounded.policy)


def test_critics_have_different_parameters():
    critics = quick_jit(make_agent().init)(jax.random.key(0)).params["critic"]
    kernels = [x for x in jax.tree.leaves(critics) if x.ndim == 3]  # [2, in, out]
    assert kernels
    assert all(np.abs(x[0] - x[1]).max() > 0.01 for x in kernels)

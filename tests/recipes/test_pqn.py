"""Compares PQN with the targets of the paper and a plain loop with optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import quick_jit
from recipe_cases import MaskedEnv

import rollout
from rollout import envs
from rollout.recipes.pqn import PQN, Config, QNetwork, Row

T, B = 16, 4
CONFIG = Config(
    num_updates=3,
    num_steps=T,
    num_epochs=2,
    num_minibatches=2,
    learning_rate=0.05,
    gamma=0.9,
    lambda_=0.7,
    max_grad_norm=0.5,
    hidden_layer_sizes=(8,),
)
close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)


class MaskedPQN(PQN):
    """PQN with masked steps, whose rewards are very large."""

    def learn(self, state, trajectory, last_value):
        return super().learn(state, mask_out(trajectory), last_value)


def mask_out(t: rollout.Transition) -> rollout.Transition:
    mask = t.obs["x"][..., 0] > -0.4
    return t.replace(mask=mask, reward=t.reward + 1e3 * ~mask)


def q_values(params, obs) -> np.ndarray:
    """Computes a layer with layer normalization and the output layer, `[..., 3]`."""
    first, norm, last = (
        params["params"][name] for name in ("Dense_0", "LayerNorm_0", "Dense_1")
    )
    x = obs["x"] @ first["kernel"] + first["bias"]
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    x = (x - mean) / np.sqrt(var + 1e-6) * norm["scale"] + norm["bias"]
    return np.maximum(x, 0) @ last["kernel"] + last["bias"]


def best_value(params, obs) -> np.ndarray:
    return np.where(obs["action_mask"], q_values(params, obs), -np.inf).max(-1)


def plain_targets(params, t, last_value):
    """Computes λ-returns by a backward loop over the valid steps."""
    gamma, lambda_ = CONFIG.gamma, CONFIG.lambda_
    value, final_value = best_value(params, t.obs), best_value(params, t.next_obs)
    target = np.zeros((T, B), np.float32)
    for env in range(B):
        next_value = next_target = last_value[env]
        for step in reversed(np.flatnonzero(t.mask[:, env])):
            if t.truncated[step, env]:
                next_value = next_target = final_value[step, env]
            if t.terminated[step, env]:
                next_value = next_target = 0.0
            mixed = (1 - lambda_) * next_value + lambda_ * next_target
            target[step, env] = t.reward[step, env] + gamma * mixed
            next_value, next_target = value[step, env], target[step, env]
    return target


optimizer = optax.chain(
    optax.clip_by_global_norm(CONFIG.max_grad_norm),
    optax.radam(lambda count: CONFIG.learning_rate * (1 - count / 12)),
)


@quick_jit
def plain_learn(params, opt_state, key, batch):
    """Trains on consecutive minibatches with `jax.grad` and optax."""
    key, shuffle_key = jax.random.split(key)
    keys = jax.random.split(shuffle_key, CONFIG.num_epochs)
    order = jnp.stack([rollout.permutation(x, T * B) for x in keys]).reshape(4, -1)
    network = QNetwork(3, MaskedEnv().observation_space, (8,), "relu")

    def step(learner, rows):
        minibatch = jax.tree.map(lambda x: x[rows], batch)

        def mean_loss(params):
            values = network.apply(params, minibatch.obs)
            q_value = values[jnp.arange(len(values)), minibatch.action + 2]
            weight = minibatch.weight / minibatch.weight.sum()
            loss = (weight * (minibatch.target - q_value) ** 2).sum() / 2
            return loss, {"loss": loss, "q_value": (weight * q_value).sum()}

        params, opt_state = learner
        grads, metrics = jax.grad(mean_loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        learner = optax.apply_updates(params, updates), opt_state
        return learner, (metrics, optax.tree.norm(grads))

    learner, (metrics, norms) = jax.lax.scan(step, (params, opt_state), order)
    return *learner, key, jax.tree.map(jnp.mean, metrics), norms


def plain_batch(t, target) -> Row:
    batch = Row(t.obs, t.action, target, np.float32(t.mask))
    return jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), batch)


def test_update_equals_a_plain_loop(key_reuse):
    """Two updates contain all kinds of endings and masked steps."""
    agent, norms = MaskedPQN(envs.vectorize(MaskedEnv(), B), CONFIG), []
    state = quick_jit(agent.init)(jax.random.key(0))
    opt_state, update = quick_jit(optimizer.init)(state.params), quick_jit(agent.update)
    endings = np.zeros(2, bool)
    for number in (1, 2):
        carry, t = agent.collector.collect_steps(state.carry, state.params, T)
        params, t, obs = jax.device_get((state.params, t, carry.obs))
        t = mask_out(t)
        target = plain_targets(params, t, best_value(params, obs))
        params, opt_state, key, expected, step_norms = plain_learn(
            state.params, opt_state, state.key, plain_batch(t, target)
        )
        state, metrics = update(state)
        jax.tree.map(close, state.params, params)
        close(metrics.pop("return_mean"), state.window.returns.mean)
        assert metrics.keys() == expected.keys()
        jax.tree.map(close, metrics, expected)
        np.testing.assert_array_equal(*map(jax.random.key_data, (state.key, key)))
        assert int(state.num_updates) == number
        norms.append(step_norms)
        truncated = t.truncated & ~t.terminated
        endings |= [(x & t.mask).any() for x in (t.terminated, truncated)]
        assert 0.2 < t.mask.mean() < 0.8
    assert endings.all()
    assert (np.array(norms) > 2 * CONFIG.max_grad_norm).any()
    # In some rows the action of the highest value is invalid.
    params = jax.device_get(state.params)
    assert (best_value(params, t.obs) < q_values(params, t.obs).max(-1)).any()

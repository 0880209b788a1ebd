"""Compares DQN with the loss of the papers and a plain loop with optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import quick_jit
from recipe_cases import MaskedEnv, mlp

from rollout import envs
from rollout.recipes.dqn import DQN, Config
from rollout.trajectories import select_fields

B = 4
CONFIG = Config(
    num_updates=3,
    num_steps=8,
    gradient_steps=3,
    learning_starts=30,  # 8 steps of 4 environments
    batch_size=64,
    learning_rate=0.05,
    buffer_size=256,
    n_step=3,
    gamma=0.9,
    beta=0.3,
    tau=0.3,
    target_update_interval=2,
    hidden_layer_sizes=(8,),
)
close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)


def plain_targets(config, rows, indices, params, target_params):
    """Computes the targets of rows `n * B + i` in a loop, and their endings."""
    targets, endings = [], []
    for index in indices:
        slot, env = divmod(int(index), B)
        steps, end = [], "length"
        for t in range(slot, min(slot + config.n_step, len(rows.reward))):
            steps.append(t)
            if rows.terminated[t, env] or rows.truncated[t, env]:
                end = "terminated" if rows.terminated[t, env] else "truncated"
                break
        target = sum(config.gamma**k * rows.reward[t, env] for k, t in enumerate(steps))
        next_obs = jax.tree.map(lambda x, t=t, env=env: x[t, env], rows.next_obs)
        values = mlp(params, next_obs["x"][None])[0]
        best = np.where(next_obs["action_mask"], values, -np.inf).argmax()
        if end != "terminated":
            next_value = mlp(target_params, next_obs["x"][None])[0, best]
            target += config.gamma ** len(steps) * next_value
        targets.append(target)
        endings.append((end, len(steps), best == values.argmax()))
    return np.float32(targets), endings


OPTIMIZER = optax.adam(lambda count: 0.05 * (1 + jnp.cos(jnp.pi * count / 9)) / 2)


@quick_jit
def plain_step(params, opt_state, obs, action, target, weight):
    """Applies Adam to the gradient of `mean(weight * huber)`."""

    def mean_loss(params):
        values = mlp(params, obs["x"], xp=jnp)
        q_value = values[jnp.arange(len(action)), action + 2]
        error = jnp.abs(target - q_value)
        huber = jnp.where(error < 1, error**2 / 2, error - 0.5)
        return jnp.mean(weight * huber), (error, q_value)

    grads_fn = jax.value_and_grad(mean_loss, has_aux=True)
    (loss, (error, q_value)), grads = grads_fn(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    metrics = {"loss": loss, "td_error": error.mean(), "q_value": q_value.mean()}
    return optax.apply_updates(params, updates), opt_state, error, metrics


def make_state(agent: DQN):
    """Creates a state whose target network chooses other actions."""
    init = quick_jit(
        lambda *keys: (agent.init(keys[0]), agent.model.init(keys[1], obs))
    )
    obs = {"x": jnp.zeros((1, 2)), "action_mask": jnp.ones((1, 3), jnp.int8)}
    state, target_params = init(*jax.random.split(jax.random.key(0)))
    jax.tree.map(np.testing.assert_array_equal, state.params, state.target_params)
    return state.replace(target_params=target_params)


UNIFORM = {"prioritized": False, "tau": 1.0, "target_update_interval": 1, "n_step": 1}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="prioritized"),
        pytest.param(UNIFORM, id="uniform", marks=pytest.mark.very_slow),
    ],
)
def test_update_equals_a_plain_loop(changes, key_reuse):
    """Two updates contain all kinds of endings and both sides of the Huber loss."""
    agent = DQN(envs.vectorize(MaskedEnv(), B), CONFIG.replace(**changes))
    config, buffer, state = agent.config, agent.buffer, make_state(agent)
    opt_state = quick_jit(OPTIMIZER.init)(state.params)
    train = quick_jit(lambda state: agent.train(state, 1), donate_argnums=0)
    fields = agent.stored_fields
    add = quick_jit(lambda state, t: buffer.add(state, select_fields(t, fields)))
    num_steps, all_endings, errors, weights = 0, set(), [], []
    for number in (1, 2):
        new = slice(8 * number, 8 * number + 8)
        _, t = agent.collector.collect_steps(state.carry, state.params, 8)
        # Copy the parameters: `train` donates the state.
        params = jax.tree.map(np.array, state.params)
        target_params = jax.tree.map(np.array, state.target_params)
        buffer_state = add(state.buffer_state, t)
        rows = jax.device_get(buffer_state.ring.experience)
        rows = jax.tree.map(lambda x, new=new: x[: new.stop], rows)
        assert buffer.size(state.buffer_state) == new.start * B
        for field in ("reward", "terminated", "truncated", "episode_id"):
            np.testing.assert_array_equal(getattr(rows, field)[new], getattr(t, field))
        beta = {"beta": 0.3 + 0.7 * number / 3} if config.prioritized else {}
        key, sample_key = jax.random.split(state.key)
        metrics = []
        for step_key in jax.random.split(sample_key, 3):
            sample = buffer.sample(buffer_state, step_key, 64, **beta)
            obs, action = sample.experience.obs, sample.experience.action
            networks = jax.device_get((params, target_params))
            target, endings = plain_targets(config, rows, sample.indices, *networks)
            params, opt_state, error, step_metrics = plain_step(
                params, opt_state, obs, action, target, sample.weights
            )
            num_steps += 1
            if num_steps % config.target_update_interval == 0:
                target_params = jax.tree.map(
                    lambda x, y: config.tau * x + (1 - config.tau) * y,
                    *jax.device_get((params, target_params)),
                )
            if config.prioritized:
                priorities = np.asarray(error) + np.float32(0.01)
                buffer_state = buffer.update_priorities(
                    buffer_state, sample.indices, priorities
                )
            metrics.append(step_metrics)
            all_endings.update(endings)
            errors.append(error)
            weights.append(sample.weights)
        state, got = train(state)
        expected = params, target_params, buffer_state
        jax.tree.map(
            close, (state.params, state.target_params, state.buffer_state), expected
        )
        close(got.pop("return_mean"), [state.window.returns.mean])
        jax.tree.map(lambda x, *y: close(x, [np.mean(y)]), got, *metrics)
        np.testing.assert_array_equal(*map(jax.random.key_data, (state.key, key)))
    assert int(state.num_updates) == 2
    # The case has every kind of ending and both sides of the Huber loss.
    assert {end for end, *_ in all_endings} == {"length", "terminated", "truncated"}
    assert {count for _, count, _ in all_endings} == set(range(1, config.n_step + 1))
    assert {is_same for *_, is_same in all_endings} == {False, True}
    assert (np.array(errors) > 1.2).sum() > 30
    assert (np.array(errors) < 0.8).sum() > 30
    assert (np.array(weights) < 0.9).any() == config.prioritized

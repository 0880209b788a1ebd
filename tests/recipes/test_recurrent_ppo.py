"""Tests of recurrent PPO: its update, the replay of the memory and `predict`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CountEnv, quick_jit, raw
from recipe_cases import Answers, flatten

import rollout
from rollout import envs
from rollout.envs.spaces import EnvSpec
from rollout.recipes import ppo
from rollout.recipes.recurrent_ppo import Config, RecurrentPPO, Row

T, B, NUM_ACTIONS = 6, 4, 3
SPEC = EnvSpec(envs.Box(-9.0, 9.0, (5,)), envs.Discrete(NUM_ACTIONS), B)
CONFIG = Config(num_updates=3, num_steps=T, num_minibatches=2, num_epochs=2)
CONFIG = CONFIG.replace(memory_size=6, hidden_layer_sizes=(8,), learning_rate=0.02)
CONFIG = CONFIG.replace(clip_range_vf=0.2, ent_coef=0.1)
LSTM = "OptimizedLSTMCell"
each_cell = pytest.mark.parametrize(
    "cell", ["GRUCell", pytest.param(LSTM, marks=pytest.mark.slow)]
)
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def make_agent(config: Config = CONFIG) -> RecurrentPPO:
    return RecurrentPPO(envs.vectorize(CountEnv(), B), config)


def make_batch(seed: int = 0) -> Row:
    """Returns sequences with several episodes and masked steps."""
    rng, shape = np.random.default_rng(seed), (T, B)
    floats = np.float32(rng.normal(size=(4, *shape)))
    first = rng.random(shape) < 0.2
    first[3, :2] = True
    return Row(
        initial_memory=np.float32(rng.normal(size=(1, B, 6))),
        first=first,
        obs=np.float32(rng.normal(size=(*shape, 5))),
        raw_action=rng.integers(0, NUM_ACTIONS, shape).astype(np.int32),
        log_prob=np.float32(np.log(1 / 3) + 0.3 * floats[0]),
        value=floats[1],
        advantage=floats[2],
        target=floats[3],
        weight=np.float32(rng.random(shape) < 0.8),
        acting=np.float32(rng.random(shape) < 0.7),
    )


class Readout(nn.Module):
    """A network of PPO whose outputs are the observation."""

    def __call__(self, obs):
        return obs


def plain_loss(agent, params, batch):
    """Computes the loss of PPO with outputs of a loop over the steps."""
    fresh = agent.model.initialize_memory(batch.first.shape[1])

    def step(memory, row):
        first, obs = row[0][:, None], row[1]
        memory = jax.tree.map(lambda x, y: jnp.where(first, x, y), fresh, memory)
        return agent.model.apply(params, memory, obs)

    memory = jax.tree.map(lambda x: x[0], batch.initial_memory)
    _, outputs = jax.lax.scan(step, memory, (batch.first, batch.obs))
    rows = ppo.Row(
        obs=outputs,
        raw_action=batch.raw_action,
        log_prob=batch.log_prob,
        value=batch.value,
        advantage=batch.advantage,
        target=batch.target,
        weight=batch.weight,
        acting=batch.acting,
    )
    names = {field for field in vars(ppo.Config()) if hasattr(agent.config, field)}
    config = ppo.Config(**{name: getattr(agent.config, name) for name in names})
    loss = functools.partial(ppo.PPO(SPEC, config, Readout()).loss, {})
    return jax.vmap(jax.vmap(loss))(rows)


def plain_learn(agent, params, order, batch):
    """Trains on consecutive minibatches of complete sequences."""
    optimizer = agent.make_optimizer()

    def step(learner, lanes):
        minibatch = jax.tree.map(lambda x: jnp.take(x, lanes, axis=1), batch)
        weight, x = minibatch.weight / minibatch.weight.sum(), minibatch.advantage
        x -= (weight * x).sum()
        minibatch = minibatch.replace(
            advantage=x / ((weight * x**2).sum() ** 0.5 + 1e-8)
        )

        def mean_loss(params):
            losses = plain_loss(agent, params, minibatch)
            return jax.tree.map(lambda x: (weight * x).sum(), losses)

        params, opt_state = learner
        grads, metrics = jax.grad(mean_loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), metrics

    learner = params, optimizer.init(params)
    (params, _), metrics = jax.lax.scan(step, learner, order)
    return params, jax.tree.map(jnp.mean, metrics)


@each_cell
def test_update_equals_a_plain_loop(cell, key_reuse):
    """Minibatches contain all steps of some environments."""
    batch, agent = make_batch(), RecurrentPPO(SPEC, CONFIG.replace(cell=cell))
    if cell == LSTM:  # the memory is a pair
        memory = batch.initial_memory
        batch = batch.replace(initial_memory=(memory, -memory))
    extras = {name: getattr(batch, name) for name in ("raw_action", "value")}
    no_flags, count = np.zeros((T, B), bool), np.ones((T, B), np.int32)
    trajectory = Answers(
        obs=batch.obs,
        action=batch.raw_action,
        reward=batch.target,
        terminated=np.roll(batch.first, -1, axis=0) & (np.arange(T) < T - 1)[:, None],
        truncated=no_flags,
        next_obs=batch.obs,
        mask=batch.weight > 0,
        episode_id=count,
        episode_return=batch.target,
        episode_length=np.where(batch.first, 1, 2),
        extras={**extras, "log_prob": batch.log_prob},
        info=(),
        final_value=np.zeros((T, B), np.float32),
        acting=batch.acting > 0,
    )
    last_value = np.float32([0.3, -0.2, 0.5, 1.0])

    @quick_jit
    def learn(key, trajectory):
        state = agent.init_learner(key, batch.obs[0])
        memory = jax.tree.map(lambda x: x[0], batch.initial_memory)
        new_state, metrics = agent.learn(state, trajectory, last_value, memory)
        keys = jax.random.split(jax.random.split(state.key)[1], CONFIG.num_epochs)
        order = jnp.stack([rollout.permutation(key, B) for key in keys]).reshape(4, -1)
        words = raw((state.key, new_state.key))
        return state.params, new_state.params, metrics, order, words

    @quick_jit
    def plain(params, order):
        advantage = rollout.gae(
            trajectory.reward,
            batch.value,
            rollout.next_values(trajectory, batch.value, last_value),
            trajectory.terminated,
            trajectory.truncated,
            mask=trajectory.mask,
            gamma=CONFIG.gamma,
            lambda_=CONFIG.gae_lambda,
        )
        target = batch.value + advantage
        rows = batch.replace(advantage=advantage, target=target)
        return plain_learn(agent, params, order, rows)

    first_params, params, metrics, order, words = learn(jax.random.key(1), trajectory)
    assert (np.asarray(words[0]) != np.asarray(words[1])).any()
    plain_params, plain_metrics = plain(first_params, order)
    assert abs(flatten(params) - flatten(first_params)).max() > 0.03
    close(flatten(params), flatten(plain_params))
    for name, value in plain_metrics.items():
        close(metrics[name], value, err_msg=name)
    # Minibatches without a valid row have finite gradients and metrics.
    masked = trajectory.replace(mask=no_flags)
    _, params, metrics, *_ = learn(jax.random.key(1), masked)
    assert np.isfinite(flatten((params, metrics["entropy"]))).all()


@pytest.mark.usefixtures("quick_compile")
@each_cell
def test_replay_equals_the_collected_probabilities(cell):
    """Windows begin in the middle of episodes, and the learning rate is 0."""
    agent = make_agent(CONFIG.replace(cell=cell, learning_rate=0.0, num_steps=9))

    @jax.jit
    def train(state):
        # Larger parameters make the actions depend on the memory.
        params = jax.tree.map(lambda x: 2 * x + 0.3, state.params)
        state, metrics = agent.train(state.replace(params=params))
        return metrics, state.carry.episode.episode_length

    metrics, length = jax.device_get(train(agent.init(jax.random.key(3))))
    assert (length > 1).any()
    np.testing.assert_allclose(metrics["kl"], 0, atol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction"], 0)


@pytest.mark.usefixtures("quick_compile")
def test_predict_equals_the_collected_actions():
    """`predict` continues with the memory that it returned."""
    agent = make_agent()
    state = agent.init(jax.random.key(0))
    collector = agent.collector.replace(policy=agent.eval_policy)
    # Actions differ because of larger parameters.
    params = jax.device_get(jax.tree.map(lambda x: x + 0.3, state.params))
    _, trajectory = jax.device_get(collector.collect_steps(state.carry, params, 12))
    memory = None
    for step in range(12):
        memory = None if trajectory.first[step, 1] else memory
        action, memory = agent.predict(params, trajectory.obs[step, 1], memory)
        assert action == trajectory.action[step, 1]
    assert memory.shape == (1, 6)
    fresh = agent.predict(params, trajectory.obs[11, 1])[1]
    assert trajectory.first[11, 1] == np.array_equal(fresh, memory)

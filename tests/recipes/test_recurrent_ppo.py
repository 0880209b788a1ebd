"""Recurrent PPO replays its memory, and learns from the sequences of environments."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CountEnv, quick_jit, raw
from compiles import count_compiles

import rollout
from rollout import envs
from rollout.envs.spaces import EnvSpec
from rollout.minibatches import mean_gradient
from rollout.recipes import ppo
from rollout.recipes.recurrent_ppo import Batch, Config, RecurrentPPO

T, B, NUM_ACTIONS = 6, 4, 3
SPEC = EnvSpec(envs.Box(-9.0, 9.0, (5,)), envs.Discrete(NUM_ACTIONS), B)
CONFIG = Config(num_updates=3, num_steps=T, num_minibatches=2, num_epochs=2)
CONFIG = CONFIG.replace(memory_size=6, hidden_layer_sizes=(8,), learning_rate=0.02)
BETA = 0.7
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def flatten(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(tree))])


def make_agent(config: Config = CONFIG) -> RecurrentPPO:
    return RecurrentPPO(envs.vectorize(CountEnv(), B), config)


def make_batch(seed: int = 0) -> Batch:
    """Sequences with several episodes, and with steps that are masked out."""
    rng, shape = np.random.default_rng(seed), (T, B)
    floats = np.float32(rng.normal(size=(4, *shape)))
    first = rng.random(shape) < 0.2
    first[3, :2] = True
    return Batch(
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
    """A network of PPO, whose outputs are the observation."""

    def __call__(self, obs):
        return obs


def plain_loss(agent, params, batch):
    """The loss of PPO, of outputs that a loop over the steps computes."""
    memory = jax.tree.map(lambda x: x[0], batch.initial_memory)
    fresh, steps = agent.model.initialize_memory(batch.first.shape[1]), []
    for step in range(T):
        first = batch.first[step, :, None]
        memory = jax.tree.map(lambda x, y, z=first: jnp.where(z, x, y), fresh, memory)
        memory, outputs = agent.model.apply(params, memory, batch.obs[step])
        steps.append(outputs)
    rows = ppo.Batch(
        obs=jax.tree.map(lambda *x: jnp.stack(x), *steps),
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
    return ppo.PPO(SPEC, config, Readout()).loss({}, rows)


def plain_gradient(agent, params, batch, penalty=0.0):
    """`jax.grad` of the weighted mean, through all steps."""

    def mean_loss(params):
        loss, metrics = plain_loss(agent, params, batch)
        mean = functools.partial(jax.tree.map, lambda x: jnp.sum(x * batch.weight))
        total = batch.weight.sum()
        metrics = jax.tree.map(lambda x: x / total, mean(metrics))
        return mean(loss) / total + penalty * metrics["kl"], metrics

    return jax.grad(mean_loss, has_aux=True)(params)


class Penalty(RecurrentPPO):
    """Recurrent PPO with a penalty in the loss of each step."""

    def loss(self, params, batch):
        loss, metrics = super().loss(params, batch)
        return loss + BETA * metrics["kl"], metrics


class ScalarLoss(RecurrentPPO):
    """Recurrent PPO with the mistake of a mean over the steps."""

    def loss(self, params, batch):
        loss, metrics = super().loss(params, batch)
        return loss.mean(), metrics


LSTM = "OptimizedLSTMCell"
CELLS = {"GRUCell": CONFIG, LSTM: CONFIG.replace(cell=LSTM)}


@functools.cache
def gradients():
    """Losses and gradients by cell, of the agent and of the plain loop."""

    @quick_jit
    def compute(key, batch):
        results = {}
        for name, config in CELLS.items():
            agent = RecurrentPPO(SPEC, config)
            rows = batch
            if name != "GRUCell":  # whose memory is a pair
                memory = batch.initial_memory
                rows = batch.replace(initial_memory=(memory, -memory))
            params = agent.init_learner(key, batch.obs[0]).params
            losses = [agent.loss(params, rows), plain_loss(agent, params, rows)]
            grads = mean_gradient(agent.loss, params, rows, rows.weight)
            pair = [grads, plain_gradient(agent, params, rows)]
            results[name] = losses, pair
        penalized = Penalty(SPEC, CONFIG)
        params = penalized.init_learner(key, batch.obs[0]).params
        results["penalty"] = [
            mean_gradient(penalized.loss, params, batch, batch.weight)[0],
            plain_gradient(penalized, params, batch, BETA)[0],
            mean_gradient(RecurrentPPO(SPEC, CONFIG).loss, params, batch, batch.weight)[
                0
            ],
        ]
        return results

    with jax.debug_key_reuse(False):
        return jax.device_get(compute(jax.random.key(0), make_batch()))


@pytest.mark.parametrize("cell", CELLS)
def test_loss_is_that_of_a_loop_that_resets_the_memory(cell):
    got, expected = gradients()[cell][0]
    jax.tree.map(close, got, expected)
    assert got[0].shape == (T, B)


@pytest.mark.parametrize("cell", CELLS)
def test_gradient_passes_through_the_steps_of_each_sequence(cell):
    got, expected = gradients()[cell][1]
    jax.tree.map(close, got, expected)
    recurrent = got[0]["params"]["recurrent_cell"]
    assert all(abs(x).max() > 1e-5 for x in jax.tree.leaves(recurrent))


def test_penalty_of_a_subclass_has_its_gradient():
    got, expected, without = gradients()["penalty"]
    jax.tree.map(close, got, expected)
    assert abs(flatten(got) - flatten(without)).max() > 1e-2


def test_loss_without_a_value_for_each_step_raises():
    agent, key = ScalarLoss(SPEC, CONFIG), jax.random.key(0)
    batch = make_batch()

    def step(key):
        params = agent.init_learner(key, batch.obs[0]).params
        return agent.minibatch_step((params, (), False), batch)

    with pytest.raises(ValueError, match="`loss` must have one value per row"):
        jax.eval_shape(step, key)


def test_update_takes_the_steps_of_a_plain_loop(key_reuse):
    """On minibatches of environments with all of their steps."""
    batch, agent = make_batch(), RecurrentPPO(SPEC, CONFIG)
    extras = {name: getattr(batch, name) for name in ("raw_action", "value")}
    no, count = np.zeros((T, B), bool), np.ones((T, B), np.int32)
    trajectory = rollout.Transition(
        obs=batch.obs,
        action=batch.raw_action,
        reward=batch.target,
        terminated=np.roll(batch.first, -1, axis=0) & (np.arange(T) < T - 1)[:, None],
        truncated=no,
        next_obs=batch.obs,
        mask=batch.weight > 0,
        episode_id=count,
        episode_return=batch.target,
        episode_length=np.where(batch.first, 1, 2),
        extras={**extras, "log_prob": batch.log_prob},
        info=(),
        final_value=np.zeros((T, B), np.float32),
    )
    last_value = np.float32([0.3, -0.2, 0.5, 1.0])

    @quick_jit
    def learn(key):
        state = agent.init_learner(key, batch.obs[0])
        memory = batch.initial_memory[0]
        new_state, metrics = agent.learn(state, trajectory, last_value, memory)
        keys = raw((state.key, new_state.key))
        return state, new_state.params, metrics, keys

    @quick_jit
    def plain(state, batch):
        value, config = batch.value, CONFIG
        next_value = rollout.next_values(trajectory, value, last_value)
        flags = trajectory.terminated, trajectory.truncated
        numbers = {"gamma": config.gamma, "lambda_": config.gae_lambda}
        advantage = rollout.gae(
            trajectory.reward,
            value,
            next_value,
            *flags,
            mask=trajectory.mask,
            **numbers,
        )
        rows = batch.replace(
            advantage=advantage, target=value + advantage, acting=batch.weight
        )
        params, optimizer, logs = state.params, agent.optimizer, []
        opt_state = optimizer.init(params)
        for key in jax.random.split(jax.random.split(state.key)[1], CONFIG.num_epochs):
            for lanes in rollout.permutation(key, B).reshape(2, -1):
                part = jax.tree.map(lambda x, lanes=lanes: x[:, lanes], rows)
                total, x = part.weight.sum(), part.advantage
                x = x - (part.weight * x).sum() / total
                scale = jnp.sqrt((part.weight * x**2).sum() / total) + 1e-8
                part = part.replace(advantage=x / scale)
                grads, metrics = plain_gradient(agent, params, part)
                updates, opt_state = optimizer.update(grads, opt_state)
                params = optax.apply_updates(params, updates)
                logs.append(metrics)
        return params, jax.tree.map(lambda *x: jnp.stack(x).mean(), *logs)

    state, params, metrics, keys = learn(jax.random.key(1))
    assert (np.asarray(keys[0]) != np.asarray(keys[1])).any()
    plain_params, plain_metrics = plain(state, batch)
    assert abs(flatten(params) - flatten(state.params)).max() > 0.03
    close(flatten(params), flatten(plain_params))
    for name, value in plain_metrics.items():
        close(metrics[name], value, err_msg=name)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    "cell", ["GRUCell", pytest.param(LSTM, marks=pytest.mark.slow)]
)
def test_replay_has_the_probabilities_of_the_collection(cell):
    """Without a gradient step, in windows that begin in the middle of episodes."""
    agent = make_agent(CONFIG.replace(cell=cell, learning_rate=0.0, num_steps=9))

    @jax.jit
    def train(state):
        # With larger parameters, whose actions depend on the memory.
        params = jax.tree.map(lambda x: 2 * x + 0.3, state.params)
        state, metrics = agent.train(state.replace(params=params))
        return metrics, state.carry.episode.episode_length

    metrics, length = jax.device_get(train(agent.init(jax.random.key(3))))
    assert (length > 1).any()
    np.testing.assert_allclose(metrics["kl"], 0, atol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction"], 0)


@pytest.mark.usefixtures("quick_compile")
def test_predictions_are_the_actions_of_an_environment():
    """`predict` continues with the memory that it returned."""
    agent = make_agent()
    state = agent.init(jax.random.key(0))
    collector = agent.collector.replace(policy=agent.eval_policy)
    # Observations and larger parameters, with which actions differ.
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


def test_agents_compare_by_value_and_share_their_policy():
    agent, same = make_agent(), make_agent(CONFIG.replace())
    assert agent == same
    assert hash(agent) == hash(same)
    assert agent.policy == same.policy
    lstm = agent.replace(config=CONFIG.replace(cell="OptimizedLSTMCell"))
    assert lstm != agent
    assert lstm.policy is not agent.policy
    memory = jax.eval_shape(lambda: lstm.model.initialize_memory(B))
    assert [x.shape for x in memory] == [(B, 6), (B, 6)]
    assert agent.env_steps(3) == 3 * T * B


def test_minibatches_must_divide_the_environments():
    agent = make_agent(CONFIG.replace(num_minibatches=3))
    with pytest.raises(ValueError, match="`num_minibatches` must divide the 4 items"):
        jax.eval_shape(lambda key: agent.update(agent.init(key)), jax.random.key(0))


@pytest.mark.usefixtures("quick_compile")
def test_equal_agents_of_host_environments_share_their_programs():
    agents = [
        RecurrentPPO(envs.from_gymnasium("CartPole-v1", num_envs=2), CONFIG)
        for _ in range(2)
    ]
    results = []
    for agent in agents:
        state = agent.init(jax.random.key(0))
        with count_compiles() as events:
            state, metrics = agent.train(state)
        results.append(jax.device_get((state.params, metrics)))
        agent.env.close()
    assert metrics["kl"].shape == (3,)
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert "/jax/core/compile/backend_compile_duration" not in events

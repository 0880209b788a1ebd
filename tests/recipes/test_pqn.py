"""PQN's targets and loss are the paper's; `update` applies exactly their gradient."""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import quick_jit
from compiles import count_compiles
from masked_env import MaskedEnv

import rollout
from rollout import envs
from rollout.envs.spaces import EnvSpec
from rollout.recipes.pqn import PQN, Batch, Config, QNetwork
from rollout.types import Persistent

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


def make_agent(**changes) -> PQN:
    return PQN(envs.vectorize(MaskedEnv(), B), CONFIG.replace(**changes))


def q_values(params, obs) -> np.ndarray:
    """A layer with layer normalization, and the output layer, in NumPy, `[..., 3]`."""
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
    """The λ-returns: a loop over the steps that are not masked out, backwards."""
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
    """Gradient steps of one minibatch after the other, by `jax.grad` and optax."""
    key, shuffle_key = jax.random.split(key)
    keys = jax.random.split(shuffle_key, CONFIG.num_epochs)
    order = jnp.stack([rollout.permutation(x, T * B) for x in keys]).reshape(4, -1)
    network, logs = QNetwork(3, MaskedEnv().observation_space, (8,), "relu"), []
    for rows in order:
        part = jax.tree.map(lambda x, rows=rows: x[rows], batch)

        def mean_loss(params, part=part):
            values = network.apply(params, part.obs)
            q_value = values[jnp.arange(len(values)), part.action + 2]
            weight = part.weight / part.weight.sum()
            loss = (weight * (part.target - q_value) ** 2).sum() / 2
            return loss, {"loss": loss, "q_value": (weight * q_value).sum()}

        grads, metrics = jax.grad(mean_loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        logs.append((metrics, optax.tree.norm(grads)))
    metrics, norms = jax.tree.map(lambda *x: jnp.stack(x), *logs)
    return params, opt_state, key, jax.tree.map(jnp.mean, metrics), norms


def plain_batch(t, target) -> Batch:
    batch = Batch(t.obs, t.action, target, np.float32(t.mask))
    return jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), batch)


def test_update_takes_the_steps_of_a_plain_loop(key_reuse):
    """Two updates, with all kinds of endings."""
    agent, norms = make_agent(), []
    state = quick_jit(agent.init)(jax.random.key(0))
    opt_state, update = quick_jit(optimizer.init)(state.params), quick_jit(agent.update)
    endings = np.zeros(2, bool)
    for number in (1, 2):
        carry, t = agent.collector.collect_steps(state.carry, state.params, T)
        params, t, obs = jax.device_get((state.params, t, carry.obs))
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
        endings |= [t.terminated.any(), (t.truncated & ~t.terminated).any()]
    assert endings.all()
    assert (np.array(norms) > 2 * CONFIG.max_grad_norm).any()
    # In some rows the action of the highest value is invalid.
    params = jax.device_get(state.params)
    assert (best_value(params, t.obs) < q_values(params, t.obs).max(-1)).any()


def test_masked_out_rows_do_not_count(key_reuse):
    agent = make_agent()

    @quick_jit
    def collect(key):
        state = agent.init(key)
        return state, agent.collector.collect_steps(state.carry, state.params, T)[1]

    state, t = collect(jax.random.key(3))
    t = jax.device_get(t)
    mask = np.random.default_rng(0).random((T, B)) < 0.7
    t = t.replace(mask=mask, reward=np.where(mask, t.reward, 1e3))
    last_value = np.float32([0.5, -1.0, 2.0, 0.1])
    target = plain_targets(jax.device_get(state.params), t, last_value)
    opt_state = quick_jit(optimizer.init)(state.params)
    expected = plain_learn(state.params, opt_state, state.key, plain_batch(t, target))

    new_state, metrics = quick_jit(agent.learn)(state, t, last_value)
    jax.tree.map(close, new_state.params, expected[0])
    close(metrics["loss"], expected[3]["loss"])


def test_environment_steps_are_counted_in_64_bits():
    agent = make_agent()
    assert agent.env_steps(3) == 3 * T * B
    assert type(agent.env_steps(3)) is int
    assert agent.env_steps(np.array([0, 2**31])).tolist() == [0, 2**37]


def test_loss_without_a_value_for_each_row_raises():
    class ScalarLoss(PQN):
        def loss(self, params, batch):
            loss, metrics = super().loss(params, batch)
            return loss.mean(), metrics

    rows = jnp.zeros(5)
    batch = Batch(
        obs=jnp.zeros((5, 3)), action=jnp.int32(rows), target=rows, weight=rows
    )
    agent = ScalarLoss(EnvSpec(envs.Box(0.0, 1.0, (3,)), envs.Discrete(3), B))
    agent = agent.replace(network=nn.Dense(3))
    params = jax.eval_shape(agent.model.init, jax.random.key(0), batch.obs)
    with pytest.raises(ValueError, match="`loss` must have one value per row"):
        jax.eval_shape(agent.minibatch_step, (params, ()), batch)


RATES = {
    "anneals": (CONFIG, 0.05 * (1 - np.arange(12) / 12)),
    "constant": (CONFIG.replace(anneal_lr=False), np.full(12, 0.05)),
    "schedule": (
        CONFIG.replace(learning_rate=optax.linear_schedule(1.0, 0.1, 12)),
        np.linspace(1.0, 0.1, 13)[:12],
    ),
}


def test_learning_rate_anneals_or_is_constant_or_follows_a_schedule():
    """As with a rate of 1, step by step: optax scales by the rate at the end."""

    @quick_jit
    def steps():
        rates = {}
        for name, (config, _) in RATES.items():
            pair = [
                PQN(make_agent().env, changed).optimizer
                for changed in (
                    config,
                    config.replace(learning_rate=1.0, anneal_lr=False),
                )
            ]
            states = [x.init({"x": jnp.zeros(1)}) for x in pair]
            rates[name] = []
            for _ in range(12):  # of 3 updates with 4 gradient steps each
                results = [
                    x.update({"x": jnp.ones(1)}, y)
                    for x, y in zip(pair, states, strict=True)
                ]
                (update, plain), states = zip(*results, strict=True)
                rates[name].append(update["x"][0] / plain["x"][0])
        return rates

    rates = jax.device_get(steps())
    for name, (_, expected) in RATES.items():
        np.testing.assert_allclose(rates[name], expected, rtol=1e-3, atol=1e-7)


def test_epsilon_falls_linearly_and_all_actions_are_valid():
    config = CONFIG.replace(num_updates=50, num_steps=20)  # 1000 steps
    config = config.replace(exploration_fraction=0.4, exploration_final_eps=0.2)
    agent = make_agent().replace(config=config.replace(exploration_initial_eps=0.8))
    steps, num_lanes = np.array([0, 100, 200, 399, 400, 900]), 4096

    @quick_jit
    def act(key):
        env = envs.vectorize(MaskedEnv(), len(steps) * num_lanes)
        keys = jax.random.split(key, 3)
        _, obs = env.reset(jax.random.split(keys[0], env.num_envs))
        params = agent.model.init(keys[1], obs)
        state = agent.policy.init(env.num_envs)
        state = state.replace(step=Persistent(jnp.repeat(jnp.int32(steps), num_lanes)))
        best = agent.eval_policy.apply(params, obs, (), keys[2]).action
        predicted = agent.predict(params, jax.tree.map(lambda x: x[0], obs))
        action = agent.policy.apply(params, obs, state, jax.random.key(9)).action
        return params, obs, best, predicted, action

    params, obs, best, predicted, action = jax.device_get(act(jax.random.key(0)))
    values = np.where(obs["action_mask"], q_values(params, obs), -np.inf)
    np.testing.assert_array_equal(best, values.argmax(-1) - 2)
    assert predicted == best[0]
    assert np.take_along_axis(obs["action_mask"], action[:, None] + 2, 1).all()
    # One of the two valid actions is the greedy one.
    epsilon = 2 * (action != best).reshape(len(steps), num_lanes).mean(-1)
    np.testing.assert_allclose(epsilon, [0.8, 0.65, 0.5, 0.2, 0.2, 0.2], atol=0.05)


def test_agents_compare_by_value_and_reject_other_spaces():
    agent, same = make_agent(), make_agent()
    assert agent == same
    assert hash(agent) == hash(same)
    assert agent.policy == same.policy
    assert agent.eval_policy == same.eval_policy
    faster = agent.replace(config=CONFIG.replace(learning_rate=0.1))
    assert faster != agent == same
    assert faster.policy == agent.policy
    wider = agent.replace(config=CONFIG.replace(hidden_layer_sizes=(9,)))
    assert wider.policy is not agent.policy
    network = nn.Dense(3)
    assert agent.replace(network=network).model is network
    for name in ("config", "env", "network"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(agent, name, None)
    with pytest.raises(ValueError, match=r"must be a Discrete .*PPO.*SAC"):
        PQN(EnvSpec(agent.spec.observation_space, envs.Box(-1.0, 1.0, (1,))))


def test_training_runs_under_vmap_over_seeds_and_numbers():
    agent = make_agent(num_updates=2)
    numbers = {
        "learning_rate": np.float32([0.05, 0.0, 0.05, 0.05, 0.05]),
        "gamma": np.float32([0.9, 0.9, 0.1, 0.9, 0.9]),
        "lambda_": np.float32([0.7, 0.7, 0.7, 0.0, 0.7]),
        "max_grad_norm": np.float32([0.5, 0.5, 0.5, 0.5, 0.1]),
    }

    def train(state, numbers):
        return agent.replace(config=agent.config.replace(**numbers)).train(state)

    both = jax.vmap(jax.vmap(train, (None, 0)), (0, None))
    states = quick_jit(jax.vmap(agent.init))(jax.random.split(jax.random.key(0)))
    new_states, metrics = jax.device_get(quick_jit(both)(states, numbers))
    assert metrics["return_mean"].shape == (2, 5, 2)
    assert (metrics["loss"][0] != metrics["loss"][1]).any()
    assert (new_states.num_updates == 2).all()
    old = jax.tree.leaves(jax.device_get(states.params))
    new = jax.tree.leaves(new_states.params)
    for seed in range(2):
        flat = [
            np.concatenate([np.ravel(x[seed, i]) for x in new])
            for i in range(len(numbers["gamma"]))
        ]
        expected = np.concatenate([np.ravel(x[seed]) for x in old])
        np.testing.assert_array_equal(flat[1], expected)
        for i, j in itertools.combinations(range(5), 2):
            assert abs(flat[i] - flat[j]).max() > 1e-4


@pytest.mark.usefixtures("quick_compile")
def test_equal_agents_of_host_environments_share_their_programs():
    results = []
    for _ in range(2):
        env = envs.from_gymnasium("CartPole-v1", num_envs=2)
        agent = PQN(env, CONFIG)
        state = agent.init(jax.random.key(0))
        with count_compiles() as events:
            state, metrics = agent.train(state)
        results.append(jax.device_get((state.params, metrics)))
        env.close()
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert int(state.num_updates) == 3
    assert metrics["loss"].shape == (3,)
    assert "/jax/core/compile/backend_compile_duration" not in events


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
def test_pqn_learns_to_balance_the_pole():
    """In fewer than 500,000 steps."""
    agent = PQN(envs.make_vec("CartPole-v1", 64))
    state, metrics = jax.jit(agent.train)(agent.init(jax.random.key(0)))
    collector = agent.collector.replace(policy=agent.eval_policy)
    key = jax.random.key(1)
    stats = rollout.evaluate(collector, state.params, key, num_episodes=50)
    assert stats.returns.mean > 475
    assert agent.env_steps(len(metrics["loss"])) < 500_000

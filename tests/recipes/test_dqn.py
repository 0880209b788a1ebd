"""DQN's loss is that of the papers, and `update` applies exactly its gradient."""

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
from rollout.recipes.dqn import DQN, Batch, Config, QNetwork, select_experience
from rollout.types import Persistent

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


def make_agent(**changes) -> DQN:
    return DQN(envs.vectorize(MaskedEnv(), B), CONFIG.replace(**changes))


def q_values(params, obs) -> np.ndarray:
    """A network of one hidden layer in NumPy, `[M, 3]`."""
    first, last = params["params"]["Dense_0"], params["params"]["Dense_1"]
    hidden = np.maximum(obs["x"] @ first["kernel"] + first["bias"], 0)
    return hidden @ last["kernel"] + last["bias"]


def plain_targets(config, rows, indices, params, target_params):
    """The targets of rows `n * B + i`, one after the other, and how each ended."""
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
        values = q_values(params, next_obs)
        best = np.where(next_obs["action_mask"], values, -np.inf).argmax()
        if end != "terminated":
            next_value = q_values(target_params, next_obs)[best]
            target += config.gamma ** len(steps) * next_value
        targets.append(target)
        endings.append((end, len(steps), best == values.argmax()))
    return np.float32(targets), endings


@functools.cache
def make_plain_step(config):
    """Adam with the gradient of `mean(weight * huber)` by `jax.grad`."""
    total = config.num_updates * config.gradient_steps
    optimizer = optax.adam(
        lambda count: config.learning_rate * (1 + jnp.cos(jnp.pi * count / total)) / 2
    )

    @quick_jit
    def step(params, opt_state, obs, action, target, weight):
        def mean_loss(params):
            values = QNetwork(3, MaskedEnv().observation_space, (8,), "relu").apply(
                params, obs
            )
            q_value = values[jnp.arange(len(action)), action + 2]
            error = jnp.abs(target - q_value)
            huber = jnp.where(error < 1, error**2 / 2, error - 0.5)
            return jnp.mean(weight * huber), (error, q_value)

        grads_fn = jax.value_and_grad(mean_loss, has_aux=True)
        (loss, (error, q_value)), grads = grads_fn(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        metrics = {"loss": loss, "td_error": error.mean(), "q_value": q_value.mean()}
        return optax.apply_updates(params, updates), opt_state, error, metrics

    return optimizer, step


def make_state(agent: DQN):
    """A state whose target network differs, so that it chooses other actions."""
    init = quick_jit(
        lambda *keys: (agent.init(keys[0]), agent.model.init(keys[1], obs))
    )
    obs = {"x": jnp.zeros((1, 2)), "action_mask": jnp.ones((1, 3), jnp.int8)}
    state, target_params = init(*jax.random.split(jax.random.key(0)))
    jax.tree.map(np.testing.assert_array_equal, state.params, state.target_params)
    return state.replace(target_params=target_params)


UPDATES = {
    "default": {},
    "hard": {"tau": 1.0, "target_update_interval": 2, "n_step": 1},
    "uniform": {"prioritized": False, "target_update_interval": 1},
}


@pytest.mark.parametrize("name", UPDATES)
def test_update_takes_the_steps_of_a_plain_loop(name, key_reuse):
    """Two updates, with all kinds of endings and both sides of the Huber loss."""
    agent = make_agent(**UPDATES[name])
    config, buffer, state = agent.config, agent.buffer, make_state(agent)
    optimizer, plain_step = make_plain_step(CONFIG)
    opt_state = quick_jit(optimizer.init)(state.params)
    train = quick_jit(lambda state: agent.train(state, 1), donate_argnums=0)
    add = quick_jit(lambda state, t: buffer.add(state, select_experience(t)))
    num_steps, seen, errors, weights = 0, set(), [], []
    for number in (1, 2):
        new = slice(8 * number, 8 * number + 8)
        _, t = agent.collector.collect_steps(state.carry, state.params, 8)
        params = jax.tree.map(np.array, state.params)  # copies: `train` takes over
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
            seen.update(endings)
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
    # The case has all that it is to have.
    assert {end for end, *_ in seen} == {"length", "terminated", "truncated"}
    assert {count for _, count, _ in seen} == set(range(1, config.n_step + 1))
    assert {is_same for *_, is_same in seen} == {False, True}
    assert (np.array(errors) > 1.2).sum() > 30
    assert (np.array(errors) < 0.8).sum() > 30
    assert (np.array(weights) < 0.9).any() == config.prioritized


def test_first_steps_are_stored_and_counted():
    agent = make_agent()
    assert agent.num_initial_steps == 8
    assert make_agent(learning_starts=0).num_initial_steps == 1
    assert make_agent(learning_starts=33).num_initial_steps == 9
    assert agent.env_steps(2) == (8 + 2 * 8) * B
    assert type(agent.env_steps(2)) is int
    steps = agent.env_steps(np.array([0, 2**31]))
    assert steps.tolist() == [32, 32 + 2**36]


def test_loss_without_a_value_for_each_row_raises():
    class ScalarLoss(DQN):
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
        jax.eval_shape(agent.mean_loss, params, batch)


RATES = {
    "anneals": (CONFIG, 0.05 * (1 + np.cos(np.pi * np.arange(9) / 9)) / 2),
    "constant": (CONFIG.replace(anneal_lr=False), np.full(9, 0.05)),
    "schedule": (
        CONFIG.replace(learning_rate=optax.linear_schedule(1.0, 0.1, 9)),
        np.linspace(1.0, 0.1, 10)[:9],
    ),
}


def test_learning_rate_anneals_or_is_constant_or_follows_a_schedule():
    """Adam takes steps of the learning rate if the gradient does not change."""

    @quick_jit
    def steps():
        rates = {}
        for name, (config, _) in RATES.items():
            optimizer = make_agent().replace(config=config).optimizer
            opt_state, rates[name] = optimizer.init({"x": jnp.zeros(1)}), []
            for _ in range(9):
                update, opt_state = optimizer.update({"x": jnp.ones(1)}, opt_state)
                rates[name].append(-update["x"][0])
        return rates

    rates = jax.device_get(steps())
    for name, (_, expected) in RATES.items():
        np.testing.assert_allclose(rates[name], expected, rtol=1e-3, atol=1e-7)


def test_epsilon_falls_linearly_and_all_actions_are_valid():
    config = CONFIG.replace(num_updates=50, num_steps=20)  # 1000 steps
    config = config.replace(exploration_fraction=0.4, exploration_final_eps=0.2)
    agent = make_agent().replace(config=config)
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
        obs_0 = jax.tree.map(lambda x: x[0], obs)
        predicted = agent.predict(params, obs_0)
        action = agent.policy.apply(params, obs, state, jax.random.key(9)).action
        return params, obs, best, predicted, action

    params, obs, best, predicted, action = jax.device_get(act(jax.random.key(0)))
    values = np.where(obs["action_mask"], q_values(params, obs), -np.inf)
    np.testing.assert_array_equal(best, values.argmax(-1) - 2)
    assert predicted == best[0]
    assert (best != q_values(params, obs).argmax(-1) - 2).any()
    assert np.take_along_axis(obs["action_mask"], action[:, None] + 2, 1).all()
    # One of the two valid actions is the greedy one.
    epsilon = 2 * (action != best).reshape(len(steps), num_lanes).mean(-1)
    np.testing.assert_allclose(epsilon, [1, 0.8, 0.6, 0.202, 0.2, 0.2], atol=0.05)


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
        DQN(EnvSpec(agent.spec.observation_space, envs.Box(-1.0, 1.0, (1,))))


def test_training_runs_under_vmap_over_seeds_and_numbers(key_reuse):
    agent = make_agent(num_updates=2)
    numbers = {
        "learning_rate": np.float32([0.05, 0.0, 0.05, 0.05, 0.05]),
        "gamma": np.float32([0.9, 0.9, 0.1, 0.9, 0.9]),
        "beta": np.float32([0.3, 0.3, 0.3, 1.0, 0.3]),
        "tau": np.float32([0.3, 0.3, 0.3, 0.3, 1.0]),
    }

    def train(state, numbers):
        return agent.replace(config=agent.config.replace(**numbers)).train(state)

    both = jax.vmap(jax.vmap(train, (None, 0)), (0, None))
    states = quick_jit(jax.vmap(agent.init))(jax.random.split(jax.random.key(0)))
    new_states, metrics = jax.device_get(quick_jit(both)(states, numbers))
    assert metrics["return_mean"].shape == (2, 5, 2)
    assert (metrics["loss"][0] != metrics["loss"][1]).any()
    assert (new_states.num_updates == 2).all()
    old = jax.device_get(states.params)
    for seed in range(2):
        flat = [
            np.concatenate([np.ravel(x[seed, i]) for x in jax.tree.leaves(tree)])
            for tree in [new_states.params]
            for i in range(5)
        ]
        expected = [np.ravel(x[seed]) for x in jax.tree.leaves(old)]
        np.testing.assert_array_equal(flat[1], np.concatenate(expected))
        for i, j in itertools.combinations(range(5), 2):
            assert abs(flat[i] - flat[j]).max() > 1e-4


@pytest.mark.usefixtures("quick_compile")
def test_equal_agents_of_host_environments_share_their_programs():
    config = CONFIG.replace(num_updates=2, num_steps=15)  # the first steps, too
    results = []
    for _ in range(2):
        env = envs.from_gymnasium("CartPole-v1", num_envs=2)
        agent = DQN(env, config)
        state = agent.init(jax.random.key(0))
        with count_compiles() as events:
            new_state, metrics = agent.train(state)
        # The buffer is updated in place, and nothing else is used up.
        assert state.buffer_state.ring.experience.reward.is_deleted()
        results.append(jax.device_get((state.params, new_state.params, metrics)))
        env.close()
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert int(new_state.num_updates) == 2
    assert agent.buffer.size(new_state.buffer_state) == agent.env_steps(2) == 90
    assert "/jax/core/compile/backend_compile_duration" not in events


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
def test_dqn_learns_to_balance_the_pole():
    agent = DQN(envs.make_vec("CartPole-v1", 16), Config(num_updates=200))
    state, metrics = jax.jit(agent.train)(agent.init(jax.random.key(0)))
    collector = agent.collector.replace(policy=agent.eval_policy)
    key = jax.random.key(1)
    stats = rollout.evaluate(collector, state.params, key, num_episodes=50)
    assert stats.returns.mean > 150
    assert metrics["return_mean"][0] < 50

"""PPO computes the losses and takes the gradient steps of the paper."""

import dataclasses
import functools
import itertools

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
from rollout.recipes.ppo import PPO, Batch, Config, TrainState

T, B, NUM_ACTIONS = 16, 4, 3
SPEC = EnvSpec(envs.Box(-9.0, 9.0, (5,)), envs.Discrete(NUM_ACTIONS), B)
CONFIG = Config(num_updates=3, num_steps=T, num_minibatches=2, num_epochs=2)
CONFIG = CONFIG.replace(hidden_layer_sizes=(8,))
BETA = 0.7
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


class Readout(nn.Module):
    """A network without parameters, whose outputs are parts of the observation."""

    def __call__(self, obs):
        return obs["outputs"], obs["value"]


def make_batch(num_rows: int = 64) -> Batch:
    """Rows on both sides of both clips, with advantages of both signs."""
    rng = np.random.default_rng(0)
    outputs = np.float32(rng.normal(size=(num_rows, NUM_ACTIONS)))
    action = rng.integers(0, NUM_ACTIONS, num_rows).astype(np.int32)
    value, target, noise, log_ratio, advantage = rng.normal(size=(5, num_rows))
    log_prob = log_softmax(outputs)[np.arange(num_rows), action]
    floats = log_prob - 0.4 * log_ratio, value - 0.3 * noise, advantage, target
    weight = np.arange(num_rows) % 5 != 0
    obs = {"outputs": outputs, "value": np.float32(value)}
    weights = np.float32(weight), np.ones(num_rows, np.float32)
    return Batch(obs, action, *map(np.float32, floats), *weights)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def plain_loss(config, outputs, value, batch, xp=np):
    """Eq. 7 and 9 of the paper, and the value clipping of OpenAI's baselines."""
    log_probs = outputs - xp.log(xp.exp(outputs).sum(axis=-1, keepdims=True))
    log_prob = xp.take_along_axis(log_probs, batch.raw_action[:, None], axis=-1)[:, 0]
    ratio, advantage = xp.exp(log_prob - batch.log_prob), batch.advantage
    low, high = 1 - config.clip_eps, 1 + config.clip_eps
    clipped = xp.where(ratio < low, low, xp.where(ratio > high, high, ratio))
    products = ratio * advantage, clipped * advantage
    surrogate = xp.where(products[0] < products[1], *products)
    limit = config.clip_range_vf
    near = xp.maximum(xp.minimum(value, batch.value + limit), batch.value - limit)
    errors = (value - batch.target) ** 2, (near - batch.target) ** 2
    value_loss = xp.where(errors[0] > errors[1], *errors) / 2
    entropy = -(xp.exp(log_probs) * log_probs).sum(axis=-1)
    loss = -surrogate + config.vf_coef * value_loss - config.ent_coef * entropy
    return loss, {
        "policy_loss": -surrogate,
        "value_loss": value_loss,
        "entropy": entropy,
        "kl": ratio - 1 - xp.log(ratio),
        "clip_fraction": (abs(ratio - 1) > config.clip_eps) * 1.0,
    }


LOSSES = {
    "default": CONFIG,
    "surrogate": CONFIG.replace(vf_coef=0.0, ent_coef=0.0),
    "value": CONFIG.replace(vf_coef=2.0, ent_coef=0.0),
    "entropy": CONFIG.replace(vf_coef=0.0, ent_coef=3.0),
    "wide clip": CONFIG.replace(clip_eps=0.5),
    "value clip": CONFIG.replace(clip_range_vf=0.1, vf_coef=2.0),
}


@functools.cache
def losses():
    """Loss, metrics and the derivative by the outputs of the network, by case."""

    @quick_jit
    def compute(batch):
        def loss(outputs, config):
            obs = {**batch.obs, "outputs": outputs}
            agent = PPO(SPEC, config, Readout())
            loss, metrics = agent.loss({}, batch.replace(obs=obs))
            return loss.sum(), (loss, metrics)

        grad = jax.grad(loss, has_aux=True)
        return {x: grad(batch.obs["outputs"], config) for x, config in LOSSES.items()}

    return jax.device_get(compute(make_batch()))


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_that_of_the_paper(name):
    batch = make_batch()
    wide = jax.tree.map(np.float64, batch).replace(raw_action=batch.raw_action)
    expected = plain_loss(LOSSES[name], wide.obs["outputs"], wide.obs["value"], wide)
    _, got = losses()[name]
    jax.tree.map(close, got, expected)


def test_surrogate_has_a_gradient_unless_the_clip_is_active():
    batch = make_batch()
    log_prob = log_softmax(batch.obs["outputs"])[np.arange(64), batch.raw_action]
    ratio, gain = np.exp(log_prob - batch.log_prob), batch.advantage > 0
    below, above = ratio < 0.8, ratio > 1.2
    gradient, _ = losses()["surrogate"]
    for side, sign in ((below, gain), (above, gain), (below, ~gain), (above, ~gain)):
        assert (side & sign).sum() > 3
    is_clipped = (above & gain) | (below & ~gain)
    np.testing.assert_array_equal((gradient == 0).all(axis=-1), is_clipped)


def make_inputs(seed: int = 0) -> tuple[rollout.Transition, np.ndarray]:
    """A trajectory with endings of both kinds and masked-out rows, `last_value`."""
    rng, shape = np.random.default_rng(seed), (T, B)
    floats = iter(np.float32(rng.normal(size=(6, *shape))))
    truncated, terminated = rng.random((2, *shape)) < 0.15
    counts = np.ones(shape, np.int32)
    obs = np.float32(rng.normal(size=(*shape, 5)))
    action = rng.integers(0, NUM_ACTIONS, shape).astype(np.int32)
    final_value = np.where(truncated & ~terminated, next(floats), 0)
    trajectory = rollout.Transition(
        obs=obs,
        action=action,
        reward=next(floats),
        terminated=terminated,
        truncated=truncated,
        next_obs=obs,
        mask=rng.random(shape) < 0.8,
        episode_id=counts,
        episode_return=next(floats),
        episode_length=counts,
        extras={
            "raw_action": action,
            "log_prob": np.float32(np.log(1 / 3) + 0.2 * next(floats)),
            "value": next(floats),
        },
        info=(),
        final_value=final_value,
    )
    return trajectory, np.float32(rng.normal(size=B))


def plain_gae(t, last_value, gamma, lambda_):
    """A loop over the steps that are not masked out, backwards."""
    advantage = np.zeros((T, B))
    for env in range(B):
        next_value, next_advantage = last_value[env], 0.0
        for step in reversed(np.flatnonzero(t.mask[:, env])):
            if t.truncated[step, env]:
                next_value, next_advantage = t.final_value[step, env], 0.0
            if t.terminated[step, env]:
                next_value, next_advantage = 0.0, 0.0
            value = t.extras["value"][step, env]
            delta = t.reward[step, env] + gamma * next_value - value
            advantage[step, env] = delta + gamma * lambda_ * next_advantage
            next_value, next_advantage = value, advantage[step, env]
    return np.float32(advantage)


def init_learner(key) -> TrainState:
    obs = jnp.zeros((B, 5))
    return PPO(SPEC, CONFIG).init_learner(key, obs)


@quick_jit
def plain_learn(params, order, numbers, batch):
    """Gradient steps of one minibatch after the other, by `jax.grad` and optax."""
    agent = PPO(SPEC, CONFIG)
    config = agent.config.replace(**numbers)
    first, total, logs = config.learning_rate, 3 * len(order), []
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adam(lambda count: first * (1 - count / total), eps=1e-5),
    )
    opt_state, stopped = optimizer.init(params), False
    for rows in order:
        part = jax.tree.map(lambda x, rows=rows: x[rows], batch)
        weight, x = part.weight / part.weight.sum(), part.advantage
        x -= (weight * x).sum()
        part = part.replace(advantage=x / ((weight * x**2).sum() ** 0.5 + 1e-8))

        def mean_loss(params, part=part, weight=weight):
            outputs, value = agent.model.apply(params, part.obs)
            loss, metrics = plain_loss(config, outputs, value, part, jnp)
            return jax.tree.map(functools.partial(jnp.vdot, weight), (loss, metrics))

        grads, metrics = jax.grad(mean_loss, has_aux=True)(params)
        stopped |= metrics["kl"] > 1.5 * config.target_kl
        updates, new_opt_state = optimizer.update(grads, opt_state)
        new = optax.apply_updates(params, updates), new_opt_state
        old = params, opt_state
        params, opt_state = jax.tree.map(
            lambda x, y, stopped=stopped: jnp.where(stopped, x, y), old, new
        )
        logs.append(metrics)
    return params, jax.tree.map(lambda *x: jnp.stack(x).mean(), *logs)


@quick_jit
def learn(state, trajectory, last_value, numbers):
    agent = PPO(SPEC, CONFIG.replace(**numbers))
    return agent.learn(state, trajectory, last_value)


@quick_jit
def learn_in_microbatches(state, trajectory, last_value, numbers):
    agent = PPO(SPEC, CONFIG.replace(**numbers, microbatch_size=4))
    return agent.learn(state, trajectory, last_value)


@quick_jit
def init_and_order(key):
    """The state before an update, and the rows of each of its minibatches."""
    state = init_learner(key).replace(key=jax.random.clone(key))
    keys = jax.random.split(jax.random.split(key)[1], CONFIG.num_epochs)
    order = jnp.stack([rollout.permutation(key, T * B) for key in keys])
    return state, order.reshape(4, -1)


NUMBERS = {
    "learning_rate": 0.02,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_eps": 0.2,
    "clip_range_vf": np.inf,
    "vf_coef": 0.5,
    "ent_coef": 0.01,
    "max_grad_norm": 0.5,
    "target_kl": np.inf,
}
UPDATES = {
    "default": {},
    "learning_rate": {"learning_rate": 0.005},
    "gamma": {"gamma": 0.5},
    "gae_lambda": {"gae_lambda": 0.1},
    "clip_eps": {"clip_eps": 0.05},
    "clip_range_vf": {"clip_range_vf": 0.2},
    "vf_coef": {"vf_coef": 3.0},
    "ent_coef": {"ent_coef": 1.0},
    "max_grad_norm": {"max_grad_norm": 1e-4},
    "target_kl": {"target_kl": 0.015},
}


def plain_batch(trajectory, last_value, numbers) -> Batch:
    """The rows of the trajectory, `[T * B, ...]`, with advantages of `plain_gae`."""
    value = trajectory.extras["value"]
    pair = numbers["gamma"], numbers["gae_lambda"]
    advantage = plain_gae(trajectory, last_value, *pair)
    batch = Batch(
        obs=trajectory.obs,
        raw_action=trajectory.action,
        log_prob=trajectory.extras["log_prob"],
        value=value,
        advantage=advantage,
        target=value + advantage,
        weight=np.float32(trajectory.mask),
        acting=np.float32(trajectory.mask),
    )
    return jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), batch)


def flatten(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(tree))])


@pytest.mark.parametrize("learn_fn", [learn, learn_in_microbatches])
def test_update_takes_the_steps_of_a_plain_loop(learn_fn, key_reuse):
    """For every number of the config, with masked-out rows in all minibatches."""
    state, order = init_and_order(jax.random.key(1))
    trajectory, last_value = make_inputs()
    params = {}
    for name, changes in UPDATES.items():
        numbers = NUMBERS | changes
        batch = plain_batch(trajectory, last_value, numbers)
        expected = plain_learn(state.params, order, numbers, batch)
        new_state, metrics = learn_fn(state, trajectory, last_value, numbers)
        params[name] = flatten(new_state.params)
        close(params[name], flatten(expected[0]), err_msg=name)
        is_valid = batch.weight > 0
        variances = [np.var(x[is_valid]) for x in (batch.advantage, batch.target)]
        expected[1]["explained_variance"] = 1 - variances[0] / variances[1]
        assert metrics.pop("return_mean").shape == ()
        assert metrics.keys() == expected[1].keys()
        close(flatten(metrics), flatten(expected[1]), err_msg=name)
        assert name == "default" or abs(params[name] - params["default"]).max() > 1e-4
    assert int(new_state.num_updates) == 1
    # The next update shuffles by another key.
    words = jax.device_get(raw((state.key, new_state.key)))
    assert (words[0] != words[1]).any()


def test_target_kl_leaves_out_the_rest_of_an_update(key_reuse):
    """The first step that is left out is the one whose KL is too large."""
    state, _ = init_and_order(jax.random.key(1))
    counts = []
    for target_kl in (0.0, UPDATES["target_kl"]["target_kl"], np.inf):
        new_state, _ = learn(state, *make_inputs(), NUMBERS | {"target_kl": target_kl})
        steps = optax.tree_utils.tree_get_all_with_path(new_state.opt_state, "count")
        counts.append({int(count) for _, count in steps})
    assert counts == [{0}, {1}, {4}]


RATES = {
    "anneals": (CONFIG, 2.5e-3 * (1 - np.arange(12) / 12)),
    "constant": (CONFIG.replace(anneal_lr=False), np.full(12, 2.5e-3)),
    "schedule": (
        CONFIG.replace(learning_rate=optax.linear_schedule(1.0, 0.1, 9)),
        np.r_[np.linspace(1.0, 0.1, 10), 0.1, 0.1],
    ),
}


def test_learning_rate_anneals_or_is_constant_or_follows_a_schedule():
    """Adam takes steps of the learning rate if the gradient does not change."""

    @quick_jit
    def steps():
        rates = {}
        for name, (config, _) in RATES.items():
            optimizer = PPO(SPEC, config).optimizer
            opt_state, rates[name] = optimizer.init({"x": jnp.zeros(1)}), []
            for _ in range(12):  # of 3 updates with 4 gradient steps each
                update, opt_state = optimizer.update({"x": jnp.ones(1)}, opt_state)
                rates[name].append(-update["x"][0])
        return rates

    rates = jax.device_get(steps())
    for name, (_, expected) in RATES.items():
        np.testing.assert_allclose(rates[name], expected, rtol=1e-3, atol=1e-7)


class RowPenalty(PPO):
    """PPO with a penalty in the loss of each row."""

    def loss(self, params, batch):
        loss, metrics = super().loss(params, batch)
        return loss + BETA * metrics["kl"], metrics


class MeanPenalty(PPO):
    """PPO with a penalty of all rows, which broadcasts over them."""

    def loss(self, params, batch):
        loss, metrics = super().loss(params, batch)
        return loss + BETA * metrics["kl"].mean(), metrics


class ScalarLoss(PPO):
    """PPO with the mistake of a mean over the rows."""

    def loss(self, params, batch):
        loss, metrics = super().loss(params, batch)
        return loss.mean(), metrics


def test_penalties_of_a_subclass_have_their_gradient():
    batch = make_batch()
    obs = np.float32(np.random.default_rng(1).normal(size=(64, 5)))
    batch = batch.replace(obs=obs)

    @quick_jit
    def gradients(params, batch):
        base, weight = PPO(SPEC, CONFIG), batch.weight

        def mean(x):
            return (weight * x).sum() / weight.sum()

        def by_row(params):
            loss, metrics = base.loss(params, batch)
            return mean(loss) + BETA * mean(metrics["kl"])

        def by_mean(params):
            loss, metrics = base.loss(params, batch)
            return mean(loss) + BETA * metrics["kl"].mean()

        pairs = {}
        for agent_class, plain in ((RowPenalty, by_row), (MeanPenalty, by_mean)):
            agent = agent_class(SPEC, CONFIG)
            grads, _ = mean_gradient(agent.loss, params, batch, weight)
            pairs[agent_class.__name__] = grads, jax.grad(plain)(params)
        pairs["PPO"] = mean_gradient(base.loss, params, batch, weight)[0]
        return pairs

    state = quick_jit(init_learner)(jax.random.key(0))
    pairs = jax.device_get(gradients(state.params, batch))
    without = flatten(pairs.pop("PPO"))
    for got, expected in pairs.values():
        close(flatten(got), flatten(expected))
        assert abs(flatten(got) - without).max() > 1e-2


def test_loss_without_a_value_for_each_row_raises():
    agent = ScalarLoss(SPEC, CONFIG, Readout())
    with pytest.raises(ValueError, match="`loss` must have one value per row"):
        jax.eval_shape(agent.minibatch_step, ({}, (), False), make_batch())


def make_agent(config: Config = CONFIG, **fields) -> PPO:
    return PPO(envs.vectorize(CountEnv(**fields), B), config)


def test_agents_compare_by_value_and_share_their_policy():
    agent, same = make_agent(), make_agent(CONFIG.replace())
    assert agent == same
    assert hash(agent) == hash(same)
    assert agent.policy == same.policy
    assert agent.eval_policy == same.eval_policy
    faster = agent.replace(config=CONFIG.replace(learning_rate=0.1))
    assert faster != agent == same
    assert faster.config.learning_rate == 0.1
    assert faster.policy == agent.policy  # the same network
    wider = agent.replace(config=CONFIG.replace(hidden_layer_sizes=(9,)))
    assert wider.policy is not agent.policy
    assert agent.replace(network=Readout()) != agent
    assert make_agent(limit=3) != agent
    for name in ("config", "env", "network"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(agent, name, None)
    assert agent.env_steps(3) == 3 * T * B


@pytest.mark.usefixtures("quick_compile")
def test_training_runs_under_vmap_over_seeds_and_numbers(key_reuse):
    agent = make_agent()
    rates = {
        "learning_rate": np.float32([0.01, 0.0, 0.01, 0.01]),
        "gamma": np.float32([0.9, 0.9, 0.1, 0.9]),
        "ent_coef": np.float32([0.01, 0.01, 0.01, 2.0]),
    }

    def train(state, numbers):
        config = agent.config.replace(**numbers)
        return agent.replace(config=config).train(state)

    states = jax.jit(jax.vmap(agent.init))(jax.random.split(jax.random.key(0)))
    both = jax.vmap(jax.vmap(train, (None, 0)), (0, None))
    new_states, metrics = jax.device_get(jax.jit(both)(states, rates))
    assert metrics["return_mean"].shape == (2, 4, 3)
    assert (metrics["entropy"][0] != metrics["entropy"][1]).any()
    np.testing.assert_array_equal(
        new_states.window.returns.mean, metrics["return_mean"][..., -1]
    )
    old_params = jax.device_get(states.params)
    for seed in range(2):
        old = flatten([x[seed] for x in jax.tree.leaves(old_params)])
        new = [x[seed] for x in jax.tree.leaves(new_states.params)]
        params = [flatten([x[i] for x in new]) for i in range(4)]
        np.testing.assert_array_equal(params[1], old)  # of the rate 0
        for i, j in itertools.combinations(range(4), 2):
            assert abs(params[i] - params[j]).max() > 1e-3

    @jax.jit
    def train_alone(states, numbers):
        return train(jax.tree.map(lambda x: x[1], states), numbers)

    alone, _ = train_alone(states, {name: x[0] for name, x in rates.items()})
    close(flatten(alone.params), params[0])


@pytest.mark.usefixtures("quick_compile")
def test_equal_agents_of_host_environments_share_their_programs():
    agents = [
        PPO(envs.from_gymnasium("CartPole-v1", num_envs=2), CONFIG) for _ in range(2)
    ]
    assert agents[0].policy == agents[1].policy
    results = []
    for agent in agents:
        state = agent.init(jax.random.key(0))
        with count_compiles() as events:
            state, metrics = agent.train(state)
        results.append(jax.device_get((state.params, metrics)))
        agent.env.close()
    assert metrics["kl"].shape == (3,)
    assert int(state.num_updates) == 3
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert "/jax/core/compile/backend_compile_duration" not in events


def test_prediction_for_a_number_outside_of_the_space_raises():
    spec = EnvSpec(envs.Discrete(3), envs.Discrete(2), 1)
    agent = PPO(spec, CONFIG)
    params = quick_jit(agent.init_learner)(
        jax.random.key(0), np.zeros(1, np.int32)
    ).params
    assert agent.predict(params, 2) in (0, 1)
    for obs in (3, -1, 1.5, np.int64(7)):
        with pytest.raises(ValueError, match=r"`obs` must be in Discrete\(n=3"):
            agent.predict(params, obs)


def test_observations_and_environments_of_another_shape_raise():
    agent = PPO(envs.make_vec("CartPole-v1", 2), CONFIG)
    params = jax.eval_shape(agent.init, jax.random.key(0)).params
    for obs in (np.zeros(3), np.zeros((1, 4)), (np.zeros(4), {}), [0.0] * 3):
        with pytest.raises(ValueError, match=r"`obs` must be .* of shape \(4,\), got"):
            agent.predict(params, obs)
    assert agent.prepare_obs([0.0] * 4).dtype == np.float32
    for env in ("CartPole-v1", envs.make("CartPole-v1")):
        with pytest.raises(ValueError, match="`env` must be parallel environments"):
            PPO(env, CONFIG).init(jax.random.key(0))
    with pytest.raises(ValueError, match="`key` must be one typed key"):
        agent.init(0)


def test_rows_without_an_action_train_the_critic_only():
    agent, batch = PPO(SPEC, CONFIG, Readout()), make_batch()
    silent = batch.replace(acting=np.zeros_like(batch.acting))

    @quick_jit
    def losses(batch):
        return agent.loss({}, batch)

    loss, metrics = losses(silent)
    np.testing.assert_array_equal(loss, CONFIG.vf_coef * metrics["value_loss"])
    assert not np.any(metrics["entropy"])
    acting = losses(batch.replace(acting=np.ones_like(batch.acting)))[1]
    np.testing.assert_array_equal(acting["value_loss"], metrics["value_loss"])
    assert np.any(acting["policy_loss"])

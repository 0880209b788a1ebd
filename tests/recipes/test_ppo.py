"""Compares PPO with the losses of the paper and a plain loop with optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import quick_jit, raw
from recipe_cases import Answers, flatten

import rollout
from rollout import envs
from rollout.envs.spaces import EnvSpec
from rollout.recipes.ppo import PPO, Config, Row

T, B, NUM_ACTIONS = 16, 4, 3
SPEC = EnvSpec(envs.Box(-9.0, 9.0, (5,)), envs.Discrete(NUM_ACTIONS), B)
CONFIG = Config(num_updates=3, num_steps=T, num_minibatches=2, num_epochs=2)
CONFIG = CONFIG.replace(hidden_layer_sizes=(8,))
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def plain_loss(config, outputs, value, batch):
    """Computes eq. 7 and 9 of the paper, with value clipping as in OpenAI baselines."""
    log_probs = outputs - jnp.log(jnp.exp(outputs).sum(axis=-1, keepdims=True))
    log_prob = jnp.take_along_axis(log_probs, batch.raw_action[:, None], axis=-1)[:, 0]
    ratio, advantage = jnp.exp(log_prob - batch.log_prob), batch.advantage
    low, high = 1 - config.clip_eps, 1 + config.clip_eps
    clipped = jnp.where(ratio < low, low, jnp.where(ratio > high, high, ratio))
    products = ratio * advantage, clipped * advantage
    surrogate = jnp.where(products[0] < products[1], *products)
    limit = config.clip_range_vf
    clipped_value = jnp.minimum(value, batch.value + limit)
    clipped_value = jnp.maximum(clipped_value, batch.value - limit)
    errors = (value - batch.target) ** 2, (clipped_value - batch.target) ** 2
    value_loss = jnp.where(errors[0] > errors[1], *errors) / 2
    entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=-1)
    entropy, policy_loss = batch.acting * entropy, -batch.acting * surrogate
    loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
    return loss, {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "kl": batch.acting * (ratio - 1 - jnp.log(ratio)),
        "clip_fraction": (abs(ratio - 1) > config.clip_eps) * 1.0,
    }


def make_inputs(seed: int = 0) -> tuple[rollout.Transition, np.ndarray]:
    """Returns a trajectory with both ending flags and masked rows, and `last_value`."""
    rng, shape = np.random.default_rng(seed), (T, B)
    floats = iter(np.float32(rng.normal(size=(6, *shape))))
    truncated, terminated = rng.random((2, *shape)) < 0.15
    counts = np.ones(shape, np.int32)
    obs = np.float32(rng.normal(size=(*shape, 5)))
    action = rng.integers(0, NUM_ACTIONS, shape).astype(np.int32)
    final_value = np.where(truncated & ~terminated, next(floats), 0)
    trajectory = Answers(
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
        acting=rng.random(shape) < 0.7,
    )
    return trajectory, np.float32(rng.normal(size=B))


def plain_gae(t, last_value, gamma, lambda_):
    """Computes advantages by a backward loop over the valid steps."""
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


@quick_jit
def plain_learn(params, order, numbers, batch):
    """Trains on consecutive minibatches with `jax.grad` and optax."""
    agent = PPO(SPEC, CONFIG)
    config = agent.config.replace(**numbers)
    first, total = config.learning_rate, 3 * len(order)
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adam(lambda count: first * (1 - count / total), eps=1e-5),
    )

    def step(learner, rows):
        params, opt_state, stopped = learner
        minibatch = jax.tree.map(lambda x: x[rows], batch)
        weight, x = minibatch.weight / minibatch.weight.sum(), minibatch.advantage
        x -= (weight * x).sum()
        minibatch = minibatch.replace(
            advantage=x / ((weight * x**2).sum() ** 0.5 + 1e-8)
        )

        def mean_loss(params):
            outputs, value = agent.model.apply(params, minibatch.obs)
            loss, metrics = plain_loss(config, outputs, value, minibatch)
            return jax.tree.map(functools.partial(jnp.vdot, weight), (loss, metrics))

        grads, metrics = jax.grad(mean_loss, has_aux=True)(params)
        stopped |= metrics["kl"] > 1.5 * config.target_kl
        updates, new_opt_state = optimizer.update(grads, opt_state)
        new = optax.apply_updates(params, updates), new_opt_state
        new = jax.tree.map(
            lambda x, y: jnp.where(stopped, x, y), (params, opt_state), new
        )
        return (*new, stopped), metrics

    learner = params, optimizer.init(params), jnp.bool_(False)
    (params, *_), metrics = jax.lax.scan(step, learner, order)
    return params, jax.tree.map(jnp.mean, metrics)


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
    """Returns the state before an update and the rows of each minibatch."""
    state = PPO(SPEC, CONFIG).init_learner(key, jnp.zeros((B, 5)))
    state = state.replace(key=jax.random.clone(key))
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
    "target_kl": {"target_kl": 0.011},
}


def plain_batch(trajectory, last_value, numbers) -> Row:
    """Returns the rows of the trajectory `[T * B, ...]` with plain advantages."""
    value = trajectory.extras["value"]
    pair = numbers["gamma"], numbers["gae_lambda"]
    advantage = plain_gae(trajectory, last_value, *pair)
    batch = Row(
        obs=trajectory.obs,
        raw_action=trajectory.action,
        log_prob=trajectory.extras["log_prob"],
        value=value,
        advantage=advantage,
        target=value + advantage,
        weight=np.float32(trajectory.mask),
        acting=np.float32(trajectory.acting),
    )
    return jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), batch)


@pytest.mark.parametrize(
    "learn_fn",
    [learn, pytest.param(learn_in_microbatches, marks=pytest.mark.slow)],
)
def test_update_equals_a_plain_loop(learn_fn, key_reuse):
    """Every number of the config has an effect. All minibatches have masked rows."""
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
    # Minibatches without a valid row have finite gradients and metrics.
    masked = trajectory.replace(mask=np.zeros((T, B), bool))
    masked_state, metrics = learn_fn(state, masked, last_value, numbers)
    assert np.isfinite(flatten((masked_state.params, metrics["entropy"]))).all()
    # The next update shuffles with another key.
    words = jax.device_get(raw((state.key, new_state.key)))
    assert (words[0] != words[1]).any()


def test_target_kl_skips_later_gradient_steps(key_reuse):
    """The first gradient step with a large KL and all later steps are skipped."""
    state, _ = init_and_order(jax.random.key(1))
    counts = []
    for target_kl in (0.0, 0.011, 0.0127, np.inf):
        new_state, _ = learn(state, *make_inputs(), NUMBERS | {"target_kl": target_kl})
        steps = optax.tree_utils.tree_get_all_with_path(new_state.opt_state, "count")
        counts.append({int(count) for _, count in steps})
    assert counts == [{0}, {1}, {1}, {4}]


def test_training_does_not_use_the_key_of_the_parameters():
    agent = PPO(envs.make_vec("CartPole-v1", 2), Config(hidden_layer_sizes=(4,)))
    state = quick_jit(agent.init)(jax.random.key(0))
    obs = state.carry.obs
    again = quick_jit(agent.init_learner)(state.key, obs).params
    pairs = zip(*map(jax.tree.leaves, (state.params, again)), strict=True)
    assert not all(np.array_equal(x, y) for x, y in pairs)

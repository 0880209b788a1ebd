"""SAC's losses are the paper's, and `update` applies exactly their gradients."""

import dataclasses
import functools
import weakref

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import quick_jit
from compiles import count_compiles
from flax import struct

import rollout
from rollout import envs
from rollout.envs import spaces
from rollout.envs.spaces import EnvSpec
from rollout.recipes.sac import (
    MLP,
    SAC,
    STORED_FIELDS,
    Batch,
    Config,
    select_experience,
)
from rollout.types import Transition

B, NUM_ROWS = 2, 64
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
BOX = envs.Box(-2.0, 3.0, (2, 1))
OBS = spaces.Dict({"turn": envs.Discrete(2, start=3), "goal": BOX})
SPEC = EnvSpec(OBS, BOX, B)
NOT_STORED = dict.fromkeys(Transition.__dataclass_fields__, ())
ADAM = optax.adam(CONFIG.learning_rate)
close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)


@struct.dataclass
class AimEnv:
    """Pays 1 for the action that the observation shows, less the farther it is.

    Half of the episodes terminate at step 2. The rest are truncated at step 3.
    """

    observation_space = OBS
    action_space = BOX

    def reset(self, key):
        obs = OBS.sample(key)
        return {"n": jnp.int32(0), "obs": obs}, obs

    def step(self, key, state, action):
        n, goal, obs = state["n"] + 1, state["obs"]["goal"], OBS.sample(key)
        return envs.EnvStep(
            state={"n": n, "obs": obs},
            obs=obs,
            reward=1 - jnp.abs(action - goal).mean(),
            terminated=(n == 2) & (state["obs"]["turn"] == 3),
            truncated=n == 3,
            info={},
        )


class AimHost(gymnasium.Env):
    """Episodes of 3 steps in the same spaces; raises outside of the bounds."""

    def __init__(self):
        self.action_space = gymnasium.spaces.Box(-2.0, 3.0, (2, 1))
        turn = gymnasium.spaces.Discrete(2, start=3)
        parts = {"turn": turn, "goal": gymnasium.spaces.Box(-2.0, 3.0, (2, 1))}
        self.observation_space = gymnasium.spaces.Dict(parts)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.count += 1
        obs = self.observation_space.sample()
        return obs, 1.0, self.count == 3, False, {}


def make_agent(**changes) -> SAC:
    return SAC(envs.vectorize(AimEnv(), B), CONFIG.replace(**changes))


def features(obs, xp=np):
    """One-hot `turn` after `goal`, in the order of the names."""
    turn = obs["turn"][..., None] == xp.arange(3, 5)[None]
    goal = obs["goal"].reshape(len(turn), -1)
    return xp.concatenate([goal, turn * 1.0], axis=-1)


def mlp(params, *inputs, xp=np):
    """A network of one hidden layer, `[M, n]` to `[M, k]`."""
    first, last = params["params"]["Dense_0"], params["params"]["Dense_1"]
    x = xp.concatenate(inputs, axis=-1) @ first["kernel"] + first["bias"][None]
    return xp.maximum(x, 0) @ last["kernel"] + last["bias"][None]


def min_value(critics, obs, action, xp=np):
    pair = [jax.tree.map(lambda x, i=i: x[i], critics) for i in range(2)]
    values = xp.stack([mlp(x, features(obs, xp), action, xp=xp)[:, 0] for x in pair])
    return values, xp.where(values[0] < values[1], *values)


def act(actor, obs, noise, xp=np):
    """Actions in [-1, 1] and their log-probabilities, appendix C of the paper."""
    mean, log_std = xp.split(mlp(actor, features(obs, xp), xp=xp), 2, axis=-1)
    log_std = xp.minimum(xp.maximum(log_std, -5.0), 2.0)
    raw = mean + xp.exp(log_std) * noise
    log_normal = -(noise**2) / 2 - log_std - np.log(2 * np.pi) / 2
    # 1 - tanh(x)^2 = 1 / cosh(x)^2
    return xp.tanh(raw), (log_normal + 2 * xp.log(xp.cosh(raw))).sum(-1)


def plain_target(config, params, critics, rows, noise, xp=np):
    """Eq. 3 and 5."""
    action, log_prob = act(params["actor"], rows.next_obs, noise, xp)
    value = min_value(critics, rows.next_obs, action, xp)[1]
    value -= xp.exp(params["log_alpha"]) * log_prob
    return config.reward_scale * rows.reward + xp.where(
        rows.terminated, 0.0, config.gamma * value
    )


def plain_losses(entropy, actor, critics, log_alpha, constants, batch, xp=np):
    """Eq. 5, 7 and 18. `constants` are the parameters without a gradient.

    Args:
        entropy: target entropy.
        actor: parameters of the actor.
        critics: parameters of both critics.
        log_alpha: logarithm of the temperature.
        constants: the same parameters, by name.
        batch: rows.
        xp: NumPy, or `jax.numpy` to differentiate.
    """
    values, _ = min_value(critics, batch.obs, batch.action, xp)
    critic_loss = ((values - batch.target[None]) ** 2).sum(0) / 2
    action, log_prob = act(actor, batch.obs, batch.noise, xp)
    value = min_value(constants["critic"], batch.obs, action, xp)[1]
    actor_loss = xp.exp(constants["log_alpha"]) * log_prob - value
    _, constant_log_prob = act(constants["actor"], batch.obs, batch.noise, xp)
    temperature_loss = -log_alpha * (constant_log_prob + entropy)
    return critic_loss, actor_loss, temperature_loss, -log_prob


def make_rows(seed: int = 0):
    """Rows of the buffer and of the loss, with observations of the Dict."""
    rng = np.random.default_rng(seed)

    def obs():
        goal = np.float32(rng.uniform(-2, 3, (NUM_ROWS, 2, 1)))
        return {"turn": rng.integers(3, 5, NUM_ROWS, np.int32), "goal": goal}

    reward, target = np.float32(rng.normal(size=(2, NUM_ROWS)))
    recorded = {
        "obs": obs(),
        "action": np.float32(rng.uniform(-2, 3, (NUM_ROWS, 2, 1))),
        "reward": reward,
        "terminated": np.arange(NUM_ROWS) % 3 == 0,
        "next_obs": obs(),
        "mask": np.ones(NUM_ROWS, bool),
    }
    experience = Transition(**NOT_STORED | recorded)
    action = np.float32(rng.uniform(-1, 1, (NUM_ROWS, 2)))
    noise = np.float32(rng.normal(size=(NUM_ROWS, 2)))
    return experience, Batch(experience.obs, action, target, noise)


ENTROPIES = {"default": None, "given": 0.7}
WANTED = {"default": -2, "given": 0.7}  # minus the number of entries


@functools.cache
def results():
    """Parameters; targets, losses, metrics and gradients; plain gradients."""
    agents = {
        name: SAC(SPEC, CONFIG.replace(target_entropy=entropy))
        for name, entropy in ENTROPIES.items()
    }
    experience, batch = make_rows()

    @quick_jit
    def compute(key):
        obs = jax.tree.map(lambda x: jnp.asarray(x[:B]), experience.obs)
        params, other = (
            agents["default"].init_learner(x, obs).params for x in jax.random.split(key)
        )
        params = params | {"log_alpha": jnp.float32(0.5)}
        target = agents["default"].target(params, other["critic"], experience, key)

        def grads(name, agent):
            def loss(params):
                loss, metrics = agent.loss(params, batch)
                return loss.mean(), (loss, metrics)

            def plain(params):
                parts = params["actor"], params["critic"], params["log_alpha"]
                rows = plain_losses(WANTED[name], *parts, constants, batch, jnp)
                return sum(rows[:3]).mean()

            constants = params
            return jax.grad(loss, has_aux=True)(params), jax.grad(plain)(params)

        losses = {x: grads(x, agent) for x, agent in agents.items()}
        noise = jax.random.normal(jax.random.clone(key), (NUM_ROWS, 2))
        return params, other["critic"], noise, target, losses

    return jax.device_get(compute(jax.random.key(3)))


def test_target_is_that_of_the_paper(key_reuse):
    params, critics, noise, target, _ = results()
    experience, _ = make_rows()
    wide = lambda tree: jax.tree.map(np.float64, tree)  # noqa: E731
    rows = experience.replace(reward=np.float64(experience.reward))
    close(target, plain_target(CONFIG, wide(params), wide(critics), rows, noise))


@pytest.mark.parametrize("name", ENTROPIES)
def test_losses_are_those_of_the_paper(name):
    params, *_, losses = results()
    _, batch = make_rows()
    (_, (loss, metrics)), _ = losses[name]
    parts = params["actor"], params["critic"], params["log_alpha"]
    critic_loss, actor_loss, temperature_loss, surprise = plain_losses(
        WANTED[name], *parts, params, batch
    )
    close(loss, critic_loss + actor_loss + temperature_loss)
    values, _ = min_value(params["critic"], batch.obs, batch.action, np)
    expected = {
        "critic_loss": critic_loss,
        "actor_loss": actor_loss,
        "entropy": surprise,
        "q_value": values.mean(0),
        "td_error": np.abs(values - batch.target[None]).mean(0),
    }
    jax.tree.map(close, metrics, expected)


@pytest.mark.parametrize("name", ENTROPIES)
def test_each_loss_has_a_gradient_only_for_its_part(name):
    *_, losses = results()
    (gradient, _), expected = losses[name]
    jax.tree.map(functools.partial(close, rtol=1e-3, atol=1e-5), gradient, expected)
    for part in ("actor", "critic"):
        assert max(np.abs(x).max() for x in jax.tree.leaves(gradient[part])) > 1e-2


@quick_jit
def plain_step(params, critics, opt_state, rows, target_key, noise_key):
    """One gradient step on rows, and the update of the target critics."""
    target_noise, noise = (
        jax.random.normal(x, (len(rows.reward), 2)) for x in (target_key, noise_key)
    )
    action = (rows.action.reshape(-1, 2) + 2) / 2.5 - 1  # -2 and 3 are -1 and 1
    target = plain_target(CONFIG, params, critics, rows, target_noise, jnp)
    batch = Batch(rows.obs, action, target, noise)

    def loss(params, constants):
        parts = params["actor"], params["critic"], params["log_alpha"]
        return sum(plain_losses(-2, *parts, constants, batch, jnp)[:3]).mean()

    updates, opt_state = ADAM.update(jax.grad(loss)(params, params), opt_state)
    params = optax.apply_updates(params, updates)
    average = lambda x, y: CONFIG.tau * x + (1 - CONFIG.tau) * y  # noqa: E731
    return params, jax.tree.map(average, params["critic"], critics), opt_state


@pytest.mark.usefixtures("quick_compile", "key_reuse")
def test_update_is_a_plain_loop_with_optax():
    """Three steps of two environments, with two gradient steps after each."""
    agent = make_agent()
    init, update = jax.jit(agent.init), jax.jit(agent.update)
    add, sample = jax.jit(agent.buffer.add), agent.buffer.sample
    first = init(jax.random.key(4))
    state, metrics = update(first)
    params, critics, memory = first.params, first.target_params, first.buffer_state
    opt_state, carry, key = jax.jit(ADAM.init)(params), first.carry, first.key
    steps = []
    for _ in range(CONFIG.num_steps):
        carry, row = agent.collector.collect_steps(carry, params, 1)
        steps.append(row)
        memory = add(memory, select_experience(row))
        key, *step_keys = jax.random.split(key, 3)
        for step_key in step_keys:
            sample_key, *noise_keys = jax.random.split(step_key, 3)
            rows = sample(memory, sample_key, CONFIG.batch_size).experience
            params, critics, opt_state = plain_step(
                params, critics, opt_state, rows, *noise_keys
            )
    stored, _ = agent.buffer.to_trajectory(state.buffer_state)
    state, first = state.replace(carry=(), key=()), first.params
    state, first, params, critics = jax.device_get((state, first, params, critics))
    metrics, stored, steps = jax.device_get((metrics, stored, steps))
    # Adam divides by the size of a gradient, even if it is a rounding error.
    close_enough = functools.partial(close, atol=3e-3)
    jax.tree.map(close_enough, (state.params, state.target_params), (params, critics))
    assert np.exp(params["log_alpha"]) < metrics["alpha"] < 1
    for got, want, old in zip(
        *map(jax.tree.leaves, (state.params, params, first)), strict=True
    ):
        assert np.abs(got - want).max() < 0.1 * np.abs(want - old).max()
    assert state.num_updates == 1
    trajectory = jax.tree.map(lambda *x: np.concatenate(x), *steps)
    for name in STORED_FIELDS[:-1]:  # after the first four steps
        rows = jax.tree.map(lambda x: x[4:7], getattr(stored, name))
        jax.tree.map(close, rows, getattr(trajectory, name))
    assert (trajectory.truncated & ~trajectory.terminated).any()
    assert trajectory.terminated.any()
    returns = trajectory.episode_return[trajectory.done]
    is_equal = np.isclose(returns[:, None], state.window.episode_return, rtol=1e-4)
    assert is_equal.any(axis=1).all()
    close(metrics["return_mean"], state.window.returns.mean)


def test_seeds_and_learning_rates_train_side_by_side():
    agent = make_agent()

    def train(key, rate):
        config = CONFIG.replace(learning_rate=rate)
        changed = agent.replace(config=config)
        return changed.train(changed.init(key))

    keys, rates = jax.random.split(jax.random.key(0)), jnp.float32([1e-9, 0.1])
    state, metrics = quick_jit(jax.vmap(train))(keys, rates)
    assert metrics["critic_loss"].shape == (2, 2)
    assert np.isfinite(metrics["critic_loss"]).all()
    np.testing.assert_allclose(metrics["alpha"][0], 1, atol=1e-5)
    assert (np.abs(metrics["alpha"][1] - 1) > 0.01).all()
    assert state.num_updates.tolist() == [2, 2]


def test_environment_steps_are_exact_integers():
    agent = SAC(SPEC, CONFIG)
    assert agent.env_steps(0) == 8
    assert agent.env_steps(5) == 8 + 5 * 3 * 2
    assert type(agent.env_steps(5)) is int
    assert agent.env_steps(np.array([1, 2**31])).tolist() == [14, 8 + 6 * 2**31]


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.compiles(60)
def test_host_environments_train_in_one_donated_program():
    env = envs.from_gymnasium(AimHost, B)
    agent = SAC(env, CONFIG)
    state = agent.init(jax.random.key(0))
    first = state.buffer_state
    state, metrics = agent.train(state)
    assert all(x.is_deleted() for x in jax.tree.leaves(first.experience))
    assert {x.shape for x in metrics.values()} == {(2,)}
    assert int(agent.buffer.size(state.buffer_state)) == agent.env_steps(2)
    assert metrics["return_mean"][-1] == 3
    other_env = envs.from_gymnasium(AimHost, B)
    other = SAC(other_env, CONFIG)
    other_state = other.init(jax.random.key(1))
    with count_compiles() as events:
        other.train(other_state, 1)
    assert "/jax/core/compile/backend_compile_duration" not in events
    obs = AimHost().reset(seed=0)[0]
    action = agent.predict(state.params, obs)
    assert action.shape == (2, 1)
    assert ((action >= -2) & (action <= 3)).all()
    reference = weakref.ref(env)
    env.close()
    other_env.close()
    del env, agent, state, metrics
    assert reference() is None


def test_agents_compare_by_value_and_reject_other_spaces():
    agent = SAC(SPEC, CONFIG)
    assert SAC(SPEC, CONFIG) == agent
    assert hash(SAC(SPEC, CONFIG)) == hash(agent)
    assert SAC(SPEC, CONFIG.replace(tau=0.1)).policy == agent.policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        agent.config = CONFIG
    integers = envs.Box(0, 3, (2,), jnp.dtype("int32"))
    for space in (envs.Discrete(3), integers, spaces.Tuple((BOX,))):
        with pytest.raises(ValueError, match=r"Box of floats.* DQN .* PPO "):
            SAC(EnvSpec(OBS, space, B))
    network = MLP(4, OBS, (4,), "tanh")
    assert agent.replace(actor_network=network).actor is network
    assert agent.replace(critic_network=network).critic is network


def evaluate(agent, num_updates=None):
    state, _ = jax.jit(agent.train, static_argnums=1)(
        jax.jit(agent.init)(jax.random.key(0)), num_updates
    )
    collector = agent.collector.replace(policy=agent.eval_policy)
    key = jax.random.key(1)
    return rollout.evaluate(collector, state.params, key, num_episodes=20).returns.mean


@pytest.mark.slow
def test_sac_learns_to_aim():
    config = Config(num_updates=2, num_steps=600, gamma=0.0, reward_scale=1.0)
    agent = SAC(envs.vectorize(AimEnv(), 4), config)
    assert evaluate(agent) > 2.5 - 0.5


@pytest.mark.slow
def test_sac_learns_the_pendulum():
    agent = SAC(envs.make_vec("Pendulum-v1", 1), Config())
    assert evaluate(agent, 10) > -300

"""Tests of properties of all agents: counts, schedules, programs, messages, seeds."""

import dataclasses
import itertools
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import quick_jit, raw
from compiles import count_compiles
from flax import nnx, struct
from recipe_cases import AGENTS, MaskedEnv, flatten, in_ci, make_agent

import rollout
from rollout import envs
from rollout.envs import Box, Discrete, spaces
from rollout.envs.spaces import EnvSpec
from rollout.recipes import dqn, ppo, pqn, sac, td3
from rollout.training import adapt_learning_rate
from rollout.types import Persistent

OFF_POLICY = ("dqn", "sac", "td3")
MODELS = {"network": "model", "actor_network": "actor", "critic_network": "critic"}


def each_agent(*names, slow=(), very_slow=()):
    """Parametrizes a test with names of agents, which are in one of three groups."""
    marked = [pytest.param(name, marks=pytest.mark.slow) for name in slow]
    marked += [pytest.param(name, marks=pytest.mark.very_slow) for name in very_slow]
    return pytest.mark.parametrize("name", [*names, *marked])


@each_agent(*AGENTS)
def test_agents_compare_by_value(name):
    agent, copy = make_agent(name), make_agent(name)
    assert agent == copy
    assert hash(agent) == hash(copy)
    assert agent.policy == copy.policy
    assert agent.eval_policy == copy.eval_policy
    faster = make_agent(name, learning_rate=0.1)
    assert faster != agent
    assert faster.policy == agent.policy  # the same network
    assert faster.config.learning_rate == 0.1
    assert make_agent(name, hidden_layer_sizes=(9,)).policy != agent.policy
    assert make_agent(name, env=envs.vectorize(AGENTS[name][1], 3)) != agent
    # Only a recurrent network has the required methods.
    network = agent.model if name == "recurrent_ppo" else nn.Dense(3)
    for field in dataclasses.fields(agent):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(agent, field.name, None)
        if field.name in MODELS:
            changed = agent.replace(**{field.name: network})
            assert getattr(changed, MODELS[field.name]) is network


@each_agent("ppo", "dqn", "sac", slow=("recurrent_ppo", "pqn", "td3"))
def test_steps_and_episodes_are_counted(name):
    agent = make_agent(name, stats_window_size=3)
    state, metrics = jax.eval_shape(
        lambda key: agent.train(agent.init(key)), jax.random.key(0)
    )
    assert {x.shape for x in metrics.values()} == {(2,)}
    assert state.window.episode_return.shape == (3,)
    first = 8 if name in OFF_POLICY else 0
    assert agent.env_steps(5) == first + 5 * 8
    assert type(agent.env_steps(5)) is int
    assert agent.env_steps(np.array([0, 2**31])).tolist() == [first, first + 2**34]
    if name in OFF_POLICY:
        assert make_agent(name, learning_starts=0).num_initial_steps == 1
        # jax would share programs with a tree that differs only in its class.
        assert type(state.buffer_state.ring.experience) is rollout.Transition


@pytest.mark.parametrize(
    ("name", "changes", "annealed"),
    [
        ("ppo", {"num_epochs": 2}, 1 - np.arange(8) / 8),
        ("pqn", {"num_epochs": 2}, 1 - np.arange(8) / 8),
        ("dqn", {"gradient_steps": 4}, (1 + np.cos(np.pi * np.arange(8) / 8)) / 2),
    ],
)
def test_learning_rate_may_anneal_or_follow_a_schedule(name, changes, annealed):
    """The updates are proportional to the rate, because optax scales at the end."""
    schedule = optax.linear_schedule(1.0, 0.1, 8)
    optimizers = [
        make_agent(name, **changes | options).make_optimizer()
        for options in (
            {"learning_rate": 1.0, "anneal_lr": False},
            {"learning_rate": 0.05},
            {"learning_rate": 0.05, "anneal_lr": False},
            {"learning_rate": schedule},
        )
    ]

    def step(opt_states, _):
        pairs = [
            optimizer.update({"x": jnp.ones(1)}, opt_state)
            for optimizer, opt_state in zip(optimizers, opt_states, strict=True)
        ]
        return [x for _, x in pairs], [update["x"][0] for update, _ in pairs]

    opt_states = [optimizer.init({"x": jnp.ones(1)}) for optimizer in optimizers]
    _, (unit, *updates) = quick_jit(lambda x: jax.lax.scan(step, x, None, 8))(
        opt_states
    )
    rates = 0.05 * annealed, np.full(8, 0.05), np.linspace(1.0, 0.1, 9)[:8]
    for update, expected in zip(updates, rates, strict=True):
        np.testing.assert_allclose(update / unit, expected, rtol=1e-3, atol=1e-7)


def label(params):
    """Labels the first layers of networks as frozen."""
    is_first = lambda path: "Dense_0" in jax.tree_util.keystr(path)  # noqa: E731
    return jax.tree.map_with_path(
        lambda path, _: "frozen" if is_first(path) else "trained", params
    )


@pytest.mark.usefixtures("quick_compile")
@each_agent("ppo", very_slow=("recurrent_ppo", "dqn", "pqn", "sac", "td3"))
def test_optimizer_is_replaced(name):
    """Plain gradient descent, and no updates of the first layers."""
    parts = {"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()}
    agent = make_agent(name).replace(optimizer=optax.multi_transform(parts, label))

    @quick_jit
    def train(key):
        state = agent.init(key)
        return state.params, agent.train(state)[0].params

    params, new_params = jax.device_get(train(jax.random.key(0)))
    labels = jax.tree.leaves(label(params))
    assert {"frozen", "trained"} == set(labels)
    pairs = zip(*map(jax.tree.leaves, (params, new_params)), labels, strict=True)
    for old, new, part in pairs:
        if old.ndim > 1:  # some biases have no gradient
            assert (old == new).all() == (part == "frozen")


@each_agent(*AGENTS)
def test_optimizer_must_be_one(name):
    with pytest.raises(ValueError, match=r"`optimizer` must be .*`optax.adam\(1e-3\)`"):
        make_agent(name).replace(optimizer=optax.adam)


@pytest.mark.usefixtures("quick_compile")
@each_agent("ppo", "dqn", slow=("sac",), very_slow=("recurrent_ppo", "pqn", "td3"))
def test_training_starts_from_given_parameters(name):
    """Also with another number of environments, and with statistics."""
    agent = make_agent(name, normalize_observations=True)
    state = init(agent)
    count = itertools.count(1)
    params = jax.tree.map(
        lambda x: np.full(x.shape, next(count), x.dtype), state.params
    )
    wider = make_agent(
        name, envs.vectorize(AGENTS[name][1], 3), normalize_observations=True
    )

    @quick_jit
    def start(key):
        state = wider.init(key, params=params)
        return state.params, state.target_params if name in OFF_POLICY else ()

    new_params, target_params = jax.device_get(start(jax.random.key(0)))
    expected = {x: y for x, y in params.items() if x != "obs_stats"}
    trained = {x: y for x, y in new_params.items() if x != "obs_stats"}
    jax.tree.map(np.testing.assert_array_equal, trained, expected)
    if name in OFF_POLICY:
        target = expected["critic"] if name == "sac" else expected
        jax.tree.map(np.testing.assert_array_equal, target_params, target)
    # Replay buffers start with 9 rows of environments.
    num_rows = 9 if name in OFF_POLICY else 0
    initial_count = params["obs_stats"]["count"]
    assert new_params["obs_stats"]["count"] == initial_count + num_rows


@pytest.mark.parametrize(
    "changes", [{"hidden_layer_sizes": (9,)}, {"normalize_observations": True}]
)
def test_given_parameters_must_fit(changes):
    params = init(make_agent("ppo", **changes)).params
    agent = make_agent("ppo")
    with pytest.raises(ValueError, match="`params` must fit the networks and the con"):
        jax.eval_shape(lambda key: agent.init(key, params=params), jax.random.key(0))


@each_agent("ppo", "recurrent_ppo")
def test_loss_gets_the_values_of_schedules(name):
    """The loss would raise for a function."""
    halved = lambda count: 0.5 * count  # noqa: E731
    agent = make_agent(name, clip_eps=halved, ent_coef=halved)
    config = agent.evaluate_schedules(np.int32(3), "clip_eps", "gamma").config
    assert (config.clip_eps, config.ent_coef) == (1.5, halved)
    state, _ = jax.eval_shape(agent.update, init(agent))
    assert state.params


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@each_agent("ppo", "recurrent_ppo")
def test_coefficients_may_follow_a_schedule(name):
    """An update has two gradient steps. The schedules change at the second update."""
    values = {"clip_eps": (0.01, 0.3), "ent_coef": (0.5, 0.05)}
    options = {"learning_rate": 0.05, "anneal_lr": False, "num_epochs": 1}
    agent = make_agent(name, **options)
    schedules = {
        option: optax.piecewise_constant_schedule(first, {2: second / first})
        for option, (first, second) in values.items()
    }

    @quick_jit
    def update(state, numbers):
        changed = agent.replace(config=agent.config.replace(**numbers))
        return changed.update(state)[0]

    init_fn = quick_jit(agent.init)
    state = init_fn(jax.random.key(0))
    for i in range(2):
        state = update(state, {option: x[i] for option, x in values.items()})
    scheduled = make_agent(name, **options, **schedules)
    new_state, _ = quick_jit(scheduled.train)(init_fn(jax.random.key(0)))
    np.testing.assert_allclose(
        flatten(new_state.params), flatten(state.params), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("dqn", {}, [1, 0.8, 0.6, 0.202, 0.2, 0.2]),
        ("pqn", {"exploration_initial_eps": 0.8}, [0.8, 0.65, 0.5, 0.2, 0.2, 0.2]),
    ],
)
def test_epsilon_decays_linearly(name, changes, expected):
    changes |= {"num_updates": 50, "num_steps": 20, "exploration_fraction": 0.4}
    agent = make_agent(name, exploration_final_eps=0.2, **changes)
    steps, num_lanes = np.array([0, 100, 200, 399, 400, 900]), 4096

    @quick_jit
    def act(key):
        env = envs.vectorize(MaskedEnv(), len(steps) * num_lanes)
        keys = jax.random.split(key, 4)
        _, obs = env.reset(jax.random.split(keys[0], env.num_envs))
        params = agent.model.init(keys[1], obs)
        state = agent.policy.init(env.num_envs)
        state = state.replace(step=Persistent(jnp.repeat(jnp.int32(steps), num_lanes)))
        best = agent.eval_policy.apply(params, obs, (), keys[2]).action
        predicted = agent.predict(params, jax.tree.map(lambda x: x[0], obs))
        action = agent.policy.apply(params, obs, state, keys[3]).action
        return agent.model.apply(params, obs), obs, best, predicted, action

    values, obs, best, predicted, action = jax.device_get(act(jax.random.key(0)))
    valid_values = np.where(obs["action_mask"], values, -np.inf)
    np.testing.assert_array_equal(best, valid_values.argmax(-1) - 2)
    assert predicted == best[0]
    assert (best != values.argmax(-1) - 2).any()
    assert np.take_along_axis(obs["action_mask"], action[:, None] + 2, 1).all()
    # One of the two valid actions is the greedy one.
    epsilon = 2 * (action != best).reshape(len(steps), num_lanes).mean(-1)
    np.testing.assert_allclose(epsilon, expected, atol=0.05)


# Hyperparameters that may be traced, and changed values.
NUMBERS = {
    "ppo": {"gamma": 0.1, "ent_coef": 2.0},
    "dqn": {"gamma": 0.1, "beta": 1.0, "tau": 1.0},
    "pqn": {"gamma": 0.1, "lambda_": 0.0, "max_grad_norm": 0.1},
    "sac": {"gamma": 0.1, "reward_scale": 1.0},
    "td3": {"gamma": 0.1},
    "recurrent_ppo": {"gamma": 0.1, "ent_coef": 2.0},
}


@pytest.mark.usefixtures("quick_compile", "key_reuse")
@each_agent("ppo", very_slow=("recurrent_ppo", "dqn", "pqn", "sac", "td3"))
def test_training_may_be_mapped_over_seeds_and_numbers(name):
    """The first two lanes differ in the seed, and each further lane in one number."""
    agent = make_agent(name, learning_rate=0.05)
    changes = {"learning_rate": 0.0} | NUMBERS[name]
    num_lanes = 2 + len(changes)
    numbers = {x: np.full(num_lanes, getattr(agent.config, x)) for x in changes}
    for lane, (option, value) in enumerate(changes.items(), 2):
        numbers[option][lane] = value
    numbers = {option: np.float32(x) for option, x in numbers.items()}

    @quick_jit
    @jax.vmap
    def train(seed, numbers):
        changed = agent.replace(config=agent.config.replace(**numbers))
        state = changed.init(jax.random.key(seed))
        new_state, metrics = changed.train(state)
        mean = new_state.window.returns.mean
        return state.params, new_state.params, metrics, mean, new_state.num_updates

    seeds = np.int32(np.arange(num_lanes) == 1)
    *params, metrics, mean, num_updates = jax.device_get(train(seeds, numbers))
    assert {x.shape for x in metrics.values()} == {(num_lanes, 2)}
    np.testing.assert_array_equal(metrics["return_mean"][:, -1], mean)
    assert (num_updates == 2).all()
    old_params, params = (
        [flatten([x[i] for x in jax.tree.leaves(tree)]) for i in range(num_lanes)]
        for tree in params
    )
    np.testing.assert_array_equal(params[2], old_params[2])  # the learning rate is 0
    for x, y in itertools.combinations(params, 2):
        assert abs(x - y).max() > 1e-4


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.compiles(60)
@each_agent("ppo", "dqn", slow=("sac",), very_slow=("recurrent_ppo", "pqn", "td3"))
def test_equal_host_agents_share_programs(name):
    env_id = "Pendulum-v1" if name in ("sac", "td3") else "CartPole-v1"
    results = []
    for _ in range(2):
        env = envs.from_gymnasium(env_id, num_envs=2)
        agent = make_agent(name, env, learning_rate=0.05)
        state = agent.init(jax.random.key(0))
        with count_compiles() as events:
            new_state, metrics = agent.train(state)
        results.append(jax.device_get((state.params, new_state.params, metrics)))
        env.close()
    jax.tree.map(np.testing.assert_array_equal, *results)
    old_params, params, _ = results[0]
    assert (flatten(params) != flatten(old_params)).any()
    assert "/jax/core/compile/backend_compile_duration" not in events
    assert {x.shape for x in metrics.values()} == {(2,)}
    assert int(new_state.num_updates) == 2
    if name in OFF_POLICY:  # the buffer is updated in place
        rows = state.buffer_state.ring.experience
        assert all(x.is_deleted() for x in jax.tree.leaves(rows))
        assert agent.buffer.size(new_state.buffer_state) == agent.env_steps(2)


@each_agent("dqn", "pqn")
def test_initial_state_is_uniformly_committed(name):
    """Otherwise the second call of a jitted `train` would compile it again."""
    env = jax.device_put(envs.make("CartPole-v1"), jax.devices()[0])
    agent = make_agent(name).replace(env=envs.vectorize(env, 4))
    state = agent.init(jax.random.key(0))
    assert len({x.committed for x in jax.tree.leaves(state)}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize("name", in_ci("ppo"))
def test_split_training_has_the_same_bits(name, request):
    if name not in ("ppo", "dqn"):  # compile one agent of each kind as users do
        request.getfixturevalue("quick_compile")
    agent = make_agent(name)
    state = jax.jit(agent.init)(jax.random.key(0))
    train = jax.jit(agent.train, static_argnums=1)
    last, metrics = train(state, 2)
    first, first_metrics = train(state, 1)
    second, second_metrics = train(first, 1)
    parts = jax.tree.map(lambda *x: np.concatenate(x), first_metrics, second_metrics)
    jax.tree.map(np.testing.assert_array_equal, raw(last), raw(second))
    jax.tree.map(np.testing.assert_array_equal, metrics, parts)


@pytest.mark.usefixtures("quick_compile")
@each_agent(slow=("ppo",), very_slow=("recurrent_ppo", "dqn", "pqn", "sac", "td3"))
def test_training_passes_debug_nans(name):
    """No episode ends in the first update, so `return_mean` is undefined."""
    agent = make_agent(name, num_steps=1, num_updates=1, stats_window_size=7)
    with jax.debug_nans(True):
        _, metrics = jax.jit(agent.train)(agent.init(jax.random.key(0)))
        assert (metrics["return_mean"] < 0).all()


@pytest.mark.very_slow  # `test_recipe_spaces.py` trains each agent for a short time
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize(
    ("agent_class", "env_id", "num_envs", "changes", "min_return"),
    [
        (dqn.DQN, "CartPole-v1", 16, {"num_updates": 200}, 150),
        (pqn.PQN, "CartPole-v1", 64, {}, 475),
        (sac.SAC, "Pendulum-v1", 1, {"num_updates": 10}, -300),
        (
            td3.TD3,
            "Pendulum-v1",
            1,
            {"num_updates": 10, "batch_size": 128, "hidden_layer_sizes": (64, 64)},
            -300,
        ),
    ],
)
def test_agent_learns(agent_class, env_id, num_envs, changes, min_return):
    config = agent_class.config.replace(**changes)
    agent = agent_class(envs.make_vec(env_id, num_envs), config)
    state, _ = jax.jit(agent.train)(agent.init(jax.random.key(0)))
    collector = agent.collector.replace(policy=agent.eval_policy)
    stats = rollout.evaluate(collector, state.params, jax.random.key(1), 50)
    assert stats.returns.mean > min_return
    assert agent.env_steps(config.num_updates) < 500_000


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (ppo, "lr", "Did you mean `learning_rate`?"),
        (ppo, "n_steps", "Did you mean `num_steps`?"),
        (ppo, "clip_range", "Did you mean `clip_eps`?"),
        (ppo, "total_timesteps", "Set `num_updates`: each update takes"),
        (ppo, "batch_size", "Set `num_minibatches`"),
        (ppo, "gama", "Did you mean `gamma`?"),
        (pqn, "lam", "Did you mean `lambda_`?"),
        (sac, "polyak", "Did you mean `tau`?"),
        (dqn, "nonsense", "The fields are num_updates"),
    ],
)
def test_wrong_hyperparameter_names_the_right_one(module, name, words):
    for make in (module.Config, module.Config().replace):
        with pytest.raises(TypeError) as error:
            make(**{name: 1})
        assert f"`{name}` must be a field of `Config`" in str(error.value)
        assert words in str(error.value)


@struct.dataclass
class ChoiceEnv:
    """Five steps whose rewards are the actions, 0 to 3."""

    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Discrete(4)

    def reset(self, key):
        return jnp.int32(0), jnp.ones(2)

    def step(self, key, state, action):
        state = state + 1
        return envs.EnvStep(
            state=state, obs=jnp.ones(2), reward=action, terminated=state == 5
        )


@pytest.mark.parametrize("agent_class", [ppo.PPO, dqn.DQN])
def test_evaluation_of_an_agent_takes_the_most_likely_action(agent_class):
    config = agent_class.config.replace(hidden_layer_sizes=(4,))
    agent = agent_class(envs.vectorize(ChoiceEnv(), 4), config)
    state = agent.init(jax.random.key(0))
    stats = rollout.evaluate(agent, state, jax.random.key(1), num_episodes=20)
    action = agent.predict(state.params, np.ones(2, np.float32))
    assert (stats.returns.mean, stats.returns.std) == (5 * action, 0)
    assert stats.num_episodes == 20
    with pytest.raises(ValueError, match="`params` must be the state of the agent"):
        rollout.evaluate(agent, state.params, jax.random.key(1), 20)


@pytest.mark.parametrize("space", [Discrete(3), Box(-1.0, 1.0, (3,))])
@each_agent("ppo", "recurrent_ppo")
def test_untrained_policy_prefers_no_action(name, space):
    """The last layer of the actor has the scale 0.01, as in CleanRL's PPO."""
    agent = AGENTS[name][0](EnvSpec(Box(-1.0, 1.0, (4,)), space, 64))
    obs = np.random.default_rng(0).uniform(-1, 1, (64, 4)).astype(np.float32)

    @quick_jit
    def act(key, obs):
        params = agent.init_learner(key, obs).params
        args = params, obs, agent.policy.init(64), jax.random.key(1)
        return agent.policy.apply(*args).extras, agent.policy.mode(*args).action

    extras, mode = jax.device_get(act(jax.random.key(0), obs))
    if isinstance(space, Discrete):
        np.testing.assert_allclose(np.exp(extras["log_prob"]), 1 / 3, atol=0.02)
    else:
        np.testing.assert_allclose(mode, 0, atol=0.06)
    assert np.std(extras["value"]) > 0.1  # the critic has the scale 1


class Layers(nn.Module):
    """One output per size. The size None removes the last axis."""

    sizes: tuple

    @nn.compact
    def __call__(self, *inputs):
        x = inputs[0]
        layers = [nn.Dense(size or 1)(x) for size in self.sizes]
        pairs = zip(layers, self.sizes, strict=True)
        outputs = [y if size else y[..., 0] for y, size in pairs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


CHOICE, FORCE = Discrete(3), Box(-1.0, 1.0, (2,))
PAIR = r"must return a tuple of 2 arrays of shape \(1, {}\) and \(1,\), got "
ONE = r"must return one array of shape \(.*1, {}\), got "
WRONG_OUTPUTS = [
    (ppo.PPO, CHOICE, "network", (2, None), PAIR.format(3)),
    (ppo.PPO, CHOICE, "network", (3, 1), PAIR.format(3)),
    (ppo.PPO, CHOICE, "network", (3,), PAIR.format(3)),
    (ppo.PPO, CHOICE, "network", (None, 3), PAIR.format(3)),
    (ppo.PPO, FORCE, "network", (2, None), PAIR.format(4)),  # no log deviations
    (dqn.DQN, CHOICE, "network", (4,), ONE.format(3)),
    (dqn.DQN, CHOICE, "network", (3, None), ONE.format(3) + "2 values"),
    (pqn.PQN, CHOICE, "network", (4,), ONE.format(3)),
    (sac.SAC, FORCE, "actor_network", (2,), ONE.format(4)),
    (sac.SAC, FORCE, "critic_network", (2,), ONE.format(1)),
    (sac.SAC, FORCE, "critic_network", (None,), ONE.format(1)),
    (td3.TD3, FORCE, "actor_network", (4,), ONE.format(2)),
    (td3.TD3, FORCE, "critic_network", (None,), ONE.format(1)),
]


def init_learner(agent_class, action_space, **networks):
    agent = agent_class(EnvSpec(Box(-1.0, 1.0, (5,)), action_space, 1), **networks)
    return jax.eval_shape(agent.init_learner, jax.random.key(0), jnp.zeros((1, 5)))


@pytest.mark.parametrize(
    ("agent_class", "space", "name", "sizes", "message"), WRONG_OUTPUTS
)
def test_wrong_network_outputs_raise(agent_class, space, name, sizes, message):
    with pytest.raises(ValueError, match=f"`{name}` {message}"):
        init_learner(agent_class, space, **{name: Layers(sizes)})


class FlattenNetwork(nn.Module):
    """An invalid network that merges all axes except the first."""

    @nn.compact
    def __call__(self, obs):
        x = obs.reshape(obs.shape[0], -1)
        return nn.Dense(3)(x), nn.Dense(1)(x)[..., 0]


class BatchNetwork(nn.Module):
    """An invalid network whose outputs always have a batch axis."""

    @nn.compact
    def __call__(self, obs):
        x = nn.Dense(3)(obs.reshape(-1, 5))
        return x, x[..., 0]


@pytest.mark.parametrize("network", [FlattenNetwork(), BatchNetwork()])
def test_network_without_single_observations_raises(network):
    with pytest.raises(ValueError, match=r"`network` .*single observation") as got:
        init_learner(ppo.PPO, CHOICE, network=network)
    assert "x.reshape(*x.shape[:-3], -1)" in str(got.value)


class Table(nn.Module):
    """A custom network, a table with a row for each observation."""

    num_outputs: int
    with_value: bool = False

    @nn.compact
    def __call__(self, obs):
        table = self.param("table", nn.initializers.zeros, (2, self.num_outputs))
        outputs = table[obs]
        return (outputs, outputs[..., 0]) if self.with_value else outputs


@pytest.mark.parametrize("agent_class", [ppo.PPO, dqn.DQN])
def test_custom_network_replaces_the_default(agent_class):
    network = Table(5, with_value=agent_class is ppo.PPO)
    agent = agent_class(EnvSpec(Discrete(2), Discrete(5), 1), network=network)
    state = jax.eval_shape(agent.init_learner, jax.random.key(0), jnp.zeros(1, int))
    assert state.params["params"]["table"].shape == (2, 5)
    params = {"params": {"table": jnp.eye(5)[jnp.array([1, 4])]}}
    assert [agent.predict(params, obs) for obs in (0, 1)] == [1, 4]
    networks = {"actor_network": Layers((4,)), "critic_network": Layers((1,))}
    assert init_learner(sac.SAC, FORCE, **networks)


class ConstantLayers(nn.Module):
    """`Layers` behind a normalization by constants, also as a recurrent network."""

    sizes: tuple

    def setup(self):
        self.norm = nn.BatchNorm(use_running_average=True)
        self.scale = self.variable("constants", "scale", lambda: jnp.float32(0.25))
        self.power = self.variable("integers", "power", lambda: jnp.int32(2))
        self.layers = Layers(self.sizes)

    def __call__(self, *inputs):
        if isinstance(inputs[0], jax.Array):  # a memory
            memory, features = self.encode(*inputs)
            return memory, self.heads(features)
        x = jnp.concatenate([self.features(inputs[0]), *inputs[1:]], axis=-1)
        return self.heads(x)

    def features(self, obs):
        x = obs["x"] if "x" in obs else obs["goal"][..., 0]
        return self.scale.value * self.norm(x) ** self.power.value

    def encode(self, memory, obs):
        return memory, self.features(obs)

    def heads(self, x):
        return self.layers(x)

    @nn.nowrap
    def initialize_memory(self, num_envs):
        return jnp.zeros((num_envs, 1))


CUSTOM_SIZES = {
    "ppo": {"network": (3, None)},
    "recurrent_ppo": {"network": (3, None)},
    "dqn": {"network": (3,)},
    "pqn": {"network": (3,)},
    "sac": {"actor_network": (4,), "critic_network": (1,)},
    "td3": {"actor_network": (2,), "critic_network": (1,)},
}


def make_custom_agent(name):
    """Makes an agent with statistics of observations and other constants."""
    networks = {x: ConstantLayers(sizes) for x, sizes in CUSTOM_SIZES[name].items()}
    return make_agent(name, normalize_observations=True).replace(**networks)


@each_agent(*AGENTS)
def test_optimizer_gets_only_the_collection_params(name):
    """A gradient or an average of the integer variables would raise."""
    agent = make_custom_agent(name)
    state, _ = jax.eval_shape(agent.train, init(agent))
    names = {"layers", "obs_stats"} | {"batch_stats", "constants", "integers"}
    for tree, expected in (state.params, names), (state.opt_state, {"layers"}):
        paths = [x for x, _ in jax.tree.leaves_with_path(tree)]
        entries = {getattr(entry, "key", None) for path in paths for entry in path}
        # The optimizer of PPO and PQN has one vector.
        assert entries & names in (expected, set())


@each_agent("ppo", slow=("td3",), very_slow=("recurrent_ppo", "dqn", "pqn", "sac"))
def test_only_the_collection_params_is_trained(name):
    agent = make_custom_agent(name)

    @quick_jit
    def train(key):
        state = agent.init(key)
        return state.params, agent.train(state)[0]

    params, state = jax.device_get(train(jax.random.key(0)))
    trees = [(params, state.params)]
    if hasattr(state, "target_params"):
        initial = {x: y for x, y in params.items() if x != "obs_stats"}
        trees.append(
            (params["critic"] if name == "sac" else initial, state.target_params)
        )
    for initial, last in trees:
        paths = jax.tree.leaves_with_path(initial)
        for (path, old), new in zip(paths, jax.tree.leaves(last), strict=True):
            entries = {getattr(entry, "key", None) for entry in path}
            assert old.dtype == new.dtype
            if {"batch_stats", "constants", "integers"} & entries:
                np.testing.assert_array_equal(old, new)
            elif "kernel" in entries or "obs_stats" in entries:
                assert (old != new).any()


class Normalized(nnx.Module):
    """A network of nnx with batch normalization."""

    def __init__(self, *, training, rngs):
        self.norm = nnx.BatchNorm(5, use_running_average=not training, rngs=rngs)
        self.dense = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, obs):
        return self.dense(self.norm(obs))


class DropoutNetwork(nn.Module):
    """A network with active dropout."""

    @nn.compact
    def __call__(self, obs):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(3)(obs))


def test_network_of_nnx_is_bridged():
    network = nnx.bridge.to_linen(Normalized, training=False)
    params = init_learner(dqn.DQN, CHOICE, network=network).params
    assert {"params", "batch_stats"} == params.keys()


class Bridged(nnx.Module):
    """A layer of nnx, for policies, values and critics."""

    def __init__(self, num_inputs, size, *, with_value=False, rngs):
        self.with_value = with_value
        self.dense = nnx.Linear(num_inputs, size + with_value, rngs=rngs)

    def __call__(self, obs, *action):
        x = obs["x"] if "x" in obs else obs["goal"][..., 0]
        outputs = self.dense(jnp.concatenate([x, *action], axis=-1))
        return (outputs[..., :-1], outputs[..., -1]) if self.with_value else outputs


@each_agent("ppo", slow=("dqn", "pqn", "sac", "td3"))
def test_networks_of_nnx_are_trained(name):
    bridge = nnx.bridge.to_linen
    if name in ("sac", "td3"):
        actor_network = bridge(Bridged, 2, 4 if name == "sac" else 2)
        networks = {
            "actor_network": actor_network,
            "critic_network": bridge(Bridged, 4, 1),
        }
    else:
        networks = {"network": bridge(Bridged, 2, 3, with_value=name == "ppo")}
    agent = make_agent(name).replace(**networks)

    @quick_jit
    def train(key):
        state = agent.init(key)
        return state.params, agent.train(state)[0].params

    params, trained = jax.device_get(train(jax.random.key(0)))
    for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(trained), strict=True):
        assert (old != new).any()
    if "critic" in params:
        first, second = params["critic"]["params"]["dense"]["kernel"]
        assert (first != second).any()


@pytest.mark.parametrize(
    "network", [nn.Dense(3), nnx.bridge.to_linen(Normalized, training=False)]
)
def test_network_without_memory_raises(network):
    with pytest.raises(ValueError, match="`initialize_memory`, `encode` and `heads`"):
        make_agent("recurrent_ppo").replace(network=network)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Normalized(training=False, rngs=nnx.Rngs(0)), "`network` must .*to_linen"),
        (nnx.bridge.to_linen(Normalized, training=True), "must not .*'batch_stats'"),
        (nn.BatchNorm(use_running_average=False), "`network` must not .*batch_stats"),
        (DropoutNetwork(), "`network` must not .* key.*dropout"),
        (jnp.tanh, "`network` must be a module of `flax.linen`"),
        (Layers(np.array([3])), "`network` must be hashable.*constants"),
    ],
)
def test_network_must_be_a_function_of_params(network, message):
    with pytest.raises(ValueError, match=message):
        init_learner(dqn.DQN, CHOICE, network=network)


@each_agent("ppo", "recurrent_ppo", "dqn", "pqn", "sac")
def test_loss_of_one_row_must_be_a_scalar(name):
    agent_class, env, _ = AGENTS[name]

    class BatchLoss(agent_class):
        """An agent whose loss has an additional axis."""

        def loss(self, params, row):
            loss, metrics = super().loss(params, row)
            return loss[None], metrics

    agent = BatchLoss(envs.vectorize(env, 2), make_agent(name).config)
    with pytest.raises(ValueError, match="`loss` of one row must be"):
        jax.eval_shape(agent.update, init(agent))


@each_agent("ppo", "sac", very_slow=("recurrent_ppo", "dqn", "pqn", "td3"))
def test_agents_reject_environments_that_update_statistics(name):
    agent = make_agent(name)
    env = envs.NormalizeObs(agent.env)
    with pytest.raises(ValueError, match=r"`env` must not .*normalize_observations=Tr"):
        agent.replace(env=env)
    collector = rollout.Collector(env=env, policy=agent.policy)
    agent = agent.replace(env=collector.freeze(collector.init(jax.random.key(0))).env)
    assert init(agent).params


def init(agent):
    return jax.eval_shape(agent.init, jax.random.key(0))


def train(num_updates):
    agent = make_agent("ppo")
    return agent.train(init(agent), num_updates)


def update(**changes):
    agent = make_agent("recurrent_ppo", **changes)
    return jax.eval_shape(agent.update, init(agent))


def make_with_space(name, action_space):
    return AGENTS[name][0](EnvSpec(FORCE, action_space, 2))


def predict(space, obs):
    agent = ppo.PPO(EnvSpec(space, Discrete(2), 1))
    return agent.predict({}, obs)


FOUR, INTEGERS = Box(-1.0, 1.0, (4,)), Box(0, 3, (2,), jnp.dtype("int32"))
SHAPE = r"`obs` must be .* of shape \(4,\), got"
ELEMENT = r"`obs` must be in Discrete\(n=3"
OBJECT = "must be an object, got the class"
COUNT = "must be an int of at least 1"
NO_CHOICE = "must be a Discrete .*PPO.*SAC"
NO_BOX = "must be a Box of floats.* DQN .* PPO "
INVALID_CALLS = [
    (f"`network` {OBJECT} Dense", lambda: make_agent("ppo").replace(network=nn.Dense)),
    (f"`config` {OBJECT} Config", lambda: make_agent("ppo").replace(config=ppo.Config)),
    ("`env` must be parallel", lambda: init(ppo.PPO("CartPole-v1"))),
    ("`env` must be parallel", lambda: init(ppo.PPO(envs.make("CartPole-v1")))),
    ("`key` must be one typed key", lambda: make_agent("ppo").init(0)),
    ("`num_updates` must be", lambda: train(0)),
    ("`num_updates` must be", lambda: train(1.0)),
    ("`num_updates` must be", lambda: train(True)),
    (f"`config.gradient_steps` {COUNT}", lambda: make_agent("sac", gradient_steps=0)),
    ("`config.activation` must be the name", lambda: make_agent("ppo", activation=max)),
    ("`config.activation` must be the name", lambda: make_agent("sac", activation="X")),
    (f"`config.policy_delay` {COUNT}", lambda: make_agent("td3", policy_delay=0)),
    ("`num_minibatches` must divide the 2 items", lambda: update(num_minibatches=3)),
    (SHAPE, lambda: predict(FOUR, np.zeros(3))),
    (SHAPE, lambda: predict(FOUR, np.zeros((1, 4)))),
    (SHAPE, lambda: predict(FOUR, (np.zeros(4), {}))),
    (SHAPE, lambda: predict(FOUR, [0.0] * 3)),
    (ELEMENT, lambda: predict(CHOICE, 3)),
    (ELEMENT, lambda: predict(CHOICE, -1)),
    (ELEMENT, lambda: predict(CHOICE, 1.5)),
    (ELEMENT, lambda: predict(CHOICE, np.int64(7))),
    (NO_CHOICE, lambda: make_with_space("dqn", FORCE)),
    (NO_CHOICE, lambda: make_with_space("pqn", FORCE)),
    (NO_BOX, lambda: make_with_space("sac", CHOICE)),
    (NO_BOX, lambda: make_with_space("sac", INTEGERS)),
    (NO_BOX, lambda: make_with_space("sac", spaces.Tuple((FORCE,)))),
    (NO_BOX, lambda: make_with_space("td3", CHOICE)),
]


@pytest.mark.parametrize(("words", "call"), INVALID_CALLS)
def test_invalid_arguments_raise(words, call):
    with pytest.raises(ValueError, match=words):
        call()


def test_activation_of_a_custom_network_is_not_checked():
    agent = make_agent("ppo").replace(network=nn.Dense(3))
    config = agent.config.replace(activation=nn.tanh)
    assert agent.replace(config=config).config.activation is nn.tanh


def test_observations_may_be_lists():
    agent = ppo.PPO(EnvSpec(FOUR, CHOICE, 1))
    assert agent.prepare_obs([0.0] * 4).dtype == np.float32


def test_learning_rate_adapts_to_the_kl_divergence():
    """The rule of rsl_rl, one case per branch and limit."""
    cases = {
        (1e-3, 0.03): 1e-3 / 1.5,  # above twice the target
        (1e-3, 0.02): 1e-3,
        (1e-3, 0.005): 1e-3,
        (1e-3, 0.004): 1.5e-3,  # below half of the target
        (1e-3, 0.0): 1e-3,  # the first gradient step of an update
        (1.2e-5, 1.0): 1e-5,
        (8e-3, 0.001): 1e-2,
    }
    rate, kl = np.float32([*cases]).T
    result = quick_jit(lambda rate, kl: adapt_learning_rate(rate, kl, 0.01))(rate, kl)
    np.testing.assert_allclose(result, [*cases.values()], rtol=1e-6)


@each_agent("ppo", slow=("recurrent_ppo",))
def test_gradient_steps_use_the_adapted_learning_rate(name):
    """A small target lowers the rate and a large one raises it, except in step 1."""
    options = {"num_updates": 2, "num_epochs": 2, "learning_rate": 0.005}
    agent = make_agent(name, desired_kl=0.01, **options)

    @quick_jit
    def train(key, desired_kl):
        config = agent.config.replace(desired_kl=desired_kl)
        changed = agent.replace(config=config)
        state, metrics = changed.update(changed.init(key))
        return state.params, metrics["learning_rate"]

    results = [jax.device_get(train(jax.random.key(0), x)) for x in (1e-9, 1e9)]
    steps = np.arange(4)
    expected = 0.005 / 1.5**steps, np.minimum(0.005 * 1.5**steps, 0.01)
    for (_, rate), rates in zip(results, expected, strict=True):
        np.testing.assert_allclose(rate, rates.mean(), rtol=1e-5)
    low, high = (flatten(params) for params, _ in results)
    assert abs(low - high).max() > 1e-4


def test_desired_kl_needs_a_number_as_learning_rate():
    schedule = optax.linear_schedule(1.0, 0.1, 8)
    with pytest.raises(ValueError, match=r"`config\.learning_rate` must be a number"):
        make_agent("ppo", desired_kl=0.01, learning_rate=schedule)


def test_predict_traces_only_once(monkeypatch):
    agent = ppo.PPO(EnvSpec(FOUR, CHOICE, 1))
    obs = np.zeros(4, np.float32)
    learner = quick_jit(agent.init_learner)(jax.random.key(0), obs[None])
    params = learner.params
    expected = agent.predict(params, obs)
    monkeypatch.setattr(jax, "eval_shape", None)
    assert agent.predict(params, obs) == expected


PROGRAM_TEXT = """
import hashlib, jax
from recipe_cases import AGENTS, make_agent
for name in AGENTS:
    agent = make_agent(name)
    text = jax.jit(lambda key: agent.train(agent.init(key))).lower(jax.random.key(0))
    print(name, hashlib.sha256(text.as_text().encode()).hexdigest())
"""


@pytest.mark.very_slow
def test_programs_are_deterministic():
    """Otherwise JAX's persistent cache of compiled programs misses at random."""
    outputs = []
    for seed in ("1", "2"):
        path = os.pathsep.join([os.getcwd(), *sys.path])
        env = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM_TEXT]
        outputs.append(subprocess.check_output(command, env=env, text=True))
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == len(AGENTS)

"""The agents train in any space, in JAX and host environments alike.

`rollout/test_distributions.py` compares the distributions over all kinds of spaces.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from cases import quick_jit
from flax import struct

import rollout
from rollout import envs
from rollout.distributions import ActionDistribution
from rollout.envs import spaces
from rollout.recipes import dqn, ppo, pqn, recurrent_ppo, sac, td3
from rollout.recipes.dqn import DQN
from rollout.recipes.ppo import PPO
from rollout.recipes.pqn import PQN
from rollout.recipes.recurrent_ppo import RecurrentPPO
from rollout.recipes.sac import SAC
from rollout.recipes.td3 import TD3

TREE = spaces.Dict(
    {"turn": envs.Discrete(2, start=3), "pull": spaces.Tuple((envs.Box(2.0, 6.0, ()),))}
)
HALF_OPEN = envs.Box(jnp.array([0.0, -jnp.inf]), jnp.array([jnp.inf, 3.0]), (2,))
SPACES = {
    "discrete": envs.Discrete(3),
    "start": envs.Discrete(3, start=-2),
    "box": envs.Box(jnp.array([[1.0], [-4.0]]), 5.0, (2, 1)),
    "scalar": envs.Box(-1.0, 1.0, ()),
    "tree": TREE,
}
NUM_ENVS = 16
CONFIG = ppo.Config(num_updates=12, num_steps=32, hidden_layer_sizes=(16, 16))
RECURRENT = recurrent_ppo.Config(
    num_updates=30,
    num_steps=32,
    learning_rate=1e-2,
    memory_size=16,
    hidden_layer_sizes=(16, 16),
)
DQN_CONFIG = dqn.Config(
    num_updates=30,
    num_steps=8,
    gradient_steps=8,
    exploration_fraction=0.5,
    hidden_layer_sizes=(16, 16),
)
PQN_CONFIG = pqn.Config(num_updates=12, hidden_layer_sizes=(16, 16))
SAC_CONFIG = sac.Config(
    num_updates=2,
    num_steps=200,
    gradient_steps=4,
    learning_starts=256,
    gamma=0.0,
    reward_scale=1.0,
)
TD3_CONFIG = td3.Config(
    num_updates=2,
    num_steps=400,
    learning_starts=256,
    batch_size=128,
    gamma=0.0,
    hidden_layer_sizes=(64, 64),
)


@struct.dataclass
class Guess:
    """Rewards an action by 1 minus its distance from `_best`.

    The observation is an element of a space, sampled at each of five steps.
    """

    action_space: Any
    observation_space: Any

    def reset(self, key):
        return jnp.int32(0), self.observation_space.sample(key)

    def step(self, key, state, action):
        rewards = [
            1 - jnp.abs(_best(part) - x.astype(float)).mean()
            for part, x in zip(
                self.action_space.leaves(), jax.tree.leaves(action), strict=True
            )
        ]
        return envs.EnvStep(
            state=state + 1,
            obs=self.observation_space.sample(key),
            reward=sum(rewards) / len(rewards),
            terminated=jnp.bool_(False),
            truncated=state == 4,
            info={},
        )


@struct.dataclass
class Masked(Guess):
    """`Guess` with three actions, of which the best is masked out."""

    observation_space: Any = spaces.Dict(
        {"part": TREE, "action_mask": envs.Box(0, 1, (3,), jnp.dtype("int8"))}
    )

    def reset(self, key):
        return jnp.int32(0), self._observe(key)

    def step(self, key, state, action):
        return super().step(key, state, action).replace(obs=self._observe(key))

    def _observe(self, key):
        return {"part": TREE.sample(key), "action_mask": jnp.int8([1, 1, 0])}


def _best(part):
    """Returns the largest integer, or the float closest to 1."""
    low, high = (
        jnp.broadcast_to(jnp.asarray(x, float), part.shape) for x in part.bounds
    )
    is_float = jnp.issubdtype(part.dtype, jnp.floating)
    return jnp.clip(1.0, low, high) if is_float else high


def make_guess(space, num_envs=NUM_ENVS):
    return envs.vectorize(Guess(space, TREE), num_envs)


def evaluate(agent, params):
    """Returns the mean return of 20 episodes of the evaluation policy."""
    collector = agent.collector.replace(policy=agent.eval_policy)
    stats = rollout.evaluate(collector, params, jax.random.key(1), num_episodes=20)
    return stats.returns.mean


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
def test_ppo_learns_a_tree_of_actions():
    agent = PPO(make_guess(TREE), CONFIG)
    state = jax.jit(agent.init)(jax.random.key(0))
    state, metrics = jax.jit(agent.train)(state)
    returns = metrics["return_mean"]
    assert evaluate(agent, state.params) > 4.5 > returns[np.isfinite(returns)][0]


def test_floats_are_sampled_from_the_normal_distribution_of_scipy():
    distribution = ActionDistribution(SPACES["scalar"])
    params = jnp.array([0.5, -1.0])  # mean, log standard deviation
    keys = jax.random.split(jax.random.key(0), 2000)
    raw = quick_jit(jax.vmap(lambda key: distribution.sample(params, key)))(keys)
    normal = scipy.stats.norm(0.5, np.exp(-1.0))
    assert scipy.stats.kstest(np.asarray(raw), normal.cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", ["start", "tree"])
def test_actions_of_ppo_are_elements_of_their_space(name):
    """Also of a tuple, which a policy could confuse with an action and its extras."""
    space = spaces.Tuple((SPACES[name], envs.Box(0.0, 10.0, (2,))))
    agent = PPO(make_guess(space, 8), CONFIG)

    @quick_jit
    def collect(key):
        state = agent.init(key)
        is_valid = []
        for policy in (agent.policy, agent.eval_policy):
            collector = agent.collector.replace(policy=policy)
            carry = collector.init(jax.random.fold_in(key, len(is_valid) + 1))
            _, t = collector.collect_steps(carry, state.params, 4)
            is_valid.append(jax.vmap(jax.vmap(space.contains))(t.action))
        return is_valid

    with jax.debug_key_reuse(False):  # one key for both policies
        is_valid = collect(jax.random.key(0))
    assert all(x.all() for x in jax.device_get(is_valid))


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_rows_that_are_masked_out_do_not_count(is_recurrent):
    """Gradients of minibatches without a valid row are finite, and so are metrics."""
    space, num_envs = SPACES["discrete"], 4
    env = envs.vectorize(Masked(space), num_envs)
    sizes = {"num_epochs": 1, "num_minibatches": num_envs}
    if is_recurrent:
        agent = RecurrentPPO(env, RECURRENT.replace(**sizes))
    else:
        agent = PPO(env, CONFIG.replace(**sizes))

    @quick_jit
    def learn(key):
        state = agent.init(key)
        memory = (state.carry.policy_state,) if is_recurrent else ()
        carry, t = agent.collector.collect_steps(state.carry, state.params, 16)
        # The lane of a minibatch of recurrent PPO.
        t = t.replace(mask=t.mask.at[:, 0].set(False))
        value = agent.collector.value(carry, state.params)
        return t.action, *agent.learn(state.replace(carry=()), t, value, *memory)

    action, state, metrics = jax.device_get(learn(jax.random.key(0)))
    assert set(np.unique(action).tolist()) == {0, 1}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert np.isfinite(metrics["entropy"])


class Hidden(gymnasium.Env):
    """Rewards the turn observed one step before; the last of three is masked out."""

    action_space = gymnasium.spaces.Discrete(3, start=-2)
    observation_space = gymnasium.spaces.Dict(
        {
            "turn": gymnasium.spaces.Discrete(2, start=3),
            "action_mask": gymnasium.spaces.Box(0, 1, (3,), np.int8),
        }
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.turn = 0, 3
        return self.observe(), {}

    def step(self, action):
        reward = float(action == self.turn - 5)
        self.number, self.turn = self.number + 1, self.next_turn
        return self.observe(), reward, False, self.number == 8, {}

    def observe(self):
        self.next_turn = int(self.np_random.integers(3, 5))
        mask = np.array([1, 1, 0], np.int8)
        return {"turn": self.next_turn, "action_mask": mask}


@struct.dataclass
class HiddenInJax:
    """`Hidden` in JAX."""

    action_space: Any = envs.Discrete(3, start=-2)
    observation_space: Any = spaces.Dict(
        {
            "turn": envs.Discrete(2, start=3),
            "action_mask": envs.Box(0, 1, (3,), jnp.dtype("int8")),
        }
    )

    def reset(self, key):
        turn = jax.random.randint(key, (), 3, 5)
        return (jnp.int32(0), jnp.int32(3), turn), self.observe(turn)

    def step(self, key, state, action):
        number, turn, next_turn = state
        shown = jax.random.randint(key, (), 3, 5)
        return envs.EnvStep(
            state=(number + 1, next_turn, shown),
            obs=self.observe(shown),
            reward=(action == turn - 5).astype(jnp.float32),
            terminated=jnp.bool_(False),
            truncated=number == 7,
            info={},
        )

    def observe(self, turn):
        return {"turn": turn, "action_mask": jnp.int8([1, 1, 0])}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("is_host", [False, True])
def test_recurrent_ppo_learns_from_its_memory_and_takes_valid_actions(is_host):
    if is_host:
        env = envs.from_gymnasium(Hidden, NUM_ENVS)
    else:
        env = envs.vectorize(HiddenInJax(), NUM_ENVS)
    agent = RecurrentPPO(env, RECURRENT)
    state, metrics = agent.train(agent.init(jax.random.key(0)))
    assert metrics["return_mean"][-1] > 7  # without a memory 4.5
    _, t = agent.collector.collect_steps(state.carry, state.params, 16)
    assert set(np.unique(t.action).tolist()) <= {-2, -1}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize(
    ("agent_class", "is_host"), [(PPO, False), (PPO, True), (DQN, True)]
)
def test_cartpole_is_learned_in_gymnax_and_in_gymnasium(agent_class, is_host):
    make = envs.from_gymnasium if is_host else envs.make_vec
    config = dataclasses.replace(agent_class.config, num_updates=45)
    if agent_class is DQN:
        config = config.replace(num_updates=150, anneal_lr=False)
    else:
        config = config.replace(num_steps=64, num_minibatches=4)
    agent = agent_class(make("CartPole-v1", NUM_ENVS), config)
    state = agent.init(jax.random.key(0))
    state, metrics = agent.train(state)
    assert np.nanmax(metrics["return_mean"]) > 120
    assert state.num_updates == config.num_updates


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("agent_class", [SAC, TD3])
def test_agents_for_boxes_train_in_host_environments(agent_class):
    config = dataclasses.replace(
        agent_class.config, num_updates=3, num_steps=20, learning_starts=64
    )
    env = envs.from_gymnasium("Pendulum-v1", num_envs=2)
    agent = agent_class(env, config)
    state, metrics = agent.train(agent.init(jax.random.key(0)))
    assert metrics["return_mean"].shape == (3,)
    assert agent.env_steps(3) == 2 * state.carry.step
    assert agent.predict(state.params, state.carry.obs[0]).shape == (1,)


@pytest.mark.parametrize("is_host", [False, True])
def test_advantages_over_time_limits_are_those_of_a_plain_loop(is_host):
    """Episodes of at most four steps, in host and in JAX environments."""
    if is_host:
        env = envs.from_gymnasium(
            lambda: gymnasium.wrappers.TimeLimit(
                gymnasium.make("CartPole-v1").unwrapped, 4
            ),
            num_envs=2,
        )
    else:
        env = envs.make_vec("CartPole-v1", 2, max_episode_steps=4)
    agent = PPO(env, CONFIG)
    state = agent.init(jax.random.key(0))
    carry, t = agent.collector.collect_steps(state.carry, state.params, 10)
    last_value = agent.collector.value(carry, state.params)

    @quick_jit
    def advantages(params, t, last_value):
        value = t.extras["value"]
        next_value = rollout.next_values(t, value, last_value)
        flags = t.terminated, t.truncated
        advantage = rollout.gae(
            t.reward, value, next_value, *flags, gamma=0.9, lambda_=0.8
        )
        return advantage, agent.model.apply(params, t.next_obs)[1]

    t, (advantage, true_next_value) = jax.device_get(
        (t, advantages(state.params, t, last_value))
    )
    assert t.truncated.sum() == 4
    later, expected = np.zeros(2), np.zeros((10, 2))
    for step in reversed(range(10)):
        value = t.extras["value"][step]
        bootstrap = 0.9 * ~t.terminated[step] * true_next_value[step]
        delta = t.reward[step] + bootstrap - value
        later = delta + 0.72 * ~t.done[step] * later
        expected[step] = later
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize(
    ("agent_class", "config", "space"),
    [
        (SAC, SAC_CONFIG, HALF_OPEN),
        (TD3, TD3_CONFIG, envs.Box(-2.0, 3.0, (2, 1))),
    ],
)
def test_agents_for_boxes_learn_any_box(agent_class, config, space):
    agent = agent_class(make_guess(space, 4), config)
    state, _ = jax.jit(lambda key: agent.train(agent.init(key)))(jax.random.key(0))
    assert evaluate(agent, state.params) > 4
    obs = jax.tree.map(lambda x: x[0], state.carry.obs)
    assert agent.predict(state.params, obs).shape == space.shape


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize(
    ("agent_class", "config"), [(DQN, DQN_CONFIG), (PQN, PQN_CONFIG)]
)
def test_q_learning_finds_the_best_valid_action(agent_class, config):
    """The reward of the best valid action is 0, and of the other one -1."""
    env = envs.vectorize(Masked(SPACES["start"]), NUM_ENVS)
    agent = agent_class(env, config)
    state, _ = jax.jit(lambda key: agent.train(agent.init(key)))(jax.random.key(0))
    assert evaluate(agent, state.params) > -1
    obs = jax.tree.map(lambda x: x[0], state.carry.obs)
    assert agent.predict(state.params, obs) == -1
    _, t = agent.collector.collect_steps(state.carry, state.params, 32)
    assert set(np.unique(t.action).tolist()) <= {-2, -1}


AGENTS = {
    "ppo": (PPO, CONFIG, SPACES["tree"]),
    "recurrent_ppo": (RecurrentPPO, RECURRENT, SPACES["tree"]),
    "dqn": (DQN, DQN_CONFIG.replace(learning_starts=16), SPACES["start"]),
    "pqn": (PQN, PQN_CONFIG, SPACES["start"]),
    "sac": (SAC, SAC_CONFIG.replace(learning_starts=16), SPACES["box"]),
    "td3": (TD3, TD3_CONFIG.replace(learning_starts=16), SPACES["box"]),
}


def make_small(name):
    """Makes an agent of two updates of four steps in two environments."""
    agent_class, config, space = AGENTS[name]
    config = config.replace(num_updates=2, num_steps=4)
    if agent_class in (PPO, RecurrentPPO, PQN):
        config = config.replace(num_minibatches=2, num_epochs=1)
    return agent_class(make_guess(space, 2), config)


def words(tree):
    """Replaces typed keys by their words."""

    def convert(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(convert, tree)


@pytest.mark.slow
@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize("name", AGENTS)
def test_training_in_parts_has_the_bits_of_a_training_at_once(name):
    agent = make_small(name)
    state = jax.jit(agent.init)(jax.random.key(0))
    train = jax.jit(agent.train, static_argnums=1)
    whole, metrics = train(state, 2)
    first, first_metrics = train(state, 1)
    second, second_metrics = train(first, 1)
    parts = jax.tree.map(lambda *x: np.concatenate(x), first_metrics, second_metrics)
    jax.tree.map(np.testing.assert_array_equal, words(whole), words(second))
    jax.tree.map(np.testing.assert_array_equal, metrics, parts)


@pytest.mark.parametrize("name", AGENTS)
def test_environment_steps_are_those_of_the_lanes(name):
    agent = make_small(name)
    shapes = jax.eval_shape(lambda key: agent.train(agent.init(key)), jax.random.key(0))
    assert all(x.shape == (2,) for x in shapes[1].values())
    counts = agent.env_steps(np.arange(3))
    assert counts.dtype == np.int64
    assert counts.tolist() == [agent.env_steps(n) for n in range(3)]
    assert np.diff(counts).tolist() == [8, 8]
    assert type(agent.env_steps(10**9)) is int
    assert agent.env_steps(10**9) == agent.env_steps(0) + 8 * 10**9


@pytest.mark.parametrize("name", AGENTS)
def test_number_of_episodes_in_the_mean_return_is_a_hyperparameter(name):
    agent = make_small(name)
    for size in (100, 3):
        agent = agent.replace(config=agent.config.replace(stats_window_size=size))
        window = jax.eval_shape(agent.init, jax.random.key(0)).window
        assert window.episode_return.shape == (size,)


@pytest.mark.parametrize(
    ("name", "option"), [("sac", "gradient_steps"), ("td3", "policy_delay")]
)
def test_counts_of_gradient_steps_are_checked(name, option):
    agent = make_small(name)
    with pytest.raises(ValueError, match=f"`config.{option}` must be an int of at"):
        agent.replace(config=agent.config.replace(**{option: 0}))


@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_agents_with_a_buffer_require_fixed_statistics(name):
    agent = make_small(name)
    env = envs.NormalizeObs(agent.env)
    with pytest.raises(ValueError, match="`env` must have fixed statistics"):
        agent.replace(env=env)
    collector = rollout.Collector(env=env, policy=agent.policy)
    fixed = collector.freeze(collector.init(jax.random.key(0))).env
    agent = agent.replace(env=fixed)
    assert jax.eval_shape(agent.init, jax.random.key(0)).params


def test_classes_instead_of_objects_are_named():
    env = make_small("ppo").env
    with pytest.raises(
        ValueError, match=r"`network` must be an object, .* class Dense"
    ):
        PPO(env, network=nn.Dense)
    with pytest.raises(ValueError, match="`config` must be an object"):
        PPO(env, ppo.Config)


def test_number_of_updates_is_checked():
    agent = make_small("ppo")
    state = jax.eval_shape(agent.init, jax.random.key(0))
    for number in (0, 1.0, True):
        with pytest.raises(ValueError, match="`num_updates` must be"):
            agent.train(state, number)


def test_predictions_with_a_memory_are_those_of_the_lanes():
    agent = RecurrentPPO(envs.vectorize(HiddenInJax(), 2), RECURRENT)
    collector = agent.collector.replace(policy=agent.eval_policy)

    @quick_jit
    def collect(key, carry_key):
        params = agent.init(key).params
        return params, *collector.collect_steps(collector.init(carry_key), params, 12)

    params, carry, t = collect(*jax.random.split(jax.random.key(0)))
    predict, memory = quick_jit(agent.predict), None
    for step in range(12):
        memory = None if t.first[step, 1] else memory
        obs = jax.tree.map(lambda x, step=step: x[step, 1], t.obs)
        action, memory = predict(params, obs, memory)
        assert action == t.action[step, 1]
    assert not t.first[step, 1]
    np.testing.assert_allclose(memory, carry.policy_state[1:], atol=1e-5)


class Table(nn.Module):
    """A custom network: a table with a row for each turn."""

    num_outputs: int
    with_value: bool = False

    @nn.compact
    def __call__(self, obs):
        table = self.param("table", nn.initializers.zeros, (2, self.num_outputs))
        outputs = table[obs["turn"] - 3]
        return (outputs, outputs[..., 0]) if self.with_value else outputs


@pytest.mark.parametrize("agent_class", [PPO, DQN])
def test_custom_network_replaces_the_default(agent_class):
    network = Table(5, with_value=agent_class is PPO)
    agent = agent_class(make_guess(envs.Discrete(5), 2), network=network)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    assert state.params["params"]["table"].shape == (2, 5)
    params = {"params": {"table": jnp.eye(5)[jnp.array([1, 4])]}}
    predict = quick_jit(agent.predict)
    actions = [predict(params, {"turn": x, "pull": (3.0,)}) for x in (3, 4)]
    assert actions == [1, 4]


@pytest.mark.parametrize(
    ("agent_class", "space"),
    [(DQN, SPACES["start"]), (SAC, SPACES["scalar"]), (TD3, SPACES["scalar"])],
)
def test_buffers_of_all_agents_store_transitions(agent_class, space):
    """jax takes trees for equal that differ in a class only, and shares programs."""
    agent = agent_class(make_guess(space))
    state = jax.eval_shape(agent.init, jax.random.key(0))
    assert type(state.buffer_state.ring.experience) is rollout.Transition


class Empty(struct.PyTreeNode):
    """An environment with given spaces, whose episodes have four steps."""

    observation_space: Any
    action_space: Any

    def reset(self, key):
        shapes = jax.eval_shape(self.observation_space.sample, key)
        return jnp.int32(0), jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)

    def step(self, key, state, action):
        obs = self.reset(key)[1]
        return envs.EnvStep(state=state + 1, obs=obs, reward=1.0, terminated=state > 2)


NOTHING, PAIR = envs.Box(-1.0, 1.0, (0,)), envs.Box(-1.0, 1.0, (2,))
PART = spaces.Dict({"nothing": NOTHING, "pair": PAIR})


@pytest.mark.parametrize("agent_class", [PPO, DQN, SAC, PQN, RecurrentPPO, TD3])
def test_agents_raise_for_spaces_without_entries(agent_class):
    action_space = envs.Discrete(2) if agent_class in (DQN, PQN) else PAIR
    env = envs.vectorize(Empty(NOTHING, action_space), 2)
    with pytest.raises(ValueError, match=r"observation_space` must have .* \(0,\)"):
        agent_class(env).init(jax.random.key(0))
    env = envs.vectorize(Empty(PAIR, NOTHING), 2)
    with pytest.raises(ValueError, match=r"action_space` must have .* shape \(0,\)"):
        agent_class(env).init(jax.random.key(0))


def test_parts_without_entries_train():
    env = envs.vectorize(Empty(PART, PART), 2)
    agent = PPO(env, CONFIG)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    state, _ = jax.eval_shape(lambda state: agent.train(state, 1), state)
    assert state.carry.obs["nothing"].shape == (2, 0)
    assert rollout.check_env(Empty(NOTHING, NOTHING)) == ()

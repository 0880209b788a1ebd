"""The agents of the package learn in every space, in JAX and on the host, alike."""

import functools
import re
import types
from typing import Any

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from flax import struct

import rollout
from rollout import envs
from rollout.envs import spaces
from rollout.recipes import dqn, ppo, sac
from rollout.recipes.distributions import Joint, bounded, unbounded
from rollout.recipes.dqn import DQN
from rollout.recipes.ppo import PPO, ActorCritic, Config
from rollout.recipes.recurrent_ppo import RecurrentPPO
from rollout.recipes.sac import SAC
from rollout.recipes.training import begin, make_env, train

TREE = spaces.Dict(
    {"turn": envs.Discrete(2, start=3), "pull": spaces.Tuple((envs.Box(2.0, 6.0, ()),))}
)
SPACES = {
    "discrete": envs.Discrete(3),
    "start": envs.Discrete(3, start=-2),
    "multi discrete": spaces.MultiDiscrete([[2, 3], [2, 2]], start=[[0, 5], [1, 0]]),
    "multi binary": spaces.MultiBinary((3,)),
    "box": envs.Box(jnp.array([[1.0], [-4.0]]), 5.0, (2, 1)),
    "unbounded": envs.Box(-jnp.inf, jnp.inf, (2,)),
    "scalar": envs.Box(-1.0, 1.0, ()),
    "tree": TREE,
}

FACTS = ("logits", "mean", "log_std")  # of the distribution of a part


@struct.dataclass
class Guess:
    """Pays 1 for an action that `_best` names, less the farther it is from it.

    What it shows is an element of a space, drawn anew at each of five steps.
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
    """The same, in which the best of three actions is forbidden."""

    observation_space: Any = spaces.Dict(
        {"seen": TREE, "action_mask": envs.Box(0, 1, (3,), jnp.dtype("int8"))}
    )

    def reset(self, key):
        return jnp.int32(0), self._see(key)

    def step(self, key, state, action):
        return super().step(key, state, action).replace(obs=self._see(key))

    def _see(self, key):
        return {"seen": TREE.sample(key), "action_mask": jnp.int8([1, 1, 0])}


def _best(part):
    """The largest integer, or a float near 1."""
    low, high = (
        jnp.broadcast_to(jnp.asarray(x, float), part.shape) for x in part.bounds
    )
    is_float = jnp.issubdtype(part.dtype, jnp.floating)
    return jnp.clip(1.0, low, high) if is_float else high


CONFIG = Config(num_updates=12, num_envs=16, num_steps=32, hidden=16)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("name", ["multi discrete", "tree"])
def test_ppo_learns_any_space_of_actions(name):
    space = SPACES[name]
    env = Guess(space, TREE)
    env = envs.vectorize(env, CONFIG.num_envs)
    agent = PPO(space, CONFIG, env.observation_space)
    collector = rollout.Collector(env=env, policy=agent.policy)
    learn = jax.jit(lambda key: train(agent, collector, key))
    state, log = learn(jax.random.key(0))
    judge = collector.replace(policy=rollout.greedy(agent.policy))
    stats = rollout.evaluate(
        judge, jax.random.key(1), state.learner[0], num_episodes=20
    )
    first = log["return"][np.isfinite(log["return"])][0]
    assert stats.returns.mean > 4.5 > first


@pytest.mark.parametrize("name", SPACES)
def test_actions_of_ppo_are_elements_of_their_space_drawn_or_most_likely(name):
    """Also a tuple, which a policy could take for an action and its extras."""
    space = spaces.Tuple((SPACES[name], envs.Box(0.0, 10.0, (2,))))
    env = envs.vectorize(Guess(space, TREE), 8)
    agent = PPO(space, CONFIG, env.observation_space)

    @quick_jit
    def play(keys):
        found = []
        policies = agent.policy, rollout.greedy(agent.policy)
        for policy, (carry_key, init_key) in zip(policies, keys, strict=True):
            collector = rollout.Collector(env=env, policy=policy)
            carry = collector.init(carry_key)
            params = agent.init(init_key, carry.obs)[0]
            _, t = collector.collect_steps(carry, params, 4)
            found.append(jax.vmap(jax.vmap(space.contains))(t.action))
        return found

    is_inside = play(jax.random.split(jax.random.key(0), (2, 2)))
    assert all(x.all() for x in jax.device_get(is_inside))


@pytest.mark.parametrize("last", ["multi binary", "box"])
def test_several_parts_are_recorded_twice_only_if_bounds_change_them(last):
    space = spaces.Tuple((SPACES["start"], SPACES[last]))
    policy = PPO(space, CONFIG).policy

    def play(keys):
        params = ActorCritic(space, CONFIG).init(keys[0], jnp.ones((3, 2)))
        return policy.apply(params, jnp.ones((3, 2)), (), keys[1])

    extras = jax.eval_shape(play, jax.random.split(jax.random.key(0))).extras
    assert ("drawn" in extras) == (last == "box")


@pytest.mark.parametrize("name", SPACES)
def test_draws_agree_with_their_probabilities(name):
    """By brute force: integers by counting, floats by NumPy's formula."""
    space, rng = SPACES[name], np.random.default_rng(0)
    network, obs = ActorCritic(space, CONFIG), jnp.ones(2)
    shapes = jax.eval_shape(network.init, jax.random.key(0), obs)
    params = jax.tree.map(lambda x: np.float32(0.2 * rng.normal(size=x.shape)), shapes)

    @quick_jit
    def use(params, key):
        one, wide = (network.apply(params, x)[0] for x in (obs, jnp.ones((4000, 2))))
        drawn, best = wide.sample(key), one.mode()
        parts = one.parts if isinstance(one, Joint) else [one]
        facts = [vars(part) for part in parts]
        facts = [{x: y for x, y in fact.items() if x in FACTS} for fact in facts]
        log_prob, likely = wide.log_prob(drawn), one.log_prob(best)
        return drawn, log_prob, one.entropy(), best, likely, facts

    out = jax.device_get(use(params, jax.random.key(0)))
    action, log_prob, found_entropy, best, likely, facts = out
    want, entropy = np.zeros(4000), 0.0
    leaves = jax.tree.leaves(action)
    for part, x, fact in zip(space.leaves(), leaves, facts, strict=True):
        assert x.dtype == part.dtype
        assert x.shape == (4000, *part.shape)
        low, high = (np.broadcast_to(b, part.shape).ravel() for b in part.bounds)
        x = x.reshape(4000, -1)
        if "mean" in fact:
            mean, std = fact["mean"].ravel(), np.exp(fact["log_std"].ravel())
            distance = np.abs(x.mean(axis=0) - mean)
            assert np.all(distance < 4 * std / 4000**0.5)
            log_probs = -0.5 * ((x - mean) / std) ** 2 - np.log(
                std * (2 * np.pi) ** 0.5
            )
            want += log_probs.sum(axis=1)
            entropy += np.log(std * (2 * np.pi * np.e) ** 0.5).sum()
            continue
        logits = np.float64(fact["logits"].reshape(low.size, -1))
        for entry, n in enumerate((high - low + 1).astype(int)):
            chances = np.exp(logits[entry, :n]) / np.exp(logits[entry, :n]).sum()
            value = x[:, entry].astype(int) - int(low[entry])
            counts = np.bincount(value, minlength=n)
            np.testing.assert_allclose(counts / 4000, chances, atol=0.04)
            want += np.log(chances[value])
            entropy -= (chances * np.log(chances)).sum()
    np.testing.assert_allclose(log_prob, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found_entropy, entropy, rtol=1e-4)
    shapes = [x.shape for x in jax.tree.leaves(best)]
    assert shapes == [x.shape for x in space.leaves()]
    assert likely >= log_prob.max() - 1e-4


def test_mask_leaves_only_allowed_actions():
    space = spaces.Tuple((spaces.MultiDiscrete([2, 3]), envs.Discrete(2)))
    allowed = jnp.array([False, True, True, False, True, True, False])
    network = ActorCritic(space, CONFIG)

    @quick_jit
    def draw(key):
        shown = {"obs": jnp.zeros((200, 2)), "action_mask": jnp.tile(allowed, (200, 1))}
        dist, _ = network.apply(network.init(key, shown), shown)
        return dist.sample(key)

    pair, one = jax.device_get(draw(jax.random.key(0)))
    assert set(map(tuple, pair.tolist())) == {(1, 0), (1, 2)}
    assert set(one.tolist()) == {0}
    shown = {"obs": jnp.zeros((200, 2)), "action_mask": jnp.ones((200, 6), bool)}
    with pytest.raises(ValueError, match="`action_mask` must have 7 flags"):
        jax.eval_shape(network.init, jax.random.key(0), shown)


def test_memory_obeys_a_mask_and_rows_that_are_all_masked_out_teach_nothing():
    space, num_envs = SPACES["discrete"], 4
    config = CONFIG._replace(num_envs=num_envs, num_epochs=1, num_minibatches=num_envs)
    env = envs.vectorize(Masked(space), num_envs)
    cell, empty = nn.GRUCell(8), lambda num_envs: jnp.zeros((num_envs, 8))
    agent = RecurrentPPO(space, config, cell, empty, env.observation_space)
    collector = rollout.Collector(env=env, policy=agent.policy)

    @quick_jit
    def learn(keys):
        carry = collector.init(keys[0])
        learner = agent.init(keys[1], carry.obs)
        _, t = collector.collect_steps(carry, learner[0], 16)
        t = t.replace(mask=t.mask.at[:, 0].set(False))  # of a whole minibatch
        return t.action, agent.learn(learner, t, t.extras["value"], keys[2])[0]

    action, (params, _) = jax.device_get(learn(jax.random.split(jax.random.key(0), 3)))
    assert set(np.unique(action).tolist()) == {0, 1}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_observations_need_their_space_unless_they_are_vectors():
    space, key = SPACES["discrete"], jax.random.key(0)
    shown = {"obs": jnp.zeros((1, 2)), "action_mask": jnp.ones((1, 3), bool)}
    for agent in (PPO(space, CONFIG), DQN(space, DQN_CONFIG)):
        for names in (("a", "b"), ("obs", "goal")):
            with pytest.raises(ValueError, match="`observation_space` must be given"):
                jax.eval_shape(agent.init, key, dict.fromkeys(names, shown["obs"]))
        jax.eval_shape(agent.init, key, shown)  # as `FlattenObs` shows it


class Hidden(gymnasium.Env):
    """Pays 1 for the turn shown a step before; the last of three is forbidden."""

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
        return self.see(), {}

    def step(self, action):
        reward = float(action == self.turn - 5)
        self.number, self.turn = self.number + 1, self.next_turn
        return self.see(), reward, False, self.number == 8, {}

    def see(self):
        self.next_turn = int(self.np_random.integers(3, 5))
        mask = np.array([1, 1, 0], np.int8)
        return {"turn": self.next_turn, "action_mask": mask}


@struct.dataclass
class HiddenInJax:
    """The same."""

    action_space: Any = envs.Discrete(3, start=-2)
    observation_space: Any = spaces.Dict(
        {
            "turn": envs.Discrete(2, start=3),
            "action_mask": envs.Box(0, 1, (3,), jnp.dtype("int8")),
        }
    )

    def reset(self, key):
        turn = jax.random.randint(key, (), 3, 5)
        return (jnp.int32(0), jnp.int32(3), turn), self.see(turn)

    def step(self, key, state, action):
        number, turn, next_turn = state
        shown = jax.random.randint(key, (), 3, 5)
        return envs.EnvStep(
            state=(number + 1, next_turn, shown),
            obs=self.see(shown),
            reward=(action == turn - 5).astype(jnp.float32),
            terminated=jnp.bool_(False),
            truncated=number == 7,
            info={},
        )

    def see(self, turn):
        return {"turn": turn, "action_mask": jnp.int8([1, 1, 0])}


def test_ppo_refuses_actions_whose_probability_it_does_not_know():
    env = envs.vectorize(Guess(SPACES["discrete"], TREE), 2)
    agent = PPO(env.action_space, CONFIG, env.observation_space)
    policy = rollout.epsilon_greedy(agent.policy, env.action_space, 0.1)
    collector = rollout.Collector(env=env, policy=policy)
    with pytest.raises(ValueError, match="`collector` must play `agent"):
        agent.update(collector, None, None)


def test_command_says_what_it_does_not_train(monkeypatch):
    with pytest.raises(ValueError, match="`env_id` must be an id, got a file"):
        make_env("gymnasium:own.py:Own", 2)
    monkeypatch.setattr(envs, "make", lambda _: types.SimpleNamespace(agents=("a",)))
    with pytest.raises(ValueError, match="`env_id` must be of one agent, got pgx:go"):
        make_env("pgx:go", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("is_host", [False, True])
def test_recurrent_ppo_learns_what_it_saw_and_what_is_allowed(is_host):
    config = CONFIG._replace(num_updates=30, learning_rate=1e-2)
    if is_host:
        env = envs.from_gymnasium(Hidden, config.num_envs)
    else:
        env = envs.vectorize(HiddenInJax(), config.num_envs)
    empty = lambda num_envs: jnp.zeros((num_envs, 16))  # noqa: E731
    spaces = env.action_space, config, nn.GRUCell(16), empty, env.observation_space
    agent = RecurrentPPO(*spaces)
    kind = rollout.HostCollector if is_host else rollout.Collector
    collector = kind(env=env, policy=agent.policy)
    state, log = train(agent, collector, jax.random.key(0))
    assert log["return"][-1] > 7  # without a memory 4.5
    _, t = collector.collect_steps(state.carry, state.params, 16)
    assert set(np.unique(t.action).tolist()) <= {-2, -1}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("has_memory", [False, True])
@pytest.mark.parametrize("is_host", [False, True])
def test_one_program_trains_cartpole_of_gymnax_and_of_gymnasium(is_host, has_memory):
    config = Config(num_updates=30, num_envs=16, num_steps=64, num_minibatches=4)
    make = functools.partial(envs.from_gymnasium, "CartPole-v1")
    env = make(num_envs=16) if is_host else envs.make_vec("CartPole-v1", 16)
    agent = PPO(env.action_space, config)
    if has_memory:
        empty = lambda num_envs: jnp.zeros((num_envs, 32))  # noqa: E731
        agent = RecurrentPPO(env.action_space, config, nn.GRUCell(32), empty)
    kind = rollout.HostCollector if is_host else rollout.Collector
    collector = kind(env=env, policy=agent.policy)
    state, log = train(agent, collector, jax.random.key(0))
    assert np.nanmax(log["return"]) > 120
    assert state.number == 30


@pytest.mark.parametrize("is_host", [False, True])
def test_advantages_over_time_limits_are_those_of_a_plain_loop(is_host):
    """With episodes of at most four steps, that the host and JAX cut alike."""
    if is_host:
        env = envs.from_gymnasium(
            lambda: gymnasium.wrappers.TimeLimit(
                gymnasium.make("CartPole-v1").unwrapped, 4
            ),
            num_envs=2,
        )
    else:
        env = envs.make_vec("CartPole-v1", 2, max_episode_steps=4)
    agent = PPO(env.action_space, CONFIG)
    kind = rollout.HostCollector if is_host else rollout.Collector
    collector = kind(env=env, policy=agent.policy)
    carry = collector.init(jax.random.key(0))
    params = jax.jit(agent.init)(jax.random.key(1), carry.obs)[0]
    carry, t = collector.collect_steps(carry, params, 10)
    last = collector.value(carry, params)

    @quick_jit
    def advantages(params, t, last):
        value = t.extras["value"]
        later = rollout.next_values(t, value, last)
        flags = t.terminated, t.truncated
        advantage = rollout.gae(t.reward, value, later, *flags, gamma=0.9, lam=0.8)
        return advantage, agent.value(params, t.next_obs)

    t, (got, critic) = jax.device_get((t, advantages(params, t, last)))
    assert t.truncated.sum() == 4
    later, want = np.zeros(2), np.zeros((10, 2))
    for step in reversed(range(10)):
        value = t.extras["value"][step]
        delta = t.reward[step] + 0.9 * ~t.terminated[step] * critic[step] - value
        later = delta + 0.72 * ~t.done[step] * later
        want[step] = later
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


DQN_CONFIG = dqn.Config(
    num_updates=30,
    num_envs=16,
    num_steps=8,
    num_gradients=8,
    exploration=0.5,
    hidden=16,
)
SAC_CONFIG = sac.Config(
    num_updates=2, num_envs=4, warmup=64, num_steps=200, gamma=0.0, reward_scale=1.0
)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize(
    ("agent_class", "config", "space", "most"),
    [
        (DQN, DQN_CONFIG, SPACES["start"], 4),
        (SAC, SAC_CONFIG, envs.Box(-1.0, 1.0, (2, 1)), 5),
        (SAC, SAC_CONFIG, envs.Box(-1.0, 1.0, ()), 5),
        (SAC, SAC_CONFIG, envs.Box(-2.0, 3.0, (2, 1)), 5),
    ],
)
def test_agents_learn_from_a_buffer(agent_class, config, space, most):
    """DQN without the best action, which is forbidden, and so costs 1 a step."""
    env = Masked(space) if agent_class is DQN else Guess(space, TREE)
    env = envs.vectorize(env, config.num_envs)
    agent = agent_class(space, config, env.observation_space)
    collector = rollout.Collector(env=env, policy=agent.policy)
    state, log = jax.jit(lambda key: train(agent, collector, key))(jax.random.key(0))
    judge = collector.replace(policy=agent.final_policy)
    stats = rollout.evaluate(judge, jax.random.key(1), state.params, num_episodes=20)
    assert stats.returns.mean > most - 5 if agent_class is DQN else most - 0.5
    obs = jax.tree.map(lambda x: x[0], state.carry.obs)
    action = agent.predict(state.params, obs)
    assert action.shape == space.shape
    assert (log["steps"][1:] > log["steps"][:-1]).all()
    if agent_class is DQN:
        _, t = collector.collect_steps(state.carry, state.params, 32)
        assert set(np.unique(t.action).tolist()) <= {-2, -1}
        assert action == -1


def test_training_says_how_many_updates_are_left():
    env = envs.vectorize(Guess(SPACES["discrete"], TREE), 2)
    config = CONFIG._replace(num_envs=2, num_minibatches=2)
    agent = PPO(env.action_space, config, env.observation_space)
    collector, key = rollout.Collector(env=env, policy=agent.policy), jax.random.key(0)
    state = jax.jit(begin, static_argnums=0)(agent, collector, key)
    for number, size in ((4, 9), (12, None), (12, 1), (0, 0)):
        later = state._replace(number=jnp.int32(number))
        with pytest.raises(ValueError, match="`num_updates` must be from 1 to"):
            train(agent, collector, key, later, size)
    with pytest.raises(ValueError, match="`num_updates` must be given"):
        jax.eval_shape(lambda state: train(agent, collector, key, state), state)
    state = state._replace(number=jnp.int32(10))
    _, log = jax.eval_shape(lambda key: train(agent, collector, key, state), key)
    assert log["kl"].shape == (2,)


def test_predictions_with_a_memory_are_those_of_the_lanes():
    cell, empty = nn.GRUCell(8), lambda num_envs: jnp.zeros((num_envs, 8))
    env = envs.vectorize(HiddenInJax(), 2)
    spaces = env.action_space, CONFIG, cell, empty, env.observation_space
    agent = RecurrentPPO(*spaces)
    policy = rollout.greedy(agent.policy)
    collector = rollout.Collector(env=env, policy=policy)

    @quick_jit
    def play(carry_key, init_key):
        carry = collector.init(carry_key)
        params = agent.init(init_key, carry.obs)[0]
        return params, *collector.collect_steps(carry, params, 12)

    params, carry, t = play(*jax.random.split(jax.random.key(0)))
    predict, memory = quick_jit(agent.predict), None
    for step in range(12):
        memory = None if t.first[step, 1] else memory
        obs = jax.tree.map(lambda x, step=step: x[step, 1], t.obs)
        action, memory = predict(params, obs, memory)
        assert action == t.action[step, 1]
    assert not t.first[step, 1]
    np.testing.assert_allclose(memory, carry.policy_state[1:], atol=1e-5)


def test_agents_say_which_actions_they_take():
    with pytest.raises(ValueError, match="`action_space` must be a Discrete"):
        DQN(SPACES["box"], DQN_CONFIG)
    for space in (SPACES["discrete"], envs.Box(0, 3, (2,), jnp.dtype("int32"))):
        with pytest.raises(ValueError, match="`action_space` must be a Box of floats"):
            SAC(space, SAC_CONFIG)


BOUNDS = np.array(
    [[-1, 1], [2, 6], [-4, 5], [-np.inf, np.inf], [0, np.inf], [-np.inf, 3], [2, 2]]
)


def test_drawn_numbers_become_actions_within_their_bounds():
    """Seven entries, of which two have a single bound, and one a single value."""
    low, high = BOUNDS.T
    drawn = jnp.tile(jnp.array([[-9.0], [-1.0], [-0.25], [0.0], [1.0], [9.0]]), 7)
    got = np.asarray(bounded(drawn, low, high))
    is_range = np.isfinite(BOUNDS).all(axis=1)
    for x, row in zip(np.asarray(drawn), got, strict=True):
        share = (np.clip(x[0], -1, 1) + 1) / 2
        scaled = np.array(
            [
                a + share * (b - a) if c else x[0]
                for (a, b), c in zip(BOUNDS, is_range, strict=True)
            ]
        )
        np.testing.assert_allclose(row, np.clip(scaled, low, high), rtol=1e-6)
    back = np.asarray(unbounded(jnp.asarray(got), low, high))
    inside = np.clip(drawn, -1, 1)
    np.testing.assert_allclose(back[:, :3], inside[:, :3], atol=1e-6)
    np.testing.assert_array_equal(back[:, 3:6], got[:, 3:6])
    assert bounded(drawn, low[3:4], high[3:4]) is drawn


class Table(nn.Module):
    """A network of one's own, for observations that count."""

    space: Any
    outputs: Any

    @nn.compact
    def __call__(self, obs):
        table = self.param("table", nn.initializers.zeros, (2, self.outputs))
        return table[obs["turn"] - 3]


def test_network_of_ones_own_takes_the_place_of_dense_layers():
    obs = {"turn": jnp.array([3, 4])}

    def pair(space, config):
        return lambda obs: (ppo.Categorical(np.eye(2)), np.zeros(2))

    agent = DQN(envs.Discrete(5), DQN_CONFIG, network=lambda x, _: Table(x, x.n))
    params = quick_jit(lambda key: agent.init(key, obs)[0])(jax.random.key(0))
    assert params["params"]["table"].shape == (2, 5)
    params["params"]["table"] = params["params"]["table"].at[1, 4].set(1.0)
    assert agent.act(params, obs, None).tolist() == [0, 4]
    agent = PPO(envs.Discrete(2), CONFIG, network=pair)
    assert agent.network(obs)[0].mode().tolist() == [0, 1]


COMMANDS = {
    "ppo": (ppo.main, ("--num-steps=16", "--updates=12")),
    "dqn": (dqn.main, ("--num-steps=8", "--warmup=8", "--updates=12")),
    "sac": (sac.main, ("--num-steps=8", "--warmup=32", "--updates=12")),
}


def command(folder, monkeypatch, capsys, name, *argv):
    """Runs the command in a folder.

    Returns:
        What it printed, its table, and the parameters of each seed.
    """
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    main, sizes = COMMANDS[name]
    monkeypatch.setattr("sys.argv", [name, *argv, "--num-envs=4", *sizes])
    params = [jax.device_get(state.params) for state in main()]
    printed = capsys.readouterr().out.splitlines()
    return printed, (folder / "agent.csv").read_text(), params


@pytest.mark.slow
@pytest.mark.usefixtures("key_reuse", "quick_compile")
@pytest.mark.filterwarnings("ignore:The state of the environments was not saved")
@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("ppo", "CartPole-v1"),
        ("sac", "Pendulum-v1"),
        ("sac", "gymnasium:Pendulum-v1"),
    ],
)
def test_command_goes_on_where_it_was_killed(
    name, env_id, tmp_path, monkeypatch, capsys
):
    """After a table without a checkpoint; between chunks; before the evaluation."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    printed, table, params = command(whole, monkeypatch, capsys, name, env_id)
    assert re.fullmatch(r"[ ,\d]+ steps, return .*", printed[0])
    assert re.fullmatch(r"return -?\d.*, 100 episodes", printed[-1])
    assert len(table.splitlines()) == 13
    assert (whole / "agent.gif").read_bytes().startswith(b"GIF89a")
    assert (whole / "agent.png").stat().st_size > 5_000
    save, resume = rollout.checkpoint.save, ()
    for call in (3, 2, None):
        calls = []

        def save_or_die(*args, calls=calls, call=call):
            calls.append(args)
            if len(calls) == call:
                raise KeyboardInterrupt
            save(*args)
            if len(calls) == (call or 0) + 2:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(rollout.checkpoint, "save", save_or_die)
            if call is None:
                patched.setattr(rollout, "evaluate", kill)
                patched.setattr(rollout.checkpoint, "save", save)
            with pytest.raises(KeyboardInterrupt):
                command(killed, patched, capsys, name, env_id, *resume)
        resume = ("--resume",)
    for other in ("--seed=1", "--seeds=2"):
        with pytest.raises(ValueError, match=r"those of agent\.csv, \[0\], got"):
            command(killed, monkeypatch, capsys, name, env_id, other, *resume)
    again, resumed, same = command(killed, monkeypatch, capsys, name, env_id, *resume)
    if env_id.startswith("gymnasium:"):  # begins new episodes
        assert len(resumed.splitlines()) == 13
        return
    assert resumed == table
    assert again[-1] == printed[-1]
    jax.tree.map(np.testing.assert_array_equal, same, params)


def kill(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.usefixtures("key_reuse", "quick_compile")
@pytest.mark.parametrize(
    "argv",
    [
        ("ppo", "Pendulum-v1", "--normalize"),
        ("ppo", "gymnasium:FrozenLake-v1"),
        ("dqn", "pgx:2048"),
    ],
)
def test_command_takes_every_suite(argv, tmp_path, monkeypatch, capsys):
    printed, table, _ = command(tmp_path, monkeypatch, capsys, *argv)
    assert len(table.splitlines()) == 13
    assert any(re.fullmatch(r"return .*, 100 episodes", line) for line in printed)


@pytest.mark.slow
@pytest.mark.usefixtures("key_reuse", "quick_compile")
@pytest.mark.parametrize("env_id", ["CartPole-v1", "gymnasium:CartPole-v1"])
def test_command_trains_several_seeds(env_id, tmp_path, monkeypatch, capsys):
    options = "ppo", env_id, "--seed=1"
    _, table, _ = command(tmp_path / "one", monkeypatch, capsys, *options)
    several = command(tmp_path / "all", monkeypatch, capsys, *options, "--seeds=3")
    printed, tables, params = several
    rows = [
        np.loadtxt(x.splitlines(), delimiter=",", skiprows=1) for x in (table, tables)
    ]
    np.testing.assert_array_equal(rows[1][:, 0], [1, 2, 3] * 12)
    np.testing.assert_allclose(rows[1][::3][:, 1:3], rows[0][:, 1:3], rtol=0.02)
    *each, total = printed[-4:]
    means = [float(line.split()[1]) for line in each]
    pattern = r"return (\S+) \(95 %: \S+ to \S+\), 3 seeds with 100 episodes each"
    (mean,) = re.fullmatch(pattern, total).groups()
    assert float(mean) == pytest.approx(np.mean(means), rel=1e-4)
    assert len(params) == 3

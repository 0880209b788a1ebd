"""PPO of the package learns in every space, in JAX and on the host, alike."""

import functools
import re
from typing import Any

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
from rollout.recipes import ppo
from rollout.recipes.distributions import Joint
from rollout.recipes.ppo import PPO, Config, main, train

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
@pytest.mark.parametrize("name", ["start", "multi discrete", "tree"])
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
def test_draws_agree_with_their_probabilities(name):
    """By brute force: integers by counting, floats by NumPy's formula."""
    space, rng = SPACES[name], np.random.default_rng(0)
    joint = Joint(space)
    outputs = rng.normal(size=joint.num_outputs).astype(np.float32)
    log_std = rng.normal(size=joint.num_reals).astype(np.float32)

    @quick_jit
    def use(outputs, log_std, key):
        wide = [jnp.broadcast_to(x, (4000, *x.shape)) for x in (outputs, log_std)]
        dist, one = Joint(space, *wide), Joint(space, outputs, log_std)
        drawn, best = dist.sample(key), one.mode()
        likely, entropy = one.log_prob(best), one.entropy()
        return drawn, dist.log_prob(drawn), entropy, best, likely

    action, log_prob, found_entropy, best, likely = jax.device_get(
        use(outputs, log_std, jax.random.key(0))
    )
    sizes, columns, want, at, real = [], [], np.zeros(4000), 0, 0
    for part, x in zip(space.leaves(), jax.tree.leaves(action), strict=True):
        low, high = (np.broadcast_to(b, part.shape).ravel() for b in part.bounds)
        is_real = np.dtype(part.dtype).kind == "f"
        assert x.dtype == part.dtype
        sizes += [0] * low.size if is_real else (high - low + 1).astype(int).tolist()
        columns.append(x.reshape(4000, -1) - (0 if is_real else low))
    drawn = np.concatenate(columns, axis=1)
    entropy = 0.0
    for entry, n in enumerate(sizes):
        x = drawn[:, entry]
        if n:
            logits = np.float64(outputs[at : at + n])
            chances = np.exp(logits) / np.exp(logits).sum()
            counts = np.bincount(x.astype(int), minlength=n)
            np.testing.assert_allclose(counts / 4000, chances, atol=0.04)
            want += np.log(chances[x.astype(int)])
            entropy -= (chances * np.log(chances)).sum()
        else:
            mean, std = float(outputs[at]), float(np.exp(log_std[real]))
            np.testing.assert_allclose(x.mean(), mean, atol=4 * std / 4000**0.5)
            want += -0.5 * ((x - mean) / std) ** 2 - np.log(std * (2 * np.pi) ** 0.5)
            entropy += np.log(std * (2 * np.pi * np.e) ** 0.5)
            real += 1
        at += max(n, 1)
    np.testing.assert_allclose(log_prob, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found_entropy, entropy, rtol=1e-4)
    shapes = [x.shape for x in jax.tree.leaves(best)]
    assert shapes == [x.shape for x in space.leaves()]
    assert likely >= log_prob.max() - 1e-4


def test_mask_leaves_only_allowed_actions():
    space = spaces.MultiDiscrete([2, 3])
    allowed = jnp.array([False, True, True, False, True])

    @quick_jit
    def draw(key):
        mask = jnp.tile(allowed, (200, 1))
        outputs = jnp.zeros((200, 5))
        return Joint(space, outputs, jnp.zeros((200, 0)), mask).sample(key)

    drawn = draw(jax.random.key(0))
    assert set(map(tuple, np.asarray(drawn).tolist())) == {(1, 0), (1, 2)}
    with pytest.raises(ValueError, match="`action_mask` must have 5 flags"):
        Joint(space, jnp.zeros(5), jnp.zeros(0), allowed[:4])


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("is_host", [False, True])
def test_one_program_trains_cartpole_of_gymnax_and_of_gymnasium(is_host):
    config = Config(num_updates=30, num_envs=16, num_steps=64, num_minibatches=4)
    make = functools.partial(envs.from_gymnasium, "CartPole-v1")
    env = make(num_envs=16) if is_host else envs.make_vec("CartPole-v1", 16)
    agent = PPO(env.action_space, config)
    kind = rollout.HostCollector if is_host else rollout.Collector
    collector = kind(env=env, policy=agent.policy)
    state, log = train(agent, collector, jax.random.key(0))
    assert np.nanmax(log["return"]) > 150
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


def command(folder, monkeypatch, capsys, *argv):
    """Runs the command in a folder; returns what it printed, and its table."""
    monkeypatch.chdir(folder)
    sizes = "--num-envs=4", "--num-steps=16", "--num-updates=12"
    monkeypatch.setattr("sys.argv", ["ppo", *argv, *sizes])
    main()
    return capsys.readouterr().out.splitlines(), (folder / "agent.csv").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("key_reuse")
def test_command_goes_on_where_it_was_killed(tmp_path, monkeypatch, capsys):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    printed, table = command(whole, monkeypatch, capsys, "CartPole-v1")
    assert re.fullmatch(r" +640 steps, return \d.*", printed[0])
    assert re.fullmatch(r"return \d.*, 100 episodes", printed[-1])
    assert len(table.splitlines()) == 13
    assert (whole / "agent.gif").read_bytes().startswith(b"GIF89a")
    assert (whole / "agent.png").stat().st_size > 5_000
    with monkeypatch.context() as patched:
        patched.setattr(ppo.rollout, "evaluate", kill)  # after the first ten
        patched.setattr(ppo, "print", kill, raising=False)
        with pytest.raises(KeyboardInterrupt):
            command(killed, patched, capsys, "CartPole-v1")
    again, resumed = command(killed, monkeypatch, capsys, "CartPole-v1", "--resume")
    assert resumed == table
    assert again == printed[1:]


def kill(*args):
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize(
    "argv",
    [
        ("Pendulum-v1", "--normalize"),
        ("gymnasium:FrozenLake-v1",),
        ("pgx:2048",),
    ],
)
def test_command_takes_every_suite(argv, tmp_path, monkeypatch, capsys):
    printed, table = command(tmp_path, monkeypatch, capsys, *argv)
    assert len(table.splitlines()) == 13
    assert any(re.fullmatch(r"return .*, 100 episodes", line) for line in printed)

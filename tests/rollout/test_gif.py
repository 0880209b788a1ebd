"""Tests of the frames and titles of `record_gif`."""

import io
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import OneAgent
from cases import CountEnv, WithCritic
from flax import struct
from PIL import Image

import rollout
from rollout import envs
from rollout.envs.render import GifFormat, frames_to_gif
from rollout.gif import draw_episode
from rollout.recipes.ppo import PPO, Config

KEY = jax.random.key(3)


@struct.dataclass(kw_only=True)
class RenderedEnv(CountEnv):
    """A `CountEnv` whose frames have a brightness of ten times the step."""

    def render_frames(self, states):
        for state in states:
            yield np.full((40, 60, 3), 10 * state["n"], np.uint8)


@struct.dataclass
class RenderedAgentEnv(OneAgent):
    """A multi-agent environment with a renderer."""

    render_frames = RenderedEnv.render_frames


def test_multi_agent_environment_is_rendered(tmp_path):
    env = envs.vectorize(RenderedAgentEnv(CountEnv()), 2)
    policy = rollout.random_policy(CountEnv().action_space)
    policy = rollout.agents.policy_map(
        {"all": policy}, rollout.agents.static_mapping("all"), env
    )
    collector = rollout.Collector(env, policy)
    path = tmp_path / "a.gif"
    episode = rollout.record_gif(collector, {"all": None}, KEY, path)
    with Image.open(path) as image:
        assert image.n_frames == episode.episode_length.item() + 1


def test_agent_is_rendered_with_its_most_likely_actions(tmp_path):
    env = envs.vectorize(RenderedEnv(), 2)
    agent = PPO(env, Config(hidden_layer_sizes=(2,)))
    state = agent.init(KEY)
    rollout.record_gif(agent, state, KEY, tmp_path / "a.gif")
    collector = agent.collector.replace(policy=agent.eval_policy)
    rollout.record_gif(collector, state.params, KEY, tmp_path / "b.gif")
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()
    with pytest.raises(ValueError, match="`params` must be the state of the agent"):
        rollout.record_gif(agent, state.params, KEY, tmp_path / "a.gif")


class Counter(gymnasium.Env):
    """A counting environment in Python, truncated after `length` steps."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length=4, render_mode=None):
        self.length, self.render_mode, self.number = length, render_mode, 0

    def reset(self, *, seed=None, options=None):
        self.number = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.number += 1
        obs = np.full(1, self.number, np.float32)
        return obs, 1.5, False, self.number == self.length, {}

    def render(self):
        if self.render_mode == "rgb_array":
            return np.full((40, 60, 3), 10 * self.number, np.uint8)
        return None


def make_collector(env, collector_class=rollout.Collector, **options):
    policy = rollout.random_policy(env.action_space)
    return collector_class(env=env, policy=policy, **options)


def make_lanes(name):
    env = RenderedEnv(limit=5)
    if name == "each":
        return envs.vectorize_each(jax.tree.map(lambda x: np.full(3, x), env))
    if name == "limited":
        return envs.vectorize(envs.TimeLimit(env, 4), 3)
    if name == "wrapped":
        return envs.NormalizeReward(envs.NormalizeObs(make_lanes("limited")))
    return envs.vectorize(env, 3)


def make_host_collector(num_envs, **options):
    make_counter = lambda **kwargs: Counter(**kwargs)  # noqa: E731
    env = envs.from_gymnasium(make_counter, num_envs, **options)
    return make_collector(env, rollout.HostCollector)


def brightness(path):
    """Returns the brightness of each frame below its title."""
    with Image.open(path) as image:
        shades = []
        for number in range(image.n_frames):
            image.seek(number)
            shades.append(int(np.asarray(image.convert("RGB"))[-1, -1, 0]))
    return shades


@pytest.mark.parametrize("is_host", [False, True])
def test_titles_contain_raw_returns(is_host):
    if is_host:
        plain = envs.from_gymnasium(Counter, 1, render_mode="rgb_array")
        collector_class, normalize = rollout.HostCollector, envs.NormalizeHostEnv
    else:
        plain, collector_class = make_lanes("limited"), rollout.Collector
        normalize = lambda env: envs.NormalizeReward(envs.NormalizeObs(env))  # noqa: E731
    policy = rollout.random_policy(plain.action_space)
    raw, _ = draw_episode(collector_class(env=plain, policy=policy), None, KEY, 1000)
    collector = collector_class(env=normalize(plain), policy=policy)
    carry, t = collector.collect_steps(collector.init(KEY), None, 20)
    assert (np.asarray(t.reward) != 1).any()
    gif, episodes = draw_episode(collector.freeze(carry), None, KEY, 1000)
    assert gif == raw
    assert episodes.episode_return[0] > 1


@pytest.mark.parametrize("name", ["each", "wrapped", "sharded"])
def test_gif_contains_every_state_of_the_first_episode(name, tmp_path):
    collector = make_collector(make_lanes(name))
    if name == "sharded":
        mesh = jax.make_mesh((1,), ("lanes",), devices=jax.devices()[:1])
        collector = rollout.shard(collector, mesh)
    if name == "wrapped":
        with pytest.raises(ValueError, match="that updates them: pass"):
            rollout.record_gif(collector, None, KEY, tmp_path / "a.gif")
        collector = collector.freeze(collector.init(KEY))
    episode = rollout.record_gif(collector, None, KEY, tmp_path / "a.gif")
    (length,) = episode.episode_length
    assert 2 <= length <= 5
    assert brightness(tmp_path / "a.gif") == [10 * n for n in range(length + 1)]
    _, first = collector.collect_episodes(collector.init(KEY), None, 1)
    assert first.episode_return == episode.episode_return
    assert first.episode_length == length


def test_gif_ignores_record_fn_accumulators_and_critic(tmp_path):
    total = rollout.Accumulator(jnp.zeros, lambda total, t: total + t.info["noise"])
    collector = make_collector(
        make_lanes("limited"),
        record_fn=lambda t: t.replace(info=(), reward=()),
        accumulators={"noise": total},
    )
    policy = WithCritic(collector.policy, lambda params, obs, state: obs[:, 0])
    collector = collector.replace(policy=policy)
    episode = rollout.record_gif(collector, None, KEY, tmp_path / "a.gif")
    expected = rollout.record_gif(
        make_collector(make_lanes("limited")), None, KEY, tmp_path / "b.gif"
    )
    np.testing.assert_array_equal(episode.episode_return, expected.episode_return)
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()


@pytest.mark.parametrize(
    ("num_envs", "max_episode_steps", "length"), [(1, 4, 4), (3, 1000, 4), (3, 2, 2)]
)
def test_host_environments_are_rendered(num_envs, max_episode_steps, length, tmp_path):
    collector = make_host_collector(num_envs, render_mode="rgb_array")
    path = tmp_path / "a.gif"
    episode = rollout.record_gif(
        collector, None, KEY, path, max_episode_steps=max_episode_steps
    )
    assert brightness(path) == [10 * n for n in range(length + 1)]
    assert episode.episode_return == [1.5 * length]
    assert episode.truncated == [length == 4]


@pytest.mark.parametrize("is_host", [False, True])
def test_height_every_and_fps_set_size_and_speed(is_host, tmp_path):
    collector = make_collector(make_lanes("limited"))
    if is_host:
        collector = make_host_collector(1, render_mode="rgb_array")
    path = tmp_path / "a.gif"
    rollout.record_gif(collector, None, KEY, path, height=10, every=3, fps=25)
    # Steps 0, 3 and the last step, 4. All frames and titles share 64 colors.
    np.testing.assert_allclose(brightness(path), [0, 30, 40], atol=4)
    with Image.open(path) as image:
        assert image.size == (15, 10 + 20)  # frames are 40 x 60; the title has 20
        assert image.info["duration"] == 40


def test_frames_of_a_given_height_share_64_colors():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (9, 30, 200, 3), np.uint8)
    size = GifFormat(height=30)
    with Image.open(io.BytesIO(frames_to_gif(noise, np.zeros(8), size))) as image:
        frames = []
        for number in range(image.n_frames):
            image.seek(number)
            frames.append(np.asarray(image.convert("RGB")).reshape(-1, 3))
    assert len(frames) == 9
    assert 32 < len(np.unique(np.concatenate(frames), axis=0)) <= 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 0}, "`height` must be .* at least 1, got 0"),
        ({"every": 1.5}, "`every` must be an int"),
        ({"fps": 60}, "`fps` must be from 1 to 50, .* got 60.* `every`"),
    ],
)
def test_invalid_size_or_speed_raises(options, message, tmp_path):
    collector = make_collector(make_lanes("limited"))
    with pytest.raises(ValueError, match=message):
        rollout.record_gif(collector, None, KEY, tmp_path / "a.gif", **options)


def test_gymnasium_vector_environments_are_rendered(tmp_path):
    make = lambda: Counter(render_mode="rgb_array")  # noqa: E731
    env = envs.from_gymnasium(gymnasium.vector.SyncVectorEnv([make, make]))
    collector = make_collector(env, rollout.HostCollector)
    rollout.record_gif(collector, None, KEY, tmp_path / "a.gif")
    assert brightness(tmp_path / "a.gif") == [0, 10, 20, 30, 40]


class Gray(Counter):
    def render(self):
        return np.zeros((40, 60))


@pytest.mark.parametrize("is_vector", [False, True])
@pytest.mark.parametrize(
    ("env_class", "mode", "message"),
    [
        (Counter, None, r'got None. Create .* with `render_mode="rgb_array"`\.'),
        (Gray, "rgb_array", r"3\] uint8, got float64 of shape \(40, 60\)\."),
    ],
)
def test_invalid_frames_raise_before_a_step(is_vector, env_class, mode, message):
    def make():
        return env_class(render_mode=mode)

    def fail(params, obs, key):
        raise AssertionError

    if is_vector:
        env = envs.from_gymnasium(gymnasium.vector.SyncVectorEnv([make]))
    else:
        env = envs.from_gymnasium(make, 1)
    policy = rollout.stateless_policy(fail)
    collector = rollout.HostCollector(env=env, policy=policy)
    with pytest.raises(ValueError, match=message):
        draw_episode(collector, None, KEY, 9)


def test_custom_frames_need_only_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path, host = tmp_path / "a.gif", make_host_collector(1, render_mode="rgb_array")
    collector = make_collector(make_lanes("limited"))
    for gif_collector in (host, collector):
        rollout.record_gif(gif_collector, None, KEY, path)
    carry = host.init(KEY)
    monkeypatch.setitem(sys.modules, "PIL", None)
    for gif_collector in (host, collector):
        with pytest.raises(ModuleNotFoundError, match="PIL is not installed: pip"):
            rollout.record_gif(gif_collector, None, KEY, path)
    host.collect_steps(carry, None, 2)  # the environment has not stepped

"""`record_gif`: the first episode of `evaluate`, frame by frame."""

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
from rollout.gif import draw_episode

KEY = jax.random.key(3)


@struct.dataclass(kw_only=True)
class Drawn(CountEnv):
    """A counting environment whose frames have the number of the step as brightness."""

    def render_frames(self, states):
        for state in states:
            yield np.full((40, 60, 3), 10 * state["n"], np.uint8)


@struct.dataclass
class DrawnPair(OneAgent):
    """An environment of agents that draws its own states."""

    render_frames = Drawn.render_frames


def test_environment_of_agents_draws_its_own_states(tmp_path):
    env = envs.vectorize(DrawnPair(CountEnv()), 2)
    policy = rollout.random_policy(CountEnv().action_space)
    policy = rollout.agents.policy_map(
        {"all": policy}, rollout.agents.static_mapping("all"), env
    )
    collector = rollout.Collector(env, policy)
    path = tmp_path / "a.gif"
    episode = rollout.record_gif(collector, {"all": None}, KEY, path)
    with Image.open(path) as image:
        assert image.n_frames == episode.episode_length.item() + 1


class Counter(gymnasium.Env):
    """The same in Python: it truncates after `length` steps."""

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


def collect(env, kind=rollout.Collector, **options):
    policy = rollout.random_policy(env.action_space)
    return kind(env=env, policy=policy, **options)


def lanes_of(kind):
    drawn = Drawn(limit=5)
    if kind == "each":
        return envs.vectorize_each(jax.tree.map(lambda x: np.full(3, x), drawn))
    if kind == "limited":
        return envs.vectorize(envs.TimeLimit(drawn, 4), 3)
    if kind == "wrapped":
        return envs.NormalizeReward(envs.NormalizeObs(lanes_of("limited")))
    return envs.vectorize(drawn, 3)


def on_host(num_envs, **options):
    make = lambda **given: Counter(**given)  # noqa: E731
    env = envs.from_gymnasium(make, num_envs, **options)
    return collect(env, rollout.HostCollector)


def brightness(path):
    """Of each frame, below its title."""
    with Image.open(path) as image:
        shades = []
        for number in range(image.n_frames):
            image.seek(number)
            shades.append(int(np.asarray(image.convert("RGB"))[-1, -1, 0]))
    return shades


@pytest.mark.parametrize("is_host", [False, True])
def test_titles_show_the_raw_return_under_a_normalization(is_host):
    if is_host:
        plain = envs.from_gymnasium(Counter, 1, render_mode="rgb_array")
        kind, scaled = rollout.HostCollector, envs.NormalizeHostEnv
    else:
        plain, kind = lanes_of("limited"), rollout.Collector
        scaled = lambda env: envs.NormalizeReward(envs.NormalizeObs(env))  # noqa: E731
    policy = rollout.random_policy(plain.action_space)
    raw, _ = draw_episode(kind(env=plain, policy=policy), None, KEY, 1000)
    collector = kind(env=scaled(plain), policy=policy)
    carry, t = collector.collect_steps(collector.init(KEY), None, 20)
    assert (np.asarray(t.reward) != 1).any()
    gif, episodes = draw_episode(collector.freeze(carry), None, KEY, 1000)
    assert gif == raw
    assert episodes.episode_return[0] > 1


@pytest.mark.parametrize("kind", ["each", "wrapped", "sharded"])
def test_gif_has_every_state_of_the_first_episode(kind, tmp_path):
    collector = collect(lanes_of(kind))
    if kind == "sharded":
        mesh = jax.make_mesh((1,), ("lanes",), devices=jax.devices()[:1])
        collector = rollout.shard(collector, mesh)
    if kind == "wrapped":
        with pytest.raises(ValueError, match="that updates them: pass"):
            rollout.record_gif(collector, None, KEY, tmp_path / "a.gif")
        collector = collector.freeze(collector.init(KEY))
    episode = rollout.record_gif(collector, None, KEY, tmp_path / "a.gif")
    (length,) = episode.episode_length
    assert 2 <= length <= 5
    assert brightness(tmp_path / "a.gif") == [10 * n for n in range(length + 1)]
    stats = rollout.evaluate(collector, None, KEY, 1)
    assert stats.returns.mean == episode.episode_return[0]
    assert stats.lengths.mean == length


def test_gif_ignores_record_fn_accumulators_and_critic(tmp_path):
    total = rollout.Accumulator(jnp.zeros, lambda total, t: total + t.info["noise"])
    collector = collect(
        lanes_of("limited"),
        record_fn=lambda t: t.replace(info=(), reward=()),
        accumulators={"noise": total},
    )
    policy = WithCritic(collector.policy, lambda params, obs, state: obs[:, 0])
    collector = collector.replace(policy=policy)
    episode = rollout.record_gif(collector, None, KEY, tmp_path / "a.gif")
    same = rollout.record_gif(
        collect(lanes_of("limited")), None, KEY, tmp_path / "b.gif"
    )
    np.testing.assert_array_equal(episode.episode_return, same.episode_return)
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()


@pytest.mark.parametrize(
    ("num_envs", "max_episode_steps", "length"), [(1, 4, 4), (3, 1000, 4), (3, 2, 2)]
)
def test_environments_that_are_not_jax_draw_themselves(
    num_envs, max_episode_steps, length, tmp_path
):
    collector = on_host(num_envs, render_mode="rgb_array")
    path = tmp_path / "a.gif"
    episode = rollout.record_gif(
        collector, None, KEY, path, max_episode_steps=max_episode_steps
    )
    assert brightness(path) == [10 * n for n in range(length + 1)]
    assert episode.episode_return == [1.5 * length]
    assert episode.truncated == [length == 4]


def test_vector_environments_of_gymnasium_are_drawn(tmp_path):
    make = lambda: Counter(render_mode="rgb_array")  # noqa: E731
    env = envs.from_gymnasium(gymnasium.vector.SyncVectorEnv([make, make]))
    collector = collect(env, rollout.HostCollector)
    rollout.record_gif(collector, None, KEY, tmp_path / "a.gif")
    assert brightness(tmp_path / "a.gif") == [0, 10, 20, 30, 40]


class Gray(Counter):
    def render(self):
        return np.zeros((40, 60))


@pytest.mark.parametrize("is_vector", [False, True])
@pytest.mark.parametrize(
    ("made", "mode", "message"),
    [
        (Counter, None, r'got None. Create .* with `render_mode="rgb_array"`\.'),
        (Gray, "rgb_array", r"3\] uint8, got float64 of shape \(40, 60\)\."),
    ],
)
def test_what_is_wrong_with_a_drawing_is_said_before_a_step(
    is_vector, made, mode, message
):
    def make():
        return made(render_mode=mode)

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


def test_own_drawings_need_pillow_and_no_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path, host = tmp_path / "a.gif", on_host(1, render_mode="rgb_array")
    collector = collect(lanes_of("limited"))
    for each in (host, collector):
        rollout.record_gif(each, None, KEY, path)
    carry = host.init(KEY)
    monkeypatch.setitem(sys.modules, "PIL", None)
    for each in (host, collector):
        with pytest.raises(ModuleNotFoundError, match="PIL is not installed: pip"):
            rollout.record_gif(each, None, KEY, path)
    host.collect_steps(carry, None, 2)  # nothing was played

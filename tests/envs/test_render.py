"""Rendering of gymnax environments: available renderers, and GIFs of episodes."""

import io
import itertools
import os

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from gymnax.visualize import Visualizer
from gymnax.visualize.vis_gym import render_gym_frame
from PIL import Image, ImageDraw

from rollout import envs

DOWNLOADS = "MNISTBandit-bsuite"  # downloads a data set in `make`
# One environment rendered by pygame, one by matplotlib, and one without a renderer.
QUICK = ("Pendulum-v1", "Catch-bsuite", "MemoryChain-bsuite")
LENGTH = 9  # steps per episode of Catch: the ball falls through ten rows


@pytest.fixture(scope="module")
def catch():
    """Returns the environment Catch, and the states and rewards of one episode."""
    env = envs.make("Catch-bsuite")
    exposed = envs.render.expose_state(env)

    @jax.jit
    def play(key):
        def step(state, number):
            step_key = jax.random.fold_in(key, number)
            result = exposed.step(step_key, state, number % 3)
            return result.state, (result.info["state"], result.reward)

        state, _ = exposed.reset(key)
        last, (states, rewards) = jax.lax.scan(step, state, jnp.arange(LENGTH))
        all_states = jax.tree.map(lambda x, y: jnp.append(x, y[None], 0), states, last)
        return all_states, rewards

    return env, *jax.device_get(play(jax.random.key(0)))


@pytest.fixture(scope="module")
def gif(catch):
    return envs.render_gif(*catch)


def read_frames(gif):
    """Returns the frames of a GIF as arrays, and the duration of a frame in ms."""
    with Image.open(io.BytesIO(gif)) as image:
        frames = []
        for index in range(image.n_frames):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB")))
        return frames, image.info["duration"]


def make_zero_states(env, num_states):
    """Returns states of zeros, without compiling."""
    state, _ = jax.eval_shape(env.reset, jax.random.key(0))
    return jax.tree.map(lambda x: np.zeros((num_states, *x.shape), x.dtype), state)


@pytest.mark.parametrize(
    "env_id",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in envs.env_ids()
        if name != DOWNLOADS
    ],
)
@pytest.mark.usefixtures("rank_promotion")  # in the step of Swimmer
def test_can_render_equals_gymnax_renderer(env_id):
    env = envs.make(env_id)
    states = make_zero_states(env, 2)
    first = jax.tree.map(lambda x: x[0], states)
    visualizer = Visualizer(env.env, env.env_params, [first])
    visualizer.init()
    has_renderer = visualizer.ax.has_data()
    plt.close(visualizer.fig)
    assert envs.render.can_render(env) == has_renderer
    if has_renderer:
        frames, _ = read_frames(envs.render_gif(env, states, np.zeros(1)))
        assert len(frames) == 2
    else:
        with pytest.raises(ValueError, match="renderer"):
            envs.render_gif(env, states, np.zeros(1))


def test_gif_has_one_frame_per_state(gif):
    frames, duration = read_frames(gif)
    assert len(frames) == LENGTH + 1
    assert duration == 100
    assert {frame.shape for frame in frames} == {(520, 600, 3)}  # with a title
    # The ball falls in every frame.
    assert all((x != y).any() for x, y in itertools.pairwise(frames))


CLASSIC = {
    "Acrobot-v1": {"link_length_1": 0.5},
    "Pendulum-v1": {"max_speed": 4.0},
    "MountainCar-v0": {"goal_position": 0.1},
}


@pytest.mark.parametrize(
    "env_id",
    [
        "Pendulum-v1",
        pytest.param("Acrobot-v1", marks=pytest.mark.slow),
        pytest.param("MountainCar-v0", marks=pytest.mark.slow),
    ],
)
def test_classic_control_frames_equal_gymnax(env_id):
    env = envs.make(env_id, **CLASSIC[env_id])
    states = make_zero_states(env, 3)
    states = jax.tree.map(lambda x: np.arange(3).astype(x.dtype) / 4, states)
    frames, duration = read_frames(envs.render_gif(env, states, np.ones(2)))
    assert duration == 50
    for t, frame in enumerate(frames):
        state = jax.tree.map(lambda x: x[t], states)  # noqa: B023
        plain = render_gym_frame(env_id, state, env.env_params)
        # Rows 0 to 19 are the title. A GIF has 256 colors.
        np.testing.assert_allclose(frame[20:].astype(int), plain, atol=1)


def test_gif_preserves_up_to_256_colors():
    pixels = np.zeros((200, 200, 3), np.uint8)
    pixels[0, :100] = np.random.default_rng(0).integers(256, size=(100, 3))
    (frame,), _ = read_frames(envs.render.frames_to_gif([pixels], []))
    np.testing.assert_array_equal(frame[20:], pixels)


def test_titles_contain_step_and_return(catch, monkeypatch):
    env, states, _ = catch
    states = jax.tree.map(lambda x: x[:4], states)
    titles = []
    monkeypatch.setattr(
        ImageDraw.ImageDraw,
        "text",
        lambda _, position, text, color: titles.append(text),
    )
    envs.render_gif(env, states, np.float32([1.0, 2.0, 3.0]))
    assert titles[0] == "step 0, return 0.00"
    assert titles[-1] == "step 3, return 6.00"


def test_expose_state_records_episode_states(catch):
    env, states, _ = catch
    np.testing.assert_array_equal(states.ball_y, np.arange(LENGTH + 1))
    exposed = envs.render.expose_state(env)

    @jax.jit
    def check(key):
        reset_key, step_key = jax.random.split(key)
        state, obs = exposed.reset(reset_key)
        result = exposed.step(step_key, state, jnp.int32(0))
        assert result.info["state"] is state
        assert result.info["next_state"] is result.state
        assert set(result.info["info"]) == {"discount"}
        return obs, env.reset(reset_key)[1]

    with jax.debug_key_reuse(False):
        np.testing.assert_array_equal(*check(jax.random.key(1)))


def test_rendering_restores_figures_and_settings(catch, monkeypatch):
    def raise_in_update(self, frame):
        raise RuntimeError("update failed")

    monkeypatch.setenv("SDL_VIDEODRIVER", "x11")
    monkeypatch.delenv("SDL_AUDIODRIVER", raising=False)
    backend, figures = matplotlib.get_backend(), plt.get_fignums()
    env, states, rewards = catch
    episode = env, jax.tree.map(lambda x: x[:2], states), rewards[:1]
    envs.render_gif(*episode)
    monkeypatch.setattr(Visualizer, "update", raise_in_update)
    with pytest.raises(RuntimeError, match="update failed"):
        envs.render_gif(*episode)
    assert matplotlib.get_backend() == backend
    assert plt.get_fignums() == figures
    assert os.environ["SDL_VIDEODRIVER"] == "x11"
    assert "SDL_AUDIODRIVER" not in os.environ


@pytest.mark.parametrize(
    ("display", "setting", "selected"),
    [(None, None, "egl"), (None, "osmesa", "osmesa"), (":0", None, None)],
)
def test_mujoco_uses_egl_without_display(monkeypatch, display, setting, selected):
    for name, value in (("DISPLAY", display), ("MUJOCO_GL", setting)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    with envs.render.no_screen():
        assert os.environ.get("MUJOCO_GL") == selected
    assert os.environ.get("MUJOCO_GL") == setting


def test_wrong_number_of_rewards_raises(catch):
    env, states, rewards = catch
    with pytest.raises(ValueError, match=r"`states` must have leaves .* at \."):
        envs.render_gif(env, states, rewards[1:])
    with pytest.raises(ValueError, match="`rewards` must be an array of shape"):
        envs.render_gif(env, states, rewards[:, None])

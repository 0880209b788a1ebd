"""`rollout speed` and `render` with host environments: their tables against NumPy."""

import gymnasium
import jax
import numpy as np
import pytest
from command_line import assert_figures, error_line, run
from gymnasium.envs.classic_control import CartPoleEnv
from host_count import HostCount
from PIL import Image

import rollout
from rollout import envs
from rollout.cli import arguments, speed
from rollout.cli.command import make_parser

B, T, SEED = 3, 47, 5
ID = "gymnasium:CartPole-v1"
RUN = ["speed", ID, f"--num-envs={B}", f"--seed={SEED}"]
COUNT = ["speed", "envpool:Count-v0", f"--num-envs={B}"]


def make_collector():
    env = envs.from_gymnasium("CartPole-v1", B)
    policy = rollout.random_policy(env.action_space)
    return rollout.HostCollector(env=env, policy=policy)


@pytest.fixture
def count(monkeypatch):
    """Environments that reset themselves in a masked-out row, as EnvPool does."""
    env = HostCount(B, resets_itself=True)
    monkeypatch.setattr(arguments, "from_envpool", lambda *args, **options: env)
    return env


def test_table_of_steps_matches_collect_steps():
    table = run(*RUN, f"--num-steps={T}")
    collector = make_collector()
    carry = collector.init(jax.random.key(SEED))
    _, trajectory = collector.collect_steps(carry, None, T)
    done = np.asarray(trajectory.done)
    assert done.any()
    assert table["environment"] == ID
    assert (table["envs"], table["steps"]) == (f"{B}", f"{B * T}")
    assert_figures(table["return"], np.asarray(trajectory.episode_return)[done])
    assert_figures(table["length"], np.asarray(trajectory.episode_length)[done])
    assert "masked-out rows" not in table


def test_table_of_episodes_matches_collect_episodes():
    table = run(*RUN, "--num-episodes=7")
    collector = make_collector()
    carry = collector.init(jax.random.key(SEED))
    _, episodes = collector.collect_episodes(carry, None, 7, max_episode_steps=1000)
    assert table["episodes"].startswith("7 (7 terminated")
    assert_figures(table["length"], episodes.episode_length)
    assert table["steps"].split()[0] == f"{episodes.episode_length.sum()}"


BLINK = """
import gymnasium
import numpy as np

class Blink(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)

    def __init__(self, length=2):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        obs = np.full(1, self.count, np.float32)
        return obs, 1.0, self.count == self.length, False, {}

    def render(self):
        return np.full((8, 8, 3), self.count, np.uint8)
"""


def test_render_accepts_a_class_without_render_mode(tmp_path):
    (tmp_path / "blink.py").write_text(BLINK)
    env_id, gif = f"gymnasium:{tmp_path}/blink.py:Blink", tmp_path / "a.gif"
    table = run("render", env_id, str(gif), "--env-param=length=3")
    assert table["length"].split()[0] == "3"
    with Image.open(gif) as image:
        assert image.n_frames == 4


def test_masked_rows_are_not_counted_as_steps(count):
    table = run(*COUNT, f"--num-steps={T}")
    num_masked = int(table["masked-out rows"].split()[0])
    assert num_masked > B
    assert table["masked-out rows"] == f"{num_masked} (environments reset themselves)"
    assert int(table["steps"]) == B * T - num_masked


def test_envpool_gets_seed_and_parameters(monkeypatch):
    arguments_of_call = {}

    def make(env_id, num_envs, **options):
        arguments_of_call.update(env_id=env_id, num_envs=num_envs, **options)
        return HostCount(num_envs)

    monkeypatch.setattr(arguments, "from_envpool", make)
    argv = "--num-episodes=2", "--seed=8", "--env-param=num_threads=1"
    run("speed", "envpool:A-v0", *argv)
    expected = {"env_id": "A-v0", "num_envs": 2, "seed": 8, "num_threads": 1}
    assert arguments_of_call == expected


def test_id_of_gymnasium_may_have_a_module_and_a_namespace():
    calls = []

    class Toy(CartPoleEnv):
        def __init__(self, **options):
            calls.append(options)
            super().__init__()

    gymnasium.register("tests/Toy-v0", Toy)
    name = "gymnasium:json:tests/Toy-v0"
    table = run("speed", name, "--num-envs=2", "--num-steps=2", "--env-param=size=3")
    del gymnasium.registry["tests/Toy-v0"]
    # One more environment shows whether `info` has an action mask.
    assert calls == [{"size": 3}] * 3
    assert table["environment"] == f"{name} (size=3)"


def test_random_policy_reads_the_mask_in_info():
    options = make_parser().parse_args(["speed", "gymnasium:Taxi-v4"])
    collector, params = speed.make_collector(options, B)
    carry = collector.init(jax.random.key(SEED))
    _, trajectory = collector.collect_steps(carry, params, T)
    mask = np.asarray(trajectory.obs["info"]["action_mask"])
    action = np.asarray(trajectory.action)[..., None]
    assert np.take_along_axis(mask, action, axis=-1).all()


def test_fault_is_one_line(count, capsys):
    count.resets_itself = False
    count.fault_fn = lambda number, env: OSError("torn") if number == 9 else None
    error = error_line(capsys, *COUNT, "--num-steps=40")
    assert "OSError: torn" in error

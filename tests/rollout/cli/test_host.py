"""The command line with environments that are not JAX: its table against NumPy."""

import gymnasium
import jax
import numpy as np
import pytest
from command_line import assert_figures, error_line, run
from gymnasium.envs.classic_control import CartPoleEnv
from host_count import HostCount
from PIL import Image

import rollout
from rollout import cli as command
from rollout import envs

B, T, SEED = 3, 47, 5
ID = "gymnasium:CartPole-v1"
RUN = [ID, f"--num-envs={B}", f"--seed={SEED}"]
COUNT = ["envpool:Count-v0", f"--num-envs={B}"]


def make():
    env = envs.from_gymnasium("CartPole-v1", B)
    policy = rollout.random_policy(env.action_space)
    return rollout.HostCollector(env=env, policy=policy)


@pytest.fixture
def count(monkeypatch):
    """Environments that reset themselves in a row of their own, as EnvPool does."""
    made = HostCount(B, resets_itself=True)
    monkeypatch.setattr(command, "from_envpool", lambda *args, **options: made)
    return made


def test_episodes_are_those_of_collect_steps():
    table = run(*RUN, f"--num-steps={T}")
    host = make()
    _, rows = host.collect_steps(host.init(jax.random.key(SEED)), None, T)
    done = np.asarray(rows.done)
    assert done.any()
    assert table["environment"] == ID
    assert (table["envs"], table["steps"]) == (f"{B}", f"{B * T}")
    assert_figures(table["return"], np.asarray(rows.episode_return)[done])
    assert_figures(table["length"], np.asarray(rows.episode_length)[done])
    assert "masked-out rows" not in table


def test_episodes_are_those_of_collect_episodes():
    table = run(*RUN, "--num-episodes=7")
    host = make()
    carry = host.init(jax.random.key(SEED))
    _, episodes = host.collect_episodes(carry, None, 7, max_episode_steps=1000)
    assert table["episodes"].startswith("7 (7 terminated")
    assert_figures(table["length"], episodes.episode_length)
    assert table["steps"].split()[0] == f"{episodes.episode_length.sum()}"


OWN = """
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


def test_class_of_a_file_is_drawn_though_it_takes_no_render_mode(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    env_id, gif = f"gymnasium:{tmp_path}/own.py:Blink", tmp_path / "a.gif"
    table = run(env_id, f"--gif={gif}", "--env-param=length=3")
    assert table["length"].split()[0] == "3"
    with Image.open(gif) as image:
        assert image.n_frames == 4


def test_rows_of_resets_are_no_steps(count):
    table = run(*COUNT, f"--num-steps={T}")
    num_out = int(table["masked-out rows"].split()[0])
    assert num_out > B
    assert table["masked-out rows"] == f"{num_out} (environments reset themselves)"
    assert int(table["steps"]) == B * T - num_out


def test_seed_and_parameters_go_to_envpool(monkeypatch):
    given = {}

    def make(env_id, num_envs, **options):
        given.update(env_id=env_id, num_envs=num_envs, **options)
        return HostCount(num_envs)

    monkeypatch.setattr(command, "from_envpool", make)
    run("envpool:A-v0", "--num-episodes=2", "--seed=8", "--env-param=num_threads=1")
    assert given == {"env_id": "A-v0", "num_envs": 2, "seed": 8, "num_threads": 1}


def test_id_may_have_a_module_and_a_namespace():
    made = []

    class Toy(CartPoleEnv):
        def __init__(self, **options):
            made.append(options)
            super().__init__()

    gymnasium.register("tests/Toy-v0", Toy)
    name = "gymnasium:json:tests/Toy-v0"
    table = run(name, "--num-envs=2", "--num-steps=2", "--env-param=size=3")
    del gymnasium.registry["tests/Toy-v0"]
    assert made == [{"size": 3}, {"size": 3}]
    assert table["environment"] == f"{name} (size=3)"


def test_fault_is_one_line(count, capsys):
    count.resets_itself = False
    count.fault_fn = lambda number, env: OSError("torn") if number == 9 else None
    line = error_line(capsys, *COUNT, "--num-steps=40")
    assert "failed: OSError: torn" in line

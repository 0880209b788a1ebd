"""The command line with environments that are not JAX: its table against NumPy."""

import os
import signal

import gymnasium
import jax
import numpy as np
import pytest
from command_line import assert_figures, error_line, run
from gymnasium.envs.classic_control import CartPoleEnv
from host_count import HostCount

import rollout
from rollout import envs
from rollout.cli import runs
from rollout.cli.arguments import make_parser, parse

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
    monkeypatch.setattr(envs, "from_envpool", lambda *args, **options: made)
    return made


def test_rows_are_those_of_collect_steps(tmp_path):
    table = run(*RUN, f"--num-steps={T}", f"--save={tmp_path}/a.npz")
    saved = dict(np.load(tmp_path / "a.npz", allow_pickle=False))
    host = make()
    _, expected = host.collect_steps(host.init(jax.random.key(SEED)), None, T)
    for name in ("obs", "action", "reward", "terminated", "next_obs", "episode_id"):
        np.testing.assert_array_equal(saved[name], getattr(expected, name))
    done = saved["terminated"] | saved["truncated"]
    assert done.any()
    assert table["environment"] == ID
    assert (table["envs"], table["steps"]) == (f"{B}", f"{B * T}")
    assert_figures(table["return"], saved["episode_return"][done])
    assert_figures(table["length"], saved["episode_length"][done])
    assert "masked-out rows" not in table


def test_episodes_are_those_of_collect_episodes(tmp_path):
    table = run(*RUN, "--num-episodes=7", f"--plot={tmp_path}/a.png")
    host = make()
    carry = host.init(jax.random.key(SEED))
    _, episodes = host.collect_episodes(carry, None, 7, max_episode_steps=1000)
    assert table["episodes"].startswith("7 (7 terminated")
    assert_figures(table["length"], episodes.episode_length)
    assert table["steps"].split()[0] == f"{episodes.episode_length.sum()}"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_resets_are_no_steps(count, tmp_path):
    table = run(*COUNT, f"--num-steps={T}", f"--save={tmp_path}/a.npz")
    mask = np.load(tmp_path / "a.npz")["mask"]
    num_out = np.count_nonzero(~mask)
    assert num_out > B
    assert table["steps"] == f"{mask.sum()}"
    assert table["masked-out rows"] == f"{num_out} (environments reset themselves)"


def test_rows_of_resets_are_counted_without_save(count):
    table = run(*COUNT, f"--num-steps={T}")
    num_out = int(table["masked-out rows"].split()[0])
    assert int(table["steps"]) == B * T - num_out < B * T


def test_seed_and_parameters_go_to_envpool(monkeypatch):
    given = {}

    def make(env_id, num_envs, **options):
        given.update(env_id=env_id, num_envs=num_envs, **options)
        return HostCount(num_envs)

    monkeypatch.setattr(envs, "from_envpool", make)
    run("envpool:A-v0", "--num-episodes=2", "--seed=8", "--env-param=num_threads=1")
    assert given == {"env_id": "A-v0", "num_envs": 2, "seed": 8, "num_threads": 1}


@pytest.mark.parametrize("name", ["tests/Toy-v0", "json:Toy-v0", "json:tests/Toy-v0"])
def test_id_may_have_a_module_and_a_namespace(name, monkeypatch):
    made = []

    class Toy(CartPoleEnv):
        def __init__(self, **options):
            made.append(options)
            super().__init__()

    for env_id in ("tests/Toy-v0", "Toy-v0"):
        gymnasium.register(env_id, Toy)
    argv = f"gymnasium:{name}", "--num-envs=2", "--num-steps=2"
    table = run(*argv, "--env-param=size=3")
    for env_id in ("tests/Toy-v0", "Toy-v0"):
        del gymnasium.registry[env_id]
    assert made == [{"size": 3}, {"size": 3}]
    assert table["environment"] == f"gymnasium:{name} (size=3)"


def test_interrupted_run_prints_the_table_so_far(count, capsys):
    def interrupt(number, env):
        if number == 300 and env == 0:
            os.kill(os.getpid(), signal.SIGINT)

    count.resets_itself, count.fault_fn = False, interrupt
    # Many batches of 200 rows: the press is noticed a moment later.
    handler = signal.getsignal(signal.SIGINT)
    table = run(*COUNT, "--num-steps=4000", status=130)
    assert signal.getsignal(signal.SIGINT) is handler
    num_steps, note = table["steps"].split(" ", 1)
    num_steps = int(num_steps.replace(",", ""))
    assert 0 < num_steps < 4000 * B
    assert note == f"(of {4000 * B:,}, interrupted)"
    assert capsys.readouterr().err == "python -m rollout: interrupted\n"


def test_fault_is_one_line(count, capsys):
    count.resets_itself = False
    count.fault_fn = lambda number, env: OSError("torn") if number == 9 else None
    line = error_line(capsys, *COUNT, "--num-steps=40")
    assert "failed: OSError: torn" in line


@pytest.mark.parametrize(
    ("given", "num_envs"),
    [([], 16), (["--num-episodes=9"], 9), (["--num-envs=8192"], 8192)],
)
def test_defaults_are_those_of_a_loop_in_python(given, num_envs):
    made = parse(make_parser(), [ID, *given])
    assert made.num_envs == num_envs
    assert runs.start_devices(made) == 1


def test_kinds_of_ids_are_distinguished():
    ids = (ID, "envpool:A-v0", "pgx:chess", "gymnasium", "CartPole-v1")
    made = [parse(make_parser(), [env_id]) for env_id in ids]
    assert [x.is_on_host for x in made] == [True, True, False, False, False]

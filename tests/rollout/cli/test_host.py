"""The command line with environments that are not JAX: its table against NumPy."""

import contextlib
import io
import os
import signal
import sys

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from host_count import HostCount

import rollout
from rollout import envs
from rollout.cli.arguments import make_parser, parse
from rollout.cli.main import main

B, T, SEED = 3, 47, 5
ID = "gymnasium:CartPole-v1"
RUN = [ID, f"--num-envs={B}", f"--seed={SEED}"]


def run(argv, status=0):
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        assert main(argv) == status
    lines = stdout.getvalue().splitlines()
    return {line[:20].strip(): line[20:].strip() for line in lines}


def error_line(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    return captured.err


def assert_figures(text, x):
    x = np.asarray(x, np.float64)
    expected = x.mean(), x.std(), x.min(), x.max()
    # Sums of a batch are in float32, and the table has six digits.
    np.testing.assert_allclose([float(y) for y in text.split()], expected, rtol=1e-5)


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
    table = run([*RUN, f"--num-steps={T}", f"--save={tmp_path}/a.npz"])
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
    table = run([*RUN, "--num-episodes=7", f"--plot={tmp_path}/a.png"])
    host = make()
    carry = host.init(jax.random.key(SEED))
    _, episodes = host.collect_episodes(carry, None, 7, max_steps=1000)
    assert table["episodes"].startswith("7 (7 terminated")
    assert_figures(table["length"], episodes.episode_length)
    assert table["steps"].split()[0] == f"{episodes.episode_length.sum()}"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_resets_are_no_steps(count, tmp_path):
    argv = ["envpool:Count-v0", f"--num-envs={B}", f"--num-steps={T}"]
    table = run([*argv, f"--save={tmp_path}/a.npz"])
    mask = np.load(tmp_path / "a.npz")["mask"]
    num_out = np.count_nonzero(~mask)
    assert num_out > B
    assert table["steps"] == f"{mask.sum()}"
    assert table["masked-out rows"] == f"{num_out} (environments reset themselves)"


def test_rows_of_resets_are_counted_without_save(count):
    table = run(["envpool:Count-v0", f"--num-envs={B}", f"--num-steps={T}"])
    num_out = int(table["masked-out rows"].split()[0])
    assert int(table["steps"]) == B * T - num_out < B * T


def test_seed_and_parameters_go_to_envpool(monkeypatch):
    given = {}

    def make(env_id, num_envs, **options):
        given.update(env_id=env_id, num_envs=num_envs, **options)
        return HostCount(num_envs)

    monkeypatch.setattr(envs, "from_envpool", make)
    run(
        ["envpool:Some-v0", "--num-episodes=2", "--seed=8", "--env-param=num_threads=1"]
    )
    assert given == {"env_id": "Some-v0", "num_envs": 2, "seed": 8, "num_threads": 1}


@pytest.mark.parametrize("name", ["tests/Toy-v0", "json:Toy-v0", "json:tests/Toy-v0"])
def test_id_may_have_a_module_and_a_namespace(name, monkeypatch):
    made = []

    class Toy(CartPoleEnv):
        def __init__(self, **options):
            made.append(options)
            super().__init__()

    for env_id in ("tests/Toy-v0", "Toy-v0"):
        gymnasium.register(env_id, Toy)
    argv = [f"gymnasium:{name}", "--num-envs=2", "--num-steps=2"]
    table = run([*argv, "--env-param=size=3"])
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
    argv = ["envpool:Count-v0", f"--num-envs={B}", "--num-steps=4000"]
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        table = run(argv, status=130)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    num_steps, note = table["steps"].split(" ", 1)
    num_steps = int(num_steps.replace(",", ""))
    assert 0 < num_steps < 4000 * B
    assert note == f"(of {4000 * B:,}, interrupted)"
    assert capsys.readouterr().err == "python -m rollout: interrupted\n"


def test_fault_is_one_line(count, capsys):
    count.resets_itself = False
    count.fault_fn = lambda number, env: OSError("torn") if number == 9 else None
    argv = ["envpool:Count-v0", f"--num-envs={B}", "--num-steps=40"]
    assert "failed: OSError: torn" in error_line(argv, capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gymnasium:Nope-v1"], "Environment `Nope` doesn't exist"),
        (["gymnasium:nope:Nope-v1"], "No module named 'nope'"),
        ([*RUN, "--env-param=foo=1"], "got an unexpected keyword argument 'foo'"),
        ([*RUN, "--env-param=num_envs=3"], "multiple values for argument 'num_envs'"),
        (
            [ID, "--gif=a.gif"],
            f"argument --gif: only for environments in JAX, got {ID}",
        ),
        ([*RUN, "--devices=2"], "argument --devices: only for environments in JAX"),
        ([*RUN, "--devices=all"], "argument --devices: only for environments in JAX"),
        ([*RUN, "--profile=a"], "argument --profile: only for environments in JAX"),
    ],
)
def test_wrong_argument_is_rejected_in_one_line(argv, message, capsys):
    assert message in error_line(argv, capsys)


@pytest.mark.parametrize("package", ["gymnasium", "envpool"])
def test_package_that_is_not_installed_is_named_with_the_command(
    package, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    line = error_line([f"{package}:CartPole-v1"], capsys)
    assert f'{package} is not installed: pip install "rollout-jax[{package}]"' in line


@pytest.mark.parametrize(
    ("given", "num_envs"),
    [([], 16), (["--num-episodes=9"], 9), (["--num-envs=40"], 40)],
)
def test_defaults_are_those_of_a_loop_in_python(given, num_envs):
    made = parse(make_parser(), [ID, *given])
    assert (made.num_envs, made.devices) == (num_envs, 1)


def test_kinds_of_ids_are_distinguished():
    ids = (ID, "envpool:A-v0", "pgx:chess", "gymnasium", "CartPole-v1")
    made = [parse(make_parser(), [env_id]) for env_id in ids]
    assert [x.is_on_host for x in made] == [True, True, False, False, False]
    assert [x.has_agents for x in made] == [False, False, True, False, False]

"""Tests of the code of the pages in `docs/coming_from`."""

import importlib.util
import math
import pathlib
import re

import jax
import numpy as np
import pytest
from pages import MARK, blocks, check_printed, inject, program, run, tolerance_here
from PIL import Image

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "coming_from"
TEXTS = {page.stem: page.read_text() for page in sorted(FOLDER.glob("*.md"))}
# Pages with one program that trains, and the changes that make the training short.
TRAINING_CHANGES = {
    "brax": "config = config.replace(num_updates=2)",
    "cleanrl": "config = config.replace(num_updates=200)",
    "craftax_baselines": """\
config, NUM_ENVS = config.replace(num_updates=2, hidden_layer_sizes=(32,)), 4""",
    "flashbax": "",
    "gymnax": "",
    "purejaxql": "NUM_UPDATES = 20",
    "purejaxrl": "",
    "rejax": "config = config.replace(num_updates=4)",
    "rlax": "",
    "stable_baselines3": """\
config = config.replace(num_updates=20)
settings = settings.replace(num_updates=6)
robot_config = robot_config.replace(num_updates=2, num_steps=50)""",
}
REQUIRED = {"craftax_baselines": "craftax"}
# Numbers of these pages do not depend on the compiler. Other pages compare words only.
EXACT = ("easyrl4rec", "rllib", "torchrl")
# Numbers of these pages are equal with the options of the compiler in the tests.
EXACT_QUICK = ("flashbax", "gymnax", "rlax", "tianshou")


def check_out(name, names, out):
    """Checks the results of a page and the output on the page."""
    globals()[f"check_{name}"](names, out.replace(MARK, ""))
    tolerance = 0.0 if name in EXACT else math.inf
    if name in EXACT_QUICK:
        tolerance = tolerance_here(f"docs/coming_from/{name}.md")
    check_printed(TEXTS[name], out, tolerance)


def check_purejaxrl(names, out):
    first, *_, last = (float(x) for x in out.strip("[]\n").split())
    assert 10 < first < 40
    assert last > 150
    carry, params, *_ = names["runner_state"]
    _, rows = names["collector"].collect_steps(carry, params, num_steps=8)
    _, extras = names["act"](params, rows.obs, jax.random.key(0))
    np.testing.assert_allclose(extras["value"], rows.extras["value"], rtol=1e-4)


def check_tianshou(names, out):
    num_stored, evaluation = out.splitlines()
    assert int(num_stored) == 8 * (100 + 20 * 7)
    assert evaluation.split()[0] == "20"
    assert 8 < float(evaluation.split()[1]) <= 500
    rows, mask = names["buffer"].to_trajectory(names["state"])
    assert mask[:240].all()
    assert not mask[240:].any()
    action_mean = np.asarray(rows.action)[:100].mean()  # random actions
    assert 0.4 < action_mean < 0.6
    np.testing.assert_array_equal(  # the buffer has the successors, also at endings
        np.asarray(rows.obs)[1:240][~np.asarray(rows.done)[:239]],
        np.asarray(rows.next_obs)[:239][~np.asarray(rows.done)[:239]],
    )


def check_torchrl(names, out):
    assert out == f"{[102] * 9 + [84]} 1002 1002 (128, 4)\n"
    rows, mask = names["buffer"].to_trajectory(names["state"])
    assert mask.sum(axis=0).tolist() == [167] * 6
    assert (np.asarray(rows.episode_length)[np.asarray(mask)] <= 200).all()


def check_jaxmarl(names, out):
    num_episodes, mean = out.split()
    assert num_episodes == "256"  # 64 lanes of 4 episodes of 26 steps, and 24 steps
    assert -40 < float(mean) < -20
    stats = names["stats"]
    assert set(stats.agents) == {"agent_0", "agent_1", "agent_2"}
    (code,) = blocks(TEXTS["jaxmarl"], "text")
    exec(code, names)
    assert names["win_rate"] == 0  # nothing to win in simple spread


def check_rllib(names, out):
    counts, learner, rival = (line.split() for line in out.splitlines())
    assert counts == ["96", "1000", "1000"]  # 8 lanes of 12.5 episodes of ten rounds
    assert learner[0] == "learner"
    assert rival[0] == "rival"
    assert float(learner[1]) == -float(rival[1])  # zero-sum game
    assert learner[2] == rival[2] == "10.0"
    mine = names["mine"]
    assert mine.truncated[mine.mask].sum() == 96
    assert not mine.terminated.any()
    acts = np.asarray(mine.mask).reshape(125, 8, 2)
    assert (acts.sum(axis=-1) == 1).all()  # one side of every game
    assert acts.any(axis=(0, 1)).all()  # both sides over all games


def check_easyrl4rec(names, out):
    first, *settings = out.splitlines()
    assert first == "[10 10 10 10 10 10 10 10] 80"
    rows, mask = names["buffer"].to_trajectory(names["state"])
    assert mask.sum() == 80
    for lane in range(8):  # one episode each, in which no item comes twice
        assert len(set(np.asarray(rows.action)[np.asarray(mask)[:, lane], lane])) == 10
    assert rows.truncated.sum() == 8
    assert not rows.terminated.any()
    assert [line.split()[0] for line in settings] == ["FB", "NX_0", "NX_10"]
    assert settings[2].split()[1] == "10.0"


def check_stable_baselines3(names, out):
    progress, stats, action, loaded, first, dqn, evaluated, force = out.splitlines()
    assert progress.split()[0] == f"{8 * 128 * 20:,}"
    assert float(stats.split()[1]) > 50
    assert stats.endswith(", 100 episodes")
    assert action in ("0", "1")
    assert loaded.endswith(", 100 episodes")
    assert float(loaded.split()[1]) > 50  # the loaded agent plays like the trained one
    assert first.split()[0] == f"{16 * (64 + 32 * 6):,}"
    assert dqn.endswith(", 100 episodes")
    assert evaluated.endswith(", 10 episodes")
    assert -2 <= float(force.strip("[]")) <= 2
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    assert bool([*pathlib.Path("cartpole").glob("events.*")]) == has_tensorboard
    assert pathlib.Path("dqn/best").is_dir()
    with Image.open("pendulum.gif") as image:
        assert image.n_frames > 100


def check_cleanrl(names, out):
    assert names["metrics"]["return_mean"].shape == (200,)
    assert out.startswith("51,200 ")
    assert float(out.splitlines()[-1].split()[1]) > 200  # 500 after all updates


def check_craftax_baselines(names, out):
    assert names["metrics"]["return_mean"].shape == (2,)
    assert out.splitlines()[-1].startswith("return ")
    assert names["agent"].env.num_envs == 4


def check_purejaxql(names, out):
    assert names["returns"].shape == (20,)
    assert out.splitlines()[-1].endswith(", 128 episodes")
    epsilon = names["epsilon"]
    assert epsilon(0) == 1.0
    assert abs(epsilon(20 * 64) - 0.2) < 1e-6


def check_gymnax(names, out):
    scores = names["scores"]
    assert scores[0] < 150 < 400 < scores[-1]
    assert out.splitlines()[-1].startswith("(500, 16, 4) return ")


def check_rejax(names, out):
    assert names["returns"].shape == (4,)
    assert (names["returns"] > 20).all()  # 500 after all updates
    assert out.splitlines()[-1] in ("0", "1")


def check_flashbax(names, out):
    assert float(out.split()[1]) > 100  # 412 by default, 155 with the test options
    assert names["buffer"].size(names["state"][1]) == 20_000


def check_rlax(names, out):
    assert float(out.split()[1]) > 200  # 500 after all updates


def check_brax(names, out):
    assert names["metrics"]["return_mean"].shape == (2,)
    assert names["env"].action_space.shape == (1,)
    assert out.splitlines()[-1].endswith(", 128 episodes")


@pytest.mark.very_slow
@pytest.mark.usefixtures("key_reuse", "rank_promotion")  # Craftax and brax need both
@pytest.mark.parametrize("name", TRAINING_CHANGES)
def test_program_trains(name, request, capsys, tmp_path, monkeypatch):
    """An environment of gymnax replaces the robot if brax is not installed."""
    is_short = name in ("brax", "craftax_baselines")
    if name not in EXACT_QUICK:
        request.getfixturevalue("quick_compile" if is_short else "quick_training")
    pytest.importorskip(REQUIRED.get(name, "jax"))
    monkeypatch.chdir(tmp_path)
    code = program(TEXTS[name])
    if name == "brax" and importlib.util.find_spec("brax") is None:
        code = blocks(TEXTS[name])[0]  # the second block needs brax
        code = inject(code, 'ENV_ID = "Pendulum-v1"') + f"print({MARK!r}, end='')\n"
    for line in TRAINING_CHANGES[name].split("\n"):
        code = inject(code, line) if line else code
    names = run(f"docs/coming_from/{name}.md", code)
    check_out(name, names, capsys.readouterr().out)


@pytest.mark.parametrize("name", TEXTS)
def test_programs_are_valid_and_short(name):
    for code in blocks(TEXTS[name], "py"):  # code of the other library
        compile(code, name, "exec")
    for code in blocks(TEXTS[name]):
        assert len(re.findall(r"^.*\S", code, re.MULTILINE)) <= 65


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile", "rank_promotion")  # MPE promotes ranks
@pytest.mark.parametrize("name", sorted(TEXTS.keys() - TRAINING_CHANGES))
def test_program_runs(name, capsys):
    (code,) = blocks(TEXTS[name])
    names = run(f"docs/coming_from/{name}.md", code)
    check_out(name, names, capsys.readouterr().out)

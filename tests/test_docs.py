"""Tests of README and docs: code, links and names."""

import csv
import dataclasses
import html
import importlib
import inspect
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

import flax.linen as nn
import jax
import numpy as np
import pytest
from pages import MARK, blocks, check_printed, inject, program, run, tolerance_here
from PIL import Image

import rollout
from rollout import envs

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = {"README.md": README}
TEXTS |= {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
# These programs train for long even with fewer updates: mark `very_slow`.
LONG = ("evolution", "lagging_actors", "learned_models", "learning_problems")
LONG += ("meta_rl", "own_gymnasium", "population_training", "search", "tuning")
LONG += ("agents_in_python", "devices", "gallery", "hindsight", "many_machines")
LONG += ("rewards", "training", "tutorial")
MARKS = {"docs/accelerators.md": pytest.mark.compiles_for("h100")}
MARKS |= {f"docs/{name}.md": pytest.mark.very_slow for name in LONG}
NEEDED = {
    "docs/agents_in_python.md": "mpe2",
    "docs/deploy.md": "jax2onnx",
    "docs/search.md": "mctx",
    "docs/tuning.md": "optuna",
}
# The key checker reports keys of a mapped `scan` and the key of a resumed training.
KEYS_TWICE = ("own_gymnasium", "population_training", "search", "tuning", "tutorial")
# These pages need default optimizations: they show programs or equal bits.
OPTIMIZED = ("docs/accelerators.md", "docs/concepts/keys.md", "docs/evolution.md")
# These pages train for long and need fast programs.
TRAINED = ("docs/lagging_actors.md",)
# Changes for pages that take more than half a minute.
SMALLER = {
    "docs/agents_in_python.md": [
        "NUM_ROUNDS, NUM_UPDATES, NUM_ENVS = 2, 4, 32",
        "config = config.replace(num_updates=10)",
    ],
    "docs/gallery.md": ["NUM_UPDATES = 5"],
    "docs/learned_models.md": ["NUM_ENVS = 64"],
    "docs/own_gymnasium.md": ["settings = settings.replace(num_updates=20)"],
    "docs/search.md": ["NUM_UPDATES = 6"],
    "docs/tuning.md": [
        "NUM_ROUNDS, SIZE = 2, 4",
        "config = config.replace(num_updates=15, hidden_layer_sizes=(16, 16))",
    ],
}
# Tolerances of printed numbers. Other pages compare words only, because few
# optimizations or less training change the numbers.
TOLERANCES = {
    **dict.fromkeys((x for x in TEXTS if x.startswith("docs/concepts/")), 0.0),
    "docs/agents.md": 0.0,
    "docs/evolution.md": tolerance_here("docs/evolution.md"),
    "docs/meta_rl.md": 0.01,
}
# Logging packages, which are mocked.
PROTO = "tensorboard.compat.proto.event_pb2"
LOGGERS = (
    *("wandb", "tensorboard", "tensorboard.summary.writer.event_file_writer"),
    PROTO,
)


def paths_of_the_api() -> list[str]:
    api = "".join(text for name, text in TEXTS.items() if name.startswith("docs/api/"))
    return re.findall(r"^::: (\S+)$", api, re.MULTILINE)


def headings(name: str) -> set[str]:
    """The anchors of a page: its headings, and the names whose docstrings it shows."""
    text = re.sub(r"^```.*?^```", "", TEXTS[name], flags=re.DOTALL | re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", x) for x in re.findall(r"^#+ (.+)", text, re.M))
    slugs = {re.sub(r"[-\s]+", "-", x.strip().lower()) for x in words}
    return slugs | set(re.findall(r"^::: (\S+)", text, re.MULTILINE))


def check_accelerators(names, out):
    report = names["report"]
    assert out == f"{report}\n"
    assert report.loop.trips * report.steps_per_round == 128
    section = TEXTS["docs/accelerators.md"].split("\n## Inspecting a program\n")[1]
    section = section.split("\n## ")[0]
    lines = re.findall(r"^- `([\w ]+)`:", section, re.M)
    assert len(lines) == 4
    assert all(line in out for line in lines)
    assert not report.waits
    assert report.per_step("loose_launches") == 0

    def inspect(fn, *args):
        return rollout.inspect_program(fn, *args, accelerator="h100")

    x = jax.ShapeDtypeStruct((8, 8), "float32")
    for stalls, runs in (("until_small", "ten_rounds"), ("branching", "selecting")):
        assert inspect(names[stalls], x).waits
        assert not inspect(names[runs], x).waits
    with pytest.raises(ValueError, match="debug_print"):
        inspect(names["printing"], x)
    assert not inspect(names["telling"], x).waits


def check_agents(names, out):
    *results, moves = (line.split() for line in out.splitlines())
    learner, rival = ([int(x[i]) for i in (1, 7, 13)] for x in results)
    assert sum(learner) == 1000  # wins, draws and losses
    assert rival == learner[::-1]
    advantage, acting = names["advantage"], names["team_rows"].acting
    assert advantage.shape == acting.shape == (32, 64 * 3)
    assert np.isfinite(names["loss"](names["team_rows"], advantage, 1.0, advantage))
    ends = names["mine"].mask & names["mine"].terminated
    np.testing.assert_array_equal(names["returns"][ends], names["mine"].reward[ends])
    assert 3 < float(moves[0]) < 11
    assert int(moves[1]) == 40 * 64
    ids = names["played"].extras.policy_id
    assert set(np.unique(ids)) == set(range(5))
    assert ((ids == 0).sum(axis=-1) == 1).all()


def check_agents_in_python(names, out):
    groups, returns, *rest = out.splitlines()
    assert groups == "{'agents': ('agent_0', 'agent_1', 'agent_2')}"
    first, last = map(float, returns.split())
    assert last > first
    adversaries, prey, *_, learner, rival = rest
    assert adversaries.startswith("adversary: ")
    assert prey.startswith("agent: ")
    counts = re.findall(r"(\d+) (?:wins|draws|losses)", learner)
    wins, _, losses = map(int, counts)
    assert wins > losses
    assert rival.startswith("random: ")


def check_buffers(names, out):
    assert out.splitlines() == [f"{64 * 128} (256, 4)", "(32, 4, 10, 10, 4)"]
    assert names["batch"].experience.obs.shape == (256, 4)
    rows = names["goals"].experience
    goal, position = rows.obs["goal"], rows.next_obs["state"][:, 0]
    assert 0.1 < (goal == 0).mean() < 0.3  # kept
    np.testing.assert_array_equal(rows.reward, -abs(position - goal))
    np.testing.assert_array_equal(goal, rows.next_obs["goal"])
    assert names["data"].size(names["offline"]) == 3


def check_endings(names, out):
    rows = names["rows"]
    np.testing.assert_array_equal(rows.obs.T, [[0, 1, 2] * 2, [0, 1, 2, 3, 0, 1]])
    np.testing.assert_array_equal(rows.next_obs.T, [[1, 2, 3] * 2, [1, 2, 3, 4, 1, 2]])
    np.testing.assert_array_equal(np.argwhere(rows.terminated), [[2, 0], [5, 0]])
    np.testing.assert_array_equal(np.argwhere(rows.truncated), [[3, 1]])
    np.testing.assert_array_equal(names["target"], rows.obs[:, 1] - 6.0)


def check_keys(names, out):
    """Keys equal the figure, and samples of a lane do not depend on other lanes."""
    carry = names["many"].init(names["root"])
    step = jax.random.fold_in(carry.episode.key[3], envs.types.RESET)
    _, obs = envs.make("CartPole-v1").reset(step)
    np.testing.assert_array_equal(obs, carry.obs[3])
    first_lanes, all_lanes = (
        jax.random.normal(jax.random.key(1), (size, 3)) for size in (8, 64)
    )
    np.testing.assert_array_equal(first_lanes, all_lanes[:8])


def check_lanes(names, out):
    mean = names["queue"].lengths.mean
    assert abs(mean - 6) < 4 * 4 / np.sqrt(1000)  # four deviations of that mean
    assert names["window"].lengths.mean < 6 - 4 * 4 / np.sqrt(1000)


def check_masks(names, out):
    rows = names["rows"]
    for leaf in jax.tree.leaves(rows):
        assert not np.any(np.asarray(leaf)[~np.asarray(rows.mask)])
    bad = np.where(rows.mask, rows.reward, np.nan)
    np.testing.assert_array_equal(names["masked_mean"](bad, rows.mask), 1.0)
    where, log = jax.numpy.where, jax.numpy.log
    slope = jax.grad(lambda x: log(where(rows.mask, x, 1.0)).sum())(rows.reward)
    np.testing.assert_array_equal(slope, rows.mask)


def check_devices(names, out):
    assert "(None, 'lanes'" in out
    devices = set(names["mesh"].devices.flat)
    assert float(names["state"].window.returns.mean) > 400
    assert names["metrics"]["log_prob"].shape == (8,)  # gradient steps of an update
    assert names["state"].carry.obs.sharding.device_set == devices
    reward = names["trajectory"].reward
    assert reward.sharding.device_set == devices
    assert reward.shape == (128, 64 * len(devices))
    batch = names["batch"]
    assert batch.experience.obs.sharding.device_set == devices
    np.testing.assert_array_equal(batch.weights, 1.0)


def check_environments(names, out):
    assert names["issues"] == ()
    assert np.unique(names["cartpoles"].env.env_params.gravity).size == 16
    trajectory = names["trajectory"]
    assert trajectory.reward.shape == (100, 16)
    assert trajectory.terminated.any()
    walks = envs.vectorize(names["AnyGoal"](5.0), 16)
    random = rollout.random_policy(walks.action_space)
    walkers = rollout.Collector(env=walks, policy=random)
    _, rows = walkers.collect_steps(walkers.init(jax.random.key(0)), None, 200)
    ends = np.asarray(rows.next_obs)[rows.terminated]
    assert (ends >= 2).all()
    assert ends.min() < 3.5 < ends.max()  # a walk moves by 1, to a goal in [2, 5]


def check_wrappers(names, out):
    assert names["t"].obs.shape == (100, 16, 4 * 400)
    assert names["t"].next_obs.shape == names["t"].obs.shape


def check_policies(names, out):
    assert names["walked"].action.shape == (20, 16)
    assert names["trajectory"].next_obs == names["trajectory"].info == ()
    with Image.open("agent.gif") as image:
        assert image.n_frames == names["episode"].episode_length[0] + 1


def check_deploy(names, out):
    """All exported agents choose the actions of `predict`."""
    obs = np.random.default_rng(0).uniform(-8.0, 8.0, (100, 3)).astype(np.float32)
    expected = jax.jit(jax.vmap(names["act"]))(obs)
    session = names["onnxruntime"].InferenceSession("agent.onnx")
    exported = jax.jit(lambda obs: jax.lax.map(names["exported"].call, obs))
    actions = {
        "onnx": np.stack([session.run(["action"], {"obs": x})[0] for x in obs]),
        "jax.export": exported(obs),
        "numpy": np.stack([names["act_in_numpy"](x) for x in obs]),
    }
    model = names["to_onnx"](jax.vmap(names["act"]), [obs.shape])
    session = names["onnxruntime"].InferenceSession(model.SerializeToString())
    (actions["batch"],) = session.run(None, {session.get_inputs()[0].name: obs})
    for action in actions.values():
        np.testing.assert_allclose(action, expected, rtol=0, atol=1e-5)
    assert np.abs(names["memory"]).max() > 0
    for line in out.splitlines():
        first, second = (float(x) for x in re.findall(r"\[(.+?)\]", line))
        assert abs(first - second) < 1e-5


def check_episodes(names, out):
    mean, low, high = (float(x) for x in out.splitlines()[0].split())
    assert low < mean < high
    lowest = names["episodes"].episode_return.min()
    assert names["rows"].reward[names["rows"].mask].sum() == lowest
    assert names["trajectory"].obs.shape == (200, 64, 4)
    assert (names["episodes"].episode_length <= 200).all()


def check_host_environments(names, out):
    first, steps, *issues, stats, evaluated = out.splitlines()
    assert evaluated.endswith(", 8 episodes")
    assert int(first.split()[0]) > 50
    assert int(steps) == 16 * 256
    assert issues == ["", "[20 20  1 20]"]  # `check_env` found nothing
    assert stats.startswith("FaultStats(faulty_episodes=")
    lost = names["patient"].fault_stats
    assert lost.faulty_episodes == lost.restarts > 0
    with Image.open("agent.gif") as image:
        assert image.n_frames == names["episode"].episode_length[0] + 1
    rows = jax.device_get(names["rows"])
    assert np.count_nonzero(~rows.mask) == lost.lost_steps
    assert names["ordered"].mask.sum() == names["served"].mask.sum() == 128


def check_learning(names, out):
    """A short rollout has the gradient of the page, and a long one a large gradient."""
    norms = {int(x): float(y) for x, y in map(str.split, out.splitlines())}
    assert f"{norms[10]:.2f}" in TEXTS["docs/learning.md"]
    assert norms[200] > 50 * norms[10]  # chaotic, so other machines have other digits


def check_learning_problems(names, out):
    """The numbers of a healthy run are in the ranges of the page."""
    metrics = names["metrics"]
    assert metrics["return_mean"][0] < 30
    assert metrics["return_mean"][-1] > 450
    assert metrics["kl"][:10].min() > 0.0005
    assert metrics["kl"].max() < 0.02
    assert metrics["clip_fraction"][:10].min() > 0.01
    assert metrics["clip_fraction"].max() < 0.2
    assert 0.5 < metrics["explained_variance"].max() < 1
    assert 0.4 < metrics["entropy"][-1] < metrics["entropy"][0] < 0.7
    assert "issues: ()\n" in out
    with Image.open("agent.gif") as image:
        assert image.n_frames == 200 + 1


def check_many_machines(names, out):
    lines = [line.split() for line in out.splitlines() if line.endswith("steps/s")]
    steps = 128 * names["env"].num_envs
    assert [line[0] for line in lines] == [f"{n * steps:,}" for n in range(1, 9)]
    obs = names["state"].carry.obs
    assert len(obs.sharding.device_set) == names["mesh"].size
    np.testing.assert_array_equal(names["mine"], obs)  # there is one process


def check_recommendation(names, out):
    tables, *lines = out.splitlines()
    assert tables == "[7 9] ['a' 'b'] [0.5 1. ]"
    np.testing.assert_array_equal(names["shop"].known, [[True, True], [False, True]])
    lines = [line.split() for line in lines]
    assert [line[0] for line in lines[:3]] == ["FB", "NX_0", "NX_10"]
    lengths = [float(line[1]) for line in lines[:3]]
    assert 1 < lengths[0] < 10
    assert lengths[2] == 10
    assert 0 < float(lines[3][0]) <= 1


def check_hindsight(names, out):
    plain, hindsight = (int(x) for x in re.findall(r"(\d+)%", out))
    assert plain < 30
    assert hindsight > 90  # 99 on the page


def check_level_replay(names, out):
    """The weight moves up the levels. Scores equal means of a plain loop."""
    levels = [int(x) for x in re.findall(r"level (\d)", out)]
    assert levels[0] <= 1
    assert levels[-1] >= 5
    np.testing.assert_allclose(names["weights"].sum(axis=-1), 1.0, rtol=1e-5)
    assert names["weights"].min() >= 0.01
    generator = np.random.default_rng(0)
    values, level = generator.normal(size=(8, 4)), generator.integers(9, size=(8, 4))
    means = names["mean_by_level"](values, level)
    for number in range(9):
        mean = np.mean(
            [x for x, n in zip(values.flat, level.flat, strict=True) if n == number]
        )
        np.testing.assert_allclose(means[number], mean, rtol=1e-5)
    assert np.isnan(means[9])  # no rows


def check_rewards(names, out):
    """The multiplier keeps the limit. Each weight has the return of a search."""
    costs = [float(x) for x in re.findall(r"cost (\S+),", out)]
    assert costs[0] > 20
    assert max(costs[-2:]) <= 8.0
    for weights, returns in zip(names["weights"], names["returns"], strict=True):
        values = [0.0] * 5  # of each gear, with no step left
        for _ in range(32):
            gains = [weights[0] * x / 4 - weights[1] * (x / 4) ** 2 for x in range(5)]
            gears = [[max(x - 1, 0), x, min(x + 1, 4)] for x in range(5)]
            values = [max(gains[y] + values[y] for y in gears[x]) for x in range(5)]
        np.testing.assert_allclose(weights @ returns, values[0], rtol=0.02)
    without, with_bonus = (float(x) for x in re.findall(r": return (\S+)", out))
    assert without < 0.01
    assert with_bonus > 0.9  # the maximum is 0.99


def check_streaming(names, out):
    """Three loggers agree. The second run resumes at the end of the first."""
    metrics = names["metrics"]
    assert 10 < metrics["train/window/return_mean"] < 40
    event = sys.modules[PROTO].Event
    event.assert_called_once()
    assert event.call_args.kwargs["step"] == 64 * 512
    calls = event.return_value.summary.value.add.call_args_list
    scalars = {x.kwargs["tag"]: x.kwargs["simple_value"] for x in calls}
    assert scalars == metrics
    names["run"].log.assert_called_once_with(metrics, step=64 * 512)
    (row,) = csv.DictReader(pathlib.Path("log.csv").read_text().splitlines())
    written = {name: float(x) for name, x in row.items()}
    # The file has nine digits.
    assert written == pytest.approx({"steps": 64 * 512, **metrics}, rel=1e-8)
    returns = pathlib.Path("returns.csv")
    content = returns.read_text()
    assert [int(line.split(",")[0]) for line in content.splitlines()] == [
        64 * 128 * number for number in range(1, 5)
    ]
    returns.write_text(content + "1,2\n")  # written, and not yet saved: a kill
    first, *later_blocks = blocks(TEXTS["docs/streaming.md"])
    more = inject(first, "TOTAL_STEPS = 64 * 640")
    assert int(out) == 64 * 512
    assert run("docs/streaming.md", first, *later_blocks)["stream"].steps == 64 * 512
    assert returns.read_text() == content
    assert run("docs/streaming.md", more)["stream"].steps == 64 * 640


def check_tutorial(names, out):
    best = 0.899  # the shortest ways from all places, counted by hand
    (value,) = re.findall(r"^PPO    return (\S+)", out, re.MULTILINE)
    assert abs(float(value) - best) < 0.03
    assert pathlib.Path("runs/lava/curve.png").is_file()
    assert pathlib.Path("tutorial.png").stat().st_size > 10_000
    with Image.open("tutorial.gif") as image:
        assert image.n_frames == names["episode"].episode_length[0] + 1


def check_lagging_actors(names, out):
    """The correction increases the return, on the page from 338 to 433."""
    assert names["returns"].shape == (5, 3000)
    corrected, raw = (np.fromstring(x, sep=" ") for x in re.findall(r"\[(.*?)\]", out))
    assert corrected.mean() > raw.mean() > 50


def check_learned_models(names, out):
    """The policy learns from 12,800 rows. Gradients equal central differences."""
    assert -240 < names["stats"].returns.mean < -130
    assert names["errors"][-1] < 0.001
    # A central difference: float32 values of about -200, 1 apart.
    w, step = np.zeros((3, 1), np.float32), 3e-5 * names["slope"]
    ends = [float(names["mean_return"](w + sign * step)) for sign in (1, -1)]
    along = float((names["slope"] * step).sum())
    np.testing.assert_allclose((ends[0] - ends[1]) / 2, along, rtol=0.02)


def check_evolution(names, out):
    first, last = (float(x) for x in out.splitlines()[0].split())
    assert first < 30
    assert last > 450
    assert float(out.splitlines()[1].split()[1]) > 475


def check_own_gymnasium(names, out):
    """It flies as well as the rule."""
    issues, *progress, half, evaluated, off_policy = out.splitlines()
    assert issues == "no mistakes"
    assert progress[0].split()[0] == "61,440"
    assert float(off_policy.split()[1]) > -25  # below -30 at random
    assert half.startswith("61440 ")
    assert 4.1 < float(evaluated.split()[1]) < 5.1
    assert names["state"].num_updates == 60
    for name in ("drone.gif", "drone/agent.gif"):
        with Image.open(name) as image:
            assert image.n_frames > 2


def check_memory(names, out):
    assert float(out) < 1e-5
    assert names["t"].first[1:].any()
    assert (names["carry"].policy_state["count"] <= 500).all()


def check_meta_rl(names, out):
    assert 0.815 < float(out) < 0.845  # the rule has 0.82, the best possible 0.8375


def check_population_training(names, out):
    """The population improves. The derivative equals a central difference."""
    assert names["returns"].shape == (8, 4)
    assert np.sort(names["returns"][:, -1])[2] > 300
    x, surrogate = names["log_rate"], names["surrogate"]
    central = (surrogate(x + 0.05) - surrogate(x - 0.05)) / 0.1
    np.testing.assert_allclose(central, jax.grad(surrogate)(x), rtol=0.1)


def check_search(names, out):
    untrained, alone, searching = (float(x.split()[1]) for x in out.splitlines())
    assert untrained < 0.6
    assert min(alone, searching) > 0.75  # 0.94 and 0.93 after the updates of the page
    assert names["carry"].obs["state"] is not None
    _, t = names["collector"].step(names["carry"], names["params"])
    assert set(t.obs) == {"observation", "action_mask"}  # no states in the rows


def check_tuning(names, out):
    best, *_ = out.split()
    assert float(best) > 250  # 500 with the numbers of the page
    assert names["curves"].shape == (3, 15)
    assert len(names["study"].trials) == 2 * 4
    assert len(names["host_study"].trials) == 4


def check_gallery(names, out):
    words = out.split()
    wins, draws, losses = (int(words[i]) for i in (1, 7, 13))
    assert wins + draws + losses == 1000
    assert wins > 600
    with Image.open("connect_four.gif") as image:
        assert image.size == (175, 20 + 150)
        num_moves = image.n_frames - 1
        image.seek(num_moves)
        frame = np.asarray(image.convert("RGB")).astype(int)
    colors = frame[20 + 12 :: 25, 12::25].reshape(42, 3)  # centers of the fields
    reds, greens = colors[:, 0] > 150, colors[:, 1] > 150
    num_red, num_yellow = (reds & ~greens).sum(), (reds & greens).sum()
    num_yellow -= (colors.min(-1) > 200).sum()  # empty fields are white
    assert num_red + num_yellow == num_moves >= 7
    assert abs(num_red - num_yellow) <= 1


def check_own_training_step(names, out):
    ppo, dqn = (float(x) for x in re.findall(r"return (\S+) ", out))
    assert ppo > 300
    assert dqn > 60
    assert float(out.split()[-1]) > 60  # the mean return of the host environments


def check_training(names, out):
    *returns, raw, evaluated = out.splitlines()
    returns = [float(line) for line in returns]
    assert len(returns) == 10
    assert "return" in raw
    assert evaluated.endswith(", 100 episodes")
    t = names["t"]
    assert (t.episode_return == t.episode_length).all()  # raw rewards are 1
    assert (t.reward != 1).all()
    assert returns[0] < 30
    assert returns[-1] > 100
    # A new state: the learning rate of the page's state has decayed to 0.
    agent = names["agent"].replace(config=names["config"])
    state = agent.init(jax.random.key(1))
    _, t = agent.collector.collect_steps(state.carry, state.params, num_steps=16)
    learner = state.params, state.opt_state
    args = learner, t, t.extras["value"], jax.random.key(0)
    (params, _), metrics = jax.jit(names["learn"])(*args)
    assert jax.tree.structure(params) == jax.tree.structure(state.params)
    change = jax.tree.map(lambda x, y: abs(x - y).max(), params, state.params)
    assert all(0 < x < 1 for x in jax.tree.leaves(change))
    assert metrics["entropy"].size == 16


each_text = pytest.mark.parametrize("name", TEXTS)
each_with_code = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=MARKS.get(name, ()))
        for name, text in TEXTS.items()
        # The others are in `test_coming_from.py`, `test_recipes.py` and `.ci/run`.
        if blocks(text) and not re.search("coming_from|recipes|README", name)
    ],
)


@pytest.mark.slow
@each_with_code
def test_code_of_a_page_runs(name, request, capsys, tmp_path, monkeypatch):
    if name not in OPTIMIZED:
        quick = "quick_training" if name in TRAINED else "quick_compile"
        request.getfixturevalue(quick)
    if pathlib.Path(name).stem in KEYS_TWICE:
        request.getfixturevalue("key_reuse")
    if name == "docs/agents.md":  # JaxMARL's MPE adds arrays of different ranks
        request.getfixturevalue("rank_promotion")
    pytest.importorskip(NEEDED.get(name, "jax"))
    monkeypatch.chdir(tmp_path)  # some of it writes files
    for logger in LOGGERS:
        monkeypatch.setitem(sys.modules, logger, mock.MagicMock())
    code = program(TEXTS[name])
    for line in SMALLER.get(name, ()):
        code = inject(code, line)
    names = run(name, code)
    out = capsys.readouterr().out
    check = globals()[f"check_{pathlib.Path(name).stem.lower()}"]  # of the same name
    check(names, out.replace(MARK, ""))
    if name != "docs/accelerators.md":  # the report of another version of jax
        check_printed(TEXTS[name], out, TOLERANCES.get(name, math.inf))


def test_check_printed_compares_words_and_numbers():
    page = "```python\nprint(...)\n```\n\n```text\n{}```\n"
    shown = page.format("[1. 2.] of 3\n 10 steps, 2,000 steps/s\n")
    check_printed(shown, "[1. 2.] of 3\n 10 steps, 2,000 steps/s\n", 0.0)
    check_printed(shown, "[1. 2.1] of 3\n 10 steps, 17 steps/s\n", 0.1)
    check_printed(shown, "[ nan\n 20. 3.] of 4\n 10 steps, 17 steps/s\n", math.inf)
    check_printed("```python\nprint(1)\n```\n", "1\n", 0.0)  # shows nothing
    for tolerance in (0.0, 0.01, math.inf):
        with pytest.raises(AssertionError):
            check_printed(shown, "[1. 2.1] to 3\n 10 steps, 2 steps/s\n", tolerance)
    with pytest.raises(AssertionError):
        check_printed(shown, "[1. 2.1] of 3\n 10 steps, 2,000 steps/s\n", 0.01)


def test_readme_and_its_first_example_are_short():
    assert len(README.splitlines()) <= 150
    assert len(re.findall(r"^.*\S", blocks(README)[0], re.MULTILINE)) <= 25


def linked(name: str) -> set[str]:
    """Returns the files of the repository that a page links to."""
    folder = (ROOT / name).parent
    paths = re.findall(r"\]\(([^)#\s]+)", TEXTS[name])
    files = ((folder / path).resolve() for path in paths if "://" not in path)
    return {file.relative_to(ROOT).as_posix() for file in files}


def test_every_page_and_notebook_is_two_links_from_the_readme():
    first = linked("README.md")
    reachable = first.union(*(linked(name) for name in first & TEXTS.keys()))
    for pattern in ("docs/*.md", "docs/concepts/*.md", "notebooks/*.ipynb"):
        paths = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
        assert paths - reachable == set()


def test_every_page_and_notebook_is_in_the_navigation_of_the_site():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]
    notebooks = [f"notebooks/{x.stem}.md" for x in ROOT.glob("notebooks/*.ipynb")]
    # The first page is the README.
    want = ["index.md", *pages, *notebooks]
    assert sorted(re.findall(r"\S+\.md", nav)) == sorted(want)


def test_first_command_of_the_readme_runs_the_agent_of_its_program():
    command = re.search(r"^python3 -m venv .*$", README, re.M).group()
    *_, algorithm, env_id = command.split()
    program = blocks(README)[0]
    assert f"from rollout.recipes.{algorithm} import PPO" in program
    assert f'"{env_id}"' in program


def test_continuous_integration_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    for marker in ("<!-- clone -->", "<!-- ci: test -->"):
        assert README.count(marker) == 1
        assert marker in script


def test_packages_export_few_names():
    limits = {"rollout": 30, "rollout.envs": 25, "rollout.buffers": 5}
    for package, number in limits.items():
        names = importlib.import_module(package).__all__
        message = (
            f"`{package}` exports {len(names)} names of {number}: leave one in its part"
        )
        assert len(names) <= number, message


def test_tests_of_the_features_exist():
    links = re.findall(r"\[`(test_\w+)`\]\(\.\./(\S+)\)", TEXTS["docs/features.md"])
    assert len(links) > 50
    for name, file in links:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), name


def test_wrappers_of_the_page_exist():
    names = re.findall(r"`([A-Z]\w+)\(", TEXTS["docs/wrappers.md"])
    assert len(names) >= 8
    assert [name for name in names if not hasattr(envs, name)] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site. `.ci/run` has built it before."""
    if folder := os.environ.get("BUILT_SITE"):
        return pathlib.Path(folder)
    pytest.importorskip("mkdocs")  # the extra `docs`
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.mark.slow
def test_title_of_a_notebook_is_its_heading(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    docs = {doc["location"]: doc for doc in index["docs"]}
    for path in ROOT.glob("notebooks/*.ipynb"):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        page = f"notebooks/{path.stem}/"
        title = first.splitlines()[0].removeprefix("# ")
        assert html.unescape(docs[page]["title"]) == title
        assert "Download" not in docs[page]["text"]
        assert f'href="../{path.name}"' in (site / page / "index.html").read_text()


@pytest.mark.slow
def test_output_of_a_cell_is_one_block(site):
    block = r'<div class="language-text (?:(?!</div>).)*</div>\s*'
    for page in site.glob("notebooks/*/index.html"):
        text = page.read_text()
        assert re.search(block, text, re.DOTALL)
        assert not re.search(2 * block, text, re.DOTALL)


@pytest.mark.slow
def test_api_shows_the_arguments_of_classes(site):
    pages = "".join(x.read_text() for x in site.glob("api/*/index.html"))
    heading = r'<h3 id="([\w.]+)" (?:(?!</h3>).)*</h3>'
    block = r'<div class="\S+ doc-signature .*?>(.*?)</div>'
    signatures = re.findall(rf"{heading}\s*{block}", pages, re.DOTALL)
    texts = {x: html.unescape(re.sub("<.*?>", "", y)) for x, y in signatures}
    for path in paths_of_the_api():
        module, _, name = path.rpartition(".")
        public = getattr(importlib.import_module(module), name)
        if inspect.isclass(public) and issubclass(public, nn.Module):
            continue  # flax adds arguments; the docstring lists the attributes
        if dataclasses.is_dataclass(public) or hasattr(public, "_fields"):
            names = {x for x in inspect.signature(public).parameters if x[0] != "_"}
            assert names == set(re.findall(r"(?<=[(\s])(\w+)(?=: )", texts[path])), path
    assert "bound: str = 'clip'" in texts["rollout.envs.RescaleAction"]


PUBLIC = {
    *("rollout", "rollout.agents", "rollout.buffers", "rollout.envs"),
    *("rollout.envs.host", "rollout.envs.suites", "rollout.envs.wrappers"),
    *("rollout.host", "rollout.inspection"),
}


def exported_as(path: str) -> tuple[str, str]:
    """The package that a name belongs to, or the file of an agent, and the name."""
    inner = re.match(r"rollout\.(?:envs|buffers|recipes\.\w+)(?=\.)", path)
    return inner[0] if inner else "rollout", path.rpartition(".")[2]


def test_every_public_name_is_on_one_page_of_the_api():
    paths = paths_of_the_api()
    for module, _, name in (path.rpartition(".") for path in paths):
        assert hasattr(importlib.import_module(module), name), (module, name)
    names = [exported_as(path) for path in paths]
    assert len(set(names)) == len(names)
    public = {
        exported_as(f"{package}.{name}")
        for package in PUBLIC
        for name in importlib.import_module(package).__all__
    }
    assert public - set(names) == set()


@each_text
def test_links_have_targets(name):
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[name]):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        path = ((ROOT / name).parent / file).resolve() if file else ROOT / name
        assert path.is_file(), link
        if anchor:
            assert anchor in headings(path.relative_to(ROOT).as_posix()), link


@each_text
def test_blank_lines_surround_a_table(name):
    """Text next to a row becomes a row, or the table becomes text."""
    text = re.sub(r"^```.*?^```", "", TEXTS[name], flags=re.DOTALL | re.MULTILINE)
    lines = text.splitlines()
    for line, next_line in itertools.pairwise(lines):
        if line.startswith("|") != next_line.startswith("|"):
            assert not line or not next_line, (line, next_line)


# Search words of users, and pages that must contain them.
SEARCHES = {
    "early stopping": ("recipes/ppo", "coming_from/stable_baselines3"),
    "best model": ("recipes/ppo", "coming_from/stable_baselines3"),
    "custom networks": ("recipes/ppo",),
    "asymmetric critic": ("recipes/ppo",),
    "cnnpolicy": ("recipes/images", "coming_from/stable_baselines3"),
    "privileged observations": ("recipes/robots",),
    "learning rate schedule": ("recipes/ppo",),
    "parameter sharing": ("agents", "recipes/ippo"),
    "tensorboard": ("streaming", "recipes/ppo", "coming_from/stable_baselines3"),
}


@pytest.mark.parametrize("words", SEARCHES)
def test_search_words_are_on_their_pages(words):
    for page in SEARCHES[words]:
        text = " ".join(TEXTS[f"docs/{page}.md"].split()).lower()
        assert words in text, page


@each_text
def test_files_and_names_in_pages_exist(name):
    folders = "benchmarks|docs|notebooks|tests"
    for file in re.findall(rf"`((?:{folders})/[^`\s]+)`", TEXTS[name]):
        assert (ROOT / file).exists(), file
    text = re.sub(r"^::: .*", "", TEXTS[name], flags=re.MULTILINE)  # tested above
    text = re.sub(r"```py\n.*?```", "", text, flags=re.DOTALL)  # of another library
    words = re.findall(r"\b(?:envs|rollout|buffers)(?:\.\w+)+\b", text)
    for dotted in (word for word in words if not word.endswith(".md")):
        value = rollout
        for attribute in dotted.removeprefix("rollout.").split("."):
            if not hasattr(value, attribute):  # a module that its package leaves out
                importlib.import_module(f"{value.__name__}.{attribute}")
            value = getattr(value, attribute)


@pytest.mark.parametrize("package", ["rollout.envs", "rollout", "rollout.buffers"])
def test_api_table_lists_public_names(package):
    _, section = TEXTS["docs/api/index.md"].split(f"\n## {package}\n")
    cells = re.findall(r"^\| (.+?) \| ", section.partition("\n## ")[0], re.MULTILINE)
    named = re.findall(rf"`{package}\.(\w+)`", " ".join(cells))
    assert len(set(named)) == len(named)
    public = set(importlib.import_module(package).__all__)
    assert public <= set(named)
    for module in set(named) - public:
        importlib.import_module(f"{package}.{module}")


def test_page_states_the_number_of_environments():
    count = len(envs.env_ids())
    sentence = f"{count - 1} of the {count} work as they are"
    assert sentence in TEXTS["docs/environments.md"]

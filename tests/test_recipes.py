"""Tests of the programs of the recipe pages."""

import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from compiles import QUICK_FLAGS
from pages import blocks, check_printed, inject, run
from pages import program as program_of_page

import rollout
from rollout.envs.spaces import EnvSpec
from rollout.recipes.ppo import PPO
from rollout.recipes.recurrent_ppo import RecurrentPPO

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "recipes"
PAGES = {page.stem: page.read_text() for page in sorted(FOLDER.glob("*.md"))}
# The pages of these agents include the file.
AGENTS = ("dqn", "ppo", "pqn", "recurrent_ppo", "sac", "td3")
# These pages contain printed results and no curve.
OBSERVATIONS = ("dictionary_observations", "images", "robots")
MAX_LINES, MAX_TEAM_LINES = 75, 90
# Changes for short tests that only run the programs.
RUN_CHANGES = {
    "action_masks": "config = config.replace(num_updates=8, num_epochs=1)",
    "atari": "config, NUM_ENVS = config.replace(num_updates=5), 2",
    "cloning": "config, NUM_EVALUATIONS = config.replace(num_updates=2), 2",
    "ippo": "config = config.replace(num_updates=2)",
    "league": "NUM_ROUNDS, NUM_UPDATES = 2, 2",
    "mujoco_resume": """\
config = config.replace(num_updates=32, num_steps=128, num_minibatches=4); NUM_ENVS = 2
""",
    "recurrent_ppo": "config = config.replace(num_updates=3, learning_rate=0.0)",
    "sac": "config = config.replace(num_updates=2, num_steps=20)",
    "smax": "config = config.replace(num_updates=3)",
    "sweep": """\
config, NUM_SEEDS, RATES = config.replace(num_updates=8), 2, jnp.array([3e-4, 3e-2])""",
    "td3": "config = config.replace(num_updates=2, num_steps=20)",
    "vdn": "NUM_UPDATES = 8",
}
# Changes for tests that train. They reduce the time of programs that take minutes.
TRAINING_CHANGES = {
    "action_masks": "config = config.replace(num_updates=60)",
    # Poles as long as in training, and two, three and four times as long.
    "domain_randomization": "LENGTHS = jnp.array([0.5, 1.0, 1.5, 2.0])",
    "dqn": "NUM_EVALUATIONS, UPDATES_PER_EVALUATION = 2, 60",
    "ippo": "config = config.replace(num_updates=80)",
    "league": "NUM_ROUNDS, NUM_UPDATES = 5, 8",
    "recurrent_ppo": "config = config.replace(num_updates=80)",
    "smax": "config = config.replace(num_updates=24)",
    "sweep": "NUM_SEEDS, RATES = 2, jnp.array([3e-4, 3e-3, 3e-2])",
    "td3": "config = config.replace(num_updates=10)",
    "vdn": "NUM_UPDATES = 480",
}
# Changes for the blocks after the first.
LATER_CHANGES = {
    "domain_randomization": """\
agent = agent.replace(config=config.replace(num_updates=2))"""
}
# These programs train for long: mark `very_slow`. Short tests run most of them.
LONG = ("domain_randomization", "dqn", "ippo", "league", "recurrent_ppo", "smax")
LONG += ("curriculum", "sweep", "td3", "vdn")
BLUE = (31, 119, 180)  # matplotlib's first color


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Changes to a temporary folder and closes all figures."""
    monkeypatch.chdir(tmp_path)
    plt.close("all")
    yield tmp_path
    plt.close("all")


def programs(name: str) -> list[str]:
    """Returns the programs of a page, without the file that it includes."""
    return [x for x in blocks(PAGES[name]) if not x.startswith("--8<--")]


def program(name: str, changes: dict[str, str]) -> str:
    return inject(programs(name)[0], changes[name])


def run_page(name: str, changes: dict[str, str] = TRAINING_CHANGES) -> dict:
    """Runs the code of a page and checks its picture."""
    first, *later_blocks = programs(name)
    first = program(name, changes) if name in changes else first
    later_blocks = [
        inject(x, LATER_CHANGES[name]) if name in LATER_CHANGES else x
        for x in later_blocks
    ]
    names = run(f"{name}.md", first, *later_blocks)
    check_picture(pathlib.Path(f"{name}.png"))
    return names


def check_picture(path: pathlib.Path) -> None:
    """Checks that the picture has a blue curve and labels of the axes."""
    pixels = np.round(255 * plt.imread(path)[..., :3]).astype(int)
    is_blue = (np.abs(pixels - BLUE) < 8).all(axis=-1)
    columns = np.flatnonzero(is_blue.any(axis=0))
    width = pixels.shape[1]
    assert np.ptp(columns) > 0.5 * width
    assert columns.size > 0.25 * width  # another curve may hide a part
    (axes,) = plt.gcf().axes
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    for line in axes.lines:
        x, y = line.get_data()
        assert len(x) > 1
        assert (np.diff(x) > 0).all()
        start = np.isfinite(y).argmax()  # NaN while an `EpisodeWindow` is empty
        assert np.isfinite(y[start:]).all()


def test_every_recipe_has_a_test_and_a_picture():
    untested = {"action_masks", "atari", "cloning", "ppo", *OBSERVATIONS}
    assert PAGES.keys() == untested | CHECKS.keys()
    for name in PAGES.keys() - set(OBSERVATIONS):
        assert f"]({name}.png)" in PAGES[name]
        assert (FOLDER / f"{name}.png").stat().st_size < 100_000


@pytest.mark.parametrize("name", AGENTS)
def test_page_of_an_agent_includes_its_file(name):
    path = f"rollout/recipes/{name}.py"
    assert (ROOT / path).is_file()
    assert PAGES[name].endswith(f'```{{.python}}\n--8<-- "{path}"\n```\n')
    assert f"](../../{path})" in PAGES[name]


@pytest.mark.very_slow
@pytest.mark.usefixtures("quick_compile")
def test_programs_of_ppo_run(folder, capsys):
    changed = "config=agent.config.replace(num_updates=2)"
    line = f"agent = agent.replace({changed})"
    run("ppo.md", *(inject(x, line) for x in programs("ppo")))
    assert capsys.readouterr().out.splitlines()[-1] in ("0", "1")
    assert pathlib.Path("runs/cartpole/curve.png").is_file()


@pytest.mark.very_slow
@pytest.mark.usefixtures("quick_training")
def test_programs_of_ppo_learn(folder, capsys):
    run("ppo.md", *programs("ppo"))
    cartpole, pendulum, *_, action = capsys.readouterr().out.splitlines()
    assert float(cartpole.split()[1]) > 450
    assert float(pendulum.split()[1]) > -250
    assert action in ("0", "1")
    assert pathlib.Path("runs/cartpole/curve.png").is_file()


@pytest.mark.very_slow
@pytest.mark.usefixtures("quick_training")
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observation_programs_run(name, folder, capsys):
    names = run(f"{name}.md", program_of_page(PAGES[name]))
    check_printed(PAGES[name], capsys.readouterr().out, math.inf)
    if name == "images":
        assert names["metrics"]["return_mean"][-1] > 0.5  # -0.5 at random
    if name == "robots":
        assert names["metrics"]["return_mean"][-1] > 28  # 16 at random
        assert names["action"].shape == (6,)


@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"ppo"}))
def test_program_is_short(name):
    program = programs(name)[0]
    is_team = "rollout.agents" in program or "import agents" in program
    assert len(program.splitlines()) <= (MAX_TEAM_LINES if is_team else MAX_LINES)
    assert max(map(len, program.splitlines())) <= 88


def make_mappo(code: str) -> str:
    """Replaces `transform_obs` in the program of IPPO as the page describes."""
    pattern = r"^def transform_obs.*?\n\n"
    (ippo,) = re.findall(pattern, code, re.MULTILINE | re.DOTALL)
    (mappo,) = blocks(PAGES["ippo"], "py")
    assert mappo.startswith("def transform_obs")
    return code.replace(ippo, f"{mappo}\n")


# The bounds of returns leave room for the rounding of other processors.
CHECKS = {
    # The agent with a curriculum reaches the goal, and the agent without does not.
    "curriculum": lambda names: (
        [line.get_ydata()[-1] > 70 for line in plt.gca().lines] == [True, False]
    ),
    "domain_randomization": lambda names: (
        names["returns"]["0.5"][0] > 400
        and names["returns"]["0.5"][3] < 100
        and names["returns"]["0.25 to 2"].min() > 400
    ),
    "dqn": lambda names: names["returns"][-1] > 5,  # below 1 at random
    "ippo": lambda names: names["returns"][-1] > -70,
    "league": lambda names: (
        names["won"][-1] > 0.7
        and names["lost"][-1] < 0.2
        and names["stats"].num_episodes == 1000
    ),
    "mujoco_resume": lambda names: (
        names["stream"].steps == names["steps"][-1] == 200_704
        and names["returns"][-1] > 200
    ),
    # The return drops again after it has reached 500; rounding decides when.
    "pqn": lambda names: np.nanmax(names["returns"]) > 400,
    "recurrent_ppo": lambda names: names["returns"][-1] > 200,
    "sac": lambda names: max(names["returns"]) > 900,
    "smax": lambda names: names["returns"][-1] > 0.25,  # 0 at random
    "td3": lambda names: max(names["returns"]) > -250,
    "vdn": lambda names: names["returns"][-1] > -70,
    # The best rate solves the task in each of the seeds; the lowest is too low.
    "sweep": lambda names: (
        names["returns"][:, :, -1].min(axis=1).max() > 400
        and names["returns"][0, :, -1].mean() < 400
    ),
}


def check_domain_randomization(names):
    """Each episode samples the length of the pole."""
    env = rollout.envs.vectorize(names["AnyPole"](0.25, 2.0), 8)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry = collector.init(jax.random.key(0))
    old, _ = carry.env_state
    carry, t = collector.collect_steps(carry, None, 24)
    new, _ = carry.env_state
    assert ((old != new) == t.done.any(axis=0)).all()
    assert t.done.any()
    assert np.unique(new).size == 8
    assert ((new >= 0.25) & (new <= 2.0)).all()


def check_ippo(names, num_inputs=18):
    critic = names["state"].params["params"]["Dense_3"]["kernel"]
    assert critic.shape == (num_inputs, 64)


def check_recurrent_ppo(names):
    """Probabilities do not change if the learning rate is 0."""
    agent, config = names["agent"], names["config"].replace(learning_rate=0.0)
    agent = agent.replace(config=config)
    check_replay(jax.jit(agent.update)(names["state"])[1])


def check_replay(metrics):
    """The replay has the probabilities of the collection up to rounding."""
    np.testing.assert_allclose(metrics["kl"], 0, atol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction"], 0)


def check_sweep(names):
    """Seeds differ, and learning rates differ after the first update."""
    returns = np.asarray(names["returns"])
    assert returns.shape == (3, 2, 60)
    assert (returns[:, 0] != returns[:, 1]).any()
    assert (returns[:, :, 0] == returns[:1, :, 0]).all()
    assert (returns[1:, :, 2] != returns[:1, :, 2]).any()
    assert ((returns > 8) & (returns <= 500)).all()


# Packages of a page, and fixtures that disable checks of JAX. Some packages promote
# ranks. The key checker reports keys of a nested scan, and the programs of `cloning`
# evaluate on the same episodes.
REQUIRED = {
    "cloning": ("jax", "key_reuse"),
    "ippo": ("jaxmarl", "rank_promotion"),
    "league": ("pgx",),
    "mujoco_resume": ("mujoco",),
    "sac": ("brax", "key_reuse", "rank_promotion"),
    "smax": ("jaxmarl", "rank_promotion"),
    "td3": ("jax", "key_reuse"),
    "vdn": ("jaxmarl", "rank_promotion"),
}


@pytest.fixture
def page_requirements(name, request):
    """Skips a page without its package and disables checks of JAX for it."""
    package, *fixtures = REQUIRED.get(name, ("jax",))
    pytest.importorskip(package)
    for fixture in fixtures:
        request.getfixturevalue(fixture)


def marks(name: str) -> list[pytest.MarkDecorator]:
    brax = pytest.mark.filterwarnings("ignore")  # deprecations in brax
    return [brax] * (name == "sac") + [pytest.mark.very_slow] * (name in LONG)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_training", "page_requirements")
@pytest.mark.parametrize("name", [pytest.param(x, marks=marks(x)) for x in CHECKS])
def test_program_learns(name, folder, capsys):
    names = run_page(name)
    assert CHECKS[name](names)
    if "```text" in PAGES[name]:
        check_printed(PAGES[name], capsys.readouterr().out, math.inf)
    if check := globals().get(f"check_{name}"):
        check(names)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile", "page_requirements")
# Tests below run `ippo` and `recurrent_ppo` with the changes that the pages describe.
@pytest.mark.parametrize(
    "name",
    [
        *("cloning", "td3", "vdn"),
        *(
            pytest.param(name, marks=pytest.mark.very_slow)
            for name in ("league", "smax", "sweep")
        ),
    ],
)
def test_program_runs(name, folder):
    assert np.isfinite(run_page(name, RUN_CHANGES).get("returns", 0.0)).all()


@pytest.mark.slow
def test_mappo_runs(folder, quick_compile, rank_promotion):
    pytest.importorskip("jaxmarl")
    code = make_mappo(program("ippo", RUN_CHANGES))
    names = run("mappo", code)
    assert np.isfinite(names["returns"]).all()
    check_ippo(names, 18 + 54)


@pytest.mark.slow
def test_sac_runs_on_a_pendulum(folder, quick_compile, key_reuse):
    """The page describes this environment for users without brax."""
    code = program("sac", RUN_CHANGES)
    robot = '"brax:inverted_pendulum", backend="positional"'
    assert code.count(robot) == 1
    names = run("sac.md", code.replace(robot, '"Pendulum-v1"'))
    assert names["env"].action_space.shape == (1,)
    assert int(names["agent"].buffer.size(names["state"].buffer_state)) == 1_040
    assert list(names["steps"]) == [1_020, 1_040]
    assert np.isfinite(names["returns"]).all()


@pytest.mark.very_slow
@pytest.mark.usefixtures("quick_training")
def test_clone_has_the_return_of_the_expert(folder, key_reuse):
    """`key_reuse` allows all policies to play the same 100 episodes."""
    names = run_page("cloning")
    assert names["best"] > -250
    assert names["returns"][-1] > names["best"] - 50
    assert int(names["buffer"].size(names["data"])) == 16 * 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Gymnasium warns about environments of ALE
def test_atari_life_loss_terminates_only_the_loss(folder):
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    names = run_page("atari", RUN_CHANGES)
    t = jax.device_get(names["t"])
    assert t.obs.shape == (128, 2, 4, 42, 42)
    assert t.obs.dtype == np.uint8
    assert t.info["life_lost"].any()
    # Most of five lost lives do not end the game.
    assert (t.info["life_lost"] & ~t.done).any()
    assert (~t.terminated | t.info["life_lost"]).all()
    metrics = names["metrics"]
    assert np.isfinite([metrics["kl"], metrics["entropy"]]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "min_return"),
    [
        (RUN_CHANGES, 500),
        pytest.param(TRAINING_CHANGES, 1_300, marks=pytest.mark.very_slow),
    ],
)
def test_action_masks_program_takes_valid_actions(
    changes, min_return, folder, request, key_reuse, rank_promotion
):
    """Jumanji needs `key_reuse` and `rank_promotion`."""
    pytest.importorskip("jumanji")
    request.getfixturevalue(
        "quick_compile" if changes is RUN_CHANGES else "quick_training"
    )
    names = run_page("action_masks", changes)
    assert names["returns"][-1] > min_return  # about 1,100 with random moves
    args = names["state"].carry, names["state"].params, 64
    _, t = jax.device_get(names["agent"].collector.collect_steps(*args))
    is_valid = np.take_along_axis(t.obs.action_mask, t.action[..., None], axis=-1)
    assert is_valid.all()
    # The page states that the mask of the last observation is empty.
    assert t.done.any()
    assert not t.next_obs.action_mask[t.done].any()


@pytest.mark.parametrize("agent_class", [PPO, RecurrentPPO])
def test_orthogonal_initializer_is_not_batched(agent_class):
    """Batched QR decompositions may deadlock on few cores."""
    spaces = rollout.envs.Box(-1.0, 1.0, (2,)), rollout.envs.Discrete(2)
    agent, obs = agent_class(EnvSpec(*spaces, num_envs=3)), jnp.zeros((3, 2))
    keys = jax.random.split(jax.random.key(0), 5)
    jaxpr = jax.make_jaxpr(jax.vmap(agent.init_learner, (0, None)))(keys, obs)
    shapes = re.findall(r"f32\[([\d,]+)\] \S+ = qr\[", str(jaxpr))
    assert shapes
    assert all(len(x.split(",")) == 2 for x in shapes)


@pytest.mark.slow
def test_recurrent_ppo_accepts_an_lstm(folder, quick_compile):
    """The page describes this cell."""
    assert '`Config(cell="OptimizedLSTMCell")`' in PAGES["recurrent_ppo"]
    code = program("recurrent_ppo", RUN_CHANGES)
    lstm = 'config = config.replace(cell="OptimizedLSTMCell")'
    names = run("lstm", inject(code, lstm))
    memory = names["state"].carry.policy_state
    assert [x.shape for x in memory] == [(64, 64)] * 2
    assert np.isfinite(names["returns"][-1])
    check_replay(names["metrics"])  # the learning rate is 0


def start_training(folder: pathlib.Path) -> subprocess.Popen:
    paths = str(ROOT), os.environ.get("PYTHONPATH", "")
    packages = os.pathsep.join(paths)
    environ = {**os.environ, "PYTHONPATH": packages, "XLA_FLAGS": QUICK_FLAGS}
    return subprocess.Popen([sys.executable, "train.py"], cwd=folder, env=environ)


def read_lines(path: pathlib.Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Ant-v5", "Humanoid-v5"])
def test_mujoco_wrapper_resumes_with_the_same_bits(env_id):
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("mujoco")
    code, names = programs("mujoco_resume")[0], {"__name__": "train"}
    exec(compile(code, "train.py", "exec"), names)
    old, new = [names["Resumable"](gymnasium.make(env_id)) for _ in range(2)]
    old.reset(seed=3)
    old.action_space.seed(0)
    new.reset(seed=0)
    actions = [old.action_space.sample() for _ in range(12)]
    for action in actions[:4]:
        old.step(action)
    new.load_state({x: np.asarray(y) for x, y in old.save_state().items()})
    for action in actions[4:]:
        (obs, *rest, _), (new_obs, *new_rest, _) = old.step(action), new.step(action)
        np.testing.assert_array_equal(obs, new_obs)
        assert rest == new_rest
    assert new.save_state()["steps"] == 12
    assert old.np_random.random() == new.np_random.random()


@pytest.mark.slow
def test_killed_run_has_the_log_of_an_uninterrupted_run(tmp_path):
    pytest.importorskip("mujoco")
    code = program("mujoco_resume", RUN_CHANGES)
    killed, uninterrupted = tmp_path / "killed", tmp_path / "undisturbed"
    for folder in (killed, uninterrupted):
        folder.mkdir()
        (folder / "train.py").write_text(code)
    process = start_training(killed)
    deadline = time.monotonic() + 300
    # Kill the run after the checkpoint of batch 14, so that there are lines to drop.
    while len(read_lines(killed / "log.csv")) < 17 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    num_written = len(read_lines(killed / "log.csv"))
    assert 17 <= num_written < 32
    (step,) = rollout.checkpoint.steps(killed / "run")
    assert step < 2 * 128 * num_written

    assert start_training(killed).wait() == start_training(uninterrupted).wait() == 0
    steps = [int(line.partition(",")[0]) for line in read_lines(killed / "log.csv")]
    assert steps == list(range(256, 33 * 256, 256))  # no line is repeated or missing
    assert (killed / "log.csv").read_bytes() == (uninterrupted / "log.csv").read_bytes()

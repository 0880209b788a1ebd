"""README and docs tell the truth: their code runs, and what they name exists."""

import importlib
import pathlib
import re

import chex
import jax
import numpy as np
import pytest

import envs

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {"README.md": README} | {f"docs/{p.name}": p.read_text() for p in PAGES}
SLOW_PAGES = (
    "agents buffers devices environments episodes host_environments many_machines "
    "recommendation streaming training"
)
SLOW = [f"docs/{page}.md" for page in SLOW_PAGES.split()]


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(name: str, text: str) -> dict:
    """Runs the code of a page, block by block, in one namespace of its own."""
    names = {}
    for code in blocks(text):
        exec(compile(code, name, "exec"), names)
    return names


def check_readme(names, out):
    example, learnt = out.splitlines()
    num_episodes, mean, longest = example.split()
    assert int(num_episodes) > 100
    assert 10 < float(mean) < float(longest) <= 200
    assert float(learnt) > 150


def check_agents(names, out):
    won, moves = (line.split() for line in out.splitlines())
    assert int(won[0]) > 64 * 64 // 9 - 64  # a game has at most nine moves
    assert -1 < float(won[1]) < 1
    assert names["mine"].mask.any()
    assert names["mine"].reward.shape == (64, 64)
    won_of = dict.fromkeys(range(64))  # the last game that ended, by lane
    rows, returns = jax.device_get((names["mine"], names["returns"]))
    for t, lane in np.argwhere(rows.mask)[::-1]:
        if rows.terminated[t, lane]:
            won_of[lane] = rows.reward[t, lane]
        assert returns[t, lane] == (won_of[lane] or 0)  # 0: it has not ended yet
    assert 3 < float(moves[0]) < 11
    assert int(moves[1]) == 40 * 64
    ids = names["played"].extras["policy_id"]
    assert set(np.unique(ids)) == set(range(5))
    assert ((ids == 0).sum(axis=-1) == 1).all()


def check_buffers(names, out):
    assert out.strip() == f"{64 * 128} (256, 4)"
    assert names["data"].size(names["offline"]) == 3


def check_devices(names, out):
    assert "(None, 'lanes'" in out
    reward = names["trajectory"].reward
    assert reward.sharding.device_set == set(names["devices"])
    assert reward.shape == (128, 64 * len(names["devices"]))
    batch = names["batch"]
    assert batch.experience.obs.sharding.device_set == set(names["devices"])
    np.testing.assert_array_equal(batch.weights, 1.0)


def check_environments(names, out):
    assert out.strip() == "[7 9] ['a' 'b'] [0.5 1. ]"
    np.testing.assert_array_equal(names["shop"].known, [[True, True], [False, True]])
    trajectory = names["trajectory"]
    assert trajectory.reward.shape == (100, 16)
    assert trajectory.terminated.any()
    assert trajectory.next_obs == ()


def check_episodes(names, out):
    mean, low, high = (float(x) for x in out.split())
    assert low < mean < high
    assert names["trajectory"].obs.shape == (200, 64, 4)
    assert (names["episodes"].episode_length <= 200).all()


def check_host_environments(names, out):
    first, steps, *findings, stats = out.splitlines()
    assert int(first.split()[0]) > 50
    assert int(steps) == 16 * 256
    assert findings == [""]  # `probe` found nothing
    assert stats.startswith("FaultStats(faulty_episodes=")
    lost = names["patient"].fault_stats
    assert lost.faulty_episodes == lost.restarts > 0
    rows = jax.device_get(names["rows"])
    assert np.count_nonzero(~rows.mask) == lost.lost_steps
    one = names["collector"].env.num_envs, names["episodes"].finished.size
    assert one == (16, 32)
    assert names["ordered"].mask.sum() == names["served"].mask.sum() == 128
    assert names["target"].shape == (64, 4)


def check_many_machines(names, out):
    assert [line.split()[0] for line in out.splitlines()] == [*"12345678"]
    trajectory = names["batch"].trajectory
    assert len(trajectory.obs.sharding.device_set) == names["num_devices"]
    chex.assert_trees_all_equal(names["mine"], trajectory)  # there is one process
    args = names["training"][0], trajectory
    got, want = names["gradient"](*args), jax.grad(names["loss"])(*args)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)  # sums of 32 * B


def check_recommendation(names, out):
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines[:3]] == ["FB", "NX_0", "NX_10"]
    lengths = [float(line[1]) for line in lines[:3]]
    assert 1 < lengths[0] < 10
    assert lengths[2] == 10
    assert 0 < float(lines[3][0]) <= 1


def check_streaming(names, out):
    """The second run begins where the first one ended, and the third goes on."""
    page = TEXTS["docs/streaming.md"]
    more = page.replace("total_steps=64 * 512", "total_steps=64 * 640")
    assert int(out) == 64 * 512
    assert run("docs/streaming.md", page)["stream"].steps == 64 * 512
    assert run("docs/streaming.md", more)["stream"].steps == 64 * 640


def check_training(names, out):
    training = names["training"]
    for _ in range(10):
        *training, stats = names["ppo_step"](*training)
    assert stats.return_mean > 100


CHECKS = {
    "README.md": check_readme,
    "docs/agents.md": check_agents,
    "docs/buffers.md": check_buffers,
    "docs/devices.md": check_devices,
    "docs/environments.md": check_environments,
    "docs/episodes.md": check_episodes,
    "docs/host_environments.md": check_host_environments,
    "docs/many_machines.md": check_many_machines,
    "docs/recommendation.md": check_recommendation,
    "docs/streaming.md": check_streaming,
    "docs/training.md": check_training,
}

each_text = pytest.mark.parametrize("name", TEXTS)
each_with_code = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, text in TEXTS.items()
        if blocks(text)
    ],
)


@each_with_code
def test_code_runs_block_by_block(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some of it writes files
    names = run(name, TEXTS[name])
    CHECKS[name](names, capsys.readouterr().out)


def test_first_example_is_short():
    lines = blocks(README)[0].splitlines()
    assert len([line for line in lines if line.strip()]) <= 25


def test_continuous_integration_runs_the_command_of_the_readme():
    assert README.count("<!-- ci: test -->\n```bash\n") == 1
    assert "<!-- ci: test -->" in (ROOT / ".ci" / "run").read_text()


def test_readme_is_short():
    assert len(README.splitlines()) <= 220


def test_every_page_and_notebook_is_linked_from_the_readme():
    linked = re.findall(r"\]\(((?:docs|notebooks)/[^)]+)\)", README)
    for folder, kind in (("docs", "md"), ("notebooks", "ipynb")):
        for path in (ROOT / folder).glob(f"*.{kind}"):
            assert linked.count(f"{folder}/{path.name}") == 1, path.name


@each_text
def test_links_lead_to_files(name):
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[name]):
        if not link.startswith(("http://", "https://", "#")):
            path = (ROOT / name).parent / link.partition("#")[0]
            assert path.is_file(), link


@each_text
def test_files_and_names_that_are_mentioned_exist(name):
    for file in re.findall(r"`((?:docs|notebooks|tests)/[^`\s]+)`", TEXTS[name]):
        assert (ROOT / file).exists(), file
    words = re.findall(r"\b(?:envs|rollout|buffers)(?:\.\w+)+\b", TEXTS[name])
    for dotted in (word for word in words if not word.endswith(".md")):
        found, *rest = dotted.split(".")
        found = importlib.import_module(found)
        for attribute in rest:
            assert hasattr(found, attribute), dotted
            found = getattr(found, attribute)


@pytest.mark.parametrize("package", ["envs", "rollout", "buffers"])
def test_tables_of_the_readme_name_what_is_public(package):
    table = re.search(rf"^\| `{package}` \|.*?\n\n", README, re.DOTALL | re.MULTILINE)
    rows = table.group().strip().splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    public = set(importlib.import_module(package).__all__)
    # Names of before, which still work.
    assert named == public - {"Batch"} if package == "rollout" else named == public


def test_number_of_environments_is_that_of_gymnax():
    count = len(envs.env_ids())
    sentence = f"{count - 1} of the {count} work as they are"
    assert sentence in TEXTS["docs/environments.md"]

"""Tests of benchmarks, and of their results in pages."""

import argparse
import dataclasses
import functools
import html
import importlib
import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import pytest

from rollout.cli import train
from rollout.cli.command import make_parser

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
DOCS = ROOT / "docs"


def test_readme_lists_every_script():
    text = (FOLDER / "README.md").read_text()
    scripts = {path.name for path in FOLDER.glob("*.py")}
    assert set(re.findall(r"`(\w+\.py)`", text)) == scripts
    for file in re.findall(r"`((?:docs|tests)/[a-z_/]+\.\w+)`", text):
        assert (ROOT / file).is_file(), file
    # The page lists results that no script reproduces.
    listed = text.partition("## Stored results")[2]
    tables = json.loads((DOCS / "speed.json").read_text())
    stored = [name for name, table in tables.items() if "stored" in table]
    stored += ["`docs/learning.json`", "`docs/teams.json`"]
    assert re.findall(r"^\| ([^|]+?) \|", listed, re.MULTILINE)[1:] == stored


PAGE = """\
# Numbers

```python
x = 3
print("begin")
```

The next block prints two lines:

```python
print(x)
with open("plot.png", "w") as file:
    print("new", file=file)
{last}
```

```text
old
```

![A plot](plot.png)

```text
not printed
```
"""


def regenerate(page: pathlib.Path) -> subprocess.CompletedProcess:
    """Runs `benchmarks/pages.py` for a page."""
    command = [sys.executable, FOLDER / "pages.py", page]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def page(tmp_path):
    (tmp_path / "plot.png").write_text("old\n")
    return tmp_path / "page.md"


@pytest.mark.parametrize("is_new", [False, True])
def test_pages_script_updates_outputs_and_pictures(page, is_new):
    text = PAGE.format(last="print(x + 1)")
    page.write_text(text)
    if is_new:
        (page.parent / "plot.png").unlink()
    assert regenerate(page).returncode == 0
    assert page.read_text() == text.replace("old\n", "3\n4\n")
    assert (page.parent / "plot.png").read_text() == "new\n"


def test_picture_with_data_is_not_changed(page):
    page.write_text(PAGE.format(last="print(x + 1)"))
    (page.parent / "plot.json").touch()  # `charts.py` creates the picture
    assert regenerate(page).returncode == 0
    assert (page.parent / "plot.png").read_text() == "old\n"


def test_page_is_not_changed_if_its_program_fails(page):
    text = PAGE.format(last="raise ValueError(x)")
    page.write_text(text)
    result = regenerate(page)
    assert result.returncode == 1
    assert "ValueError: 3" in result.stderr
    assert result.stderr.endswith(f"programs that failed: {page}\n")
    assert page.read_text() == text
    assert (page.parent / "plot.png").read_text() == "old\n"


@pytest.fixture
def pages(monkeypatch):
    """Imports the script under another name than the module `pages` of the tests."""
    monkeypatch.syspath_prepend(str(FOLDER))
    path = FOLDER / "pages.py"
    spec = importlib.util.spec_from_file_location("benchmarks_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_output_is_not_changed_if_only_speeds_differ(pages):
    text = "```python\nrun()\n```\n\n```text\n1 win, 2,000 steps/s\n```\n"
    assert pages.with_outputs(text, ["1 win, 3 steps/s\n"]) == text
    assert "2 wins, 3 steps/s" in pages.with_outputs(text, ["2 wins, 3 steps/s\n"])


def test_digests_of_pages_and_notebooks_are_current(pages):
    """A digest changes if the program or an output is edited manually."""
    records = json.loads((DOCS / "regenerated.json").read_text())
    paths = *DOCS.rglob("*.md"), *ROOT.glob("notebooks/*.ipynb")
    digests = {x.relative_to(ROOT).as_posix(): pages.digest(x) for x in paths}
    digests = {name: x for name, x in digests.items() if x is not None}
    assert digests == {name: record["digest"] for name, record in records.items()}
    assert len(digests) > 30


def test_every_picture_has_a_command():
    """The README of the benchmarks lists pictures that no program of a page saves."""
    listed = (FOLDER / "README.md").read_text()
    for path in DOCS.rglob("*.png"):
        programs = path.with_suffix(".md"), path.with_suffix(".json")
        name = path.relative_to(ROOT).as_posix()
        assert f"`{name}`" in listed or any(x.exists() for x in programs), name


def test_every_animation_of_the_gallery_has_a_command(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    regenerate = importlib.import_module("regenerate")
    commands = [shlex.split(x) for x in regenerate.steps()["gallery"]]
    assert len(commands) >= 10
    folders, rendered = set(), set()
    for python, _, package, name, *argv in commands:
        assert (python, package) == ("python", "rollout")
        if name == "render":
            options = make_parser().parse_args([name, *argv])
            assert str(options.folder) in folders  # a command before trains the agent
            rendered.add(str(options.file))
            continue
        algorithm, env, *_ = argv
        recipe = importlib.import_module(f"rollout.recipes.{algorithm}")
        agent_class = getattr(recipe, algorithm.upper())
        parser = train.make_parser(agent_class, recipe.Config(), num_envs=1)
        _, unknown = parser.parse_known_args(argv[1:])
        assert unknown == []
        folders.add(f"runs/{algorithm}-{env.replace(':', '-')}".lower())
    page = (DOCS / "gallery.md").read_text()
    shown = set(re.findall(r"\]\((\w+\.gif)\)", page))
    assert {x for x in shown if f'"{x}"' not in page} == {x[5:] for x in rendered}
    readme = (ROOT / "README.md").read_text()
    assert shown == set(re.findall(r'src="docs/(\w+\.gif)"', readme))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("policy", ["random", "mlp"])
def test_kernel_benchmark_runs(policy, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import rollout_speed

    case = rollout_speed.Case("CartPole-v1", 4, policy, num_steps=8)
    row, additional_row = rollout_speed.measure_loops(case, repeats=1)

    speeds = [x for name, x in (row | additional_row).items() if name.endswith("M/s")]
    assert len(speeds) == len(rollout_speed.LOOPS)
    data = json.loads((DOCS / "speed.json").read_text())
    assert list(row) == data["random policy"]["columns"]
    assert list(additional_row) == data["more on random policy"]["columns"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_gymnasium_benchmark_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import host_speed

    monkeypatch.setattr(host_speed, "ROWS", 8)
    task = "2 CartPoles", host_speed.make_cartpole, 2
    rows = list(host_speed.task_rows(*task, repeats=1))

    data = json.loads((DOCS / "speed.json").read_text())
    columns = data["environments that are not JAX"]["columns"]
    loops = [x["loop"] for x in rows]
    assert len(set(loops)) == 4
    assert all(list(x) == columns and all(x.values()) for x in rows)
    # The chart selects rows by their names.
    peers = importlib.import_module("charts").PEERS["Gymnasium: MuJoCo and Atari"]
    assert {x.only for x in peers.values()} == set(loops[2:])


@pytest.mark.very_slow
@pytest.mark.usefixtures("quick_compile")
def test_overhead_benchmark_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import overhead

    small = functools.partial(overhead.of_ppo, "CartPole-v1", 4, num_steps=16)
    seeds = functools.partial(small, num_seeds=2)
    monkeypatch.setattr(overhead, "RECIPES", {"one": small, "two": seeds})
    with jax.debug_key_reuse(False):  # every repeat has the same key
        rows = list(overhead.rows(argparse.Namespace(only=[""], repeats=1)))

    data = json.loads((DOCS / "speed.json").read_text())
    assert [x["recipe"] for x in rows] == ["one", "two"]
    assert all(list(x) == data["overhead"]["columns"] for x in rows)
    assert all(float(x["gradients alone"]) > 0 for x in rows)


@pytest.mark.slow
def test_changed_details_of_ppo_are_options(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import ppo_results

    for detail, change in ppo_results.DETAILS.items():
        names = {x.name for x in dataclasses.fields(ppo_results.load(detail).Config)}
        options = change if isinstance(change, dict) else {}
        assert options.keys() <= {*names, "normalize_rewards"}, detail


@pytest.fixture
def charts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import charts

    return charts


@pytest.fixture
def data(charts):
    return charts.load("speed.json")


def test_tables_are_current(charts):
    """`python benchmarks/tables.py` writes them."""
    tables = importlib.import_module("tables")
    for path, text in tables.written().items():
        assert path.read_text() == text, path
    assert len(tables.SHOWN) <= 20
    seeds = charts.load("recipes/ppo.json")["results"]
    assert all(len(runs) == 5 for runs in seeds.values())


def test_report_keeps_note_and_stored_rows(charts, data, tmp_path):
    harness = importlib.import_module("harness")
    path = tmp_path / "speed.json"
    path.write_text((DOCS / "speed.json").read_text())
    rows = charts.rows_of(data, "trainings")
    columns = data["trainings"]["columns"]
    new = dict.fromkeys(columns, "1")

    harness.report(argparse.Namespace(json=path), "trainings", [new])

    report = json.loads(path.read_text())
    stored = data["trainings"]["stored"]["rows"]
    assert charts.rows_of(report, "trainings") == [new, *rows[-len(stored) :]]
    assert {x: y for x, y in report.items() if x != "trainings"} == {
        x: y for x, y in data.items() if x != "trainings"
    }
    assert report["trainings"]["note"] == data["trainings"]["note"]


def test_speed_chart_contains_the_data(charts, data):
    chart = (DOCS / "speed.svg").read_text()
    shown = html.unescape(" ".join(re.findall(r">([^<>]+)</text>", chart)))
    figure = charts.speeds(data)
    dots = [len(x.get_offsets()) for x in figure.axes[0].collections]
    lines = [x for x in charts.lines(data) if x[1]]
    assert chart.count("<use ") == sum(dots)
    assert len(lines) >= 15
    for name, cells in lines:
        assert name in shown
        assert charts.label(cells) in shown
        assert len(cells) in dots
        low, high = figure.axes[0].get_xlim()
        assert low < min(map(float, cells)) <= max(map(float, cells)) < high


def test_ranges_of_the_speed_page_equal_the_chart(charts, data):
    page = (DOCS / "speed.md").read_text()
    sentences = page.partition("\n1. ")[2].partition("\n| Setting |")[0]
    ends = [set(), set()]
    for peers in charts.PEERS.values():
        for peer in peers.values():
            # The sentences contain times instead of speeds.
            cells = charts.cells(data, peer._replace(is_time=False))
            ends[0].add(min(cells, key=float))
            ends[1].add(max(cells, key=float))
    ranges = re.findall(r"([\d.]+)\s+to\s+([\d.]+)\s+(?:times|of)", sentences)
    assert len(ranges) == 10
    for low, high in ranges:
        assert low in ends[0]
        assert high in ends[1]
    assert "(48.9 times)" in sentences
    assert "48.9" in ends[1]


def test_launch_chart_contains_the_data(charts):
    data = charts.load("accelerators.json")
    assert all(table["note"] for table in data.values())
    chart = (DOCS / "accelerators.svg").read_text()
    chart = re.findall(r">([^<>]+)</text>", chart)
    for name, pairs in charts.launches(data).items():
        assert name in chart
        assert all(f"{sum(pair):g}" in chart for pair in pairs)


@pytest.mark.very_slow  # `regenerate.py` also runs the script
@pytest.mark.usefixtures("quick_compile")
def test_learning_comparison_runs_once_per_seed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    import learning_compared

    tasks = {
        "PPO": ("CartPole-v1", learning_compared.CLASSIC.replace(num_updates=2)),
        "DQN": ("CartPole-v1", learning_compared.DQNSettings(150, learning_starts=500)),
    }
    values = tmp_path / "values.json"
    # PureJaxRL is not installed here.
    command = ["", str(values), "--makers", "ours", "--seeds", "2", "--tasks", *tasks]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(learning_compared, "TASKS", tasks)

    learning_compared.main()
    first = values.read_text()
    learning_compared.main()

    assert values.read_text() == first
    results = json.loads(first)["results"]
    for makers in results.values():
        runs = makers["ours"]
        assert list(runs) == ["0", "1"]
        assert all(8 < x["return"] <= 500 for x in runs.values())
        assert all(x["seconds"] > 0 for x in runs.values())
    charts = importlib.import_module("charts")
    panels = [x for x in charts.learning({"results": results}).axes if x.get_visible()]
    assert [x.get_title() for x in panels] == list(tasks)

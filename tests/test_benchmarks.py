"""Benchmarks run; what pages show of them is what they found."""

import argparse
import dataclasses
import functools
import html
import importlib
import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
DOCS = ROOT / "docs"


def test_readme_of_the_benchmarks_lists_every_script():
    text = (FOLDER / "README.md").read_text()
    scripts = {path.name for path in FOLDER.glob("*.py")}
    assert set(re.findall(r"`(\w+\.py)`", text)) == scripts
    for file in re.findall(r"`((?:docs|tests)/[a-z_/]+\.\w+)`", text):
        assert (ROOT / file).is_file(), file


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


def test_results_of_a_page_are_those_of_its_program(page):
    text = PAGE.format(last="print(x + 1)")
    page.write_text(text)
    assert regenerate(page).returncode == 0
    assert page.read_text() == text.replace("old\n", "3\n4\n")
    assert (page.parent / "plot.png").read_text() == "new\n"


def test_picture_of_another_script_stays(page):
    page.write_text(PAGE.format(last="print(x + 1)"))
    (page.parent / "plot.json").touch()  # `curves.py` plots it
    assert regenerate(page).returncode == 0
    assert (page.parent / "plot.png").read_text() == "old\n"


def test_page_whose_program_fails_stays(page):
    text = PAGE.format(last="raise ValueError(x)")
    page.write_text(text)
    result = regenerate(page)
    assert result.returncode == 1
    assert "ValueError: 3" in result.stderr
    assert result.stderr.endswith(f"programs that failed: {page}\n")
    assert page.read_text() == text
    assert (page.parent / "plot.png").read_text() == "old\n"


def test_every_picture_of_the_pages_is_made_by_a_command():
    """The README of the benchmarks lists the pictures that no page's program saves."""
    listed = (FOLDER / "README.md").read_text()
    for path in DOCS.rglob("*.png"):
        programs = path.with_suffix(".md"), path.with_suffix(".json")
        name = path.relative_to(ROOT).as_posix()
        assert f"`{name}`" in listed or any(x.exists() for x in programs), name


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("policy", ["random", "mlp"])
def test_every_loop_of_the_kernel_benchmark_runs(policy, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import rollout_speed

    case = rollout_speed.Case("CartPole-v1", 4, policy, num_steps=8)
    row, more = rollout_speed.measure_loops(case, repeats=1)

    speeds = [x for name, x in (row | more).items() if name.endswith("M/s")]
    assert len(speeds) == len(rollout_speed.LOOPS)
    data = json.loads((DOCS / "speed.json").read_text())
    assert list(row) == data["random policy"]["columns"]
    assert list(more) == data["more on random policy"]["columns"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_every_loop_over_environments_of_gymnasium_runs(monkeypatch):
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
    # The chart finds the rows of ours by their names.
    peers = importlib.import_module("speed_page").PEERS["Gymnasium: MuJoCo and Atari"]
    assert {x.only for x in peers.values()} == set(loops[2:])


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_an_update_is_timed_with_its_parts(monkeypatch):
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
def test_every_detail_of_ppo_that_is_changed_is_in_its_file(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import ppo_results

    for detail, change in ppo_results.DETAILS.items():
        names = {x.name for x in dataclasses.fields(ppo_results.load(detail).Config)}
        options = change if isinstance(change, dict) else {}
        assert options.keys() <= {*names, "only"}, detail


@pytest.fixture
def speed_page(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import speed_page

    return speed_page


@pytest.fixture
def data(speed_page):
    return json.loads(speed_page.DATA.read_text())


def test_tables_are_those_that_are_made_of_the_data(speed_page, data):
    """`python benchmarks/tables.py` writes them."""
    tables = importlib.import_module("tables")
    for path, text in tables.written().items():
        assert path.read_text() == text, path
    assert len(speed_page.SHOWN) <= 20
    assert speed_page.NOTES.keys() <= data.keys()
    seeds = json.loads((DOCS / "recipes" / "ppo.json").read_text())
    assert all(len(runs) == 5 for runs in seeds.values())


def test_chart_has_the_lines_and_the_ranges_of_the_data(speed_page, data):
    chart = speed_page.CHART.read_text()
    shown = html.unescape(" ".join(re.findall(r">([^<>]+)</text>", chart)))
    figure = speed_page.draw(data)
    dots = [len(x.get_offsets()) for x in figure.axes[0].collections]
    lines = [x for x in speed_page.lines(data) if x[1]]
    assert chart.count("<use ") == sum(dots)
    assert len(lines) >= 15
    for name, cells in lines:
        assert name in shown
        assert speed_page.label(cells) in shown
        assert len(cells) in dots
        low, high = figure.axes[0].get_xlim()
        assert low < min(map(float, cells)) <= max(map(float, cells)) < high


def test_ranges_in_the_sentences_of_the_speed_page_are_those_of_the_chart(
    speed_page, data
):
    page = speed_page.PAGE.read_text()
    sentences = page.partition("\n1. ")[2].partition("\n| Setting |")[0]
    ends = [set(), set()]
    for peers in speed_page.PEERS.values():
        for peer in peers.values():
            # The sentences give times as times.
            cells = speed_page.cells(data, peer._replace(is_time=False)) or ["1"]
            ends[0].add(min(cells, key=float))
            ends[1].add(max(cells, key=float))
    ranges = re.findall(r"([\d.]+)\s+to\s+([\d.]+)(?: times|\s+of)", sentences)
    assert len(ranges) == 8
    for low, high in ranges:
        assert low in ends[0]
        assert high in ends[1]
    assert "(48.9 times)" in sentences
    assert "48.9" in ends[1]


def test_chart_of_launches_is_that_of_its_data(speed_page):
    page = importlib.import_module("accelerators_page")
    data = json.loads(page.DATA.read_text())
    assert page.NOTES.keys() == data.keys()
    chart = re.findall(r">([^<>]+)</text>", page.CHART.read_text())
    for name, pairs in page.launches(data).items():
        assert name in chart
        assert all(f"{sum(pair):g}" in chart for pair in pairs)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_comparison_of_learning_runs_once_per_seed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    import learning_compared

    tasks = {
        "PPO": ("CartPole-v1", learning_compared.CLASSIC.replace(num_updates=2)),
        "DQN": ("CartPole-v1", learning_compared.DQNSettings(150, learning_starts=500)),
    }
    values, plot = tmp_path / "values.json", tmp_path / "plot.png"
    # The others are not installed here.
    command = ["", str(values), "--makers", "ours", "--plot", str(plot)]
    command += ["--seeds", "2", "--tasks", *tasks]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(learning_compared, "TASKS", tasks)

    learning_compared.main()
    first = values.read_text()
    learning_compared.main()

    assert values.read_text() == first
    for found in json.loads(first)["results"].values():
        returns, seconds = found["ours"]["returns"], found["ours"]["seconds"]
        assert list(returns) == list(seconds) == ["0", "1"]
        assert all(8 < x <= 500 for x in returns.values())
        assert all(x > 0 for x in seconds.values())
    assert plot.read_bytes().startswith(b"\x89PNG")

"""Benchmarks run; what pages show of them is what they found."""

import html
import importlib
import json
import pathlib
import re
import sys

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


@pytest.mark.slow
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


@pytest.fixture
def speed_page(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import speed_page

    return speed_page


@pytest.fixture
def data(speed_page):
    return json.loads(speed_page.DATA.read_text())


def test_tables_of_the_speed_page_are_those_of_its_data(speed_page, data):
    page = speed_page.PAGE.read_text()
    assert speed_page.write_table(page, data) == page
    assert len(speed_page.SHOWN) <= 20
    table = speed_page.table_of(data)
    assert all(f"| {row.setting} |" in table for row in speed_page.SHOWN)
    text = speed_page.TABLES.read_text()
    assert speed_page.text_of(data, speed_page.NOTES, "docs/speed.md") == text
    assert speed_page.NOTES.keys() <= data.keys()
    assert all(f"\n{name.upper()}\n" in text for name in data)
    data["random policy"]["rows"][2][2] += "0"
    assert speed_page.write_table(page, data) != page
    assert speed_page.text_of(data, speed_page.NOTES, "docs/speed.md") != text


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
    assert len(ranges) == 7
    for low, high in ranges:
        assert low in ends[0]
        assert high in ends[1]
    assert "(48.9 times)" in sentences
    assert "48.9" in ends[1]


def test_accelerator_page_and_its_chart_are_those_of_its_data(speed_page):
    page = importlib.import_module("accelerators_page")
    data, text = json.loads(page.DATA.read_text()), page.PAGE.read_text()
    assert page.write_table(text, data) == text
    full = speed_page.text_of(data, page.NOTES, "docs/accelerators.md")
    assert page.TABLES.read_text() == full
    assert page.NOTES.keys() == data.keys()
    chart = re.findall(r">([^<>]+)</text>", page.CHART.read_text())
    for name, pairs in page.launches(data).items():
        assert name in chart
        assert all(f"{sum(pair):g}" in chart for pair in pairs)
    data["loops, h100"]["rows"][0][3] = "1 + 0 / 13 + 7"
    assert page.write_table(text, data) != text


@pytest.fixture
def learning_compared(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import learning_compared

    return learning_compared


@pytest.mark.slow
def test_comparison_of_learning_runs_once_per_seed(
    learning_compared, monkeypatch, tmp_path
):
    tasks = {
        "PPO": learning_compared.PPO("CartPole-v1", 2),
        "DQN": learning_compared.DQN("CartPole-v1", 60, learning_starts=100),
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


def test_tables_of_the_learning_page_are_those_of_its_values(learning_compared):
    page = (DOCS / "learning.md").read_text()
    results, more = (
        json.loads((DOCS / name).read_text())["results"]
        for name in ("learning.json", "learning_more_seeds.json")
    )
    assert results.keys() <= learning_compared.TASKS.keys()
    assert learning_compared.table(results) in page
    assert learning_compared.table_of_endings(more) in page
    results["PPO CartPole"]["ours"]["returns"]["0"] -= 1
    assert learning_compared.table(results) not in page


def test_tables_of_ppo_are_those_of_its_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import ppo_results

    number = r"-?\d+(?:\.\d+)?"
    page = (DOCS / "recipes" / "ppo.md").read_text().split("## What it reaches")[1]
    page = re.sub(r"(?<=\d),(?=\d)", "", page)
    runs = json.loads((DOCS / "recipes" / "ppo.json").read_text())
    assert all(len(x) == 5 for x in runs.values())

    def columns(name):
        line, *_ = re.findall(rf"^\| {re.escape(name)}(?: .*|,.*)$", page, re.MULTILINE)
        return [x.strip() for x in line.split("|")[2:-1]]

    def check(cell, name):
        """A mean over seeds, and half of its interval, as precise as the page is."""
        found = re.findall(
            number, ppo_results.cell(runs[name], "return").replace(",", "")
        )
        for text, value in zip(re.findall(number, cell), found, strict=True):
            digits = len(text.partition(".")[2])
            assert abs(float(text) - float(value)) <= 0.5 * 10**-digits + 0.05, name

    for name, settings in ppo_results.TASKS.items():
        steps, ours, reference, seconds = columns(name)
        config = ppo_results.load().Config(**settings)
        assert int(steps) == config.num_updates * config.num_envs * config.num_steps
        check(ours, name)
        if name.startswith("brax:"):
            check(reference, f"PureJaxRL, {name}")
        mean = sum(x["seconds"] for x in runs[name].values()) / 5
        assert abs(float(seconds) - mean) <= 0.5 * 10 ** -len(seconds.partition(".")[2])
    details = [x for x in ppo_results.DETAILS if x != "as it is"]
    for detail in details:
        cells = columns(detail)[:2]
        for cell, task in zip(cells, ("Pendulum-v1", "Breakout-MinAtar"), strict=True):
            name = f"{task}, {detail}"
            assert bool(cell) == (name in runs)
            if cell:
                check(cell, name)


def test_table_of_teams_is_that_of_its_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import teams

    results = json.loads((DOCS / "teams.json").read_text())
    page = (DOCS / "coming_from" / "jaxmarl.md").read_text()
    assert teams.table(results) in page
    results["VDN, spread"]["ours"]["0"]["curve"][-1] -= 20
    assert teams.table(results) not in page

"""The kernel's benchmark runs; the chart of the speed page shows its tables."""

import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).parent / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["random", "mlp"])
def test_every_loop_of_the_kernel_benchmark_runs(policy, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import rollout_speed

    case = rollout_speed.Case("CartPole-v1", 4, policy, "threefry2x32", num_steps=8)
    row = rollout_speed.measure(case, repeats=1)

    assert all(row["steps_per_s"][loop] > 0 for loop in rollout_speed.LOOPS)


@pytest.fixture
def speed_chart(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import speed_chart

    return speed_chart


def test_chart_of_the_speed_page_is_the_one_of_its_tables(speed_chart):
    page, chart = speed_chart.PAGE.read_text(), speed_chart.CHART.read_text()
    assert speed_chart.draw(page) == chart
    assert speed_chart.draw(page.replace("| 6.39 |", "| 6.38 |")) != chart


def test_every_line_of_the_chart_has_dots_that_fit(speed_chart):
    page = speed_chart.PAGE.read_text()
    for peers in speed_chart.PEERS.values():
        for peer in peers:
            cells = speed_chart.settings(page, peer)
            assert cells, peer
            speeds = [float(x.split()[0]) for x in cells]
            ends = speed_chart.LOW, speed_chart.HIGH
            assert ends[0] < min(speeds) <= max(speeds) < ends[1]


def test_ranges_in_the_sentences_of_the_speed_page_are_those_of_the_chart(speed_chart):
    page = speed_chart.PAGE.read_text()
    sentences = page.partition("\n1. ")[2].partition("\nThe chart is drawn")[0]
    ends = [set(), set()]
    for peers in speed_chart.PEERS.values():
        for peer in peers:
            cells = [x.split()[0] for x in speed_chart.settings(page, peer)]
            ends[0].add(min(cells, key=float))
            ends[1].add(max(cells, key=float))
    ranges = re.findall(r"([\d.]+)\s+to\s+([\d.]+)(?: times|\s+of)", sentences)
    assert len(ranges) == 7
    for low, high in ranges:
        assert low in ends[0]
        assert high in ends[1]
    assert "(48.9 times)" in sentences
    assert "48.9" in ends[1]

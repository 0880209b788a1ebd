"""Writes the tables and the chart of `docs/speed.md` from `docs/speed.json`.

Nothing is measured or typed here: the scripts of this folder write the tables with
`--json docs/speed.json`. `PEERS` names, for each line of the chart, the tables and the
columns that it shows, one dot per cell.

    python tests/benchmarks/speed_page.py
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[2] / "docs"
DATA, PAGE, CHART = DOCS / "speed.json", DOCS / "speed.md", DOCS / "speed.svg"

GYMNAX, BARE = "`rollout` / `gymnax loop`", "`rollout` / `bare loop`"
RANDOM = ("random policy", "jax 0.11", "one flag of XLA")
HOST, PLAIN = ("environments that are not JAX",), ("speed / plain loop",)
LIBRARY = ("`HostCollector`, same environments / library",)
LIBRARY += ("`HostCollector`, one array / library",)


class Peer(NamedTuple):
    """A line of the chart: which cells it shows."""

    tables: tuple[str, ...]
    columns: tuple[str, ...]
    # Only rows in which some cell begins with this.
    only: str = ""
    # The cells are our time over the peer's, so their inverses are speeds.
    is_time: bool = False


PEERS = {
    "Gymnasium: MuJoCo and Atari": {
        "plain loop, in this process": Peer(
            HOST, PLAIN, only="`from_gymnasium`, in this process"
        ),
        "plain loop, with two workers": Peer(
            HOST, PLAIN, only="`workers`, two processes"
        ),
        "AsyncVectorEnv, with two workers": Peer(
            HOST, ("speed / `AsyncVectorEnv`",), only="`workers`, two processes"
        ),
    },
    "Gymnasium and EnvPool: 16 CartPoles": {
        "plain loop that stores nothing": Peer(HOST, PLAIN, only="`HostCollector`"),
        **{
            name: Peer(("other libraries",), LIBRARY, only=name)
            for name in ("Stable-Baselines3", "TorchRL", "Tianshou", "RLlib")
        },
        "plain processes, for actors of Ray": Peer(
            ("actors of Ray",), ("actors / processes",)
        ),
    },
    "A whole PPO, on a CPU": {
        "PureJaxRL's script": Peer(
            ("a whole PPO",), ("run, `rollout` / PureJaxRL",), is_time=True
        ),
    },
    "Collecting steps": {
        "gymnax loop, random policy": Peer(RANDOM, (GYMNAX,)),
        "gymnax loop, small network": Peer(("a network",), (GYMNAX,)),
        "the suites' own loops": Peer(
            ("suites",), ("`rollout` / the suite's own loop",)
        ),
        "JaxMARL's loop": Peer(("several agents",), ("`rollout` / JaxMARL's loop",)),
        "bare loop, without resets": Peer((*RANDOM, "a network"), (BARE,)),
        "bare loop, for a Stream": Peer(
            ("streams",), ("time, first / second",), only="stream", is_time=True
        ),
    },
    "Whole episodes": {
        "gymnax's RolloutWrapper": Peer(
            ("whole episodes",), ("speed, `rollout` / that", "speed, `rollout` / this")
        ),
    },
    "Recommendation": {
        "plain loop in NumPy": Peer(("recommendation",), ("`rollout` / `plain loop`",)),
        "EasyRL4Rec": Peer(("recommendation",), ("`rollout` / EasyRL4Rec",)),
    },
    "Replay buffers": {
        "flashbax, flat": Peer(("buffers",), ("flashbax `flat` / ours",)),
        "flashbax, prioritised": Peer(("prioritised buffers",), ("flashbax / ours",)),
    },
    "Two devices": {
        "shard_map by hand": Peer(
            ("several devices",), ("`rollout` / `shard_map` by hand",)
        ),
    },
}


def write_tables(page: str, data: dict[str, Any]) -> str:
    """Replaces the tables of a page, which stand there in the order of the data."""
    tables = iter(data.values())

    def write(match: re.Match) -> str:
        table = next(tables, None)
        if table is None:  # those below are not measured
            return match[0]
        head = [cell.strip() for cell in match[0].partition("|\n")[0].split("|")[1:]]
        if head != table["columns"]:
            raise ValueError(f"the page has {head}, got {table['columns']}")
        rows = table["columns"], ["---"] * len(table["columns"]), *table["rows"]
        lines = (
            "|".join(["", *(f" {x} " if x else " " for x in row), "\n"]) for row in rows
        )
        return "".join(lines).replace(" --- ", "---")

    return re.sub(r"(?:^\|.*\n)+", write, page, flags=re.MULTILINE)


def cells(data: dict[str, Any], peer: Peer) -> list[str]:
    """The numbers that a line of the chart shows, as ratios of speeds."""
    found = []
    for table in (data[name] for name in peer.tables):
        for row in (dict(zip(table["columns"], x, strict=True)) for x in table["rows"]):
            if any(cell.startswith(peer.only) for cell in row.values()):
                shown = (row[x].split() for x in peer.columns if row.get(x))
                found += [x[0] for x in shown]
    return [f"{1 / float(x):.2f}" for x in found] if peer.is_time else found


def lines(data: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The lines of the chart with their cells, below their group, which has none."""
    every = []
    for group, peers in PEERS.items():
        found = [(name, cells(data, peer)) for name, peer in peers.items()]
        measured = [line for line in found if line[1]]
        every += [(group, []), *measured] if measured else []
    return every


def label(found: list[str]) -> str:
    """The range of a line of the chart."""
    ends = min(found, key=float), max(found, key=float)
    return " – ".join(dict.fromkeys(ends))


def draw(data: dict[str, Any]) -> Figure:
    """Draws the chart, one dot per setting on a logarithmic axis."""
    names, found = zip(*lines(data), strict=True)
    figure = Figure(figsize=(9.0, 0.27 * len(names) + 1), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_xlim(0.5, 700)
    axes.set_ylim(len(names) - 0.5, -0.7)
    axes.set_title("Speed of rollout / speed of the peer, one dot per setting")
    axes.axvspan(0.5, 1, color="#fdf0e7", zorder=0)
    axes.axvline(1, color="#1f2933", linewidth=1)
    ticks = [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color="#dde3e9")
    axes.set_axisbelow(True)
    axes.text(0.95, -0.3, "slower", color="#c2410c", ha="right", va="center")
    axes.text(1.05, -0.3, "faster", color="#0b63b5", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    ranges = axes.secondary_yaxis("right")
    ranges.spines[:].set_visible(False)
    texts = [label(x) if x else "" for x in found]
    ranges.set_yticks(range(len(names)), texts, color="#5f6c7b")
    ranges.tick_params(length=0)
    for y, (tick, speeds) in enumerate(zip(axes.get_yticklabels(), found, strict=True)):
        tick.set_fontweight("normal" if speeds else "bold")
        colors = ["#c2410c" if float(x) < 1 else "#0b63b5" for x in speeds]
        axes.scatter(
            [float(x) for x in speeds], [y] * len(speeds), 28, colors, alpha=0.55
        )
    return figure


def main() -> None:
    """Writes both files."""
    data = json.loads(DATA.read_text())
    PAGE.write_text(write_tables(PAGE.read_text(), data))
    # Text stays text, and the same data gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rollout"}):
        draw(data).savefig(CHART, metadata={"Date": None})


if __name__ == "__main__":
    main()

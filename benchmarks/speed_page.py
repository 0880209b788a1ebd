"""Draws the chart of `docs/speed.md` from `docs/speed.json`, and formats its table.

All numbers come from the JSON file: the scripts of this folder write tables with
`--json docs/speed.json`. For each line of the chart, `PEERS` selects tables and
columns; each cell is one dot. `SHOWN` selects the rows of the table on the page, which
`tables.py` writes.

    python benchmarks/speed_page.py
"""

import json
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from harness import line
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
DATA, PAGE, CHART = DOCS / "speed.json", DOCS / "speed.md", DOCS / "speed.svg"

GYMNAX, BARE = "`rollout` / `gymnax loop`", "`rollout` / `bare loop`"
RANDOM = ("random policy", "jax 0.11", "one flag of XLA")
HOST, PLAIN = ("environments that are not JAX",), ("speed / plain loop",)
LIBRARY = ("`HostCollector`, same environments / library",)
LIBRARY += ("`HostCollector`, one array / library",)


class Peer(NamedTuple):
    """The cells of one line of the chart."""

    tables: tuple[str, ...]
    columns: tuple[str, ...]
    # Selects rows in which a cell begins with this prefix.
    only: str = ""
    # Whether cells are ratios of times, rollout / peer. The chart shows the inverse.
    is_time: bool = False


PEERS = {
    "Whole trainings, on a CPU": {
        name.replace("`", ""): Peer(
            ("trainings",), ("CPU time, there / here",), only=name
        )
        for name in (
            "PureJaxRL's `ppo.py`",
            "PureJaxRL's `ppo_continuous_action.py`",
            "PureJaxRL's `ppo_rnn.py`",
            "PureJaxRL's `dqn.py`",
            "rejax",
            "purejaxql's `pqn_gymnax.py`",
            "JaxMARL's `ippo_ff_mpe.py`",
            "JaxMARL's `vdn_rnn.py`",
            "Craftax_Baselines' `ppo.py`",
            "evosax",
        )
    },
    "Gymnasium: MuJoCo and Atari": {
        "plain loop, in this process": Peer(
            HOST, PLAIN, only="`from_gymnasium`, in this process"
        ),
        "plain loop, with two workers": Peer(
            HOST, PLAIN, only="`make_worker_envs`, two processes"
        ),
        "AsyncVectorEnv, with two workers": Peer(
            HOST,
            ("speed / `AsyncVectorEnv`",),
            only="`make_worker_envs`, two processes",
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


class Shown(NamedTuple):
    """A row of the table on the page."""

    setting: str
    peer: str
    table: str
    # First cells of the row of rollout, and of the peer if `their_row` is empty.
    row: tuple[str, ...]
    ours: str  # name of a column, as `theirs` and `ratio`
    theirs: str
    ratio: str
    unit: str
    their_row: tuple[str, ...] = ()


def on_host(
    setting: str,
    peer: str,
    row: tuple[str, ...],
    their_row: tuple[str, ...],
    ratio: str,
) -> Shown:
    """Makes a row in microseconds per row of all environments."""
    cost = "us per row"
    return Shown(setting, peer, *HOST, row, cost, cost, ratio, "us", their_row)


SYNC, ASYNC = "plain, `SyncVectorEnv`", "plain, `AsyncVectorEnv`"
HERE, WORKERS = "`from_gymnasium`, in this process", "`make_worker_envs`, two processes"
CHEETAH, ANT, ATARI = "`HalfCheetah-v5` x 8", "`Ant-v5` x 16", "`ALE/Breakout-v5` x 8"
ENVPOOL = "`CartPole-v1` x 16, EnvPool"
LOOP, PROCESSES = "plain `SyncVectorEnv` loop", "`AsyncVectorEnv`"
PLAIN_LOOP, ASYNC_LOOP = "speed / plain loop", "speed / `AsyncVectorEnv`"
OURS, THEIRS = "`rollout`, M/s", "`gymnax loop`, M/s"
CARTPOLES, STEPS = "16 CartPoles of Gymnasium", ("steps/s", "steps/s")

SHOWN = (
    on_host(
        f"{CHEETAH}, one process", LOOP, (CHEETAH, HERE), (CHEETAH, SYNC), PLAIN_LOOP
    ),
    on_host(
        f"{CHEETAH}, two workers",
        PROCESSES,
        (CHEETAH, WORKERS),
        (CHEETAH, ASYNC),
        ASYNC_LOOP,
    ),
    on_host(f"{ANT}, one process", LOOP, (ANT, HERE), (ANT, SYNC), PLAIN_LOOP),
    on_host(f"{ANT}, two workers", LOOP, (ANT, WORKERS), (ANT, SYNC), PLAIN_LOOP),
    on_host(f"{ANT}, two workers", PROCESSES, (ANT, WORKERS), (ANT, ASYNC), ASYNC_LOOP),
    on_host(f"{ATARI}, two workers", LOOP, (ATARI, WORKERS), (ATARI, SYNC), PLAIN_LOOP),
    on_host(
        "16 CartPoles of EnvPool",
        "plain loop",
        (ENVPOOL, "`HostCollector`"),
        (ENVPOOL, "plain"),
        PLAIN_LOOP,
    ),
    *(
        Shown(
            CARTPOLES,
            peer,
            "other libraries",
            ("`HostCollector`",),
            *STEPS,
            LIBRARY[0],
            "steps/s",
            (peer,),
        )
        for peer in ("Stable-Baselines3", "Tianshou")
    ),
    *(
        Shown(
            f"{env_id}, {table}", "gymnax loop", table, row, OURS, THEIRS, GYMNAX, "M/s"
        )
        for env_id, table, row in (
            ("CartPole", "random policy", ("`CartPole-v1`", "1,024")),
            ("CartPole", "a network", ("`CartPole-v1`", "1,024")),
            ("MinAtar Breakout", "a network", ("`Breakout-MinAtar`", "1,024")),
        )
    ),
    Shown(
        "Craftax Classic",
        "its documented loop (its optimistic resets: 1.2)",
        "suites",
        ("`craftax:",),
        "`rollout`, thousand steps/s",
        "",
        "`rollout` / the suite's own loop",
        "thousand/s",
    ),
    Shown(
        "MPE simple_spread",
        "JaxMARL's loop",
        "several agents",
        ("1,024",),
        "`rollout`, env steps/s",
        "",
        "`rollout` / JaxMARL's loop",
        "steps/s",
    ),
    Shown(
        "1,024 whole CartPole episodes",
        "gymnax's `RolloutWrapper`",
        "whole episodes",
        ("0.10",),
        "`rollout`, ms",
        "`RolloutWrapper`, ms",
        "speed, `rollout` / that",
        "ms",
    ),
    Shown(
        "1,000 items to recommend",
        "EasyRL4Rec",
        "recommendation",
        ("1,000", "1,024"),
        "`rollout`, steps/s",
        "EasyRL4Rec, steps/s",
        "`rollout` / EasyRL4Rec",
        "steps/s",
    ),
    Shown(
        "Replay: add 1,024, sample 256",
        "flashbax `flat`",
        "buffers",
        ("100,000", "1,024"),
        "`stored`, us",
        "flashbax `flat`, us",
        "flashbax `flat` / ours",
        "us",
    ),
    Shown(
        "The same by priority",
        "flashbax `prioritised flat`",
        "prioritised buffers",
        ("100,000", "1,024"),
        "`prioritized`, us",
        "flashbax `prioritised flat`, us",
        "flashbax / ours",
        "us",
    ),
)

TRAININGS = (
    "training",
    "against",
    "seeds",
    "here, CPU ms",
    "there, CPU ms",
    "CPU time, there / here",
    "wall time, there / here",
    "compiling, there / here",
)
OVERHEAD = ("recipe", "update, CPU ms", "steps alone", "gradients alone", "overhead")

# Remarks on tables, for the text file with all rows.
NOTES = {
    "environments that are not JAX": (
        "HostCollector with a network of two layers of 64, 125 rows per call; the "
        "plain loops call the same policy and store nothing. EnvPool 1.2.5, "
        "Gymnasium 1.3.0. AMD EPYC, seven rounds in random order."
    ),
    "other libraries": (
        "16 CartPoles, each in its own environment; RLlib on another day. Intel "
        "Xeon, three rounds."
    ),
    "workers that are slow": (
        "Eight workers whose steps take 5 ms, exponentially distributed; all in "
        "step take 544 steps/s."
    ),
    "actors of Ray": "Ray 2.60 on one machine, five rounds; not over a network.",
    "trainings": (
        "CPU time of an update, medians of runs in turn on one core of the Xeon, which "
        "had other work; a training is one program from a key to all that it returns, "
        "and its beginning is a part of the updates. Settings are those of the peer's "
        "script or of PureJaxRL's; theirs / ours, so higher is faster here. An update "
        "of DQN is a step of all lanes with a gradient step. Eight seeds are one "
        "program under jax.vmap. Compiling includes tracing."
    ),
    "overhead": (
        "CPU time of an update of the recipes with their own settings, of the steps of "
        "its environments alone, of the policy's choices alone, and of its gradient "
        "steps alone. The overhead is what an update takes beyond steps and gradients, "
        "the policy included. One core of the Xeon, which had other work, so it is "
        "good to a few percent of an update."
    ),
    "random policy": (
        "One compiled call of 128 steps of all lanes, in million steps per "
        "second. All loops return obs, action, reward, done, return and length. "
        "The gymnax loop is PureJaxRL's; the bare loop is our step without resets "
        "and statistics."
    ),
    "a network": "The same with a 64x64 tanh actor-critic.",
    "jax 0.11": "The random policy on Python 3.12.1 with jax 0.11.2.",
    "one flag of XLA": (
        "The random policy with XLA_FLAGS=-- "
        "xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=100000 "
        "0000, jax 0.10.2."
    ),
    "where the time goes": (
        "rollout.profile, 128 steps, random policy, every field. The sum exceeds "
        "the whole where XLA fuses parts; recording is the first touch of fresh "
        "memory, and varies most between runs."
    ),
    "whole episodes": (
        "1,024 CartPole episodes of the random policy on 1,024 lanes; "
        "RolloutWrapper plays every environment to the limit of 500 steps."
    ),
    "suites": (
        "256 lanes, 128 steps, random policy, against the loop in each suite's "
        "documentation with its own auto-reset; single runs in random order."
    ),
    "several agents": (
        "MPE simple_spread, random policy, 128 steps, against LogWrapper and "
        "JaxMARL's auto-reset step in a scan. Xeon; rows move by 0.2."
    ),
    "one agent": (
        "An environment treated as one with a single agent, against the plain "
        "kernel; higher is slower."
    ),
    "population": (
        "1,024 agents in 512 lanes, a network of two layers of 64; higher is slower."
    ),
    "recommendation": (
        "A random item that the user has not seen, 64 steps. Memory is that of a "
        "compiled call with a donated carry. Xeon; rounds differ by up to a "
        "factor of two."
    ),
    "buffers": (
        "A step of a compiled scan that adds rows and samples 256, against "
        "flashbax 0.1.3; ours in the ratios is stored, for pixels shared. Eleven "
        "rounds in turn."
    ),
    "prioritised buffers": "The same, each step also updates the priorities.",
    "streams": (
        "1,024 lanes x 128 steps, 16 times as many for prefetch=1; ratios of "
        "times, with the smallest and largest of a round."
    ),
    "several devices": (
        "Two CPU devices on two cores; higher is faster. 25 runs in random order, "
        "mlp 11 and Breakout 7 in a fixed one; rows move by 0.2."
    ),
    "start": (
        "A new process per run, from its first line; the batch is 64 CartPoles, "
        "128 steps. Python 3.12.1, jax 0.11.2, beside other work; seven rounds."
    ),
}


def row_of(data: dict[str, Any], table: str, begin: tuple[str, ...]) -> dict[str, str]:
    """Returns the first row of a table whose cells begin with these prefixes."""
    columns, rows = data[table]["columns"], data[table]["rows"]
    for row in rows:
        if all(x.startswith(y) for x, y in zip(row, begin, strict=False)):
            return dict(zip(columns, row, strict=True))
    raise ValueError(f"`{table}` has no row {begin}")


def table_of(data: dict[str, Any]) -> str:
    """Formats the table of the page in Markdown."""
    lines = ["| Setting | Against | Here | There | Times as fast |", "|---" * 5 + "|"]
    for x in SHOWN:
        ours = row_of(data, x.table, x.row)
        theirs = row_of(data, x.table, x.their_row or x.row)
        ratio = (theirs if x.table == "other libraries" else ours)[x.ratio]
        peer_cell = f"{theirs[x.theirs]} {x.unit}" if x.theirs else ""
        row = (x.setting, x.peer, f"{ours[x.ours]} {x.unit}", peer_cell, ratio)
        lines.append("|".join(["", *(f" {y} " if y else " " for y in row), ""]))
    return "\n".join(lines)


def columns_of(data: dict[str, Any], table: str, columns: tuple[str, ...]) -> str:
    """Formats selected columns of a table, with all rows, in Markdown."""
    names, rows = data[table]["columns"], data[table]["rows"]
    selected = [[row[names.index(x)] for x in columns] for row in rows]
    lines = [line(list(columns)), "|---" * len(columns) + "|"]
    return "\n".join([*lines, *map(line, selected)])


def text_of(data: dict[str, Any], notes: dict[str, str], page: str) -> str:
    """Formats every row of every table in plain text."""
    texts = [f"All rows behind {page}."]
    for name, table in data.items():
        rows = [table["columns"], *table["rows"]]
        rows = [[cell.replace("`", "") for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        note = [textwrap.fill(notes[name], 88), ""] if name in notes else []
        texts.append("\n".join([name.upper(), "", *note, *lines]))
    return "\n\n\n".join(texts) + "\n"


def cells(data: dict[str, Any], peer: Peer) -> list[str]:
    """Returns the numbers of a line of the chart as ratios of speeds."""
    numbers = []
    for table in (data[name] for name in peer.tables):
        for row in (dict(zip(table["columns"], x, strict=True)) for x in table["rows"]):
            if any(cell.startswith(peer.only) for cell in row.values()):
                values = (row[x].split() for x in peer.columns if row.get(x))
                numbers += [x[0] for x in values]
    return [f"{1 / float(x):.2f}" for x in numbers] if peer.is_time else numbers


def lines(data: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Returns the lines of the chart and their cells; group titles have no cells."""
    groups = []
    for group, peers in PEERS.items():
        rows = [(name, cells(data, peer)) for name, peer in peers.items()]
        measured = [line for line in rows if line[1]]
        groups += [(group, []), *measured] if measured else []
    return groups


def label(cells: list[str]) -> str:
    """Formats the range of a line of the chart."""
    ends = min(cells, key=float), max(cells, key=float)
    return " – ".join(dict.fromkeys(ends))


def draw(data: dict[str, Any]) -> Figure:
    """Draws the chart, one dot per setting on a logarithmic axis."""
    names, dots = zip(*lines(data), strict=True)
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
    texts = [label(x) if x else "" for x in dots]
    ranges.set_yticks(range(len(names)), texts, color="#5f6c7b")
    ranges.tick_params(length=0)
    for y, (tick, speeds) in enumerate(zip(axes.get_yticklabels(), dots, strict=True)):
        tick.set_fontweight("normal" if speeds else "bold")
        colors = ["#c2410c" if float(x) < 1 else "#0b63b5" for x in speeds]
        axes.scatter(
            [float(x) for x in speeds], [y] * len(speeds), 28, colors, alpha=0.55
        )
    return figure


def main() -> None:
    """Writes the chart."""
    data = json.loads(DATA.read_text())
    # Keep text as SVG text and make the file a deterministic function of the data.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rollout"}):
        draw(data).savefig(CHART, metadata={"Date": None})


if __name__ == "__main__":
    main()

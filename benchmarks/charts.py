"""Draws the charts and learning curves of the pages from files of results.

    python benchmarks/charts.py                       # all
    python benchmarks/charts.py docs/recipes/sac.png  # one

`CHARTS` lists the pictures with functions of their own. Other pictures in
`docs/recipes` show learning curves: the mean over seeds and its 95 % interval. The file
next to the picture, `NAME.json`, contains `steps`, a list of environment steps, and
`returns`, a list of the same length per seed, with null before the first value.
Alternatively, `lines` maps each label of the legend to `steps` and `returns`. Optional
keys are `title`, `ylabel`, `ylim`, `at` (a level to mark), and `xlabel` and `unit` if
`steps` does not count environment steps.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import learning_compared
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import ppo_results
import teams
from harness import interval
from matplotlib.figure import Figure
from tables import DOCS, HOST, LIBRARIES, load, rows_of

STYLE = DOCS / "curves.mplstyle"
TEAM, WON = "return of the team", "battles won"
COLORS = {"ours": "#0072B2", "purejaxrl": "#D55E00", "rejax": "#009E73"}
BARS = {"in CUDA graphs": ("#0b63b5", "#8d99a6"), "loose": ("#7fb3e6", "#c2410c")}


class Peer(NamedTuple):
    """The cells of one line of the chart of speeds."""

    tables: tuple[str, ...]
    columns: tuple[str, ...]
    # Selects rows in which a cell begins with this prefix.
    only: str = ""
    # Whether cells are ratios of times, rollout / peer. The chart shows the inverse.
    is_time: bool = False


RANDOM = ("random policy", "jax 0.11", "one flag of XLA")
GYMNAX, BARE = ("`rollout` / `gymnax loop`",), ("`rollout` / `bare loop`",)
PLAIN, ASYNC = ("speed / plain loop",), ("speed / `AsyncVectorEnv`",)
WORKERS = "`make_worker_envs`, two processes"
LIBRARY = (
    "`HostCollector`, same environments / library",
    "`HostCollector`, one array / library",
)
EPISODES = ("speed, `rollout` / that", "speed, `rollout` / this")
PEERS = {
    "On an H200": {
        name: Peer(("an H200",), ("PureJaxRL / here",), name)
        for name in ("PureJaxRL's collection loop", "PureJaxRL's ppo.py")
    },
    "Whole trainings, on a CPU": {
        name.replace("`", ""): Peer(("trainings",), ("CPU time, there / here",), name)
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
    }
    | {
        name: Peer(("trainings of peers",), ("training over rollout",), name)
        for name in ("sbx", "Stable-Baselines3")
    },
    "Gymnasium: MuJoCo and Atari": {
        "plain loop, in this process": Peer(
            (HOST,), PLAIN, "`from_gymnasium`, in this process"
        ),
        "plain loop, with two workers": Peer((HOST,), PLAIN, WORKERS),
        "AsyncVectorEnv, with two workers": Peer((HOST,), ASYNC, WORKERS),
    },
    "Gymnasium and EnvPool: 16 CartPoles": {
        "plain loop that stores nothing": Peer((HOST,), PLAIN, "`HostCollector`"),
        **{
            name: Peer((LIBRARIES,), LIBRARY, name)
            for name in ("Stable-Baselines3", "TorchRL", "Tianshou", "RLlib")
        },
        "plain processes, for actors of Ray": Peer(
            ("actors of Ray",), ("actors / processes",)
        ),
    },
    "Collecting steps": {
        "gymnax loop, random policy": Peer(RANDOM, GYMNAX),
        "gymnax loop, small network": Peer(("a network",), GYMNAX),
        "the suites' own loops": Peer(
            ("suites",), ("`rollout` / the suite's own loop",)
        ),
        "JaxMARL's loop": Peer(("several agents",), ("`rollout` / JaxMARL's loop",)),
        "bare loop, without resets": Peer((*RANDOM, "a network"), BARE),
        "bare loop, for a Stream": Peer(
            ("streams",), ("time, first / second",), "stream", is_time=True
        ),
    },
    "Whole episodes": {"gymnax's RolloutWrapper": Peer(("whole episodes",), EPISODES)},
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


def cells(data: dict[str, Any], peer: Peer) -> list[str]:
    """Returns the numbers of a line of the chart as ratios of speeds."""
    numbers = []
    for row in (x for table in peer.tables for x in rows_of(data, table)):
        if any(cell.startswith(peer.only) for cell in row.values()):
            numbers += [row[x].split()[0] for x in peer.columns if row.get(x)]
    return [f"{1 / float(x):.2f}" for x in numbers] if peer.is_time else numbers


def lines(data: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Returns the lines of the chart and their cells; group titles have no cells."""
    groups = []
    for group, peers in PEERS.items():
        rows = [(name, cells(data, peer)) for name, peer in peers.items()]
        groups += [(group, []), *rows]
    return groups


def label(cells: list[str]) -> str:
    """Formats the range of a line of the chart."""
    ends = min(cells, key=float), max(cells, key=float)
    return " – ".join(dict.fromkeys(ends))


def speeds(data: dict[str, Any]) -> Figure:
    """Draws the chart of speeds, one dot per setting on a logarithmic axis."""
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
    format_grid(axes)
    axes.text(0.95, -0.3, "slower", color="#c2410c", ha="right", va="center")
    axes.text(1.05, -0.3, "faster", color="#0b63b5", va="center")
    axes.set_yticks(range(len(names)), names)
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


def launches(data: dict[str, Any]) -> dict[str, list[tuple[float, ...]]]:
    """Returns launches `(in graphs, loose)` of both loops by setting."""
    return {
        f"{row['h100'].strip('`')}, {row['Policy']}": [
            tuple(float(x) for x in cell.split("+"))
            for cell in row["Launches"].split("/")
        ]
        for row in rows_of(data, "loops, h100")
        if row["Lanes"] == "2,048"
    }


def accelerators(data: dict[str, Any]) -> Figure:
    """Plots two stacked bars per setting: launches in CUDA graphs, then loose ones."""
    settings = launches(data)
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    for loop, name in enumerate(("rollout", "PureJaxRL's loop")):
        heights = [y + 0.4 * loop for y in range(len(settings))]
        pairs = [pair[loop] for pair in settings.values()]
        starts = [0.0] * len(pairs)
        for i, group in enumerate(BARS):
            widths = [pair[i] for pair in pairs]
            if any(widths):
                color, text = BARS[group][loop], f"{name}, {group}"
                axes.barh(heights, widths, 0.36, starts, color=color, label=text)
            starts = [x + y for x, y in zip(starts, widths, strict=True)]
        for y, total in zip(heights, starts, strict=True):
            axes.text(total + 0.4, y, f"{total:g}", va="center", fontsize=8)
    axes.set_yticks([y + 0.2 for y in range(len(settings))], list(settings))
    axes.invert_yaxis()
    axes.set_title("Launches per step of 2,048 lanes on an H100")
    format_grid(axes)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.set_xlim(0, 65)
    return figure


def format_grid(axes: Any) -> None:
    """Removes ticks and frame, and draws vertical lines below the data."""
    axes.grid(axis="x", color="#dde3e9")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def plot(
    axes: Any, steps: Any, returns: Any, label: str | None = None, unit: float = 1000
) -> None:
    """Plots one learning curve, with its confidence band from three seeds on."""
    mean, half = interval(returns)
    x = np.asarray(steps) / unit
    (line,) = axes.plot(x, mean, label=label)
    if len(returns) < 3:
        return
    axes.fill_between(
        x, mean - half, mean + half, color=line.get_color(), alpha=0.2, lw=0
    )


def curves(data: dict[str, Any]) -> Figure:
    """Plots the learning curves of a file."""
    figure, axes = plt.subplots()
    for label, line in data.get("lines", {None: data}).items():
        plot(axes, line["steps"], line["returns"], label, data.get("unit", 1000))
    if "at" in data:
        axes.axhline(data["at"], color="#777777", linestyle="--", linewidth=1)
    if "lines" in data:
        axes.legend()
    axes.set_title(data.get("title", ""))
    axes.set_xlabel(data.get("xlabel", "environment steps, thousands"))
    axes.set_ylabel(data.get("ylabel", "mean return"))
    axes.set_ylim(data.get("ylim"))
    return figure


def ppo(data: dict[str, Any]) -> Figure:
    """Plots the learning curves of `ppo.py`, one panel per task."""
    figure, grid = plt.subplots(2, 4, figsize=(12, 5))
    for axes, name in zip(grid.flat, ppo_results.TASKS, strict=False):
        runs = list(data["results"][name].values())
        plot(axes, runs[0]["steps"], [x["curve"] for x in runs])
        axes.set_title(name)
    grid.flat[-1].set_visible(False)
    figure.supxlabel("environment steps, thousands")
    figure.supylabel("mean return of the last 100 episodes")
    return figure


def learning(data: dict[str, Any]) -> Figure:
    """Plots the return of every seed over its CPU seconds, one panel per task."""
    results = data["results"]
    figure = Figure(figsize=(9, 2.4 * -(-len(results) // 3)), layout="constrained")
    grid = figure.subplots(-(-len(results) // 3), 3, squeeze=False)
    for axes, (task, by_maker) in zip(grid.flat, results.items(), strict=False):
        for name, color in COLORS.items():
            if name not in by_maker:
                continue
            runs = by_maker[name].values()
            x, y = ([run[field] for run in runs] for field in ("seconds", "return"))
            axes.plot(x, y, "o", color=color, alpha=0.35)
            (mid_x, half_x), (mid_y, half_y) = interval(x), interval(y)
            label = learning_compared.NAMES[name]
            style = {"color": color, "linewidth": 1.5, "label": label}
            axes.errorbar(mid_x, mid_y, half_y, half_x, "s", markersize=6, **style)
        axes.set_title(task, fontsize=10)
        axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid.flat[len(results) :]:
        axes.set_visible(False)
    figure.supxlabel("CPU seconds of a training", fontsize=10)
    figure.supylabel("mean return of 100 episodes", fontsize=10)
    handles = grid[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, frameon=False)
    return figure


def line_of_team(data: dict[str, Any], task: str, maker: str) -> dict[str, Any]:
    """Returns steps and curves of all seeds, with at most 200 points per curve."""
    runs = data["results"][task][maker].values()
    values = np.asarray([x["curve"] for x in runs], float)
    length = values.shape[1]
    width = max(1, length // 100)  # updates per point of a line
    shape = len(runs), length // width, width
    returns = values[:, : length // width * width].reshape(shape).mean(-1)
    total_steps = teams.TASKS[task][2]
    steps = total_steps / length * width * np.arange(1, shape[1] + 1)
    return {"steps": steps, "returns": returns}


def team_curves(ylabel: str, tasks: dict[str, str], **options: Any) -> Callable:
    """Creates a function that plots the recipe's curves of tasks, by label."""

    def draw(data: dict[str, Any]) -> Figure:
        lines = {x: line_of_team(data, y, "ours") for x, y in tasks.items()}
        return curves({"lines": lines, "ylabel": ylabel, **options})

    return draw


def teams_compared(data: dict[str, Any]) -> Figure:
    """Plots the curves of the recipes and of JaxMARL, one panel per task."""
    tasks = [task for task, makers in data["results"].items() if "theirs" in makers]
    figure, panels = plt.subplots(1, len(tasks), figsize=(13, 3.2))
    for task, axes in zip(tasks, panels, strict=True):
        for name, maker in (("rollout", "ours"), ("JaxMARL", "theirs")):
            plot(axes, **line_of_team(data, task, maker), label=name)
        axes.set(title=task, xlabel="environment steps, thousands")
        axes.set_ylabel(WON if "SMAX" in task else TEAM)
    panels[-1].legend()
    return figure


def pixels(data: dict[str, Any]) -> Figure:
    """Plots the curves of PPO and of DQN from pixels, one panel each."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2))
    for agent, axes in zip(("PPO", "DQN"), panels, strict=True):
        for name, runs in data["results"].items():
            if name.startswith(f"{agent}, "):
                size = min(len(x["curve"]) for x in runs.values())
                curves = [x["curve"][:size] for x in runs.values()]
                steps = runs["0"]["steps"][:size]
                plot(axes, steps, curves, label=name.removeprefix(f"{agent}, "))
        axes.set(title=agent, xlabel="environment steps, thousands")
        axes.set_ylabel("mean return of the last episodes")
    panels[0].legend()
    return figure


class Chart(NamedTuple):
    """A function that draws a picture, its data file, resolution and style."""

    draw: Callable[[Any], Figure]
    data: str
    dpi: int = 110
    style: Any = STYLE


ENDS = {
    "team_transitions": "IPPO, SMAX 3m",
    "agent_transitions": "IPPO, SMAX 3m, agent",
}
IPPO = {"IPPO": "IPPO, spread", "MAPPO": "MAPPO, spread"}
CHARTS = {
    "speed.svg": Chart(speeds, "speed.json", style="default"),
    "accelerators.svg": Chart(accelerators, "accelerators.json", style="default"),
    "learning.png": Chart(learning, "learning.json", dpi=150, style="default"),
    "recipes/ppo.png": Chart(ppo, "recipes/ppo.json", dpi=80),
    "recipes/images.png": Chart(pixels, "pixels.json", dpi=80),
    "recipes/breakout.png": Chart(pixels, "atari.json", dpi=80),
    "recipes/ippo.png": Chart(team_curves(TEAM, IPPO), "teams.json"),
    "recipes/vdn.png": Chart(team_curves(TEAM, {"VDN": "VDN, spread"}), "teams.json"),
    "recipes/smax.png": Chart(team_curves(WON, ENDS, ylim=[0, 1]), "teams.json"),
    "coming_from/jaxmarl.png": Chart(teams_compared, "teams.json", dpi=80),
}


def save(name: str) -> None:
    """Draws one picture of `docs`; learning curves of a recipe are the default."""
    data_name = name.replace(".png", ".json")
    chart = CHARTS.get(name, Chart(curves, data_name))
    # Keep text as SVG text and make the file a deterministic function of the data.
    settings = matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "rollout"}
    )
    metadata = {"Date": None} if name.endswith("svg") else None
    with plt.style.context(chart.style), settings:
        figure = chart.draw(load(chart.data))
        figure.savefig(DOCS / name, dpi=chart.dpi, metadata=metadata)
        plt.close("all")


def main() -> None:
    """Draws all charts, or the given ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pictures", nargs="*", type=Path)
    plt.switch_backend("agg")
    pictures = [x.resolve() for x in parser.parse_args().pictures]
    recipes = [x.with_suffix(".png") for x in sorted(DOCS.glob("recipes/*.json"))]
    for path in pictures or dict.fromkeys([DOCS / x for x in CHARTS] + recipes):
        save(path.relative_to(DOCS).as_posix())


if __name__ == "__main__":
    main()

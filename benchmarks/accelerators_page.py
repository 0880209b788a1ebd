"""Draws the chart of `docs/accelerators.md` from its JSON file, and formats its table.

All numbers come from the JSON file: `accelerators.py --json docs/accelerators.json`
updates it, and `tables.py` writes the table of the page.

    python benchmarks/accelerators_page.py
"""

import json
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from speed_page import DOCS

DATA, CHART = DOCS / "accelerators.json", DOCS / "accelerators.svg"
LANES = "2,048"
COLORS = {"in CUDA graphs": ("#0b63b5", "#8d99a6"), "loose": ("#7fb3e6", "#c2410c")}

NOTES = {
    "loops, h100": (
        "Per step of all lanes, launches in graphs + loose, ours / PureJaxRL's "
        "_env_step with LogWrapper. Both record the same, mlp with value and "
        "log-probability. T = 128, of Breakout at 65,536 lanes 16. No program waits "
        "for the host. jax 0.10.2."
    ),
    "loops, tpu-v5e": "The same, ours / PureJaxRL's.",
    "programs, h100": (
        "A loop 64 x (61 + 0) has 64 rounds, each with 61 launches in CUDA graphs and "
        "none outside; the number of rounds of ? depends on data. Kernel time is XLA's "
        "estimate, without the rounds of ?. PureJaxRL's program also initializes."
    ),
    "number of lanes": (
        "CartPole under the random policy, every field returned, T = 128, per step of "
        "all lanes."
    ),
    "resets": "Per step with 2,048 lanes and random actions.",
}


def rows(data: dict[str, Any], table: str) -> list[dict[str, str]]:
    """Returns the rows of a table whose number of lanes is `LANES`."""
    columns = data[table]["columns"]
    dicts = [dict(zip(columns, row, strict=True)) for row in data[table]["rows"]]
    return [row for row in dicts if row["Lanes"] == LANES]


def table_of(data: dict[str, Any]) -> str:
    """Formats the table of the page in Markdown."""
    head = (
        "| Environment | Policy | H100: launches | us in kernels | TPU v5e: kilocycles"
    )
    lines = [f"{head} |", f"{'|---' * 5}|"]
    tables = rows(data, "loops, h100"), rows(data, "loops, tpu-v5e")
    for gpu, tpu in zip(*tables, strict=True):
        cells = gpu["h100"], gpu["Policy"], gpu["Launches"], gpu["us in kernels"]
        lines.append(f"| {' | '.join([*cells, tpu['Thousand cycles']])} |")
    return "\n".join(lines)


def launches(data: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Returns launches `(in graphs, loose)` of both loops by setting."""
    return {
        f"{row['h100'].strip('`')}, {row['Policy']}": [
            tuple(float(x) for x in cell.split("+"))
            for cell in row["Launches"].split("/")
        ]
        for row in rows(data, "loops, h100")
    }


def draw(data: dict[str, Any]) -> Figure:
    """Plots two stacked bars per setting: launches in CUDA graphs, then loose ones."""
    settings = launches(data)
    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    for loop, name in enumerate(("here", "PureJaxRL's loop")):
        heights = [y + 0.4 * loop for y in range(len(settings))]
        pairs = [pair[loop] for pair in settings.values()]
        starts = [0.0] * len(pairs)
        for i, group in enumerate(COLORS):
            widths = [pair[i] for pair in pairs]
            if any(widths):
                style = {"color": COLORS[group][loop], "label": f"{name}, {group}"}
                axes.barh(heights, widths, 0.36, starts, **style)
            starts = [x + y for x, y in zip(starts, widths, strict=True)]
        for y, total in zip(heights, starts, strict=True):
            axes.text(total + 0.4, y, f"{total:g}", va="center", fontsize=8)
    axes.set_yticks([y + 0.2 for y in range(len(settings))], list(settings))
    axes.invert_yaxis()
    axes.set_title(f"Launches per step of {LANES} lanes on an H100")
    axes.grid(axis="x", color="#dde3e9")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.set_xlim(0, 65)
    return figure


def main() -> None:
    """Writes the chart."""
    data = json.loads(DATA.read_text())
    # Keep text as SVG text and make the file a deterministic function of the data.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rollout"}):
        draw(data).savefig(CHART, metadata={"Date": None})


if __name__ == "__main__":
    main()

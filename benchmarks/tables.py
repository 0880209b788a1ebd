"""Writes the tables of the pages from the files of results in `docs`.

A table follows a comment, `<!-- table: NAME -->`. Text files contain all rows for two
pages. `charts.py` draws the charts.

    python benchmarks/tables.py
"""

import json
import math
import re
import statistics
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import learning_compared
import ppo_results
from harness import interval, line
from recipes import PPOSettings, total_steps

DOCS = Path(__file__).resolve().parents[1] / "docs"
HOST, LIBRARIES = "environments that are not JAX", "other libraries"


class View(NamedTuple):
    """Columns of a table of `speed.json` that the page shows, and their unit."""

    table: str
    ours: str
    theirs: str
    ratio: str
    unit: str


PLAIN = View(HOST, "us per row", "us per row", "speed / plain loop", "us")
ASYNC = PLAIN._replace(ratio="speed / `AsyncVectorEnv`")
OTHERS = View(
    LIBRARIES,
    "steps/s",
    "steps/s",
    "`HostCollector`, same environments / library",
    "steps/s",
)
RANDOM = View(
    "random policy",
    "`rollout`, M/s",
    "`gymnax loop`, M/s",
    "`rollout` / `gymnax loop`",
    "M/s",
)
NETWORK = RANDOM._replace(table="a network")
SUITES = View(
    "suites",
    "`rollout`, thousand steps/s",
    "",
    "`rollout` / the suite's own loop",
    "thousand/s",
)
AGENTS = View(
    "several agents",
    "`rollout`, env steps/s",
    "",
    "`rollout` / JaxMARL's loop",
    "steps/s",
)
EPISODES = View(
    "whole episodes",
    "`rollout`, ms",
    "`RolloutWrapper`, ms",
    "speed, `rollout` / that",
    "ms",
)
ITEMS = View(
    "recommendation",
    "`rollout`, steps/s",
    "EasyRL4Rec, steps/s",
    "`rollout` / EasyRL4Rec",
    "steps/s",
)
BUFFERS = View(
    "buffers", "`stored`, us", "flashbax `flat`, us", "flashbax `flat` / ours", "us"
)
PRIORITIZED = View(
    "prioritised buffers",
    "`prioritized`, us",
    "flashbax `prioritised flat`, us",
    "flashbax / ours",
    "us",
)

SYNC, PROCESSES = "plain, `SyncVectorEnv`", "plain, `AsyncVectorEnv`"
LOCAL, WORKERS = "`from_gymnasium`, in this process", "`make_worker_envs`, two"
CHEETAH, ANT, ATARI = "`HalfCheetah-v5` x 8", "`Ant-v5` x 16", "`ALE/Breakout-v5` x 8"
POOL = "`CartPole-v1` x 16, EnvPool"
SYNC_LOOP, ASYNC_LOOP, PLAIN_LOOP = (
    "plain `SyncVectorEnv` loop",
    "`AsyncVectorEnv`",
    "plain loop",
)
CARTPOLES, BASELINES = "16 CartPoles of Gymnasium", "Stable-Baselines3"
ROW, CARTPOLE = ("100,000", "1,024"), ("`CartPole-v1`", "1,024")
CRAFTAX = "its documented loop (its optimistic resets: 1.2)"
# Setting, peer and view of each row of the page; first cells of the row of this library
# and of the row of the peer, if it is a different one.
SHOWN: tuple[tuple[Any, ...], ...] = (
    (f"{CHEETAH}, one process", SYNC_LOOP, PLAIN, (CHEETAH, LOCAL), (CHEETAH, SYNC)),
    (
        f"{CHEETAH}, two workers",
        ASYNC_LOOP,
        ASYNC,
        (CHEETAH, WORKERS),
        (CHEETAH, PROCESSES),
    ),
    (f"{ANT}, one process", SYNC_LOOP, PLAIN, (ANT, LOCAL), (ANT, SYNC)),
    (f"{ANT}, two workers", SYNC_LOOP, PLAIN, (ANT, WORKERS), (ANT, SYNC)),
    (f"{ANT}, two workers", ASYNC_LOOP, ASYNC, (ANT, WORKERS), (ANT, PROCESSES)),
    (f"{ATARI}, two workers", SYNC_LOOP, PLAIN, (ATARI, WORKERS), (ATARI, SYNC)),
    ("16 CartPoles of EnvPool", PLAIN_LOOP, PLAIN, (POOL, "`Host"), (POOL, "plain")),
    (CARTPOLES, BASELINES, OTHERS, ("`HostCollector`",), (BASELINES,)),
    (CARTPOLES, "Tianshou", OTHERS, ("`HostCollector`",), ("Tianshou",)),
    ("CartPole, random policy", "gymnax loop", RANDOM, CARTPOLE),
    ("CartPole, a network", "gymnax loop", NETWORK, CARTPOLE),
    ("MinAtar Breakout, a network", "gymnax loop", NETWORK, ("`Breakout", "1,024")),
    ("Craftax Classic", CRAFTAX, SUITES, ("`craftax:",)),
    ("MPE simple_spread", "JaxMARL's loop", AGENTS, ("1,024",)),
    ("1,024 whole CartPole episodes", "gymnax's `RolloutWrapper`", EPISODES, ("0.10",)),
    ("1,000 items to recommend", "EasyRL4Rec", ITEMS, ("1,000", "1,024")),
    ("Replay: add 1,024, sample 256", "flashbax `flat`", BUFFERS, ROW),
    ("The same by priority", "flashbax `prioritised flat`", PRIORITIZED, ROW),
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
H200 = "program", "lanes", "here, ms", "PureJaxRL, ms", "PureJaxRL / here"
OVERHEAD = ("recipe", "update, CPU ms", "steps alone", "gradients alone", "overhead")


def load(name: str) -> dict[str, Any]:
    """Loads a file of `docs`."""
    return json.loads((DOCS / name).read_text())


def rows_of(data: dict[str, Any], table: str) -> list[dict[str, str]]:
    """Returns the rows of a table: measured by the scripts, then stored ones."""
    columns, stored = data[table]["columns"], data[table].get("stored", {"rows": []})
    rows = [*data[table].get("rows", []), *stored["rows"]]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def markdown(rows: list[dict[str, str]]) -> str:
    """Formats rows with the same keys as a Markdown table."""
    lines = [line(rows[0]), "|---" * len(rows[0]) + "|"]
    return "\n".join([*lines, *(line(row.values()) for row in rows)])


def select(rows: list[dict[str, str]], columns: tuple[str, ...]) -> str:
    """Formats selected columns of a table."""
    return markdown([{x: row[x] for x in columns} for row in rows])


def find(rows: list[dict[str, str]], begin: tuple[str, ...]) -> dict[str, str]:
    """Returns the first row whose cells begin with these prefixes."""
    for row in rows:
        if all(x.startswith(y) for x, y in zip(row.values(), begin, strict=False)):
            return row
    raise ValueError(f"no row begins with {begin}")


def speed(data: dict[str, Any]) -> str:
    """Formats one row per entry of `SHOWN`."""
    rows = []
    for setting, peer, view, *begins in SHOWN:
        table = rows_of(data, view.table)
        ours, theirs = find(table, begins[0]), find(table, begins[-1])
        ratio = (theirs if view is OTHERS else ours)[view.ratio]
        peer_cell = f"{theirs[view.theirs]} {view.unit}" if view.theirs else ""
        rows.append(
            {
                "Setting": setting,
                "Against": peer,
                "Here": f"{ours[view.ours]} {view.unit}",
                "There": peer_cell,
                "Times as fast": ratio,
            }
        )
    return markdown(rows)


def convolutions(rows: list[dict[str, str]]) -> str:
    """Formats one row per network, computation and number of cores."""
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        name, computation, cores = row["network"], row["computed"], row["cores"]
        first = {"network": name, "computed": computation, "cores": cores}
        location = row["place"]
        cell = cells.setdefault((name, computation, cores), first)
        cell[f"XLA {location}, ms"] = row["XLA, ms"]
        cell[f"`rollout` {location}, ms"] = row["`rollout`, ms"]
        cell[f"`rollout` / XLA {location}"] = row["`rollout` / XLA"]
    return markdown(list(cells.values()))


def start(rows: list[dict[str, str]]) -> str:
    """Formats CPU seconds: one row per program, one column per library and cache."""
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        if not row[""].startswith("first update, "):
            continue
        *name, cache = row[""].split(", ")[1:]
        library = name.pop() if len(name) > 2 else "here"
        column = library if cache == "no cache" else f"{library}, compiled before"
        columns[column] = None
        cells.setdefault(", ".join(name), {})[column] = row["median, CPU s"]
    return markdown(
        [
            {"": name, **{column: row.get(column, "") for column in columns}}
            for name, row in cells.items()
        ]
    )


def launches(data: dict[str, Any]) -> str:
    """Formats the launches and cycles per step of 2,048 lanes."""
    gpus, tpus = (rows_of(data, f"loops, {x}") for x in ("h100", "tpu-v5e"))
    return markdown(
        [
            {
                "Environment": gpu["h100"],
                "Policy": gpu["Policy"],
                "H100: launches": gpu["Launches"],
                "us in kernels": gpu["us in kernels"],
                "TPU v5e: kilocycles": tpu["Thousand cycles"],
            }
            for gpu, tpu in zip(gpus, tpus, strict=True)
            if gpu["Lanes"] == "2,048"
        ]
    )


def origin(table: dict[str, Any]) -> str:
    """Describes when, where and from which commit the rows of a table were measured."""
    texts = []
    if "date" in table:
        texts.append("{date}, commit {commit}: {machine}.".format(**table))
    elif "measured" in table:
        texts.append(table["measured"])
    if "stored" in table:
        texts.append(f"Stored rows: {table['stored']['measured']}")
    return " ".join(texts)


def text(data: dict[str, Any], page: str) -> str:
    """Formats every row of every table in plain text."""
    texts = [f"All rows behind {page}."]
    for name, table in data.items():
        rows = [table["columns"], *(x.values() for x in rows_of(data, name))]
        rows = [[cell.replace("`", "") for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        notes = [table.get("note", ""), origin(table)]
        filled = [x for y in notes if y for x in (textwrap.fill(y, 88), "")]
        texts.append("\n".join([name.upper(), "", *filled, *lines]))
    return "\n\n\n".join(texts) + "\n"


def cell(values: Iterable[float], digits: int = 1) -> str:
    """Formats the mean over seeds, and half of its 95 % interval if it exists."""
    mean, half = (float(x[0]) for x in interval([[x] for x in values]))
    digits = 0 if abs(mean) > 1000 else digits
    text = f"{mean:,.{digits}f}"
    return text if math.isnan(half) else f"{text} ± {half:,.{digits}f}"


def returns(runs: dict[str, Any] | None, digits: int = 1) -> str:
    """Formats the returns of all seeds; empty without runs."""
    return cell([x["return"] for x in runs.values()], digits) if runs else ""


def learning(results: dict[str, Any], first: str, *makers: str) -> str:
    """Formats mean returns: one row per task that all makers have trained.

    Args:
        results: results of `learning_compared.py`.
        first: first column, `"steps"` or `"seeds"`.
        *makers: keys of `learning_compared.NAMES`.
    """
    rows = []
    for task, values in results.items():
        if not set(makers) <= values.keys():
            continue
        steps = total_steps(learning_compared.TASKS[task][1])
        number = steps if first == "steps" else len(values["ours"])
        row = {"": task, first: f"{number:,}"}
        for maker in makers:
            value = returns(values[maker]).replace(" ", "\N{NO-BREAK SPACE}")
            row[learning_compared.NAMES[maker]] = value
        rows.append(row)
    return markdown(rows)


def ppo(results: dict[str, Any]) -> str:
    """Formats the returns of `ppo.py`."""
    rows = []
    for name, settings in ppo_results.TASKS.items():
        peer = results.get(f"PureJaxRL, {name}")
        seconds = statistics.mean(x["seconds"] for x in results[name].values())
        rows.append(
            {
                "": name,
                "steps": f"{total_steps(PPOSettings(**settings)):,}",
                "`ppo.py`": returns(results[name]),
                "reference": ppo_results.REFERENCES.get(name)
                or f"PureJaxRL {returns(peer)}",
                "CPU s": f"{seconds:.{1 if seconds < 10 else 0}f}",
            }
        )
    return markdown(rows)


def details(results: dict[str, Any]) -> str:
    """Formats the returns of `ppo.py` with changed details."""
    rows = []
    for detail, reason in {"nothing": "", **ppo_results.REASONS}.items():
        ending = "" if detail == "nothing" else f", {detail}"
        rows.append(
            {
                "Changed": detail,
                "Pendulum": returns(results.get(f"Pendulum-v1{ending}"), 0),
                "Breakout": returns(results.get(f"Breakout-MinAtar{ending}"), 0),
                "Purpose of the detail": reason,
            }
        )
    return markdown(rows)


def playground(results: dict[str, Any]) -> str:
    """Formats the runs of `playground_ppo.py`."""
    names = {"ours": "`rollout.recipes.ppo`", "brax": "brax's trainer"}
    rows = []
    for task, makers in results.items():
        for maker, name in names.items():
            runs = list(makers[maker].values())
            seconds, compile_seconds = (
                statistics.mean(x[key] for x in runs) for key in ("seconds", "compile")
            )
            rows.append(
                {
                    "": f"{task}, {name}",
                    "seeds": str(len(runs)),
                    "steps": f"{runs[0]['steps']:,}",
                    "return": returns(makers[maker]),
                    "CPU s": f"{seconds:.0f}",
                    "CPU s, compilation": f"{compile_seconds:.0f}",
                }
            )
    return markdown(rows)


def programs(results: dict[str, Any]) -> str:
    """Formats returns and CPU times of the runs of several programs."""
    return markdown(
        [
            {
                "": name,
                "seeds": str(len(runs)),
                "return": returns(runs),
                "CPU s": f"{statistics.mean(x['seconds'] for x in runs.values()):.0f}",
            }
            for name, runs in results.items()
        ]
    )


def devices_learning(results: dict[str, Any]) -> str:
    """Formats the returns of the same settings on one and on several devices."""
    return markdown(
        [
            {
                "": task,
                "seeds": str(len(counts["1"])),
                **{
                    f"return, {count} device{'s' * (count != '1')}": returns(runs)
                    for count, runs in counts.items()
                },
            }
            for task, counts in results.items()
        ]
    )


def final_value(curve: list[float]) -> float:
    """Computes the mean over the last tenth of a curve."""
    return statistics.mean(curve[-len(curve) // 10 :])


def teams(results: dict[str, Any]) -> str:
    """Formats the returns of teams; ratios are recipe / JaxMARL, of medians."""
    names = {"ours": "`rollout`", "theirs": "JaxMARL"}
    ratios = {"CPU time": "s", "memory": "bytes", "compile time": "compile"}
    rows = []
    for task, makers in results.items():
        row = {"": task.replace(", agent", ", `agent_transitions`")}
        for maker, name in names.items():
            ends = [final_value(x["curve"]) for x in makers.get(maker, {}).values()]
            row[name] = cell(ends, 2) if ends else ""
        for name, key in ratios.items():
            medians = [
                statistics.median(x[key] for x in runs.values())
                for runs in makers.values()
            ]
            row[name] = f"{medians[0] / medians[1]:.2f}" if "theirs" in makers else ""
        rows.append(row)
    return markdown(rows)


def written() -> dict[Path, str]:
    """Returns the required text of every file that contains tables."""
    speeds, accelerators = load("speed.json"), load("accelerators.json")
    compared, more = load("learning.json"), load("learning_more_seeds.json")
    ppo_runs = load("recipes/ppo.json")["results"]
    makers = "ours", "limit_is_failure", "purejaxrl"
    tables = {
        "speed": speed(speeds),
        "trainings": select(rows_of(speeds, "trainings"), TRAININGS),
        "convolutions": convolutions(rows_of(speeds, "networks of convolutions")),
        "devices": markdown(rows_of(speeds, "agents on several devices")),
        "devices_learning": devices_learning(load("devices_learning.json")["results"]),
        "overhead": select(rows_of(speeds, "overhead"), OVERHEAD),
        "h200": select(rows_of(speeds, "an H200"), H200),
        "start": start(rows_of(speeds, "start")),
        "peers": markdown(rows_of(speeds, "trainings of peers")),
        "accelerators": launches(accelerators),
        "learning": learning(
            compared["results"], "steps", "ours", "purejaxrl", "rejax"
        ),
        "endings": learning(more["results"], "seeds", *makers),
        "ppo": ppo(ppo_runs),
        "details": details(ppo_runs),
        "pixels": programs(load("pixels.json")["results"]),
        "atari": programs(load("atari.json")["results"]),
        "normalization": programs(load("normalization.json")["results"]),
        "playground": playground(load("playground_ppo.json")["results"]),
        "teams": teams(load("teams.json")["results"]),
    }
    files = {
        DOCS / "speed_tables.txt": text(speeds, "docs/speed.md"),
        DOCS / "accelerators_tables.txt": text(accelerators, "docs/accelerators.md"),
    }
    missing = set(tables)
    # A table ends at a blank line: a line of text right below it would be a row.
    mark = re.compile(r"(<!-- table: (\w+) -->\n\n)(?:\|.*\n)*\n*")
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text()
        if names := {match[2] for match in mark.finditer(page)}:
            files[path] = mark.sub(lambda x: f"{x[1]}{tables[x[2]]}\n\n", page)
            missing -= names
    if missing:
        raise ValueError(f"no page shows {sorted(missing)}")
    return files


def main() -> None:
    """Writes all files that contain tables."""
    for path, content in written().items():
        path.write_text(content)


if __name__ == "__main__":
    main()

"""Times programs in interleaved runs, and writes files of results.

A script yields the rows of a table. `run` prints the rows, and with
`--json docs/speed.json` replaces the table in this file. `complete` adds trainings to
a file. Then `tables.py` and `charts.py` write the pages and the charts.
"""

import argparse
import functools
import json
import os
import platform
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

import rollout
from rollout import envs

ROOT = Path(__file__).resolve().parents[1]
LOOP_FLAG = (
    "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
)
Program = Callable[[], Any]
Name = TypeVar("Name", bound=Hashable)
Table = Callable[[argparse.Namespace], Iterable[dict[str, str]]]


class Timing(NamedTuple):
    """Seconds per call: medians over the repeats, and the time of the first call."""

    wall: float
    cpu: float  # summed over all threads
    first: float  # includes compilation


def measure(
    programs: Mapping[Name, Program], repeats: int, *, calls: int = 1, warmup: int = 1
) -> dict[Name, Timing]:
    """Times programs in interleaved runs, in random order.

    Args:
        programs: programs by name. Each call blocks until its outputs are ready.
        repeats: number of measurements per program.
        calls: consecutive calls per measurement, which is their mean.
        warmup: calls before the measurements. The first call is timed separately.
    """
    first, times = {}, {name: [] for name in programs}
    for name, program in programs.items():
        start = time.perf_counter()
        jax.block_until_ready(program())
        first[name] = time.perf_counter() - start
        for _ in range(warmup - 1):
            jax.block_until_ready(program())
    for _ in range(repeats):
        # Random order: a program may reuse memory that the previous one has freed.
        for name, program in random.sample(list(programs.items()), len(programs)):
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                jax.block_until_ready(program())
            seconds = time.perf_counter() - wall, time.process_time() - cpu
            times[name].append([x / calls for x in seconds])
    timings = {}
    for name, samples in times.items():
        wall, cpu = map(statistics.median, zip(*samples, strict=True))
        timings[name] = Timing(wall, cpu, first[name])
    return timings


def arguments(doc: str | None, repeats: int, **lists: Any) -> argparse.Namespace:
    """Parses `--repeats`, `--json` and options that take a list."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--json", type=Path, help="replace the tables in this file")
    for name, default in lists.items():
        option = f"--{name.replace('_', '-')}"
        item_type = type(default[0])
        parser.add_argument(option, nargs="+", type=item_type, default=list(default))
    args = parser.parse_args()
    print(machine(), flush=True)
    return args


def run(
    doc: str | None, repeats: int, row_fns: Mapping[str, Table], **lists: Any
) -> None:
    """Runs a benchmark script: parses the options and reports its tables.

    Args:
        doc: docstring of the script. The first line is the help text.
        repeats: default of `--repeats`.
        row_fns: for each table, a function that yields its rows, given the options.
        **lists: defaults of list options. `tables` replaces the default of `--tables`,
            which is all tables.
    """
    args = arguments(doc, repeats, **{"tables": tuple(row_fns), **lists})
    for name in args.tables:
        report(args, name, row_fns[name](args))


def lanes(env: Any, num_envs: int, policy: Any = None, **options: Any) -> Any:
    """Creates a collector over lanes; the default policy is the random policy."""
    is_id = isinstance(env, str)
    env = envs.make_vec(env, num_envs) if is_id else envs.vectorize(env, num_envs)
    policy = policy or rollout.random_policy(env.action_space)
    return rollout.Collector(env=env, policy=policy, **options)


def steps(
    collector: rollout.Collector,
    num_steps: int,
    params: Any = None,
    read: Callable[[rollout.Transition], Any] = lambda t: t,
) -> Program:
    """Creates a program that collects from a fixed carry and returns `read(t)`."""

    @jax.jit
    def program(carry: rollout.Carry, params: Any) -> tuple[rollout.Carry, Any]:
        carry, t = collector.collect_steps(carry, params, num_steps)
        return carry, read(t)

    return functools.partial(program, collector.init(jax.random.key(0)), params)


def rows_of(t: rollout.Transition) -> tuple[Any, ...]:
    """Selects the fields that the loops of other libraries also return."""
    flags, totals = (t.terminated, t.truncated), (t.episode_return, t.episode_length)
    return t.obs, t.action, t.reward, *flags, t.next_obs, *totals


def report(
    args: argparse.Namespace, table: str, rows: Iterable[dict[str, str]]
) -> None:
    """Prints rows as they arrive; `--json` replaces the rows of the table.

    The note of the table in the file, and rows that the script does not measure
    (`"stored"`), remain.
    """
    columns: list[str] = []
    cells: list[list[str]] = []
    for row in rows:
        if not columns:
            columns = list(row)
            print(f"\n{table}\n\n{line(columns)}\n{'|---' * len(columns)}|")
        cells.append(list(row.values()))
        print(line(cells[-1]), flush=True)
    if args.json:
        tables = json.loads(args.json.read_text()) if args.json.exists() else {}
        data = {**record(), "columns": columns, "rows": cells}
        tables[table] = {**tables.get(table, {}), **data}
        args.json.write_text(dump(tables))


def complete(
    path: Path,
    runs: Iterable[tuple[tuple[str, ...], Callable[[], dict[str, Any]]]],
    repeat: bool = False,
) -> dict[str, Any]:
    """Adds the missing results to a file, so that an interrupted script resumes.

    Args:
        path: JSON file, saved after every run.
        runs: keys of a result, from the outermost to the innermost dict, and a
            function that computes the result.
        repeat: removes the results of `runs` from the file first.

    Returns:
        All results in the file.
    """
    data = json.loads(path.read_text()) if path.exists() else {}
    results = data.setdefault("results", {})

    def parent(keys: tuple[str, ...]) -> dict[str, Any]:
        inner = results
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        return inner

    runs = list(runs)
    for keys, _ in runs if repeat else ():
        parent(keys).pop(keys[-1], None)
    for keys, run in runs:
        if keys[-1] not in parent(keys):
            parent(keys)[keys[-1]] = run()
            new = record()
            path.write_text(dump({**new, **data, **new}))
    return results


def dump(data: dict[str, Any]) -> str:
    """Formats JSON with innermost lists and objects in one line, such as table rows."""
    text = json.dumps(data, indent=1, ensure_ascii=False)

    def one_line(match: re.Match) -> str:
        return match[1] + re.sub(r"\n *", " ", match[2]) + match[3]

    return re.sub(r"([\[{])\s+([^\[\]{}]*?)\s+([\]}])", one_line, text) + "\n"


def line(cells: Iterable[str]) -> str:
    """Formats one line of a Markdown table."""
    return f"|{'|'.join(f' {x} ' if x else ' ' for x in cells)}|"


def interval(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Computes the mean over seeds, `[U]`, and half of its 95 % interval (Student's t).

    Both are NaN at points without a value for every seed.
    """
    values = np.asarray(values, float)  # null becomes NaN
    if len(values) < 2:
        return values[0], np.full(values[0].shape, np.nan)
    mean, _, high = rollout.stats.mean_interval(values)
    return np.asarray(mean), np.asarray(high - mean)


def record() -> dict[str, str]:
    """Describes the origin of a result: machine and versions, date and commit.

    The commit ends with "+" if the packages have changes that are not committed.
    """

    def git(*args: str) -> str:
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout

    commit = git("rev-parse", "--short=10", "HEAD").strip()
    changes = git("status", "--porcelain", "--", "rollout", "envs", "buffers")
    commit += "+" if changes else ""
    return {"machine": machine(), "date": str(date.today()), "commit": commit}


def machine() -> str:
    """Describes the device, the processor and the versions."""
    device = jax.devices()[0]
    flag = "on" if LOOP_FLAG in os.environ.get("XLA_FLAGS", "") else "off"
    try:
        rows = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        info = {
            name.strip(): text.strip()
            for name, _, text in (x.partition(":") for x in rows)
        }
        processor = f"{info['model name']}, model {info['model']}"
    except (OSError, KeyError):
        processor = platform.processor() or platform.machine()
    return (
        f"{device.device_kind} ({device.platform}), {processor}, "
        f"{os.cpu_count()} cores; Python {platform.python_version()}, "
        f"jax {jax.__version__}, gymnax {metadata.version('gymnax')}; "
        f"XLA loop flag {flag}"
    )

"""Times programs in turn, and formats tables of the results.

A script yields the rows of a table of `docs/speed.json`, with its columns.
`run` prints them, and with `--json docs/speed.json` replaces the table there;
`speed_page.py` then writes the page and its chart.
"""

import argparse
import functools
import json
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

import rollout
from rollout import envs

LOOP_FLAG = (
    "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
)
Program = Callable[[], Any]
Table = Callable[[argparse.Namespace], Iterable[dict[str, str]]]


class Timing(NamedTuple):
    """Seconds of a call: medians of its repeats, and those of the first one."""

    wall: float
    cpu: float  # of all threads
    first: float  # also compiles


def measure(
    programs: dict[str, Program], repeats: int, *, calls: int = 1, warmup: int = 1
) -> dict[str, Timing]:
    """Times programs in turn, in random order.

    Args:
        programs: by name; each call waits for what it returns.
        repeats: of every program.
        calls: in a row, of which the mean counts.
        warmup: calls before, of which the first one is timed.
    """
    first, times = {}, {name: [] for name in programs}
    for name, program in programs.items():
        start = time.perf_counter()
        jax.block_until_ready(program())
        first[name] = time.perf_counter() - start
        for _ in range(warmup - 1):
            jax.block_until_ready(program())
    for _ in range(repeats):
        # In any order: a program may find the memory that the one before has freed.
        for name, program in random.sample(list(programs.items()), len(programs)):
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                jax.block_until_ready(program())
            ends = time.perf_counter() - wall, time.process_time() - cpu
            times[name].append([x / calls for x in ends])
    return {
        name: Timing(*map(statistics.median, zip(*taken, strict=True)), first[name])
        for name, taken in times.items()
    }


def arguments(doc: str, repeats: int, **lists: Any) -> argparse.Namespace:
    """Parses `--repeats`, `--json` and options that take a list."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--json", type=Path, help="replace the tables in this file")
    for name, default in lists.items():
        option = f"--{name.replace('_', '-')}"
        kind = type(default[0])
        parser.add_argument(option, nargs="+", type=kind, default=list(default))
    args = parser.parse_args()
    print(machine(), flush=True)
    return args


def run(doc: str, repeats: int, made: dict[str, Table], **lists: Any) -> None:
    """Is the whole of a script: makes its tables, or those that `--tables` names.

    Args:
        doc: of the script; the first line is its help.
        repeats: the default of `--repeats`.
        made: by the name of a table, a function of the options that yields the rows.
        **lists: the defaults of other options, and of `--tables`, else all.
    """
    args = arguments(doc, repeats, **{"tables": tuple(made), **lists})
    for name in args.tables:
        report(args, name, made[name](args))


def lanes(env: Any, num_envs: int, policy: Any = None, **options: Any) -> Any:
    """Makes a collector over lanes of an environment or of an id; policy or random."""
    make = envs.make_vec if isinstance(env, str) else envs.vectorize
    env = make(env, num_envs)
    policy = policy or rollout.random_policy(env.action_space)
    return rollout.Collector(env=env, policy=policy, **options)


def steps(
    collector: rollout.Collector,
    num_steps: int,
    params: Any = None,
    read: Callable[[rollout.Transition], Any] = lambda t: t,
) -> Program:
    """Makes a call that collects, always from the same carry, what `read` returns."""

    @jax.jit
    def program(carry: rollout.Carry, params: Any) -> tuple[rollout.Carry, Any]:
        carry, t = collector.collect_steps(carry, params, num_steps)
        return carry, read(t)

    return functools.partial(program, collector.init(jax.random.key(0)), params)


def rows_of(t: rollout.Transition) -> tuple[Any, ...]:
    """Reads the fields that the loops of others return, too."""
    flags, totals = (t.terminated, t.truncated), (t.episode_return, t.episode_length)
    return t.obs, t.action, t.reward, *flags, t.next_obs, *totals


def report(
    args: argparse.Namespace, table: str, rows: Iterable[dict[str, str]]
) -> None:
    """Prints a table as its rows come; with `--json` replaces the one of that name."""
    columns: list[str] = []
    found: list[list[str]] = []
    for row in rows:
        if not columns:
            columns = list(row)
            print(f"\n{table}\n\n{line(columns)}\n|{'---|' * len(columns)}")
        found.append(list(row.values()))
        print(line(found[-1]), flush=True)
    if args.json:
        every = json.loads(args.json.read_text()) if args.json.exists() else {}
        every[table] = {"machine": machine(), "columns": columns, "rows": found}
        args.json.write_text(dump(every))


def dump(tables: dict[str, Any]) -> str:
    """Formats tables as JSON, a line for each row."""
    text = json.dumps(tables, indent=1, ensure_ascii=False)
    one_line = lambda found: "[" + re.sub(r"\n *", " ", found[1]) + "]"  # noqa: E731
    return re.sub(r"\[\s+(\"[^\[\]]*\")\s+\]", one_line, text) + "\n"


def line(cells: list[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def machine() -> str:
    """Says what this runs on."""
    device = jax.devices()[0]
    flag = "on" if LOOP_FLAG in os.environ.get("XLA_FLAGS", "") else "off"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(x.split(": ")[1] for x in lines if "model name" in x)
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    return (
        f"{device.device_kind} ({device.platform}), {processor}, "
        f"{os.cpu_count()} cores; Python {platform.python_version()}, "
        f"jax {jax.__version__}, gymnax {metadata.version('gymnax')}; "
        f"XLA loop flag {flag}"
    )

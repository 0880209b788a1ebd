"""What does this library launch on accelerators, against the loops everyone writes?

Compiled ahead of time by `rollout.inspect`, for accelerators that may be absent:
launches and waits for the host on a GPU, cycles on a TPU. Nothing runs. Tables:

- `loops`: `collect_steps` next to PureJaxRL's loop, which records the same, and to the
  leaner one of `rollout_speed.py`, which records six fields and no value of a policy;
- `programs`: what else the library is made of, see `accelerator_programs.py`;
- `resets`: every `auto_reset` where a reset costs as much as 200 steps.

    python tests/benchmarks/accelerators.py --accelerator h100      # all tables
    python tests/benchmarks/accelerators.py --tables loops --envs CartPole-v1
    python tests/benchmarks/accelerators.py --tables programs --programs gae ppo

It needs the extra `accelerators`, and `JAX_PLATFORMS=cpu` where there is no device.
"""

import argparse
import functools
import importlib.metadata
import json
import platform
from collections.abc import Iterator
from typing import Any

import accelerator_programs as programs
import jax
import numpy as np
import purejaxrl
from rollout_speed import ENVS, Case, everyones_loop

import rollout
from rollout import envs
from rollout.inspection import Block, Report

NUM_ENVS = (2048, 65536)
NUM_STEPS, FEW_STEPS = 128, 16
LARGE = 2**31  # bytes of the observations of a trajectory, from which T is FEW_STEPS
LOOPS = ("ours", "PureJaxRL", "leaner")
TABLES = ("loops", "programs", "resets")
KEY = jax.eval_shape(lambda: jax.random.key(0))


def our_loop(
    env_id: str, num_envs: int, num_steps: int, policy: str, auto_reset: str = "auto"
) -> Any:
    """`(init, run)` of a collector that returns what PureJaxRL's loop does."""
    env = envs.make_vec(env_id, num_envs, auto_reset=auto_reset)
    network = purejaxrl.make_network(env_id)[0]

    def act(params: Any, obs: jax.Array, key: jax.Array) -> tuple[Any, Any]:
        pi, value = network.apply(params, obs.reshape(num_envs, -1))
        action = purejaxrl.sample(pi, key)
        return action, (value, purejaxrl.log_prob(pi, action))

    made = rollout.random_policy(env.action_space)
    if policy == "mlp":
        made = rollout.stateless_policy(act)
    collector = rollout.Collector(env=env, policy=made)

    def run(carry: Any, params: Any) -> tuple[Any, Any]:
        carry, t = collector.collect_steps(carry, params, num_steps)
        totals = t.episode_return, t.episode_length
        flags = t.terminated, t.truncated
        return carry, (t.obs, t.action, t.reward, flags, t.extras, totals)

    return collector.init, run


def lean_loop(env_id: str, num_envs: int, num_steps: int, policy: str) -> Any:
    """`(init, run)` of the loop that goes from project to project."""
    network = purejaxrl.make_network(env_id)[0]

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        pi, _ = network.apply(params, obs.reshape(num_envs, -1))
        return purejaxrl.sample(pi, key)

    made = rollout.stateless_policy(act) if policy == "mlp" else None
    case = Case(env_id, num_envs, policy, "threefry2x32", num_steps=num_steps)
    return everyones_loop(case, made)


def steps_of(env_id: str, num_envs: int) -> int:
    """T: few steps where a trajectory would be too large."""
    env = envs.make(env_id)
    obs = jax.eval_shape(env.reset, KEY)[1]
    size = 4 * int(np.prod(obs.shape)) * num_envs * NUM_STEPS
    return FEW_STEPS if size > LARGE else NUM_STEPS


def measure_loops(args: argparse.Namespace, accelerator: str) -> Iterator[dict]:
    """One row per environment, policy and number of lanes, with all three loops."""
    ours = functools.partial(our_loop, auto_reset=args.auto_reset)
    makers = dict(zip(LOOPS, (ours, purejaxrl.make_loop, lean_loop), strict=True))
    for num_envs in args.num_envs:
        for env_id in args.envs:
            for policy in args.policies:
                num_steps = steps_of(env_id, num_envs)
                row: dict[str, Any] = {
                    "env": env_id,
                    "policy": policy,
                    "lanes": num_envs,
                    "num_steps": num_steps,
                }
                params = purejaxrl.make_network(env_id)[1]
                params = params if policy == "mlp" else ()
                for name, make in makers.items():
                    init, run = make(env_id, num_envs, num_steps, policy)
                    carry = jax.eval_shape(init, KEY)
                    report = rollout.inspect(
                        run, carry, params, accelerator=accelerator
                    )
                    row[name] = costs_of(report, num_steps)
                yield row


def costs_of(report: Report, num_steps: int) -> dict[str, Any]:
    """The costs of the loop over time, per step of every lane; see `likely`."""
    loop = report.loop
    times = (loop.trips or 1) / num_steps
    return {
        "graph_launches": times * likely(loop, "graph_launches"),
        "loose_launches": times * likely(loop, "loose_launches"),
        "waits": times * report.waits_per_step,
        "microseconds": 1e6 * times * likely(loop, "seconds"),
        "cycles": times * likely(loop, "cycles"),
        "temporaries": report.memory.temporaries,
        "compile_s": report.compile_seconds,
    }


def print_loops(rows: Iterator[dict], is_tpu: bool) -> Iterator[dict]:
    """Prints the table of `measure_loops` as its rows come."""
    shown = ["thousand cycles"] if is_tpu else ["launches", "waits", "us in kernels"]
    shown += ["temporaries MB", "compile s"]
    print(
        "Per step: ours / PureJaxRL's / the leaner loop; launches in graphs + loose.\n"
    )
    print_row("env", "policy", "lanes", "T", *shown, "more than PureJaxRL's")
    print_row(*["---"] * (5 + len(shown)))
    for row in rows:
        cells = [" / ".join(_cell(row[x], name) for x in LOOPS) for name in shown]
        first = row["env"], row["policy"], f"{row['lanes']:,}", str(row["num_steps"])
        print_row(*first, *cells, ", ".join(worse(row)))
        yield row


def _cell(costs: dict[str, Any], name: str) -> str:
    graph, loose = costs["graph_launches"], costs["loose_launches"]
    return {
        "launches": f"{graph:.4g} + {loose:.4g}",
        "waits": f"{costs['waits']:.3g}",
        "us in kernels": f"{costs['microseconds']:.2f}",
        "thousand cycles": f"{costs['cycles'] / 1e3:,.1f}",
        "temporaries MB": f"{costs['temporaries'] / 1e6:,.1f}",
        "compile s": f"{costs['compile_s']:.0f}",
    }[name]


def worse(row: dict[str, Any]) -> list[str]:
    """In what ours costs more than PureJaxRL's loop; of estimates, 1.1 times."""
    ours, theirs = row["ours"], row["PureJaxRL"]
    found = []
    for name, times in (
        ("launches", 1.0),
        ("loose_launches", 1.0),
        ("waits", 1.0),
        ("cycles", 1.0),
        ("microseconds", 1.1),
    ):
        pair = [
            x["graph_launches"] + x["loose_launches"] if name == "launches" else x[name]
            for x in (ours, theirs)
        ]
        if pair[0] > times * pair[1]:
            found.append(name.replace("_", " "))
    return found


def measure_programs(args: argparse.Namespace, accelerator: str) -> Iterator[dict]:
    """One row per program, with its loops that lie in no other."""
    for name in args.programs:
        program, arguments, options = programs.PROGRAMS[name]()
        report = rollout.inspect(
            program, *arguments, accelerator=accelerator, **options
        )
        loops = [
            {
                "rounds": loop.trips,
                "graph_launches": loop.total("graph_launches"),
                "loose_launches": loop.total("loose_launches"),
                "cycles": loop.total("cycles"),
            }
            for loop in outermost(report.program)
        ]
        yield {
            "program": name,
            "loops": loops,
            "graph_launches": report.program.total("graph_launches"),
            "loose_launches": report.program.total("loose_launches"),
            "cycles": report.program.total("cycles"),
            "waits": [_where(str(wait)) for wait in report.waits],
            "temporaries": report.memory.temporaries,
            "compile_s": report.compile_seconds,
        }


def outermost(block: Block) -> Iterator[Block]:
    """The loops that lie in no other."""
    for child in block.blocks:
        if child.kind == "loop":
            yield child
        else:
            yield from outermost(child)


def _where(wait: str) -> str:
    """A wait with its place short enough for a table."""
    return " ".join(part.rpartition("site-packages/")[2] for part in wait.split())


def print_programs(rows: Iterator[dict], is_tpu: bool) -> Iterator[dict]:
    """Prints the table of `measure_programs` as its rows come."""
    print(f"Of {programs.NUM_ENVS:,} lanes. Loops: rounds x what one round has.\n")
    unit = "thousand cycles" if is_tpu else "launches in graphs + loose"
    print_row("program", "loops", f"{unit}, in all", "waits", "MB", "compile s")
    print_row(*["---"] * 6)

    def told(costs: dict[str, Any]) -> str:
        if is_tpu:
            return f"{costs['cycles'] / 1e3:,.1f}"
        return f"{costs['graph_launches']:.4g} + {costs['loose_launches']:.4g}"

    for row in rows:
        loops = (f"{x['rounds'] or '?'} x ({told(x)})" for x in row["loops"])
        print_row(
            row["program"],
            ", ".join(loops),
            told(row),
            "; ".join(row["waits"]) or "none",
            f"{row['temporaries'] / 1e6:,.1f}",
            f"{row['compile_s']:.0f}",
        )
        yield row


def measure_resets(args: argparse.Namespace, accelerator: str) -> Iterator[dict]:
    """One row per kind of dear reset, with every way to reset."""
    for num_envs in args.num_envs:
        for kind in programs.RESETS:
            row: dict[str, Any] = {"reset": kind, "lanes": num_envs}
            for auto_reset in programs.AUTO_RESETS:
                collector = programs.dear_reset(kind, num_envs, auto_reset)
                report = rollout.inspect(
                    collector, None, accelerator=accelerator, num_steps=NUM_STEPS
                )
                row[auto_reset] = costs_of(report, NUM_STEPS)
            yield row


def likely(block: Block, cost: Any) -> float:
    """A cost of a step in which few lanes are done.

    A loop whose number of rounds depends on data runs once; of the three branches of a
    conditional around a reset the second one is taken.
    """
    below = [
        likely(inner, cost) * ((inner.trips or 1) if inner.kind == "loop" else 1)
        for inner in block.blocks
    ]
    if block.kind == "conditional":
        few = below[1] if len(below) == 3 else max(below, default=0.0)
        return getattr(block, cost) + few
    return getattr(block, cost) + sum(below)


def print_resets(rows: Iterator[dict], is_tpu: bool) -> Iterator[dict]:
    """Prints the table of `measure_resets` as its rows come."""
    cost = "cycles" if is_tpu else "microseconds"
    unit = "thousand cycles" if is_tpu else "us in kernels, launches, waits"
    print(f"Per step in which few lanes are done: {unit}.\n")
    print_row("reset", "lanes", *programs.AUTO_RESETS, "auto / best")
    print_row(*["---"] * (3 + len(programs.AUTO_RESETS)))
    for row in rows:
        made = [row[name] for name in programs.AUTO_RESETS]
        cells = [
            f"{x['cycles'] / 1e3:,.1f}"
            if is_tpu
            else f"{x['microseconds']:,.1f}, {_cell(x, 'launches')}, {x['waits']:.3g}"
            for x in made
        ]
        ratio = row["auto"][cost] / min(x[cost] for x in made)
        print_row(row["reset"], f"{row['lanes']:,}", *cells, f"{ratio:.2f}")
        yield row


def print_row(*cells: str) -> None:
    """Prints one row of a table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Reads the command line and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", nargs="+", default=["h100"])
    parser.add_argument("--tables", nargs="+", default=TABLES, choices=TABLES)
    parser.add_argument("--envs", nargs="+", default=ENVS, choices=ENVS)
    parser.add_argument("--num-envs", nargs="+", type=int, default=NUM_ENVS)
    parser.add_argument("--auto-reset", default="auto", help="of our loop")
    parser.add_argument("--policies", nargs="+", default=("random", "mlp"))
    names = tuple(programs.PROGRAMS)
    parser.add_argument("--programs", nargs="+", default=names, choices=names)
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    args = parser.parse_args()
    versions = f"jax {jax.__version__}, gymnax {importlib.metadata.version('gymnax')}"
    tables = {
        "loops": (measure_loops, print_loops),
        "programs": (measure_programs, print_programs),
        "resets": (measure_resets, print_resets),
    }
    rows = []
    for accelerator in args.accelerator:
        for table in args.tables:
            measure, show = tables[table]
            print(f"\n{table}, {accelerator}, {versions}, ", end="")
            print(f"Python {platform.python_version()}", flush=True)
            for row in show(measure(args, accelerator), "tpu" in accelerator):
                rows.append({"accelerator": accelerator, "table": table, **row})
                if args.json:
                    with open(args.json, "w") as file:
                        json.dump({"versions": versions, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

"""Counts kernel launches on accelerators, for this library and for PureJaxRL.

`rollout.inspect_program` compiles ahead of time, also for absent accelerators, and
counts launches and host waits on a GPU or cycles on a TPU. Nothing runs. The tables of
`docs/accelerators.md`:

- `loops`: `collect_steps` next to PureJaxRL's loop, which records the same fields;
- `programs`: other programs of the library, see `accelerator_programs.py`;
- `resets`: every `auto_reset` option, for resets that cost as much as 200 steps.

    python benchmarks/accelerators.py --accelerator h100      # all tables
    python benchmarks/accelerators.py --tables loops --envs CartPole-v1
    python benchmarks/accelerators.py --tables programs --programs gae ppo
    python benchmarks/accelerators.py --tables programs --purejaxrl FOLDER

The folder contains PureJaxRL's `ppo.py`; the script compiles a training run of one
update. `learning_compared.py` explains how to install PureJaxRL.

The script needs the extra `accelerators`, and `JAX_PLATFORMS=cpu` on a machine without
an accelerator.
"""

import functools
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerator_programs as programs
import jax
import numpy as np
from gymnax_loops import ENVS, KEY, POLICIES, Case, gymnax_loop, make_policy, our_loop
from harness import arguments, report

import rollout
from rollout import envs
from rollout.inspection import Block, Report

NUM_ENVS = (2048, 65536)
NUM_STEPS, FEW_STEPS = 128, 16
LARGE = 2**31  # bytes; larger `[T, B, ...]` observations use FEW_STEPS


def recorded_fields(t: rollout.Transition) -> tuple[Any, ...]:
    """Selects the fields that PureJaxRL's loop records."""
    flags, totals = (t.terminated, t.truncated), (t.episode_return, t.episode_length)
    return t.obs, t.action, t.reward, flags, t.extras, totals


def loop_rows(args: Namespace, accelerator: str) -> Iterator[dict[str, str]]:
    """Compares `collect_steps` and PureJaxRL per environment, policy and num_envs."""
    for num_envs in args.num_envs:
        for env_id in args.envs:
            obs = jax.eval_shape(envs.make(env_id).reset, KEY)[1]
            size = 4 * int(np.prod(obs.shape)) * num_envs * NUM_STEPS
            num_steps = FEW_STEPS if size > LARGE else NUM_STEPS
            for policy in args.policies:
                case = Case(env_id, num_envs, policy, num_steps)
                params, pair = jax.eval_shape(make_policy(case)[1], KEY), []
                for init, run in (our_loop(case, recorded_fields), gymnax_loop(case)):
                    carry = jax.eval_shape(init, KEY)
                    result = rollout.inspect_program(
                        run, carry, params, accelerator=accelerator
                    )
                    pair.append(costs_of(result, num_steps))
                cells = {x: " / ".join(costs[x] for costs in pair) for x in pair[0]}
                setting = {accelerator: f"`{env_id}`", "Policy": policy}
                yield {**setting, "Lanes": f"{num_envs:,}", **cells}


def costs_of(result: Report, num_steps: int) -> dict[str, str]:
    """Computes the costs of one step of all lanes in the loop over time."""
    loop = result.loop
    trips_per_step = (loop.trips or 1) / num_steps
    if "tpu" in result.accelerator:
        cycles = trips_per_step * likely_cost(loop, "cycles")
        return {"Thousand cycles": f"{cycles / 1e3:,.1f}"}
    graph, loose, seconds = (
        trips_per_step * likely_cost(loop, x)
        for x in ("graph_launches", "loose_launches", "seconds")
    )
    unit = "round" if result.steps_per_round is None else "step"
    waits = sum(wait.count for wait in result.waits if wait.per == unit)
    return {
        "Launches": f"{graph:.4g} + {loose:.4g}",
        "us in kernels": f"{1e6 * seconds:.2f}",
        "Waits": f"{trips_per_step * waits:.3g}",
    }


def likely_cost(block: Block, cost: str) -> float:
    """Estimates a cost of a step in which few lanes are done.

    Counts one round of a loop whose number of rounds depends on data, and the second of
    the three branches of the conditional around a reset.
    """
    costs = [
        likely_cost(inner, cost) * ((inner.trips or 1) if inner.kind == "loop" else 1)
        for inner in block.blocks
    ]
    if block.kind == "conditional":
        branch = costs[1] if len(costs) == 3 else max(costs, default=0.0)
        return getattr(block, cost) + branch
    return getattr(block, cost) + sum(costs)


def program_rows(args: Namespace, accelerator: str) -> Iterator[dict[str, str]]:
    """Inspects every program; a row lists the outermost loops."""

    def text(block: Block) -> str:
        if "tpu" in accelerator:
            return f"{block.total('cycles') / 1e3:,.1f} thousand cycles"
        totals = (block.total(x) for x in ("graph_launches", "loose_launches"))
        return " + ".join(f"{x:.4g}" for x in totals)

    makers = {name: programs.PROGRAMS[name] for name in args.programs}
    if args.purejaxrl[0]:
        folder = Path(args.purejaxrl[0])
        makers["ppo_purejaxrl"] = functools.partial(programs.ppo_purejaxrl, folder)
    for name, make in makers.items():
        program, inputs, options = make()
        result = rollout.inspect_program(
            program, *inputs, accelerator=accelerator, **options
        )
        loops = (f"{x.trips or '?'} x ({text(x)})" for x in outermost(result.program))
        yield {
            f"{accelerator}, {programs.NUM_ENVS:,} lanes": name,
            "Loops: rounds x costs of one": ", ".join(loops) or "-",
            "In all": text(result.program),
            "us in kernels": f"{1e6 * result.program.total('seconds'):,.0f}",
            "MB": f"{result.memory.total / 1e6:,.1f}",
            "Waits for the host": "; ".join(map(str, result.waits)) or "none",
        }


def outermost(block: Block) -> Iterator[Block]:
    """Yields the outermost loops of a block."""
    for child in block.blocks:
        if child.kind == "loop":
            yield child
        else:
            yield from outermost(child)


def reset_rows(args: Namespace, accelerator: str) -> Iterator[dict[str, str]]:
    """Inspects every `auto_reset` option with both expensive resets."""
    for num_envs in args.num_envs:
        for mode in programs.RESETS:
            row = {"Reset": f"{mode}, {accelerator}", "Lanes": f"{num_envs:,}"}
            for auto_reset in programs.AUTO_RESETS:
                collector = programs.costly_reset(mode, num_envs, auto_reset)
                result = rollout.inspect_program(
                    collector,
                    None,
                    jax.random.key(0),
                    accelerator=accelerator,
                    num_steps=NUM_STEPS,
                )
                costs = costs_of(result, NUM_STEPS)
                row[auto_reset] = ", ".join(
                    f"{y} {x.lower()}" for x, y in costs.items()
                )
            yield row


def main() -> None:
    """Prints the tables."""
    tables = {"loops": loop_rows, "programs": program_rows, "resets": reset_rows}
    options = {"accelerator": ("h100",), "tables": tuple(tables), "envs": ENVS}
    options |= {"num_envs": NUM_ENVS, "policies": POLICIES}
    options |= {"programs": tuple(programs.PROGRAMS), "purejaxrl": ("",)}
    args = arguments(__doc__, 1, **options)
    for accelerator in args.accelerator:
        for table in args.tables:
            report(args, f"{table}, {accelerator}", tables[table](args, accelerator))


if __name__ == "__main__":
    main()

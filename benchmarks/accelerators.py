"""Counts launches on accelerators, beside those of the loop of PureJaxRL.

Compiled ahead of time by `rollout.inspect_program`, for accelerators that may be
absent: launches and waits for the host on a GPU, cycles on a TPU. Nothing runs. Tables
    of
`docs/accelerators.md`:

- `loops`: `collect_steps` next to PureJaxRL's loop, which records the same;
- `programs`: what else the library is made of, see `accelerator_programs.py`;
- `resets`: every `auto_reset` where a reset costs as much as 200 steps.

    python benchmarks/accelerators.py --accelerator h100      # all tables
    python benchmarks/accelerators.py --tables loops --envs CartPole-v1
    python benchmarks/accelerators.py --tables programs --programs gae ppo
    python benchmarks/accelerators.py --tables programs --purejaxrl FOLDER

The folder has PureJaxRL's `ppo.py`, of which a training of one update is compiled; see
`learning_compared.py`.

It needs the extra `accelerators`, and `JAX_PLATFORMS=cpu` where there is no device.
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
LARGE = 2**31  # bytes of the observations of a trajectory, from which T is FEW_STEPS


def recorded(t: rollout.Transition) -> tuple[Any, ...]:
    """Reads what PureJaxRL's loop records."""
    flags, totals = (t.terminated, t.truncated), (t.episode_return, t.episode_length)
    return t.obs, t.action, t.reward, flags, t.extras, totals


def loop_rows(args: Namespace, accelerator: str) -> Iterator[dict[str, str]]:
    """One row per environment, policy and number of lanes: ours / PureJaxRL's."""
    for num_envs in args.num_envs:
        for env_id in args.envs:
            obs = jax.eval_shape(envs.make(env_id).reset, KEY)[1]
            size = 4 * int(np.prod(obs.shape)) * num_envs * NUM_STEPS
            num_steps = FEW_STEPS if size > LARGE else NUM_STEPS
            for policy in args.policies:
                case = Case(env_id, num_envs, policy, num_steps)
                params, pair = jax.eval_shape(make_policy(case)[1], KEY), []
                for init, run in (our_loop(case, recorded), gymnax_loop(case)):
                    carry = jax.eval_shape(init, KEY)
                    options = {"accelerator": accelerator}
                    found = rollout.inspect_program(run, carry, params, **options)
                    pair.append(costs_of(found, num_steps))
                cells = {x: " / ".join(costs[x] for costs in pair) for x in pair[0]}
                setting = {accelerator: f"`{env_id}`", "Policy": policy}
                yield {**setting, "Lanes": f"{num_envs:,}", **cells}


def costs_of(found: Report, num_steps: int) -> dict[str, str]:
    """The costs of the loop over time, per step of every lane; see `likely`."""
    loop = found.loop
    times = (loop.trips or 1) / num_steps
    if "tpu" in found.accelerator:
        return {"Thousand cycles": f"{times * likely(loop, 'cycles') / 1e3:,.1f}"}
    graph, loose = (
        times * likely(loop, x) for x in ("graph_launches", "loose_launches")
    )
    unit = "round" if found.steps_per_round is None else "step"
    waits = sum(wait.count for wait in found.waits if wait.per == unit)
    return {
        "Launches": f"{graph:.4g} + {loose:.4g}",
        "us in kernels": f"{1e6 * times * likely(loop, 'seconds'):.2f}",
        "Waits": f"{times * waits:.3g}",
    }


def likely(block: Block, cost: str) -> float:
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


def program_rows(args: Namespace, accelerator: str) -> Iterator[dict[str, str]]:
    """One row per program, with its loops that lie in no other."""

    def told(block: Block) -> str:
        if "tpu" in accelerator:
            return f"{block.total('cycles') / 1e3:,.1f} thousand cycles"
        totals = (block.total(x) for x in ("graph_launches", "loose_launches"))
        return " + ".join(f"{x:.4g}" for x in totals)

    made = {name: programs.PROGRAMS[name] for name in args.programs}
    if args.purejaxrl[0]:
        folder = Path(args.purejaxrl[0])
        made["ppo_purejaxrl"] = functools.partial(programs.ppo_purejaxrl, folder)
    for name, make in made.items():
        program, inputs, options = make()
        found = rollout.inspect_program(
            program, *inputs, accelerator=accelerator, **options
        )
        loops = (f"{x.trips or '?'} x ({told(x)})" for x in outermost(found.program))
        yield {
            f"{accelerator}, {programs.NUM_ENVS:,} lanes": name,
            "Loops: rounds x costs of one": ", ".join(loops) or "-",
            "In all": told(found.program),
            "us in kernels": f"{1e6 * found.program.total('seconds'):,.0f}",
            "MB": f"{found.memory.total / 1e6:,.1f}",
            "Waits for the host": "; ".join(map(str, found.waits)) or "none",
        }


def outermost(block: Block) -> Iterator[Block]:
    """The loops that lie in no other."""
    for child in block.blocks:
        if child.kind == "loop":
            yield child
        else:
            yield from outermost(child)


def reset_rows(args: Namespace, accelerator: str) -> Iterator[dict[str, str]]:
    """One row per kind of dear reset, with every way to reset."""
    for num_envs in args.num_envs:
        for kind in programs.RESETS:
            row = {"Reset": f"{kind}, {accelerator}", "Lanes": f"{num_envs:,}"}
            for auto_reset in programs.AUTO_RESETS:
                collector = programs.dear_reset(kind, num_envs, auto_reset)
                report = rollout.inspect_program(
                    collector,
                    None,
                    jax.random.key(0),
                    accelerator=accelerator,
                    num_steps=NUM_STEPS,
                )
                costs = costs_of(report, NUM_STEPS)
                row[auto_reset] = ", ".join(
                    f"{y} {x.lower()}" for x, y in costs.items()
                )
            yield row


def main() -> None:
    """Makes the tables."""
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

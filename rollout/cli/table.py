"""Formats the lines of the table that `python -m rollout` prints."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from rollout.moments import Moments
from rollout.stats import CollectStats


class Result(NamedTuple):
    """Result of a run of steps or of whole episodes."""

    stats: CollectStats
    agents: Any  # an `AgentStats`; None for environments of one agent
    num_rows: int  # steps of all lanes, including idle and masked-out steps
    compile_time: float  # s
    run_time: float  # s


def line(label: str, value: object) -> str:
    """Formats one line of the table."""
    return f"{label:<19} {value}".rstrip()


def head(run: Namespace) -> list[str]:
    """Formats the lines about the environment, the device and jax."""
    device = line("device", jax.devices()[0].device_kind)
    return [line("environment", run.title), device, line("jax", jax.__version__)]


def collected(run: Namespace, result: Result) -> Iterator[str]:
    """Yields the lines about the episodes and the speed."""
    stats, agents, seconds = result.stats, result.agents, result.run_time
    num_steps, note = int(stats.num_steps), ""
    num_out = result.num_rows - num_steps
    if run.num_episodes:
        note = f" ({100 * num_out / result.num_rows:.1f} % of the lane-steps idle)"
    yield line("envs", f"{run.num_envs:,}")
    yield line("steps", f"{num_steps:,}{note}")
    if num_out and not run.num_episodes:
        yield line("masked-out rows", f"{num_out:,} (environments reset themselves)")
    if agents:
        yield line("agent steps", f"{agents.num_agent_steps:,}")
        yield line("unassigned reward", f"{agents.unassigned_reward:.6g}")
        yield line("stale endings", f"{agents.num_stale:,}")
    yield from episodes(stats, agents)
    if run.num_episodes:
        yield line("mean return", stats.returns)  # with its interval
    yield line("compile time", f"{result.compile_time:.2f} s")
    yield line("run time", f"{seconds:.3f} s")
    if run.num_episodes:
        yield line("episodes per second", f"{run.num_episodes / seconds:,.0f}")
    yield line("steps per second", f"{num_steps / seconds:,.0f}")


def episodes(stats: CollectStats, agents: Any) -> Iterator[str]:
    """Yields lines of metrics of episodes, followed by agents and policies."""
    if not stats.num_episodes:
        yield line("episodes", "0 (no episode ended in this window)")
        return
    num_cut = stats.num_unfinished
    truncated = f"{stats.num_truncated - num_cut:,} truncated"
    cut = f", {num_cut:,} cut by --max-episode-steps" if num_cut else ""
    endings = f"{stats.num_terminated:,} terminated, {truncated}{cut}"
    yield line("episodes", f"{stats.num_episodes:,} ({endings})")
    yield line("", "".join(f"{name:<12}" for name in ("mean", "std", "min", "max")))
    rows: dict[str, Any] = {}
    if agents:
        policies = {f"  policy {name}": x for name, x in agents.policies.items()}
        rows = {f"  {name}": x for name, x in agents.agents.items()} | policies
    for label, name in (("return", "returns"), ("length", "lengths")):
        for row, x in ({label: stats} | rows).items():
            yield line(row, _moments(getattr(x, name)))


def _moments(x: Moments) -> str:
    text = "".join(f"{value:<12.6g}" for value in (x.mean, x.std, x.min, x.max))
    return text if x.count else "never acted"

"""Formats the lines of the table that `python -m rollout` prints of a run."""

import os
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from rollout.agents.agent_stats import AgentStats
from rollout.moments import Moments
from rollout.profiling import Profile
from rollout.stats import CollectStats
from rollout.types import Episodes

XLA_CPU_LOOP = (
    "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
)
_CUT = "cut by --max-steps"


class Result(NamedTuple):
    """Result of a run of steps or of whole episodes."""

    stats: CollectStats
    agents: AgentStats | None  # None for environments of one agent
    num_rows: int  # steps of all lanes, idle and masked-out ones included
    compile_time: float  # s
    run_time: float  # s
    drawn: dict[str, Any]  # for the figure, by name: [N] arrays of episodes
    saved: dict[str, Any]  # for the file, by name: [T, B, ...]


def line(label: str, value: object) -> str:
    """Formats a line of the table."""
    return f"{label:<19} {value}".rstrip()


def environment(run: Namespace) -> str:
    """Formats the environment and its parameters."""
    return line("environment", f"{run.env} ({run.params})" if run.params else run.env)


def device(num_devices: int) -> Iterator[str]:
    """Yields the lines about the device and jax."""
    first = jax.devices()[0]
    kind = "" if first.device_kind == first.platform else f" ({first.device_kind})"
    count = "" if num_devices == 1 else f", {num_devices} devices"
    yield line("device", first.platform + kind + count)
    yield line("jax", jax.__version__)
    if XLA_CPU_LOOP in os.environ.get("XLA_FLAGS", ""):
        yield line("xla cpu loop", "on")


def collected(run: Namespace, result: Result) -> Iterator[str]:
    """Yields the lines about the episodes and the speed."""
    stats, agents, seconds = result.stats, result.agents, result.run_time
    num_steps, num_asked = int(stats.num_steps), run.num_envs * run.num_steps
    num_out, note = result.num_rows - num_steps, ""
    if run.num_episodes:
        note = f" ({100 * num_out / result.num_rows:.1f} % of the lane-steps idle)"
    elif result.num_rows < num_asked:
        note = f" (of {num_asked:,}, interrupted)"
    yield line("envs", f"{run.num_envs:,}")
    yield line("steps", f"{num_steps:,}{note}")
    if num_out and not run.num_episodes:
        yield line("masked-out rows", f"{num_out:,} (environments reset themselves)")
    if agents:
        yield line("agent steps", f"{agents.num_agent_steps:,}")
    yield from _episodes(run, stats, agents)
    if agents and agents.unassigned_reward:
        yield line("unassigned reward", f"{agents.unassigned_reward:.6g}")
    if agents and agents.num_stale:
        yield line("stale endings", f"{agents.num_stale:,}")
    yield line("compile time", f"{result.compile_time:.2f} s")
    yield line("run time", f"{seconds:.3f} s")
    if run.num_episodes:
        yield line("episodes per second", f"{run.num_episodes / seconds:,.0f}")
    yield line("steps per second", f"{num_steps / seconds:,.0f}")


def one_episode(episodes: Episodes) -> Iterator[str]:
    """Yields the lines about a single episode."""
    (terminated,), (finished,) = episodes.terminated, episodes.finished
    ending = "terminated" if terminated else "truncated" if finished else _CUT
    yield line("return", f"{episodes.episode_return[0]:.6g}")
    yield line("length", f"{episodes.episode_length[0]:,} ({ending})")


def parts(seconds: Profile) -> Iterator[str]:
    """Yields the time of each part of a batch; run apart, they may take longer."""
    times = seconds._asdict()
    del times["unexplained"]
    for name, value in times.items():
        share = 100 * value / (sum(times.values()) - seconds.whole)
        note = "" if name == "whole" else f" ({share:.0f} % of the parts)"
        yield line(f"  {name}".replace("_", " "), f"{1e3 * value:.3f} ms{note}")


def _episodes(
    run: Namespace, stats: CollectStats, agents: AgentStats | None
) -> Iterator[str]:
    """Yields metrics of the episodes, and below each those of agents and policies."""
    count, num_cut = stats.num_episodes, stats.num_unfinished
    if not count:
        yield line("episodes", "0 (no episode ended in this window)")
        return
    truncated = f"{stats.num_truncated - num_cut:,} truncated"
    cut = f", {num_cut:,} {_CUT}" if run.num_episodes else ""
    endings = f"{stats.num_terminated:,} terminated, {truncated}{cut}"
    yield line("episodes", f"{count:,} ({endings})")
    yield line("", "".join(f"{name:<12}" for name in ("mean", "std", "min", "max")))
    for label, name in (("return", "returns"), ("length", "lengths")):
        yield line(label, _moments(getattr(stats, name)))
        rows = {}
        if agents:
            groups = agents.policies if len(agents.policies) > 1 else {}
            named = {f"policy {policy}": x for policy, x in groups.items()}
            for who, x in (agents.agents | named).items():
                rows[who] = _moments(getattr(x, name))
        if label == "return" or len(set(rows.values())) > 1:  # lengths if they differ
            yield from (line(f"  {who}", text) for who, text in rows.items())
    if run.num_episodes:
        ends = f"{stats.returns.ci_low:.6g} to {stats.returns.ci_high:.6g}"
        interval = f"95 % confidence interval {ends}"
        interval = "no confidence interval for one episode" if count < 2 else interval
        yield line("mean return", f"{stats.returns.mean:.6g} ({interval})")


def _moments(x: Moments) -> str:
    text = "".join(f"{value:<12.6g}" for value in (x.mean, x.std, x.min, x.max))
    return text if x.count else "never acted"

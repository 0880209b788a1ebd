"""The table that `python -m rollout` prints of a run."""

import argparse
import os
from typing import Any

import jax
import numpy as np

from rollout.cli.arguments import XLA_CPU_LOOP
from rollout.cli.types import Agents, Played, Result
from rollout.inspection import Report
from rollout.profiling import Profile
from rollout.stats import CollectStats
from rollout.types import Episodes

_CUT = "cut by --max-steps"


def print_steps(args: argparse.Namespace, result: Result) -> None:
    """Prints what was run, what the episodes were like and how fast they came."""
    num_rows, ended = args.num_envs * result.num_steps, result.ended
    num_rows -= result.num_void
    _print_run(args)
    print_row("envs", f"{args.num_envs:,}")
    wanted = args.num_envs * args.num_steps
    so_far = f" (of {wanted:,}, interrupted)" if result.is_interrupted else ""
    print_row("steps", f"{num_rows:,}{so_far}")
    if result.num_void:
        print_row("void rows", f"{result.num_void:,} (environments reset themselves)")
    _print_agent_steps(result.agents)
    count, num_terminated = ended.terminated.size, int(ended.terminated.sum())
    if count:
        flags = f"{num_terminated:,} terminated, {count - num_terminated:,} truncated"
        print_row("episodes", f"{count:,} ({flags})")
        _print_moments(ended.episode_return, ended.episode_length, result.agents)
    else:
        print_row("episodes", "0 (no episode ended in this window)")
    _print_losses(result.agents)
    print_row("compile time", f"{result.compile_time:.2f} s")
    print_row("run time", f"{result.run_time:.3f} s")
    print_row("steps per second", f"{num_rows / result.run_time:,.0f}")


def print_episodes(args: argparse.Namespace, played: Played) -> None:
    """Prints what was run, what the N episodes were like and how fast they came."""
    episodes: Any = played.episodes
    stats = played.stats
    num_steps = int(episodes.episode_length.sum(dtype=np.int64))
    idle = 1 - num_steps / played.num_rows
    _print_run(args)
    print_row("envs", f"{args.num_envs:,}")
    print_row("episodes", f"{args.num_episodes:,} ({_describe_endings(stats)})")
    print_row("steps", f"{num_steps:,} ({100 * idle:.1f} % of the lane-steps idle)")
    _print_agent_steps(played.agents)
    _print_moments(episodes.episode_return, episodes.episode_length, played.agents)
    _print_losses(played.agents)
    print_row("mean return", _describe_mean(stats))
    print_row("compile time", f"{played.compile_time:.2f} s")
    print_row("run time", f"{played.run_time:.3f} s")
    print_row("episodes per second", f"{args.num_episodes / played.run_time:,.0f}")
    print_row("steps per second", f"{num_steps / played.run_time:,.0f}")


def print_episode(args: argparse.Namespace, episodes: Episodes) -> None:
    """Prints what was run and what its one episode was like."""
    (terminated,), (finished,) = episodes.terminated, episodes.finished
    ending = "terminated" if terminated else "truncated" if finished else _CUT
    _print_run(args)
    print_row("return", f"{episodes.episode_return[0]:.6g}")
    print_row("length", f"{episodes.episode_length[0]:,} ({ending})")


def print_inspection(args: argparse.Namespace, report: Report) -> None:
    """Prints what was compiled and what it does on the accelerator."""
    _print_environment(args)
    print_row("envs", f"{args.num_envs:,}")
    print_row("steps", f"{args.num_envs * args.num_steps:,}")
    print(report)


def print_profile(seconds: Profile) -> None:
    """Prints where the time of a batch goes; the parts apart may take longer."""
    parts = sum(seconds) - seconds.whole - seconds.unexplained
    for name, value in seconds._asdict().items():
        share = f" ({100 * value / parts:.0f} % of the parts)"
        row = f"{1e3 * value:.3f} ms{'' if name == 'whole' else share}"
        if name != "unexplained":
            print_row(f"  {name}".replace("_", " "), row)


def print_row(label: str, value: object) -> None:
    """Prints one row of the table."""
    print(f"{label:<19} {value}".rstrip())


def _print_run(args: argparse.Namespace) -> None:
    device = jax.devices()[0]
    kind = "" if device.device_kind == device.platform else f" ({device.device_kind})"
    _print_environment(args)
    count = "" if args.gif or args.devices == 1 else f", {args.devices} devices"
    print_row("device", device.platform + kind + count)
    print_row("jax", jax.__version__)
    if XLA_CPU_LOOP in os.environ.get("XLA_FLAGS", ""):
        print_row("xla cpu loop", "on")


def _print_environment(args: argparse.Namespace) -> None:
    params = ", ".join(f"{name}={value!r}" for name, value in args.env_param)
    print_row("environment", args.env + (f" ({params})" if params else ""))


def _print_moments(
    episode_return: np.ndarray, episode_length: np.ndarray, agents: Any
) -> None:
    """Prints figures of the episodes, and under each those of agents and policies."""
    print_row("", "".join(f"{name:<12}" for name in ("mean", "std", "min", "max")))
    for name, value in (("return", episode_return), ("length", episode_length)):
        _print_figure(name, value)
        of_agents: Any = getattr(agents, f"episode_{name}", None)
        is_told = of_agents is not None
        if name == "length" and is_told:
            is_told = np.any(of_agents != of_agents[:, :1])  # else it says nothing new
        for who, its in agents.select(of_agents) if is_told else ():
            _print_figure(f"  {who}", its)


def _print_figure(label: str, value: np.ndarray) -> None:
    if not value.size:
        print_row(label, "never acted")
        return
    x = value.astype(np.float64)  # a float32 sum of many loses digits
    moments = (x.mean(), x.std(), x.min(), x.max())
    print_row(label, "".join(f"{moment:<12.6g}" for moment in moments))


def _print_agent_steps(agents: Agents | None) -> None:
    if agents:
        print_row("agent steps", f"{agents.num_steps:,}")


def _print_losses(agents: Agents | None) -> None:
    """Prints what no agent experienced: rewards without a row, rows without an end."""
    if agents and agents.unassigned_reward:
        print_row("unassigned reward", f"{agents.unassigned_reward:.6g}")
    if agents and agents.num_stale:
        print_row("stale endings", f"{agents.num_stale:,}")


def _describe_endings(stats: CollectStats) -> str:
    truncated = stats.num_truncated - stats.num_unfinished
    return (
        f"{stats.num_terminated:,} terminated, {truncated:,} truncated, "
        f"{stats.num_unfinished:,} {_CUT}"
    )


def _describe_mean(stats: CollectStats) -> str:
    mean = f"{stats.return_mean:.6g}"
    if stats.num_episodes < 2:
        return f"{mean} (no confidence interval for one episode)"
    low, high = stats.return_ci_low, stats.return_ci_high
    return f"{mean} (95 % confidence interval {low:.6g} to {high:.6g})"

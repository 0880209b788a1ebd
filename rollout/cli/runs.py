"""Executes runs of `python -m rollout`: steps, episodes, a drawing, an inspection."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rollout import envs
from rollout.agents.agent_stats import AgentStats, keep_agents, summarize_agents
from rollout.cli.arguments import Run
from rollout.cli.interrupts import aside
from rollout.cli.random_collector import make_collector
from rollout.cli.table import Result
from rollout.collector import Collector
from rollout.envs.multi_agent import MultiAgentInfo, layout_of
from rollout.gif import draw_episode
from rollout.host.host_collector import HostCollector
from rollout.inspection import Report, inspect
from rollout.moments import merge
from rollout.policies.basic import random_policy
from rollout.profiling import Profile
from rollout.profiling import profile as time_parts
from rollout.stats import summarize
from rollout.stream.progress import Bar
from rollout.stream.stream import Stream
from rollout.types import Episodes, Transition

_NUM_BATCHES = 20
_MAX_ROWS = 1 << 22  # of a batch, so that its memory does not grow with the run
_MAX_HOST_ROWS = 1 << 10  # where a loop in Python steps: Ctrl-C loses a batch
_ENDING = ("terminated", "truncated", "episode_return", "episode_length")
_OF_AGENTS = (
    *("reward", "agent_return", "agent_length", "acted", "waiting"),
    *("terminated", "truncated", "unassigned_reward"),
)

_RETURNS, _LENGTHS = "info/agents/agent_return", "info/agents/agent_length"


def collect(run: Run, num_devices: int) -> Result:
    """Collects `num_steps` steps of every lane, with a bar if stderr is a terminal.

    After Ctrl-C the result has the batches until then.
    """
    start, compile_time, is_interrupted = time.perf_counter(), 0.0, False
    collected: list[tuple[Any, float]] = []  # batches, and the seconds until then
    total_steps = run.num_steps * run.num_envs
    bar, drawing = Bar(total_steps) if sys.stderr.isatty() else None, threading.Lock()

    names: tuple[str, ...] = ()

    def work() -> None:
        nonlocal compile_time, names
        collector, params = make_collector(run, num_devices)
        names = layout_of(collector.env).agents if run.has_agents else ()
        with _make_stream(run, collector, params, total_steps) as stream:
            stream.compile()
            compile_time = time.perf_counter() - start
            for batch in stream:
                collected.append((batch, stream.stats.collect_seconds))
                with drawing:
                    if is_interrupted:
                        break
                    if bar is not None:
                        bar.show(stream.steps, stream.stats)

    try:
        aside(work)
    except KeyboardInterrupt:
        with drawing:
            is_interrupted = True  # from here on the thread leaves stderr alone
        if not collected:
            raise
    finally:
        if bar is not None:
            bar.close()
    batches, seconds = zip(*collected[:], strict=True)  # the thread may add another
    num_rows = sum(batch.steps for batch in batches)
    fields, agents = zip(*[batch.trajectory for batch in batches], strict=True)
    rows = {name: np.concatenate([x[name] for x in fields]) for name in fields[0]}
    rows = {name: x[: num_rows // run.num_envs] for name, x in rows.items()}
    return Result(
        stats=merge([batch.stats for batch in batches]),
        agents=merge(agents) if run.has_agents else None,
        num_rows=num_rows,
        compile_time=compile_time,
        run_time=seconds[-1],
        rows=rows,
        agent_returns=_by_agent(names, rows),
        is_interrupted=is_interrupted,
    )


def profile(run: Run, folder: Path, num_devices: int) -> tuple[Profile, Path]:
    """Times the parts of a batch, and traces one more; returns the trace's folder."""
    collector, params = make_collector(run, num_devices)
    seconds = time_parts(collector, params, num_rows(run))
    with _make_stream(run, collector, params, None) as stream:
        next(stream)
        with jax.profiler.trace(folder):
            next(stream)
    # The profiler names its folders by the time.
    return seconds, max(folder.glob("plugins/profile/*"), default=folder)


def play(run: Run, num_episodes: int, num_devices: int) -> Result:
    """Plays exactly `num_episodes` episodes of at most `max_steps` steps each."""
    start = time.perf_counter()
    collector, params = make_collector(run, num_devices)
    if run.has_agents:
        collector = keep_agents(collector)
    carry = collector.init(jax.random.key(run.seed))

    def program(collector: Any, carry: Any, params: Any) -> Any:
        end, episodes = collector.collect_episodes(
            carry, params, num_episodes, max_steps=run.max_steps
        )
        agents = summarize_agents(episodes) if run.has_agents else None
        return summarize(episodes), agents, end.step - carry.step, episodes

    if isinstance(collector, HostCollector):
        collector.compile(carry, params)
    else:
        program = jax.jit(program).lower(collector, carry, params).compile()
    compiled = time.perf_counter()
    stats, agents, steps, episodes = jax.device_get(program(collector, carry, params))
    run_time = time.perf_counter() - compiled
    num_rows, compile_time = int(steps) * run.num_envs, compiled - start
    by_agent = None
    if run.has_agents:
        info, _ = episodes.accumulated["agents"]
        by_agent = _named(info.layout.agents, info.agent_return, info.agent_length)
    result = Result(stats, agents, num_rows, compile_time, run_time, {}, episodes)
    return result._replace(agent_returns=by_agent)


def draw(run: Run) -> tuple[bytes, Episodes]:
    """Draws the first episode that `play` would play, as a GIF."""
    env = envs.make_vec(run.env, 1, **dict(run.env_param))
    collector = Collector(env=env, policy=random_policy(env.action_space))
    return draw_episode(collector, jax.random.key(run.seed), None, run.max_steps)


def inspect_steps(run: Run, accelerator: str) -> Report:
    """Compiles `num_steps` steps of every lane for an accelerator."""
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")  # does not look for accelerators
    collector, params = make_collector(run)
    return inspect(collector, params, accelerator=accelerator, num_steps=run.num_steps)


def num_rows(run: Run) -> int:
    """Returns the number of rows in a batch."""
    most = (_MAX_HOST_ROWS if run.is_on_host else _MAX_ROWS) // run.num_envs
    return min(-(-run.num_steps // _NUM_BATCHES), max(1, most))


def ended(rows: dict[str, np.ndarray]) -> Episodes:
    """Returns the episodes that ended in `rows`, `[T, B]`, in the order of ending."""
    done = rows["terminated"] | rows["truncated"]
    fields: dict[str, Any] = {name: rows[name][done] for name in _ENDING}
    fields |= {"lane": np.nonzero(done)[1], "num_steps": np.int64(done.size)}
    return Episodes(**fields, finished=fields["terminated"] | fields["truncated"])


def _by_agent(
    names: tuple[str, ...], rows: dict[str, np.ndarray]
) -> dict[str, np.ndarray] | None:
    """Returns the agents' returns of the episodes that ended, if `rows` has any."""
    if _RETURNS not in rows:
        return None
    done = rows["terminated"] | rows["truncated"]
    return _named(names, rows[_RETURNS][done], rows[_LENGTHS][done])


def _named(names: tuple[str, ...], returns: Any, lengths: Any) -> dict[str, np.ndarray]:
    """Returns `[N]` returns by agent, NaN where one never acted, from `[N, A]`."""
    acted = np.where(np.asarray(lengths) > 0, returns, np.nan)
    return dict(zip(names, acted.T, strict=True))


def _make_stream(
    run: Run, collector: Any, params: Any, total_steps: int | None
) -> Stream:
    def read(trajectory: Transition) -> tuple[dict[str, jax.Array], AgentStats | None]:
        """Keeps the fields that a file needs; the others are not stored."""
        agents = summarize_agents(trajectory) if run.has_agents else None
        if run.save:
            return _by_name(trajectory), agents
        names = _ENDING if run.plot else ()
        fields = {name: getattr(trajectory, name) for name in names}
        if run.plot and run.has_agents:
            info = trajectory.info.agents
            fields |= {_RETURNS: info.agent_return, _LENGTHS: info.agent_length}
        return fields, agents

    return Stream(
        collector,
        key=jax.random.key(run.seed),
        params=params,
        steps_per_batch=num_rows(run) * run.num_envs,
        total_steps=total_steps,
        postprocess=read,
        placement="host",
        prefetch=1,
    )


def _by_name(trajectory: Transition) -> dict[str, jax.Array]:
    info = trajectory.info
    if isinstance(info, MultiAgentInfo):  # whose flags and counts are one word
        named = {name: getattr(info.agents, name) for name in _OF_AGENTS}
        trajectory = trajectory.replace(info={"agents": named, "env": info.env})
    leaves, keystr = jax.tree.leaves_with_path(trajectory), jax.tree_util.keystr
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

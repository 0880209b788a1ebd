"""Executes runs of `python -m rollout`: steps, episodes, a drawing, an inspection."""

import contextlib
import importlib
import os
import runpy
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rollout import agents, envs, inspection, profiling
from rollout.agents.agent_stats import keep_agents
from rollout.cli.table import Result
from rollout.collector import Collector
from rollout.envs.registry import SUITES
from rollout.gif import record_gif
from rollout.host import HostCollector
from rollout.moments import merge
from rollout.policies import masks, random_policy
from rollout.sharding import shard
from rollout.stats import CollectStats, summarize
from rollout.stream.stream import Stream, StreamBatch
from rollout.types import Transition

# Environments per CPU device; with a quarter, one is as fast (docs/speed_tables.txt).
_LEAST_ENVS = 2048
_NUM_BATCHES = 20
_MAX_ROWS = 1 << 22  # of a batch, so that its memory does not grow with the run
_MAX_HOST_ROWS = 1 << 10  # where a loop in Python steps: Ctrl-C loses a batch
_DRAWN = ("episode_return", "episode_length", "terminated", "truncated")
_OF_AGENTS = (
    *("reward", "agent_return", "agent_length", "acted", "waiting"),
    *("terminated", "truncated", "unassigned_reward"),
)

# Batches, each with the seconds of compiling and of collecting until then.
Batches = list[tuple[StreamBatch, float, float]]


def start_devices(run: Namespace) -> int:
    """Starts jax with the devices for the lanes; returns the number of devices."""
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # the cores that this process may use
        cpus = len(os.sched_getaffinity(0))
    # A queue of episodes makes devices wait for each other at every step.
    most = 1 if run.num_episodes or run.is_on_host else run.num_envs // _LEAST_ENVS
    good = [n for n in range(1, min(cpus, most) + 1) if run.num_envs % n == 0]
    number = cpus if run.devices == "all" else run.devices or max(good, default=1)
    with contextlib.suppress(RuntimeError):  # jax has started already, in a notebook
        jax.config.update("jax_num_cpu_devices", number)
    found = jax.device_count()
    if jax.default_backend() != "cpu":  # the number of accelerators is fixed
        number = {None: 1, "all": found}.get(run.devices, number)
    if isinstance(run.devices, int) and number > found:
        raise ValueError(f"argument --devices: there are {found}, got {number}")
    return min(number, found)


def make_collector(run: Namespace, num_devices: int = 1) -> tuple[Any, Any]:
    """Makes the collector, its lanes sharded, and the parameters of its policy.

    Raises:
        ValueError: if there are no such environments or devices, or if the number of
            devices does not divide that of the environments.
    """
    options, params = dict(run.env_param), None
    suite, _, env_id = run.env.partition(":")
    if run.is_on_host:
        if suite == "envpool":
            env: Any = envs.from_envpool(env_id, run.num_envs, seed=run.seed, **options)
        else:
            env = envs.from_gymnasium(env_id, run.num_envs, **options)
        return HostCollector(env=env, policy=random_policy(env.action_space)), params
    is_id = not env_id or suite in SUITES
    one: Any = envs.make(run.env, **options) if is_id else _make_own(run.env, options)
    env = envs.vectorize(one, run.num_envs)
    if hasattr(one, "agents"):
        seen, spaces = env.observation_spaces, env.action_spaces
        every = {x: _random_policy(seen[x], spaces[x]) for x in env.groups}
        groups = {agent: x for x, names in env.groups.items() for agent in names}
        policy = agents.policy_map(every, agents.fixed_mapping(groups), env)
        params = dict.fromkeys(every)
    else:
        policy = _random_policy(env.observation_space, env.action_space)
    collector = Collector(env=env, policy=policy)
    if num_devices == 1:
        return collector, params
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), ("lanes",), devices=devices)
    return shard(collector, mesh), params


def collect(run: Namespace, num_devices: int, batches: Batches) -> None:
    """Collects `num_steps` steps of every lane, with a bar if stderr is a terminal.

    Args:
        run: the arguments.
        num_devices: for the lanes.
        batches: gets every batch as soon as it is there, so that Ctrl-C loses none.
    """
    start = time.perf_counter()
    collector, params = make_collector(run, num_devices)
    has_agents = hasattr(collector.env, "groups")

    def keep(trajectory: Transition) -> tuple[Any, Any]:
        """Keeps the fields that a file needs; the others are not stored."""
        drawn = {name: getattr(trajectory, name) for name in _DRAWN if run.plot}
        saved = _by_name(trajectory, has_agents) if run.save else {}
        metrics = agents.summarize_agents(trajectory) if has_agents else None
        return (drawn, saved), metrics

    with Stream(
        collector,
        key=jax.random.key(run.seed),
        params=params,
        steps_per_batch=num_rows(run) * run.num_envs,
        total_steps=run.num_steps * run.num_envs,
        postprocess=keep,
        placement="host",
        prefetch=1,
        progress=sys.stderr.isatty(),
    ) as stream:
        stream.compile()
        compile_time = time.perf_counter() - start
        for batch in stream:
            batches.append((batch, compile_time, stream.stats.seconds))


def join(batches: Batches) -> Result:
    """Joins the batches of `collect`, at least one."""
    parts, compile_times, seconds = zip(*batches, strict=True)
    arrays, metrics = zip(*[batch.trajectory for batch in parts], strict=True)
    drawn, saved = jax.tree.map(lambda *x: np.concatenate(x), *arrays)
    ended = drawn and drawn["terminated"] | drawn["truncated"]
    return Result(
        stats=merge([batch.stats for batch in parts]),
        agents=merge(metrics),
        num_rows=sum(batch.steps for batch in parts),
        compile_time=compile_times[0],
        run_time=seconds[-1],
        drawn={name: x[ended] for name, x in drawn.items()},
        saved=saved,
    )


def play(run: Namespace, num_devices: int) -> Result:
    """Plays exactly `num_episodes` episodes of at most `max_episode_steps`."""
    start = time.perf_counter()
    collector, params = make_collector(run, num_devices)
    has_agents = hasattr(collector.env, "groups")
    if has_agents:
        collector = keep_agents(collector, params)
    carry = collector.init(jax.random.key(run.seed))

    def program(collector: Any, carry: Any, params: Any) -> Any:
        end, episodes = collector.collect_episodes(
            carry, params, run.num_episodes, max_episode_steps=run.max_episode_steps
        )
        metrics = agents.summarize_agents(episodes) if has_agents else None
        drawn = {name: getattr(episodes, name) for name in _DRAWN}
        return summarize(episodes), metrics, end.step - carry.step, drawn

    if isinstance(collector, HostCollector):
        collector.compile(carry, params)
    else:
        program = jax.jit(program).lower(collector, carry, params).compile()
    compiled = time.perf_counter()
    stats, metrics, steps, drawn = jax.device_get(program(collector, carry, params))
    return Result(
        stats=stats,
        agents=metrics,
        num_rows=int(steps) * run.num_envs,
        compile_time=compiled - start,
        run_time=time.perf_counter() - compiled,
        drawn=drawn,
        saved={},
    )


def draw(run: Namespace) -> CollectStats:
    """Draws the first episode that `play` would play, as a GIF."""
    collector, params = make_collector(run)
    key, max_episode_steps = jax.random.key(run.seed), run.max_episode_steps
    return summarize(
        record_gif(collector, key, params, run.gif, max_episode_steps=max_episode_steps)
    )


def inspect(run: Namespace) -> inspection.Report:
    """Compiles `num_steps` steps of every lane for an accelerator."""
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")  # does not look for accelerators
    collector, params = make_collector(run)
    options = {"accelerator": run.inspect, "num_steps": run.num_steps}
    return inspection.inspect(collector, jax.random.key(run.seed), params, **options)


def profile(run: Namespace, num_devices: int) -> profiling.Profile:
    """Times the parts of a batch, and traces one more."""
    collector, params = make_collector(run, num_devices)
    key, size = jax.random.key(run.seed), num_rows(run)
    carry = collector.init(key)
    carry, _ = collector.collect_steps(carry, params, size)  # compiles
    with jax.profiler.trace(run.profile):
        jax.block_until_ready(collector.collect_steps(carry, params, size))
    return profiling.profile(collector, key, params, size)


def num_rows(run: Namespace) -> int:
    """Returns the number of rows in a batch."""
    most = (_MAX_HOST_ROWS if run.is_on_host else _MAX_ROWS) // run.num_envs
    return min(-(-run.num_steps // _NUM_BATCHES), max(1, most))


def _make_own(text: str, options: dict[str, Any]) -> Any:
    """Makes a user's own environment, of `module:Class` or `file.py:function`."""
    where, _, name = text.rpartition(":")
    is_file = where.endswith(".py")
    sys.path.insert(0, str(Path(where).parent) if is_file else "")
    try:
        own = runpy.run_path(where) if is_file else vars(importlib.import_module(where))
        make = own[name]
    except (ImportError, OSError, KeyError) as error:
        raise ValueError(
            "the environment must be one of --list-envs, module:Class or "
            f"file.py:function, got {text}: {error}"
        ) from error
    return make(**options)


def _random_policy(observation_space: Any, action_space: Any) -> Any:
    allowed_fn = masks.find(observation_space, action_space)
    return random_policy(action_space, allowed_fn=allowed_fn)


def _by_name(trajectory: Any, has_agents: bool) -> dict[str, jax.Array]:
    if has_agents:  # their flags and counts are one word
        info = trajectory.info
        named = {name: getattr(info.agents, name) for name in _OF_AGENTS}
        trajectory = trajectory.replace(info={"agents": named, "env": info.env})
    leaves, keystr = jax.tree.leaves_with_path(trajectory), jax.tree_util.keystr
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

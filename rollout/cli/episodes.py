"""A run of `--num-episodes`, exactly N of them, and the one episode of `--gif`."""

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

import envs
from envs.render import check_render
from envs.types import ArrayTree
from rollout.cli import agents
from rollout.cli.arguments import InputError, naming_parameters
from rollout.cli.collector import make_collector
from rollout.cli.types import Played, Recorded
from rollout.collector import Collector
from rollout.host.collector import HostCollector
from rollout.policies.basic import random_policy
from rollout.stats import CollectStats, summarize
from rollout.types import Carry, Episodes


def play(args: argparse.Namespace) -> Played:
    """Plays exactly `num_episodes` episodes of at most `max_steps` steps each."""
    with naming_parameters(args):
        collector, params = make_collector(args)
        layout = agents.layout_of(collector)
        if layout:
            collector = agents.keep(collector, layout)
        start = time.perf_counter()
        carry = collector.init(jax.random.key(args.seed))
        counts = {"num_episodes": args.num_episodes, "max_steps": args.max_steps}
        if isinstance(collector, HostCollector):
            collector.compile(carry, params)
            program = functools.partial(_play, **counts)
        else:
            program = _play_jitted.lower(collector, carry, params, **counts).compile()
    compiled = time.perf_counter()
    episodes, stats, num_steps = jax.device_get(program(collector, carry, params))
    run_time = time.perf_counter() - compiled
    num_rows = int(num_steps) * args.num_envs
    figures = agents.kept(layout, episodes.accumulated) if layout else None
    return Played(episodes, stats, num_rows, compiled - start, run_time, figures)


def record(args: argparse.Namespace) -> Recorded:
    """Plays the first episode of what `play` would, and keeps its states."""
    with naming_parameters(args):
        env = envs.make(args.env, **dict(args.env_param))
        _check_drawable(env)
        collector = Collector(
            env=envs.vectorize(envs.expose_state(env), 1),
            policy=random_policy(env.action_space),
        )
        carry = collector.init(jax.random.key(args.seed))
        result = _record(collector, carry, max_length=args.max_steps)
    info, rewards, episodes = jax.device_get(result)
    length = int(episodes.episode_length[0])
    states = jax.tree.map(
        lambda old, new: jnp.concatenate([old[:length], new[length - 1 : length]]),
        info["state"],
        info["next_state"],
    )
    return Recorded(env, states, rewards[:length], episodes)


def _play(
    collector: Collector | HostCollector,
    carry: Carry,
    params: Any,
    *,
    num_episodes: int,
    max_steps: int,
) -> tuple[Episodes, CollectStats, jax.Array]:
    """Plays, and counts the steps that every lane took."""
    end, episodes = collector.collect_episodes(
        carry, params, num_episodes, max_steps=max_steps
    )
    return episodes, summarize(episodes), end.step - carry.step


_play_jitted = jax.jit(_play, static_argnames=("num_episodes", "max_steps"))


@functools.partial(jax.jit, static_argnames="max_length")
def _record(
    collector: Collector, carry: Carry, *, max_length: int
) -> tuple[ArrayTree, jax.Array, Episodes]:
    """Keeps the drawn fields, `[max_length, ...]`; the others get no buffer."""
    _, trajectory, episodes = collector.collect_padded_episodes(
        carry, None, 1, max_length=max_length
    )
    one = jax.tree.map(lambda x: x[:, 0], trajectory)
    return one.info, one.reward, episodes


def _check_drawable(env: envs.Env) -> None:
    try:
        check_render(env)
    except (ValueError, ImportError) as error:
        raise InputError(f"argument --gif: {error}") from error

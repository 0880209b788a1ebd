"""Makes the collector of a run: environments by id, under the random policy."""

import contextlib
import os
from typing import Any

import jax

from rollout.agents.mapping import fixed_mapping
from rollout.agents.policy_map import policy_map
from rollout.cli.arguments import Run
from rollout.collector import Collector
from rollout.envs.host.envpool import from_envpool
from rollout.envs.host.gymnasium import from_gymnasium
from rollout.envs.registry import make_agents, make_vec
from rollout.envs.vectorize_agents import vectorize_agents
from rollout.host.host_collector import HostCollector
from rollout.policies import masks
from rollout.policies.basic import random_policy
from rollout.sharding import shard

# Environments per CPU device; with a quarter, one device is as fast (docs/speed.md).
_LEAST_ENVS = 2048


def make_collector(run: Run, num_devices: int = 1) -> tuple[Any, Any]:
    """Makes the collector, its lanes sharded, and the parameters of its policy.

    Raises:
        ValueError: if there are no such environments.
    """
    options = dict(run.env_param)
    if run.is_on_host:
        env: Any = _make_host(run, options)
        return HostCollector(env=env, policy=random_policy(env.action_space)), None
    if run.has_agents:
        env = vectorize_agents(make_agents(run.env, **options), run.num_envs)
        seen, spaces = env.observation_spaces, env.action_spaces
        every = {x: _random_policy(seen[x], spaces[x]) for x in env.groups}
        groups = {agent: x for x, agents in env.groups.items() for agent in agents}
        policy = policy_map(every, fixed_mapping(groups), env)
        params = dict.fromkeys(every)
    else:
        env = make_vec(run.env, run.num_envs, **options)
        policy = _random_policy(env.observation_space, env.action_space)
        params = None
    collector = Collector(env=env, policy=policy)
    if num_devices == 1:
        return collector, params
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), ("lanes",), devices=devices)
    return shard(collector, mesh), params


def start_devices(run: Run) -> int:
    """Starts jax with the devices for the lanes; returns the number of devices.

    Raises:
        ValueError: if there are fewer, or if the number does not divide the lanes.
    """
    cpus, asked = _count_cpus(), run.devices
    most = max(1, min(cpus, run.num_envs // _LEAST_ENVS))
    most = 1 if run.num_episodes else most  # a queue makes devices wait at every step
    fastest = next(n for n in range(most, 0, -1) if run.num_envs % n == 0)
    wanted: Any = {None: fastest, "all": cpus}.get(asked, asked)
    with contextlib.suppress(RuntimeError):  # jax has started already, in a notebook
        jax.config.update("jax_num_cpu_devices", wanted)
    found = jax.device_count()
    if jax.default_backend() != "cpu":  # the number of accelerators is fixed
        wanted = {None: 1, "all": found}.get(asked, asked)
    if asked is None:
        return min(wanted, found)
    if wanted > found:
        raise ValueError(f"argument --devices: there are {found}, got {wanted}")
    if run.num_envs % wanted:
        must = f"must divide --num-envs {run.num_envs}"
        raise ValueError(f"argument --devices: {must}, got {wanted}")
    return wanted


def _count_cpus() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _make_host(run: Run, options: dict[str, Any]) -> Any:
    suite, _, env_id = run.env.partition(":")
    if suite == "envpool":
        return from_envpool(env_id, run.num_envs, seed=run.seed, **options)
    return from_gymnasium(env_id, run.num_envs, **options)


def _random_policy(observation_space: Any, action_space: Any) -> Any:
    mask_fn = masks.find(observation_space, action_space)
    return random_policy(action_space, mask_fn=mask_fn)

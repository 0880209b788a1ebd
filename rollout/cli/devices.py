"""Sets the number of CPU devices, before jax starts."""

import argparse
import contextlib
import os
from typing import Any

import jax

from rollout.cli.arguments import InputError
from rollout.collector import Collector
from rollout.devices import shard

# Environments of a CPU device; with a quarter, one is as fast (docs/speed.md).
_LEAST_ENVS = 2048


def start(args: argparse.Namespace) -> int:
    """Decides on the number of devices and starts jax with them.

    Raises:
        InputError: if there are not so many, or if the environments do not divide.
    """
    cpus = _count_cpus()
    wanted: Any = {None: _fastest(args, cpus), "all": cpus}.get(
        args.devices, args.devices
    )
    with contextlib.suppress(RuntimeError):  # jax has started already, in a notebook
        now = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
        most = max(wanted, now)
        jax.config.update("jax_num_cpu_devices", most)
    found = jax.device_count()
    # A run takes the devices of jax's default backend; only a CPU can make more.
    if jax.default_backend() != "cpu":
        wanted = {None: 1, "all": found}.get(args.devices, args.devices)
    if args.devices is None:
        return min(wanted, found)
    if wanted > found:
        raise InputError(f"argument --devices: there are {found}, got {wanted}")
    if args.num_envs % wanted:
        raise InputError(
            f"argument --devices: must divide --num-envs {args.num_envs}, got {wanted}"
        )
    return wanted


def spread(collector: Collector, num_devices: int) -> Collector:
    """Spreads a collector over so many devices, unless it is one."""
    if num_devices == 1:
        return collector
    devices = jax.devices()[:num_devices]
    return shard(collector, jax.make_mesh((num_devices,), ("lanes",), devices=devices))


def _fastest(args: argparse.Namespace, cpus: int) -> int:
    """The most devices of a CPU that are worth it, by the number of environments."""
    if args.num_episodes:  # their queue waits for all devices at every step
        return 1
    most = max(1, min(cpus, args.num_envs // _LEAST_ENVS))
    return next(n for n in range(most, 0, -1) if args.num_envs % n == 0)


def _count_cpus() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

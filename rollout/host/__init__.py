"""Collectors over environments that are not JAX, and collectors in other processes.

`host_collector` is the facade, `asynchronous` the one for environments of different
speed; `loop` acts, steps and resets, with one compiled program of `policy_runner` for
the policy; `seeds` draws the seeds of episodes, `episode_plan` assigns exactly N of
them to lanes, `rows` holds rows and computes returns, and `restarts` restarts
environments. `remote` runs collectors of either kind in actors of Ray.
"""

from rollout.envs.host.probe import Finding, probe
from rollout.host.asynchronous import AsyncCollector, Served, by_env
from rollout.host.host_collector import HostCollector
from rollout.host.remote import RemoteBatch, RemoteBatches, RemoteStats, remote_batches
from rollout.host.restarts import FaultStats

__all__ = [
    "AsyncCollector",
    "FaultStats",
    "Finding",
    "HostCollector",
    "RemoteBatch",
    "RemoteBatches",
    "RemoteStats",
    "Served",
    "by_env",
    "probe",
    "remote_batches",
]

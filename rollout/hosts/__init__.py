"""Collectors over environments that are not JAX, and collectors in other processes.

`collector` is the facade, `asynchronous` the one for environments of different speed;
`loop` acts, steps and resets, with one compiled `program` for the policy; `seeds` draws
the seeds of episodes, `assignment` assigns exactly N of them to lanes, `block` holds
rows and computes returns, and `faults` restarts environments. `remote` runs collectors
of either kind in actors of Ray.
"""

from envs.host.probe import Finding, probe
from rollout.hosts.asynchronous import AsyncCollector, Served, by_env
from rollout.hosts.collector import HostCollector
from rollout.hosts.faults import FaultStats
from rollout.hosts.remote import (
    RemoteBatch,
    RemoteBatches,
    RemoteStats,
    remote_batches,
)

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

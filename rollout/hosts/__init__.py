"""The folds over environments that are not JAX, and collectors in other processes.

`collector` is the facade; `loop` steps environments around one compiled `program` per
step; `seeds` draws what episodes begin with, `assignment` says who plays which of
exactly N, `block` holds rows and counts them, and `faults` restarts what fails.
`remote` has collectors, of either kind, in actors of Ray.
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

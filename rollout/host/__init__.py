"""Collectors over environments that are not JAX, and collectors in other processes.

`host_collector` is the facade; `latest_carry` says which carry may begin a call; `loop`
acts, steps and resets, with one compiled program of `policy_runner` for the policy;
`seeds` draws the seeds of episodes, `episode_plan` assigns exactly N of them to lanes,
`rows` holds rows, `served` sorts those of environments of different speed, and `ctrl_c`
holds Ctrl-C back. `remote` runs collectors of either kind in actors of Ray.
"""

from rollout.host.host_collector import HostCollector
from rollout.host.loop import FaultStats
from rollout.host.remote import RayCollector, RemoteBatch, RemoteStats
from rollout.host.served import AsyncInfo, regroup_by_env

__all__ = [
    "AsyncInfo",
    "FaultStats",
    "HostCollector",
    "RayCollector",
    "RemoteBatch",
    "RemoteStats",
    "regroup_by_env",
]

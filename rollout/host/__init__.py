"""Collectors for host environments, which are not JAX, and collectors in Ray actors.

`host_collector` is the facade. `latest_carry` rejects stale carries. `loop` acts, steps
and resets; `policy_runner` compiles the policy to one program. `seeds` derives the
seeds of episodes, `episode_plan` assigns exactly N episodes to lanes, and `rows` stores
transitions. `served` sorts the transitions of asynchronous environments by environment,
and `ctrl_c` delays Ctrl-C. `remote` runs collectors of either kind in Ray actors.
"""

from rollout.host.host_collector import HostCollector
from rollout.host.loop import FaultStats
from rollout.host.remote import RayCollector, RemoteBatch, RemoteStats
from rollout.host.rows import AsyncInfo, regroup_by_env

__all__ = [
    "AsyncInfo",
    "FaultStats",
    "HostCollector",
    "RayCollector",
    "RemoteBatch",
    "RemoteStats",
    "regroup_by_env",
]

"""Collectors for host environments, which are not in JAX, and for Ray actors.

`host_collector` has the public methods. `loop` steps the environments and owns the
state of the collection. `host_policy` compiles the policy to one program,
`episode_plan` assigns exactly N episodes to lanes, `rows` stores transitions, and
`ctrl_c` delays Ctrl-C. `remote` runs collectors of either kind in Ray actors.
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

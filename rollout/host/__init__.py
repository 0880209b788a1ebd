"""Collectors for host environments, which are not in JAX, and for Ray actors.

Begin with `host_state` and `host_step`: the state of a collection, and a step as
functions of it, as in `rollout.kernel.step`. `asynchronous` chooses the lanes of a step
if environments step asynchronously. `host_collector` has the public methods. `session`
runs their calls, and recovers after an interrupt. `host_policy` compiles the policy to
one program, `episode_plan` assigns exactly N episodes to lanes, `rows` stores
transitions, and `ctrl_c` delays Ctrl-C. `remote` runs collectors of either kind in Ray
actors.
"""

from rollout.host.host_collector import HostCollector
from rollout.host.host_state import FaultStats
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

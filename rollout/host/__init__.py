"""The folds over environments that are not JAX.

`collector` is the facade; `run` the loop in Python, around one compiled `program` per
step; `lanes` counts episodes and their seeds, `seats` says who plays which of exactly
N, `rows` is what is written, and `faults` what is done where an environment fails.
`probe` looks for what new environments get wrong.
"""

from rollout.host.asynchronous import AsyncCollector, Served, by_env
from rollout.host.collector import HostCollector
from rollout.host.faults import FaultStats
from rollout.host.probe import Finding, probe

__all__ = [
    "AsyncCollector",
    "FaultStats",
    "Finding",
    "HostCollector",
    "Served",
    "by_env",
    "probe",
]

"""Collects reinforcement-learning experience in JAX, as a pure function.

A rollout is a fold over time of one pure step. `Collector` folds it; `random_policy`,
`stateless_policy` and `recurrent_policy` make a policy; `policies` has wrappers for
exploration, such as `EpsilonGreedy` and `RandomWarmup`; `summarize` computes statistics
of finished episodes. All functions work inside an outer `jit`, and are jitted if called
from Python.

`Stream` yields batches to a training loop in Python; `checkpoint` saves and restores
it; `shard` shards the lanes over devices. `profile` times the parts of a step, and
`inspect_program` reports the launches and waits of a program on an accelerator, even on
a machine without one.

This package exports the names that most programs need. `rollout.agents` is for several
agents: it assigns policies to agents and returns the transitions of each agent.
`rollout.host` is for environments outside of JAX, `rollout.recommendation` for items
and users. `rollout.envs` has environments, and `rollout.buffers` has replay buffers.

`base` is the package that all others import, with checks and pytrees; `types` has the
contracts, and `version` the version; `stats`,
`trajectories`, `targets` and `minibatches` compute on trajectories, and `logs` has a
window over episodes and flattens statistics; `distributions` has distributions over
actions, `networks` encoders of observations, `normalization` statistics of
observations, and `training` the interface of agents; `collector`, `evaluation`,
`env_checker`, `profiling` and `sharding` define `Collector`, `evaluate`, `check_env`,
`profile` and `shard`; `stream` has the batches of a `Stream`; `gif` renders an episode;
`cli` is the command line. The packages `policies`, `kernel` and `inspection` list their
modules.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rollout import agents as agents
from rollout import checkpoint
from rollout import envs as envs
from rollout import host as host
from rollout import policies as policies
from rollout import profiling as profiling
from rollout import recommendation as recommendation
from rollout import stats as stats
from rollout import stream as stream
from rollout import trajectories as trajectories
from rollout import types as types
from rollout.base.names import raise_missing
from rollout.collector import Collector
from rollout.env_checker import check_env
from rollout.evaluation import evaluate
from rollout.gif import record_gif
from rollout.host import HostCollector
from rollout.logs import EpisodeWindow, log_stats
from rollout.minibatches import permutation, scan_minibatches
from rollout.policies import (
    random_policy,
    recurrent_policy,
    stateless_policy,
)
from rollout.profiling import profile
from rollout.sharding import shard
from rollout.stats import summarize
from rollout.stream import Stream
from rollout.targets import discounted_returns, gae, lambda_returns, next_values, vtrace
from rollout.types import Accumulator, Carry, Policy, PolicyStep, Transition
from rollout.version import __version__ as __version__

if TYPE_CHECKING:
    from rollout import buffers as buffers
    from rollout import inspection as inspection
    from rollout.inspection import inspect_program as inspect_program

__all__ = [
    "Accumulator",
    "Carry",
    "Collector",
    "EpisodeWindow",
    "HostCollector",
    "Policy",
    "PolicyStep",
    "Stream",
    "Transition",
    "check_env",
    "checkpoint",
    "discounted_returns",
    "evaluate",
    "gae",
    "inspect_program",
    "lambda_returns",
    "log_stats",
    "next_values",
    "permutation",
    "profile",
    "random_policy",
    "record_gif",
    "recurrent_policy",
    "scan_minibatches",
    "shard",
    "stateless_policy",
    "summarize",
    "vtrace",
]

_LAZY = ("buffers", "distributions", "inspection", "networks", "recipes", "training")


def __getattr__(name: str) -> Any:
    """Imports modules that not every program needs on first access."""
    if name == "inspect_program":
        return importlib.import_module("rollout.inspection").inspect_program
    if name not in _LAZY:
        raise_missing("rollout", name)
    return importlib.import_module(f"rollout.{name}")

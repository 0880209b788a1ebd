"""Environments of all supported libraries with a common interface.

`make` and `make_vec` create environments by id, with one agent or several.
`from_gymnax` adapts any gymnax-style object. `vectorize` runs copies of an environment
in parallel with auto-reset. To write a custom environment, implement the two methods of
`Env`, or of `MultiAgentEnv` for several agents. `render_gif` renders an episode.
`from_gymnasium`, `from_pettingzoo` and `make_worker_envs` create a `HostVectorEnv` from
environments that are not written in JAX.

This package exports the names that most programs need. `rollout.envs.suites` adapts
suites of environments and imports each suite on first use. `rollout.envs.host` runs
environments that are not written in JAX. `rollout.envs.wrappers` and
`rollout.envs.spaces` contain all wrappers and all spaces.
`rollout.envs.recommendation` and `rollout.envs.ratings` simulate users who rate items.
`rollout.envs.render` renders episodes.

`types` and `multi_agent` define the contracts, and `registry` looks up ids.
`vectorize` creates the lanes, with one agent or several, and `auto_reset` resets them.
"""

from typing import TYPE_CHECKING, Any

from rollout.base.names import raise_missing
from rollout.envs import multi_agent as multi_agent
from rollout.envs import ratings as ratings
from rollout.envs import recommendation as recommendation
from rollout.envs import registry as registry
from rollout.envs import render as render
from rollout.envs import spaces as spaces
from rollout.envs import suites as suites
from rollout.envs import types as types
from rollout.envs import wrappers as wrappers
from rollout.envs.host.envpool import from_envpool
from rollout.envs.host.gymnasium import from_gymnasium
from rollout.envs.host.pettingzoo import from_pettingzoo
from rollout.envs.host.types import EnvFault
from rollout.envs.host.worker_envs import make_worker_envs
from rollout.envs.host.wrappers import NormalizeHostEnv
from rollout.envs.registry import env_ids, make, make_vec
from rollout.envs.render import render_gif
from rollout.envs.spaces import Box, Discrete
from rollout.envs.suites import from_gymnax
from rollout.envs.types import EnvStep
from rollout.envs.vectorize import vectorize, vectorize_each
from rollout.envs.wrappers import (
    ActionRepeat,
    FrameStack,
    NormalizeObs,
    NormalizeReward,
    ObserveInfo,
    RescaleAction,
    TimeLimit,
    TransformObs,
    TransformReward,
)

__all__ = [
    "ActionRepeat",
    "Box",
    "Discrete",
    "EnvFault",
    "EnvStep",
    "FrameStack",
    "NormalizeHostEnv",
    "NormalizeObs",
    "NormalizeReward",
    "ObserveInfo",
    "RescaleAction",
    "TimeLimit",
    "TransformObs",
    "TransformReward",
    "env_ids",
    "from_envpool",
    "from_gymnasium",
    "from_gymnax",
    "from_pettingzoo",
    "make",
    "make_vec",
    "make_worker_envs",
    "render_gif",
    "vectorize",
    "vectorize_each",
]

if not TYPE_CHECKING:  # A type checker would accept every attribute.

    def __getattr__(name: str) -> Any:
        """Raises an error that contains the right name if it is known."""
        raise_missing("rollout.envs", name)

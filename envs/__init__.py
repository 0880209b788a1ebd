"""Environments of any kind, behind one contract.

`make` and `make_vec` make environments by id, of one agent or several, `from_gymnax`
adapts any gymnax-style object, `vectorize` puts copies side by side with auto-reset.
For a custom environment, write the two methods of `Env`, or of `MultiAgentEnv` for
several agents. `render_gif` draws an episode. `from_gymnasium` and `make_worker_envs`
make a `HostVectorEnv` of environments that are not JAX.

This package exports what most programs need. `rollout.envs.suites` adapts suites of
environments, each imported only when used; `rollout.envs.host` has environments that
are not JAX; `rollout.envs.wrappers` and `rollout.envs.spaces` have all wrappers and all
spaces; `rollout.envs.recommendation` and `rollout.envs.ratings` have users and items;
`rollout.envs.render` draws.

`types` and `multi_agent` have the contracts, `registry` the ids; `vectorize` makes
lanes, which `auto_reset` resets, and `joint` lets several agents act as one. Below
them: `trees` works on pytrees, `prng` draws random numbers, `masked_update` computes
something for few lanes, `cost_estimate` counts the operations of a reset, and
`optional_import` imports suites.
"""

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
from rollout.envs.host.normalize_host import NormalizeHostEnv
from rollout.envs.host.types import EnvFault
from rollout.envs.host.worker_envs import make_worker_envs
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
    "make",
    "make_vec",
    "make_worker_envs",
    "render_gif",
    "vectorize",
    "vectorize_each",
]

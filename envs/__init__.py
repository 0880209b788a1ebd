"""Environments of any kind, behind one contract.

`make` and `make_vec` make environments by id, `from_gymnax` adapts any gymnax-style
object, `vectorize` puts copies side by side with auto-reset. For a custom environment,
write the two methods of `Env`. `render_gif` draws an episode. `from_gymnasium` and
`workers` make a `HostVectorEnv` of environments that are not JAX. For several agents,
`make_agents` makes environments by id, `vectorize_agents` puts copies side by side, and
`MultiAgentEnv` is the contract of a custom one.

This package exports what most programs need. `envs.suites` adapts suites of
environments, each imported only when used; `envs.host` has environments that are not
JAX; `envs.wrappers` and `envs.spaces` have all wrappers and all spaces;
`envs.recommendation` and `envs.interactions` have users and items; `envs.render` draws.
"""

from envs import interactions as interactions
from envs import recommendation as recommendation
from envs import render as render
from envs import spaces as spaces
from envs import suites as suites
from envs import wrappers as wrappers
from envs.host.envpool import from_envpool
from envs.host.gymnasium import from_gymnasium
from envs.host.types import EnvFault, HostVectorEnv
from envs.host.workers import workers
from envs.joint import vectorize_agents
from envs.multi_agent import MultiAgentEnv
from envs.recommendation import RecommendationEnv
from envs.registry import env_ids, make, make_agents, make_vec
from envs.render import render_gif
from envs.spaces import Box, Dict, Discrete, Space, Tuple
from envs.suites import from_gymnax
from envs.types import Env, EnvStep, VectorEnv
from envs.vectorize import vectorize, vectorize_each
from envs.wrappers import (
    ActionRepeat,
    EndOnFault,
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
    "Dict",
    "Discrete",
    "EndOnFault",
    "Env",
    "EnvFault",
    "EnvStep",
    "FrameStack",
    "HostVectorEnv",
    "MultiAgentEnv",
    "NormalizeObs",
    "NormalizeReward",
    "ObserveInfo",
    "RecommendationEnv",
    "RescaleAction",
    "Space",
    "TimeLimit",
    "TransformObs",
    "TransformReward",
    "Tuple",
    "VectorEnv",
    "env_ids",
    "from_envpool",
    "from_gymnasium",
    "from_gymnax",
    "make",
    "make_agents",
    "make_vec",
    "render_gif",
    "vectorize",
    "vectorize_agents",
    "vectorize_each",
    "workers",
]

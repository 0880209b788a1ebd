"""The boundary: any environment, seen through one contract.

`make` and `make_vec` give gymnax environments by id, `from_gymnax` adapts any
gymnax-style object, `vectorize` puts copies side by side with auto-reset. To bring an
environment of your own, write the two methods of `Env`. `render_gif` draws an episode.
`from_gymnasium` and `workers` give environments that are not JAX, a `HostVectorEnv`.
Where several agents act, `make_agents` gives environments of JaxMARL and pgx by id,
`from_jaxmarl` and `from_pgx` adapt one, `vectorize_agents` puts copies side by side,
and `MultiAgentEnv` is what to write. Suites are imported only when they are needed.

What most programs need stands here; `envs.suites` adapts further suites, `envs.spaces`
has all spaces, `envs.wrappers` all wrappers, `envs.recommendation` and
`envs.interactions` users and items, `envs.render` what drawing needs.
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

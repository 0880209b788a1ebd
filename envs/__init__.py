"""The boundary: any environment, seen through one contract.

`make` and `make_vec` give gymnax environments by id, `from_gymnax` adapts any
gymnax-style object, `vectorize` puts copies side by side with auto-reset. To bring an
environment of your own, write the two methods of `Env`. `render_gif` draws an episode.
`from_gymnasium` and `workers` give environments that are not JAX, a `HostVectorEnv`.
Where several agents act, `make_agents` gives environments of JaxMARL and pgx by id,
`from_jaxmarl` and `from_pgx` adapt one, `vectorize_agents` puts copies side by side,
and `MultiAgentEnv` is what to write. Suites are imported only when they are needed.
"""

from envs.host.envpool import from_envpool
from envs.host.gymnasium import from_gymnasium
from envs.host.types import AsyncHostVectorEnv, EnvFault, HostStep, HostVectorEnv
from envs.host.workers import workers
from envs.interactions import Interactions, from_interactions
from envs.joint import vectorize_agents
from envs.multi_agent import (
    AgentInfo,
    MultiAgentEnv,
    MultiAgentInfo,
    MultiAgentStep,
)
from envs.recommendation import LeaveByCategory, LeaveByDistance, RecommendationEnv
from envs.registry import env_ids, make, make_agents, make_vec
from envs.render import can_render, expose_state, render_gif
from envs.spaces import (
    Box,
    Composite,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Repeated,
    Space,
    Tuple,
)
from envs.suites import (
    from_brax,
    from_craftax,
    from_gymnax,
    from_jaxmarl,
    from_jumanji,
    from_jumanji_agents,
    from_navix,
    from_pgx,
    from_pgx_seat,
    from_playground,
    from_xminigrid,
)
from envs.types import RESET, Env, EnvStep, Lanes, VectorEnv
from envs.vectorize import vectorize, vectorize_each
from envs.wrappers import (
    ActionRepeat,
    EndOnFault,
    ForceLength,
    FrameStack,
    History,
    NoRepeat,
    NormalizeObs,
    NormalizeReward,
    ObserveInfo,
    ObservePrevious,
    RescaleAction,
    TimeLimit,
    TransformObs,
    TransformReward,
)

__all__ = [
    "RESET",
    "ActionRepeat",
    "AgentInfo",
    "AsyncHostVectorEnv",
    "Box",
    "Composite",
    "Dict",
    "Discrete",
    "EndOnFault",
    "Env",
    "EnvFault",
    "EnvStep",
    "ForceLength",
    "FrameStack",
    "History",
    "HostStep",
    "HostVectorEnv",
    "Interactions",
    "Lanes",
    "LeaveByCategory",
    "LeaveByDistance",
    "MultiAgentEnv",
    "MultiAgentInfo",
    "MultiAgentStep",
    "MultiBinary",
    "MultiDiscrete",
    "NoRepeat",
    "NormalizeObs",
    "NormalizeReward",
    "ObserveInfo",
    "ObservePrevious",
    "RecommendationEnv",
    "Repeated",
    "RescaleAction",
    "Space",
    "TimeLimit",
    "TransformObs",
    "TransformReward",
    "Tuple",
    "VectorEnv",
    "can_render",
    "env_ids",
    "expose_state",
    "from_brax",
    "from_craftax",
    "from_envpool",
    "from_gymnasium",
    "from_gymnax",
    "from_interactions",
    "from_jaxmarl",
    "from_jumanji",
    "from_jumanji_agents",
    "from_navix",
    "from_pgx",
    "from_pgx_seat",
    "from_playground",
    "from_xminigrid",
    "make",
    "make_agents",
    "make_vec",
    "render_gif",
    "vectorize",
    "vectorize_agents",
    "vectorize_each",
    "workers",
]

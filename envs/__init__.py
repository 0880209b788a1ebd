"""The boundary: any environment, seen through one contract.

`make` and `make_vec` give gymnax environments by id, `from_gymnax` adapts any
gymnax-style object, `vectorize` puts copies side by side with auto-reset. To bring an
environment of your own, write the two methods of `Env`. gymnax is imported only when
it is called for.
"""

from envs.from_gymnax import from_gymnax
from envs.registry import env_ids, make, make_vec
from envs.spaces import Box, Discrete
from envs.types import RESET, Env, EnvStep, Lanes, Space, VectorEnv
from envs.vectorize import vectorize

__all__ = [
    "RESET",
    "Box",
    "Discrete",
    "Env",
    "EnvStep",
    "Lanes",
    "Space",
    "VectorEnv",
    "env_ids",
    "from_gymnax",
    "make",
    "make_vec",
    "vectorize",
]

"""Vector environments that step outside JAX, with one interface.

- `types` defines the interfaces `HostVectorEnv` and `AsyncHostVectorEnv`.
- `local_envs` steps environments in this process, and `worker_envs` in the worker
  processes of `workers`.
- `gymnasium`, `envpool` and `pettingzoo` adapt environments of these packages. For
  PettingZoo, `pettingzoo_agents` reads the agents and their spaces, and
  `pettingzoo_adapters` gives one environment the methods of `gymnasium.Env`.
- `wrappers` has the base class of wrappers, and normalizes observations and rewards.
- `arrays` defines the arrays that environments write to and converts actions.
- `env_checks` validates environments, calls, observations and actions.
"""

from rollout.envs.host.types import (
    AsyncHostVectorEnv,
    EnvFault,
    HostStep,
    HostVectorEnv,
)

__all__ = ["AsyncHostVectorEnv", "EnvFault", "HostStep", "HostVectorEnv"]

"""Environments that are not JAX, behind one contract.

- `types`: the contracts `HostVectorEnv` and `AsyncHostVectorEnv`.
- `local_envs` steps environments in this process; `worker_envs` steps them in others:
  `worker_process` is one of these, `worker_pool` starts, asks and ends all of them,
  `shared_memory` is the memory that they share.
- `gymnasium` and `envpool` adapt those packages, and import them when first used;
  `gymnasium_actions` converts actions for them.
- `host_wrapper` is the base of wrappers; `normalize_host` normalises observations and
  rewards.
- `space_check` finds observations and actions that are not finite or not in their
  space.
- Shared by these: `arrays`, the arrays that environments write to; `request_checks`;
  `ownership`, who stepped an environment last; `exceptions`, for another process.
"""

from rollout.envs.host.types import (
    AsyncHostVectorEnv,
    EnvFault,
    HostStep,
    HostVectorEnv,
)

__all__ = ["AsyncHostVectorEnv", "EnvFault", "HostStep", "HostVectorEnv"]

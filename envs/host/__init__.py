"""Vector environments that step outside JAX, with one interface.

- `types` defines the interfaces `HostVectorEnv` and `AsyncHostVectorEnv`.
- `local_envs` steps environments in this process. `worker_envs` steps environments in
  worker processes: `worker_process` is the loop of a worker, `worker_pool` manages all
  workers, and `shared_memory` holds the arrays that they write to.
- `gymnasium` and `envpool` adapt these packages and import them on first use;
  `gymnasium_actions` converts actions to Gymnasium's format.
- `host_wrapper` defines the base class of wrappers; `normalize_host` normalizes
  observations and rewards.
- `space_check` reports observations and actions that are not finite or outside their
  space.
- `arrays` defines the arrays that environments write to, `request_checks` validates
  environments and calls, `ownership` records the last user of an environment, and
  `exceptions` makes exceptions picklable.
"""

from rollout.envs.host.types import (
    AsyncHostVectorEnv,
    EnvFault,
    HostStep,
    HostVectorEnv,
)

__all__ = ["AsyncHostVectorEnv", "EnvFault", "HostStep", "HostVectorEnv"]

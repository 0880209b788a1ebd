"""Environments that are not JAX, behind one contract.

- `types`: the contracts `HostVectorEnv` and `AsyncHostVectorEnv`.
- `local` steps environments in this process; `workers` steps them in other processes:
  `worker` is one such process, `crew` starts, asks and ends all of them, `memory` is
  the memory that they share.
- `gymnasium` and `envpool` adapt those packages, and import them when first used;
  `spaces` converts actions for them.
- `probe` looks for mistakes of new environments; `guard` finds observations that are
  not finite or not in their space.
- `simulated`: a JAX environment that answers after a latency, for tests and teaching.
- Shared by these: `arrays`, the arrays that environments write to; `checks` of
  requests; `claims`, who stepped an environment last; `states`, an environment as
  bytes; `faults`, exceptions as bytes.
"""

from rollout.envs.host.types import (
    AsyncHostVectorEnv,
    EnvFault,
    HostStep,
    HostVectorEnv,
)

__all__ = ["AsyncHostVectorEnv", "EnvFault", "HostStep", "HostVectorEnv"]

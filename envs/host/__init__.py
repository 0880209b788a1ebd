"""Environments that are not JAX, seen through one contract.

`types` has the contracts; `local` steps environments in this process and `workers` in
others; `gymnasium` and `envpool` adapt those packages, which are imported only when
they are called for; `spaces` converts their spaces; `simulated` is a JAX environment
that answers after a latency, for tests and teaching. `probe` looks for what new
environments get wrong, and `guard` for observations that no policy should see.

Below them: `arrays` has the memory that environments write to, `checks` the checks of
requests, `claims` who stepped environments last, `states` what a checkpoint saves,
`faults` exceptions on their way between processes; `worker` is a worker process, `crew`
all of them as the main process sees them, `memory` what they share.
"""

from envs.host.types import AsyncHostVectorEnv, EnvFault, HostStep, HostVectorEnv

__all__ = ["AsyncHostVectorEnv", "EnvFault", "HostStep", "HostVectorEnv"]

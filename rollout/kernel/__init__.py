"""The kernel: the pure step, the keys it draws from, and the loop over whole episodes.

A fold over time needs only `init` and `step`; `pack` and `unpack` make stacking
transitions cheap.

`step` has the step, `episode_keys` every key and episode id, and `episodes` the loop
that plays exactly N.
"""

from rollout.kernel.step import (
    act,
    apply_record_fn,
    init,
    mask_out,
    next_episodes,
    pack,
    policy_keys,
    restart,
    roots_of,
    step,
    step_env,
    unpack,
    values_where,
    writable_in_cuda_graph,
)

__all__ = [
    "act",
    "apply_record_fn",
    "init",
    "mask_out",
    "next_episodes",
    "pack",
    "policy_keys",
    "restart",
    "roots_of",
    "step",
    "step_env",
    "unpack",
    "values_where",
    "writable_in_cuda_graph",
]

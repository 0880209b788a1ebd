"""The kernel: the pure step, the keys it draws from, and the loop over whole episodes.

A fold over time needs only `init` and `step`; `pack` and `unpack` make stacking
transitions cheap.

`step` has the step, `episode_keys` every key and episode id, and `episodes` the loop
that plays exactly N.
"""

from rollout.kernel.step import (
    Setup,
    act,
    init,
    mask_out,
    next_episodes,
    pack,
    policy_keys,
    record,
    restart,
    roots_of,
    setup_of,
    step,
    step_env,
    unpack,
    values_where,
    written,
)

__all__ = [
    "Setup",
    "act",
    "init",
    "mask_out",
    "next_episodes",
    "pack",
    "policy_keys",
    "record",
    "restart",
    "roots_of",
    "setup_of",
    "step",
    "step_env",
    "unpack",
    "values_where",
    "written",
]

"""The kernel: the pure step, the folds over it, and the keys it draws from.

Begin with `step`, one screen and a half. `fold` folds it over T steps, and `episodes`
until exactly N episodes are done. `episode_keys` derives every key and episode id,
`policy_state` and `accumulators` start anew with an episode, and `values` calls the
critic.
"""

from rollout.kernel.episode_keys import next_episodes
from rollout.kernel.fold import collect_steps, mask_out, roots_of, scan_steps
from rollout.kernel.step import act, init, restart, step, step_env

__all__ = [
    "act",
    "collect_steps",
    "init",
    "mask_out",
    "next_episodes",
    "restart",
    "roots_of",
    "scan_steps",
    "step",
    "step_env",
]

"""The kernel: the pure step, the keys that it draws from, and the loop of episodes.

`init` and `step` are all that a fold over time needs. `step` is `advance`, which resets
nothing, then `restart` of the lanes that are done.
"""

from rollout.kernel.transition import (
    Start,
    act,
    advance,
    init,
    own_episodes,
    queued_episodes,
    record,
    restart,
    step,
    step_env,
)

__all__ = [
    "Start",
    "act",
    "advance",
    "init",
    "own_episodes",
    "queued_episodes",
    "record",
    "restart",
    "step",
    "step_env",
]

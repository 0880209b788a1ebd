"""Wrappers of one environment, and two that wrap many side by side.

`base` has what all wrappers share, and those of actions, endings and rewards;
`observations` those of observations, `history` those that remember what was done,
`spaces` the spaces they make. `normalize` wraps many environments, with the statistics
of `running`.
"""

from envs.wrappers.base import (
    ActionRepeat,
    EndOnFault,
    ForceLength,
    RescaleAction,
    TimeLimit,
    TransformReward,
)
from envs.wrappers.history import History, NoRepeat
from envs.wrappers.normalize import NormalizeObs, NormalizeReward
from envs.wrappers.observations import (
    FrameStack,
    ObserveInfo,
    ObservePrevious,
    TransformObs,
)

__all__ = [
    "ActionRepeat",
    "EndOnFault",
    "ForceLength",
    "FrameStack",
    "History",
    "NoRepeat",
    "NormalizeObs",
    "NormalizeReward",
    "ObserveInfo",
    "ObservePrevious",
    "RescaleAction",
    "TimeLimit",
    "TransformObs",
    "TransformReward",
]

"""Wrappers of one environment, and two that wrap many side by side.

`base` has the shared base classes, and wrappers of actions, endings and rewards;
`observations` has wrappers of observations; `history` has wrappers that remember the
actions of an episode. `normalize` wraps a `VectorEnv`, with the statistics of
`running`.
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

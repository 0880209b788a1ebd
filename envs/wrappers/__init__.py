"""Wrappers: of one environment, and `NormalizeObs` of many side by side.

`base` has what every wrapper shares, and those of actions, endings and rewards;
`observations` and `normalize` those of observations; `spaces` the spaces they make.
"""

from envs.wrappers.base import ActionRepeat, RescaleAction, TimeLimit, TransformReward
from envs.wrappers.normalize import NormalizeObs
from envs.wrappers.observations import FrameStack, ObserveInfo, TransformObs

__all__ = [
    "ActionRepeat",
    "FrameStack",
    "NormalizeObs",
    "ObserveInfo",
    "RescaleAction",
    "TimeLimit",
    "TransformObs",
    "TransformReward",
]

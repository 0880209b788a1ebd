"""Wrappers of one environment, and `NormalizeObs`, which wraps many side by side.

`base` has what all wrappers share, and the wrappers of actions, endings and rewards.
`observations` and `normalize` have those of observations, `spaces` the spaces they
make.
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

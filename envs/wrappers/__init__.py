"""Wrappers of single environments, and two wrappers of vector environments.

`wrapper` contains the base classes, of which `Wrapper` is the base class of custom
wrappers of a single environment. `actions`, `endings` and `observations` contain
wrappers that change or observe actions and rewards, endings, and observations.
`normalize` wraps a `VectorEnv` and normalizes by running statistics.
"""

from rollout.envs.wrappers.actions import (
    ActionRepeat,
    History,
    NoRepeat,
    RescaleAction,
    TransformReward,
)
from rollout.envs.wrappers.endings import (
    FixedLength,
    TimeLimit,
    Trials,
    TruncateOnNonFinite,
)
from rollout.envs.wrappers.normalize import NormalizeObs, NormalizeReward
from rollout.envs.wrappers.observations import (
    AgentNumber,
    FlattenObs,
    FrameStack,
    ObserveInfo,
    ObservePrevious,
    ObserveState,
    TransformObs,
    flatten_obs,
)
from rollout.envs.wrappers.wrapper import Wrapper, WrapperState

__all__ = [
    "ActionRepeat",
    "AgentNumber",
    "FixedLength",
    "FlattenObs",
    "FrameStack",
    "History",
    "NoRepeat",
    "NormalizeObs",
    "NormalizeReward",
    "ObserveInfo",
    "ObservePrevious",
    "ObserveState",
    "RescaleAction",
    "TimeLimit",
    "TransformObs",
    "TransformReward",
    "Trials",
    "TruncateOnNonFinite",
    "Wrapper",
    "WrapperState",
    "flatten_obs",
]

"""Wrappers of one environment, and two that wrap many side by side.

`wrapper` has the base classes; `actions`, `endings`, `rewards` and `observations` have
wrappers that change these; `history` remembers the actions of an episode; `trials`
plays several episodes as one; `flatten` makes one array of an observation. `normalize`
wraps a `VectorEnv`, with the statistics of `running_stats`.
"""

from rollout.envs.wrappers.actions import ActionRepeat, RescaleAction
from rollout.envs.wrappers.endings import FixedLength, TimeLimit, TruncateOnNonFinite
from rollout.envs.wrappers.flatten import FlattenObs, flatten_obs
from rollout.envs.wrappers.history import History, NoRepeat
from rollout.envs.wrappers.normalize import NormalizeObs, NormalizeReward
from rollout.envs.wrappers.observations import (
    AgentNumber,
    FrameStack,
    ObserveInfo,
    ObservePrevious,
    ObserveState,
    TransformObs,
)
from rollout.envs.wrappers.rewards import TransformReward
from rollout.envs.wrappers.trials import Trials

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
    "flatten_obs",
]

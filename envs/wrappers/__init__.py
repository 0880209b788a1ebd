"""Wrappers of single environments, and two wrappers of vector environments.

`wrapper` contains the base classes. `actions`, `endings`, `rewards` and `observations`
contain wrappers that change actions, endings, rewards and observations. `history`
stores the actions of an episode, `trials` plays several episodes as one episode, and
`flatten` converts an observation to a single array. `normalize` wraps a `VectorEnv` and
uses the statistics of `running_stats`.
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

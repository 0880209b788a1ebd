"""The base class of policies that wrap another policy, and the greedy policy."""

from typing import Any

from rollout.envs.types import ArrayTree
from rollout.types import (
    NO_MODE,
    ActionT,
    Key,
    ObsT,
    ParamsT,
    Policy,
    PolicyState,
    PolicyStep,
    check_policy,
)


class PolicyWrapper(Policy[ParamsT, ObsT, ActionT]):
    """Base class of policy wrappers: forwards every method to the wrapped policy.

    Attributes:
        policy: the wrapped policy.
    """

    policy: Policy[ParamsT, ObsT, ActionT]

    def __post_init__(self) -> None:
        check_policy(self.policy)

    def init(self, num_envs: int) -> PolicyState:
        """Returns the initial state of the wrapped policy."""
        return self.policy.init(num_envs)

    def apply(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Applies the wrapped policy."""
        return self.policy.apply(params, obs, state, key)

    def mode(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Returns the mode of the wrapped policy."""
        return self.policy.mode(params, obs, state, key)

    def value(self, params: Any, obs: Any, state: Any) -> ArrayTree:
        """Evaluates the critic of the wrapped policy."""
        return self.policy.value(params, obs, state)

    @property
    def has_mode(self) -> bool:
        """Whether the wrapped policy, or a subclass, has a mode."""
        return type(self).mode is not PolicyWrapper.mode or self.policy.has_mode

    @property
    def has_value(self) -> bool:
        """Whether the wrapped policy, or a subclass, has a critic."""
        return type(self).value is not PolicyWrapper.value or self.policy.has_value


class Greedy(PolicyWrapper[ParamsT, ObsT, ActionT]):
    """Takes the most likely actions of a policy. Use it for evaluation.

    The mode of an exploring policy is the mode of the policy that it wraps. State,
    extras and critic come from the wrapped policy.

    Attributes:
        policy: the wrapped policy, which must have a `mode`.

    Raises:
        ValueError: if `policy` is not a policy, or has no `mode`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policy.has_mode:
            raise ValueError(NO_MODE)

    def apply(self, params: Any, obs: Any, state: Any, key: Key) -> PolicyStep:
        """Applies the mode of the wrapped policy."""
        return self.policy.mode(params, obs, state, key)

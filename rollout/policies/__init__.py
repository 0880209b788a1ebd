"""Policies from functions, random actions, exploration and masks of valid actions.

`base` creates policies from functions, and has the random policy, the base class of
wrappers and the replay of a recurrent policy over recorded rows. `exploration` has
exploration wrappers. `masks` samples actions uniformly, from a space or from the valid
actions.
"""

from rollout.policies.base import (
    Greedy,
    PolicyWrapper,
    random_policy,
    recurrent_policy,
    stateless_policy,
    unroll,
)
from rollout.policies.exploration import (
    EpsilonGreedy,
    GaussianNoise,
    LinearSchedule,
    OrnsteinUhlenbeck,
    RandomWarmup,
)
from rollout.policies.masks import mask_values

__all__ = [
    "EpsilonGreedy",
    "GaussianNoise",
    "Greedy",
    "LinearSchedule",
    "OrnsteinUhlenbeck",
    "PolicyWrapper",
    "RandomWarmup",
    "mask_values",
    "random_policy",
    "recurrent_policy",
    "stateless_policy",
    "unroll",
]

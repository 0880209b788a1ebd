"""Policies from functions, random actions, exploration and masks of valid actions.

`basic` makes policies from functions and the random policy. `policy_wrapper` has the
base class of wrappers, and `exploration` has the wrappers that explore. `uniform`
samples actions uniformly, and `masks` samples valid actions, both in every space.
`items` chooses items to recommend. `memory` replays a recurrent policy over recorded
rows. `outputs` validates the outputs of policies.
"""

from rollout.policies.basic import (
    random_policy,
    recurrent_policy,
    stateless_policy,
)
from rollout.policies.exploration import (
    EpsilonGreedy,
    GaussianNoise,
    OrnsteinUhlenbeck,
    RandomWarmup,
)
from rollout.policies.items import choose_items, item_policy
from rollout.policies.memory import unroll
from rollout.policies.policy_wrapper import Greedy, PolicyWrapper

__all__ = [
    "EpsilonGreedy",
    "GaussianNoise",
    "Greedy",
    "OrnsteinUhlenbeck",
    "PolicyWrapper",
    "RandomWarmup",
    "choose_items",
    "item_policy",
    "random_policy",
    "recurrent_policy",
    "stateless_policy",
    "unroll",
]

"""Policies from plain functions, the random policy, and wrappers that explore.

`basic` has policies from functions and the random policy, `policy_wrapper` the base of
wrappers, `exploration` those that explore; `uniform` samples actions uniformly and
`masks` obeys masks, in every space; `items` chooses among the items that a mask allows;
`memory` replays a recurrent policy over recorded rows; `outputs` checks what policies
return.
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

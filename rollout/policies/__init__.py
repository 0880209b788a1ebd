"""Makes policies from plain functions, the random policy, and wrappers that explore.

`basic` makes policies, and `exploration` wraps them; `uniform` draws evenly and `masks`
obeys masks, in every space; `items` chooses among the items that a mask allows;
`memory` replays a recurrent policy over recorded rows; `outputs` checks what policies
return.
"""

from rollout.policies.basic import (
    greedy,
    random_policy,
    recurrent_policy,
    stateless_policy,
)
from rollout.policies.exploration import (
    epsilon_greedy,
    gaussian_noise,
    ornstein_uhlenbeck,
    random_warmup,
)
from rollout.policies.items import choose_items, item_policy
from rollout.policies.memory import unroll

__all__ = [
    "choose_items",
    "epsilon_greedy",
    "gaussian_noise",
    "greedy",
    "item_policy",
    "ornstein_uhlenbeck",
    "random_policy",
    "random_warmup",
    "recurrent_policy",
    "stateless_policy",
    "unroll",
]

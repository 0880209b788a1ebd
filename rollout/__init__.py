"""The kernel: a policy in an environment becomes transitions, as a pure function.

`Collector` folds one pure step over time; `random_policy`, `stateless_policy` and
`recurrent_policy` make its policy, and `epsilon_greedy`, `random_warmup`,
`gaussian_noise` and `ornstein_uhlenbeck` make one explore; `summarize` says which
episodes ended. Everything runs inside your own `jit`, or jitted from a notebook.

`Stream` hands batches to a training loop that is driven by Python; `checkpoint` saves
and restores it; `shard` spreads lanes over devices. `profile` says where the time goes,
`inspect` what a program does on an accelerator, which may be absent.

With several agents, `policy_map` says who plays whom, and `agent_transitions` makes
what each of them experienced of what happened.
"""

from rollout.cli import interrupts  # noqa: F401, I001 (first: before jax)
from rollout import siblings  # noqa: F401 (before `envs`: it says who hides it)

# isort: split
from rollout import checkpoint
from rollout.collector import Collector
from rollout.devices import shard
from rollout.evaluation import evaluate
from rollout.host import (
    AsyncCollector,
    FaultStats,
    Finding,
    HostCollector,
    RemoteBatch,
    RemoteBatches,
    RemoteStats,
    Served,
    by_env,
    probe,
    remote_batches,
)
from rollout.inspection import inspect
from rollout.minibatches import minibatches
from rollout.multi_agent import (
    AgentFigures,
    AgentStats,
    Pending,
    Population,
    agent_transitions,
    fixed_mapping,
    for_policy,
    init_agent_transitions,
    policy_map,
    population,
    summarize_agents,
)
from rollout.policies import (
    choose_items,
    epsilon_greedy,
    gaussian_noise,
    greedy,
    item_policy,
    ornstein_uhlenbeck,
    random_policy,
    random_warmup,
    recurrent_policy,
    stateless_policy,
)
from rollout.profiling import Profile, profile
from rollout.recommendation import (
    Catalogue,
    RecommendationStats,
    evaluate_settings,
    recommendation_settings,
)
from rollout.stats import (
    CollectStats,
    Finished,
    Moments,
    finished,
    log_stats,
    summarize,
)
from rollout.stream import Stream, StreamBatch, StreamStats
from rollout.targets import discounted_returns, gae, lambda_returns, next_values
from rollout.trajectories import Pieces, split_trajectories
from rollout.types import (
    Accumulator,
    Carry,
    Episode,
    EpisodeKey,
    Episodes,
    PerAgent,
    Persistent,
    Policy,
    PolicyStep,
    Transition,
)

__version__ = "0.1.0"

__all__ = [
    "Accumulator",
    "AgentFigures",
    "AgentStats",
    "AsyncCollector",
    "Carry",
    "Catalogue",
    "CollectStats",
    "Collector",
    "Episode",
    "EpisodeKey",
    "Episodes",
    "FaultStats",
    "Finding",
    "Finished",
    "HostCollector",
    "Moments",
    "Pending",
    "PerAgent",
    "Persistent",
    "Pieces",
    "Policy",
    "PolicyStep",
    "Population",
    "Profile",
    "RecommendationStats",
    "RemoteBatch",
    "RemoteBatches",
    "RemoteStats",
    "Served",
    "Stream",
    "StreamBatch",
    "StreamStats",
    "Transition",
    "agent_transitions",
    "by_env",
    "checkpoint",
    "choose_items",
    "discounted_returns",
    "epsilon_greedy",
    "evaluate",
    "evaluate_settings",
    "finished",
    "fixed_mapping",
    "for_policy",
    "gae",
    "gaussian_noise",
    "greedy",
    "init_agent_transitions",
    "inspect",
    "item_policy",
    "lambda_returns",
    "log_stats",
    "minibatches",
    "next_values",
    "ornstein_uhlenbeck",
    "policy_map",
    "population",
    "probe",
    "profile",
    "random_policy",
    "random_warmup",
    "recommendation_settings",
    "recurrent_policy",
    "remote_batches",
    "shard",
    "split_trajectories",
    "stateless_policy",
    "summarize",
    "summarize_agents",
]

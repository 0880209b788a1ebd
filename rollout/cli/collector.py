"""What a run collects with: environments by id, and the random policy in them."""

import argparse
from typing import Any

import jax

from envs.host.envpool import from_envpool
from envs.host.gymnasium import from_gymnasium
from envs.host.types import EnvFault, HostVectorEnv
from envs.joint import vectorize_agents
from envs.registry import make_agents, make_vec
from rollout.cli.arguments import InputError, has_suite, is_on_host
from rollout.cli.devices import spread
from rollout.collector import Collector
from rollout.host.collector import HostCollector
from rollout.multi_agent.joint import policy_map
from rollout.multi_agent.mapping import fixed_mapping
from rollout.policies.basic import random_policy
from rollout.types import Obs, Policy

_MASK = "action_mask"


def make_collector(args: argparse.Namespace) -> tuple[Any, Any]:
    """Makes the environments, with the random policy in them, on their devices.

    Returns:
        The collector, and the parameters that its policy takes.

    Raises:
        InputError: if an environment that is not JAX cannot be made.
    """
    options = dict(args.env_param)
    if is_on_host(args.env):
        env = _make_host(args, options)
        return HostCollector(env=env, policy=random_policy(env.action_space)), None
    if has_suite(args.env):
        env: Any = vectorize_agents(make_agents(args.env, **options), args.num_envs)
        policy, params = _random_agents(env), dict.fromkeys(env.groups)
    else:
        env = make_vec(args.env, args.num_envs, **options)
        policy, params = random_policy(env.action_space), None
    return spread(Collector(env=env, policy=policy), args.devices), params


def _make_host(args: argparse.Namespace, options: dict[str, Any]) -> HostVectorEnv:
    suite, _, env_id = args.env.partition(":")
    try:
        if suite == "envpool":
            return from_envpool(env_id, args.num_envs, seed=args.seed, **options)
        return from_gymnasium(env_id, args.num_envs, **options)
    except EnvFault as error:
        cause = next(iter(error.causes.values()))
        raise InputError(f"{args.env} cannot be made: {cause}") from error
    except ImportError as error:
        raise InputError(str(error)) from error


def _random_agents(env: Any) -> Policy:
    """The random policy for each group, of its name, that does what is allowed."""
    policies = {}
    for group, space in env.action_spaces.items():
        observed = getattr(env.observation_spaces[group], "spaces", {})
        mask_fn = _read_mask if _MASK in observed else None
        policies[group] = random_policy(space, mask_fn=mask_fn)
    groups = {agent: group for group, names in env.groups.items() for agent in names}
    return policy_map(policies, fixed_mapping(groups))


def _read_mask(obs: Obs) -> jax.Array:
    return obs[_MASK]

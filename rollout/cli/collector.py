"""Makes the collector of a run: environments by id, under the random policy."""

import argparse
import operator
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from envs.host.envpool import from_envpool
from envs.host.gymnasium import from_gymnasium
from envs.host.types import EnvFault, HostVectorEnv
from envs.joint import vectorize_agents
from envs.registry import make_agents, make_vec
from envs.types import AnySpace
from rollout.cli.arguments import InputError, has_agents, is_on_host
from rollout.cli.devices import spread
from rollout.collector import Collector
from rollout.host.collector import HostCollector
from rollout.multi_agent.joint import policy_map
from rollout.multi_agent.mapping import fixed_mapping
from rollout.policies.basic import random_policy
from rollout.policies.masks import MaskFn
from rollout.types import Policy

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
    if has_agents(args.env):
        env: Any = vectorize_agents(make_agents(args.env, **options), args.num_envs)
        policy, params = _random_agents(env), dict.fromkeys(env.groups)
    else:
        env = make_vec(args.env, args.num_envs, **options)
        mask_fn = _find_mask(env.observation_space, env.action_space)
        policy, params = random_policy(env.action_space, mask_fn=mask_fn), None
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
    """Makes a random policy per group, named after it, that takes allowed actions."""
    policies = {}
    for group, space in env.action_spaces.items():
        mask_fn = _find_mask(env.observation_spaces[group], space)
        policies[group] = random_policy(space, mask_fn=mask_fn)
    groups = {agent: group for group, names in env.groups.items() for agent in names}
    return policy_map(policies, fixed_mapping(groups))


def _find_mask(observed: AnySpace, space: AnySpace) -> MaskFn | None:
    """Finds the action mask in an observation, if there is one."""
    parts = getattr(observed, "spaces", getattr(observed, "parts", {}))
    read = operator.itemgetter(_MASK)
    if not isinstance(parts, Mapping):
        parts, read = getattr(parts, "_asdict", dict)(), operator.attrgetter(_MASK)
    if _MASK not in parts:
        return None
    sizes = getattr(space, "nvec", None)
    if sizes is None or parts[_MASK].shape == sizes:
        return read
    return lambda obs: tuple(jnp.moveaxis(read(obs), 1, 0))  # one mask for each entry

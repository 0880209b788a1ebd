"""The compiled part of a stream: the body of the loop, which fills one row."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from envs import keys
from rollout import kernel
from rollout.collector import Collector
from rollout.policies import draws, wrapping
from rollout.stream import _faults, _rows
from rollout.stream._window import Spec, Window, indices
from rollout.types import Carry, Policy, PolicyStep, Transition

_WARMUP = 3  # the stream of the keys of random actions; 0 to 2 are the kernel's


def make_step(
    spec: Spec, collector: Collector, params: Any, window: Window
) -> Callable[[tuple], tuple]:
    """Makes the body of the loop: one row."""
    env, record_fn = keys.barrier(collector.env), collector.record_fn  # `kernel.step`
    (order,) = indices((1, env.num_envs), window)

    def step(state: tuple) -> tuple:
        row, old, rows, fault = state
        index = row * env.num_envs + order
        active = index < window.num_steps
        policy = collector.policy
        if spec.has_warmup:
            is_random = index < window.num_random
            policy = _warming(policy, env.action_space, old, is_random)
        carry, transition = kernel.advance(env, policy, old, params)
        limit = transition.episode_length >= window.max_episode_steps
        transition = transition.replace(truncated=transition.truncated | limit)
        bad = jnp.zeros_like(active)
        if spec.check_finite:
            bad = _faults.not_finite(transition, spec.proved)
            bad &= active if spec.has_idle_lanes else True
            # Per lane: a reduction in every row would cost more than the question.
            fault = jnp.minimum(fault, _faults.numbers(bad, index))
        drop = bad if spec.drop_faulty else jnp.zeros_like(bad)
        over = transition.done | drop
        if spec.has_idle_lanes:
            over &= active
            transition = transition.replace(mask=active)
        start = kernel.own_episodes(carry.key, carry.episode.episode_id, ahead=1)
        fresh = kernel.restart(env, policy, carry, over, start)
        seen = kernel.record(record_fn, transition)
        if spec.has_idle_lanes:
            fresh = _stand_still(active, old, carry, fresh)
            seen = _clear(active, seen)
        return row + 1, fresh, _rows.write(rows, row, seen, drop), fault

    return step


def _warming(policy: Policy, space: Any, carry: Carry, is_random: jax.Array) -> Policy:
    """Makes the policy that acts at random in the lanes where `is_random`."""
    draw = draws.uniform(space)

    def apply(
        params: Any, obs: chex.ArrayTree, state: chex.ArrayTree, key: chex.PRNGKey
    ) -> PolicyStep:
        decision = wrapping.decide(policy, space, params, obs, state, key)
        warm_key = keys.fold_in(keys.fold_in(carry.key, _WARMUP), carry.step)

        def replace(action: chex.ArrayTree) -> chex.ArrayTree:
            drawn = draw(is_random.shape[0], warm_key)
            return keys.select(is_random, drawn, action)

        # Once the warm-up is over nothing is drawn.
        action = lax.cond(
            jnp.any(is_random), replace, lambda action: action, decision.action
        )
        return decision._replace(action=action)

    return Policy(init=policy.init, apply=apply)


def _stand_still(active: jax.Array, old: Carry, stepped: Carry, fresh: Carry) -> Carry:
    """Gives the lanes that are not `active` back what they had."""
    paths = zip(
        jax.tree.leaves(old.env_state),
        jax.tree.leaves(stepped.env_state),
        jax.tree.leaves(fresh.env_state),
        strict=True,
    )
    # What an auto-reset passes on as it is belongs to all lanes together, as the
    # statistics of `NormalizeObs` do: their new value stands.
    env_state = [
        new if new is before else keys.select(active, new, was)
        for was, before, new in paths
    ]
    structure = jax.tree.structure(old.env_state)
    return fresh.replace(
        env_state=jax.tree.unflatten(structure, env_state),
        obs=keys.select(active, fresh.obs, old.obs),
        policy_state=keys.select(active, fresh.policy_state, old.policy_state),
        episode=keys.select(active, fresh.episode, old.episode),
    )


def _clear(active: jax.Array, transition: Transition) -> Transition:
    """Zeroes the lanes that are not `active`."""
    words = keys.words(transition)
    zeros = jax.tree.map(jnp.zeros_like, words)
    return keys.like(keys.select(active, words, zeros), transition)

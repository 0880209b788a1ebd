"""Loops around gymnax environments: `collect_steps` and the loop of PureJaxRL.

`gymnax_loop` follows PureJaxRL's `ppo.py`, which is a script and not a package, with
gymnax 1. Both differences make the loop faster: one split into three keys replaces two
splits into two, and the final observation that gymnax 1 adds to `info` is not recorded,
because older versions of gymnax did not return it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
from gymnax.wrappers.purerl import FlattenObservationWrapper, LogWrapper
from harness import lanes
from jax import lax

import rollout
from rollout import envs
from rollout.distributions import ActionDistribution
from rollout.recipes import ppo

KEY = jax.eval_shape(lambda: jax.random.key(0))
ENVS = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "Breakout-MinAtar")
POLICIES = ("random", "mlp")


class Case(NamedTuple):
    """Environment, number of lanes and policy (one of `POLICIES`) of a loop."""

    env_id: str
    num_envs: int
    policy: str
    num_steps: int = 128
    impl: str = "threefry2x32"  # implementation of the keys


class Loop(NamedTuple):
    """`init(key)` returns a carry; `run(carry, params)` returns a carry and outputs."""

    init: Callable[[jax.Array], Any]
    run: Callable[[Any, Any], tuple[Any, Any]]


def make_policy(case: Case) -> tuple[rollout.Policy, Callable[[jax.Array], Any]]:
    """Creates the policy of a case, and a function from a key to its parameters."""
    env = envs.make(case.env_id)
    if case.policy == "random":
        return rollout.random_policy(env.action_space), lambda key: ()
    size = jax.eval_shape(env.reset, KEY)[1].size
    distribution = ActionDistribution(env.action_space)
    obs_space = envs.Box(-jnp.inf, jnp.inf, (size,))
    network = ppo.ActorCritic(distribution, obs_space, (64, 64), "tanh")

    def act(params: Any, obs: jax.Array, key: jax.Array) -> tuple[Any, Any]:
        outputs, value = network.apply(params, obs.reshape(len(obs), -1))
        action = distribution.sample(outputs, key)
        log_prob = distribution.log_prob(outputs, action)
        return action, {"value": value, "log_prob": log_prob}

    init = lambda key: network.init(key, jnp.zeros((1, size)))  # noqa: E731
    return rollout.stateless_policy(act), init


def our_loop(case: Case, read: Callable[[rollout.Transition], Any]) -> Loop:
    """Creates a loop that applies `read` to the trajectory of `collect_steps`."""
    collector = lanes(case.env_id, case.num_envs, make_policy(case)[0])

    def run(carry: Any, params: Any) -> tuple[Any, Any]:
        carry, t = collector.collect_steps(carry, params, case.num_steps)
        return carry, read(t)

    return Loop(collector.init, run)


def gymnax_loop(case: Case) -> Loop:
    """Creates PureJaxRL's loop; returns obs, action, reward, done, extras and info."""
    env, env_params = gymnax.make(case.env_id)
    env = LogWrapper(FlattenObservationWrapper(env))
    space, policy = env.action_space(env_params), make_policy(case)[0]

    def init(key: jax.Array) -> Any:
        key, reset_key = jax.random.split(key)
        reset_keys = jax.random.split(reset_key, case.num_envs)
        obs, env_state = jax.vmap(env.reset, (0, None))(reset_keys, env_params)
        return env_state, obs, key

    def act(params: Any, obs: jax.Array, key: jax.Array) -> tuple[Any, Any]:
        if case.policy == "random":
            action_keys = jax.random.split(key, case.num_envs)
            return jax.vmap(space.sample)(action_keys), ()
        decision = policy.apply(params, obs, (), key)
        return decision.action, decision.extras

    def run(runner_state: Any, params: Any) -> tuple[Any, Any]:
        def env_step(runner_state: Any, _: None) -> tuple[Any, Any]:
            env_state, last_obs, rng = runner_state
            rng, action_rng, step_rng = jax.random.split(rng, 3)
            action, extras = act(params, last_obs, action_rng)
            step_keys = jax.random.split(step_rng, case.num_envs)
            obs, env_state, reward, terminated, truncated, info = jax.vmap(
                env.step, (0, 0, 0, None)
            )(step_keys, env_state, action, env_params)
            info = {name: x for name, x in info.items() if name != "final_observation"}
            row = last_obs, action, reward, terminated | truncated, extras, info
            return (env_state, obs, rng), row

        return lax.scan(env_step, runner_state, length=case.num_steps)

    return Loop(init, run)

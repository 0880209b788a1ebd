"""PureJaxRL's loop and update, written for gymnax 1, with the network of `learners.py`.

PureJaxRL is copied, not installed; this follows its `ppo.py`. What differs favours it:
one split into three keys for its two splits into two, and the final observation that
gymnax 1 adds to `info` is not recorded, since its gymnax had none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from gymnax.wrappers.purerl import FlattenObservationWrapper, LogWrapper
from jax import lax
from learners import PPO, ActorCritic, make_optimizer, ppo_step

Loop = tuple[Callable[..., Any], Callable[..., Any]]


def make_network(env_id: str) -> tuple[ActorCritic, Any]:
    """The network for an environment, and the shapes of its parameters."""
    env, env_params = gymnax.make(env_id)
    network = ActorCritic(env.action_space(env_params), 64, "tanh")
    size = int(np.prod(env.observation_space(env_params).shape))
    return network, jax.eval_shape(
        network.init, jax.random.key(0), jnp.zeros((1, size))
    )


class Transition(NamedTuple):
    """A row, as PureJaxRL has it."""

    done: jax.Array
    action: jax.Array
    value: Any
    reward: jax.Array
    log_prob: Any
    obs: jax.Array
    info: dict[str, jax.Array]


def make_loop(env_id: str, num_envs: int, num_steps: int, policy: str) -> Loop:
    """`(init, run)` of the loop; the policy is "random" or "mlp"."""
    env, env_params = gymnax.make(env_id)
    env = LogWrapper(FlattenObservationWrapper(env))
    space, network = env.action_space(env_params), make_network(env_id)[0]
    steps = jax.vmap(env.step, (0, 0, 0, None))

    def init(key: jax.Array) -> Any:
        key, reset_key = jax.random.split(key)
        reset_keys = jax.random.split(reset_key, num_envs)
        obs, env_state = jax.vmap(env.reset, (0, None))(reset_keys, env_params)
        return env_state, obs, key

    def act(params: Any, obs: jax.Array, key: jax.Array) -> tuple[Any, Any, Any]:
        if policy == "random":
            action_keys = jax.random.split(key, num_envs)
            return jax.vmap(space.sample)(action_keys), (), ()
        pi, value = network.apply(params, obs)
        action = pi.sample(key)
        return action, value, pi.log_prob(action)

    def run(runner_state: Any, params: Any) -> tuple[Any, Transition]:
        def env_step(runner_state: Any, _: None) -> tuple[Any, Transition]:
            env_state, last_obs, rng = runner_state
            rng, action_rng, step_rng = jax.random.split(rng, 3)
            action, value, log_prob = act(params, last_obs, action_rng)
            step_keys = jax.random.split(step_rng, num_envs)
            obs, env_state, reward, terminated, truncated, info = steps(
                step_keys, env_state, action, env_params
            )
            info = {name: x for name, x in info.items() if name != "final_observation"}
            done = terminated | truncated
            row = Transition(done, action, value, reward, log_prob, last_obs, info)
            return (env_state, obs, rng), row

        return lax.scan(env_step, runner_state, length=num_steps)

    return init, run


def calculate_gae(config: PPO, rows: Transition, last_value: jax.Array) -> jax.Array:
    """Its advantages, with its `unroll`."""

    def step(following: Any, row: Transition) -> tuple[Any, jax.Array]:
        gae, next_value = following
        delta = row.reward + config.gamma * next_value * (1 - row.done) - row.value
        gae = delta + config.gamma * config.lam * (1 - row.done) * gae
        return (gae, row.value), gae

    start = jnp.zeros_like(last_value), last_value
    return lax.scan(step, start, rows, reverse=True, unroll=16)[1]


def make_update(config: PPO) -> Loop:
    """`(init, update)` of its whole update step."""
    init_loop, run = make_loop(config.env_id, config.num_envs, config.num_steps, "mlp")
    network, params = make_network(config.env_id)

    def init(key: jax.Array) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        return init_loop(key), (zeros, make_optimizer(config).init(zeros))

    def update(runner_state: Any, state: Any) -> Any:
        runner_state, rows = run(runner_state, state[0])
        env_state, obs, rng = runner_state
        gae = calculate_gae(config, rows, network.apply(state[0], obs)[1])
        old = {"action": rows.action, "value": rows.value, "log_prob": rows.log_prob}

        def epoch(carry: Any, _: None) -> tuple[Any, None]:
            state, rng = carry
            rng, order_rng = jax.random.split(rng)
            order = jax.random.permutation(
                order_rng, config.num_envs * config.num_steps
            )

            def split(x: jax.Array) -> jax.Array:
                rows = jnp.take(x.reshape(-1, *x.shape[2:]), order, axis=0)
                return rows.reshape(config.num_minibatches, -1, *rows.shape[1:])

            def learn(state: Any, batch: Any) -> tuple[Any, None]:
                return ppo_step(network, config, state, batch), None

            batches = jax.tree.map(split, (rows.obs, old, gae))
            return (lax.scan(learn, state, batches)[0], rng), None

        (state, rng), _ = lax.scan(epoch, (state, rng), length=config.num_epochs)
        return (env_state, obs, rng), state, rows.info

    return init, update

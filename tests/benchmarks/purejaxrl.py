"""PureJaxRL's loop and update, written for gymnax 1, and the network of both sides.

PureJaxRL is copied, not installed; this follows its `ppo.py`. What differs favours it:
one split into three keys for its two splits into two, and the final observation that
gymnax 1 adds to `info` is not recorded, since its gymnax had none.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnax.wrappers.purerl import FlattenObservationWrapper, LogWrapper
from jax import lax

GAMMA, LAM, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5
NUM_MINIBATCHES, EPOCHS = 4, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))
Loop = tuple[Callable[..., Any], Callable[..., Any]]


class ActorCritic(nn.Module):
    """Actor and critic apart, two tanh layers of 64 each; see `distribution`."""

    num_outputs: int
    is_discrete: bool

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[Any, jax.Array]:
        """Maps `[..., D]` observations to a distribution and `[...]` values."""

        def mlp(size: int, scale: float) -> jax.Array:
            x = obs
            for _ in range(2):
                dense = nn.Dense(64, kernel_init=nn.initializers.orthogonal(2**0.5))
                x = nn.tanh(dense(x))
            return nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))(x)

        head = mlp(self.num_outputs, 0.01)
        log_std = None
        if not self.is_discrete:
            zeros = nn.initializers.zeros
            log_std = self.param("log_std", zeros, (self.num_outputs,))
        return (head, log_std), mlp(1, 1.0)[..., 0]


def sample(pi: Any, key: jax.Array) -> jax.Array:
    """Draws an action of a categorical or of a diagonal normal distribution."""
    head, log_std = pi
    if log_std is None:
        return jax.random.categorical(key, head)
    std = jnp.broadcast_to(jnp.exp(log_std), head.shape)
    return head + std * jax.random.normal(key, head.shape)


def log_prob(pi: Any, action: jax.Array) -> jax.Array:
    """The log-probability of actions."""
    head, log_std = pi
    if log_std is None:
        every = jax.nn.log_softmax(head)
        return jnp.take_along_axis(every, action[..., None], axis=-1)[..., 0]
    log_std = jnp.broadcast_to(log_std, head.shape)
    squared = jnp.square((action - head) * jnp.exp(-log_std))
    return -(0.5 * squared + log_std + 0.5 * np.log(2 * np.pi)).sum(axis=-1)


def entropy(pi: Any) -> jax.Array:
    """The entropy of a categorical distribution."""
    every = jax.nn.log_softmax(pi[0])
    return -(jnp.exp(every) * every).sum(axis=-1)


@functools.cache
def make_network(env_id: str) -> tuple[ActorCritic, Any]:
    """The network for an environment, and the shapes of its parameters."""
    env, env_params = gymnax.make(env_id)
    space = env.action_space(env_params)
    is_discrete = hasattr(space, "n")
    network = ActorCritic(space.n if is_discrete else space.shape[0], is_discrete)
    size = int(np.prod(env.observation_space(env_params).shape))
    obs = jnp.zeros((1, size))
    return network, jax.eval_shape(network.init, jax.random.key(0), obs)


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
        action = sample(pi, key)
        return action, value, log_prob(pi, action)

    def env_step(params: Any, runner_state: Any, _: None) -> tuple[Any, Transition]:
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

    def run(runner_state: Any, params: Any) -> tuple[Any, Transition]:
        step = functools.partial(env_step, params)
        return lax.scan(step, runner_state, length=num_steps)

    return init, run


def calculate_gae(rows: Transition, last_value: jax.Array) -> jax.Array:
    """Its advantages, with its `unroll`."""

    def step(following: Any, row: Transition) -> tuple[Any, jax.Array]:
        gae, next_value = following
        delta = row.reward + GAMMA * next_value * (1 - row.done) - row.value
        gae = delta + GAMMA * LAM * (1 - row.done) * gae
        return (gae, row.value), gae

    start = jnp.zeros_like(last_value), last_value
    return lax.scan(step, start, rows, reverse=True, unroll=16)[1]


def loss(network: ActorCritic, params: Any, batch: Any) -> jax.Array:
    """PPO's loss of `(obs, action, value, log_prob, gae)`, as there."""
    obs, action, old_value, old_log_prob, gae = batch
    pi, value = network.apply(params, obs)
    target = gae + old_value
    clipped = old_value + (value - old_value).clip(-CLIP, CLIP)
    error = jnp.maximum(jnp.square(value - target), jnp.square(clipped - target))
    ratio = jnp.exp(log_prob(pi, action) - old_log_prob)
    gae = (gae - gae.mean()) / (gae.std() + 1e-8)
    gain = jnp.minimum(ratio * gae, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gae)
    return 0.5 * VALUE * error.mean() - gain.mean() - ENTROPY * entropy(pi).mean()


def update_minibatch(network: ActorCritic, state: Any, batch: Any) -> tuple[Any, Any]:
    """One gradient step; the state is `(params, opt_state)`."""
    params, opt_state = state
    value, grads = jax.value_and_grad(functools.partial(loss, network))(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def make_update(env_id: str, num_envs: int, num_steps: int) -> Loop:
    """`(init, update)` of its whole update step."""
    init, run = make_loop(env_id, num_envs, num_steps, "mlp")
    network = make_network(env_id)[0]

    def update_epoch(batch: Any, carry: Any, _: None) -> tuple[Any, Any]:
        state, rng = carry
        rng, order_rng = jax.random.split(rng)
        order = jax.random.permutation(order_rng, num_envs * num_steps)

        def split(x: jax.Array) -> jax.Array:
            rows = jnp.take(x.reshape(-1, *x.shape[2:]), order, axis=0)
            return rows.reshape(NUM_MINIBATCHES, -1, *rows.shape[1:])

        step = functools.partial(update_minibatch, network)
        state, losses = lax.scan(step, state, jax.tree.map(split, batch))
        return (state, rng), losses

    def update(runner_state: Any, state: Any) -> Any:
        runner_state, rows = run(runner_state, state[0])
        env_state, obs, rng = runner_state
        gae = calculate_gae(rows, network.apply(state[0], obs)[1])
        batch = rows.obs, rows.action, rows.value, rows.log_prob, gae
        epoch = functools.partial(update_epoch, batch)
        (state, rng), losses = lax.scan(epoch, (state, rng), length=EPOCHS)
        return (env_state, obs, rng), state, losses, rows.info

    return init, update

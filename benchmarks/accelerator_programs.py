"""Programs of the parts of the library, for `accelerators.py` to compile.

Each maker returns `(program, arguments, options)` of `rollout.inspect_program`.
Arguments are shapes; nothing is computed.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import learners_of_peers
import recipes
import recommendation_speed
from flax import struct
from gymnax_loops import KEY, Case, make_policy
from harness import lanes

import rollout
from rollout import buffers, envs
from rollout.envs import auto_reset, masked_update
from rollout.envs.wrappers.wrapper import Wrapper
from rollout.recipes.ppo import PPO, Config
from rollout.stream.batch import make_batch

ENV_ID, NUM_ENVS, NUM_STEPS = "CartPole-v1", 2048, 128
CONFIG = recipes.PUREJAXRL.replace(num_updates=1, num_envs=NUM_ENVS)
CAPACITY, BATCH_SIZE, NUM_EPISODES, NUM_ACTIONS = 2**20, 256, 4096, 512
DEAR = 200  # steps that a reset costs
RESETS = ("flat", "loop")
AUTO_RESETS = ("auto", "compact", "select", "switch")
Made = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _collector(env: Any = ENV_ID, policy: Any = None, **options: Any) -> Any:
    return lanes(env, NUM_ENVS, policy, **options)


def _carry(collector: Any) -> Any:
    return jax.eval_shape(rollout.Collector.init, collector, KEY)


def _rows(collector: Any, params: Any = None) -> Any:
    collect = functools.partial(type(collector).collect_steps, num_steps=NUM_STEPS)
    return jax.eval_shape(collect, collector, _carry(collector), params)[1]


def _steps(collector: Any, params: Any = None) -> Made:
    return collector, (params,), {"num_steps": NUM_STEPS}


def _network_policy() -> tuple[Any, Any]:
    policy, init = make_policy(Case(ENV_ID, NUM_ENVS, "mlp"))
    return jax.eval_shape(init, KEY), policy


def ppo() -> Made:
    """An update of `rollout/recipes/ppo.py`, four epochs of four minibatches."""
    env = envs.make_vec(ENV_ID, NUM_ENVS)
    agent = PPO(env, Config(num_updates=1, num_minibatches=4))
    return agent.update, (jax.eval_shape(agent.init, KEY),), {}


def ppo_purejaxrl(folder: Path) -> Made:
    """PureJaxRL's script, a training of one update."""
    return learners_of_peers.make_purejaxrl(ENV_ID, CONFIG, folder).train, (KEY,), {}


def gae() -> Made:
    """Advantages alone."""
    params, policy = _network_policy()
    trajectory = _rows(_collector(policy=policy), params)
    t, value = trajectory, trajectory.extras["value"]
    fn = functools.partial(rollout.gae, gamma=CONFIG.gamma, lambda_=CONFIG.gae_lambda)
    return fn, (t.reward, value, value, t.terminated, t.truncated), {}


def collect_episodes() -> Made:
    """Exactly N episodes."""
    collector = _collector()

    def fn(carry: Any) -> Any:
        counts = {"num_episodes": NUM_EPISODES, "max_episode_steps": 500}
        return collector.collect_episodes(carry, None, **counts)

    return fn, (_carry(collector),), {}


def evaluate() -> Made:
    """Statistics of exactly N episodes."""
    collector = _collector()

    def fn(key: jax.Array) -> Any:
        return rollout.evaluate(
            collector, None, key, NUM_EPISODES, max_episode_steps=500
        )

    return fn, (KEY,), {}


def stream_fill() -> Made:
    """A batch of a `Stream`."""
    collector = _collector()
    size = {"steps_per_batch": NUM_ENVS * NUM_STEPS, "check_finite": True}
    stream = rollout.Stream(collector, key=jax.random.key(0), **size)
    arguments = stream._options, NUM_STEPS, collector, _carry(collector), None
    arguments = *arguments, stream.stats.window, ()
    return jax.jit(make_batch, static_argnums=(0, 1)), arguments, {}


def _buffer(kind: Any, method: str, **options: Any) -> Made:
    """A method of a buffer, whose state is donated where it is replaced."""
    buffer = kind(capacity=CAPACITY, num_envs=NUM_ENVS, **options)
    row = jax.tree.map(lambda x: x.update(shape=x.shape[1:]), _rows(_collector()))
    state = jax.eval_shape(buffer.init, row)
    if method == "add":
        add = jax.jit(lambda s, row: buffer.add(s, row), donate_argnums=0)
        return add, (state, row), {}
    if method == "sample":
        return lambda s, key: buffer.sample(s, key, BATCH_SIZE), (state, KEY), {}
    indices = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.int32)
    priorities = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.float32)
    update = jax.jit(
        lambda s, i, p: buffer.update_priorities(s, i, p), donate_argnums=0
    )
    return update, (state, indices, priorities), {}


def masked_random() -> Made:
    """A random policy that obeys a mask, once."""
    action_mask_fn = lambda obs: obs  # noqa: E731
    policy = rollout.random_policy(
        envs.Discrete(NUM_ACTIONS), action_mask_fn=action_mask_fn
    )
    mask = jax.ShapeDtypeStruct((NUM_ENVS, NUM_ACTIONS), bool)
    return lambda mask, key: policy.apply(None, mask, (), key), (mask, KEY), {}


def _wrapped(wrap: Callable[[Any], Any]) -> Made:
    """Steps of one environment that is wrapped."""
    return _steps(_collector(wrap(envs.make(ENV_ID))))


def _wrapped_vector(wrap: Callable[[Any], Any]) -> Made:
    """Steps of lanes that are wrapped."""
    collector = _collector()
    return _steps(collector.replace(env=wrap(collector.env)))


def recurrent() -> Made:
    """A GRU of 64."""
    cell, size = nn.GRUCell(64), 4
    state = jnp.zeros((1, 64))
    weights = jax.eval_shape(cell.init, KEY, state, jnp.zeros((1, size)))
    params = weights, jax.ShapeDtypeStruct((64, 2), jnp.float32)

    def act(params: Any, obs: jax.Array, state: jax.Array, key: jax.Array) -> Any:
        state, out = cell.apply(params[0], state, obs)
        return jax.random.categorical(key, out @ params[1]), state

    policy = rollout.recurrent_policy(act, lambda num: jnp.zeros((num, 64)))
    return _steps(_collector(policy=policy), params)


def _exploring(wrap: Callable[[Any, Any], Any]) -> Made:
    """A policy that explores around the network's."""
    params, policy = _network_policy()
    policy = wrap(policy, envs.make(ENV_ID).action_space)
    return _steps(_collector(policy=policy), params)


def agent_transitions() -> Made:
    """Makes the transitions of each of two agents that take turns."""
    env = envs.make_vec("pgx:tic_tac_toe", num_envs=NUM_ENVS)
    action_mask_fn = lambda obs: obs["action_mask"]  # noqa: E731
    policy = rollout.random_policy(
        env.action_spaces["players"], action_mask_fn=action_mask_fn
    )
    seats = rollout.agents.static_mapping({"player_0": "one", "player_1": "one"})
    seated = rollout.agents.policy_map({"one": policy}, seats, env)
    collector = rollout.Collector(env=env, policy=seated)
    params, carry = {"one": None}, _carry(collector)
    make = functools.partial(rollout.agents.Pending.init, collector)
    pending = jax.eval_shape(make, carry, params)
    rows = _rows(collector, params)
    return rollout.agents.agent_transitions, (pending, rows), {}


def recommendation() -> Made:
    """Users who are shown no item twice, by a random policy."""
    collector = recommendation_speed.make_collector(NUM_ACTIONS, NUM_ENVS)
    return _steps(collector.replace(record_fn=None))


_make_buffer = functools.partial(functools.partial, _buffer)
PROGRAMS: dict[str, Callable[[], Made]] = {
    "ppo": ppo,
    "gae": gae,
    "collect_episodes": collect_episodes,
    "evaluate": evaluate,
    "stream_fill": stream_fill,
    "replay_add": _make_buffer(buffers.ReplayBuffer, "add"),
    "replay_sample": _make_buffer(buffers.ReplayBuffer, "sample"),
    "prioritized_add": _make_buffer(buffers.PrioritizedReplayBuffer, "add"),
    "prioritized_sample": _make_buffer(buffers.PrioritizedReplayBuffer, "sample"),
    "prioritized_update": _make_buffer(buffers.PrioritizedReplayBuffer, "update"),
    "episode_add": _make_buffer(buffers.EpisodeBuffer, "add", max_length=500),
    "episode_sample": _make_buffer(buffers.EpisodeBuffer, "sample", max_length=500),
    "masked_random": masked_random,
    "normalize_obs": lambda: _wrapped_vector(envs.NormalizeObs),
    "normalize_reward": lambda: _wrapped_vector(
        lambda env: envs.NormalizeReward(env, CONFIG.gamma)
    ),
    "frame_stack": lambda: _wrapped(lambda env: envs.FrameStack(env, 4)),
    "time_limit": lambda: _wrapped(lambda env: envs.TimeLimit(env, 100)),
    "recurrent": recurrent,
    "EpsilonGreedy": lambda: _exploring(
        lambda policy, space: rollout.policies.EpsilonGreedy(policy, space, 0.1)
    ),
    "RandomWarmup": lambda: _exploring(
        lambda policy, space: rollout.policies.RandomWarmup(policy, space, 100)
    ),
    "agent_transitions": agent_transitions,
    "recommendation": recommendation,
}


class DearReset(Wrapper):
    """An environment whose reset takes 200 of its steps, side by side or in a loop."""

    kind: str = struct.field(pytree_node=False)

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """Starts an episode after 200 steps of which nothing is kept but the noise."""
        state, obs = self.env.reset(key)

        def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            action = jax.random.bernoulli(key).astype(jnp.int32)
            result = self.env.step(key, state, action)
            return result.state, result.obs

        step_keys = jax.random.split(key, DEAR)
        if self.kind == "loop":
            _, seen = jax.lax.scan(step, state, step_keys)
        else:
            _, seen = jax.vmap(step, (None, 0))(state, step_keys)
        return state, obs + 1e-6 * seen.mean(axis=0)


def dear_reset(kind: str, num_envs: int, way: str) -> Any:
    """A collector over environments whose resets are dear."""
    # "auto" takes this way where it is best; it has no name of its own.
    auto_reset.BY_NAME.setdefault("switch", masked_update.switch)
    env = DearReset(envs.make(ENV_ID), kind)
    vector = envs.vectorize(env, num_envs, auto_reset=way)
    return rollout.Collector(env=vector, policy=rollout.random_policy(env.action_space))

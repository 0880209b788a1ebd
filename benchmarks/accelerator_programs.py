"""Programs of the library that `accelerators.py` compiles.

Each function returns `(program, arguments, options)` for `rollout.inspect_program`.
Arguments are shapes: nothing is computed.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import purejaxrl
import recipes
from flax import struct
from gymnax_loops import KEY, Case, make_policy
from harness import lanes

import rollout
from rollout import buffers, envs
from rollout.envs import auto_reset
from rollout.envs.wrappers import Wrapper
from rollout.recipes.ppo import PPO, Config
from rollout.stream import BatchSpec, make_batch

ENV_ID, NUM_ENVS, NUM_STEPS = "CartPole-v1", 2048, 128
CONFIG = recipes.PUREJAXRL.replace(num_updates=1, num_envs=NUM_ENVS)
CAPACITY, BATCH_SIZE, NUM_EPISODES, NUM_ACTIONS = 2**20, 256, 4096, 512
RESET_STEPS = 200  # environment steps per reset
RESETS = ("flat", "loop")
AUTO_RESETS = ("auto", "compact", "select", "switch")
ProgramSpec = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _collector(env: Any = ENV_ID, policy: Any = None, **options: Any) -> Any:
    return lanes(env, NUM_ENVS, policy, **options)


def _carry(collector: Any) -> Any:
    return jax.eval_shape(rollout.Collector.init, collector, KEY)


def _rows(collector: Any, params: Any = None) -> Any:
    collect = functools.partial(type(collector).collect_steps, num_steps=NUM_STEPS)
    return jax.eval_shape(collect, collector, _carry(collector), params)[1]


def _steps(collector: Any, params: Any = None) -> ProgramSpec:
    return collector, (params,), {"num_steps": NUM_STEPS}


def _network_policy() -> tuple[Any, Any]:
    policy, init = make_policy(Case(ENV_ID, NUM_ENVS, "mlp"))
    return jax.eval_shape(init, KEY), policy


def ppo() -> ProgramSpec:
    """One update of `rollout/recipes/ppo.py` with four epochs of four minibatches."""
    env = envs.make_vec(ENV_ID, NUM_ENVS)
    agent = PPO(env, Config(num_updates=1, num_minibatches=4))
    return agent.update, (jax.eval_shape(agent.init, KEY),), {}


def ppo_purejaxrl(folder: Path) -> ProgramSpec:
    """A training run of one update with PureJaxRL's script."""
    return purejaxrl.make_learner(ENV_ID, CONFIG, folder).train, (KEY,), {}


def gae() -> ProgramSpec:
    """Advantage estimation without the rest of the update."""
    params, policy = _network_policy()
    trajectory = _rows(_collector(policy=policy), params)
    t, value = trajectory, trajectory.extras["value"]
    fn = functools.partial(rollout.gae, gamma=CONFIG.gamma, lambda_=CONFIG.gae_lambda)
    return fn, (t.reward, value, value, t.terminated, t.truncated), {}


def collect_episodes() -> ProgramSpec:
    """Collection of exactly N episodes."""
    collector = _collector()

    def fn(carry: Any) -> Any:
        counts = {"num_episodes": NUM_EPISODES, "max_episode_steps": 500}
        return collector.collect_episodes(carry, None, **counts)

    return fn, (_carry(collector),), {}


def evaluate() -> ProgramSpec:
    """Evaluation: statistics of exactly N episodes."""
    collector = _collector()

    def fn(key: jax.Array) -> Any:
        return rollout.evaluate(
            collector, None, key, NUM_EPISODES, max_episode_steps=500
        )

    return fn, (KEY,), {}


def stream_fill() -> ProgramSpec:
    """One batch of a `Stream`."""
    collector = _collector()
    spec = BatchSpec(NUM_STEPS, None, None, "continue", None)
    window = rollout.EpisodeWindow.init(100)
    arguments = spec, collector, _carry(collector), None, window, None
    return make_batch, arguments, {}


def _buffer(buffer_type: Any, method: str, **options: Any) -> ProgramSpec:
    """A method of a buffer. Methods that return a new state donate the old one."""
    buffer = buffer_type(capacity=CAPACITY, num_envs=NUM_ENVS, **options)
    t = jax.tree.map(lambda x: x.update(shape=x.shape[1:]), _rows(_collector()))
    state = jax.eval_shape(buffer.init, t)
    if method == "add":
        add = jax.jit(lambda s, t: buffer.add(s, t), donate_argnums=0)
        return add, (state, t), {}
    if method == "sample":
        return lambda s, key: buffer.sample(s, key, BATCH_SIZE), (state, KEY), {}
    indices = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.int32)
    priorities = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.float32)
    update = jax.jit(
        lambda s, i, p: buffer.update_priorities(s, i, p), donate_argnums=0
    )
    return update, (state, indices, priorities), {}


def masked_random() -> ProgramSpec:
    """One call of a random policy with an action mask."""
    action_mask_fn = lambda obs: obs  # noqa: E731
    policy = rollout.random_policy(
        envs.Discrete(NUM_ACTIONS), action_mask_fn=action_mask_fn
    )
    mask = jax.ShapeDtypeStruct((NUM_ENVS, NUM_ACTIONS), bool)
    return lambda mask, key: policy.apply(None, mask, (), key), (mask, KEY), {}


def _wrapped(wrap: Callable[[Any], Any]) -> ProgramSpec:
    """Collection of steps with a wrapper around a single environment."""
    return _steps(_collector(wrap(envs.make(ENV_ID))))


def _wrapped_vector(wrap: Callable[[Any], Any]) -> ProgramSpec:
    """Collection of steps with a wrapper around a vectorized environment."""
    collector = _collector()
    return _steps(collector.replace(env=wrap(collector.env)))


def recurrent() -> ProgramSpec:
    """Collection of steps with a GRU policy of 64 units."""
    cell, size = nn.GRUCell(64), 4
    state = jnp.zeros((1, 64))
    weights = jax.eval_shape(cell.init, KEY, state, jnp.zeros((1, size)))
    params = weights, jax.ShapeDtypeStruct((64, 2), jnp.float32)

    def act(params: Any, obs: jax.Array, state: jax.Array, key: jax.Array) -> Any:
        state, out = cell.apply(params[0], state, obs)
        return jax.random.categorical(key, out @ params[1]), state

    policy = rollout.recurrent_policy(act, lambda num: jnp.zeros((num, 64)))
    return _steps(_collector(policy=policy), params)


def _exploring(wrap: Callable[[Any, Any], Any]) -> ProgramSpec:
    """Collection of steps with an exploration wrapper around the network policy."""
    params, policy = _network_policy()
    policy = wrap(policy, envs.make(ENV_ID).action_space)
    return _steps(_collector(policy=policy), params)


def agent_transitions() -> ProgramSpec:
    """Transitions per agent of a two-player turn-based game."""
    env: Any = envs.make_vec("pgx:tic_tac_toe", num_envs=NUM_ENVS)  # several agents
    action_mask_fn = lambda obs: obs["action_mask"]  # noqa: E731
    policy = rollout.random_policy(
        env.action_spaces["players"], action_mask_fn=action_mask_fn
    )
    mapping = rollout.agents.static_mapping({"player_0": "one", "player_1": "one"})
    policy_map = rollout.agents.policy_map({"one": policy}, mapping, env)
    collector = rollout.Collector(env=env, policy=policy_map)
    params, carry = {"one": None}, _carry(collector)
    make = functools.partial(rollout.agents.Pending.init, collector)
    pending = jax.eval_shape(make, carry, params)
    rows = _rows(collector, params)
    return rollout.agents.agent_transitions, (pending, rows), {}


def recommendation() -> ProgramSpec:
    """A random recommendation policy that never repeats an item for a user."""
    categories = np.random.default_rng(0).random((NUM_ACTIONS, 31)) < 2 / 31
    rule = envs.recommendation.LeaveByCategory(categories, 5, 2)
    feedback = np.zeros((100, NUM_ACTIONS), np.float32)
    env = envs.wrappers.NoRepeat(
        envs.recommendation.RecommendationEnv(feedback, rule, max_turn=100)
    )
    policy = rollout.random_policy(
        env.action_space, action_mask_fn=lambda obs: obs["action_mask"]
    )
    return _steps(_collector(env, policy))


_make_buffer = functools.partial(functools.partial, _buffer)
PROGRAMS: dict[str, Callable[[], ProgramSpec]] = {
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


class CostlyReset(Wrapper):
    """An environment whose reset runs 200 steps, batched by `vmap` or in a loop."""

    mode: str = struct.field(pytree_node=False)

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        """Resets, then runs 200 steps and adds a trace of their observations."""
        state, obs = self.env.reset(key)

        def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            action = jax.random.bernoulli(key).astype(jnp.int32)
            result = self.env.step(key, state, action)
            return result.state, result.obs

        step_keys = jax.random.split(key, RESET_STEPS)
        if self.mode == "loop":
            _, noise = jax.lax.scan(step, state, step_keys)
        else:
            _, noise = jax.vmap(step, (None, 0))(state, step_keys)
        return state, obs + 1e-6 * noise.mean(axis=0)


def costly_reset(mode: str, num_envs: int, strategy: str) -> Any:
    """Creates a collector over environments with an expensive reset."""
    # "auto" selects `switch` if it is fastest; it has no public name.
    auto_reset.BY_NAME.setdefault("switch", auto_reset.switch)
    env = CostlyReset(envs.make(ENV_ID), mode)
    vector = envs.vectorize(env, num_envs, auto_reset=strategy)
    return rollout.Collector(env=vector, policy=rollout.random_policy(env.action_space))

"""What the library is made of, as programs for `accelerators.py` to compile.

Each maker returns `(program, arguments, options)` of `rollout.inspect`. Arguments are
shapes; nothing is computed.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import learners
import numpy as np
import purejaxrl
from flax import struct

import rollout
from rollout import buffers, envs
from rollout.envs import auto_reset, masked_update
from rollout.stream.batch import make_batch
from rollout.stream.options import Options

ENV_ID, NUM_ENVS, NUM_STEPS = "CartPole-v1", 2048, 128
CONFIG = learners.PPO(ENV_ID, num_updates=1, num_envs=NUM_ENVS)
CAPACITY, BATCH_SIZE, NUM_EPISODES, NUM_ACTIONS = 2**20, 256, 4096, 512
DEAR = 200  # steps that a reset costs
RESETS = ("flat", "loop")
AUTO_RESETS = ("auto", "compact", "select", "switch")
KEY = jax.eval_shape(lambda: jax.random.key(0))
Made = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _collector(env: Any = None, policy: Any = None, **options: Any) -> Any:
    env = env or envs.make_vec(ENV_ID, NUM_ENVS)
    policy = policy or rollout.random_policy(env.action_space)
    return rollout.Collector(env=env, policy=policy, **options)


def _carry(collector: Any) -> Any:
    return jax.eval_shape(rollout.Collector.init, collector, KEY)


def _row(collector: Any, params: Any = None) -> Any:
    step = jax.eval_shape(rollout.Collector.step, collector, _carry(collector), params)
    return step[1]


def _stacked(row: Any, num_steps: int = NUM_STEPS) -> Any:
    make = lambda x: jax.ShapeDtypeStruct((num_steps, *x.shape), x.dtype)  # noqa: E731
    return jax.tree.map(make, row)


def _steps(collector: Any, params: Any = None) -> Made:
    return collector, (params,), {"num_steps": NUM_STEPS}


def _network_policy() -> tuple[Any, Any]:
    network, params = purejaxrl.make_network(ENV_ID)

    def act(params: Any, obs: jax.Array, key: jax.Array) -> tuple[Any, Any]:
        pi, value = network.apply(params, obs)
        action = pi.sample(key)
        return action, {"value": value, "log_prob": pi.log_prob(action)}

    return params, rollout.stateless_policy(act)


def ppo() -> Made:
    """An update of PPO with the parts of this library."""
    learner = learners.ppo(CONFIG)
    return learner.update, (jax.eval_shape(learner.init, KEY, KEY), KEY), {}


def ppo_purejaxrl() -> Made:
    """PureJaxRL's."""
    init, update = purejaxrl.make_update(CONFIG)
    return update, jax.eval_shape(init, KEY), {}


def gae() -> Made:
    """Advantages alone."""
    params, policy = _network_policy()
    trajectory = _stacked(_row(_collector(policy=policy), params))
    fn = functools.partial(rollout.gae, gamma=CONFIG.gamma, lam=CONFIG.lam)
    return fn, (trajectory, trajectory.extras["value"]), {}


def gae_purejaxrl() -> Made:
    """PureJaxRL's."""
    init, run = purejaxrl.make_loop(ENV_ID, NUM_ENVS, NUM_STEPS, "mlp")
    params = purejaxrl.make_network(ENV_ID)[1]
    rows = jax.eval_shape(run, jax.eval_shape(init, KEY), params)[1]
    value = jax.ShapeDtypeStruct((NUM_ENVS,), jnp.float32)
    fn = functools.partial(purejaxrl.calculate_gae, CONFIG)
    return fn, (rows._replace(info={}), value), {}


def collect_episodes() -> Made:
    """Exactly N episodes."""
    collector = _collector()

    def fn(carry: Any) -> Any:
        counts = {"num_episodes": NUM_EPISODES, "max_steps": 500}
        return collector.collect_episodes(carry, None, **counts)

    return fn, (_carry(collector),), {}


def evaluate() -> Made:
    """Statistics of exactly N episodes."""
    collector = _collector()

    def fn(key: jax.Array) -> Any:
        return rollout.evaluate(collector, key, None, NUM_EPISODES, max_steps=500)

    return fn, (KEY,), {}


def stream_fill() -> Made:
    """A batch of a `Stream`."""
    options = Options(
        num_envs=NUM_ENVS,
        steps_per_batch=NUM_ENVS * NUM_STEPS,
        episodes_per_batch=None,
        total_steps=None,
        warmup_steps=0,
        mask_fn=None,
        max_episode_steps=None,
        at_batch_end="continue",
        postprocess=None,
        placement="device",
        prefetch=0,
        recycle=False,
        check_finite=True,
        on_fault="raise",
        window_episodes=100,
    )
    collector = _collector()
    arguments = options, NUM_STEPS, collector, _carry(collector), None, ()
    return jax.jit(make_batch, static_argnums=(0, 1)), arguments, {}


def _buffer(kind: Any, method: str, **options: Any) -> Made:
    """A method of a buffer, whose state is donated where it is replaced."""
    num_envs, row = NUM_ENVS, _row(_collector())
    buffer = kind(capacity=CAPACITY, num_envs=num_envs, **options)
    state = jax.eval_shape(buffer.init, row)
    if method == "add":
        add = jax.jit(lambda s, row: buffer.add(s, row), donate_argnums=0)
        return add, (state, row), {}
    if method == "sample":
        return lambda s, key: buffer.sample(s, key, BATCH_SIZE), (state, KEY), {}
    indices = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.int32)
    priorities = jax.ShapeDtypeStruct((BATCH_SIZE,), jnp.float32)
    update = jax.jit(lambda s, i, p: buffer.update(s, i, p), donate_argnums=0)
    return update, (state, indices, priorities), {}


def masked_random() -> Made:
    """A random policy that obeys a mask, once."""
    mask_fn = lambda obs: obs  # noqa: E731
    policy = rollout.random_policy(envs.Discrete(NUM_ACTIONS), mask_fn=mask_fn)
    mask = jax.ShapeDtypeStruct((NUM_ENVS, NUM_ACTIONS), bool)
    return lambda mask, key: policy.apply(None, mask, (), key), (mask, KEY), {}


def _wrapped(wrap: Callable[[Any], Any]) -> Made:
    """Steps of one environment that is wrapped."""
    env = wrap(envs.make(ENV_ID))
    return _steps(_collector(envs.vectorize(env, NUM_ENVS)))


def _wrapped_vector(wrap: Callable[[Any], Any]) -> Made:
    """Steps of lanes that are wrapped."""
    return _steps(_collector(wrap(envs.make_vec(ENV_ID, NUM_ENVS))))


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
    env = envs.make_vec(ENV_ID, NUM_ENVS)
    return _steps(_collector(env, wrap(policy, env.action_space)), params)


def agent_transitions() -> Made:
    """What each of two agents experienced who take turns."""
    env = envs.vectorize_agents(envs.make_agents("pgx:tic_tac_toe"), num_envs=NUM_ENVS)
    mask_fn = lambda obs: obs["action_mask"]  # noqa: E731
    policy = rollout.random_policy(env.action_spaces["players"], mask_fn=mask_fn)
    seats = rollout.agents.fixed_mapping({"player_0": "one", "player_1": "one"})
    collector = _collector(env, rollout.agents.policy_map({"one": policy}, seats, env))
    params, carry = {"one": None}, _carry(collector)
    make = functools.partial(rollout.agents.init_agent_transitions, collector)
    pending = jax.eval_shape(make, carry, params)
    row = _row(collector, params)
    return rollout.agents.agent_transitions, (pending, _stacked(row)), {}


def recommendation() -> Made:
    """Users who are shown no item twice, by a random policy."""
    rng = np.random.default_rng(0)
    feedback = rng.random((100, NUM_ACTIONS), np.float32)
    leave = envs.recommendation.LeaveByCategory(
        rng.random((NUM_ACTIONS, 31)) < 0.06, 5, 2
    )
    env = envs.wrappers.NoRepeat(envs.RecommendationEnv(feedback, leave, max_turn=100))
    mask_fn = lambda obs: obs["mask"]  # noqa: E731
    policy = rollout.random_policy(env.action_space, mask_fn=mask_fn)
    return _steps(_collector(envs.vectorize(env, NUM_ENVS), policy))


_make_buffer = functools.partial(functools.partial, _buffer)
PROGRAMS: dict[str, Callable[[], Made]] = {
    "ppo": ppo,
    "ppo_purejaxrl": ppo_purejaxrl,
    "gae": gae,
    "gae_purejaxrl": gae_purejaxrl,
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
    "epsilon_greedy": lambda: _exploring(
        lambda policy, space: rollout.epsilon_greedy(policy, space, 0.1)
    ),
    "random_warmup": lambda: _exploring(
        lambda policy, space: rollout.random_warmup(policy, space, 100)
    ),
    "agent_transitions": agent_transitions,
    "recommendation": recommendation,
}


@struct.dataclass
class DearReset:
    """An environment whose reset takes 200 of its steps, side by side or in a loop."""

    env: Any
    kind: str = struct.field(pytree_node=False)

    @property
    def observation_space(self) -> Any:
        """The environment's."""
        return self.env.observation_space

    @property
    def action_space(self) -> Any:
        """The environment's."""
        return self.env.action_space

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

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Any:
        """The environment's."""
        return self.env.step(key, state, action)


def dear_reset(kind: str, num_envs: int, way: str) -> Any:
    """A collector over environments whose resets are dear."""
    # "auto" takes this way where it is best; it has no name of its own.
    auto_reset.WAYS.setdefault("switch", masked_update.switch)
    env = DearReset(envs.make(ENV_ID), kind)
    vector = envs.vectorize(env, num_envs, auto_reset=way)
    return rollout.Collector(env=vector, policy=rollout.random_policy(env.action_space))

"""Compares exported agents (ONNX, `jax.export`, NumPy) with `predict`."""

import functools

import jax
import numpy as np
import pytest
from cases import quick_jit
from privileged_env import PrivilegedEnv
from recipe_cases import AimEnv, MaskedEnv, in_ci, make_agent

from rollout import envs
from rollout.normalization import split_obs_stats

CONFIG = {"hidden_layer_sizes": (64, 64), "normalize_observations": True}
ENVS = {
    "ppo": AimEnv(),
    "recurrent_ppo": AimEnv(),
    "dqn": MaskedEnv(),
    "sac": AimEnv(),
    "td3": AimEnv(),
}
NUM_OBS = 1000
LIMIT = 1e-5  # rounding of float32 actions, and of the memory over 1,000 steps
each_agent = pytest.mark.parametrize("name", in_ci("ppo", "recurrent_ppo", of=ENVS))


@functools.cache
def train(name, env=None):
    """Trains an agent for two updates.

    Returns:
        The agent, its parameters, `NUM_OBS` observations and the first memory.
    """
    env = envs.vectorize(ENVS[name] if env is None else env, 2)
    agent = make_agent(name, env, learning_rate=0.003, **CONFIG)

    @quick_jit
    def run(key):
        state, _ = agent.train(agent.init(key))
        return state.params, sample_obs(env.observation_space, NUM_OBS)

    params, obs = jax.device_get(run(jax.random.key(0)))
    memory = agent.model.initialize_memory(1) if name == "recurrent_ppo" else ()
    return agent, params, obs, jax.device_get(memory)


def sample_obs(space, num_obs):
    keys = jax.random.split(jax.random.key(1), num_obs)
    return jax.vmap(space.sample)(keys)


def make_act(agent, params):
    """Returns `predict` as a function of observation and memory, for every agent."""

    def act(obs, memory):
        if jax.tree.leaves(memory):
            return agent.predict(params, obs, memory)
        return agent.predict(params, obs), memory

    return act


def play(act, obs, memory):
    """Acts on observations `[T, *shape]` in sequence; returns actions and memories."""

    def step(memory, obs):
        action, memory = act(obs, memory)
        return memory, (action, memory)

    scan = quick_jit(lambda obs, memory: jax.lax.scan(step, memory, obs)[1])
    return jax.device_get(scan(obs, memory))


def play_serialized(act, obs, memory):
    """Plays with a serialized program of `jax.export`."""
    first_obs = jax.tree.map(lambda x: x[0], obs)
    data = jax.export.export(jax.jit(act))(first_obs, memory).serialize()
    return play(jax.export.deserialize(bytearray(data)).call, obs, memory)


def play_onnx(act, obs, memory):
    """Plays with an ONNX model, one observation at a time."""
    to_onnx = pytest.importorskip("jax2onnx").to_onnx
    onnxruntime = pytest.importorskip("onnxruntime")
    first_obs = jax.tree.map(lambda x: x[0], obs)
    leaves, structure = jax.tree.flatten((first_obs, memory))
    # Trace `act` first: `to_onnx` replaces functions of JAX while it traces, and JAX
    # would cache this trace for later calls of `predict`.
    jax.eval_shape(act, first_obs, memory)
    model = to_onnx(
        lambda *leaves: jax.tree.leaves(act(*structure.unflatten(leaves))),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves],
    )
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names, steps = [x.name for x in session.get_inputs()], []
    for i in range(NUM_OBS):
        step_obs = jax.tree.map(lambda x, i=i: np.asarray(x[i]), obs)
        leaves = jax.tree.leaves((step_obs, memory))
        action, *memory = session.run(None, dict(zip(names, leaves, strict=True)))
        steps.append((action, *memory))
    return [np.stack(x) for x in zip(*steps, strict=True)]


each_export = pytest.mark.parametrize("play_exported", [play_serialized, play_onnx])


def check_results(results, expected):
    """Compares actions and memories `[T, ...]`, and prints the largest difference."""
    pairs = list(zip(*map(jax.tree.leaves, (results, expected)), strict=True))
    for x, y in pairs:
        assert x.shape == y.shape
        assert x.dtype == y.dtype
    error = max(np.abs(np.float64(x) - np.float64(y)).max() for x, y in pairs)
    print(f"largest difference {error:.1e}")
    assert error <= LIMIT


@pytest.mark.slow
@each_export
@each_agent
def test_exported_agent_acts_like_predict(name, play_exported):
    agent, params, obs, memory = train(name)
    act = make_act(agent, params)
    check_results(play_exported(act, obs, memory), play(act, obs, memory))


@pytest.mark.slow
@each_export
@each_agent
def test_exported_actions_are_clipped(name, play_exported):
    agent, params, obs, memory = train(name)
    params, obs_stats = split_obs_stats(params)
    params = jax.tree.map(lambda x: 30 * x, params)  # most actions are at the limits
    act = make_act(agent, params | obs_stats)
    action = play_exported(act, obs, memory)[0]
    low, high = agent.spec.action_space.bounds
    assert (action >= low).all()
    assert (action <= high).all()
    assert (action == low).any()
    assert (action == high).any()


@pytest.mark.slow
@each_export
@pytest.mark.parametrize(
    "name", in_ci("ppo", of=["ppo", "recurrent_ppo", "sac", "td3"])
)
def test_exported_agent_needs_only_parts_of_the_actor(name, play_exported):
    agent, params, obs, memory = train(name, PrivilegedEnv(4))
    act = make_act(agent, params)
    expected = play(act, obs, memory)
    check_results(play_exported(act, {"state": obs["state"]}, memory), expected)


def forward(layers, activation_fn, x):
    for layer in layers[:-1]:
        x = activation_fn(x @ layer["kernel"] + layer["bias"])
    return x @ layers[-1]["kernel"] + layers[-1]["bias"]


@pytest.mark.parametrize(
    "name", ["ppo", "dqn", "sac", pytest.param("td3", marks=pytest.mark.slow)]
)
def test_forward_pass_in_numpy_equals_predict(name):
    """The forward pass of the page equals `predict` for initial weights."""
    env = envs.vectorize(ENVS[name], 2)
    agent = make_agent(name, env, **CONFIG)

    @quick_jit
    def run(key):
        obs = sample_obs(env.observation_space, NUM_OBS)
        first_obs = jax.tree.map(lambda x: x[:2], obs)
        return agent.init_learner(key, first_obs).params, obs

    params, obs = jax.tree.map(np.array, run(jax.random.key(0)))
    params, _ = split_obs_stats(params)
    rng, part = np.random.default_rng(0), "x" if name == "dqn" else "goal"
    mean, var = np.float32(rng.normal(size=(2, *obs[part].shape[1:]))) ** 2
    stats = agent.init_obs_stats()["obs_stats"]
    stats["mean"][part], stats["var"][part] = mean, var
    weights = params.get("actor", params)["params"]
    numbers = (3, 4, 5) if name == "ppo" else (0, 1, 2)
    layers = [weights[f"Dense_{i}"] for i in numbers]
    if name == "ppo":  # the last layer is small; move some actions to the limits
        layers[-1]["kernel"] *= np.float32(100)
    act = make_act(agent, params | {"obs_stats": stats})
    expected, _ = play(act, obs, ())

    x = np.clip((obs[part] - mean) / np.sqrt(var + 1e-8), -10, 10)
    x = x.reshape(NUM_OBS, -1)
    if "turn" in obs:
        x = np.concatenate([x, obs["turn"][:, None] == np.arange(3, 5)], axis=1)
    activation_fn = np.tanh if name == "ppo" else lambda x: np.maximum(x, 0)
    x = forward(layers, activation_fn, x)
    if name == "dqn":
        mask = obs["action_mask"].astype(bool)
        mask |= ~mask.any(1, keepdims=True)  # without a valid action, all are valid
        action = np.where(mask, x, -1e9).argmax(1) - 2
        np.testing.assert_array_equal(action, expected)
        return
    if name == "sac":
        x = np.split(x, 2, axis=1)[0]
    if name in ("sac", "td3"):
        x = np.tanh(x)
    low, high = -2, 3
    scaled = (low + high) / 2 + (high - low) / 2 * x.reshape(NUM_OBS, 2, 1)
    action = np.clip(scaled, low, high)
    check_results(np.float32(action), expected)

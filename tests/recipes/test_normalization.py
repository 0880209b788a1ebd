"""Tests of `Config(normalize_observations=True)`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from flax import struct
from recipe_cases import AGENTS, in_ci, make_agent

import rollout
from rollout import envs, normalization
from rollout.envs import Box, Discrete
from rollout.envs.spaces import Dict
from rollout.normalization import (
    init_obs_stats,
    normalize_obs,
    split_obs_stats,
    update_obs_stats,
)

SPACE = Dict(
    {
        "action_mask": Box(0, 1, (3,), jnp.dtype("int8")),
        "color": Box(0, 255, (2,), jnp.dtype("uint8")),
        "far": Box(-jnp.inf, jnp.inf, (3,)),
        "flag": Box(False, True, (), jnp.dtype(bool)),
        "image": Box(0, 255, (40, 40, 3), jnp.dtype("uint8")),
        "near": Box(-1.0, 1.0, ()),
        "steps": Box(0, 90, (1,), jnp.dtype("int32")),
        "turn": Discrete(4),
    }
)
DISCRETE = "ppo", "recurrent_ppo", "dqn", "pqn"
NORMALIZED = ("far", "near", "steps")


def sample_rows(num_rows, seed=0):
    """Samples rows of `SPACE`, `[num_rows, 2]`, with a large mean."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, 2)
    return {
        "action_mask": rng.integers(0, 2, (*shape, 3)).astype(np.int8),
        "color": rng.integers(0, 256, (*shape, 2)).astype(np.uint8),
        "far": np.float32(1000 + rng.normal(size=(*shape, 3))),
        "flag": rng.random(shape) < 0.5,
        "image": rng.integers(0, 256, (*shape, 40, 40, 3)).astype(np.uint8),
        "near": np.float32(rng.normal(size=shape)),
        "steps": rng.integers(0, 90, (*shape, 1)).astype(np.int32),
        "turn": rng.integers(0, 4, shape).astype(np.int32),
    }


def test_statistics_equal_numpy():
    batches = [sample_rows(n, n) for n in (1, 5, 8)]
    rng = np.random.default_rng(0)
    masks = [rng.random(x["flag"].shape) < 0.7 for x in batches]
    masks[0][:] = True
    step, stats = quick_jit(update_obs_stats), init_obs_stats(SPACE)
    for batch, mask in zip(batches, masks, strict=True):
        stats = step(stats, batch, mask)
    stats = jax.device_get(stats)["obs_stats"]
    assert stats["count"] == sum(x.sum() for x in masks)
    for name in SPACE.spaces:
        if name not in NORMALIZED:
            assert stats["mean"][name] is None
            continue
        pairs = zip(batches, masks, strict=True)
        rows = np.concatenate([x[name][mask] for x, mask in pairs]).astype(np.float64)
        np.testing.assert_allclose(stats["mean"][name], rows.mean(0), rtol=1e-5)
        np.testing.assert_allclose(stats["var"][name], rows.var(0), rtol=1e-3)


def test_nonfinite_values_are_ignored():
    stats = init_obs_stats(Box(-jnp.inf, jnp.inf, (2,)))
    rows = np.float32([[[1, 2]], [[np.nan, 4]]])
    stats = quick_jit(update_obs_stats)(stats, rows, np.ones((2, 1), bool))
    stats = jax.device_get(stats)["obs_stats"]
    assert stats["mean"].tolist() == [0, 3]
    assert stats["var"].tolist() == [1, 1]


def test_masked_rows_do_not_change_statistics():
    old = init_obs_stats(Box(-jnp.inf, jnp.inf, (2,)))
    new = quick_jit(update_obs_stats)(old, np.ones((3, 1, 2)), np.zeros((3, 1), bool))
    jax.tree.map(np.testing.assert_array_equal, old, new)


def test_observations_are_shifted_scaled_and_clipped():
    stats = init_obs_stats(
        Dict({"x": Box(-jnp.inf, jnp.inf, (2,)), "turn": Discrete(2)})
    )
    stats["obs_stats"]["mean"]["x"] = np.float32([1, 2])
    stats["obs_stats"]["var"]["x"] = np.float32([4, 0])
    obs = {"x": np.float32([[5, 2], [-99, 3]]), "turn": np.int32([0, 1])}
    result = jax.device_get(quick_jit(normalize_obs)(stats, obs))
    np.testing.assert_allclose(result["x"], [[2, 0], [-10, 10]], rtol=1e-6)
    assert result["turn"].tolist() == [0, 1]
    # A robot may observe only some parts of a dictionary.
    part = normalize_obs(stats, {"turn": obs["turn"]})
    assert part["turn"].tolist() == [0, 1]
    assert normalize_obs({"params": {}}, obs) is obs


@pytest.mark.parametrize("name", in_ci("ppo", "dqn"))
def test_agents_update_statistics_with_all_rows(name):
    agent = make_agent(name, normalize_observations=True)

    old = quick_jit(agent.init)(jax.random.key(0))
    new, _ = quick_jit(agent.update)(old)
    _, trajectory = agent.collector.collect_steps(
        old.carry, old.params, agent.config.num_steps
    )
    state, obs = jax.device_get((new, trajectory.obs))
    if agent.num_initial_steps:  # the buffer contains all rows, without normalization
        num_rows = agent.num_initial_steps + agent.config.num_steps
        obs = state.buffer_state.ring.experience.obs
        obs = jax.tree.map(lambda x: x[:num_rows], obs)
    params, stats = split_obs_stats(state.params)
    plain = jax.eval_shape(make_agent(name).init, jax.random.key(0))
    assert jax.tree.structure(params) == jax.tree.structure(plain.params)
    stats, key = stats["obs_stats"], "goal" if "goal" in obs else "x"
    rows = obs[key].reshape(-1, *obs[key].shape[2:]).astype(np.float64)
    assert stats["count"] == len(rows)
    np.testing.assert_allclose(stats["mean"][key], rows.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats["var"][key], rows.var(0), rtol=1e-4)
    assert {x for x, mean in stats["mean"].items() if mean is not None} == {key}


@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_gradient_steps_read_normalized_observations(name):
    """Equal to a gradient step without normalization on rows that are normalized."""
    agent, plain = make_agent(name, normalize_observations=True), make_agent(name)
    part = "x" if name == "dqn" else "goal"
    constants = {"mean": 0.3, "var": 0.25}

    def normalize(obs):
        return obs | {part: (obs[part] - 0.3) / 0.5}

    def step(agent, state, key):
        if name == "dqn":
            return agent.gradient_step(state, (key, jnp.int32(1)))[1]
        return agent.gradient_step(state, state.buffer_state, key)[1]

    @quick_jit
    def run(key):
        state = agent.init(key)
        variables, stats = split_obs_stats(state.params)
        stats = stats["obs_stats"] | {
            x: {
                **stats["obs_stats"][x],
                part: jnp.full_like(stats["obs_stats"][x][part], y),
            }
            for x, y in constants.items()
        }
        metrics = step(
            agent, state.replace(params=variables | {"obs_stats": stats}), key
        )
        rows, _ = agent.buffer.to_trajectory(state.buffer_state)
        rows = rows.replace(obs=normalize(rows.obs), next_obs=normalize(rows.next_obs))
        buffer_state = plain.buffer.init(jax.tree.map(lambda x: x[0], rows))
        buffer_state = plain.buffer.add(buffer_state, rows)
        state = state.replace(params=variables, buffer_state=buffer_state)
        return metrics, step(plain, state, key)

    metrics, expected = jax.device_get(run(jax.random.key(0)))
    for metric, value in expected.items():
        np.testing.assert_allclose(metrics[metric], value, rtol=1e-4, err_msg=metric)


@struct.dataclass
class LargeObsEnv:
    """Rewards the sign of an observation with mean 1,000 and standard deviation 100."""

    observation_space = Box(-jnp.inf, jnp.inf, (1,))
    action_space = Discrete(2)

    def reset(self, key):
        obs = self.observe(key)
        return (jnp.int32(0), obs), obs

    def observe(self, key):
        return 1000 + 100 * jax.random.normal(key, (1,))

    def step(self, key, state, action):
        (n, old), obs = state, self.observe(key)
        reward = jnp.float32((old[0] > 1000) == action)
        return envs.EnvStep(
            state=(n + 1, obs),
            obs=obs,
            reward=reward,
            terminated=jnp.bool_(False),
            truncated=n == 9,
        )


@pytest.mark.very_slow
@pytest.mark.parametrize("name", DISCRETE)
def test_agents_learn_from_large_observations(name):
    agent_class = AGENTS[name][0]
    config = agent_class.config.replace(num_updates=20, normalize_observations=True)
    agent = agent_class(envs.vectorize(LargeObsEnv(), 16), config)
    state, _ = jax.jit(lambda key: agent.train(agent.init(key)))(jax.random.key(0))
    collector = agent.collector.replace(policy=agent.eval_policy)
    stats = rollout.evaluate(collector, state.params, jax.random.key(1), 50)
    assert stats.returns.mean > 9  # of 10; random actions have 5
    assert normalization.OBS_STATS in state.params

"""Shared by tests of recipes: environments, small agents and plain networks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from flax import struct

import rollout
from rollout import envs
from rollout.envs import spaces
from rollout.recipes import dqn, ppo, pqn, recurrent_ppo, sac, td3
from rollout.trajectories import select_fields


@struct.dataclass
class MaskedEnv:
    """Masks out one of three actions at every step.

    The actions are -2, -1 and 0. The reward is the action plus 0.5, times a random
    factor. An episode terminates with probability 0.15 per step, and is truncated after
    `limit` steps.
    """

    limit: int = 5
    action_space: Any = envs.Discrete(3, start=-2)
    observation_space: Any = spaces.Dict(
        {
            "action_mask": envs.Box(0, 1, (3,), jnp.dtype("int8")),
            "x": envs.Box(-1.0, 1.0, (2,)),
        }
    )

    def reset(self, key):
        return jnp.int32(0), self.observe(key)

    def step(self, key, state, action):
        obs_key, reward_key, end_key = jax.random.split(key, 3)
        return envs.EnvStep(
            state=state + 1,
            obs=self.observe(obs_key),
            reward=3 * (action + 0.5) * jax.random.uniform(reward_key),
            terminated=jax.random.uniform(end_key) < 0.15,
            truncated=state + 1 == self.limit,
            info={},
        )

    def observe(self, key):
        mask_key, x_key = jax.random.split(key)
        action_mask = jnp.arange(3) != jax.random.randint(mask_key, (), 0, 3)
        x = jax.random.uniform(x_key, (2,), minval=-1.0)
        return {"action_mask": action_mask.astype(jnp.int8), "x": x}


@struct.dataclass
class AimEnv:
    """Pays 1 for the action that the observation shows, less the farther it is.

    Half of the episodes terminate at step 2. The rest are truncated at step 3.
    """

    action_space: Any = envs.Box(-2.0, 3.0, (2, 1))
    observation_space: Any = spaces.Dict(
        {"turn": envs.Discrete(2, start=3), "goal": envs.Box(-2.0, 3.0, (2, 1))}
    )

    def reset(self, key):
        obs = self.observation_space.sample(key)
        return {"n": jnp.int32(0), "obs": obs}, obs

    def step(self, key, state, action):
        n, goal = state["n"] + 1, state["obs"]["goal"]
        obs = self.observation_space.sample(key)
        return envs.EnvStep(
            state={"n": n, "obs": obs},
            obs=obs,
            reward=1 - jnp.abs(action - goal).mean(),
            terminated=(n == 2) & (state["obs"]["turn"] == 3),
            truncated=n == 3,
            info={},
        )


SHORT = {"num_updates": 2, "num_steps": 4, "hidden_layer_sizes": (8,)}
ON_POLICY = SHORT | {"num_epochs": 1, "num_minibatches": 2}
# The first 4 steps of 2 environments are stored before the first update.
OFF_POLICY = SHORT | {"learning_starts": 7, "batch_size": 16, "buffer_size": 64}
AGENTS = {
    "ppo": (ppo.PPO, MaskedEnv(), ON_POLICY),
    "recurrent_ppo": (recurrent_ppo.RecurrentPPO, MaskedEnv(), ON_POLICY),
    "dqn": (dqn.DQN, MaskedEnv(), OFF_POLICY | {"gradient_steps": 2}),
    "pqn": (pqn.PQN, MaskedEnv(), ON_POLICY),
    "sac": (sac.SAC, AimEnv(), OFF_POLICY),
    "td3": (td3.TD3, AimEnv(), OFF_POLICY),
}


def make_agent(name: str, env: Any = None, **changes) -> Any:
    """An agent of two environments, which trains for two updates of four steps."""
    agent_class, default_env, config = AGENTS[name]
    env = envs.vectorize(default_env, 2) if env is None else env
    config = agent_class.config.replace(**config | changes)
    return agent_class(env, config)


class Answers(rollout.Transition):
    """Transitions of an agent that does not act at every step."""

    acting: jax.Array


def mlp(params, *inputs, xp=np):
    """A network of one hidden layer, `[M, n]` to `[M, k]`."""
    first, last = params["params"]["Dense_0"], params["params"]["Dense_1"]
    x = xp.concatenate(inputs, axis=-1) @ first["kernel"] + first["bias"][None]
    return xp.maximum(x, 0) @ last["kernel"] + last["bias"][None]


def flatten(tree) -> np.ndarray:
    """All numbers of a tree, one after the other."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(tree))])


def aim_features(obs):
    """Inputs of a network in `AimEnv`: `goal`, then one-hot `turn`."""
    turn = obs["turn"][..., None] == jnp.arange(3, 5)[None]
    goal = obs["goal"].reshape(len(turn), -1)
    return jnp.concatenate([goal, turn * 1.0], axis=-1)


def critic_values(critics, obs, action):
    """Values of both critics, `[2, M]`, for normalized actions `[M, 2]` of `AimEnv`."""
    pair = [jax.tree.map(lambda x, i=i: x[i], critics) for i in range(2)]
    values = [mlp(x, aim_features(obs), action, xp=jnp)[:, 0] for x in pair]
    return jnp.stack(values)


def check_update(agent, plain_step, init_fn, close):
    """Compares an update with steps of the environments and plain steps in turn.

    Args:
        agent: SAC or TD3 in `AimEnv`s.
        plain_step: one gradient step with optax, `(learner, buffer_state, key)` to the
            next learner and metrics.
        init_fn: function from a state to the first `learner`, which begins with the
            parameters and the target parameters.
        close: compares two arrays.
    """

    def init(key):
        """Starts with target networks and a temperature that differ."""
        state = agent.init(key)
        target_params = jax.tree.map(lambda x: 2 * x + 0.1, state.target_params)
        params = state.params
        if "log_alpha" in params:
            params = params | {"log_alpha": params["log_alpha"] + 0.5}
        state = state.replace(params=params, target_params=target_params)
        return state, init_fn(state)

    first, learner = quick_jit(init)(jax.random.key(4))
    state, metrics = quick_jit(agent.update)(first)
    buffer, fields = agent.buffer, agent.stored_fields
    add = quick_jit(lambda memory, t: buffer.add(memory, select_fields(t, fields)))
    carry, memory, key = first.carry, first.buffer_state, first.key
    steps, logs = [], []
    for _ in range(agent.config.num_steps):
        carry, t = agent.collector.collect_steps(carry, learner[0], 1)
        memory = add(memory, t)
        key, *step_keys = jax.random.split(key, 1 + agent.config.gradient_steps)
        for step_key in step_keys:
            learner, step_metrics = plain_step(learner, memory, step_key)
            logs.append(step_metrics)
        steps.append(t)
    got = state.params, state.target_params, state.window, metrics, state.buffer_state
    got, expected, memory, steps, logs, old = jax.device_get(
        (got, learner[:2], memory, steps, logs, (first.params, first.target_params))
    )
    jax.tree.map(close, got[:2], expected)
    for x, y, start in zip(
        *map(jax.tree.leaves, (got[:2], expected, old)), strict=True
    ):
        assert np.abs(x - y).max() < 0.1 * np.abs(y - start).max()
    assert int(state.num_updates) == 1
    words, expected_words = map(jax.random.key_data, (state.key, key))
    np.testing.assert_array_equal(words, expected_words)
    window, metrics = got[2:4]
    for name in logs[0]:
        close(metrics[name], np.mean([x[name] for x in logs]), err_msg=name)
    jax.tree.map(close, got[4].ring.experience, memory.ring.experience)
    t = jax.tree.map(lambda *x: np.concatenate(x), *steps)
    assert t.terminated.any()
    assert (t.truncated & ~t.terminated).any()
    assert ((t.action >= -2) & (t.action <= 3)).all()
    returns = t.episode_return[t.done]
    assert np.isclose(returns[:, None], window.episode_return).any(axis=1).all()
    close(metrics["return_mean"], state.window.returns.mean)
    return metrics


def in_ci(*names, of=AGENTS):
    """Returns parameters for all agents; all but `names` have the mark `very_slow`."""
    marks = {name: [pytest.mark.very_slow] * (name not in names) for name in of}
    return [pytest.param(name, marks=marks[name]) for name in of]

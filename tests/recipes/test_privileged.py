"""Tests of `actor_obs` and `critic_obs`, the parts that actor and critic observe."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from flax import struct
from privileged_env import PrivilegedEnv
from recipe_cases import in_ci, make_agent

import rollout
from rollout import envs
from rollout.envs import Box
from rollout.envs.spaces import Dict

NAMES = ("ppo", "recurrent_ppo", "sac", "td3")


def make_robot(name, **changes):
    """Creates an agent for two robots with privileged observations."""
    return make_agent(name, envs.vectorize(PrivilegedEnv(4), 2), **changes)


def actor_outputs(agent, params, obs):
    """Returns the outputs that determine the actions for a batch of observations."""
    if hasattr(agent, "actor"):
        return agent.actor.apply(params["actor"], obs)
    if hasattr(agent.model, "initialize_memory"):
        memory = agent.model.initialize_memory(2)
        return agent.model.apply(params, memory, obs)[1][0]
    return agent.model.apply(params, obs)[0]


def critic_outputs(agent, params, obs):
    if hasattr(agent, "critic"):
        action = jnp.zeros((2, agent.distribution.size))
        return agent.value(params["critic"], obs, action)
    if hasattr(agent.model, "initialize_memory"):
        memory = agent.model.initialize_memory(2)
        return agent.model.apply(params, memory, obs)[1][1]
    return agent.model.apply(params, obs)[1]


# Recurrent PPO is similar to PPO, and TD3 is similar to SAC.
quick_agents = pytest.mark.parametrize("name", in_ci("ppo", "sac", of=NAMES))


@quick_agents
def test_actor_does_not_depend_on_the_privileged_part(name):
    agent = make_robot(name, learning_rate=0.1)

    @quick_jit
    def run(key):
        state, _ = agent.train(agent.init(key))
        obs, params = state.carry.obs, state.params

        def total(fn):
            return jax.grad(lambda obs: fn(agent, params, obs).sum())(obs)

        grads = total(actor_outputs), total(critic_outputs)
        robot_obs = {"state": obs["state"][0]}
        complete_obs = {x: y[0] for x, y in obs.items()}
        actions = [agent.predict(params, x) for x in (robot_obs, complete_obs)]
        return grads, actions

    (actor, critic), (robot, complete) = jax.device_get(run(jax.random.key(0)))
    assert (actor["privileged_state"] == 0).all()
    assert (actor["state"] != 0).any()
    assert (critic["privileged_state"] != 0).any()
    jax.tree.map(np.testing.assert_array_equal, robot, complete)


@quick_agents
def test_options_select_parts(name):
    """The actor reads all parts, and the critic only the noisy part."""
    keys = ("state", "privileged_state")
    agent = make_robot(name, actor_obs=keys, critic_obs=("state",))
    assert agent.actor_obs == keys
    assert agent.critic_obs == ("state",)

    @quick_jit
    def run(key):
        obs_key, key = jax.random.split(key)
        obs = jax.vmap(agent.spec.observation_space.sample)(jax.random.split(obs_key))
        params = agent.init_learner(key, obs).params
        actor, critic = (
            jax.grad(lambda obs, fn=fn: fn(agent, params, obs).sum())(obs)
            for fn in (actor_outputs, critic_outputs)
        )
        return actor, critic

    actor, critic = jax.device_get(run(jax.random.key(0)))
    assert (actor["privileged_state"] != 0).any()
    if name != "recurrent_ppo":  # its critic also reads the memory
        assert (critic["privileged_state"] == 0).all()


def test_value_is_nan_without_the_parts_of_the_critic():
    agent = make_robot("ppo", normalize_observations=True)

    @quick_jit
    def run(key):
        obs_key, key = jax.random.split(key)
        obs = jax.vmap(agent.spec.observation_space.sample)(jax.random.split(obs_key))
        params = agent.init_learner(key, obs).params
        robot_obs = {"state": obs["state"]}
        return [agent.policy.value(params, x, ()) for x in (obs, robot_obs)]

    complete, robot = jax.device_get(run(jax.random.key(0)))
    assert np.isfinite(complete).all()
    assert np.isnan(robot).all()


def test_evaluation_without_the_privileged_part():
    """The trained policy accepts a robot that returns only `state`."""

    @struct.dataclass
    class Robot(PrivilegedEnv):
        @property
        def observation_space(self):
            return Dict({"state": Box(-jnp.inf, jnp.inf, (48,))})

        def reset(self, key):
            state, obs = super().reset(key)
            return state, {"state": obs["state"]}

        def step(self, key, state, action):
            result = super().step(key, state, action)
            return result.replace(obs={"state": result.obs["state"]})

    agent = make_robot("ppo", normalize_observations=True)
    params = jax.jit(lambda key: agent.init(key).params)(jax.random.key(0))
    key = jax.random.key(1)
    stats = [
        rollout.evaluate(
            rollout.Collector(envs.vectorize(env, 2), agent.eval_policy), params, key, 4
        )
        for env in (Robot(4), PrivilegedEnv(4))
    ]
    assert stats[0].returns.mean == stats[1].returns.mean


@pytest.mark.parametrize("name", NAMES)
def test_selected_parts_with_a_custom_network_raise(name):
    agent = make_robot(name)
    field = "critic_network" if hasattr(agent, "critic") else "network"
    network = agent.model if name == "recurrent_ppo" else nn.Dense(3)
    with pytest.raises(ValueError, match=rf"`config\.critic_obs` .* custom `{field}`"):
        make_robot(name, critic_obs=("state",)).replace(**{field: network})
    assert agent.replace(**{field: network}).actor_obs == agent.critic_obs


@pytest.mark.parametrize("name", NAMES)
def test_missing_parts_raise(name):
    with pytest.raises(ValueError, match=r"`config\.actor_obs` must name parts"):
        make_robot(name, actor_obs=("position",))
    with pytest.raises(ValueError, match="`obs` must be a single observation"):
        make_robot(name).predict({}, {"privileged_state": np.zeros(123)})

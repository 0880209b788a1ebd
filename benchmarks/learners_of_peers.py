"""PureJaxRL's own scripts and rejax, with the settings of `learners.py`.

Their code is imported from where it is installed and runs as it is. Both expect the
single flag of older versions of gymnax, which `OneFlag` gives them.
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import gymnax
import jax
import jax.numpy as jnp
from learners import DQN, PPO, Learner

# PureJaxRL calls it by this name, and gets `make_one_flag`.
MAKE = gymnax.make


class OneFlag:
    """An environment of gymnax 1 as older versions had them: `done`, an empty info."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def __deepcopy__(self, memo: Any) -> "OneFlag":
        return self  # rejax copies its settings; environments have no state

    def step(self, key: Any, state: Any, action: Any, params: Any = None) -> Any:
        """Steps, and resets if the episode is over."""
        result = self._env.step(key, state, action, params)
        obs, state, reward, terminated, truncated, _ = result
        return obs, state, reward, terminated | truncated, {}


def make_one_flag(env_id: str) -> tuple[OneFlag, Any]:
    """Makes an environment of gymnax and its parameters."""
    env, params = MAKE(env_id)
    return OneFlag(env), params


def load_purejaxrl(folder: Path, name: str) -> Any:
    """Imports a script of PureJaxRL from the folder that has `ppo.py`."""
    # Its scripts import both and use neither with these settings.
    for unused in ("navix", "wandb"):
        sys.modules.setdefault(unused, types.ModuleType(unused))
    if not hasattr(jax, "tree_map"):  # `dqn.py` calls it; jax has removed it
        jax.tree_map = jax.tree.map
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = importlib.import_module(name)
    # `dqn.py` takes these from gymnax, whose present ones have two flags.
    wrappers = importlib.import_module("wrappers")
    module.LogWrapper = wrappers.LogWrapper
    module.FlattenObservationWrapper = wrappers.FlattenObservationWrapper
    return module


def make_purejaxrl(config: PPO | DQN, folder: Path) -> Learner:
    """Makes the learner of PureJaxRL."""
    make = _purejaxrl_ppo if isinstance(config, PPO) else _purejaxrl_dqn
    with mock.patch.object(gymnax, "make", make_one_flag):
        return make(config, folder)


def _purejaxrl_ppo(config: PPO, folder: Path) -> Learner:
    is_robot = config.env_id.startswith("brax:")
    name = "ppo_continuous_action" if is_robot else "ppo"
    module = load_purejaxrl(folder, name)
    train = module.make_train(
        {
            "LR": config.learning_rate,
            "NUM_ENVS": config.num_envs,
            "NUM_STEPS": config.num_steps,
            "TOTAL_TIMESTEPS": config.total_steps,
            "UPDATE_EPOCHS": config.num_epochs,
            "NUM_MINIBATCHES": config.num_minibatches,
            "GAMMA": config.gamma,
            "GAE_LAMBDA": config.lam,
            "CLIP_EPS": config.clip,
            "ENT_COEF": config.entropy,
            "VF_COEF": config.value,
            "MAX_GRAD_NORM": config.max_grad_norm,
            "ACTIVATION": config.activation,
            "ENV_NAME": config.env_id.removeprefix("brax:"),
            "ANNEAL_LR": True,
            "NORMALIZE_ENV": False,
            "DEBUG": False,
        }
    )
    if is_robot:
        env = module.BraxGymnaxWrapper(config.env_id.removeprefix("brax:"))
        num_actions = env.action_space(None).shape[0]
    else:
        num_actions = gymnax.make(config.env_id)[0].num_actions
    network = module.ActorCritic(num_actions, activation=config.activation)

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        action = network.apply(params, obs)[0].sample(seed=key)
        return action.clip(-1.0, 1.0) if is_robot else action

    return Learner(lambda key: train(key)["runner_state"][0].params, act)


def _purejaxrl_dqn(config: DQN, folder: Path) -> Learner:
    module = load_purejaxrl(folder, "dqn")
    train = module.make_train(
        {
            "NUM_ENVS": config.num_envs,
            "BUFFER_SIZE": config.capacity,
            "BUFFER_BATCH_SIZE": config.batch_size,
            "TOTAL_TIMESTEPS": config.total_steps,
            "EPSILON_START": 1.0,
            "EPSILON_FINISH": config.last_epsilon,
            "EPSILON_ANNEAL_TIME": config.total_steps // 2,
            "TARGET_UPDATE_INTERVAL": config.target_period,
            "LR": config.learning_rate,
            "LEARNING_STARTS": config.learning_starts,
            "TRAINING_INTERVAL": config.num_envs,
            "LR_LINEAR_DECAY": False,
            "GAMMA": config.gamma,
            "TAU": 1.0,
            "ENV_NAME": config.env_id,
        }
    )
    network = module.QNetwork(gymnax.make(config.env_id)[0].num_actions)

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        return network.apply(params, obs).argmax(axis=-1)

    return Learner(lambda key: train(key)["runner_state"][0].params, act)


def make_rejax(config: PPO | DQN) -> Learner:
    """Makes the learner of rejax."""
    return _rejax_ppo(config) if isinstance(config, PPO) else _rejax_dqn(config)


def _quiet(algorithm: Any) -> Any:
    """Trains without the evaluations on the way, which the others do not have."""
    return algorithm.replace(eval_callback=lambda *_: (), skip_initial_evaluation=True)


def _make_robot(env_id: str) -> tuple[OneFlag, Any]:
    module = importlib.import_module("rejax.compat.brax2gymnax")
    name = env_id.removeprefix("brax:")
    env, params = module.create_brax(name, episode_length=1000, backend="positional")
    # gymnax 1 asks for it; the limit is in brax's own `done`.
    env.is_truncated = lambda state, params: jnp.array(False)
    return OneFlag(env), params


def _rejax_ppo(config: PPO) -> Learner:
    import rejax

    is_robot = config.env_id.startswith("brax:")
    make_env = _make_robot if is_robot else make_one_flag
    env, env_params = make_env(config.env_id)
    algorithm = _quiet(
        rejax.PPO.create(
            env=env,
            env_params=env_params,
            agent_kwargs={
                "activation": config.activation,
                "hidden_layer_sizes": (config.hidden, config.hidden),
            },
            num_envs=config.num_envs,
            num_steps=config.num_steps,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            learning_rate=config.rate,
            max_grad_norm=config.max_grad_norm,
            total_timesteps=config.total_steps,
            eval_freq=config.total_steps,
            gamma=config.gamma,
            gae_lambda=config.lam,
            clip_eps=config.clip,
            ent_coef=config.entropy,
            vf_coef=config.value,
        )
    )

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        return algorithm.actor.apply(params, obs, key, method="act")

    return Learner(lambda key: algorithm.train(key)[0].actor_ts.params, act)


def _rejax_dqn(config: DQN) -> Learner:
    import rejax
    from flax import linen
    from rejax.networks import DiscreteQNetwork, EpsilonGreedyPolicy

    env, env_params = make_one_flag(config.env_id)
    network = EpsilonGreedyPolicy(DiscreteQNetwork)(
        hidden_layer_sizes=config.hidden,
        activation=linen.relu,
        action_dim=env.num_actions,
    )
    algorithm = _quiet(
        rejax.DQN.create(
            env=env,
            env_params=env_params,
            num_envs=config.num_envs,
            buffer_size=config.capacity,
            fill_buffer=config.learning_starts,
            batch_size=config.batch_size,
            learning_rate=config.learning_rate,
            num_epochs=1,
            total_timesteps=config.total_steps,
            eval_freq=config.total_steps,
            target_update_freq=config.target_period,
            polyak=0.0,
            eps_start=1.0,
            eps_end=config.last_epsilon,
            exploration_fraction=0.5,
            gamma=config.gamma,
            ddqn=False,
        ).replace(agent=network)
    )

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        return network.apply(params, obs).argmax(axis=-1)

    return Learner(lambda key: algorithm.train(key)[0].q_ts.params, act)

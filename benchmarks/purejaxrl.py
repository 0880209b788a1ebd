"""Training scripts of PureJaxRL with the settings of the recipes.

The scripts are imported from their folder and run unmodified. They expect the single
`done` flag of older versions of gymnax, which `OneFlag` returns.

    git clone https://github.com/luchris429/purejaxrl
"""

import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
from recipes import DQNSettings, Learner, PPOSettings, total_steps

# PureJaxRL calls `gymnax.make`, which `mock.patch` replaces by `make_one_flag`.
MAKE = gymnax.make


class OneFlag:
    """A gymnax 1 environment with the older interface: `done` and an empty `info`."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, key: Any, state: Any, action: Any, params: Any = None) -> Any:
        """Steps the environment and resets it at the end of an episode."""
        result = self._env.step(key, state, action, params)
        obs, state, reward, terminated, truncated, _ = result
        return obs, state, reward, terminated | truncated, {}


def make_one_flag(env_id: str) -> tuple[OneFlag, Any]:
    """Creates an environment of gymnax with `OneFlag`, and its parameters."""
    env, params = MAKE(env_id)
    return OneFlag(env), params


def import_script(folder: Path, name: str) -> Any:
    """Imports a script with the modules in its folder; mocks packages it does not use.

    Args:
        folder: folder of the script.
        name: file name of the script without `.py`.
    """
    # Prefix the module name: a recipe is also called `ppo.py`.
    spec = importlib.util.spec_from_file_location(
        f"purejaxrl_{name}", folder / f"{name}.py"
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "path", sys.path[:]):
        sys.modules |= {x: mock.MagicMock() for x in ("navix", "wandb")}
        sys.path.insert(0, str(folder))
        spec.loader.exec_module(module)
    return module


def load_script(folder: Path, name: str) -> Any:
    """Imports a script from the folder that contains `ppo.py`, and adapts it."""
    if not hasattr(jax, "tree_map"):  # `dqn.py` calls it; JAX removed it
        jax.tree_map = jax.tree.map  # pyright: ignore[reportAttributeAccessIssue]
    module = import_script(folder, name)
    # `ppo_rnn.py` expects the GRU cell of older versions of flax.
    cell: Any = functools.partial(nn.GRUCell, 128)
    cell.initialize_carry = lambda key, batch, size: jnp.zeros((*batch, size))
    module.nn = types.SimpleNamespace(**{**vars(nn), "GRUCell": cell})
    # The wrappers of gymnax 1 return two flags.
    wrappers = import_script(folder, "wrappers")
    module.LogWrapper = wrappers.LogWrapper
    module.FlattenObservationWrapper = wrappers.FlattenObservationWrapper
    return module


def make_learner(
    env_id: str,
    config: PPOSettings | DQNSettings,
    folder: Path,
    script: str = "",
    *,
    normalize: bool = False,
) -> Learner:
    """Creates the learner of a script.

    Args:
        env_id: id of an environment of gymnax or brax.
        config: settings of the training.
        folder: folder that contains `ppo.py`.
        script: name of the script; empty selects it by the environment. `"ppo_rnn"`
            returns a learner whose `act` cannot be called.
        normalize: whether to normalize observations and rewards of robots.
    """
    is_robot = env_id.startswith("brax:")
    script = script or ("ppo_continuous_action" if is_robot else "ppo")
    with mock.patch.object(gymnax, "make", make_one_flag):
        if isinstance(config, DQNSettings):
            return _dqn(env_id, config, folder)
        return _ppo(env_id, config, load_script(folder, script), normalize)


def _ppo(env_id: str, config: PPOSettings, module: Any, normalize: bool) -> Learner:
    is_robot, activation = env_id.startswith("brax:"), config.activation
    train = module.make_train(
        {
            "LR": config.learning_rate,
            "NUM_ENVS": config.num_envs,
            "NUM_STEPS": config.num_steps,
            "TOTAL_TIMESTEPS": total_steps(config),
            "UPDATE_EPOCHS": config.num_epochs,
            "NUM_MINIBATCHES": config.num_minibatches,
            "GAMMA": config.gamma,
            "GAE_LAMBDA": config.gae_lambda,
            "CLIP_EPS": config.clip_eps,
            "ENT_COEF": config.ent_coef,
            "VF_COEF": config.vf_coef,
            "MAX_GRAD_NORM": config.max_grad_norm,
            "ANNEAL_LR": config.anneal_lr,
            "DEBUG": False,
            "ACTIVATION": activation,
            "ENV_NAME": env_id.removeprefix("brax:"),
            "NORMALIZE_ENV": normalize,
        }
    )
    if is_robot:
        env = module.BraxGymnaxWrapper(env_id.removeprefix("brax:"))
        num_actions = env.action_space(None).shape[0]
    else:
        num_actions = gymnax.make(env_id)[0].num_actions

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        network = module.ActorCritic(num_actions, activation=activation)
        action = network.apply(params, obs)[0].sample(seed=key)
        return action.clip(-1.0, 1.0) if is_robot else action

    return Learner(train, lambda result: result["runner_state"][0].params, act)


def _dqn(env_id: str, config: DQNSettings, folder: Path) -> Learner:
    module = load_script(folder, "dqn")
    train = module.make_train(
        {
            "NUM_ENVS": config.num_envs,
            "BUFFER_SIZE": 10_000,
            "BUFFER_BATCH_SIZE": 128,
            "TOTAL_TIMESTEPS": total_steps(config),
            "EPSILON_START": 1.0,
            "EPSILON_FINISH": 0.05,
            "EPSILON_ANNEAL_TIME": total_steps(config) // 2,
            "TARGET_UPDATE_INTERVAL": 500,
            "LR": 2.5e-4,
            "LEARNING_STARTS": config.learning_starts,
            "TRAINING_INTERVAL": config.num_envs,
            "LR_LINEAR_DECAY": False,
            "GAMMA": 0.99,
            "TAU": 1.0,
            "ENV_NAME": env_id,
        }
    )
    network = module.QNetwork(gymnax.make(env_id)[0].num_actions)

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        return network.apply(params, obs).argmax(axis=-1)

    return Learner(train, lambda result: result["runner_state"][0].params, act)

"""Training scripts of other libraries with the settings of the recipes.

The scripts are imported from their folders and run unmodified. Scripts that train on
gymnax expect the single `done` flag of older versions, which `OneFlag` returns.
"""

import functools
import importlib
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
import optax
import yaml
from recipes import DQNSettings, Learner, PPOSettings, total_steps

# PureJaxRL calls `gymnax.make`, which `mock.patch` replaces by `make_one_flag`.
MAKE = gymnax.make


class OneFlag:
    """A gymnax 1 environment with the older interface: `done` and an empty `info`."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def __deepcopy__(self, memo: Any) -> "OneFlag":
        return self  # rejax copies its settings; environments have no state

    def step(self, key: Any, state: Any, action: Any, params: Any = None) -> Any:
        """Steps the environment and resets it at the end of an episode."""
        result = self._env.step(key, state, action, params)
        obs, state, reward, terminated, truncated, _ = result
        return obs, state, reward, terminated | truncated, {}


def make_one_flag(env_id: str) -> tuple[OneFlag, Any]:
    """Makes an environment of gymnax with `OneFlag`, and its parameters."""
    env, params = MAKE(env_id)
    return OneFlag(env), params


def import_script(folder: Path, name: str, *unused: str) -> Any:
    """Imports a script together with the modules in its folder.

    Args:
        folder: folder of the script.
        name: file name of the script without `.py`.
        *unused: imported packages that these settings do not use. They are mocked.
    """
    # Prefix the module name: a recipe is also called `ppo.py`.
    spec = importlib.util.spec_from_file_location(
        f"{folder.name}_{name}", folder / f"{name}.py"
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # Scripts of several libraries import modules with equal names, such as `wrappers`.
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "path", sys.path[:]):
        for package in ("wrappers", "models", "logz"):
            sys.modules.pop(package, None)
        sys.modules |= {x: mock.MagicMock() for x in unused}
        sys.path.insert(0, str(folder))
        spec.loader.exec_module(module)
    return module


def load_purejaxrl(folder: Path, name: str) -> Any:
    """Imports a script of PureJaxRL from the folder that contains `ppo.py`."""
    if not hasattr(jax, "tree_map"):  # `dqn.py` calls it; JAX removed it
        jax.tree_map = jax.tree.map
    module = import_script(folder, name, "navix", "wandb")
    # `ppo_rnn.py` expects the GRU cell of older versions of flax.
    cell: Any = functools.partial(nn.GRUCell, 128)
    cell.initialize_carry = lambda key, batch, size: jnp.zeros((*batch, size))
    module.nn = types.SimpleNamespace(**{**vars(nn), "GRUCell": cell})
    return with_one_flag(folder, module)


def with_one_flag(folder: Path, module: Any) -> Any:
    """Replaces gymnax's wrappers with PureJaxRL's, which expect a single flag."""
    wrappers = import_script(folder, "wrappers", "navix", "wandb")
    module.LogWrapper = wrappers.LogWrapper
    module.FlattenObservationWrapper = wrappers.FlattenObservationWrapper
    return module


def make_purejaxrl(
    env_id: str,
    config: PPOSettings | DQNSettings,
    folder: Path,
    script: str = "",
    *,
    normalize: bool = False,
) -> Learner:
    """Makes the learner of PureJaxRL.

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
            return _purejaxrl_dqn(env_id, config, folder)
        return _purejaxrl_ppo(env_id, config, load_purejaxrl(folder, script), normalize)


def _settings(config: PPOSettings) -> dict[str, Any]:
    """Translates settings to PureJaxRL's names, which derived libraries share."""
    return {
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
    }


def _purejaxrl_ppo(
    env_id: str, config: PPOSettings, module: Any, normalize: bool
) -> Learner:
    is_robot, activation = env_id.startswith("brax:"), config.activation
    train = module.make_train(
        {
            **_settings(config),
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


def _purejaxrl_dqn(env_id: str, config: DQNSettings, folder: Path) -> Learner:
    module = load_purejaxrl(folder, "dqn")
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


def make_rejax(env_id: str, config: PPOSettings | DQNSettings) -> Learner:
    """Makes the learner of rejax."""
    make: Any = _rejax_dqn if isinstance(config, DQNSettings) else _rejax_ppo
    return make(env_id, config)


def _without_evals(algorithm: Any) -> Any:
    """Disables evaluations during training, which the other libraries do not have."""
    return algorithm.replace(eval_callback=lambda *_: (), skip_initial_evaluation=True)


def _make_robot(env_id: str) -> tuple[OneFlag, Any]:
    module = importlib.import_module("rejax.compat.brax2gymnax")
    name = env_id.removeprefix("brax:")
    env, params = module.create_brax(name, episode_length=1000, backend="positional")
    # gymnax 1 calls `is_truncated`; brax includes the time limit in `done`.
    env.is_truncated = lambda state, params: jnp.array(False)
    return OneFlag(env), params


def _rejax_ppo(env_id: str, config: PPOSettings) -> Learner:
    import rejax

    is_robot = env_id.startswith("brax:")
    make_env = _make_robot if is_robot else make_one_flag
    env, env_params = make_env(env_id)
    algorithm = _without_evals(
        rejax.PPO.create(
            env=env,
            env_params=env_params,
            agent_kwargs={
                "activation": config.activation,
                "hidden_layer_sizes": config.hidden_layer_sizes,
            },
            num_envs=config.num_envs,
            num_steps=config.num_steps,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            learning_rate=optax.linear_schedule(
                config.learning_rate,
                0.0,
                config.num_updates * config.num_epochs * config.num_minibatches,
            ),
            max_grad_norm=config.max_grad_norm,
            total_timesteps=total_steps(config),
            eval_freq=total_steps(config),
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            clip_eps=config.clip_eps,
            ent_coef=config.ent_coef,
            vf_coef=config.vf_coef,
        )
    )

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        return algorithm.actor.apply(params, obs, key, method="act")

    return Learner(algorithm.train, lambda result: result[0].actor_ts.params, act)


def _rejax_dqn(env_id: str, config: DQNSettings) -> Learner:
    import rejax
    from flax import linen
    from rejax.networks import DiscreteQNetwork, EpsilonGreedyPolicy

    env, env_params = make_one_flag(env_id)
    network = EpsilonGreedyPolicy(DiscreteQNetwork)(
        hidden_layer_sizes=(120, 84),
        activation=linen.relu,
        action_dim=env.num_actions,
    )
    algorithm = _without_evals(
        rejax.DQN.create(
            env=env,
            env_params=env_params,
            num_envs=config.num_envs,
            buffer_size=10_000,
            fill_buffer=config.learning_starts,
            batch_size=128,
            learning_rate=2.5e-4,
            num_epochs=1,
            total_timesteps=total_steps(config),
            eval_freq=total_steps(config),
            target_update_freq=500,
            polyak=0.0,
            eps_start=1.0,
            eps_end=0.05,
            exploration_fraction=0.5,
            gamma=0.99,
            ddqn=False,
        ).replace(agent=network)
    )

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        return network.apply(params, obs).argmax(axis=-1)

    return Learner(algorithm.train, lambda result: result[0].q_ts.params, act)


def make_purejaxql(folder: Path, purejaxrl: Path, num_updates: int) -> Any:
    """Makes the training function of purejaxql's `pqn_gymnax.py` with its settings.

    Args:
        folder: folder that contains `pqn_gymnax.py`.
        purejaxrl: folder that contains `wrappers.py`.
        num_updates: number of updates of 2,048 steps each.
    """
    unused = "hydra", "omegaconf", "safetensors", "safetensors.flax", "wandb"
    module = with_one_flag(purejaxrl, import_script(folder, "pqn_gymnax", *unused))
    settings = yaml.safe_load((folder / "config/alg/pqn_cartpole.yaml").read_text())
    num_steps = num_updates * settings["NUM_ENVS"] * settings["NUM_STEPS"]
    settings |= {"TOTAL_TIMESTEPS": num_steps, "TEST_DURING_TRAINING": False}
    settings |= {"TOTAL_TIMESTEPS_DECAY": num_steps, "WANDB_MODE": "disabled"}
    settings["LR"] = float(settings["LR"])
    with mock.patch.object(gymnax, "make", make_one_flag):
        train = module.make_train(settings)
    return lambda key: train(jax.random.key_data(key))


def make_craftax(folder: Path, env_id: str, config: PPOSettings) -> tuple[Any, Any]:
    """Makes the training function and the network of Craftax_Baselines' `ppo.py`.

    Args:
        folder: folder that contains `ppo.py`.
        env_id: id of an environment of Craftax.
        config: settings of the training.
    """
    module = import_script(folder, "ppo", "wandb")
    train = module.make_train(
        {
            "ENV_NAME": env_id,
            **_settings(config),
            "LAYER_SIZE": config.hidden_layer_sizes[0],
            "USE_WANDB": False,
            "TRAIN_ICM": False,
            "USE_E3B": False,
            "USE_OPTIMISTIC_RESETS": True,
            "OPTIMISTIC_RESET_RATIO": 16,
            "EXPLORATION_UPDATE_EPOCHS": 0,
        }
    )
    num_actions = 17 if "Classic" in env_id else 43
    return train, module.ActorCritic(num_actions, config.hidden_layer_sizes[0])

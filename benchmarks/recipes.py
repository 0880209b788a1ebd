"""Agents of `rollout/recipes` with settings of PureJaxRL, as functions of a key.

`source` returns the program of a page with replaced text; `setup` runs a part of it.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rollout import envs
from rollout.envs.wrappers import Wrapper
from rollout.recipes import dqn, ppo

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "recipes"


@dataclasses.dataclass(frozen=True)
class PPOSettings(ppo.Config):
    """A config of PPO and the number of environments."""

    num_envs: int = 64


PUREJAXRL = PPOSettings(num_minibatches=4, learning_rate=2.5e-4, clip_range_vf=0.2)


class DQNSettings(NamedTuple):
    """Settings of DQN. All other settings are constants of PureJaxRL's `dqn.py`."""

    num_updates: int  # steps per environment, each with a gradient step
    num_envs: int = 10
    learning_starts: int = 10_000  # environment steps before the first gradient


class Learner(NamedTuple):
    """A training function and the trained policy.

    Attributes:
        train: maps a key to the results of the training.
        params: selects the parameters from these results.
        act: maps `(params, obs, key)` to actions, `[B, ...]`, which are samples for
            PPO and greedy for DQN.
    """

    train: Callable[[jax.Array], Any]
    params: Callable[[Any], Any]
    act: Callable[[Any, jax.Array, jax.Array], jax.Array]


class LimitIsFailure(Wrapper):
    """Treats time limits as terminal states, as PureJaxRL does."""

    def step(self, key: jax.Array, state: Any, action: Any) -> envs.EnvStep:
        """Takes one step."""
        result = self.env.step(key, state, action)
        terminated = result.terminated | result.truncated
        truncated = jnp.zeros_like(result.truncated)
        return result.replace(terminated=terminated, truncated=truncated)


def total_steps(config: PPOSettings | DQNSettings) -> int:
    """Computes the number of environment steps of a training run."""
    if isinstance(config, DQNSettings):
        return config.num_updates * config.num_envs
    return config.num_updates * config.num_envs * config.num_steps


def make_env(env_id: str) -> Any:
    """Creates an environment with flat observations and actions in [-1, 1]."""
    options: dict[str, Any] = (
        {"backend": "positional"} if env_id.startswith("brax:") else {}
    )
    env = envs.make(env_id, **options)
    if "MinAtar" in env_id:
        env = envs.TransformObs(env, jnp.ravel)
    return env if hasattr(env.action_space, "n") else envs.RescaleAction(env)


def source(page: str, changes: dict[str, str] | None = None, seed: int = 0) -> str:
    """Returns the program of a page.

    Args:
        page: name of the page, for example `"dqn"` or `"../coming_from/purejaxql"`.
        changes: text of the program and its replacement. Each text must occur once.
        seed: replaces 0 in the assignment to `SEED`, if the program has one.
    """
    text = (FOLDER / f"{page}.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    lines = re.findall(r"^SEED.* = 0", code, re.MULTILINE)
    changes = (changes or {}) | {x: x.replace("0", str(seed)) for x in lines}
    for old, new in changes.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


def setup(
    page: str, end: str, changes: dict[str, str] | None = None, **names: Any
) -> dict[str, Any]:
    """Runs the program of a page up to a line; returns its global variables.

    Args:
        page: see `source`.
        end: beginning of the first line that does not run.
        changes: see `source`.
        **names: global variables to define before the program runs.
    """
    code, match, _ = source(page, changes).partition(f"\n{end}")
    assert match
    names["__name__"] = page
    exec(compile(code, page, "exec"), names)
    return names


def make_lanes(
    env_id: str, config: PPOSettings, *, normalize_rewards: bool = True
) -> Any:
    """Creates the environments for a training run of PPO.

    Args:
        env_id: id of an environment of gymnax or brax.
        config: settings of PPO.
        normalize_rewards: whether to normalize rewards of tasks with continuous
            actions.
    """
    env = envs.vectorize(make_env(env_id), config.num_envs)
    if hasattr(env.action_space, "n") or not normalize_rewards:
        return env
    return envs.NormalizeReward(env, gamma=config.gamma)


def make_ppo(env: Any, config: ppo.Config) -> Learner:
    """Creates a learner of `ppo.py` for vectorized environments."""
    agent = ppo.PPO(env, config)

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        return agent.policy.apply(params, obs, (), key).action

    train = lambda key: agent.train(agent.init(key))  # noqa: E731
    return Learner(train, lambda result: result[0].params, act)


class PureJaxRLDQN(dqn.DQN):
    """DQN with the loss of PureJaxRL: the maximum as target, and squared errors."""

    def td_target(self, params: Any, target_params: Any, sample: Any) -> jax.Array:
        """Computes the target of every row from the target network alone."""
        values = self.model.apply(target_params, sample.experience.next_obs)
        return sample.experience.reward + sample.discount * values.max(axis=-1)

    def loss(self, params: Any, row: dqn.Row) -> Any:
        """Computes the squared TD error of one row."""
        metrics = super().loss(params, row)[1]
        return metrics["td_error"] ** 2, metrics


def make_dqn(env: Any, settings: DQNSettings) -> Learner:
    """Creates a learner of DQN with PureJaxRL's settings, and vectorizes `env`.

    An update is one period of the target network: 500 environment steps.
    """
    num_steps = 500 // settings.num_envs
    num_warmup_steps = settings.learning_starts // settings.num_envs
    num_updates = (settings.num_updates - num_warmup_steps) // num_steps
    config = dqn.Config(
        num_updates=num_updates,
        num_steps=num_steps,
        gradient_steps=num_steps,
        learning_starts=settings.learning_starts,
        learning_rate=2.5e-4,
        anneal_lr=False,
        buffer_size=10_000,
        n_step=1,
        exploration_fraction=0.5 * settings.num_updates / (num_updates * num_steps),
        exploration_final_eps=0.05,
        prioritized=False,
        tau=1.0,
        target_update_interval=num_steps,
        hidden_layer_sizes=(120, 84),
    )
    agent = PureJaxRLDQN(envs.vectorize(env, settings.num_envs), config)

    def act(params: Any, obs: jax.Array, key: jax.Array) -> jax.Array:
        return agent.eval_policy.apply(params, obs, (), key).action

    train = lambda key: agent.train(agent.init(key))  # noqa: E731
    return Learner(train, lambda result: result[0].params, act)

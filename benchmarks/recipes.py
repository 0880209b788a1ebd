"""The programs of `docs/recipes` with other settings, as one function from a key.

Nothing of an algorithm is written here but PureJaxRL's settings of DQN. The agents are
those of `rollout/recipes`; the programs of pages run up to their loop, with some of
their text replaced.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import rollout
from rollout import envs
from rollout.envs.wrappers.wrapper import Wrapper
from rollout.recipes import dqn, ppo
from rollout.recipes.ppo import Config

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "recipes"
# Of `ppo.py`, what PureJaxRL's scripts have.
PUREJAXRL = Config(num_minibatches=4, learning_rate=2.5e-4, value_clip=0.2)


class DQN(NamedTuple):
    """Settings of DQN; the others are those of PureJaxRL's `dqn.py`."""

    num_updates: int  # steps of each lane, with a gradient step each
    num_envs: int = 10
    learning_starts: int = 10_000  # environment steps before the first gradient


class Learner(NamedTuple):
    """A training, and the policy that it learns.

    Attributes:
        train: a key to all that the program returns.
        params: picks the parameters from that.
        act: `(params, obs, key)` to actions, `[B, ...]`: drawn with PPO, greedy with
            DQN.
    """

    train: Callable[[jax.Array], Any]
    params: Callable[[Any], Any]
    act: Callable[[Any, jax.Array, jax.Array], jax.Array]


class LimitIsFailure(Wrapper):
    """An environment that takes its time limit for a termination, as PureJaxRL does."""

    def step(self, key: jax.Array, state: Any, action: Any) -> envs.EnvStep:
        """Takes one step."""
        result = self.env.step(key, state, action)
        terminated = result.terminated | result.truncated
        none = jnp.zeros_like(result.truncated)
        return result.replace(terminated=terminated, truncated=none)


def total_steps(config: Config | DQN) -> int:
    """Environment steps of a training."""
    if isinstance(config, DQN):
        return config.num_updates * config.num_envs
    return config.num_updates * config.num_envs * config.num_steps


def make_env(env_id: str) -> Any:
    """Makes an environment of flat observations and of actions in [-1, 1]."""
    options: dict[str, Any] = (
        {"backend": "positional"} if env_id.startswith("brax:") else {}
    )
    env = envs.make(env_id, **options)
    if "MinAtar" in env_id:
        env = envs.TransformObs(env, jnp.ravel)
    return env if hasattr(env.action_space, "n") else envs.RescaleAction(env)


def source(page: str, changes: dict[str, str] | None = None, seed: int = 0) -> str:
    """The program of a page.

    Args:
        page: such as `"dqn"`, or `"../coming_from/purejaxql"`.
        changes: what takes the place of which text, each of which occurs once.
        seed: takes the place of 0 where the program sets `SEED`, if it does.
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
    """Runs the program of a page up to a line; returns the names that it defines.

    Args:
        page: as of `source`.
        end: how the first line begins that does not run.
        changes: as of `source`.
        **names: what these name.
    """
    code, found, _ = source(page, changes).partition(f"\n{end}")
    assert found
    names["__name__"] = page
    exec(compile(code, page, "exec"), names)
    return names


def make_lanes(env_id: str, config: Config, only: str = "") -> Any:
    """Makes the lanes of a training of PPO.

    Args:
        env_id: of gymnax or brax.
        config: of PPO.
        only: which of `"obs"` and `"reward"` is normalized where actions are
            continuous, both if empty, none if anything else.
    """
    env = envs.vectorize(make_env(env_id), config.num_envs)
    if hasattr(env.action_space, "n"):
        return env
    if only in ("", "obs"):
        env = envs.NormalizeObs(env)
    if only in ("", "reward"):
        env = envs.NormalizeReward(env, gamma=config.gamma)
    return env


def make_collector(env: Any, agent: ppo.PPO) -> rollout.Collector:
    """Makes the collector that plays an agent of `ppo.py`."""
    return rollout.Collector(env=env, policy=agent.policy)


def make_ppo(env: Any, config: Config) -> Learner:
    """Makes the training of `ppo.py` over lanes."""
    agent = ppo.PPO(env.action_space, config)
    collector = make_collector(env, agent)
    train = lambda key: ppo.train(agent, collector, key)  # noqa: E731
    return Learner(
        train, lambda result: result[0].params, lambda *args: agent.act(*args)[0]
    )


class PureJaxRLDQN(dqn.DQN):
    """DQN as PureJaxRL has it: one step, even draws, target networks that are copied.

    An update is one period of the target network.
    """

    def __init__(self, action_space: Any, settings: DQN) -> None:
        length = 500 // settings.num_envs  # steps between copies of the target network
        first = settings.learning_starts // settings.num_envs
        config = dqn.Config(
            num_updates=(settings.num_updates - first) // length,
            num_envs=settings.num_envs,
            warmup=first,
            num_steps=length,
            num_gradients=length,
            capacity=10_000,
        )
        super().__init__(action_space, config, network=self.make_network)
        self.optimizer = optax.adam(2.5e-4)
        self.buffer = rollout.buffers.ReplayBuffer(config.capacity, config.num_envs)
        epsilon: Any = optax.linear_schedule(1.0, 0.05, settings.num_updates // 2)
        self.policy = rollout.epsilon_greedy(self.final_policy, action_space, epsilon)

    @staticmethod
    def make_network(action_space: Any, config: dqn.Config) -> nn.Module:
        """Makes PureJaxRL's layers."""
        layers = [nn.Dense(120), nn.relu, nn.Dense(84), nn.relu]
        return nn.Sequential([jnp.float32, *layers, nn.Dense(action_space.n)])

    def loss(self, params: Any, targets: Any, batch: Any) -> Any:
        """Returns the loss of a batch, of values that the target network chooses."""
        row, index = batch.experience, jnp.arange(batch.weights.size)
        next_values = self.network.apply(targets, row.next_obs)
        target = row.reward + batch.discount * next_values.max(axis=-1)
        error = target - self.network.apply(params, row.obs)[index, row.action]
        return jnp.mean(batch.weights * error**2), error

    def learn(self, learner: Any, memory: Any, t: Any, key: Any, beta: Any) -> Any:
        """Adds a trajectory, takes the gradient steps, and copies the parameters."""
        memory, targets = self.buffer.add(memory, t), learner[0]

        def step(state: Any, key: jax.Array) -> Any:
            params, opt_state = state
            size = self.config.batch_size
            batch = self.buffer.sample(memory, key, size, n_step=1, gamma=0.99)
            grads, _ = jax.grad(self.loss, has_aux=True)(params, targets, batch)
            change, opt_state = self.optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, change), opt_state), None

        state = learner[0], learner[2]
        keys = jax.random.split(key, self.config.num_gradients)
        (params, opt_state), _ = jax.lax.scan(step, state, keys)
        return (params, params, opt_state), memory, {}


def make_dqn(env: Any, config: DQN) -> Learner:
    """Makes the training of `dqn.py` with PureJaxRL's settings."""
    agent = PureJaxRLDQN(env.action_space, config)
    lanes = envs.vectorize(env, config.num_envs)
    collector = rollout.Collector(env=lanes, policy=agent.policy)
    train = lambda key: dqn.train(agent, collector, key)  # noqa: E731
    return Learner(train, lambda result: result[0].params, agent.act)

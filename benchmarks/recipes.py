"""The programs of `docs/recipes` with other settings, as one function from a key.

Nothing of an algorithm is written here. PPO is `rollout/recipes/ppo.py`; the programs
of pages run up to their loop, with some of their text replaced.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import rollout
from rollout import envs
from rollout.envs.wrappers.wrapper import Wrapper
from rollout.recipes import ppo
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
        page: such as `"dqn"`.
        changes: what takes the place of which text, each of which occurs once.
        seed: takes the place of 0 where the program sets `SEED`.
    """
    text = (FOLDER / f"{page}.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    (line,) = re.findall(r"^SEED.* = 0", code, re.MULTILINE)
    changes = (changes or {}) | {line: line.replace("0", str(seed))}
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


def make_dqn(env: Any, config: DQN) -> Learner:
    """Makes the training of the page of DQN with PureJaxRL's settings."""
    length = 500 // config.num_envs  # steps between copies of the target network
    names = setup(
        "dqn",
        "stream = ",
        {
            "1_024_000, 100": f"{total_steps(config)}, 100",
            "512, 32": f"{length * config.num_envs}, {length}",
            "16, 100, 0.99": f"{config.num_envs}, 100, 0.99",
            'rollout.envs.make("Breakout-MinAtar")': "env_of_benchmark",
            "obs > 0": "obs",
            "Dense(128), nn.relu, nn.Dense(128)": "Dense(120), nn.relu, nn.Dense(84)",
            "optax.cosine_decay_schedule(1e-3, num_updates)": "2.5e-4",
            "(1.0, 0.01, TOTAL_STEPS // NUM_ENVS // 10)": (
                "(1.0, 0.05, TOTAL_STEPS // NUM_ENVS // 2)"
            ),
            "PrioritizedReplayBuffer(capacity=100_000": "ReplayBuffer(capacity=10_000",
            "beta=beta, n_step=3": "n_step=1",
            "network.apply(params, row.next_obs).argmax": (
                "network.apply(target_params, row.next_obs).argmax"
            ),
            "optax.huber_loss(error)": "error**2",
            "memory = buffer.update(memory, batch.indices, error + 0.01)": "",
            "target_params = optax.incremental_update(params, target_params, 0.01)": "",
        },
        env_of_benchmark=env,
    )
    collector, buffer, learn = (names[x] for x in ("collector", "buffer", "learn"))

    def batch(state: Any, key: jax.Array) -> tuple[Any, None]:
        carry, (params, _, opt_state, memory) = state
        carry, t = collector.collect_steps(carry, params, length)
        return (carry, learn(params, params, opt_state, memory, t, key, 1.0)), None

    def train(key: jax.Array) -> Any:
        carry_key, init_key, key = jax.random.split(key, 3)
        carry = collector.init(carry_key)
        params = names["network"].init(init_key, carry.obs)
        memory, first = buffer.init(collector, params), config.learning_starts
        carry, memory = collector.fold_steps(
            carry, params, buffer.add, memory, num_steps=first // config.num_envs
        )
        learner = params, params, names["optimizer"].init(params), memory
        num_batches = (total_steps(config) - first) // (length * config.num_envs)
        keys = jax.random.split(key, num_batches)
        return jax.lax.scan(batch, (carry, learner), keys)[0]

    act = lambda params, obs, key: (  # noqa: E731
        names["network"].apply(params, obs).argmax(axis=-1)
    )
    return Learner(train, lambda state: state[1][0], act)

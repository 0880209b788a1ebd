"""Logs common mistakes, made in `rollout/recipes/ppo.py` on CartPole.

    python benchmarks/learning_problems.py

trains three seeds of each mistake, prints the last row of each log, and draws
`docs/learning_problems.png`.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from recipes import ppo

import rollout
from rollout import envs

DOCS = Path(__file__).parents[1] / "docs"

SEEDS = 3
CONFIG = ppo.Config(num_updates=30, num_envs=64)
# Learning rate, factor of the reward, whether all endings are failures.
VARIANTS = {
    "healthy": (2.5e-3, 1.0, False),
    "learning rate x 40": (0.1, 1.0, False),
    "learning rate / 100": (2.5e-5, 1.0, False),
    "wrong sign": (2.5e-3, -1.0, False),
    "reward x 100": (2.5e-3, 100.0, False),
    "time limit as failure": (2.5e-3, 1.0, True),
}
DRAWN = {
    "return": "mean return, last 100 episodes",
    "kl": "KL",
    "explained_variance": "explained variance",
    "entropy": "entropy",
}


class Changed(ppo.PPO):
    """PPO with a mistake."""

    def __init__(self, rate: Any, scale: Any, is_failure: Any) -> None:
        super().__init__(envs.Discrete(2), CONFIG._replace(learning_rate=rate))
        self.scale, self.is_failure = scale, is_failure

    def learn(self, learner: Any, t: Any, next_value: Any, key: Any) -> Any:
        """Learns from a trajectory that was changed."""
        t = t.replace(
            reward=self.scale * t.reward,
            terminated=t.terminated | (self.is_failure & t.truncated),
            truncated=t.truncated & ~self.is_failure,
        )
        return super().learn(learner, t, next_value, key)


def train(agent: Any, key: Any) -> Any:
    """The log of a training, `[U]` each."""
    env = envs.make_vec("CartPole-v1", CONFIG.num_envs)
    collector = rollout.Collector(env=env, policy=agent.policy)
    return ppo.train(agent, collector, key)[1]


def train_from_one_carry(key: Any) -> Any:
    """The log of a loop that passes the first carry to every update."""
    agent = Changed(*VARIANTS["healthy"])
    env = envs.make_vec("CartPole-v1", CONFIG.num_envs)
    collector = rollout.Collector(env=env, policy=agent.policy)
    carry_key, agent_key, key = jax.random.split(key, 3)
    carry = collector.init(carry_key)

    def update(learner: Any, key: Any) -> Any:
        new, t = collector.collect_steps(carry, learner[0], CONFIG.num_steps)
        last_value = collector.value(new, learner[0])
        next_value = rollout.next_values(t, t.extras["value"], last_value)
        learner, log = agent.learn(learner, t, next_value, key)
        log["return"] = rollout.summarize(t).returns.mean
        return learner, log | {"steps": new.step * CONFIG.num_envs}

    keys = jax.random.split(key, CONFIG.num_updates)
    return jax.lax.scan(update, agent.init(agent_key, carry.obs), keys)[1]


def measure() -> dict[str, Any]:
    """The logs of all variants, `[seeds, U]` each, by name."""
    keys = jax.random.split(jax.random.key(0), SEEDS)
    columns = zip(*VARIANTS.values(), strict=True)
    change = [jnp.repeat(jnp.array(x), SEEDS) for x in columns]
    run = jax.jit(jax.vmap(lambda key, *change: train(Changed(*change), key)))
    logs = run(jnp.tile(keys, len(VARIANTS)), *change)
    logs = jax.tree.map(lambda x: np.split(np.asarray(x), len(VARIANTS)), logs)
    found = {
        name: {field: values[i] for field, values in logs.items()}
        for i, name in enumerate(VARIANTS)
    }
    found["first carry again"] = jax.jit(jax.vmap(train_from_one_carry))(keys)
    return found


def draw(found: dict[str, Any], names: list[str]) -> None:
    """Draws the means over seeds, a panel for each of four numbers."""
    with plt.style.context(DOCS / "curves.mplstyle"):
        figure, panels = plt.subplots(2, 2, figsize=(7.5, 4.6), sharex=True)
        for axes, (field, label) in zip(panels.flat, DRAWN.items(), strict=True):
            for name in names:
                values = np.asarray(found[name][field]).mean(axis=0)
                axes.plot(range(1, len(values) + 1), values, label=name)
            axes.set_title(label)
        panels[0, 1].set(yscale="log", ylim=(1e-5, 10))
        for axes in panels[1]:
            axes.set_xlabel("update")
        lines = panels[0, 0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=len(names))
        figure.savefig(DOCS / "learning_problems.png", dpi=100)
        plt.close(figure)


def main() -> None:
    """Measures, prints and draws."""
    plt.switch_backend("agg")
    found = measure()
    for name, log in found.items():
        print(name)
        for field, values in log.items():
            rows = np.asarray(values)[:, [0, 4, 9, 14, 19, 24, 29]]
            print(f"  {field:18}", rows.mean(axis=0).round(4), rows[:, -1].round(3))
    draw(found, ["healthy", "learning rate x 40", "wrong sign", "reward x 100"])


if __name__ == "__main__":
    main()

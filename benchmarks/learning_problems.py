"""Logs common mistakes, made in `rollout/recipes/ppo.py` on CartPole.

    python benchmarks/learning_problems.py

trains three seeds of each mistake, prints the last row of each log, and draws
`docs/learning_problems.png`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from rollout import envs
from rollout.recipes import ppo

DOCS = Path(__file__).parents[1] / "docs"

SEEDS = 3
CONFIG, NUM_ENVS = ppo.Config(num_updates=30), 64
# Learning rate, factor of the reward, whether time limits are terminal states.
VARIANTS = {
    "healthy": (2.5e-3, 1.0, False),
    "learning rate x 40": (0.1, 1.0, False),
    "learning rate / 100": (2.5e-5, 1.0, False),
    "wrong sign": (2.5e-3, -1.0, False),
    "reward x 100": (2.5e-3, 100.0, False),
    "time limit as failure": (2.5e-3, 1.0, True),
}
DRAWN = {
    "return_mean": "mean return, last 100 episodes",
    "kl": "KL",
    "explained_variance": "explained variance",
    "entropy": "entropy",
}


@dataclasses.dataclass(frozen=True)
class Changed(ppo.PPO):
    """PPO with a mistake.

    Attributes:
        scale: factor of the reward.
        is_failure: whether time limits are terminal states.
    """

    scale: Any = 1.0
    is_failure: Any = False

    def learn(self, state: ppo.TrainState, trajectory: Any, last_value: Any) -> Any:
        """Takes the gradient steps of one update from a changed trajectory."""
        is_failure = self.is_failure & trajectory.truncated
        trajectory = trajectory.replace(
            reward=self.scale * trajectory.reward,
            terminated=trajectory.terminated | is_failure,
            truncated=trajectory.truncated & ~is_failure,
        )
        return super().learn(state, trajectory, last_value)


def make_agent(learning_rate: Any, scale: Any, is_failure: Any) -> Changed:
    """Makes PPO with one of the mistakes of `VARIANTS`."""
    env = envs.make_vec("CartPole-v1", NUM_ENVS)
    config = CONFIG.replace(learning_rate=learning_rate)
    return Changed(env, config, scale=scale, is_failure=is_failure)


def train_from_one_carry(key: jax.Array) -> dict[str, jax.Array]:
    """Trains with the first carry in every update; returns metrics `[U]`."""
    agent = make_agent(*VARIANTS["healthy"])
    state = agent.init(key)
    carry = state.carry

    def update(state: ppo.TrainState, _: None) -> Any:
        return agent.update(state.replace(carry=carry))

    return jax.lax.scan(update, state, length=CONFIG.num_updates)[1]


def measure() -> dict[str, Any]:
    """Trains all variants; returns their metrics, `[seeds, U]` each, by name."""

    def train(key: jax.Array, *change: jax.Array) -> dict[str, jax.Array]:
        agent = make_agent(*change)
        return agent.train(agent.init(key))[1]

    keys = jax.random.split(jax.random.key(0), SEEDS)
    columns = zip(*VARIANTS.values(), strict=True)
    changes = [jnp.repeat(jnp.array(x), SEEDS) for x in columns]
    logs = jax.jit(jax.vmap(train))(jnp.tile(keys, len(VARIANTS)), *changes)
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

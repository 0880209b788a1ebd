"""Logs metrics of common mistakes: PPO and DQN on CartPole, SAC on Pendulum.

    python benchmarks/learning_problems.py

trains `rollout/recipes/ppo.py` with three seeds per mistake, prints metrics of selected
updates, and plots `docs/learning_problems.png`.

    python benchmarks/learning_problems.py --agent dqn
    python benchmarks/learning_problems.py --agent sac --seeds 2

print the metrics of DQN or SAC with wrong endings.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from rollout import envs
from rollout.recipes import dqn, ppo, sac

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
PANELS = {
    "return_mean": "mean return, last 100 episodes",
    "kl": "KL",
    "explained_variance": "explained variance",
    "entropy": "entropy",
}


@dataclasses.dataclass(frozen=True)
class PPOWithMistake(ppo.PPO):
    """PPO with a mistake.

    Attributes:
        scale: factor of the reward.
        is_failure: whether time limits are terminal states.
    """

    scale: Any = 1.0
    is_failure: Any = False

    def learn(self, state: ppo.TrainState, trajectory: Any, last_value: Any) -> Any:
        """Takes the gradient steps of one update on a modified trajectory."""
        is_failure = self.is_failure & trajectory.truncated
        trajectory = trajectory.replace(
            reward=self.scale * trajectory.reward,
            terminated=trajectory.terminated | is_failure,
            truncated=trajectory.truncated & ~is_failure,
        )
        return super().learn(state, trajectory, last_value)


def make_agent(learning_rate: Any, scale: Any, is_failure: Any) -> PPOWithMistake:
    """Creates PPO with one of the mistakes of `VARIANTS`."""
    env = envs.make_vec("CartPole-v1", NUM_ENVS)
    config = CONFIG.replace(learning_rate=learning_rate)
    return PPOWithMistake(env, config, scale=scale, is_failure=is_failure)


def train_from_one_carry(key: jax.Array) -> dict[str, jax.Array]:
    """Starts every update from the first carry; returns metrics, `[U]`."""
    agent = make_agent(*VARIANTS["healthy"])
    state = agent.init(key)
    carry = state.carry

    def update(state: ppo.TrainState, _: None) -> Any:
        return agent.update(state.replace(carry=carry))

    return jax.lax.scan(update, state, length=CONFIG.num_updates)[1]


def measure() -> dict[str, Any]:
    """Trains all variants; returns metrics, `[seeds, U]`, by variant and field."""

    def train(key: jax.Array, *change: jax.Array) -> dict[str, jax.Array]:
        agent = make_agent(*change)
        return agent.train(agent.init(key))[1]

    keys = jax.random.split(jax.random.key(0), SEEDS)
    columns = zip(*VARIANTS.values(), strict=True)
    changes = [jnp.repeat(jnp.array(x), SEEDS) for x in columns]
    logs = jax.jit(jax.vmap(train))(jnp.tile(keys, len(VARIANTS)), *changes)
    logs = jax.tree.map(lambda x: np.split(np.asarray(x), len(VARIANTS)), logs)
    metrics = {
        name: {field: values[i] for field, values in logs.items()}
        for i, name in enumerate(VARIANTS)
    }
    metrics["first carry again"] = jax.jit(jax.vmap(train_from_one_carry))(keys)
    return metrics


def draw(metrics: dict[str, Any], names: list[str]) -> None:
    """Plots means over seeds in four panels, one per metric."""
    with plt.style.context(DOCS / "curves.mplstyle"):
        figure, panels = plt.subplots(2, 2, figsize=(7.5, 4.6), sharex=True)
        for axes, (field, label) in zip(panels.flat, PANELS.items(), strict=True):
            for name in names:
                values = np.asarray(metrics[name][field]).mean(axis=0)
                axes.plot(range(1, len(values) + 1), values, label=name)
            axes.set_title(label)
        panels[0, 1].set(yscale="log", ylim=(1e-5, 10))
        for axes in panels[1]:
            axes.set_xlabel("update")
        lines = panels[0, 0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=len(names))
        figure.savefig(DOCS / "learning_problems.png", dpi=100)
        plt.close(figure)


def with_wrong_endings(agent_class: Any) -> Any:
    """Returns a subclass of DQN or SAC with wrong endings in the replay buffer."""

    @dataclasses.dataclass(frozen=True)
    class WrongEndings(agent_class):
        endings: str = "healthy"

        def change(self, t: Any) -> Any:
            if self.endings == "time limit as failure":
                return t.replace(terminated=t.done, truncated=jnp.zeros_like(t.done))
            if self.endings == "terminated ignored":
                return t.replace(terminated=jnp.zeros_like(t.done), truncated=t.done)
            return t

        def init_buffer(self, state: Any, trajectory: Any) -> Any:
            return super().init_buffer(state, self.change(trajectory))

        def learn(self, state: Any, buffer_state: Any, trajectory: Any) -> Any:
            return super().learn(state, buffer_state, self.change(trajectory))

    return WrongEndings


def print_off_policy(name: str, num_seeds: int) -> None:
    """Trains DQN or SAC with each kind of endings, and prints the metrics."""
    if name == "dqn":
        env = envs.make_vec("CartPole-v1", 16)
        agent = with_wrong_endings(dqn.DQN)(env, dqn.Config())
    else:
        env, config = envs.make_vec("Pendulum-v1", 1), sac.Config(num_updates=12)
        agent = with_wrong_endings(sac.SAC)(env, config)
    updates = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0])
    updates = np.maximum(1, np.round(updates * agent.config.num_updates)).astype(int)
    print("updates", updates)
    for endings in ("healthy", "time limit as failure", "terminated ignored"):
        variant = agent.replace(endings=endings)
        train = jax.jit(lambda key, x=variant: x.train(x.init(key))[1])
        for seed, key in enumerate(jax.random.split(jax.random.key(0), num_seeds)):
            for field, values in jax.device_get(train(key)).items():
                print(endings, seed, f"{field:12}", values[updates - 1].round(4))


def main() -> None:
    """Trains all variants, and prints and plots the metrics."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agent", choices=["ppo", "dqn", "sac"], default="ppo")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of DQN and SAC")
    args = parser.parse_args()
    if args.agent != "ppo":
        print_off_policy(args.agent, args.seeds)
        return
    plt.switch_backend("agg")
    metrics = measure()
    for name, fields in metrics.items():
        print(name)
        for field, values in fields.items():
            rows = np.asarray(values)[:, [0, 4, 9, 14, 19, 24, 29]]
            print(f"  {field:18}", rows.mean(axis=0).round(4), rows[:, -1].round(3))
    draw(metrics, ["healthy", "learning rate x 40", "wrong sign", "reward x 100"])


if __name__ == "__main__":
    main()

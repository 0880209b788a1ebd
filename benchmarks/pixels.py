"""Do PPO and DQN learn from pixels, with a CNN and with a dense network?

Trains in Catch with images of 84 x 84 pixels of uint8: with the default network, with
`Config(cnn=False)` and with Stable-Baselines3's `CnnPolicy` at equal settings.
Evaluates the final parameters in 100 episodes. Random actions return about -0.8; a
perfect policy returns 1.

    pip install ".[gymnasium,bench]" optax stable-baselines3
    taskset -c 0 python benchmarks/pixels.py docs/pixels.json --seeds 2
    python benchmarks/charts.py docs/recipes/images.png

Runs in the file are only repeated with `--repeat`.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from harness import complete

import rollout
from rollout import envs
from rollout.recipes import dqn, ppo

GRID, CELL = 12, 7  # 12 x 12 cells of 7 x 7 pixels
NUM_ENVS = 8
PPO_CONFIG = ppo.Config(
    num_updates=50,
    num_minibatches=4,
    learning_rate=5e-4,
    hidden_layer_sizes=(),
    activation="relu",
)
DQN_CONFIG = dqn.Config(
    num_updates=400,
    num_steps=8,
    gradient_steps=16,
    batch_size=32,
    learning_rate=3e-4,
    anneal_lr=False,
    buffer_size=20_000,
    n_step=1,
    exploration_fraction=0.5,
    exploration_final_eps=0.05,
    prioritized=False,
    tau=1.0,
    target_update_interval=250,
    hidden_layer_sizes=(),
)


@struct.dataclass
class Catch:
    """A ball falls through a grid; the paddle in the last row must catch it.

    Source:
        "Behaviour Suite for Reinforcement Learning" (arXiv:1908.03568), Catch.
    """

    observation_space = envs.Box(0, 255, (84, 84, 1), jnp.dtype("uint8"))
    action_space = envs.Discrete(3)

    def reset(self, key):
        """Places the ball in a random column of the first row."""
        ball = jax.random.randint(key, (), 0, GRID)
        state = jnp.stack([jnp.int32(0), ball, jnp.int32(GRID // 2)])
        return state, draw(state, jnp)

    def step(self, key, state, action):
        """Moves the paddle and the ball."""
        row, ball, paddle = state[0] + 1, state[1], state[2]
        paddle = jnp.clip(paddle + action - 1, 0, GRID - 1)
        state = jnp.stack([row, ball, paddle])
        is_last = row == GRID - 1
        return envs.EnvStep(
            state=state,
            obs=draw(state, jnp),
            reward=jnp.where(is_last, jnp.where(ball == paddle, 1.0, -1.0), 0.0),
            terminated=is_last,
        )


def draw(state: Any, xp: Any) -> Any:
    """Draws ball and paddle as white cells, `[84, 84, 1]` uint8."""
    cells = xp.arange(GRID * CELL) // CELL
    ball = (cells == state[0])[:, None] & (cells == state[1])[None]
    paddle = (cells == GRID - 1)[:, None] & (cells == state[2])[None]
    return ((ball | paddle)[..., None] * 255).astype(xp.uint8)


class GymCatch(gymnasium.Env):
    """The same game for Stable-Baselines3."""

    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 1), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Places the ball in a random column of the first row."""
        super().reset(seed=seed)
        self.state = np.array([0, self.np_random.integers(GRID), GRID // 2])
        return draw(self.state, np), {}

    def step(self, action: Any) -> Any:
        """Moves the paddle and the ball."""
        self.state[0] += 1
        self.state[2] = np.clip(self.state[2] + int(action) - 1, 0, GRID - 1)
        is_last = bool(self.state[0] == GRID - 1)
        is_caught = self.state[1] == self.state[2]
        reward = (1.0 if is_caught else -1.0) if is_last else 0.0
        return draw(self.state, np), reward, is_last, False, {}


def train(name: str, cnn: bool | None, seed: int) -> dict[str, Any]:
    """Trains one seed of a recipe."""
    env = envs.vectorize(Catch(), NUM_ENVS)
    agent: Any = ppo.PPO(env, PPO_CONFIG) if name == "PPO" else dqn.DQN(env, DQN_CONFIG)
    agent = agent.replace(config=agent.config.replace(cnn=cnn))
    program = jax.jit(lambda key: agent.train(agent.init(key)))
    program = program.lower(jax.random.key(seed)).compile()
    start = time.process_time()
    state, metrics = jax.block_until_ready(program(jax.random.key(seed)))
    seconds = time.process_time() - start
    collector = agent.collector.replace(policy=agent.eval_policy)
    stats = rollout.evaluate(collector, state.params, jax.random.key(1000 + seed), 100)
    steps = agent.env_steps(np.arange(1, agent.config.num_updates + 1))
    curve = np.asarray(metrics["return_mean"], float)
    stride = max(1, len(curve) // 50)
    return {
        "return": float(stats.returns.mean),
        "seconds": seconds,
        "steps": steps[::stride].tolist(),
        "curve": [None if np.isnan(x) else round(x, 3) for x in curve[::stride]],
    }


def train_peer(name: str, seed: int) -> dict[str, Any]:
    """Trains one seed of Stable-Baselines3 with the settings of the recipe."""
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    steps: list[int] = []
    curve: list[float] = []

    class Record(BaseCallback):
        """Records the mean return of the last 100 episodes."""

        def _on_step(self) -> bool:
            if self.n_calls % 128 == 0 and self.model.ep_info_buffer:
                steps.append(self.num_timesteps)
                returns = [x["r"] for x in self.model.ep_info_buffer]
                curve.append(round(float(np.mean(returns)), 3))
            return True

    env = make_vec_env(GymCatch, NUM_ENVS, seed=seed)
    config = PPO_CONFIG if name == "PPO" else DQN_CONFIG
    model = make_peer(config, env, seed)
    num_steps = config.num_updates * config.num_steps * NUM_ENVS
    start = time.process_time()
    model.learn(num_steps, callback=Record())
    seconds = time.process_time() - start
    mean_return, _ = evaluate_policy(model, env, 100)
    stride = max(1, len(curve) // 50)
    return {
        "return": float(mean_return),
        "seconds": seconds,
        "steps": steps[::stride],
        "curve": curve[::stride],
    }


def make_peer(config: ppo.Config | dqn.Config, env: Any, seed: int) -> Any:
    """Makes an agent of Stable-Baselines3 with the settings of a recipe."""
    import stable_baselines3

    if isinstance(config, ppo.Config):
        options = {
            "n_steps": config.num_steps,
            "batch_size": config.num_steps * NUM_ENVS // config.num_minibatches,
            "n_epochs": config.num_epochs,
            "learning_rate": lambda remaining: config.learning_rate * remaining,
            "clip_range": config.clip_eps,
            "ent_coef": config.ent_coef,
        }
        return stable_baselines3.PPO("CnnPolicy", env, seed=seed, **options)
    # Steps of one environment between two updates of the target network.
    interval = config.target_update_interval * config.num_steps * NUM_ENVS
    options = {
        "learning_starts": config.learning_starts,
        "batch_size": config.batch_size,
        "learning_rate": config.learning_rate,
        "buffer_size": config.buffer_size,
        "train_freq": config.num_steps,
        "gradient_steps": config.gradient_steps,
        "target_update_interval": interval // config.gradient_steps,
        "exploration_fraction": config.exploration_fraction,
        "exploration_final_eps": config.exploration_final_eps,
    }
    return stable_baselines3.DQN("CnnPolicy", env, seed=seed, **options)


PROGRAMS = {
    f"{name}, {network}": program
    for name in ("PPO", "DQN")
    for network, program in {
        "CNN": functools.partial(train, name, None),
        "dense": functools.partial(train, name, False),
        "Stable-Baselines3": functools.partial(train_peer, name),
    }.items()
}


def main() -> None:
    """Trains every program with every seed, and writes the file after each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--programs", nargs="*", default=[*PROGRAMS])
    parser.add_argument("--repeat", action="store_true")
    args = parser.parse_args()
    runs = [
        ((program, str(seed)), functools.partial(PROGRAMS[program], seed))
        for seed in range(args.seeds)
        for program in args.programs
    ]
    complete(args.file, runs, args.repeat)


if __name__ == "__main__":
    main()

"""Do PPO and DQN learn Breakout of Atari, with a CNN and with a dense network?

Trains with the default network, with `Config(cnn=False)` and with Stable-Baselines3's
`CnnPolicy` at equal settings. All programs play the same environments: rewards are
clipped to their signs, a lost life ends an episode, and images have 42 x 42 pixels.

    pip install ".[gymnasium,bench]" optax stable-baselines3
    pip install ale-py opencv-python-headless
    taskset -c 0 python benchmarks/atari.py docs/atari.json --seeds 2

Runs in the file are only repeated with `--repeat`.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import jax
import numpy as np
from harness import complete
from pixels import NUM_ENVS, make_peer

from rollout import envs
from rollout.recipes import dqn, ppo

WINDOW = 50  # games
PPO_CONFIG = ppo.Config(
    num_updates=100,
    num_minibatches=4,
    clip_eps=0.1,
    hidden_layer_sizes=(),
    activation="relu",
)
DQN_CONFIG = dqn.Config(
    num_updates=3200,
    num_steps=4,
    gradient_steps=8,
    batch_size=32,
    learning_starts=8000,
    learning_rate=1e-4,
    anneal_lr=False,
    buffer_size=50_000,
    n_step=1,
    exploration_fraction=0.3,
    exploration_final_eps=0.05,
    prioritized=False,
    tau=1.0,
    target_update_interval=250,
    hidden_layer_sizes=(),
)


class Scores:
    """Steps of all environments, and the score of every complete game."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.curve: list[tuple[int, float]] = []  # steps and score


class Lives(gymnasium.Wrapper):
    """Ends an episode when a life is lost, and clips rewards to their signs.

    The next episode continues the game. Records the scores of complete games.
    """

    def __init__(self, env: gymnasium.Env, scores: Scores) -> None:
        super().__init__(env)
        self.scores, self.is_over, self.is_seeded = scores, True, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Starts a game, or continues it with the next life."""
        if not self.is_over:
            obs, _, terminated, truncated, info = self.env.step(0)
            if not (terminated or truncated):
                return obs, info
        self.is_over, self.score = False, 0.0
        seed, self.is_seeded = None if self.is_seeded else seed, True
        obs, info = self.env.reset(seed=seed)
        self.lives = info["lives"]
        return obs, info

    def step(self, action: Any) -> Any:
        """Takes a step, and records the score at the end of a game."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.scores.num_steps += 1
        reward = float(reward)
        self.score += reward
        self.is_over = terminated or truncated
        if self.is_over:
            self.scores.curve.append((self.scores.num_steps, self.score))
        terminated = terminated or info["lives"] < self.lives
        self.lives = info["lives"]
        return obs, np.sign(reward), terminated, truncated, info


def make_env(scores: Scores) -> gymnasium.Env:
    """Makes Breakout with four stacked gray frames, one of every four."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
    env = gymnasium.wrappers.AtariPreprocessing(env, screen_size=42)
    return Lives(gymnasium.wrappers.FrameStackObservation(env, 4), scores)


def result(scores: Scores, seconds: float) -> dict[str, Any]:
    """Returns the mean score of the last games, the time and the curve."""
    steps, values = map(np.array, zip(*scores.curve, strict=True))
    ends = np.linspace(min(WINDOW, len(values)), len(values), 50, dtype=int)
    curve = [round(float(values[max(0, x - WINDOW) : x].mean()), 3) for x in ends]
    return {
        "return": curve[-1],
        "seconds": seconds,
        "steps": steps[ends - 1].tolist(),
        "curve": curve,
    }


def train(name: str, cnn: bool | None, seed: int) -> dict[str, Any]:
    """Trains one seed of a recipe."""
    scores = Scores()
    env = envs.from_gymnasium(functools.partial(make_env, scores), NUM_ENVS)
    agent: Any = ppo.PPO(env, PPO_CONFIG) if name == "PPO" else dqn.DQN(env, DQN_CONFIG)
    agent = agent.replace(config=agent.config.replace(cnn=cnn))
    start = time.process_time()
    agent.train(agent.init(jax.random.key(seed)))
    return result(scores, time.process_time() - start)


def train_peer(name: str, seed: int) -> dict[str, Any]:
    """Trains one seed of Stable-Baselines3 with the settings of the recipe."""
    from stable_baselines3.common.env_util import make_vec_env

    scores = Scores()
    env = make_vec_env(functools.partial(make_env, scores), NUM_ENVS, seed=seed)
    config = PPO_CONFIG if name == "PPO" else DQN_CONFIG
    start = time.process_time()
    model = make_peer(config, env, seed)
    model.learn(config.num_updates * config.num_steps * NUM_ENVS)
    return result(scores, time.process_time() - start)


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

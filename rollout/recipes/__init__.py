"""Agents to run, read and copy: one complete file per algorithm.

    python -m rollout.recipes.ppo CartPole-v1

- `ppo`, `recurrent_ppo`, `dqn`, `pqn`, `sac`, `td3`: the agents.
- `running`: `run` trains with logs, evaluations and checkpoints; `load` reads them.
- `command`: the command line of the agents.

The extra `train` installs the dependencies: optax, and packages for curves and GIFs.
Recipes are meant to be copied, so they may change in any release.
"""

from rollout.recipes.running import load, run

__all__ = ["load", "run"]

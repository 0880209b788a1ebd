"""Agents to run, read and copy: one complete file per algorithm.

    rollout train ppo CartPole-v1

- `ppo`, `recurrent_ppo`, `dqn`, `pqn`, `sac`, `td3`: the agents.
- `running`: `run` trains with logs, evaluations and checkpoints; `load` reads them.
- `run_files`: the files of a run: tables, loggers, the curve and the animation.
- `run_settings`: the settings of a run, which a resumed run must have, as JSON.

The extra `train` installs the dependencies: optax, and packages for curves and GIFs.
Copy a recipe before you depend on it: recipes may change in any release.
"""

from typing import TYPE_CHECKING, Any

from rollout.base.names import raise_missing
from rollout.recipes.running import load, run

__all__ = ["load", "run"]

if not TYPE_CHECKING:  # A type checker would accept every attribute.

    def __getattr__(name: str) -> Any:
        """Raises an error that contains the right name if it is known."""
        raise_missing("rollout.recipes", name)

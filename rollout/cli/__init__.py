"""The command line: `rollout train`, `speed`, `render`, `inspect` and `envs`.

`python -m rollout` runs the same commands.

- `command`: the parser of all commands, and `main`.
- `arguments`: values of arguments, and the environments that arguments describe.
- `speed`: collects with the random policy and reports the statistics and the speed.
- `train`: trains an agent; the last lines of each recipe call `train.main`.
"""

from rollout.cli.command import main, run_and_exit

__all__ = ["main", "run_and_exit"]

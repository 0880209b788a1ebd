"""Runs the command line, `python -m rollout speed CartPole-v1`; see `rollout.cli`."""

from rollout.cli import run_and_exit

if __name__ == "__main__":
    run_and_exit()

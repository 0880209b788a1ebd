"""The command line: `python -m rollout CartPole-v1` collects with the random policy."""

from rollout.cli.main import main

__all__ = ["main"]

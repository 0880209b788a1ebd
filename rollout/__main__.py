"""Runs the command line: `python -m rollout CartPole-v1`; see `rollout.cli`."""

import os
import sys

from rollout.cli import interrupts
from rollout.cli.main import main

if __name__ == "__main__":
    status = main()
    if status == interrupts.STATUS:
        os._exit(status)  # another thread may be in XLA, which must not be torn down
    sys.exit(status)

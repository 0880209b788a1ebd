"""The command line: `python -m rollout CartPole-v1`; see `rollout.cli`."""

import sys

from rollout.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

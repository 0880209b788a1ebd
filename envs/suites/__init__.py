"""Adapters of environment suites, one module per suite.

Each module defines `from_*`, which adapts an object of the suite, and the functions
`ids` and `make`, which `rollout.envs.make` calls. Modules import a suite on first use.
`physics` is the common adapter of brax and Playground. `convert` validates objects of
suites and converts arrays.

To add a suite, import its module here. Also add an extra of the same name to
`pyproject.toml`, include the extra in `suites`, and add rows to `test_conformance.py`.
"""

from rollout.envs.suites.brax import from_brax
from rollout.envs.suites.craftax import from_craftax
from rollout.envs.suites.gymnax import from_gymnax
from rollout.envs.suites.jaxmarl import from_jaxmarl
from rollout.envs.suites.jumanji import from_jumanji
from rollout.envs.suites.navix import from_navix
from rollout.envs.suites.pgx import from_pgx, from_pgx_seat
from rollout.envs.suites.playground import from_playground
from rollout.envs.suites.xminigrid import from_xminigrid

__all__ = [
    "from_brax",
    "from_craftax",
    "from_gymnax",
    "from_jaxmarl",
    "from_jumanji",
    "from_navix",
    "from_pgx",
    "from_pgx_seat",
    "from_playground",
    "from_xminigrid",
]

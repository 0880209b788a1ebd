"""Adapters of suites of environments, one module per suite.

Each module has `from_*`, which adapts an object of the suite, `ids`, and `make`, which
`rollout.envs.make` calls. A suite is imported only when it is used. `physics` has the
shared part of brax and Playground; `convert` checks objects of suites and converts
their arrays.

A new suite is imported here, which is how it is found. It needs an extra in
`pyproject.toml` by its name, also in `suites`, and rows in `test_conformance.py`.
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

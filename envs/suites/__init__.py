"""Adapters of suites of environments; a suite is imported when it is needed."""

from envs.suites.brax import from_brax
from envs.suites.craftax import from_craftax
from envs.suites.gymnax import from_gymnax
from envs.suites.jaxmarl import from_jaxmarl
from envs.suites.jumanji import from_jumanji, from_jumanji_agents
from envs.suites.navix import from_navix
from envs.suites.pgx import from_pgx, from_pgx_seat
from envs.suites.playground import from_playground
from envs.suites.xminigrid import from_xminigrid

__all__ = [
    "from_brax",
    "from_craftax",
    "from_gymnax",
    "from_jaxmarl",
    "from_jumanji",
    "from_jumanji_agents",
    "from_navix",
    "from_pgx",
    "from_pgx_seat",
    "from_playground",
    "from_xminigrid",
]

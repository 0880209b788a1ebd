"""Suites of environments, one module each, imported when it is needed."""

from envs.suites.gymnax import from_gymnax
from envs.suites.jaxmarl import from_jaxmarl
from envs.suites.pgx import from_pgx

__all__ = ["from_gymnax", "from_jaxmarl", "from_pgx"]

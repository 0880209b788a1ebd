"""Suites of environments, one module each, imported when it is called for."""

from envs.suites.gymnax import from_gymnax

__all__ = ["from_gymnax"]

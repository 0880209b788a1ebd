"""Suites of environments, one module each, imported when it is needed."""

from envs.suites.gymnax import from_gymnax

__all__ = ["from_gymnax"]

"""Runs `--inspect`: what the steps of a run do on an accelerator."""

import argparse
import contextlib
from collections.abc import Iterator

import jax

from rollout.cli.arguments import InputError, naming_parameters
from rollout.cli.collector import make_collector
from rollout.inspection import Report, inspect


def run(args: argparse.Namespace) -> Report:
    """Compiles `num_steps` steps of every lane for the accelerator.

    Raises:
        InputError: if its compiler is not installed.
    """
    with _on_the_cpu(), naming_parameters(args):
        collector, params = make_collector(args)
        try:
            return inspect(
                collector, params, accelerator=args.inspect, num_steps=args.num_steps
            )
        except ImportError as error:
            raise InputError(f"argument --inspect: {error}") from error


@contextlib.contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Lets jax start without a look at the accelerators whose compilers it finds."""
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if not before:
        jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)

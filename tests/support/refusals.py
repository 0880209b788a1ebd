"""Checks that an invalid call raises an error of this project that names the option."""

import functools
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = tuple(str(ROOT / package) for package in ("buffers", "envs", "rollout"))
ERRORS = (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError)
NO_COUNTS = (0, 2.5, "3", True)
NO_FRACTIONS = ("0.6", True, None, -0.1, 1.5, np.nan, jnp.bool_(True))


def pairs(table, counts, fractions):
    """Returns pairs of the nouns of a message and a call that must raise it.

    Args:
        table: calls by the nouns of their message, separated by " ... ".
        counts: calls by the name of an integer argument, which take its value.
        fractions: calls by the name of an argument in [0, 1], which take its value.
    """
    cases = [(message, call) for message, calls in table.items() for call in calls]
    for noun, values, calls_by_name in (
        ("{value!r}", NO_COUNTS, counts),
        ("[0, 1]", NO_FRACTIONS, fractions),
    ):
        cases += [
            (
                f"`{name}` ... {noun.format(value=value)}",
                functools.partial(call, value),
            )
            for name, calls in calls_by_name.items()
            for call in calls
            for value in values
        ]
    return cases


def check_refused(message, call):
    """Checks that a call raises a message with these nouns, separated by " ... "."""
    with pytest.raises(ERRORS) as error:
        call()
    text = str(error.value)
    assert all(noun in text for noun in message.split(" ... ")), text
    assert re.search("must|needs|go together|goes with|are ", text), text
    assert re.search(r"`\w[^`]*`|parameters of", text), text
    assert str(error.traceback[-1].path).startswith(PACKAGES), error.traceback[-1]

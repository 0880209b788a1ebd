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
    """Returns pairs of a message and a call that must raise it.

    Args:
        table: calls by message.
        counts: calls by the name of an integer argument, which take its value.
        fractions: calls by the name of an argument in [0, 1], which take its value.
    """
    cases = [(message, call) for message, calls in table.items() for call in calls]
    for requirement, values, calls_by_name in (
        ("an int of at least 1, got {value!r}", NO_COUNTS, counts),
        ("a number in [0, 1], got", NO_FRACTIONS, fractions),
    ):
        cases += [
            (
                f"`{name}` must be {requirement.format(value=value)}",
                functools.partial(call, value),
            )
            for name, calls in calls_by_name.items()
            for call in calls
            for value in values
        ]
    return cases


def check_refused(message, call):
    with pytest.raises(ERRORS, match=re.escape(message)) as error:
        call()
    text = str(error.value)
    assert re.search("must|needs|go together|goes with|are ", text), text
    assert re.search(r"`\w[^`]*`|parameters of", text), text
    assert str(error.traceback[-1].path).startswith(PACKAGES), error.traceback[-1]

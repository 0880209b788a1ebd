"""Checks that a call is refused: what must hold, by name, and by us, not by jax."""

import functools
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
OURS = tuple(str(ROOT / package) for package in ("buffers", "envs", "rollout"))
ERRORS = (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError)
NO_COUNTS = (0, 2.5, "3", True)
NO_FRACTIONS = ("0.6", True, None, -0.1, 1.5, np.nan, jnp.bool_(True))


def pairs(table, counts, fractions):
    """Each message of a table with each of the calls that raise it.

    Those of `counts` and `fractions`, by the name of an argument, take its value.
    """
    found = [(message, call) for message, calls in table.items() for call in calls]
    for what, values, calls_of in (
        ("an int of at least 1, got {value!r}", NO_COUNTS, counts),
        ("a number in [0, 1], got", NO_FRACTIONS, fractions),
    ):
        found += [
            (
                f"`{name}` must be {what.format(value=value)}",
                functools.partial(call, value),
            )
            for name, calls in calls_of.items()
            for call in calls
            for value in values
        ]
    return found


def check_refused(message, call):
    with pytest.raises(ERRORS, match=re.escape(message)) as caught:
        call()
    text = str(caught.value)
    assert re.search("must|needs|go together|goes with|are ", text), text
    assert re.search(r"`\w[^`]*`|parameters of", text), text
    assert str(caught.traceback[-1].path).startswith(OURS), caught.traceback[-1]

"""Checks that a call is refused: what must hold, by name, and by us, not by jax."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OURS = tuple(str(ROOT / package) for package in ("buffers", "envs", "rollout"))
ERRORS = (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError)


def pairs(table):
    """Each message of a table with each of the calls that raise it."""
    return [(message, call) for message, calls in table.items() for call in calls]


def check_refused(message, call, *args):
    with pytest.raises(ERRORS, match=re.escape(message)) as caught:
        call(*args)
    text = str(caught.value)
    assert re.search("must|needs|go together|goes with|are ", text), text
    assert re.search(r"`\w[^`]*`|parameters of", text), text
    assert str(caught.traceback[-1].path).startswith(OURS), caught.traceback[-1]

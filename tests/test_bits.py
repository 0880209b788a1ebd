"""Compares collected bits with stored hashes.

The test is skipped on machines whose floating-point rounding differs.
"""

import json

import bits
import jax
import pytest

HASHES = json.loads(bits.FILE.read_text()).get(jax.__version__)
# All 18 pairs with all streams take twenty minutes. Run them after changes of the
# kernel or of streams.
CASES = [
    ("count", "recurrent", tuple(bits.STREAMS)),
    ("CartPole-v1", "net", ("truncate", "whole")),
    ("Breakout-MinAtar", "random", ("reuse_memory",)),
]


@pytest.mark.slow
@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize(("env", "policy", "streams"), CASES)
def test_bits_equal_stored_hashes(env, policy, streams):
    if HASHES is None:
        pytest.skip(f"no hashes for jax {jax.__version__}")
    if bits.digest(bits.chaos()) != HASHES["chaos"]:
        pytest.skip("the rounding of this machine differs from the stored hashes")
    stored, hashes = HASHES[f"{env} {policy}"], bits.hash_all(env, policy, streams)
    changed = [name for name, x in hashes.items() if stored.get(name) != x]
    assert not changed, (
        f"changed bits; {bits.__file__} describes how to update the hashes"
    )

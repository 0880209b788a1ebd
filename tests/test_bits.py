"""No bit of what is collected has changed since the hashes were written.

Those of policies that draw nothing at random are older than the kernel as it is; the
others were written again when random actions got cheaper draws, and those of CartPole
when its bits became those of any number of devices.

On a machine that rounds otherwise there is nothing to compare with.
"""

import json

import bits
import jax
import pytest

KNOWN = json.loads(bits.FILE.read_text()).get(jax.__version__)
# All 18 pairs with all streams take twenty minutes, which is worth it when the
# kernel or a stream changes. Most have some of the streams here.
CASES = [
    ("count", "recurrent", tuple(bits.STREAMS)),
    ("CartPole-v1", "net", ("truncate", "whole")),
    ("Breakout-MinAtar", "random", ("reuse_memory",)),
]


@pytest.mark.slow
@pytest.mark.usefixtures("key_reuse")
@pytest.mark.parametrize(("env", "policy", "streams"), CASES)
def test_bits_are_those_of_the_code_before(env, policy, streams):
    if KNOWN is None:
        pytest.skip(f"no hashes for jax {jax.__version__}")
    if bits.digest(bits.chaos()) != KNOWN["chaos"]:
        pytest.skip("this machine rounds otherwise than the one that wrote the hashes")
    known, hashes = KNOWN[f"{env} {policy}"], bits.hash_all(env, policy, streams)
    changed = [name for name, x in hashes.items() if known.get(name) != x]
    assert not changed, (
        f"other bits than before; {bits.__file__} says how to write them"
    )

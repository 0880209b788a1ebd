"""Settings for every test, and the environments that tests share."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def strict_jax():
    """Makes silent rank promotion and reused keys errors."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture
def key_reuse():
    """Allows a test to draw twice from one key, to compare what is drawn."""
    with jax.debug_key_reuse(False):
        yield

"""Settings for every test, and the environments that tests share."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def strict_jax():
    """Makes silent rank promotion and reused keys errors."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_debug_key_reuse", True)

"""What only Craftax and Craftax-Classic have."""

import jax
import jax.numpy as jnp
import plain_suites
import pytest
from cases import quick_jit

pytest.importorskip("craftax")
pytestmark = [
    pytest.mark.slow,
    # The suite reuses keys, and promotes ranks.
    pytest.mark.usefixtures("quick_compile", "key_reuse", "rank_promotion"),
]
LIMIT = 60


def classic():
    return plain_suites.craftax("Craftax-Classic-Symbolic-v1", limit=LIMIT).adapt()


def test_death_is_a_termination_also_at_the_limit():
    env = classic()
    state, _ = quick_jit(env.reset)(jax.random.key(0))
    step = quick_jit(env.step)
    for health, time, ending in (
        (9, 3, (False, False)),
        (-9, 3, (True, False)),
        (9, LIMIT - 1, (False, True)),
        (-9, LIMIT - 1, (True, False)),
    ):
        before = state.replace(
            player_health=jnp.full_like(state.player_health, health),
            timestep=jnp.full_like(state.timestep, time),
        )
        result = step(jax.random.key(1), before, jnp.int32(0))
        assert (bool(result.terminated), bool(result.truncated)) == ending


def test_parameters_are_leaves():
    env = classic()
    assert LIMIT in jax.tree.leaves(env)
    other = env.replace(env_params=env.env_params.replace(max_timesteps=5))
    assert jax.tree.structure(other) == jax.tree.structure(env)

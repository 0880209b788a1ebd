"""What only XLand-MiniGrid has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from suite_checks import check_contract

from rollout import envs

xminigrid = pytest.importorskip("xminigrid")
wrappers = pytest.importorskip("xminigrid.wrappers")
pytestmark = [
    pytest.mark.slow,
    # The suite reuses keys in branches.
    pytest.mark.usefixtures("quick_compile", "key_reuse"),
]


def test_rules_vary_from_lane_to_lane():
    env, params = xminigrid.make("XLand-MiniGrid-R1-9x9", max_steps=20)
    rules = jax.tree.map(lambda x: jnp.stack([x, x + 1]), params.ruleset)
    each = jax.vmap(
        lambda x: envs.suites.from_xminigrid(env, params.replace(ruleset=x))
    )
    vector = envs.vectorize_each(each(rules))
    state, _ = quick_jit(vector.reset)(jax.random.split(jax.random.key(0), 2))
    np.testing.assert_array_equal(state.goal_encoding, rules.goal)
    np.testing.assert_array_equal(state.rule_encoding, rules.rules)


def test_wrappers_come_through_unless_they_reset():
    env, params = xminigrid.make("MiniGrid-EmptyRandom-5x5")
    wrapped = wrappers.DirectionObservationWrapper(env)
    adapted = envs.suites.from_xminigrid(wrapped, params)
    check_contract(adapted)
    assert set(adapted.observation_space.spaces) == {"img", "direction"}
    with pytest.raises(ValueError, match="must not reset itself"):
        envs.suites.from_xminigrid(wrappers.GymAutoResetWrapper(env), params)

"""Behavior that only Craftax, Jumanji and XLand-MiniGrid have."""

import jax
import jax.numpy as jnp
import numpy as np
import plain_suites
import pytest
from cases import quick_jit
from suite_checks import check_contract, check_render, collect

from rollout import envs

pytestmark = [
    pytest.mark.slow,
    # The suites reuse keys, also in both branches of a condition under `vmap`. Some
    # suites promote ranks.
    pytest.mark.usefixtures("quick_compile", "key_reuse", "rank_promotion"),
]
LIMIT = 60
DOWNLOADS = "Sokoban-v0"  # downloads its levels
TEAMS = ("Connector-v3", "LevelBasedForaging-v0", "SearchAndRescue-v0")


def test_craftax_death_terminates_at_the_limit():
    pytest.importorskip("craftax")
    env = plain_suites.craftax("Craftax-Classic-Symbolic-v1", limit=LIMIT).adapt()
    assert LIMIT in jax.tree.leaves(env)
    state, _ = quick_jit(env.reset)(jax.random.key(0))
    step = quick_jit(env.step)
    for health, time, ending in (
        (9, 3, (False, False)),
        (-9, 3, (True, False)),
        (9, LIMIT - 1, (False, True)),
        (-9, LIMIT - 1, (True, False)),
    ):
        changed_state = state.replace(
            player_health=jnp.full_like(state.player_health, health),
            timestep=jnp.full_like(state.timestep, time),
        )
        result = step(jax.random.key(1), changed_state, jnp.int32(0))
        assert (bool(result.terminated), bool(result.truncated)) == ending


class FixedDiscount:
    """A Jumanji game that ends with a given discount."""

    def __init__(self, discount):
        jumanji = pytest.importorskip("jumanji")
        self.env = jumanji.make("Snake-v1", num_rows=4, num_cols=4, time_limit=12)
        self.discount = discount
        for name in ("reset", "observation_spec", "action_spec", "reward_spec"):
            setattr(self, name, getattr(self.env, name))

    def step(self, state, action):
        state, timestep = self.env.step(state, action)
        return state, timestep.replace(discount=jnp.float32(self.discount))


@pytest.mark.parametrize(("discount", "terminated"), [(0.0, True), (1.0, False)])
def test_jumanji_discount_distinguishes_termination_and_truncation(
    discount, terminated
):
    env = envs.suites.from_jumanji(FixedDiscount(discount))
    step = quick_jit(env.step)
    state, _ = quick_jit(env.reset)(jax.random.key(0))
    for number in range(12):  # the time limit
        result = step(jax.random.key(number), state, jnp.int32(number // 3 % 4))
        state = result.state
        if result.terminated | result.truncated:
            break
    assert bool(result.terminated) == terminated
    assert bool(result.truncated) == (not terminated)


# Some games warn about their scatters.
@pytest.mark.filterwarnings("ignore:scatter inputs have:FutureWarning")
@pytest.mark.very_slow
def test_jumanji_games_satisfy_the_contract():
    pytest.importorskip("jumanji")
    for env_id in envs.env_ids("jumanji"):
        if env_id.partition(":")[2] in TEAMS:
            env = envs.vectorize(envs.make(env_id), 2)
            rows = jax.eval_shape(lambda env=env: collect(env, num_steps=3))
            assert rows.info.agents.reward.shape == (3, 2, len(env.agents)), env_id
        elif DOWNLOADS not in env_id:
            check_contract(envs.make(env_id))


def test_jumanji_viewer_names():
    assert not envs.render.can_render(envs.suites.from_jumanji(FixedDiscount(0.0)))
    check_render(envs.make("jumanji:FlatPack-v0"))


def test_auto_reset_wrappers_raise():
    jumanji = pytest.importorskip("jumanji")
    wrapped = pytest.importorskip("jumanji.wrappers").AutoResetWrapper(
        jumanji.make("Snake-v1")
    )
    with pytest.raises(ValueError, match="reset itself"):
        envs.suites.from_jumanji(wrapped)
    xminigrid = pytest.importorskip("xminigrid")
    wrappers = pytest.importorskip("xminigrid.wrappers")
    env, params = xminigrid.make("MiniGrid-EmptyRandom-5x5")
    with pytest.raises(ValueError, match="reset itself"):
        envs.suites.from_xminigrid(wrappers.GymAutoResetWrapper(env), params)
    wrapped = wrappers.DirectionObservationWrapper(env)
    adapted = envs.suites.from_xminigrid(wrapped, params)
    check_contract(adapted)
    assert set(adapted.observation_space.spaces) == {"img", "direction"}


def test_xminigrid_rules_differ_between_lanes():
    xminigrid = pytest.importorskip("xminigrid")
    env, params = xminigrid.make("XLand-MiniGrid-R1-9x9", max_steps=20)
    rules = jax.tree.map(lambda x: jnp.stack([x, x + 1]), params.ruleset)
    make_envs = jax.vmap(
        lambda x: envs.suites.from_xminigrid(env, params.replace(ruleset=x))
    )
    vector = envs.vectorize_each(make_envs(rules))
    state, _ = quick_jit(vector.reset)(jax.random.split(jax.random.key(0), 2))
    np.testing.assert_array_equal(state.goal_encoding, rules.goal)
    np.testing.assert_array_equal(state.rule_encoding, rules.rules)

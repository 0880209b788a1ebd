"""What only Jumanji has."""

import jax
import jax.numpy as jnp
import pytest
from cases import quick_jit
from suite_checks import check_contract, check_is_drawn, collect

from rollout import envs

jumanji = pytest.importorskip("jumanji")
pytestmark = [
    pytest.mark.slow,
    # Jumanji draws from keys in branches, and `vmap` computes both; some games promote
    # ranks.
    pytest.mark.usefixtures("quick_compile", "key_reuse", "rank_promotion"),
]
DOWNLOADS = "Sokoban-v0"  # its levels
TEAMS = ("Connector-v3", "LevelBasedForaging-v0", "SearchAndRescue-v0")


class Endings:
    """A game of Jumanji in which the last discount is what was asked for."""

    def __init__(self, discount):
        self.env = jumanji.make("Snake-v1", num_rows=4, num_cols=4, time_limit=12)
        self.discount = discount
        for name in ("reset", "observation_spec", "action_spec", "reward_spec"):
            setattr(self, name, getattr(self.env, name))

    def step(self, state, action):
        state, timestep = self.env.step(state, action)
        return state, timestep.replace(discount=jnp.float32(self.discount))


@pytest.mark.parametrize(("discount", "terminated"), [(0.0, True), (1.0, False)])
def test_discount_tells_termination_from_truncation(discount, terminated):
    env = envs.suites.from_jumanji(Endings(discount))
    step = quick_jit(env.step)
    state, _ = quick_jit(env.reset)(jax.random.key(0))
    for number in range(12):  # the time limit
        result = step(jax.random.key(number), state, jnp.int32(number // 3 % 4))
        state = result.state
        if result.terminated | result.truncated:
            break
    assert bool(result.terminated) == terminated
    assert bool(result.truncated) == (not terminated)


# Of the scatter of some games.
@pytest.mark.filterwarnings("ignore:scatter inputs have:FutureWarning")
@pytest.mark.parametrize(
    "env_id", [x for x in envs.env_ids("jumanji") if DOWNLOADS not in x]
)
def test_every_game_keeps_the_contract(env_id):
    if env_id.partition(":")[2] not in TEAMS:
        return check_contract(envs.make(env_id))
    env = envs.vectorize(envs.make(env_id), 2)
    rows = jax.eval_shape(lambda: collect(env, num_steps=3))
    assert rows.info.agents.reward.shape == (3, 2, len(env.agents))


def test_game_that_resets_itself_is_refused():
    from jumanji.wrappers import AutoResetWrapper

    with pytest.raises(ValueError, match="must not reset itself"):
        envs.suites.from_jumanji(AutoResetWrapper(jumanji.make("Snake-v1")))


def test_viewer_is_found_under_each_of_its_names():
    check_is_drawn(envs.make("jumanji:FlatPack-v0"))
    assert not envs.render.can_render(envs.suites.from_jumanji(Endings(0.0)))

"""Adapting environments of Jumanji."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit
from suite_checks import (
    check_contract,
    check_is_as_in_plain_loop,
    check_is_drawn,
    collect,
)

import rollout
from rollout import envs

jumanji = pytest.importorskip("jumanji")
pytestmark = [
    pytest.mark.slow,
    # Jumanji draws from keys in branches, and `vmap` computes both; some games promote
    # ranks.
    pytest.mark.usefixtures("key_reuse", "rank_promotion"),
]

DOWNLOADS = "Sokoban-v0"  # its levels
TEAMS = ("Connector-v3", "LevelBasedForaging-v0", "SearchAndRescue-v0")
SMALL_SNAKE = {"num_rows": 4, "num_cols": 4, "time_limit": 12}


def mask_of(obs):
    return obs.action_mask


@functools.cache
def snake():
    env = jumanji.make("Snake-v1", **SMALL_SNAKE)
    return env, collect(envs.suites.from_jumanji(env), mask_of)


def plain(env):
    """How an episode begins and goes on by Jumanji's own functions."""

    @quick_jit
    def advance(key, state, action):
        state, timestep = env.step(state.replace(key=key), action)
        last, ends = timestep.last(), timestep.discount == 0
        obs, reward = timestep.observation, timestep.reward
        return state, obs, reward, last & ends, last & ~ends, timestep.extras

    @quick_jit
    def begin(key):
        state, timestep = env.reset(key)
        return state, timestep.observation

    return begin, advance


def test_rows_are_those_of_a_plain_loop():
    env, trajectory = snake()
    check_is_as_in_plain_loop(trajectory, *plain(env))
    assert trajectory.terminated.sum() > 20


def test_mask_of_the_game_is_kept():
    _, trajectory = snake()
    allowed = np.take_along_axis(
        trajectory.obs.action_mask, trajectory.action[..., None], -1
    )[..., 0]
    stuck = ~trajectory.obs.action_mask.any(-1)
    assert (allowed | stuck).all()


class Endings:
    """A game of Jumanji in which the last discount is what was asked for."""

    def __init__(self, discount):
        self.env = jumanji.make("Snake-v1", **SMALL_SNAKE)
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
    "name", [x for x in envs.env_ids("jumanji") if DOWNLOADS not in x]
)
def test_every_game_keeps_the_contract(name):
    short = name.partition(":")[2]
    if short not in TEAMS:
        env = envs.make(name)
        check_contract(env)
        obs = jax.eval_shape(env.reset, jax.random.key(0))[1]
        assert jax.tree.structure(
            jax.eval_shape(env.observation_space.sample, jax.random.key(0))
        ) == jax.tree.structure(obs)
        return
    env = envs.make_agents(name)
    vector = envs.vectorize_agents(env, 2)
    policy = rollout.agents.policy_map(
        {"all": rollout.random_policy(vector.action_spaces["agents"])},
        rollout.agents.fixed_mapping(dict.fromkeys(env.agents, "all")),
        env,
    )
    collector = rollout.Collector(env=vector, policy=policy)
    carry = jax.eval_shape(collector.init, jax.random.key(0))
    collect = functools.partial(collector.collect_steps, num_steps=3)
    _, trajectory = jax.eval_shape(collect, carry, {"all": None})
    assert trajectory.info.agents.reward.shape == (3, 2, len(env.agents))


def test_agents_of_a_team_are_as_in_a_plain_loop():
    game = jumanji.make("LevelBasedForaging-v0")
    env = envs.suites.from_jumanji_agents(game)
    begin, advance = plain_team(game)
    reset, step = map(quick_jit, (env.reset, env.step))
    state, obs, acting = reset(jax.random.key(1))
    own_state, own_obs = begin(jax.random.key(1))
    assert acting.all()
    for number in range(30):
        np.testing.assert_array_equal(obs["agents"].agents_view, own_obs.agents_view)
        np.testing.assert_array_equal(obs["agents"].action_mask, own_obs.action_mask)
        assert (obs["agents"].step_count == own_obs.step_count).all()
        key = jax.random.key(number)
        action = jnp.array([number % 6, (number + 3) % 6], jnp.int32)
        result = step(key, state, {"agents": action})
        own_state, timestep = advance(key, own_state, action)
        np.testing.assert_array_equal(result.reward, timestep.reward)
        np.testing.assert_array_equal(result.terminated, timestep.discount == 0)
        done = result.episode_terminated | result.episode_truncated
        assert done == timestep.last()
        state, obs, own_obs = result.state, result.obs, timestep.observation


def plain_team(game):
    def begin(key):
        state, timestep = game.reset(key)
        return state, timestep.observation

    def advance(key, state, action):
        return game.step(state.replace(key=key), action)

    return quick_jit(begin), quick_jit(advance)


def test_spaces_are_those_of_the_game():
    env = envs.suites.from_jumanji(jumanji.make("Snake-v1"))
    assert env.action_space == envs.Discrete(4)
    assert env.observation_space.spaces.grid.shape == (12, 12, 5)
    assert envs.make("jumanji:FlatPack-v0").action_space.nvec == (25, 4, 9, 9)
    routes = envs.make("jumanji:MultiCVRP-v0").action_space
    assert routes == envs.spaces.MultiDiscrete((22, 22), jnp.dtype(jnp.int16))


def test_states_are_drawn():
    check_is_drawn(envs.suites.from_jumanji(snake()[0]))


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match=r"`env` must have reset, .* got object"):
        envs.suites.from_jumanji(object())
    team, game = jumanji.make("Connector-v3"), jumanji.make("Snake-v1")
    with pytest.raises(ValueError, match="`env` must have one reward"):
        envs.suites.from_jumanji(team)
    with pytest.raises(ValueError, match="`env` must have a reward for each agent"):
        envs.suites.from_jumanji_agents(game)
    from jumanji.wrappers import AutoResetWrapper

    with pytest.raises(ValueError, match="must not reset itself"):
        envs.suites.from_jumanji(AutoResetWrapper(game))

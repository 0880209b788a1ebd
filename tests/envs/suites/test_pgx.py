"""Adapting games of pgx."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pgx
import pytest
from cases import quick_jit
from suite_checks import check_is_as_in_plain_loop
from suite_checks import collect as collect_rows

import rollout
from rollout import envs

KEY = jax.random.key(3)


make_game = functools.cache(pgx.make)


@functools.cache
def make(name):
    """A game and its adapter, and how each begins and steps, jitted."""
    game = make_game(name)
    env = envs.suites.from_pgx(game)
    return env, *map(quick_jit, (game.init, game.step, env.reset, env.step))


def play_both(name, pick):
    """Each step of the adapter, and pgx's state before and after it, to the end."""
    env, pgx_init, pgx_step, env_reset, env_step = make(name)
    before = pgx_init(KEY)
    state, obs, acting = env_reset(KEY)
    check_observed(obs, acting, before)
    number = 0
    while not (before.terminated | before.truncated):
        key = jax.random.fold_in(KEY, number)
        action = pick(np.asarray(before.legal_action_mask), number)
        after = pgx_step(before, jnp.int32(action), key)
        # What the others would do is not read.
        joint = np.full((len(env.agents),), action + 1, np.int32)
        joint[before.current_player] = action
        step = env_step(key, state, {"players": joint})
        yield step, before, after
        before, state, number = after, step.state, number + 1


def check_observed(obs, acting, state):
    players, num_players = jax.device_get(obs["players"]), len(state.rewards)
    assert players["observation"].dtype == state.observation.dtype
    for row in range(num_players):
        np.testing.assert_array_equal(players["observation"][row], state.observation)
        np.testing.assert_array_equal(
            players["action_mask"][row], state.legal_action_mask
        )
    assert acting.tolist() == [i == state.current_player for i in range(num_players)]


def pick_random(seed):
    rng = np.random.default_rng(seed)
    return lambda mask, number: rng.choice(np.flatnonzero(mask))


@pytest.mark.parametrize(
    "name", ["tic_tac_toe", pytest.param("connect_four", marks=pytest.mark.slow)]
)
def test_game_is_as_in_a_plain_loop(name, key_reuse):
    for step, _, state in play_both(name, pick_random(1)):
        check_observed(step.obs, step.acting, state)
        np.testing.assert_array_equal(step.reward, state.rewards)
        assert step.reward.dtype == jnp.float32
        assert step.episode_terminated == state.terminated
        assert not step.episode_truncated
        assert not (step.terminated | step.truncated).any()
        assert not step.info["illegal_action"]
    assert step.episode_terminated
    assert sorted(step.reward.tolist()) == [-1, 1]  # with this seed nobody draws


def test_action_that_is_not_allowed_ends_the_game_and_is_reported(key_reuse):
    steps = list(play_both("tic_tac_toe", lambda mask, number: 4))
    assert [bool(step.info["illegal_action"]) for step, _, _ in steps] == [False, True]
    step, before, _ = steps[-1]
    assert step.episode_terminated
    assert step.reward[before.current_player] == -1


def test_spaces_are_those_of_the_game():
    env = envs.suites.from_pgx(pgx.make("connect_four"))
    assert env.agents == ("player_0", "player_1")
    assert env.groups == {"players": env.agents}
    assert env.action_spaces == {"players": envs.Discrete(7)}
    spaces = env.observation_spaces["players"].spaces
    assert spaces["observation"].shape == (6, 7, 2)
    assert spaces["action_mask"].shape == (7,)
    assert spaces["observation"].dtype == bool


def test_one_player_has_a_game_of_its_own():
    env = envs.suites.from_pgx(pgx.make("2048"))
    assert env.agents == ("player_0",)
    state, obs, acting = jax.eval_shape(env.reset, KEY)
    assert acting.shape == (1,)
    assert obs["players"]["action_mask"].shape == (1, 4)
    step = jax.eval_shape(
        env.step, KEY, state, {"players": jax.ShapeDtypeStruct((1,), jnp.int32)}
    )
    assert step.reward.shape == (1,)
    assert jax.tree.structure(step.state) == jax.tree.structure(state)


def test_adapters_of_one_game_are_one_program():
    game = pgx.make("tic_tac_toe")
    one, other = (jax.tree.structure(envs.suites.from_pgx(x)) for x in (game, game))
    assert one == other
    assert hash(one) == hash(other)


def test_object_without_the_methods_is_refused():
    with pytest.raises(TypeError, match=r"`env` must have .* got object"):
        envs.suites.from_pgx(object())


def collect(name, num_steps, num_envs=4):
    env = envs.vectorize_agents(make(name)[0], num_envs)
    collector = rollout.Collector(env=env, policy=POLICIES[name](env.action_space))
    carry = collector.init(jax.random.key(0))
    return env, collector.collect_steps(carry, None, num_steps)[1]


def allowed_policy(action_space):
    """Draws one of the allowed actions for every player."""
    del action_space  # unused

    def act(params, obs, key):
        del params  # unused
        mask = obs["players"]["action_mask"]
        return {"players": jax.random.categorical(key, jnp.log(mask)).astype(jnp.int32)}

    return rollout.stateless_policy(act)


POLICIES = {"tic_tac_toe": rollout.random_policy, "kuhn_poker": allowed_policy}


@pytest.mark.slow
def test_collector_plays_tic_tac_toe():
    env, trajectory = collect("tic_tac_toe", 24)
    contains = jax.vmap(jax.vmap(env.observation_space.contains))
    assert contains(trajectory.obs).all()
    assert contains(trajectory.next_obs).all()
    agents, illegal = trajectory.info.agents, trajectory.info.env["illegal_action"]
    assert (agents.acted.sum(axis=-1) == 1).all()
    # Who does what is not allowed has lost, and the other one has won.
    assert illegal.any()
    assert (trajectory.terminated | ~illegal).all()
    loser = agents.reward == -1
    np.testing.assert_array_equal(loser[illegal], agents.acted[illegal])


@pytest.mark.slow
def test_collector_plays_kuhn_poker_by_the_rules():
    _, trajectory = collect("kuhn_poker", 24)
    assert not trajectory.info.env["illegal_action"].any()
    assert trajectory.terminated.any()
    # What one player wins, the other one loses.
    np.testing.assert_array_equal(trajectory.reward, 0)
    won = jnp.abs(trajectory.info.agents.reward)[trajectory.terminated]
    assert (won > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("game", ["tic_tac_toe", "connect_four"])
def test_masked_policies_never_make_an_illegal_move(game):
    """A million moves: half drawn evenly, half sampled from a policy's logits."""
    env = envs.vectorize_agents(envs.suites.from_pgx(pgx.make(game)), 1000)
    space = env.action_spaces["players"]

    def sample(params, obs, key):
        del params
        mask = obs["action_mask"]
        logits = jax.random.normal(key, mask.shape) * 9.0
        logits = jnp.where(mask, logits, -jnp.inf)
        return jax.random.categorical(jax.random.fold_in(key, 1), logits)

    policies = {
        "random": rollout.random_policy(space, mask_fn=lambda obs: obs["action_mask"]),
        "sampled": rollout.stateless_policy(sample),
    }

    def count(totals, transition):
        illegal = transition.info.env["illegal_action"]
        moves = transition.info.agents.acted.sum(axis=1)
        return totals + jnp.array([illegal.sum(), moves.sum()], jnp.int32)

    for name, policy in policies.items():
        mapped = rollout.agents.policy_map(
            {name: policy}, rollout.agents.fixed_mapping(name), env
        )
        collector = rollout.Collector(env=env, policy=mapped)
        carry = collector.init(jax.random.key(5))
        totals = jnp.zeros(2, jnp.int32)
        _, totals = collector.fold_steps(
            carry, {name: None}, count, totals, num_steps=500
        )
        assert totals.tolist() == [0, 500_000]


def first_allowed(params, obs, key):
    """The first allowed action from a number on, in a circle."""
    del key  # unused
    mask = jnp.roll(obs["action_mask"], -params)
    return ((jnp.argmax(mask) + params) % mask.size).astype(jnp.int32)


def one_or_evenly(params, obs, key):
    """Draws evenly, as the adapter's own opponent does."""
    del params  # unused
    return jax.random.categorical(key, jnp.log(obs["action_mask"])).astype(jnp.int32)


def plain_seat(game, opponent, params):
    """The part of player 0 by pgx's own functions, one move after the other."""
    init = quick_jit(game.init)
    split = quick_jit(jax.random.split)

    @quick_jit
    def see(state):
        own = game._observe(state, jnp.int32(0))
        return {"observation": own, "action_mask": state.legal_action_mask}

    @quick_jit
    def move(state, action, key):
        info = {"illegal_action": ~state.legal_action_mask[action]}
        return game.step(state, action, key), info

    @quick_jit
    def answer(state, key, number):
        seen = {
            "observation": state.observation,
            "action_mask": state.legal_action_mask,
        }
        action_key, step_key = jax.random.split(jax.random.fold_in(key, number))
        action = opponent(params, seen, action_key)
        return game.step(state, action, step_key)

    def finish_round(state, key):
        number, reward = 0, np.float32(0.0)
        while not (state.terminated or state.truncated) and state.current_player != 0:
            state = answer(state, key, number)
            number, reward = number + 1, reward + np.asarray(state.rewards)[0]
        return state, reward

    def begin(key):
        init_key, key = split(key)
        state, _ = finish_round(init(init_key), key)
        return state, see(state)

    def advance(key, state, action):
        step_key, key = split(key)
        moved, info = move(state, action, step_key)
        after, reward = finish_round(moved, key)
        reward = np.asarray(moved.rewards)[0] + reward
        return after, see(after), reward, after.terminated, after.truncated, info

    return begin, advance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "opponent", "params", "num_steps"),
    [
        ("tic_tac_toe", None, None, 250),
        ("kuhn_poker", first_allowed, 1, 50),
        ("2048", None, None, 50),
    ],
)
def test_one_seat_is_as_in_a_plain_loop(name, opponent, params, num_steps, key_reuse):
    game = make_game(name)
    env = envs.suites.from_pgx_seat(game, opponent, params)
    trajectory = collect_rows(env, lambda obs: obs["action_mask"], num_steps=num_steps)
    loop = plain_seat(game, opponent or one_or_evenly, params)
    check_is_as_in_plain_loop(trajectory, *loop)
    assert trajectory.terminated.any() or name == "2048"
    assert not trajectory.info["illegal_action"].any()
    if name == "tic_tac_toe":
        assert set(np.unique(trajectory.reward)) == {-1.0, 0.0, 1.0}


@pytest.mark.slow
def test_every_lane_may_meet_an_opponent_of_its_own(key_reuse):
    game = make_game("tic_tac_toe")
    params = jnp.arange(3, dtype=jnp.int32)
    each = jax.vmap(
        lambda number: envs.suites.from_pgx_seat(game, first_allowed, number)
    )
    vector = envs.vectorize_each(each(params), 3)
    keys = jax.random.split(jax.random.key(2), 3)
    state, _ = quick_jit(vector.reset)(keys)
    step = quick_jit(vector.step)(keys, state, jnp.full((3,), 8, jnp.int32))
    board = jax.device_get(step.obs["observation"])[..., 1].reshape(3, 9)
    before = jax.device_get(state._x.board if hasattr(state, "_x") else state._board)
    for lane in range(3):
        free = [x for x in range(9) if before[lane, x] < 0 and x != 8]
        answer = min(free, key=lambda x: (x - lane) % 9)
        assert board[lane, answer]


def test_seat_is_one_program_for_all_parameters_of_the_opponent():
    game = make_game("tic_tac_toe")
    one, other = (envs.suites.from_pgx_seat(game, first_allowed, x) for x in (1, 2))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.leaves(one) == [1]
    with pytest.raises(TypeError, match=r"`env` must have .* got object"):
        envs.suites.from_pgx_seat(object())

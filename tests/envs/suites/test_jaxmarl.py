"""Adapting environments of JaxMARL: its own, and one that has all it may have."""

import functools

import chex
import jax
import jax.numpy as jnp
import jaxmarl
import numpy as np
import pytest
from flax import struct
from jaxmarl.environments import spaces

import rollout
from rollout import envs

KEY = jax.random.key(3)
pytestmark = pytest.mark.slow  # the import alone takes seconds


@struct.dataclass
class Inner:
    step: jax.Array
    is_out: jax.Array  # [3]


@struct.dataclass
class State:
    state: Inner


class Duel:
    """Two reds and a blue; action 1 takes an agent out, and nobody left is the end.

    In step n (from 1) everyone has the reward n. Observations are floats at first and
    integers later, and the count of steps begins as a Python number.
    """

    agents = ("red_0", "red_1", "blue_0")
    max_steps = 4

    def observation_space(self, agent):
        return spaces.Box(0, 9, (2,) if "red" in agent else (3,))

    def action_space(self, agent):
        return spaces.Discrete(3 if "red" in agent else 4)

    def observe(self, state, dtype):
        obs = {
            agent: jnp.full(self.observation_space(agent).shape, state.step, dtype)
            for agent in self.agents
        }
        return {**obs, "world_state": jnp.asarray(state.is_out, jnp.float32)}

    def reset(self, key):
        del key  # unused
        state = Inner(step=0, is_out=jnp.zeros((3,), bool))
        return self.observe(state, jnp.float32), State(state)

    def step_env(self, key, state, actions):
        state = state.state
        action = jnp.stack([actions[agent] for agent in self.agents])
        is_out = state.is_out | (action == 1)
        state = Inner(step=jnp.int32(state.step + 1), is_out=is_out)
        dones = dict(zip(self.agents, is_out, strict=True))
        dones["__all__"] = jnp.all(is_out) | (state.step >= self.max_steps)
        reward = dict.fromkeys((*self.agents, "__all__"), state.step)
        info = {"draw": jax.random.uniform(key), "count": 3}
        return self.observe(state, jnp.int32), State(state), reward, dones, info

    def get_avail_actions(self, state):
        """Not the action of the number of the steps taken."""
        return {
            agent: (jnp.arange(self.action_space(agent).n) != state.state.step).astype(
                jnp.float32
            )
            for agent in self.agents
        }


@pytest.fixture
def rank_promotion():
    """The MPE environments add arrays of different ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


make = functools.cache(jaxmarl.make)  # what one test compiled serves the next


def draw_actions(suite, rng):
    return {
        agent: jnp.int32(rng.integers(suite.action_space(agent).n))
        for agent in suite.agents
    }


def stack(env, values):
    return {
        group: jnp.stack([values[agent] for agent in names])
        for group, names in env.groups.items()
    }


def play_both(suite, num_steps):
    """Each step of the adapter, and what the suite returns for the same actions."""
    env, rng = envs.suites.from_jaxmarl(suite), np.random.default_rng(0)
    state, obs, acting = env.reset(KEY)
    suite_obs, suite_state = suite.reset(KEY)
    assert acting.all()
    chex.assert_trees_all_equal(plain(obs), stack(env, suite_obs))
    chex.assert_trees_all_equal(state, suite_state)
    for number in range(num_steps):
        key, actions = jax.random.fold_in(KEY, number), draw_actions(suite, rng)
        step = env.step(key, state, stack(env, actions))
        chex.assert_trees_all_equal_shapes_and_dtypes(
            (step.state, step.obs), jax.tree.map(jnp.asarray, (state, obs))
        )
        suite_step = suite.step_env(key, suite_state, actions)
        yield env, step, suite_step
        state, suite_state = step.state, suite_step[1]
        if step.episode_terminated | step.episode_truncated:
            return


def plain(obs):
    return {k: x["observation"] if isinstance(x, dict) else x for k, x in obs.items()}


def check_parity(suite, num_steps):
    ended = False
    for env, step, (obs, state, reward, dones, info) in play_both(suite, num_steps):
        chex.assert_trees_all_equal(plain(step.obs), stack(env, obs))
        chex.assert_trees_all_equal(step.state, state)
        chex.assert_trees_all_equal(step.info, jax.tree.map(jnp.asarray, info))
        for row, agent in enumerate(suite.agents):
            assert step.reward[row] == reward[agent]
            assert (step.terminated | step.truncated)[row] == dones[agent]
        assert step.reward.dtype == jnp.float32
        ended = step.episode_terminated | step.episode_truncated
        assert ended == dones["__all__"]
    assert ended


def test_own_environment_is_as_in_a_plain_loop(key_reuse):
    check_parity(Duel(), 4)


def test_switch_riddle_is_as_in_a_plain_loop(key_reuse):
    check_parity(make("switch_riddle"), 6)


def test_simple_spread_is_as_in_a_plain_loop(key_reuse, rank_promotion):
    check_parity(make("MPE_simple_spread_v3", max_steps=3), 4)


def flags(env, actions):
    """The flags of the episode after each of these actions, which all agents take."""
    state, _, _ = env.reset(KEY)
    found = []
    for action in actions:
        joint = {
            group: jnp.full((len(names),), action, jnp.int32)
            for group, names in env.groups.items()
        }
        step = env.step(KEY, state, joint)
        found.append((bool(step.episode_terminated), bool(step.episode_truncated)))
        state = step.state
    return found, step


GOES_ON, TERMINATED, TRUNCATED = (False, False), (True, False), (False, True)


def test_switch_riddle_is_truncated_at_its_limit_and_terminated_before(key_reuse):
    env = envs.suites.from_jaxmarl(make("switch_riddle"))  # limit 6 = 4 * 3 - 6
    found, step = flags(env, [0] * 6)
    assert found == [GOES_ON] * 5 + [TRUNCATED]
    assert step.truncated.all()
    assert not step.terminated.any()
    found, step = flags(env, [0, 2])
    assert found == [GOES_ON, TERMINATED]
    assert step.terminated.all()
    assert not step.truncated.any()


def test_ending_of_mpe_one_step_past_its_limit_is_the_truncation(
    key_reuse, rank_promotion
):
    env = envs.suites.from_jaxmarl(make("MPE_simple_spread_v3", max_steps=3))
    found, step = flags(env, [0] * 4)
    assert found == [GOES_ON] * 3 + [TRUNCATED]
    assert step.truncated.all()


def test_agents_that_end_before_the_limit_terminate(key_reuse):
    env = envs.suites.from_jaxmarl(Duel())
    state, _, _ = env.reset(KEY)
    step = env.step(KEY, state, {"red": jnp.array([0, 1]), "blue": jnp.array([0])})
    assert step.terminated.tolist() == [False, True, False]
    assert step.acting.tolist() == [True, False, True]
    assert not step.truncated.any()
    assert not step.episode_terminated
    assert flags(env, [1])[0] == [TERMINATED]
    # At the limit those who are left are cut with the episode.
    found, step = flags(env, [0] * 4)
    assert found == [GOES_ON] * 3 + [TRUNCATED]
    assert not (step.terminated | step.truncated).any()


@struct.dataclass
class Clock:
    clock: jax.Array


class Solo:
    """One agent; its limit and its time have other names."""

    agents = ("solo",)
    horizon = 2

    def observation_space(self, agent):
        return spaces.MultiDiscrete([5])

    def action_space(self, agent):
        return spaces.Box(-1, 1, (2,))

    def reset(self, key):
        return {"solo": jnp.zeros((1,), jnp.int32)}, Clock(jnp.int32(0))

    def step_env(self, key, state, actions):
        state = Clock(state.clock + 1)
        done = (state.clock >= self.horizon) | (actions["solo"][0] > 0)
        dones = {"solo": done, "__all__": done}
        obs = {"solo": state.clock.reshape(1)}
        return obs, state, {"solo": 1.0}, dones, {"name": "no array"}

    def get_avail_actions(self, state):
        """As JaxNav's, which are no mask of discrete actions."""
        return {"solo": jnp.ones((2,))}


def play_solo(env, pushes):
    state, _, _ = env.reset(KEY)
    for push in pushes:
        step = env.step(KEY, state, {"agents": jnp.full((1, 2), push, jnp.float32)})
        state = step.state
    return step


def test_limit_and_time_may_have_other_names(key_reuse):
    env = envs.suites.from_jaxmarl(Solo(), limit_field="horizon", time_field="clock")
    step = play_solo(env, [-1, -1])
    assert (step.episode_terminated, step.episode_truncated) == TRUNCATED
    step = play_solo(env, [1])
    assert (step.episode_terminated, step.episode_truncated) == TERMINATED


def test_environment_without_a_limit_only_terminates(key_reuse):
    step = play_solo(envs.suites.from_jaxmarl(Solo()), [-1, -1])
    assert (step.episode_terminated, step.episode_truncated) == TERMINATED
    assert step.info == {}  # a name is no array


@pytest.mark.parametrize(
    ("limit_field", "time_field", "message"),
    [
        ("limit", None, "`limit_field` must be a field of `env`, got 'limit' and Solo"),
        (None, "clock", "`limit_field` must be a field of `env`, got 'max_steps'"),
        ("horizon", None, "`time_field` must be a field of the state, got 'step or"),
        ("horizon", "age", "`time_field` must be .* got 'age' and Clock"),
    ],
)
def test_missing_limit_or_time_is_refused(limit_field, time_field, message):
    with pytest.raises(ValueError, match=message):
        envs.suites.from_jaxmarl(Solo(), limit_field=limit_field, time_field=time_field)


def test_spaces_are_ours_and_masks_and_world_state_have_theirs():
    env = envs.suites.from_jaxmarl(Duel())
    assert env.action_spaces == {"red": envs.Discrete(3), "blue": envs.Discrete(4)}
    blue = env.observation_spaces["blue"].spaces
    assert sorted(blue) == ["action_mask", "observation", "world_state"]
    assert blue["observation"] == envs.Box(0, 9, (3,))
    assert blue["action_mask"] == envs.Box(0, 1, (4,), jnp.dtype(bool))
    assert blue["world_state"].shape == (3,)
    solo = envs.suites.from_jaxmarl(Solo())
    assert solo.observation_spaces["agents"].dtype == jnp.int32
    np.testing.assert_array_equal(solo.observation_spaces["agents"].high, [4])
    assert solo.action_spaces == {"agents": envs.Box(-1, 1, (2,))}


class Swapped(Solo):
    """Declares its observation in another shape and dtype, as Overcooked does."""

    def observation_space(self, agent):
        return spaces.Box(0, 255, (3, 2))

    def reset(self, key):
        return {"solo": jnp.zeros((2, 3), jnp.uint8)}, Clock(jnp.int32(0))


def test_space_has_the_shape_and_dtype_of_what_is_observed():
    space = envs.suites.from_jaxmarl(Swapped()).observation_spaces["agents"]
    assert space == envs.Box(0, 255, (2, 3), jnp.dtype(jnp.uint8))


def test_masks_and_world_state_stand_beside_each_observation(key_reuse):
    env = envs.suites.from_jaxmarl(Duel())
    state, _, _ = env.reset(KEY)
    step = env.step(KEY, state, {"red": jnp.array([0, 1]), "blue": jnp.array([0])})
    red = step.obs["red"]
    # After the first step action 1 is not allowed.
    np.testing.assert_array_equal(red["action_mask"], [[True, False, True]] * 2)
    np.testing.assert_array_equal(red["world_state"], [[0.0, 1.0, 0.0]] * 2)
    assert step.obs["blue"]["action_mask"].shape == (1, 4)


def test_groups_are_agents_with_equal_spaces(rank_promotion):
    tag = envs.suites.from_jaxmarl(make("MPE_simple_tag_v3"))
    assert tag.groups == {
        "adversary": ("adversary_0", "adversary_1", "adversary_2"),
        "agent": ("agent_0",),
    }
    # Names that begin differently within a group do not name it.
    crypto = envs.suites.from_jaxmarl(make("MPE_simple_crypto_v3"))
    assert crypto.groups == {"eve_0": ("eve_0",), "alice_0": ("alice_0", "bob_0")}
    spread = envs.suites.from_jaxmarl(make("MPE_simple_spread_v3"))
    assert spread.groups == {"agents": ("agent_0", "agent_1", "agent_2")}


def test_own_groups_are_taken_in_their_order(key_reuse):
    groups = {"b": ("blue_0",), "second": ["red_1"], "first": ["red_0"]}
    env = envs.suites.from_jaxmarl(Duel(), groups=groups)
    assert env.groups == {name: tuple(agents) for name, agents in groups.items()}
    state, _, _ = env.reset(KEY)
    action = {"b": 0, "second": 1, "first": 0}
    step = env.step(KEY, state, {name: jnp.array([x]) for name, x in action.items()})
    assert step.terminated.tolist() == [False, True, False]  # in the order of agents


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"all": Duel.agents},
            r"`groups` must .* 'all' with 'red_0', Box\(.*, and 'blue_0', Box\(",
        ),
        ({"all": ()}, "`groups` must have agents in each group, got 'all' empty"),
    ],
)
def test_groups_that_cannot_be_stacked_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        envs.suites.from_jaxmarl(Duel(), groups=groups)


@pytest.mark.parametrize("agents", [("red_0",), ("red_0", "red_1", "green_0")])
def test_groups_of_other_agents_are_refused_by_the_lanes(agents):
    env = envs.suites.from_jaxmarl(Duel(), groups={"red": agents, "blue": ("blue_0",)})
    with pytest.raises(ValueError, match=r"`env.groups` must have every agent in one"):
        envs.vectorize_agents(env, 2)


def test_object_without_the_methods_is_refused():
    with pytest.raises(
        TypeError, match=r"`env` must have agents, reset, .* of JaxMARL, got object"
    ):
        envs.suites.from_jaxmarl(object())


class Tuples(Solo):
    def reset(self, key):
        return (jnp.zeros((1,)),), Clock(jnp.int32(0))


class Nobody(Solo):
    def step_env(self, key, state, actions):
        *result, dones, info = super().step_env(key, state, actions)
        return *result, {"__all__": dones["__all__"]}, info


def test_values_that_do_not_go_by_the_names_of_agents_are_refused():
    with pytest.raises(ValueError, match=r"`reset` must return the .* got tuple"):
        envs.suites.from_jaxmarl(Tuples())
    with pytest.raises(ValueError, match=r"`step_env` must return the dones by .*all"):
        play_solo(envs.suites.from_jaxmarl(Nobody()), [0])


def test_adapters_of_one_environment_are_one_program():
    suite = make("switch_riddle")
    one, other = (
        jax.tree.structure(envs.suites.from_jaxmarl(x)) for x in (suite, suite)
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one != jax.tree.structure(
        envs.suites.from_jaxmarl(jaxmarl.make("switch_riddle"))
    )


def collect(suite, num_steps, num_envs=3):
    env = envs.vectorize_agents(envs.suites.from_jaxmarl(suite), num_envs)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry = collector.init(jax.random.key(0))
    return env, collector.collect_steps(carry, None, num_steps)[1]


def check_in_space(env, obs):
    contains = jax.vmap(jax.vmap(env.observation_space.contains))
    assert contains(obs).all()


def test_collector_plays_switch_riddle():
    env, trajectory = collect(make("switch_riddle"), 24)
    check_in_space(env, trajectory.obs)
    lengths = trajectory.info.agents.agent_length
    assert (lengths[trajectory.truncated] == 6).all()
    assert trajectory.truncated.any()
    assert trajectory.terminated.any()


def test_collector_plays_an_environment_of_two_groups():
    env, trajectory = collect(Duel(), 24)
    check_in_space(env, trajectory.obs)
    check_in_space(env, trajectory.next_obs)
    agents = trajectory.info.agents
    # Who is out, acts no more, and everyone has the reward of the step.
    assert not agents.acted.all()
    time = jnp.max(agents.agent_length, axis=-1)
    np.testing.assert_array_equal(
        agents.reward, jnp.broadcast_to(time[..., None], agents.reward.shape)
    )
    assert (trajectory.info.env["count"] == 3).all()


def test_shapes_of_smax_with_masks_and_world_state(key_reuse, rank_promotion):
    """Traced only: to compile it takes most of a minute."""
    suite = make("HeuristicEnemySMAX", num_allies=2, num_enemies=2)
    env = envs.vectorize_agents(envs.suites.from_jaxmarl(suite), 3)
    step_keys = jax.random.split(KEY, 3)
    state, obs = jax.eval_shape(env.reset, step_keys)
    action = {"agents": jax.ShapeDtypeStruct((3, 2), jnp.int32)}
    step = jax.eval_shape(env.step, step_keys, state, action)
    assert jax.tree.map(jnp.shape, step.obs) == jax.tree.map(jnp.shape, obs)
    allies = step.obs["agents"]
    mask = allies["action_mask"]  # of 5 moves and 2 enemies
    assert (mask.shape, mask.dtype) == ((3, 2, 7), bool)
    assert allies["world_state"].shape[:2] == (3, 2)

"""Wrappers of environments with several agents: observations and rewards per agent."""

import functools

import agents
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, in_one_program, quick_jit

import rollout
from rollout import envs

KEY = jax.random.key(4)
T, B = 40, 3


@jax.tree_util.register_static
class AllAct(agents.ChanceEnv):
    """All remaining agents act in every step."""

    simultaneous = True

    def choose(self, word):
        return jnp.ones(3, bool)


SIMULTANEOUS, TURN_BASED = AllAct(), agents.ChanceEnv(is_turn_based=True)
ENVS = {
    "plain": SIMULTANEOUS,
    "limited": envs.TimeLimit(SIMULTANEOUS, 3),
    "limited_turns": envs.TimeLimit(TURN_BASED, 3),
    "reward": envs.TransformReward(SIMULTANEOUS, lambda reward: 2 * reward + 1),
    "single_group": envs.TransformObs(
        SIMULTANEOUS, lambda x: jnp.stack([x, -x]), group="two"
    ),
    "all_groups": envs.TransformObs(SIMULTANEOUS, lambda obs: obs.sum().reshape(1)),
    "frames": envs.FrameStack(SIMULTANEOUS, 3),
    "previous": envs.wrappers.ObservePrevious(SIMULTANEOUS),
    "number": envs.wrappers.AgentNumber(SIMULTANEOUS),
    "number_and_previous": envs.wrappers.AgentNumber(
        envs.wrappers.ObservePrevious(SIMULTANEOUS)
    ),
}
all_envs = pytest.mark.parametrize("name", ENVS)


@functools.cache
def play_all():
    """Returns rows `[T, B]` of all environments, with equal keys and actions.

    A plain loop compiles four times faster than a collector.
    """
    rng = np.random.default_rng(0)
    action = {
        "two": rng.integers(4, size=(T, B, 2), dtype=np.int32),
        "one": rng.random((T, B, 1, 2), np.float32),
    }

    def run_lane(env, first_key, keys, action):
        def step(carry, inputs):
            (state, obs, acting), length = carry
            (step_key, reset_key), action = inputs
            result, length = env.step(step_key, state, action), length + 1
            done = result.episode_terminated | result.episode_truncated
            row = {
                "obs": obs,
                "acting": acting,
                "action": action,
                "reward": result.reward,
                "next_obs": result.obs,
                "truncated": result.episode_truncated,
                "done": done,
                "length": length,
            }
            next_carry = (result.state, result.obs, result.acting), length
            reset_carry = env.reset(reset_key), 0
            return jax.tree.map(
                lambda x, y: jnp.where(done, x, y), reset_carry, next_carry
            ), row

        initial_carry = env.reset(first_key), jnp.int32(0)
        return jax.lax.scan(step, initial_carry, (keys, action))[1]

    def run_lanes(env, _):
        first, *keys = jax.random.split(KEY, (3, T, B))  # equal for all environments
        fn = functools.partial(run_lane, env)
        return jax.vmap(fn, (0, 1, 1), 1)(first[0], tuple(keys), action)

    with jax.debug_key_reuse(False):
        return in_one_program(run_lanes, ENVS)


@all_envs
def test_observations_match_spaces(name):
    env = ENVS[name]
    obs = jax.eval_shape(env.reset, KEY)[1]
    for group, members in env.groups.items():
        space = envs.spaces.Repeated(env.observation_spaces[group], len(members))
        want = jax.eval_shape(space.sample, KEY)
        chex.assert_trees_all_equal_shapes_and_dtypes(obs[group], want)


@pytest.mark.parametrize("name", ["limited", "limited_turns"])
def test_time_limit_truncates_all_agents(name):
    rows = play_all()[name]
    assert rows["length"].max() == 3
    at_limit = rows["length"] == 3
    assert rows["truncated"][at_limit].all()
    short = rows["done"] & ~at_limit
    assert short.any()


def test_transform_reward_applies_to_each_agent():
    want = 2 * play_all()["plain"]["reward"] + 1
    np.testing.assert_array_equal(play_all()["reward"]["reward"], want)
    _, trajectory, _ = play_normalized()
    reward = trajectory.info.agents.reward
    assert (reward % 2 == 1).all()
    np.testing.assert_array_equal(trajectory.reward, reward.sum(-1))


def test_transform_obs_applies_to_groups():
    plain, single_group, all_groups = (
        play_all()[x] for x in ("plain", "single_group", "all_groups")
    )
    two = plain["obs"]["two"]
    np.testing.assert_array_equal(single_group["obs"]["two"], np.stack([two, -two], -1))
    np.testing.assert_array_equal(single_group["obs"]["one"], plain["obs"]["one"])
    want = plain["next_obs"]["one"].sum(-1, keepdims=True)
    np.testing.assert_array_equal(all_groups["next_obs"]["one"], want)
    np.testing.assert_array_equal(all_groups["acting"], plain["acting"])


def test_frame_stack_stacks_each_agent():
    raw, length = (play_all()["plain"][x] for x in ("obs", "length"))
    frames = play_all()["frames"]["obs"]["one"]
    assert frames.shape == (T, B, 1, 3, 2)
    for lane in range(B):
        for t in range(T):
            offsets = [min(k, length[t, lane] - 1) for k in (2, 1, 0)]
            want = np.stack([raw["one"][t - k, lane] for k in offsets], axis=1)
            np.testing.assert_array_equal(frames[t, lane], want)


def test_observe_previous_applies_to_each_agent():
    rows, members = play_all()["previous"], [0, 2]
    next_obs = rows["next_obs"]["two"]
    np.testing.assert_array_equal(next_obs["action"], rows["action"]["two"])
    np.testing.assert_array_equal(next_obs["reward"], rows["reward"][..., members])
    first = np.repeat(rows["length"][..., None] == 1, 2, -1)
    np.testing.assert_array_equal(rows["obs"]["two"]["first"], first)
    assert not rows["obs"]["two"]["action"][first].any()


@pytest.mark.parametrize("name", ["number", "number_and_previous"])
def test_agent_number_is_added_to_observations(name):
    obs, eye = play_all()[name]["obs"], np.eye(3)
    for group, members in (("two", [0, 2]), ("one", [1])):
        want = np.broadcast_to(eye[members], (T, B, len(members), 3))
        np.testing.assert_array_equal(obs[group]["agent"], want)
    other_entries = (
        {"action", "reward", "first"} if name == "number_and_previous" else set()
    )
    assert set(obs["two"]) == {"agent", "obs"} | other_entries


@functools.cache
def play_normalized():
    """Returns a carry and a trajectory of mapped policies, and the rows of groups."""
    lanes = envs.NormalizeObs(envs.vectorize(ENVS["reward"], B))
    random = {x: rollout.random_policy(s) for x, s in lanes.action_spaces.items()}
    mapping = rollout.agents.static_mapping({"a": "two", "b": "one", "c": "two"})
    policy = rollout.agents.policy_map(random, mapping, lanes)
    collector = rollout.Collector(env=lanes, policy=policy)
    assert lanes.observation_spaces["one"].shape == (2,)

    @quick_jit
    def run(key):
        params = {"one": None, "two": None}
        carry, trajectory = collector.collect_steps(collector.init(key), params, T)
        _, rows = rollout.agents.team_transitions((), trajectory)
        return carry, trajectory, rows

    return jax.device_get(run(KEY))


def test_groups_have_normalization_statistics():
    carry, trajectory, _ = play_normalized()
    statistics = carry.env_state.statistics.value
    raw, raw_next = (trajectory.info.env[x] for x in ("raw_obs", "raw_next_obs"))
    length = trajectory.episode_length[..., None]
    # The observation of agent a after n steps is `10 n + a`.
    np.testing.assert_array_equal(raw["two"], 10 * (length - 1) + np.array([0, 2]))
    np.testing.assert_array_equal(raw_next["two"], 10 * length + np.array([0, 2]))
    # First observations are counted once, at the reset.
    is_first = np.asarray(trajectory.first) & (np.arange(len(length)) > 0)[:, None]
    values = [raw["two"][0].ravel(), raw_next["two"].ravel(), raw["two"][is_first]]
    values = np.concatenate([np.ravel(x) for x in values]).astype(np.float64)
    # The statistics are float32 sums of about 200 values up to 90.
    np.testing.assert_allclose(statistics.mean["two"], values.mean(), rtol=1e-4)
    np.testing.assert_allclose(statistics.var["two"], values.var(), rtol=1e-4)
    assert statistics.mean["acting"] is None
    np.testing.assert_array_equal(trajectory.obs["acting"], raw["acting"])
    assert trajectory.obs["acting"].dtype == bool
    scale = np.sqrt(statistics.var["two"] + 1e-8)
    want = (raw_next["two"][-1] - statistics.mean["two"]) / scale
    np.testing.assert_allclose(trajectory.next_obs["two"][-1], want, rtol=1e-5)


def test_normalized_observations_reach_policies():
    _, trajectory, rows = play_normalized()
    want = trajectory.obs["two"].reshape(T, -1)
    np.testing.assert_array_equal(rows["two"].obs, want)


UNSUPPORTED = [
    (lambda: envs.RescaleAction(SIMULTANEOUS), "`RescaleAction`"),
    (lambda: envs.wrappers.FixedLength(SIMULTANEOUS, 3), "`FixedLength`"),
    (
        lambda: envs.NormalizeReward(envs.vectorize(SIMULTANEOUS, B)),
        "`NormalizeReward`",
    ),
    (lambda: envs.wrappers.ObservePrevious(TURN_BASED), "agents act at every step"),
    (
        lambda: envs.NormalizeObs(envs.vectorize(TURN_BASED, B)),
        "agents act at every step",
    ),
    (
        lambda: envs.TransformObs(SIMULTANEOUS, abs, group="x"),
        "`group`",
    ),
    (lambda: envs.wrappers.AgentNumber(CountEnv()), "`MultiAgentEnv`"),
    (
        lambda: jax.eval_shape(envs.wrappers.AgentNumber(ENVS["number"]).reset, KEY),
        "entry `agent`",
    ),
]


@pytest.mark.parametrize(("call", "message"), UNSUPPORTED)
def test_unsupported_agents_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""Wrappers around environments of several agents: what each agent sees and earns."""

import functools

import agents
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit, raw
from jax.sharding import Mesh

import rollout
from rollout import envs

KEY = jax.random.key(4)
T, B = 40, 3


@jax.tree_util.register_static
class AllAct(agents.ChanceEnv):
    """Everyone who is left acts."""

    simultaneous = True

    def choose(self, word):
        return jnp.ones(3, bool)


BARE, IN_TURN = AllAct(), agents.ChanceEnv(is_turn_based=True)


def play(env, wrap_lanes=None):
    lanes = envs.vectorize_agents(env, B)
    lanes = wrap_lanes(lanes) if wrap_lanes else lanes
    policy = rollout.random_policy(envs.vectorize_agents(env, B).action_space)
    collector = rollout.Collector(env=lanes, policy=policy)

    @quick_jit
    def run(collector):
        carry = collector.init(KEY)
        return collector.collect_steps(carry, None, T)

    return jax.device_get(run(collector))


@functools.cache
def bare():
    return play(BARE)[1]


def check_spaces(env):
    """Observations are of the spaces that the wrapped environment has."""
    obs = jax.eval_shape(env.reset, KEY)[1]
    for name, members in env.groups.items():
        space = envs.spaces.as_space(env.observation_spaces[name])
        example = jax.eval_shape(space.sample, KEY)
        num = len(members)
        got = jax.tree.map(lambda x: (x.shape, x.dtype), obs[name])
        want = jax.tree.map(lambda x, num=num: ((num, *x.shape), x.dtype), example)
        assert got == want


@pytest.mark.parametrize("env", [BARE, IN_TURN], ids=["all act", "in turn"])
def test_time_limit_truncates_the_episode_of_all(env):
    _, trajectory = play(envs.TimeLimit(env, 3))
    assert trajectory.episode_length.max() == 3
    at_limit = trajectory.episode_length == 3
    assert trajectory.truncated[at_limit].all()
    short = trajectory.done & ~at_limit
    assert short.any()


def test_reward_of_every_agent_is_transformed():
    _, trajectory = play(envs.TransformReward(BARE, lambda reward: 2 * reward + 1))
    want = 2 * bare().info.agents.reward + 1
    np.testing.assert_array_equal(trajectory.info.agents.reward, want)
    np.testing.assert_array_equal(trajectory.reward, want.sum(-1))


def test_observations_of_one_group_or_all_are_transformed():
    one = envs.TransformObs(BARE, lambda obs: jnp.stack([obs, -obs]), group="two")
    check_spaces(one)
    _, trajectory = play(one)
    raw = bare().obs["two"]
    np.testing.assert_array_equal(trajectory.obs["two"], np.stack([raw, -raw], -1))
    np.testing.assert_array_equal(trajectory.obs["one"], bare().obs["one"])
    every = envs.TransformObs(BARE, lambda obs: obs.sum(keepdims=True).reshape(1))
    check_spaces(every)
    _, trajectory = play(every)
    want = bare().next_obs["one"].sum(-1, keepdims=True)
    np.testing.assert_array_equal(trajectory.next_obs["one"], want)
    np.testing.assert_array_equal(trajectory.obs["acting"], bare().obs["acting"])


def test_frames_of_every_agent_are_its_last_observations():
    env = envs.FrameStack(BARE, 3)
    check_spaces(env)
    _, trajectory = play(env)
    raw, frames = bare().obs["one"], trajectory.obs["one"]
    assert frames.shape == (T, B, 1, 3, 2)
    for lane in range(B):
        for t in range(T):
            back = [min(k, bare().episode_length[t, lane] - 1) for k in (2, 1, 0)]
            want = np.stack([raw[t - k, lane] for k in back], axis=1)
            np.testing.assert_array_equal(frames[t, lane], want)


def test_every_agent_sees_its_previous_action_and_reward():
    env = envs.wrappers.ObservePrevious(BARE)
    check_spaces(env)
    _, trajectory = play(env)
    seen, members = trajectory.next_obs["two"], [0, 2]
    np.testing.assert_array_equal(seen["action"], trajectory.action["two"])
    reward = trajectory.info.agents.reward[..., members]
    np.testing.assert_array_equal(seen["reward"], reward)
    first = np.repeat(trajectory.first[..., None], 2, -1)
    np.testing.assert_array_equal(trajectory.obs["two"]["first"], first)
    assert not trajectory.obs["two"]["action"][first].any()


def test_every_agent_sees_its_number_also_beside_other_entries():
    for env in (envs.wrappers.AgentNumber(BARE), envs.wrappers.AgentNumber(IN_TURN)):
        check_spaces(env)
        _, obs, _ = env.reset(KEY)
        np.testing.assert_array_equal(obs["two"]["agent"], np.eye(3)[[0, 2]])
        np.testing.assert_array_equal(obs["one"]["agent"], np.eye(3)[[1]])
    env = envs.wrappers.AgentNumber(envs.wrappers.ObservePrevious(BARE))
    check_spaces(env)
    assert set(env.reset(KEY)[1]["two"]) == {
        "agent",
        "obs",
        "action",
        "reward",
        "first",
    }


def test_statistics_are_those_of_all_agents_of_a_group():
    carry, trajectory = play(BARE, envs.NormalizeObs)
    statistics = carry.env_state.statistics.value
    first = bare().obs["two"][:1]
    # The observations of an auto-reset do not count.
    seen = np.concatenate([first, bare().next_obs["two"]]).astype(np.float64)
    # float32 sums of up to 10 * 9 over some 200 values.
    np.testing.assert_allclose(statistics.mean["two"], seen.mean(), rtol=1e-4)
    np.testing.assert_allclose(statistics.var["two"], seen.var(), rtol=1e-4)
    assert statistics.mean["acting"] is None
    np.testing.assert_array_equal(trajectory.obs["acting"], bare().obs["acting"])
    assert trajectory.obs["acting"].dtype == bool
    info = trajectory.info.env
    np.testing.assert_array_equal(info["raw_next_obs"]["two"], bare().next_obs["two"])
    last = np.asarray(trajectory.next_obs["two"][-1])
    scale = np.sqrt(statistics.var["two"] + 1e-8)
    want = (bare().next_obs["two"][-1] - statistics.mean["two"]) / scale
    np.testing.assert_allclose(last, want, rtol=1e-5)


def test_normalised_agents_are_mapped_to_policies():
    lanes = envs.NormalizeObs(envs.vectorize_agents(BARE, B))
    random = {x: rollout.random_policy(s) for x, s in lanes.action_spaces.items()}
    mapping = rollout.agents.fixed_mapping({"a": "two", "b": "one", "c": "two"})
    policy = rollout.agents.policy_map(random, mapping, lanes)
    collector = rollout.Collector(env=lanes, policy=policy)
    params = {"one": None, "two": None}
    carry = collector.init(KEY)
    _, trajectory = collector.collect_steps(carry, params, 4)
    _, rows = rollout.agents.agent_transitions((), trajectory, end="episode")
    want = trajectory.obs["two"].reshape(4, -1)
    np.testing.assert_array_equal(rows["two"].obs, want)
    assert lanes.observation_spaces["one"].shape == (2,)


@pytest.mark.slow
def test_statistics_of_agents_on_four_devices_are_those_of_one():
    lanes = envs.NormalizeObs(envs.vectorize_agents(BARE, 8))
    policy = rollout.random_policy(lanes.action_space)
    plain = rollout.Collector(env=lanes, policy=policy)
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("lanes",))
    found = []
    for collector in (plain, rollout.shard(plain, mesh)):
        carry, rows = collector.collect_steps(collector.init(KEY), None, 8)
        frozen = collector.freeze(carry)
        assert not frozen.env.learns
        later, after = frozen.collect_steps(frozen.init(KEY), None, 8)
        learnt, kept = (x.env_state.statistics for x in (carry, later))
        chex.assert_trees_all_equal(learnt, kept)
        found.append(jax.device_get((learnt, rows.obs, after.obs)))
    # Sums over the lanes in another order.
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_wrapped_agents_go_on_in_a_stream_that_is_restored():
    lanes = envs.NormalizeObs(envs.vectorize_agents(stack(BARE), B))
    policy = rollout.random_policy(lanes.action_space)
    collector = rollout.Collector(env=lanes, policy=policy)
    options = {"key": KEY, "params": None, "steps_per_batch": 5 * B}
    streams = [rollout.Stream(collector, **options) for _ in "ab"]
    next(streams[0])
    state = streams[0].state()
    streams[1].restore(state)
    first, second = (raw(next(x).trajectory) for x in streams)
    chex.assert_trees_all_equal(first, second)


REFUSED = {
    "ActionRepeat": lambda env: envs.ActionRepeat(env, 2),
    "RescaleAction": envs.RescaleAction,
    "ForceLength": lambda env: envs.wrappers.ForceLength(env, 3),
    "EndOnFault": envs.wrappers.EndOnFault,
    "History": lambda env: envs.wrappers.History(env, 3),
    "NoRepeat": envs.wrappers.NoRepeat,
    "ObserveInfo": lambda env: envs.wrappers.ObserveInfo(env, len, len),
    "NormalizeReward": lambda env: envs.NormalizeReward(envs.vectorize_agents(env, B)),
}
IN_TURN_REFUSED = {
    "FrameStack": lambda env: envs.FrameStack(env, 2),
    "ObservePrevious": envs.wrappers.ObservePrevious,
    "NormalizeObs": lambda env: envs.NormalizeObs(envs.vectorize_agents(env, B)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrapper_of_one_agent_refuses_several_by_name(name):
    with pytest.raises(ValueError, match=f"`env` must be .* of one agent for `{name}`"):
        REFUSED[name](BARE)


@pytest.mark.parametrize("name", IN_TURN_REFUSED)
def test_wrapper_that_remembers_refuses_turns_by_name(name):
    match = f"whose agents act at every step for `{name}`"
    with pytest.raises(ValueError, match=match):
        IN_TURN_REFUSED[name](IN_TURN)


def test_group_and_number_of_agents_are_checked():
    with pytest.raises(ValueError, match="`group` must be a group of `env`, two, one"):
        envs.TransformObs(BARE, lambda obs: obs, group="three")
    single = envs.make("CartPole-v1")
    with pytest.raises(ValueError, match="`env` must be a `MultiAgentEnv` for"):
        envs.wrappers.AgentNumber(single)
    with pytest.raises(ValueError, match="without `agent` for `AgentNumber`"):
        envs.wrappers.AgentNumber(envs.wrappers.AgentNumber(BARE)).reset(KEY)


def stack(env):
    """Every wrapper that serves an environment of any kind."""
    limited = envs.TransformReward(envs.TimeLimit(env, 7), jnp.tanh)
    seen = envs.wrappers.AgentNumber(limited)
    if getattr(env, "simultaneous", False):
        seen = envs.FrameStack(envs.wrappers.ObservePrevious(seen), 2)
    return seen


SUITES = ["jaxmarl:MPE_simple_spread_v3", "jaxmarl:SMAX", "pgx:tic_tac_toe"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_environments_of_suites_are_wrapped(name, key_reuse, rank_promotion):
    env = stack(envs.make_agents(name))
    check_spaces(env)
    wrap = envs.NormalizeObs if env.simultaneous else None
    _, trajectory = play(env, wrap)
    assert trajectory.episode_length.max() <= 7
    assert np.abs(trajectory.info.agents.reward).max() <= 1
    rows = trajectory.obs[next(iter(env.groups))]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(rows) if x.dtype != bool)

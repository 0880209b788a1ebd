"""Compares transitions of agents and teams with a plain Python model."""

import functools
import itertools

import agents
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import NUM_AGENTS, NUM_STEPS, TABLES, AllAct, B, ChanceEnv, schedule
from cases import quick_jit, raw
from hypothesis import given, settings

import rollout
from rollout import buffers, envs

pytestmark = pytest.mark.usefixtures("quick_compile")
KEY = jax.random.key(3)
TRANSITION_FNS = {
    "agent": rollout.agents.agent_transitions,
    "team": rollout.agents.team_transitions,
}


@functools.partial(quick_jit, static_argnames="lengths")
def collect_rows(env, lengths=(7, 8)):
    """Collects at least three episodes and their rows in windows of `lengths`."""
    env = envs.vectorize(env, B)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry = collector.init(KEY)
    start = rollout.agents.Pending.init(collector, carry)
    _, trajectory = collector.collect_steps(carry, None, 3 * NUM_STEPS)
    rows_by_name = {}
    for name, transition_fn in TRANSITION_FNS.items():
        pending, windows = start, []
        for first, stop in itertools.pairwise(np.cumsum((0, *lengths))):
            pending, rows = transition_fn(pending, time_slice(trajectory, first, stop))
            windows.append(rows["all"])
        rows_by_name[name] = jax.tree.map(lambda *x: jnp.concatenate(x), *windows)
    return trajectory, rows_by_name


def time_slice(trajectory, begin, end):
    return jax.tree.map(lambda x: x[begin:end], trajectory)


@pytest.mark.parametrize(
    "lengths", [(7, 8), pytest.param((5, 1, 9), marks=pytest.mark.slow)]
)
@settings(max_examples=120, deadline=None)
@given(**TABLES)
def test_rows_equal_a_plain_model(lengths, acting, reward, terminated, truncated, end):
    env = schedule(acting, reward, terminated=terminated, truncated=truncated, end=end)
    trajectory, rows_by_name = jax.device_get(collect_rows(env, lengths))
    info = trajectory.info.agents
    for name, rows in rows_by_name.items():
        want, total, unassigned, length = agents.play(env, is_team=name == "team")
        for (_, agent), got in agents.rows_of(rows, B, NUM_AGENTS).items():
            expected = want[agent] * (3 * NUM_STEPS // length)
            assert got[: len(expected)] == expected
        unassigned_reward = np.sum(info.unassigned_reward[:length, 0], axis=0)
        np.testing.assert_array_equal(unassigned_reward, unassigned)
        np.testing.assert_array_equal(info.agent_return[length - 1, 0], total)
        row_sums = [sum(reward for _, reward, *_ in agent) for agent in want]
        np.testing.assert_array_equal(
            total - unassigned_reward * (name == "agent"), row_sums
        )


def row(obs, reward, next_obs, *, end=False, stale=False):
    return obs, reward, next_obs, end, False, stale, True


def test_example_of_rllib():
    """Scenario A: b starts late, a and b skip steps. Agent c never acts."""
    env = schedule(
        acting=[[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [1, 1, 0], [0, 1, 0]],
        reward=[[1, 5, 0], [2, 7, 0], [4, 8, 0], [8, 9, 0], [16, 10, 0]],
    )
    trajectory, rows_by_name = jax.device_get(collect_rows(env))
    rows = agents.rows_of(rows_by_name["agent"], B, NUM_AGENTS)
    # Agent a has no final observation, so its last observation is repeated.
    last_row = row(40, 16, 40, end=True, stale=True)
    assert rows[0, 0] == [row(0, 1, 10), row(10, 2 + 4 + 8, 40), last_row] * 3
    expected_b = [row(21, 8, 31), row(31, 9, 41), row(41, 10, 51, end=True)]
    assert rows[0, 1] == expected_b * 3
    first_episode = jax.tree.map(lambda x: x[:NUM_STEPS, :1], trajectory)
    stats = jax.device_get(quick_jit(rollout.agents.summarize_agents)(first_episode))
    assert trajectory.episode_return[NUM_STEPS - 1, 0] == 70
    assert (stats.num_steps, stats.num_agent_steps, stats.num_episodes) == (5, 6, 1)
    assert (stats.unassigned_reward, stats.num_stale) == (12, 1)
    returns = [stats.agents[name].returns.mean for name in "abc"]
    lengths = [stats.agents[name].lengths.mean for name in "abc"]
    np.testing.assert_array_equal(returns, [31, 27 + 12, np.nan])
    np.testing.assert_array_equal(lengths, [3, 3, np.nan])


def test_final_reward_reaches_agents_without_an_observation():
    acting = np.eye(3)[[0, 1, 2, 0, 1, 2]]
    env = schedule(acting, reward=[[0, 0, 0]] * 4 + [[-1, 2, -1]])
    rows = agents.rows_of(jax.device_get(collect_rows(env))[1]["agent"], B, NUM_AGENTS)
    assert rows[0, 0] == [row(0, 0, 30), row(30, -1, 30, end=True, stale=True)] * 3
    assert rows[0, 1] == [row(11, 0, 41), row(41, 2, 41, end=True, stale=True)] * 3
    assert rows[0, 2] == [row(22, -1, 52, end=True)] * 3


def test_terminated_agent_receives_team_rewards():
    """Agent b terminates at step 2. Agents a and b receive +1 at the last step."""
    env = schedule(
        acting=[[1, 1, 0]] * 2 + [[1, 0, 0]] * 4,
        reward=[[0, 0, 0]] * 4 + [[1, 1, 0]],
        terminated=[[0, 0, 0], [0, 1, 0]] + [[0, 0, 0]] * 3,
    )
    trajectory, rows_by_name = collect_rows(env)

    @quick_jit
    def find_returns(t):
        flags, options = (t.terminated, t.truncated), {"mask": t.mask}
        return rollout.discounted_returns(t.reward, *flags, gamma=1.0, **options)

    for name, expected in (("team", 1), ("agent", 0)):
        t, returns = rows_by_name[name], find_returns(rows_by_name[name])
        np.testing.assert_array_equal(returns[:, 0], 1)
        np.testing.assert_array_equal(returns[:, 1], expected)
        np.testing.assert_array_equal(t.acting[:, 1], [True, True, *[False] * 3] * 3)
    stats = quick_jit(rollout.agents.summarize_agents)(trajectory)
    assert stats.unassigned_reward == 3 * B


def test_simultaneous_rows_are_a_reshape_of_the_trajectory():
    collector = make_collector(AllAct())
    pending, trajectory = jax.device_get(run(collector))
    assert pending == ()
    info, columns = trajectory.info.agents, [0, 2]  # agents of the group
    acted = info.acted[..., columns].reshape(T, -1)
    assert not acted.all()
    for fn_name, transition_fn in TRANSITION_FNS.items():
        pending_next, rows = quick_jit(transition_fn)(pending, trajectory)
        assert pending_next == ()
        got = rows["two"]
        np.testing.assert_array_equal(got.mask, acted | (fn_name == "team"))
        np.testing.assert_array_equal(got.acting, acted)
        for name, want in {
            "obs": trajectory.obs["two"],
            "next_obs": trajectory.next_obs["two"],
            "episode_return": info.agent_return[..., columns],
        }.items():
            np.testing.assert_array_equal(getattr(got, name), want.reshape(T, -1))
        reward = info.reward[..., columns].reshape(T, -1)
        np.testing.assert_array_equal(got.reward, np.where(got.mask, reward, 0))
        steps = jax.make_jaxpr(lambda t, fn=transition_fn: fn((), t)[1]["two"].obs)
        names = {str(line.primitive) for line in steps(trajectory).eqns}
        assert not names & {"scan", "while", "concatenate"}
    for name in ("terminated", "truncated", "episode_length", "episode_id"):
        want = np.repeat(getattr(trajectory, name), 2, axis=1)
        np.testing.assert_array_equal(getattr(got, name), want)


T, LANES = 24, 4


PARAMS = {"count": None, "random": None}


def make_collector(env, num_envs=LANES):
    """Creates a recurrent policy for two agents and a random one for the third."""
    env = envs.vectorize(env, num_envs)
    count = rollout.recurrent_policy(
        lambda params, obs, state, key: (
            (obs.astype(jnp.int32) + state) % 4,
            state + 1,
            {"count": state},
        ),
        lambda num_envs: jnp.zeros((num_envs,), jnp.int32),
    )
    policies = {
        "count": count,
        "random": rollout.random_policy(env.action_spaces["one"]),
    }
    mapping = rollout.agents.static_mapping({"a": "count", "b": "random", "c": "count"})
    policy = rollout.agents.policy_map(policies, mapping, env)
    return rollout.Collector(env=env, policy=policy)


@functools.cache
def collect_case(num_envs=LANES):
    """Returns the initial `Pending` and a trajectory of `ChanceEnv`."""
    return jax.device_get(run(make_collector(ChanceEnv(), num_envs)))


@quick_jit
def run(collector, params=PARAMS):
    """Returns the initial `Pending` and a trajectory."""
    carry = collector.init(KEY)
    pending = rollout.agents.Pending.init(collector, carry, params)
    return pending, collector.collect_steps(carry, params, T)[1]


transitions = quick_jit(rollout.agents.agent_transitions)


def window_rows(pending, trajectory, lengths=(T,)):
    """Returns the rows of consecutive windows of these lengths."""
    windows, ends = [], np.cumsum((0, *lengths))
    for begin, end in itertools.pairwise(ends):
        window = time_slice(trajectory, begin, end)
        pending, rows = transitions(pending, window)
        windows.append(rows)
    return concatenate(windows)


def concatenate(window_rows):
    return jax.tree.map(lambda *x: np.concatenate(x), *window_rows)


def valid_rows(rows):
    """Returns the valid rows of every field, by lane and time."""
    result = {}
    for group, row in raw(rows).items():
        mask = np.asarray(row.mask).T
        result[group] = jax.tree.map(
            lambda x, mask=mask: np.swapaxes(np.asarray(x), 0, 1)[mask], row
        )
    return result


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_rows_do_not_depend_on_windows():
    case = collect_case()
    want = valid_rows(window_rows(*case))
    assert want["two"].obs.size > 20
    assert_equal(valid_rows(window_rows(*case, (5, 1, T - 6))), want)


def test_pending_is_equal_for_agents_and_teams():
    pending, trajectory = collect_case()
    window = time_slice(trajectory, 0, 5)
    pending_states = [
        quick_jit(transition_fn)(pending, window)[0]
        for transition_fn in TRANSITION_FNS.values()
    ]
    assert pending_states[0].is_open.any()
    chex.assert_trees_all_equal(*pending_states)


@pytest.mark.slow
def test_rows_do_not_depend_on_the_number_of_lanes():
    got, want = (window_rows(*collect_case(num)) for num in (64, LANES))
    for group, size in (("two", 2), ("one", 1)):
        for name in ("obs", "action", "reward", "next_obs", "mask", "terminated"):
            first_lanes = getattr(got[group], name)[:, : LANES * size]
            np.testing.assert_array_equal(first_lanes, getattr(want[group], name))


@pytest.mark.slow
def test_rows_are_equal_without_jit():
    pending, trajectory = collect_case()
    window = time_slice(trajectory, 0, 3)
    with jax.disable_jit():
        _, rows = rollout.agents.agent_transitions(pending, window)
    assert_equal(raw(rows), raw(window_rows(pending, window, (3,))))


@pytest.mark.slow
def test_rows_are_equal_on_four_devices():
    types = {"axis_types": (jax.sharding.AxisType.Auto,)}
    mesh = jax.make_mesh((4,), ("lanes",), devices=jax.devices()[:4], **types)
    sharded = rollout.shard(make_collector(ChanceEnv(), 8), mesh)
    pending, trajectory = run(sharded)
    _, rows = transitions(pending, trajectory)
    assert rows["two"].mask.sharding.device_set == set(mesh.devices.flat)
    assert_equal(raw(trajectory), raw(collect_case(8)[1]))
    assert_equal(raw(rows), raw(window_rows(*collect_case(8))))


def test_rows_count_steps_and_returns_per_episode():
    """Lengths count up within an agent's episode, and returns are cumulative sums."""
    rows = valid_rows(window_rows(*collect_case()))["two"]
    assert set(rows.episode_id) <= set(np.unique(collect_case()[1].episode_id))
    first = rows.episode_length == 1
    np.testing.assert_array_equal(rows.episode_return[first], rows.reward[first])
    index = np.flatnonzero(~first)
    previous = index - 1
    assert (rows.episode_id[index] == rows.episode_id[previous]).all()
    assert (rows.episode_length[index] == rows.episode_length[previous] + 1).all()
    np.testing.assert_array_equal(
        rows.episode_return[index], rows.episode_return[previous] + rows.reward[index]
    )


def test_abandoned_episode_drops_pending_transitions():
    pending, trajectory = collect_case()
    halves = time_slice(trajectory, 0, T // 2), time_slice(trajectory, T // 2, T)
    pending, _ = transitions(pending, halves[0])
    assert np.any(pending.is_open)
    # Simulates a call of `collect_episodes`, which resets all lanes.
    other_episodes = halves[1].replace(episode_id=halves[1].episode_id + 1000)
    _, got = transitions(pending, other_episodes)
    _, want = transitions(collect_case()[0], other_episodes)
    for group, rows in got.items():
        np.testing.assert_array_equal(rows.mask, want[group].mask)
        np.testing.assert_array_equal(rows.reward, want[group].reward)


def test_masked_steps_return_no_rows():
    pending, trajectory = collect_case()
    masked = trajectory.replace(mask=np.zeros_like(trajectory.mask))
    pending, rows = transitions(pending, masked)
    assert not any(np.any(row.mask) for row in rows.values())
    assert not np.any(pending.is_open)


@pytest.mark.slow
def test_rows_are_valid_transitions():
    rows = window_rows(*collect_case())["two"]
    stats = rollout.summarize(rows)
    assert stats.num_steps == np.sum(rows.mask)
    assert stats.num_episodes == np.sum(rows.done)
    value = jnp.zeros(rows.reward.shape)
    flags, options = (rows.terminated, rows.truncated), {"mask": rows.mask}
    advantage = rollout.gae(
        rows.reward, value, value, *flags, gamma=0.5, lambda_=0.0, **options
    )
    np.testing.assert_array_equal(advantage[rows.mask], rows.reward[rows.mask])
    buffer = buffers.ReplayBuffer(capacity=64, num_envs=rows.mask.shape[1])
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))
    state = buffer.add(state, rows)
    batch = buffer.sample(state, jax.random.key(0), batch_size=32)
    assert np.asarray(batch.experience.obs).min() >= 0  # no masked row


def test_select_policy_returns_rows_of_the_policy():
    rows = window_rows(*collect_case())
    count = rollout.agents.select_policy(rows, "count")
    assert list(count) == ["two"]
    assert_equal(raw(count["two"].obs), raw(rows["two"].obs))
    assert list(rollout.agents.select_policy(rows, "random")) == ["one"]
    with pytest.raises(ValueError, match="one of the policies count, random"):
        rollout.agents.select_policy(rows, "blue")


@pytest.mark.slow
@pytest.mark.parametrize("is_fixed", [True, False])
def test_select_policy_within_a_group(is_fixed):
    env = schedule(acting=np.ones((6, 3)), reward=np.arange(15).reshape(5, 3))
    env = envs.vectorize(env, LANES)
    policy = rollout.random_policy(env.action_spaces["all"])
    names = {"a": "red", "b": "blue", "c": "red"}
    mapping = (
        rollout.agents.static_mapping(names)
        if is_fixed
        else lambda key, names: jax.random.randint(key, (3,), 0, 2)
    )
    policy = rollout.agents.policy_map({"red": policy, "blue": policy}, mapping, env)
    collector = rollout.Collector(env=env, policy=policy)
    params = {"red": None, "blue": None}
    _, rows = transitions(*jax.device_get(run(collector, params)))
    red, blue = (
        rollout.agents.select_policy(rows, name)["all"] for name in ("red", "blue")
    )
    all_rows = rows["all"]
    assert red.mask.sum() + blue.mask.sum() == all_rows.mask.sum()
    if is_fixed:
        assert red.mask.shape == (T, LANES * 2)
        assert set(np.asarray(blue.obs[blue.mask]) % 10) == {1}
    else:
        np.testing.assert_array_equal(
            red.mask, all_rows.mask & (all_rows.policy_id == 0)
        )

"""Each agent's transitions, against closed forms and a plain Python model."""

import functools
import itertools

import agents
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import NUM_AGENTS, NUM_STEPS, TABLES, B, ChanceEnv, schedule
from cases import quick_jit, raw
from hypothesis import given, settings

import rollout
from rollout import buffers, envs

pytestmark = pytest.mark.usefixtures("quick_compile")
KEY = jax.random.key(3)


@quick_jit
def experience(env):
    """The trajectory and the rows of a table's environment, one program for all."""
    env = envs.vectorize(env, B)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry = collector.init(KEY)
    pending = rollout.agents.Pending.init(collector, carry)
    _, trajectory = collector.collect_steps(carry, None, 3 * NUM_STEPS)
    _, rows = rollout.agents.agent_transitions(pending, trajectory)
    return trajectory, rows["all"]


def pad(env):
    """The tables with steps that are never reached, and agents that end at once."""

    def fill(x, num_rows):
        full = np.zeros((num_rows, NUM_AGENTS)[: x.ndim], x.dtype)
        full[tuple(map(slice, x.shape))] = x
        return full

    env, num_agents = jax.device_get(env), env.reward.shape[1]
    tables = jax.tree.map(lambda x: fill(x, NUM_STEPS), env.replace(acting=()))
    tables.terminated[0, num_agents:] = True
    acting = fill(env.acting, NUM_STEPS + 1)
    return tables.replace(acting=acting, names=("a", "b", "c"))


def by_agent(env):
    """The rows of the first episode, by agent, and its trajectory."""
    trajectory, rows = jax.device_get(experience(pad(env)))
    length = int(np.argmax(trajectory.done[:, 0])) + 1
    first = jax.tree.map(lambda x: x[:length], (trajectory, rows))
    found = agents.rows_of([first[1]], 1, NUM_AGENTS)
    return [found[0, agent] for agent in range(len(env.names))], first[0]


summarize_agents = quick_jit(rollout.agents.summarize_agents)


def answered_rewards(rows):
    return [sum(row[1] for row in agent) for agent in rows]


def row(obs, reward, next_obs, end="", *, stale=False):
    return obs, reward, next_obs, end == "terminated", end == "truncated", stale


def check(env, want, unassigned):
    """The rows of each agent, as `row` makes them."""
    rows, trajectory = by_agent(env)
    assert rows == [[tuple(map(float, row)) for row in agent] for agent in want]
    info, num = trajectory.info.agents, len(env.names)
    missed = np.sum(info.unassigned_reward[:, 0], axis=0)
    np.testing.assert_array_equal(missed[:num], unassigned)
    answered = answered_rewards(rows)
    returns = info.agent_return[-1, 0, :num]
    np.testing.assert_array_equal(returns, np.add(answered, unassigned))
    assert trajectory.episode_return[-1, 0] == np.sum(returns)
    assert [len(agent) for agent in rows] == info.agent_length[-1, 0, :num].tolist()


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_worked_example_of_rllib(end):
    """Scenario A: b comes late, both skip steps."""
    env = schedule(
        acting=[[1, 0], [1, 0], [0, 1], [0, 1], [1, 1], [0, 1]],
        reward=[[1, 5], [2, 7], [4, 8], [8, 9], [16, 10]],
        end=end,
    )
    # No observation of a at the end: its last one again.
    a = [row(0, 1, 10), row(10, 2 + 4 + 8, 40), row(40, 16, 40, end, stale=True)]
    b = [row(21, 8, 31), row(31, 9, 41), row(41, 10, 51, end)]
    check(env, [a, b], [0, 5 + 7])
    _, trajectory = by_agent(env)
    alone = jax.tree.map(lambda x: x[:, :1], trajectory)
    stats = jax.device_get(summarize_agents(alone))
    assert trajectory.episode_return[-1, 0] == 70
    assert (stats.num_steps, stats.num_agent_steps, stats.num_episodes) == (5, 6, 1)
    assert (stats.unassigned_reward, stats.num_stale) == (12, 1)
    returns = [stats.agents[name].returns.mean for name in "ab"]
    lengths = [stats.agents[name].lengths.mean for name in "ab"]
    assert (returns, lengths) == ([31, 27 + 12], [3, 3])


ENDED = row(0, 1, 10), row(10, 4, 20, "terminated")
# Who acts, rewards, own endings; the rows of each agent and the rewards of no row.
EPISODES = {
    "new agent that is over already": (
        ([[1, 0]] * 3, [[1, 2], [4, 8]], [[0, 1], [0, 0]]),
        ([ENDED, []], [0, 2 + 8]),
    ),
    "reward after the own end": (
        ([[1, 1], [1, 0], [1, 0]], [[1, 2], [4, 50]], [[0, 1], [0, 0]]),
        ([ENDED, [row(1, 2, 11, "terminated")]], [0, 50]),
    ),
    "nobody ever acts": (
        (np.zeros((4, 3)), [[1, 2, 4]] * 3, None),
        ([[], [], []], [3, 6, 12]),
    ),
    "single agent": (
        (np.ones((4, 1)), [[1], [2], [4]], None),
        ([[row(0, 1, 10), row(10, 2, 20), row(20, 4, 30, "terminated")]], [0]),
    ),
    # The winner is known at the end, when only the next to move sees the board.
    "game of three in turns": (
        (np.eye(3)[[0, 1, 2, 0, 1, 2]], [[0, 0, 0]] * 4 + [[-1, 2, -1]], None),
        (
            [
                [row(0, 0, 30), row(30, -1, 30, "terminated", stale=True)],
                [row(11, 0, 41), row(41, 2, 41, "terminated", stale=True)],
                [row(22, -1, 52, "terminated")],
            ],
            [0, 0, 0],
        ),
    ),
}


@pytest.mark.parametrize("name", EPISODES)
def test_rows_of_an_episode_are_those_written_down(name):
    (acting, reward, terminated), (rows, unassigned) = EPISODES[name]
    check(schedule(acting, reward, terminated=terminated), rows, unassigned)


def test_agent_that_neither_acts_nor_gets_anything_has_no_mean_return():
    _, trajectory = by_agent(schedule(np.zeros((4, 3)), np.zeros((3, 3))))
    stats = jax.device_get(summarize_agents(trajectory))
    assert stats.num_agent_steps == 0
    assert np.isnan(stats.agents["a"].returns.mean)


@pytest.mark.parametrize("second", ["terminated", "truncated"])
def test_episode_ends_when_every_agent_has(second):
    """It terminates if all of them did; the tables would go on for a third step."""
    ends = {"terminated": [[0, 1], [0, 0], [0, 0]], "truncated": np.zeros((3, 2), bool)}
    ends[second] = np.asarray(ends[second], bool) | [[0, 0], [1, 0], [0, 0]]
    env = schedule(
        acting=[[1, 1], [1, 0], [0, 0], [0, 0]],
        reward=[[1, 2], [4, 8], [16, 32]],
        **{**ends, "terminated": ends["terminated"]},
    )
    flags = second == "terminated", second == "truncated"
    a = [row(0, 1, 10), row(10, 4, 20, second)]
    check(env, [a, [row(1, 2, 11, "terminated")]], [0, 8])
    _, trajectory = by_agent(env)
    ended = trajectory.terminated[-1, 0], trajectory.truncated[-1, 0]
    assert ended == flags
    assert trajectory.episode_length[-1, 0] == 2


@settings(max_examples=150, deadline=None)
@given(**TABLES)
def test_rows_are_those_of_a_plain_model(acting, reward, terminated, truncated, end):
    env = schedule(acting, reward, terminated=terminated, truncated=truncated, end=end)
    want, total, unassigned, length = agents.play(env)
    trajectory, rows = jax.device_get(experience(env))
    found = agents.rows_of([rows], B, NUM_AGENTS)
    num_episodes = 3 * NUM_STEPS // length
    for (_, agent), got in found.items():
        expected = [tuple(map(float, row)) for row in want[agent]] * num_episodes
        assert got[: len(expected)] == expected
    info = trajectory.info.agents
    np.testing.assert_array_equal(info.agent_return[length - 1, 0], total)
    missed = np.sum(info.unassigned_reward[:length, 0], axis=0)
    np.testing.assert_array_equal(missed, unassigned)
    np.testing.assert_array_equal(total - missed, answered_rewards(want))


T, LANES = 24, 4


def make_policy(env):
    """A recurrent policy for two agents, and a random one for the third."""
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
    return rollout.agents.policy_map(policies, mapping, env)


PARAMS = {"count": None, "random": None}


def make_collector(num_envs=LANES, auto_reset="compact", **options):
    env = envs.vectorize(ChanceEnv(**options), num_envs, auto_reset=auto_reset)
    return rollout.Collector(env=env, policy=make_policy(env))


@functools.cache
def collected(num_envs=LANES, auto_reset="compact", **options):
    """A trajectory, and the `pending` before it, without any action."""
    return jax.device_get(run(make_collector(num_envs, auto_reset, **options)))


@quick_jit
def run(collector, params=PARAMS):
    """Nothing pending, and a trajectory after it."""
    carry = collector.init(KEY)
    pending = rollout.agents.Pending.init(collector, carry, params)
    return pending, collector.collect_steps(carry, params, T)[1]


transitions = quick_jit(rollout.agents.agent_transitions)


def part(trajectory, begin, end):
    return jax.tree.map(lambda x: x[begin:end], trajectory)


def windows(pending, trajectory, lengths=(T,)):
    """The rows of windows of these lengths, one after the other."""
    every, ends = [], np.cumsum((0, *lengths))
    for begin, end in itertools.pairwise(ends):
        window = part(trajectory, begin, end)
        pending, rows = transitions(pending, window)
        every.append(rows)
    return joined(every)


def joined(windows):
    return jax.tree.map(lambda *x: np.concatenate(x), *windows)


def compressed(rows):
    """Every field, without the rows that are void, lane by lane in order of time."""
    found = {}
    for group, row in raw(rows).items():
        mask = np.asarray(row.mask).T
        found[group] = jax.tree.map(
            lambda x, mask=mask: np.swapaxes(np.asarray(x), 0, 1)[mask], row
        )
    return found


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("turns", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_windows_do_not_matter(turns):
    case = collected(is_turn_based=turns)
    want = compressed(windows(*case))
    assert want["two"].obs.size > 20
    for lengths in ((T // 2, T // 2), (5, 1, T - 6))[: 1 + turns]:
        assert_same(compressed(windows(*case, lengths)), want)


@pytest.mark.slow
def test_rows_of_a_stream_are_those_of_one_call():
    collector = make_collector()
    stream = rollout.Stream(
        collector, key=KEY, params=PARAMS, steps_per_batch=6 * LANES
    )
    pending, every = collected()[0], []
    for _ in range(T // 6):
        pending, rows = transitions(pending, next(stream).trajectory)
        every.append(rows)
    assert_same(compressed(joined(every)), compressed(windows(*collected())))


@pytest.mark.slow
def test_either_auto_reset_gives_the_same_rows():
    got = windows(*collected(auto_reset="select"))
    assert_same(raw(got), raw(windows(*collected())))


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 64])
def test_lane_has_the_same_rows_among_any_number(num_envs):
    few = min(num_envs, LANES)
    got, want = (windows(*collected(num)) for num in (num_envs, LANES))
    for group, size in (("two", 2), ("one", 1)):
        for name in ("obs", "action", "reward", "next_obs", "mask", "terminated"):
            pair = (getattr(x[group], name)[:, : few * size] for x in (got, want))
            np.testing.assert_array_equal(*pair)


@pytest.mark.slow
def test_rows_without_jit_are_the_same():
    pending, trajectory = collected()
    few = part(trajectory, 0, 3)
    with jax.disable_jit():
        _, rows = rollout.agents.agent_transitions(pending, few)
    assert_same(raw(rows), raw(windows(pending, few, (3,))))


@pytest.mark.slow
def test_rows_over_four_devices_are_the_same():
    types = {"axis_types": (jax.sharding.AxisType.Auto,)}
    mesh = jax.make_mesh((4,), ("lanes",), devices=jax.devices()[:4], **types)
    sharded = rollout.shard(make_collector(8), mesh)
    pending, trajectory = run(sharded)
    _, rows = transitions(pending, trajectory)
    assert rows["two"].mask.sharding.device_set == set(mesh.devices.flat)
    assert_same(raw(trajectory), raw(collected(8)[1]))
    assert_same(raw(rows), raw(windows(*collected(8))))


def test_row_has_its_episode_and_its_step():
    """Within an agent's episode rows count up, and their return is the sum so far."""
    rows = compressed(windows(*collected()))["two"]
    assert set(rows.episode_id) <= set(np.unique(collected()[1].episode_id))
    first = rows.episode_length == 1
    np.testing.assert_array_equal(rows.episode_return[first], rows.reward[first])
    later = np.flatnonzero(~first)
    before = later - 1
    assert (rows.episode_id[later] == rows.episode_id[before]).all()
    assert (rows.episode_length[later] == rows.episode_length[before] + 1).all()
    np.testing.assert_array_equal(
        rows.episode_return[later], rows.episode_return[before] + rows.reward[later]
    )


@pytest.mark.slow
def test_cut_of_the_episode_truncates_who_is_left():
    env = schedule(
        acting=[[1, 1], [1, 0], [1, 0], [1, 0]],
        reward=[[1, 2], [4, 8], [16, 32]],
        terminated=[[0, 0], [0, 0], [0, 0]],
    )
    env = envs.vectorize(env, 1)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)

    @quick_jit
    def play(collector):
        carry = collector.init(KEY)
        pending = rollout.agents.Pending.init(collector, carry)
        _, played = collector.collect_episodes(
            carry, None, 1, max_episode_steps=2, return_trajectory=True
        )
        trajectory = played.trajectory
        return played, rollout.agents.agent_transitions(pending, trajectory)[1]

    played, rows = jax.device_get(play(collector))
    assert not played.finished[0]
    got = agents.rows_of([rows["all"]], 1, 2)
    assert got[0, 0][-1] == (10, 4, 20, False, True, False)
    assert got[0, 1] == [(1, 10, 1, False, True, True)]


def test_abandoned_episode_drops_pending_transitions():
    pending, trajectory = collected()
    halves = part(trajectory, 0, T // 2), part(trajectory, T // 2, T)
    pending, _ = transitions(pending, halves[0])
    assert np.any(pending.is_open)
    # As if `collect_episodes` had come between, which restarts all lanes.
    other = halves[1].replace(episode_id=halves[1].episode_id + 1000)
    _, got = transitions(pending, other)
    _, want = transitions(collected()[0], other)
    for group, rows in got.items():
        np.testing.assert_array_equal(rows.mask, want[group].mask)
        np.testing.assert_array_equal(rows.reward, want[group].reward)


def test_void_steps_answer_nothing():
    pending, trajectory = collected()
    void = trajectory.replace(mask=np.zeros_like(trajectory.mask))
    pending, rows = transitions(pending, void)
    assert not any(np.any(row.mask) for row in rows.values())
    assert not np.any(pending.is_open)


@jax.tree_util.register_static
class AllAct(ChanceEnv):
    """Everyone who is left acts."""

    simultaneous = True

    def choose(self, word):
        return jnp.ones(3, bool)


@pytest.mark.slow
def test_nothing_is_pending_where_all_act():
    env = envs.vectorize(AllAct(), LANES)
    collector = rollout.Collector(env=env, policy=make_policy(env))
    pending, trajectory = jax.device_get(run(collector))
    assert pending == ()
    pending, rows = transitions(pending, trajectory)
    assert pending == ()
    np.testing.assert_array_equal(
        rows["two"].mask, trajectory.info.agents.acted[:, :, [0, 2]].reshape(T, -1)
    )
    make = jax.make_jaxpr(
        lambda t: rollout.agents.agent_transitions((), t)[1]["two"].obs
    )
    names = {str(line.primitive) for line in make(trajectory).eqns}
    assert not names & {"scan", "while", "concatenate"}


@pytest.mark.slow
def test_rows_go_where_transitions_go():
    rows = windows(*collected())["two"]
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
    assert np.asarray(batch.experience.obs).min() >= 0  # never a void row


def test_rows_for_a_policy_are_its_own():
    rows = windows(*collected())
    count = rollout.agents.select_policy(rows, "count")
    assert list(count) == ["two"]
    assert_same(raw(count["two"].obs), raw(rows["two"].obs))
    assert list(rollout.agents.select_policy(rows, "random")) == ["one"]
    with pytest.raises(ValueError, match="one of the policies count, random"):
        rollout.agents.select_policy(rows, "blue")


@pytest.mark.slow
@pytest.mark.parametrize("is_fixed", [True, False])
def test_rows_of_policies_that_share_a_group(is_fixed):
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
    every = rows["all"]
    assert red.mask.sum() + blue.mask.sum() == every.mask.sum()
    if is_fixed:
        assert red.mask.shape == (T, LANES * 2)
        assert set(np.asarray(blue.obs[blue.mask]) % 10) == {1}
    else:
        np.testing.assert_array_equal(red.mask, every.mask & (every.policy_id == 0))

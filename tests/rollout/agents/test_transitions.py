"""Each agent's transitions, and those of teams, against a plain Python model."""

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
KINDS = {
    "agent": rollout.agents.agent_transitions,
    "team": rollout.agents.team_transitions,
}


@functools.partial(quick_jit, static_argnames="lengths")
def experience(env, lengths=(7, 8)):
    """Three episodes or more of a table; the rows of windows of these lengths."""
    env = envs.vectorize(env, B)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry = collector.init(KEY)
    start = rollout.agents.Pending.init(collector, carry)
    _, trajectory = collector.collect_steps(carry, None, 3 * NUM_STEPS)
    found = {}
    for kind, make in KINDS.items():
        pending, every = start, []
        for first, stop in itertools.pairwise(np.cumsum((0, *lengths))):
            pending, rows = make(pending, part(trajectory, first, stop))
            every.append(rows["all"])
        found[kind] = jax.tree.map(lambda *x: jnp.concatenate(x), *every)
    return trajectory, found


def part(trajectory, begin, end):
    return jax.tree.map(lambda x: x[begin:end], trajectory)


@pytest.mark.parametrize(
    "lengths", [(7, 8), pytest.param((5, 1, 9), marks=pytest.mark.slow)]
)
@settings(max_examples=120, deadline=None)
@given(**TABLES)
def test_rows_are_those_of_a_plain_model(
    lengths, acting, reward, terminated, truncated, end
):
    env = schedule(acting, reward, terminated=terminated, truncated=truncated, end=end)
    trajectory, found = jax.device_get(experience(env, lengths))
    info = trajectory.info.agents
    for kind, rows in found.items():
        want, total, unassigned, length = agents.play(env, is_team=kind == "team")
        for (_, agent), got in agents.rows_of(rows, B, NUM_AGENTS).items():
            expected = want[agent] * (3 * NUM_STEPS // length)
            assert got[: len(expected)] == expected
        missed = np.sum(info.unassigned_reward[:length, 0], axis=0)
        np.testing.assert_array_equal(missed, unassigned)
        np.testing.assert_array_equal(info.agent_return[length - 1, 0], total)
        in_rows = [sum(reward for _, reward, *_ in agent) for agent in want]
        np.testing.assert_array_equal(total - missed * (kind == "agent"), in_rows)


def row(obs, reward, next_obs, *, end=False, stale=False):
    return obs, reward, next_obs, end, False, stale, True


def test_worked_example_of_rllib():
    """Scenario A: b comes late, both skip steps. Here c never acts."""
    env = schedule(
        acting=[[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [1, 1, 0], [0, 1, 0]],
        reward=[[1, 5, 0], [2, 7, 0], [4, 8, 0], [8, 9, 0], [16, 10, 0]],
    )
    trajectory, found = jax.device_get(experience(env))
    rows = agents.rows_of(found["agent"], B, NUM_AGENTS)
    # No observation of a at the end: its last one again.
    last = row(40, 16, 40, end=True, stale=True)
    assert rows[0, 0] == [row(0, 1, 10), row(10, 2 + 4 + 8, 40), last] * 3
    b = [row(21, 8, 31), row(31, 9, 41), row(41, 10, 51, end=True)]
    assert rows[0, 1] == b * 3
    alone = jax.tree.map(lambda x: x[:NUM_STEPS, :1], trajectory)
    stats = jax.device_get(quick_jit(rollout.agents.summarize_agents)(alone))
    assert trajectory.episode_return[NUM_STEPS - 1, 0] == 70
    assert (stats.num_steps, stats.num_agent_steps, stats.num_episodes) == (5, 6, 1)
    assert (stats.unassigned_reward, stats.num_stale) == (12, 1)
    returns = [stats.agents[name].returns.mean for name in "abc"]
    lengths = [stats.agents[name].lengths.mean for name in "abc"]
    np.testing.assert_array_equal(returns, [31, 27 + 12, np.nan])
    np.testing.assert_array_equal(lengths, [3, 3, np.nan])


def test_winner_is_known_at_the_end_when_only_the_next_to_move_sees_the_board():
    acting = np.eye(3)[[0, 1, 2, 0, 1, 2]]
    env = schedule(acting, reward=[[0, 0, 0]] * 4 + [[-1, 2, -1]])
    rows = agents.rows_of(jax.device_get(experience(env))[1]["agent"], B, NUM_AGENTS)
    assert rows[0, 0] == [row(0, 0, 30), row(30, -1, 30, end=True, stale=True)] * 3
    assert rows[0, 1] == [row(11, 0, 41), row(41, 2, 41, end=True, stale=True)] * 3
    assert rows[0, 2] == [row(22, -1, 52, end=True)] * 3


def test_fallen_agent_earns_what_its_team_wins_later():
    """The second falls at step 2; both get +1 at the last step."""
    env = schedule(
        acting=[[1, 1, 0]] * 2 + [[1, 0, 0]] * 4,
        reward=[[0, 0, 0]] * 4 + [[1, 1, 0]],
        terminated=[[0, 0, 0], [0, 1, 0]] + [[0, 0, 0]] * 3,
    )
    trajectory, found = experience(env)

    @quick_jit
    def find_returns(t):
        flags, options = (t.terminated, t.truncated), {"mask": t.mask}
        return rollout.discounted_returns(t.reward, *flags, gamma=1.0, **options)

    for kind, fallen in (("team", 1), ("agent", 0)):
        t, returns = found[kind], find_returns(found[kind])
        np.testing.assert_array_equal(returns[:, 0], 1)
        np.testing.assert_array_equal(returns[:, 1], fallen)
        np.testing.assert_array_equal(t.acting[:, 1], [True, True, *[False] * 3] * 3)
    stats = quick_jit(rollout.agents.summarize_agents)(trajectory)
    assert stats.unassigned_reward == 3 * B


def test_simultaneous_rows_are_a_reshape_of_the_trajectory():
    collector = make_collector(AllAct())
    pending, trajectory = jax.device_get(run(collector))
    assert pending == ()
    info, columns = trajectory.info.agents, [0, 2]  # of the group's agents
    acted = info.acted[..., columns].reshape(T, -1)
    assert not acted.all()
    for kind, make in KINDS.items():
        after, rows = quick_jit(make)(pending, trajectory)
        assert after == ()
        got = rows["two"]
        np.testing.assert_array_equal(got.mask, acted | (kind == "team"))
        np.testing.assert_array_equal(got.acting, acted)
        for name, want in {
            "obs": trajectory.obs["two"],
            "next_obs": trajectory.next_obs["two"],
            "episode_return": info.agent_return[..., columns],
        }.items():
            np.testing.assert_array_equal(getattr(got, name), want.reshape(T, -1))
        reward = info.reward[..., columns].reshape(T, -1)
        np.testing.assert_array_equal(got.reward, np.where(got.mask, reward, 0))
        steps = jax.make_jaxpr(lambda t, make=make: make((), t)[1]["two"].obs)
        names = {str(line.primitive) for line in steps(trajectory).eqns}
        assert not names & {"scan", "while", "concatenate"}
    for name in ("terminated", "truncated", "episode_length", "episode_id"):
        want = np.repeat(getattr(trajectory, name), 2, axis=1)
        np.testing.assert_array_equal(getattr(got, name), want)


T, LANES = 24, 4


PARAMS = {"count": None, "random": None}


def make_collector(env, num_envs=LANES):
    """A recurrent policy for two agents, and a random one for the third."""
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
def collected(num_envs=LANES):
    """A trajectory, and the `pending` before it, without any action."""
    return jax.device_get(run(make_collector(ChanceEnv(), num_envs)))


@quick_jit
def run(collector, params=PARAMS):
    """Nothing pending, and a trajectory after it."""
    carry = collector.init(KEY)
    pending = rollout.agents.Pending.init(collector, carry, params)
    return pending, collector.collect_steps(carry, params, T)[1]


transitions = quick_jit(rollout.agents.agent_transitions)


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


def test_windows_do_not_matter():
    case = collected()
    want = compressed(windows(*case))
    assert want["two"].obs.size > 20
    assert_same(compressed(windows(*case, (5, 1, T - 6))), want)


def test_either_function_goes_on_after_the_other():
    pending, trajectory = collected()
    few = part(trajectory, 0, 5)
    after = [quick_jit(make)(pending, few)[0] for make in KINDS.values()]
    assert after[0].is_open.any()
    chex.assert_trees_all_equal(*after)


@pytest.mark.slow
def test_lane_has_the_same_rows_among_any_number():
    got, want = (windows(*collected(num)) for num in (64, LANES))
    for group, size in (("two", 2), ("one", 1)):
        for name in ("obs", "action", "reward", "next_obs", "mask", "terminated"):
            few = getattr(got[group], name)[:, : LANES * size]
            np.testing.assert_array_equal(few, getattr(want[group], name))


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
    sharded = rollout.shard(make_collector(ChanceEnv(), 8), mesh)
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

"""Rows that last until the episode ends: agents that fall earn what their team wins."""

import functools
import itertools

import agents
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import NUM_AGENTS, NUM_STEPS, TABLES, B, schedule
from cases import quick_jit
from hypothesis import given, settings

import rollout
from rollout import envs

pytestmark = pytest.mark.usefixtures("quick_compile")
KEY = jax.random.key(3)
NUM_ROWS = 3 * NUM_STEPS
ENDS = {
    "agent": rollout.agents.agent_transitions,
    "episode": rollout.agents.team_transitions,
}


def collect(env, num_steps):
    env = envs.vectorize(env, B)
    policy = rollout.random_policy(env.action_space)
    collector = rollout.Collector(env=env, policy=policy)
    carry = collector.init(KEY)
    pending = rollout.agents.Pending.init(collector, carry)
    return pending, collector.collect_steps(carry, None, num_steps)[1]


def team_of_two():
    """The second falls at step 2; both get +1 at step 4, the last one."""
    return schedule(
        acting=[[1, 1], [1, 1], [1, 0], [1, 0], [1, 0]],
        reward=[[0, 0], [0, 0], [0, 0], [1, 1]],
        terminated=[[0, 0], [0, 1], [0, 0], [0, 0]],
    )


@functools.cache
def returns_of_two():
    """The statistics of `team_of_two`, and its rows and returns by `end`."""

    @quick_jit
    def run(env):
        (pending, trajectory), found = collect(env, 4), {}
        for end in ENDS:
            _, rows = ENDS[end](pending, trajectory)
            t = rows["all"]
            flags, options = (t.terminated, t.truncated), {"mask": t.mask}
            returns = rollout.discounted_returns(t.reward, *flags, gamma=1.0, **options)
            found[end] = t, returns
        return rollout.agents.summarize_agents(trajectory), found

    return jax.device_get(run(team_of_two()))


@pytest.mark.parametrize(
    ("end", "fallen"), [("episode", [1, 1, 1, 1]), ("agent", [0, 0, 0, 0])]
)
def test_fallen_agent_earns_what_its_team_wins_later(end, fallen):
    stats, found = returns_of_two()
    rows, returns = found[end]
    np.testing.assert_array_equal(returns[:, 0], [1, 1, 1, 1])
    np.testing.assert_array_equal(returns[:, 1], fallen)
    acting = rows.acting
    np.testing.assert_array_equal(acting[:, 1], [True, True, False, False])
    assert stats.unassigned_reward == B


def play_to_the_end(env):
    """One episode of a `ScheduleEnv`, agent by agent in plain Python.

    Returns:
        Rows by agent, `(obs, reward, next_obs, terminated, truncated, acting)`, an
        observation None where it is void, and the episode's length.
    """
    tables = jax.tree.map(np.asarray, env)
    num_steps, num_agents = tables.reward.shape
    rows, over = [[] for _ in range(num_agents)], np.zeros(num_agents, bool)
    terminated = np.zeros(num_agents, bool)
    pending = [None] * num_agents  # [obs, reward so far]
    for n in range(num_steps):
        acts = tables.acting[n] & ~over
        ends = (tables.terminated[n] | tables.truncated[n]) & ~over
        terminated |= ends & tables.terminated[n]
        over = over | ends
        is_cut = n == num_steps - 1 and not tables.episode_terminated[n]
        flags = (
            bool(tables.episode_terminated[n]) or (over.all() and terminated.all()),
            is_cut or (over.all() and not terminated.all()),
        )
        for a in range(num_agents):
            if acts[a]:
                pending[a] = [10 * n + a, 0.0]
            seen = ends[a] or (tables.acting[n + 1, a] and not over[a])
            reward = float(tables.reward[n, a])
            if pending[a] is None:
                rows[a].append((None, reward, None, *flags, False))
                continue
            pending[a][1] += reward
            if seen or any(flags):
                obs, total = pending[a]
                next_obs = 10 * (n + 1) + a if seen else obs
                rows[a].append((obs, total, next_obs, *flags, True))
                pending[a] = None
        if any(flags):
            return rows, n + 1
    raise AssertionError("it must end")


@functools.partial(quick_jit, static_argnames="lengths")
def windows(env, lengths):
    """The trajectory, and by `end` the rows of windows of these lengths, joined."""
    start, trajectory = collect(env, NUM_ROWS)
    found = {}
    for end in ENDS:
        pending, every = start, []
        for first, stop in itertools.pairwise(np.cumsum((0, *lengths))):
            window = jax.tree.map(lambda x, a=first, b=stop: x[a:b], trajectory)
            pending, rows = ENDS[end](pending, window)
            every.append(rows["all"])
        found[end] = jax.tree.map(lambda *x: jnp.concatenate(x), *every)
    return trajectory, found


def assert_rows_of_a_plain_loop(rows, want, length):
    num_episodes = NUM_ROWS // length
    for agent, lane in itertools.product(range(NUM_AGENTS), range(B)):
        column = lane * NUM_AGENTS + agent
        here = np.flatnonzero(rows.mask[:, column])
        expected = want[agent] * num_episodes
        for t, row in zip(here, expected, strict=False):
            obs, reward, next_obs, *flags = row
            got = rows.terminated, rows.truncated, rows.acting
            assert [bool(x[t, column]) for x in got] == [bool(x) for x in flags]
            assert rows.reward[t, column] == reward
            if obs is not None:
                assert rows.obs[t, column] == obs
                assert rows.next_obs[t, column] == next_obs
        assert len(here) >= len(expected)


def assert_rewards_sum_to_returns(rows, trajectory, missed):
    in_rows = rows.reward.reshape(NUM_ROWS, B, NUM_AGENTS) + missed
    for lane in range(B):
        ends = np.flatnonzero(trajectory.done[:, lane])
        for start, stop in itertools.pairwise((0, *(ends + 1))):
            np.testing.assert_array_equal(
                in_rows[start:stop, lane].sum(0),
                trajectory.info.agents.agent_return[stop - 1, lane],
            )


@pytest.mark.parametrize(
    "split",
    [(7, 8), *(pytest.param(x, marks=pytest.mark.slow) for x in ((15,), (5, 1, 9)))],
)
@settings(max_examples=100, deadline=None)
@given(**TABLES)
def test_rows_are_those_of_a_plain_loop_and_sum_to_the_returns(
    split, acting, reward, terminated, truncated, end
):
    env = schedule(acting, reward, terminated=terminated, truncated=truncated, end=end)
    trajectory, found = jax.device_get(windows(env, split))
    assert_rows_of_a_plain_loop(found["episode"], *play_to_the_end(env))
    missed = trajectory.info.agents.unassigned_reward
    assert_rewards_sum_to_returns(found["agent"], trajectory, missed)
    assert_rewards_sum_to_returns(found["episode"], trajectory, 0)


def test_simultaneous_rows_are_a_reshape_of_the_trajectory():
    make = rollout.agents.team_transitions

    @quick_jit
    def run():
        pending, trajectory = collect(agents.AllAct(), 40)
        return trajectory, *make(pending, trajectory)

    trajectory, after, rows = jax.device_get(run())
    assert after == ()
    row, info = rows["two"], trajectory.info.agents
    columns = [0, 2]  # of the group's agents
    assert row.mask.all()
    assert not info.acted.all()
    for got, want in {
        "reward": info.reward[..., columns],
        "episode_return": info.agent_return[..., columns],
        "obs": trajectory.obs["two"],
        "next_obs": trajectory.next_obs["two"],
    }.items():
        np.testing.assert_array_equal(getattr(row, got), want.reshape(40, -1))
    acted = info.acted[..., columns].reshape(40, -1)
    np.testing.assert_array_equal(row.acting, acted)
    for name in ("terminated", "truncated", "episode_length", "episode_id"):
        want = np.repeat(getattr(trajectory, name), 2, axis=1)
        np.testing.assert_array_equal(getattr(row, name), want)
    steps = jax.make_jaxpr(lambda t: make((), t)[1]["two"].reward)(trajectory)
    names = {str(line.primitive) for line in steps.eqns}
    assert not names & {"scan", "while", "concatenate"}


def test_either_function_goes_on_after_the_other():
    @quick_jit
    def run():
        pending, trajectory = collect(agents.ChanceEnv(is_turn_based=True), 40)
        first = jax.tree.map(lambda x: x[:19], trajectory)
        second = jax.tree.map(lambda x: x[19:], trajectory)
        after = {end: make(pending, first)[0] for end, make in ENDS.items()}
        return after, {
            end: {before: make(after[before], second)[1] for before in ENDS}
            for end, make in ENDS.items()
        }

    after, found = jax.device_get(run())
    assert after["agent"].is_open.any()
    for rows in found.values():
        for name, want in rows["agent"].items():
            got = rows["episode"][name]
            np.testing.assert_array_equal(got.mask, want.mask)
            for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
                np.testing.assert_array_equal(x[want.mask], y[want.mask])

"""Agents of PettingZoo environments: every row equals a plain loop."""

import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo_envs import Crowd, Duel, Seeds, play_parallel, play_turns

import rollout
from rollout import agents, envs
from rollout.envs.spaces import as_space
from rollout.policies import random_policy

B = 3
transitions = jax.jit(agents.agent_transitions)


def make_policy(env):
    """Samples valid actions in every group; records a value."""
    policies = {}
    for group, space in env.action_spaces.items():
        mask_fn = None
        if "action_mask" in getattr(env.observation_spaces[group], "spaces", {}):
            mask_fn = lambda obs: obs["action_mask"]  # noqa: E731
        policies[group] = random_policy(space, action_mask_fn=mask_fn)
    by_agent = {x: group for group, names in env.groups.items() for x in names}
    return agents.policy_map(policies, agents.static_mapping(by_agent), env)


def collect(env, sizes, *, num_ready=None, **options):
    """Collects windows; returns the trajectory, and rows by lane and agent."""
    policy = make_policy(env)
    collector = rollout.HostCollector(
        env=env, policy=policy, num_ready=num_ready, **options
    )
    params = dict.fromkeys(env.groups)
    carry = collector.init(jax.random.key(0))
    init = jax.jit(lambda carry: agents.Pending.init(collector, carry, params))
    pending = init(carry)
    trajectories, rows = [], []
    for size in sizes:
        carry, trajectory = collector.collect_steps(carry, params, size)
        pending, window = transitions(pending, trajectory)
        trajectories.append(trajectory)
        rows.append(window)
    concatenate = lambda *x: np.concatenate(x)  # noqa: E731
    trajectory = jax.tree.map(concatenate, *trajectories)
    rows = {
        group: jax.tree.map(concatenate, *(x[group] for x in rows))
        for group in env.groups
    }
    return trajectory, rows


def lane_actions(env, trajectory, lane):
    """Returns the function `(t, agent)` of the actions in a lane."""

    def action_fn(t, agent):
        if t >= len(trajectory.mask):
            raise IndexError
        for group, names in env.groups.items():
            if agent in names:
                return trajectory.action[group][t, lane, names.index(agent)]
        raise AssertionError(agent)

    return action_fn


def check_rows(env, rows, lane, want):
    """Compares the rows of a lane with a plain loop; returns their number."""
    count = 0
    for group, names in env.groups.items():
        for i, agent in enumerate(names):
            column = lane * len(names) + i
            index = np.flatnonzero(rows[group].mask[:, column])
            got = jax.tree.map(lambda x, i=index, c=column: x[i, c], rows[group])
            expected = want.rows[agent]
            # The last action of a window may have no result yet, and the last rows of
            # the loop have none.
            assert abs(len(index) - len(expected)) <= 1
            for n, (obs, action, reward, next_obs, *flags) in enumerate(
                expected[: len(index)]
            ):
                pairs = (got.obs, obs), (got.action, action), (got.next_obs, next_obs)
                for tree, value in pairs:
                    for x, y in zip(
                        jax.tree.leaves(tree), jax.tree.leaves(value), strict=True
                    ):
                        np.testing.assert_array_equal(x[n], np.asarray(y, x.dtype))
                np.testing.assert_allclose(got.reward[n], reward, rtol=1e-6)
                assert [got.terminated[n], got.truncated[n]] == flags
            count += len(index)
    return count


class Logged:
    """Creates environments that record their seeds in lists of their own."""

    def __init__(self, base, *args):
        self.base, self.args, self.logs = base, args, []

    def __call__(self):
        env = self.base(*self.args)
        seeds, reset = [], env.reset
        self.logs.append(seeds)

        def logged_reset(seed=None, options=None):
            seeds.append(seed)
            return reset(seed=seed)

        env.reset = logged_reset
        return env


CASES = {
    "crowd": (functools.partial(Crowd, True), play_parallel),
    "crowd_together": (functools.partial(Crowd, False), play_parallel),
    "duel": (functools.partial(Duel, True), play_turns),
    "duel_late_ends": (functools.partial(Duel, False), play_turns),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_a_plain_loop(name):
    make, play = CASES[name]
    logged = Logged(make)
    env = envs.from_pettingzoo(logged, B)
    trajectory, rows = collect(env, [7] * 40)
    count = 0
    for lane in range(B):
        # The first environment is only read.
        seeds = logged.logs[lane + 1]
        want = play(make(), seeds, lane_actions(env, trajectory, lane))
        count += check_rows(env, rows, lane, want)
        ended = trajectory.terminated[:, lane] | trajectory.truncated[:, lane]
        assert ended.sum() == len(want.returns)
        got = trajectory.info.agents.agent_return[ended, lane]
        expected = [[x[agent] for agent in env.agents] for x in want.returns]
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        np.testing.assert_allclose(
            trajectory.episode_return[ended, lane], np.sum(expected, 1), rtol=1e-5
        )
    assert count > 500

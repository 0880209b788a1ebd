"""Agents of PettingZoo environments: every row equals a plain loop."""

import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo_envs import Crowd, Duel, play_parallel, play_turns

import rollout
from rollout import agents, envs

B = 3
transitions = jax.jit(agents.agent_transitions)


def collect(env, sizes, *, num_ready=None, **options):
    """Collects windows; returns the trajectory, and rows by lane and agent."""
    policy = agents.random_policy_map(env)
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
        if num_ready is not None:
            trajectory = rollout.host.regroup_by_env(trajectory)
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


def compare_with_plain_loop(make, play, sizes):
    """Compares all rows with a plain loop over the environments; returns a count."""
    logged = Logged(make)
    env = envs.from_pettingzoo(logged, B)
    trajectory, rows = collect(env, sizes)
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
    return count


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_a_plain_loop(name):
    assert compare_with_plain_loop(*CASES[name], [7] * 40) > 500


PUBLISHED = {
    "mpe2.simple_spread_v3": ("parallel_env", play_parallel, 6_000),
    "mpe2.simple_tag_v3": ("parallel_env", play_parallel, 8_000),
    "pettingzoo.classic.tictactoe_v3": ("env", play_turns, 2_000),
    "pettingzoo.classic.connect_four_v3": ("env", play_turns, 2_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", PUBLISHED)
def test_rows_of_published_environments_equal_a_plain_loop(module):
    name, play, num_rows = PUBLISHED[module]
    make = getattr(pytest.importorskip(module), name)
    assert compare_with_plain_loop(make, play, [7] * 100) > num_rows


@pytest.mark.parametrize("name", ["crowd", "duel"])
def test_rows_of_workers_equal_rows_in_this_process(name):
    make, _ = CASES[name]
    local, want = collect(envs.from_pettingzoo(make, B), [10, 10])
    env = envs.from_pettingzoo(make, B, num_workers=2)
    workers, got = collect(env, [10, 10])
    env.close()
    for x, y in zip(
        jax.tree.leaves((local, want)), jax.tree.leaves((workers, got)), strict=True
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.compiles(80)
@pytest.mark.parametrize("name", ["crowd_together", "duel"])
def test_rows_of_asynchronous_lanes_equal_a_plain_loop(name):
    """Actions are pending at the end of windows, which end with idle rows."""
    make, play = CASES[name]
    logged = Logged(make)
    collect(envs.from_pettingzoo(logged, B), [60])
    env = envs.from_pettingzoo(make, B, num_workers=2)
    trajectory, rows = collect(env, [3] * 15, num_ready=2)
    env.close()
    count = 0
    for lane, seeds in enumerate(logged.logs[1:]):
        # Regrouped windows end with rows without a step.
        mask = trajectory.mask[:, lane]
        steps = jax.tree.map(lambda x, m=mask: x[m], trajectory)
        want = play(make(), seeds, lane_actions(env, steps, lane))
        count += check_rows(env, rows, lane, want)
        ended = steps.terminated[:, lane] | steps.truncated[:, lane]
        got = steps.info.agents.agent_return[ended, lane]
        expected = [[x[agent] for agent in env.agents] for x in want.returns]
        assert len(got) > 0
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert count > 60


def test_rows_in_the_order_of_service_raise():
    env = envs.from_pettingzoo(CASES["crowd_together"][0], B, num_workers=2)
    policy = agents.random_policy_map(env)
    collector = rollout.HostCollector(env=env, policy=policy, num_ready=2)
    params = dict.fromkeys(env.groups)
    carry = collector.init(jax.random.key(0))
    _, trajectory = collector.collect_steps(carry, params, 2)
    env.close()
    with pytest.raises(ValueError, match="regroup_by_env"):
        agents.agent_transitions((), trajectory)


def test_static_mapping_by_group_equals_a_mapping_by_agent():
    env = envs.from_pettingzoo(Crowd, B)
    policies = {
        x: rollout.random_policy(space) for x, space in env.action_spaces.items()
    }
    by_agent = {x: group for group, names in env.groups.items() for x in names}
    got, want = (
        agents.policy_map(policies, agents.static_mapping(names), env)
        for names in ({"red": "red", "blue": "blue"}, by_agent)
    )
    assert got.index == want.index
    wrong = agents.static_mapping({"red": "blue", "blue": "blue"})
    other = agents.policy_map(policies, wrong, env)
    assert other.index != want.index


def test_fault_loses_one_episode():
    class Failing(Duel):
        number = 0

        def step(self, action):
            if self.num_turns == 3 and self.number % 2:
                raise RuntimeError("no more turns")
            super().step(action)

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            Failing.number += 1

    env = envs.from_pettingzoo(Failing, B)
    options = {"on_fault": "restart"}
    trajectory, rows = collect(env, [30], **options)
    assert not trajectory.mask.all()
    # Every answered action belongs to a complete episode.
    lost = np.unique(trajectory.episode_id[~trajectory.mask])
    assert not np.isin(rows["agents"].episode_id[rows["agents"].mask], lost).any()
    env = envs.from_pettingzoo(Failing, B)
    with pytest.raises(envs.EnvFault, match="no more turns"):
        collect(env, [30])


def test_resume_continues_the_episodes():
    env = envs.from_pettingzoo(Crowd, B)
    trajectory, _ = collect(env, [5, 25])
    env = envs.from_pettingzoo(Crowd, B)
    collector = rollout.HostCollector(env=env, policy=agents.random_policy_map(env))
    params = dict.fromkeys(env.groups)
    carry, _ = collector.collect_steps(collector.init(jax.random.key(0)), params, 5)
    saved = collector.save(carry)
    assert all(saved)
    env = envs.from_pettingzoo(Crowd, B)
    other = rollout.HostCollector(env=env, policy=agents.random_policy_map(env))
    carry = other.restore(carry, saved)
    _, rest = other.collect_steps(carry, params, 25)
    for x, y in zip(jax.tree.leaves(trajectory), jax.tree.leaves(rest), strict=True):
        np.testing.assert_array_equal(x[5:], y)


@pytest.mark.compiles(50)
def test_episode_without_saved_state_starts_again():
    env = envs.from_pettingzoo(Duel, B)
    collector = rollout.HostCollector(env=env, policy=agents.random_policy_map(env))
    params = dict.fromkeys(env.groups)
    carry = collector.init(jax.random.key(0))
    pending = agents.Pending.init(collector, carry, params)
    carry, trajectory = collector.collect_steps(carry, params, 2)
    pending, _ = transitions(pending, trajectory)
    with pytest.warns(UserWarning, match="was not saved"):
        carry = collector.restore(carry, [b""] * B)
    carry, trajectory = collector.collect_steps(carry, params, 1)
    assert trajectory.first.all()
    _, rows = transitions(pending, trajectory)
    # Only the agents that acted at this step can have an answer.
    acted = trajectory.info.agents.acted[0]
    assert not (rows["agents"].mask[0].reshape(B, -1) & ~acted).any()


@jax.tree_util.register_static
class Nim:
    """Two players take one or two of nine sticks; the last one to take wins."""

    agents = "player_0", "player_1"

    groups = {"agents": agents}  # noqa: RUF012
    observation_spaces = {"agents": envs.Box(0.0, 9.0, (2,))}  # noqa: RUF012
    action_spaces = {"agents": envs.Discrete(2)}  # noqa: RUF012

    def reset(self, key):
        return (jnp.int32(9), jnp.int32(0)), self.observe(9), jnp.array([True, False])

    def observe(self, sticks):
        return {"agents": jnp.stack([jnp.float32([sticks, i]) for i in range(2)])}

    def step(self, key, state, action):
        sticks, player = state
        sticks = jnp.maximum(sticks - action["agents"][player] - 1, 0)
        is_over = sticks == 0
        sign = jnp.where(jnp.arange(2) == player, 1.0, -1.0)
        return envs.multi_agent.MultiAgentStep(
            state=(sticks, 1 - player),
            obs=self.observe(sticks),
            acting=jnp.arange(2) != player,
            reward=jnp.where(is_over, sign, 0.0),
            terminated=jnp.broadcast_to(is_over, 2),
            truncated=jnp.zeros(2, bool),
            episode_terminated=is_over,
            episode_truncated=False,
        )


class NimZoo(Duel):
    """`Nim` as an `AECEnv`."""

    possible_agents = Nim.agents

    def observation_space(self, agent):
        return gymnasium.spaces.Box(0.0, 9.0, (2,), np.float32)

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.sticks = list(self.possible_agents), 9
        zeros, flags = dict.fromkeys(self.agents, 0), dict.fromkeys(self.agents, False)
        self.rewards, self._cumulative_rewards = dict(zeros), dict(zeros)
        self.terminations, self.truncations = dict(flags), dict(flags)
        self.infos = {x: {} for x in self.agents}
        self.agent_selection = self.agents[0]

    def observe(self, agent):
        return np.array([self.sticks, self.possible_agents.index(agent)], np.float32)

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent]:
            super().step(action)
            return
        self.sticks = max(self.sticks - int(action) - 1, 0)
        self._cumulative_rewards[agent] = 0
        if self.sticks == 0:
            for x in self.agents:
                self._cumulative_rewards[x] += 1 if x == agent else -1
                self.terminations[x] = True
        self.agent_selection = next(x for x in self.agents if x != agent)

    def _select(self, agent):
        self.agent_selection = self.agents[0] if self.agents else None


@pytest.mark.compiles(100)
def test_game_in_jax_and_in_python_give_equal_rows():
    host_env = envs.from_pettingzoo(NimZoo, 4)
    policy = agents.random_policy_map(host_env)
    params = dict.fromkeys(host_env.groups)
    got = {}
    for env, kind in (
        (host_env, rollout.HostCollector),
        (envs.vectorize(Nim(), 4), rollout.Collector),
    ):
        collector = kind(env=env, policy=policy)
        carry = collector.init(jax.random.key(0))
        init = jax.jit(lambda carry, x=collector: agents.Pending.init(x, carry, params))
        pending, rows = init(carry), []
        for _ in range(3):
            carry, trajectory = collector.collect_steps(carry, params, 13)
            pending, window = transitions(pending, trajectory)
            rows.append(jax.device_get(window["agents"]))
        stats = agents.evaluate_agents(collector, params, jax.random.key(1), 50)
        got[kind] = rows, stats
    (rows, stats), (jax_rows, jax_stats) = got.values()
    for x, y in zip(rows, jax_rows, strict=True):
        assert x.mask.sum() > 10
        for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated"):
            np.testing.assert_array_equal(
                getattr(x, name)[x.mask], getattr(y, name)[y.mask], name
            )
        np.testing.assert_array_equal(x.mask, y.mask)
    assert str(stats) == str(jax_stats)
    assert stats.num_episodes == 50
    assert stats.agents["player_0"].results == jax_stats.agents["player_0"].results

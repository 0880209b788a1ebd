"""Compares the values of each agent's successors with the critic."""

import functools

import agents
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quick_jit

import rollout
from rollout import envs

pytestmark = pytest.mark.usefixtures("quick_compile")
KEY = jax.random.key(5)
T, B = 24, 4
ENDS = {
    "agent": rollout.agents.agent_transitions,
    "episode": rollout.agents.team_transitions,
}
GROUP, MEMBERS = "two", [0, 2]  # of `ChanceEnv`
PARAMS = {"count": jnp.float32(3.0), "random": None}


def critic(weight, obs, state):
    """Returns sums of small integers, which are exact."""
    return weight * obs + state


def count(weight, obs, state, key):
    """Counts the actions of the agent in the episode."""
    del key  # unused
    return obs.astype(jnp.int32) % 4, state + 1, {"value": critic(weight, obs, state)}


CASES = {"simultaneous": agents.AllAct(), "any": agents.ChanceEnv()}


def act_stateless(weight, obs, key):
    """Records the value of the observation without a memory."""
    return obs.astype(jnp.int32) % 4, {"value": weight * obs}


COUNTING = rollout.recurrent_policy(count, jnp.zeros, value_fn=critic)


def make_collector(env, num_envs=B, policy=COUNTING, team_value=None):
    env = envs.vectorize(env, num_envs)
    policies = {
        "count": policy,
        "random": rollout.random_policy(env.action_spaces["one"]),
    }
    mapping = rollout.agents.static_mapping({"a": "count", "b": "random", "c": "count"})
    policy = rollout.agents.policy_map(policies, mapping, env, value_fn=team_value)
    return rollout.Collector(env=env, policy=policy)


@functools.cache
def values_by_end(name):
    """Computes `next_values` of a case for both ends in one program."""
    run = quick_jit(lambda collector: {x: compute_values(collector, x) for x in ENDS})
    return jax.device_get(run(make_collector(CASES[name])))


def recorded_value(extras):
    return extras["value"]


def compute_values(collector, end):
    """Returns the trajectory, the group's rows and the values of their successors."""
    carry, windows = collector.init(KEY), []
    pending = rollout.agents.Pending.init(collector, carry, PARAMS)
    for _ in range(2):
        carry, trajectory = collector.collect_steps(carry, PARAMS, T // 2)
        pending, rows = ENDS[end](pending, trajectory, recorded_value_fn=recorded_value)
        values = collector.value(carry, PARAMS)
        if not isinstance(values, dict):  # one value per lane
            values = {GROUP: jnp.repeat(values[:, None], 2, axis=1)}
        last = rollout.agents.last_values(
            pending, values, recorded_value_fn=recorded_value
        )
        t = rows[GROUP]
        value = rollout.next_values(t, t.extras["value"], last[GROUP])
        windows.append((trajectory, rows[GROUP], value))
    return jax.tree.map(lambda *x: jnp.concatenate(x), *windows)


next_values = quick_jit(compute_values, static_argnames="end")


def check_values(trajectory, rows, value, counts=True):
    """Compares with the critic at every successor."""
    length = trajectory.info.agents.agent_length[..., MEMBERS].reshape(rows.mask.shape)
    length = np.where(counts, length, 0)
    weight = float(PARAMS["count"])
    # The memory at the successor counts the action. If the last observation is stale,
    # the value is the critic at the observation before it.
    want = weight * rows.next_obs + length
    stale_value = weight * rows.obs + length - counts
    want = np.where(rows.stale_next_obs, stale_value, want)
    bootstraps = np.asarray(rows.mask & ~rows.terminated)
    np.testing.assert_array_equal(value[bootstraps], want[bootstraps])
    assert not np.any(rows.final_value[~rows.truncated | rows.terminated])
    assert np.any(rows.truncated & bootstraps)
    assert np.any(~rows.truncated & bootstraps)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", CASES)
def test_next_values_equal_the_critic_at_every_successor(name, end):
    check_values(*values_by_end(name)[end])


def test_next_values_of_a_stateless_critic():
    policy = rollout.stateless_policy(
        act_stateless, value_fn=lambda weight, obs: weight * obs
    )
    collector = make_collector(CASES["any"], policy=policy)
    check_values(*jax.device_get(next_values(collector, "episode")), counts=False)


def test_team_value_is_repeated_for_each_agent():
    def value(params, obs, state):
        return jnp.sum(obs[GROUP], axis=1)

    collector = make_collector(agents.AllAct(), team_value=value)
    _, rows, _ = jax.device_get(next_values(collector, "episode"))
    final_value = rows.final_value.reshape(T, B, 2)
    assert np.count_nonzero(final_value) > 0
    np.testing.assert_array_equal(final_value[..., 0], final_value[..., 1])


def test_batches_and_episodes_contain_final_values():
    collector = make_collector(agents.AllAct())
    stream = rollout.Stream(
        collector,
        key=KEY,
        params=PARAMS,
        steps_per_batch=3 * B,
        at_batch_end="truncate",
    )
    batch = jax.device_get(next(stream).trajectory)
    truncated = batch.truncated[-1] & ~batch.terminated[-1]
    obs = batch.next_obs[GROUP][-1]
    length = batch.info.agents.agent_length[-1][:, MEMBERS]
    want = float(PARAMS["count"]) * obs + length
    assert truncated.any()
    np.testing.assert_array_equal(
        batch.final_value[GROUP][-1][truncated], want[truncated]
    )

    @quick_jit
    def play(collector):
        carry = collector.init(KEY)
        return collector.collect_episodes(
            carry, PARAMS, 3, max_episode_steps=4, return_trajectory=True
        )[1].trajectory

    padded = jax.device_get(play(collector))
    assert padded.final_value[GROUP].shape == (4, 3, 2)
    assert not np.any(padded.final_value[GROUP][~padded.mask])


def test_policy_state_is_read_inside_wrappers():
    collector = make_collector(agents.AllAct())
    wrapped = collector.replace(
        policy=rollout.policies.RandomWarmup(
            collector.policy, collector.env.action_space, num_steps=2
        )
    )
    carry = wrapped.init(KEY)
    memory = rollout.agents.policy_state(carry, "count")
    np.testing.assert_array_equal(memory[GROUP], np.zeros(2 * B))
    with pytest.raises(ValueError, match=r"`policy_map` \(count, random\), got"):
        rollout.agents.policy_state(carry, "blue")
    with pytest.raises(ValueError, match=r"`policy_map` \(none\), got 'count'"):
        rollout.agents.policy_state((), "count")


def test_invalid_values_raise():
    value = {GROUP: jnp.zeros((B, 3))}
    wrong = make_collector(agents.AllAct(), team_value=lambda *args: value)
    with pytest.raises(ValueError, match=r"of shape \(\d, 2\) for the group 'two', g"):
        wrong.step(wrong.init(KEY), PARAMS)

    @jax.eval_shape
    def check_messages():
        collector = make_collector(CASES["any"])
        carry = collector.init(KEY)
        pending = rollout.agents.Pending.init(collector, carry, PARAMS)
        _, trajectory = collector.collect_steps(carry, PARAMS, 3)
        with pytest.raises(ValueError, match="of `agent_transitions` if by group"):
            rollout.next_values(trajectory, jnp.zeros((3, B)), jnp.zeros(B))
        with pytest.raises(ValueError, match="`recorded_value_fn` must be given"):
            rollout.agents.agent_transitions(pending, trajectory)

    assert check_messages is None

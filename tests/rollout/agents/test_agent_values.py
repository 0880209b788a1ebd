"""Values of each agent's successor, against the value of every `next_obs`."""

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
    """Of small integers, so that no sum is rounded."""
    return weight * obs + state


def count(weight, obs, state, key):
    """Its memory is the number of its actions in the episode."""
    del key  # unused
    return obs.astype(jnp.int32) % 4, state + 1, {"value": critic(weight, obs, state)}


CASES = {"simultaneous": agents.AllAct(), "any": agents.ChanceEnv()}


def react(weight, obs, key):
    """Acts and values without a memory."""
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
def both_ends(name):
    """`next_values` of a case for both ends, in one program."""
    run = quick_jit(lambda collector: {x: find_values(collector, x) for x in ENDS})
    return jax.device_get(run(make_collector(CASES[name])))


def recorded(extras):
    return extras["value"]


def find_values(collector, end):
    """The trajectory, the group's rows and the values of their successors."""
    carry, every = collector.init(KEY), []
    pending = rollout.agents.Pending.init(collector, carry, PARAMS)
    for _ in range(2):
        carry, trajectory = collector.collect_steps(carry, PARAMS, T // 2)
        pending, rows = ENDS[end](pending, trajectory, recorded_value_fn=recorded)
        values = collector.value(carry, PARAMS)
        if not isinstance(values, dict):  # of each lane
            values = {GROUP: jnp.repeat(values[:, None], 2, axis=1)}
        last = rollout.agents.last_values(pending, values, recorded_value_fn=recorded)
        t = rows[GROUP]
        value = rollout.next_values(t, t.extras["value"], last[GROUP])
        every.append((trajectory, rows[GROUP], value))
    return jax.tree.map(lambda *x: jnp.concatenate(x), *every)


next_values = quick_jit(find_values, static_argnames="end")


def check(trajectory, rows, value, counts=True):
    """Compares with the values of all successors, one by one."""
    length = trajectory.info.agents.agent_length[..., MEMBERS].reshape(rows.mask.shape)
    length = np.where(counts, length, 0)
    weight = float(PARAMS["count"])
    # After the action, the memory counts it; an agent without a last observation has
    # its last one again, and the value of that.
    want = weight * rows.next_obs + length
    again = weight * rows.obs + length - counts
    want = np.where(rows.stale_next_obs, again, want)
    here = np.asarray(rows.mask & ~rows.terminated)
    np.testing.assert_array_equal(value[here], want[here])
    assert not np.any(rows.final_value[~rows.truncated | rows.terminated])
    assert np.any(rows.truncated & here)
    assert np.any(~rows.truncated & here)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", CASES)
def test_next_values_are_those_of_every_successor(name, end):
    check(*both_ends(name)[end])


def test_next_values_of_a_critic_without_memory_are_those_of_every_successor():
    policy = rollout.stateless_policy(react, value_fn=lambda weight, obs: weight * obs)
    collector = make_collector(CASES["any"], policy=policy)
    check(*jax.device_get(next_values(collector, "episode")), counts=False)


def test_value_of_a_lane_is_that_of_each_agent():
    def value(params, obs, state):
        return jnp.sum(obs[GROUP], axis=1)

    collector = make_collector(agents.AllAct(), team_value=value)
    _, rows, _ = jax.device_get(next_values(collector, "episode"))
    each = rows.final_value.reshape(T, B, 2)
    assert np.count_nonzero(each) > 0
    np.testing.assert_array_equal(each[..., 0], each[..., 1])


def test_end_of_a_batch_and_whole_episodes_tell_final_values():
    collector = make_collector(agents.AllAct())
    stream = rollout.Stream(
        collector,
        key=KEY,
        params=PARAMS,
        steps_per_batch=3 * B,
        at_batch_end="truncate",
    )
    batch = jax.device_get(next(stream).trajectory)
    cut = batch.truncated[-1] & ~batch.terminated[-1]
    obs = batch.next_obs[GROUP][-1]
    length = batch.info.agents.agent_length[-1][:, MEMBERS]
    want = float(PARAMS["count"]) * obs + length
    assert cut.any()
    np.testing.assert_array_equal(batch.final_value[GROUP][-1][cut], want[cut])

    @quick_jit
    def play(collector):
        carry = collector.init(KEY)
        return collector.collect_episodes(
            carry, PARAMS, 3, max_episode_steps=4, return_trajectory=True
        )[1].trajectory

    padded = jax.device_get(play(collector))
    assert padded.final_value[GROUP].shape == (4, 3, 2)
    assert not np.any(padded.final_value[GROUP][~padded.mask])


def test_state_of_a_policy_is_read_inside_other_policies():
    collector = make_collector(agents.AllAct())
    warmed = collector.replace(
        policy=rollout.policies.RandomWarmup(
            collector.policy, collector.env.action_space, num_steps=2
        )
    )
    carry = warmed.init(KEY)
    memory = rollout.agents.policy_state(carry, "count")
    np.testing.assert_array_equal(memory[GROUP], np.zeros(2 * B))
    with pytest.raises(ValueError, match=r"`policy_map` \(count, random\), got"):
        rollout.agents.policy_state(carry, "blue")
    with pytest.raises(ValueError, match=r"`policy_map` \(none\), got 'count'"):
        rollout.agents.policy_state((), "count")


def test_wrong_and_missing_values_are_refused():
    value = {GROUP: jnp.zeros((B, 3))}
    wrong = make_collector(agents.AllAct(), team_value=lambda *args: value)
    with pytest.raises(ValueError, match=r"of shape \(\d, 2\) for the group 'two', g"):
        wrong.step(wrong.init(KEY), PARAMS)

    @jax.eval_shape
    def refuse():
        collector = make_collector(CASES["any"])
        carry = collector.init(KEY)
        pending = rollout.agents.Pending.init(collector, carry, PARAMS)
        _, trajectory = collector.collect_steps(carry, PARAMS, 3)
        with pytest.raises(ValueError, match="of `agent_transitions` if by group"):
            rollout.next_values(trajectory, jnp.zeros((3, B)), jnp.zeros(B))
        with pytest.raises(ValueError, match="`recorded_value_fn` must be given"):
            rollout.agents.agent_transitions(pending, trajectory)

    assert refuse is None

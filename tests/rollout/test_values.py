"""Compares values of successors with the critic at every `next_obs`."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, WithCritic, on_a_gpu, quick_jit, raw
from jax.sharding import Mesh

import rollout
from rollout import envs
from rollout.kernel.state import values_where

PARAMS = jnp.float32(3.0)
B, T = 5, 40
# Options of `CountEnv`. By default some steps are truncated, terminated or both.
ENDINGS = {
    "some": {},
    "all at once": {"min_length": 9, "limit": 5},
    "every step": {"limit": 1},
    "never": {"limit": 1000},
}


def critic(params, obs, state):
    """Returns sums of small integers, which are exact."""
    memory = state[:, None] if isinstance(state, jax.Array) else 0.0
    return (params * (obs + memory) + 1.0)[:, 0]


def act(params, obs, key):
    action = jax.random.randint(key, obs.shape[:1], 0, 3)
    return action, {"value": critic(params, obs, ())}


def act_recurrent(params, obs, state, key):
    """Remembers the sum of the observations of the episode."""
    action, _ = act(params, obs, key)
    extras = {"value": critic(params, obs, state)}
    return action, state + obs[:, 0], extras


POLICIES = {
    "stateless": rollout.stateless_policy(
        act, value_fn=lambda params, obs: critic(params, obs, ())
    ),
    "recurrent": rollout.recurrent_policy(act_recurrent, jnp.zeros, value_fn=critic),
}


def make_collector(ending="some", policy="stateless", num_envs=B, **changes):
    env = envs.vectorize(CountEnv(**ENDINGS[ending]), num_envs)
    return rollout.Collector(env=env, policy=POLICIES[policy], **changes)


def make_critic_collector(value_fn, **options):
    """Creates a collector with another critic or without one."""
    collector = make_collector(**options)
    return collector.replace(policy=WithCritic(collector.policy, value_fn))


def init_and_collect(collector, num_steps=T, seed=1):
    carry = collector.init(jax.random.key(seed))
    return collector.collect_steps(carry, PARAMS, num_steps)


collect = quick_jit(init_and_collect, static_argnames="num_steps")


@quick_jit
def next_values(carry, trajectory):
    last_value = critic(PARAMS, carry.obs, carry.policy_state)
    return rollout.next_values(trajectory, trajectory.extras["value"], last_value)


def plain_next_values(trajectory, *, is_recurrent):
    """Computes the value of every `next_obs` in a loop in float64."""
    x = jax.tree.map(lambda x: np.asarray(x, np.float64), trajectory)
    values = np.zeros(x.reward.shape)
    for lane in range(values.shape[1]):
        memory = 0.0
        for t in range(len(values)):
            if is_recurrent:
                memory += x.obs[t, lane, 0]
            value = float(PARAMS) * (x.next_obs[t, lane, 0] + memory) + 1.0
            values[t, lane] = 0.0 if x.terminated[t, lane] else value
            if x.terminated[t, lane] or x.truncated[t, lane]:
                memory = 0.0
    return values


@pytest.mark.parametrize(
    ("ending", "policy"),
    [("some", "stateless"), *((ending, "recurrent") for ending in ENDINGS)],
)
def test_next_values_equal_the_critic_at_every_successor(ending, policy):
    carry, trajectory = jax.device_get(collect(make_collector(ending, policy)))
    expected = plain_next_values(trajectory, is_recurrent=policy == "recurrent")
    np.testing.assert_array_equal(next_values(carry, trajectory), expected)
    continues = trajectory.truncated & ~trajectory.terminated
    assert continues.any() == (ending != "never")
    assert not trajectory.final_value[~continues].any()


def test_critic_does_not_change_other_fields():
    carry, trajectory = collect(make_collector())
    expected = collect(make_critic_collector(None))
    got = carry, trajectory.replace(final_value=())
    chex.assert_trees_all_equal(raw(got), raw(expected))


def test_split_calls_have_equal_values():
    collector = make_collector(policy="recurrent")
    expected = next_values(*collect(collector))
    carry, first = collect(collector, 1)
    parts = [next_values(carry, first)]
    for _ in range(T - 1):
        carry, row = collector.collect_steps(carry, PARAMS, 1)
        parts.append(next_values(carry, row))
    np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_fold_and_step_contain_final_values():
    collector = make_collector()
    trajectory = jax.device_get(collect(collector)[1])
    total = lambda acc, t: acc + t.final_value  # noqa: E731

    @quick_jit
    def run(collector, key):
        start = collector.init(key), PARAMS
        _, folded = collector.fold_steps(*start, total, jnp.zeros(B), num_steps=T)
        return folded, collector.step(*start)[1].final_value

    folded, row = run(collector, jax.random.key(1))
    np.testing.assert_array_equal(folded, trajectory.final_value.sum(0))
    np.testing.assert_array_equal(row, trajectory.final_value[0])


def test_gpu_branch_has_equal_values():
    """`lax.switch` selects a branch for no lane, some lanes or all lanes."""
    env, obs = make_collector().env, np.arange(40, dtype=np.float32)[:, None]
    policy = WithCritic(rollout.random_policy(env.action_space), critic)
    compute = lambda flags: values_where(env, policy, PARAMS, obs, (), flags)  # noqa: E731
    cpu_values, gpu_values = quick_jit(compute), quick_jit(lambda flags: compute(flags))
    for num_flags in (0, 2, 40):
        flags = np.arange(40) < num_flags
        expected = np.where(flags, critic(float(PARAMS), obs, ()), 0.0)
        np.testing.assert_array_equal(cpu_values(flags), expected)
        with on_a_gpu():
            np.testing.assert_array_equal(gpu_values(flags), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_sharded_values_equal_one_device():
    collector = make_collector("some", "recurrent", num_envs=16)
    mesh = Mesh(np.asarray(jax.devices()), ("lanes",))
    sharded = rollout.shard(collector, mesh)
    expected = next_values(*collect(collector))
    np.testing.assert_array_equal(next_values(*collect(sharded)), expected)
    carry = sharded.init(jax.random.key(1))
    program = jax.jit(lambda carry: sharded.collect_steps(carry, PARAMS, T)[1])
    text = program.lower(carry).compile().as_text()
    assert not any(name in text for name in ("all-reduce", "all-gather"))


def test_values_have_zero_gradients():
    def total(params, value_fn):
        collector = make_critic_collector(
            value_fn or (lambda _, *args: critic(params, *args))
        )
        carry = collector.init(jax.random.key(1))
        trajectory = collector.collect_steps(carry, params, T)[1]
        return trajectory.final_value.sum() + 0.0 * params

    @quick_jit
    def run(params):  # the second value function closes over the parameters
        return [jax.value_and_grad(total)(params, x) for x in (critic, None)]

    for value, gradient in run(PARAMS):
        assert value > 0
        assert gradient == 0


def test_max_episode_steps_bootstraps():
    @quick_jit
    def play(collector):
        carry = collector.init(jax.random.key(1))
        return collector.collect_episodes(
            carry, PARAMS, 9, max_episode_steps=4, return_trajectory=True
        )

    _, episodes = jax.device_get(play(make_collector("never")))
    t = episodes.trajectory
    assert episodes.finished.any()
    assert not episodes.finished.all()
    bootstraps = t.truncated & ~t.terminated
    assert bootstraps.sum() == (~episodes.finished).sum()
    expected = np.where(
        bootstraps, critic(float(PARAMS), np.full((1, 1), 4.0), ()), 0.0
    )
    np.testing.assert_array_equal(t.final_value, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(
    ("policy", "at_batch_end"),
    [("stateless", "continue"), ("recurrent", "truncate"), ("recurrent", "reset")],
)
def test_stream_batches_have_values_of_successors(policy, at_batch_end):
    collector = make_collector("some", policy)
    options = {"steps_per_batch": 7 * B, "at_batch_end": at_batch_end}
    options |= {"total_steps": 20 * B, "key": jax.random.key(3)}
    with rollout.Stream(collector, params=PARAMS, **options) as stream:
        for batch in stream:
            t = batch.trajectory
            values = next_values(stream.state()["carry"], t)
            expected = plain_next_values(t, is_recurrent=policy == "recurrent")
            mask = np.asarray(t.mask)
            np.testing.assert_array_equal(values[mask], expected[mask])


def test_unread_values_are_not_computed():
    collector = make_critic_collector(lambda params, obs, state: jnp.tanh(obs[:, 0]))
    carry = jax.eval_shape(collector.init, jax.random.key(0))
    run = functools.partial(collector.collect_steps, num_steps=3)
    programs = jax.jit(run), jax.jit(lambda *args: run(*args)[1].reward)
    full_text, reward_text = (x.lower(carry, PARAMS).as_text() for x in programs)
    assert "tanh" in full_text
    assert "tanh" not in reward_text

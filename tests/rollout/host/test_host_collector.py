"""`HostCollector` against the kernel: the same rows, from NumPy."""

import functools

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PlainPolicy, quick_jit
from host_count import (
    CALLS,
    KEY,
    POLICY,
    HostCount,
    SeedCount,
    assert_same,
    assert_same_carry,
    in_jax,
    on_host,
)
from space_envs import SampledVectorEnv

import rollout
from rollout import envs
from rollout.host import HostCollector

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("name", CALLS)
def test_call_returns_what_the_kernel_returns(name):
    kernel, host = in_jax(), on_host()
    run = quick_jit(lambda carry: CALLS[name](kernel, carry))
    want, carry = kernel.init(KEY), host.init(KEY)
    assert_same_carry(carry, want)
    for _ in range(2):  # the second call goes on where the first one stopped
        (want, *expected), (carry, *results) = run(want), CALLS[name](host, carry)
        assert_same_carry(carry, want)
        assert_same(results, expected)


def test_policy_state_of_a_carry_may_be_replaced_and_nothing_else():
    def go_on(collector):
        carry, _ = collector.collect_steps(collector.init(KEY), None, 5)
        carry = carry.replace(policy_state=carry.policy_state + 100)
        return collector.collect_steps(carry, None, 9)

    host = on_host()
    (carry, rows), (want, expected) = go_on(host), go_on(in_jax())
    assert_same(rows, expected)
    assert_same_carry(carry, want)
    assert rows.extras["count"].max() >= 100
    changes = {"obs": carry.obs + 1, "step": 3, "key": jax.random.key(9)}
    changes["episode"] = carry.episode.replace(episode_length=np.zeros(4, np.int32))
    for name, value in changes.items():
        with pytest.raises(
            ValueError, match=rf"`carry.{name}` must be as the latest call"
        ):
            host.collect_steps(carry.replace(**{name: value}), None, 1)
    host.collect_steps(jax.device_get(carry), None, 1)  # equal, in other arrays


def test_one_call_is_two_calls_is_single_steps():
    whole, parts = on_host(), on_host()
    _, expected = jax.device_get(whole.collect_steps(whole.init(KEY), None, 20))
    carry, *rows = parts.collect_steps(parts.init(KEY), None, 13)
    for _ in range(7):
        carry, row = parts.step(carry, None)
        rows.append(jax.tree.map(lambda x: np.asarray(x)[None], row))
    got = jax.tree.map(lambda *x: np.concatenate(x), *jax.device_get(rows))
    assert_same(got, expected)
    assert expected.terminated.any()
    assert expected.truncated.any()


def test_environment_that_resets_itself_gives_masked_out_rows():
    """Its rows, without masked-out ones, are those of one that resets on request."""
    collectors = on_host(2), on_host(2, resets_itself=True)
    rows = []
    for collector in collectors:
        t = jax.device_get(collector.collect_steps(collector.init(KEY), None, 60)[1])
        assert all(not np.any(x[~t.mask]) for x in jax.tree.leaves(t))
        t = t.replace(extras={"count": t.extras["count"]}, action=(), info=())
        lanes = [
            jax.tree.map(
                lambda x, lane=lane, mask=t.mask: x[mask[:, lane], lane][:40], t
            )
            for lane in (0, 1)
        ]
        rows.append(lanes)
    np.testing.assert_array_equal(~t.mask[1:], t.done[:-1])
    assert_same(rows[1], rows[0])


class NanAtReset(HostCount):
    """Returns NaN as the reward of steps that only reset an environment."""

    def step(self, action):
        result = super().step(action)
        return result._replace(reward=np.where(result.mask, result.reward, np.nan))


def test_reward_of_a_masked_out_row_is_ignored():
    host = HostCollector(env=NanAtReset(2, resets_itself=True), policy=POLICY)
    rows = host.collect_steps(host.init(KEY), None, 20)[1]
    assert not np.all(rows.mask)
    n = np.asarray(rows.episode_length)
    np.testing.assert_array_equal(rows.episode_return, n * (n + 1) / 2)


@pytest.mark.slow
def test_policy_that_draws_per_episode_gets_the_kernels_keys():
    def apply(params, obs, state, key):
        drawn = jax.vmap(jax.random.uniform)(state.value)
        action = jnp.zeros(len(obs), jnp.int32)
        return rollout.types.PolicyStep(action, state, {"drawn": drawn})

    policy = PlainPolicy(lambda num_envs: rollout.types.EpisodeKey(), apply)
    env = envs.vectorize(SeedCount(), 4, auto_reset="select")
    kernel = rollout.Collector(env=env, policy=policy)
    host = HostCollector(env=HostCount(4), policy=policy)
    options = {"max_episode_steps": 5, "return_trajectory": True}
    with jax.debug_key_reuse(False):
        rows = [x.collect_steps(x.init(KEY), None, 20) for x in (host, kernel)]
        episodes = [
            x.collect_episodes(carry, None, 5, **options)[1]
            for x, (carry, _) in zip((host, kernel), rows, strict=True)
        ]
        assert_same(*[x for _, x in rows])
        assert_same(*episodes)


def test_only_the_last_carry_is_taken():
    """Another collector may also step the environments, or begin with them."""
    collector, separate = on_host(), on_host()
    first = collector.init(KEY)
    second, _ = collector.step(first, None)
    sharing = collector.replace(record_fn=lambda t: t.replace(next_obs=()))
    third, before = collector.collect_steps(second, None, 3)  # nobody else began yet
    assert before.next_obs.size > 0

    def refuse(collector, carry):
        with pytest.raises(ValueError, match="`carry` must be the result of the la"):
            collector.step(carry, None)

    refuse(collector, first)
    refuse(separate, third)
    _, after = sharing.collect_steps(sharing.init(KEY), None, 4)
    refuse(collector, third)
    want = on_host()
    _, want = want.collect_steps(want.init(KEY), None, 4)
    assert_same(after.replace(extras=()), want.replace(next_obs=(), extras=()))


def test_rows_of_a_call_that_was_cut_short_outlive_another_collector():
    env = HostCount(4)
    training, testing = (HostCollector(env=env, policy=POLICY) for _ in range(2))
    carry = training.init(KEY)
    with pytest.raises(ZeroDivisionError):
        training.fold_steps(carry, None, lambda acc, row: 1 // 0, 0, num_steps=5)
    rollout.evaluate(testing, None, KEY, 3, max_episode_steps=6)
    carry, rows = training.recover()
    assert rows.mask.sum() == 20
    _, rows = training.step(carry, None)
    assert rows.first.all()  # their episodes are gone


def test_stale_carry_keeps_its_observations():
    """The environments overwrite the memory of their observations."""
    host = on_host()
    carry, rows = host.collect_steps(host.init(KEY), None, 3)
    host.collect_steps(carry, None, 1)
    expected = np.where(rows.done[-1, :, None], 0, rows.next_obs[-1])
    np.testing.assert_array_equal(carry.obs, expected)


def test_every_episode_of_a_lane_has_another_seed():
    seeds = []

    class Recording(HostCount):
        def reset(self, values, mask):
            seeds.append(int(values[0]))
            return super().reset(values, mask)

    env = Recording(1, min_length=1, max_length=1)
    host = HostCollector(env=env, policy=POLICY)
    host.collect_steps(host.init(KEY), None, 300)
    assert len(seeds) == len(set(seeds)) == 301


def test_reset_at_a_batch_end_skips_lanes_at_the_start_of_an_episode():
    host = on_host(min_length=5, max_length=5)
    carry, _ = host.collect_steps(host.init(KEY), None, 5)
    _, rows = host.collect_steps(carry, None, 1, at_batch_end="reset")
    np.testing.assert_array_equal(rows.episode_id[0], 4 + np.arange(4))


def test_no_episode_starts_after_min_steps():
    host = on_host(2, min_length=5, max_length=5)
    carry, episodes = host.collect_episodes(host.init(KEY), None, 9, min_steps=10)
    assert np.sum(episodes.mask) == 2
    assert carry.step == 5


def test_compile_does_not_change_later_rows():
    rows = []
    for compiles in (False, True):
        host = on_host()
        carry, _ = host.collect_steps(host.init(KEY), None, 520)
        if compiles:
            host.compile(carry, None)
        rows.append(host.step(carry, None)[1])
    assert_same(*rows)


def test_time_limit_of_the_environment_finishes_an_episode_at_max_episode_steps():
    host = on_host(min_length=9, max_length=9, limit=6)
    _, episodes = host.collect_episodes(host.init(KEY), None, 5, max_episode_steps=6)
    assert episodes.truncated.all()
    assert episodes.finished.all()


SPACES = {
    "start": (
        gymnasium.spaces.Discrete(2, start=10),
        lambda number: jnp.int32([10, 11, 10]) - 10 * number,
        r"in lane 0 `action` must be in \[10, 11\], got 0\. Count from `space.start`",
    ),
    "nan": (
        gymnasium.spaces.Box(-np.inf, np.inf, ()),
        lambda number: jnp.float32([0, jnp.where(number, jnp.nan, 1e30), 0]),
        r"in lane 1 `action` must be finite, got nan",
    ),
    "part": (
        gymnasium.spaces.Dict(
            a=gymnasium.spaces.MultiDiscrete([2, 3]), b=gymnasium.spaces.Box(0, 1, ())
        ),
        lambda number: {
            "a": jnp.int32([[1, 2], [0, 0], [0, 2 + number]]),
            "b": jnp.float32([0, 1, 1]),
        },
        r"in lane 2 `action\['a'\]\[1\]` must be in \[0, 2\], got 3",
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_actions_outside_of_the_space_never_reach_the_environments(name):
    space, make, message = SPACES[name]

    def act(first_bad, obs, step, key):
        return make((step[0] >= first_bad).astype(jnp.int32)), step + 1

    policy = rollout.recurrent_policy(act, lambda num_envs: jnp.zeros(num_envs, int))
    host = HostCollector(env=SampledVectorEnv(space), policy=policy)
    carry = host.init(KEY)
    with pytest.raises(ValueError, match=message):
        host.collect_steps(carry, np.int32(2), 3)
    carry, rows = host.recover()
    np.testing.assert_array_equal(rows.episode_length[:, 0], [1, 2])
    _, rows = host.collect_steps(carry, np.int32(9), 2)
    np.testing.assert_array_equal(rows.episode_length[:, 0], [3, 4])


def test_actions_may_be_out_by_rounding():
    env = HostCount(3)
    env.action_space = envs.Box(-0.3, 0.7, ())
    action = np.nextafter(np.float32([-0.3, 0.7, 0.7]), np.float32([-1, 1, 0]))
    policy = rollout.stateless_policy(
        lambda scale, obs, key: jnp.asarray(action) * scale
    )
    host = HostCollector(env=env, policy=policy)
    carry, _ = host.collect_steps(host.init(KEY), np.float32(1), 2)
    with pytest.raises(
        ValueError, match=r"in lane 0 `action` must be in \[-0.3, 0.7\]"
    ):
        host.collect_steps(carry, np.float32(1.00001), 1)


def normalising():
    """In JAX and on the host."""
    env = envs.NormalizeReward(envs.NormalizeObs(in_jax().env), gamma=0.9)
    kernel = rollout.Collector(env=env, policy=POLICY)
    env = envs.NormalizeHostEnv(HostCount(4), gamma=0.9)
    return kernel, HostCollector(env=env, policy=POLICY)


def test_normalised_rows_are_those_of_the_kernel():
    pair = normalising()
    carries = [x.init(KEY) for x in pair]
    for _ in range(2):
        both = zip(pair, carries, strict=True)
        results = [x.collect_steps(carry, None, 20) for x, carry in both]
        carries = [carry for carry, _ in results]
        rows = [x.replace(info=()) for _, x in results]
        # Sums over four lanes in another order.
        chex.assert_trees_all_close(*rows, rtol=1e-4, atol=1e-5)
        chex.assert_trees_all_equal(*[x.episode_return for x in rows])
    # One observation, as a robot gives it, or some: what the policy sees of them.
    statistics = jax.device_get(carries[0].env_state.env_state.statistics.value)
    for raw in (np.float32([3.0]), np.float32([[[1.0], [5.0]]])):
        want = (raw - statistics.mean) / np.sqrt(statistics.var + 1e-8)
        for collector, carry in zip(pair, carries, strict=True):
            env = collector.freeze(carry).env
            got = quick_jit(env.normalize_obs)(raw)
            np.testing.assert_allclose(got, want, rtol=1e-4)
            with pytest.raises(ValueError, match="`raw` must have the shape"):
                env.normalize_obs(np.zeros(2, np.float32))
            with pytest.raises(ValueError, match="needs fixed statistics"):
                collector.env.normalize_obs(raw)


class Halved(HostCount):
    """Halves the rewards that a learner sees."""

    def step(self, action):
        result = super().step(action)
        return result._replace(reward=result.reward / 2, raw_reward=result.reward)


def test_returns_are_of_raw_rewards_whatever_scales_them_first():
    host = HostCollector(env=envs.NormalizeHostEnv(Halved(4)), policy=POLICY)
    rows = host.collect_steps(host.init(KEY), None, 6)[1]
    length = np.asarray(rows.episode_length)
    np.testing.assert_array_equal(rows.episode_return, length * (length + 1) / 2)


@pytest.mark.slow
def test_normalising_host_collector_is_evaluated_with_fixed_statistics():
    kernel, host = normalising()
    carries = [x.collect_steps(x.init(KEY), None, 20)[0] for x in (kernel, host)]
    with pytest.raises(ValueError, match="that updates them: pass"):
        rollout.evaluate(host, None, KEY, 9)
    with pytest.raises(ValueError, match="must have statistics of the same wrapper"):
        host.freeze(carries[0])
    learnt = carries[1].env_state[1].statistics
    frozen = host.freeze(carries[1])
    stats = rollout.evaluate(frozen, None, KEY, 9)
    want = rollout.evaluate(kernel.freeze(carries[0]), None, KEY, 9)
    assert stats.returns.mean == want.returns.mean
    chex.assert_trees_all_equal(frozen.init(KEY).env_state[1].statistics, learnt)
    with pytest.raises(ValueError, match="another collector steps these"):
        host.step(carries[1], None)


def test_faulty_rows_do_not_count_in_normalised_observations():
    def fault_fn(number, env):
        return "nan" if (number, env) == (4, 1) else None

    env = envs.NormalizeHostEnv(HostCount(2, fault_fn=fault_fn))
    host = HostCollector(env=env, policy=POLICY, on_fault="restart")
    carry, _ = host.collect_steps(host.init(KEY), None, 10)
    assert host.fault_stats.restarts == 1
    leaves = jax.tree.leaves(carry.env_state)
    assert all(np.isfinite(x).all() for x in leaves)


CART_POLE = functools.partial(gymnasium.make, "CartPole-v1")
NOTED = {"record_info": {"lives": np.int64(0)}}
LONGEST = {"longest": rollout.Accumulator(lambda n: jnp.zeros(n), lambda x, t: x + 1)}
SHORT = {
    "record_fn": lambda t: t.replace(next_obs=(), info={"square": t.reward**2}),
    "accumulators": LONGEST,
}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: HostCount(4), SHORT),
        (lambda: envs.from_gymnasium(CART_POLE, num_envs=4, **NOTED), {}),
        (lambda: envs.make_worker_envs([CART_POLE] * 4, **NOTED), {"num_ready": 2}),
    ],
)
def test_buffer_begins_with_the_rows_that_a_host_collector_plays(make, options):
    env = make()
    policy = POLICY if options is SHORT else rollout.random_policy(env.action_space)
    collector = HostCollector(env=env, policy=policy, **options)
    try:
        carry = collector.init(KEY)
        num_columns = options.get("num_ready") or 4
        buffer = rollout.buffers.ReplayBuffer(40, num_columns)
        state = buffer.init(collector)
        carry, trajectory = collector.collect_steps(carry, None, 3)
        state = buffer.add(state, trajectory)
        assert buffer.size(state) == np.sum(trajectory.mask)
        row = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), trajectory
        )
        assert collector.row_shape(None) == row
    finally:
        collector.close()

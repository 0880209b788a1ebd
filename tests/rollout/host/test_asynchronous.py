"""`num_ready`: nothing lost, nothing twice, and no episode favoured."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TwoLengthEnv
from host_count import HostCount, SeedCount, assert_same
from simulated import simulate_latency

import rollout
from rollout.envs.host.types import EnvFault

KEY = jax.random.key(11)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def act(params, obs, count, key):
    """Counts the steps of every lane, so that a state off by one would show."""
    return jnp.zeros(len(obs), jnp.int32), count + 1, {"count": count}


POLICY = rollout.recurrent_policy(act, lambda num_envs: jnp.zeros(num_envs, int))


def exponential(rng, env_id, number):
    return rng.exponential(1.0 + env_id)  # some are slower than others


def make(env=None, num_envs=5, num_ready=2, latency_fn=exponential, **options):
    env = SeedCount() if env is None else env
    simulated = simulate_latency(env, num_envs, latency_fn=latency_fn)
    options = {"policy": POLICY, "num_ready": num_ready, **options}
    return rollout.HostCollector(env=simulated, **options)


def synchronous(num_envs):
    env = simulate_latency(SeedCount(), num_envs)
    return rollout.HostCollector(env=env, policy=POLICY)


def collect(collector, *sizes):
    """The rows of some calls one after the other, NumPy."""
    carry, parts = collector.init(KEY), []
    for size in sizes:
        carry, rows = collector.collect_steps(carry, None, size)
        parts.append(jax.device_get(rows))
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def columns(rows):
    """The rows of each environment, in the order of time."""
    rows = jax.device_get(rollout.by_env(rows))
    for env in range(rows.mask.shape[1]):
        mask = rows.mask[:, env]
        yield jax.tree.map(lambda x, m=mask, e=env: x[: m.sum(), e], rows), mask


def test_each_environment_has_every_row_once_and_in_order():
    rows = collect(make(), 60, 1, 39)
    assert rows.mask.all()
    assert all(len(set(ids)) == 2 for ids in rows.info.env_id)  # none twice in a row
    assert (np.diff(rows.info.time.max(axis=1)) >= 0).all()
    counts = []
    for row, mask in columns(rows):
        counts.append(mask.sum())
        assert mask[: mask.sum()].all()
        # Every row goes on where the one before it stopped, or begins an episode.
        first = np.concatenate([[True], row.done[:-1]])
        np.testing.assert_array_equal(row.first, first)
        np.testing.assert_array_equal(row.obs[first], 0.0)
        np.testing.assert_array_equal(
            row.obs[1:][~first[1:]], row.next_obs[:-1][~first[1:]]
        )
        np.testing.assert_array_equal(row.extras["count"], row.episode_length - 1)
        np.testing.assert_array_equal(row.reward, row.episode_length)
        ids = row.episode_id[first]
        np.testing.assert_array_equal(np.diff(ids), 5)
    assert min(counts) > 0
    assert counts[0] > counts[4]  # the fast ones more often
    assert sum(counts) == 200


def test_calls_do_not_matter():
    """Actions in flight at the end of a call are answered in the next one."""
    assert_same(collect(make(), 7, 1, 22), collect(make(), 30))


def test_with_all_ready_it_is_the_synchronous_collector():
    rows = collect(make(num_ready=5, latency_fn=None), 20)
    host = synchronous(5)
    expected = jax.device_get(host.collect_steps(host.init(KEY), None, 20)[1])
    assert_same(rows.replace(info=()), expected.replace(info=()))


@pytest.mark.parametrize("num_episodes", [slow(1), slow(2), 3, slow(7), 12])
def test_first_episodes_that_start_are_played(num_episodes):
    collector = make(num_envs=4, num_ready=2)
    carry = collector.init(KEY)
    for _ in range(2):
        carry, episodes = collector.collect_episodes(
            carry, None, num_episodes, max_steps=100
        )
        assert episodes.mask.all()
        assert episodes.finished.all()
        length = np.asarray(episodes.episode_length)
        np.testing.assert_array_equal(
            episodes.episode_return, length * (length + 1) / 2
        )
    carry, rows, _ = collector.collect_padded_episodes(carry, None, 5, max_length=9)
    lengths = np.asarray(rows.mask).sum(axis=0)
    assert (lengths >= 2).all()
    np.testing.assert_array_equal(rows.done.sum(axis=0), 1)
    _, rows = collector.collect_steps(carry, None, 10)
    assert rows.mask.all()


def test_episodes_are_those_of_their_seeds_however_slow_a_lane_is():
    """Episode k has the length that it has where all step at once."""
    host = synchronous(4)
    _, expected = host.collect_episodes(host.init(KEY), None, 12, max_steps=100)
    collector = make(num_envs=4, num_ready=3)
    _, got = collector.collect_episodes(collector.init(KEY), None, 12, max_steps=100)
    np.testing.assert_array_equal(got.episode_length, expected.episode_length)


@pytest.mark.slow
def test_short_episodes_are_not_favoured():
    """Half have 2 steps and half 20, so the mean is 11; those that end first: fewer."""
    env = TwoLengthEnv()
    collector = make(env, num_envs=16, num_ready=4, latency_fn=exponential)
    carry, lengths = collector.init(KEY), []
    for _ in range(25):
        carry, episodes = collector.collect_episodes(carry, None, 40, max_steps=100)
        lengths.append(np.asarray(episodes.episode_length))
    lengths = np.concatenate(lengths)
    # The deviation of the mean of 1000 is 9 / sqrt(1000).
    assert abs(lengths.mean() - 11.0) < 4 * 9 / np.sqrt(1000)


class Late(HostCount):
    """One whose environments answer in the order of sending, except for slow ones."""

    def __init__(self, *args, slow=(), **options):
        super().__init__(*args, **options)
        self.slow, self.queue = set(slow), []

    def reset(self, seeds, mask):
        self.queue = [x for x in self.queue if not mask[x[0]]]
        return super().reset(seeds, mask)

    def send(self, action, env_id):
        self.queue += [(int(i), a) for i, a in zip(env_id, action, strict=True)]

    def receive(self, num_ready, timeout=None):
        ready = [x for x in self.queue if x[0] not in self.slow][:num_ready]
        if len(ready) < num_ready:
            raise TimeoutError
        self.queue = [x for x in self.queue if x not in ready]
        env_id = np.array([i for i, _ in ready], np.int32)
        others = np.setdiff1d(np.arange(self.num_envs), env_id)
        kept = {x: getattr(self, x)[others].copy() for x in ("obs", "over", "number")}
        self.over[others] = False
        result = self.step(np.zeros(self.num_envs, np.int32))
        for name, value in kept.items():
            getattr(self, name)[others] = value
        causes = {i: x for i, x in result.causes.items() if i in env_id}
        fields = [x[env_id] for x in result[:5]]
        return type(result)(*fields, {}, None, causes), env_id


def late(**options):
    env = {k: options.pop(k) for k in ("slow", "fault_fn") if k in options}
    options = {"num_ready": 2, "policy": POLICY, **options}
    return rollout.HostCollector(env=Late(5, **env), **options)


def test_too_few_are_ready():
    collector = late(slow=range(4), timeout=3.0)
    carry = collector.init(KEY)
    with pytest.raises(TimeoutError, match=r"`num_ready`=2 .* `timeout`=3.0 s"):
        collector.collect_steps(carry, None, 5)
    collector.env.slow.clear()
    carry, rows = collector.recover()
    assert rows is None
    _, rows = collector.collect_steps(carry, None, 5)
    assert rows.mask.all()  # no action in flight is lost


def test_faults_are_masked_where_they_were_served():
    def fault_fn(number, env):
        return RuntimeError("no") if env == 3 and number in (3, 9) else None

    collector = late(fault_fn=fault_fn, on_fault="restart", accumulators={
        "sum": rollout.Accumulator(jnp.zeros, lambda x, t: x + t.reward)
    })  # fmt: skip
    rows = collect(collector, 40)
    stats = collector.fault_stats
    assert (stats.faulty_episodes, stats.restarts) == (2, 2)
    assert (~rows.mask).sum() == stats.lost_steps >= 2
    np.testing.assert_array_equal(rows.accumulated["sum"], rows.episode_return)
    for row, _ in columns(rows):
        np.testing.assert_array_equal(row.reward, row.episode_length)


def test_fault_that_is_raised_keeps_the_rows():
    def fault_fn(number, env):
        return RuntimeError("no") if (env, number) == (0, 3) else None

    collector = late(fault_fn=fault_fn)
    carry = collector.init(KEY)
    with pytest.raises(EnvFault, match="environment 0"):
        collector.collect_steps(carry, None, 20)
    carry, rows = collector.recover()
    assert 0 < rows.mask.sum() < rows.mask.size
    _, rows = collector.collect_steps(carry, None, 20)
    assert rows.mask.all()


def test_wrong_arguments_are_rejected():
    with pytest.raises(ValueError, match="`num_ready` must be at most 5, got 6"):
        make(num_ready=6)
    with pytest.raises(ValueError, match="`timeout` must be a finite number of sec"):
        make(timeout="3")
    with pytest.raises(ValueError, match="`env` must be an `AsyncHostVectorEnv`"):
        rollout.HostCollector(env=HostCount(2), policy=POLICY, num_ready=1)
    with pytest.raises(ValueError, match="`rows` must be of a `HostCollector` with"):
        rollout.by_env(collect(make(), 2).replace(info={}))
    with pytest.raises(ValueError, match="must step all environments together"):
        rollout.Stream(make(), key=KEY, steps_per_batch=10)


def test_targets_of_each_environment_look_ahead():
    rows = rollout.by_env(collect(make(), 50))
    returns = rollout.discounted_returns(rows, gamma=1.0)
    ended = np.asarray(rows.episode_return)
    for env in range(5):
        length = np.asarray(rows.episode_length)[:, env]
        for t in np.flatnonzero(np.asarray(rows.first)[:, env]):
            end = t + np.argmax(np.asarray(rows.done)[t:, env])
            if rows.done[end, env] and length[end] == end - t + 1:
                np.testing.assert_allclose(returns[t, env], ended[end, env])


def test_episodes_begin_while_steps_are_in_flight():
    for env in (Late(5), simulate_latency(SeedCount(), 5)):
        policy = rollout.random_policy(env.action_space)
        collector = rollout.HostCollector(env=env, policy=policy, num_ready=2)
        for _ in range(2):
            carry, _ = collector.collect_steps(collector.init(KEY), None, 7)
            for _ in range(2):
                carry, episodes = collector.collect_episodes(
                    carry, None, 3, max_steps=9
                )
                assert episodes.mask.all()


class Fixed(Late):
    """One that returns two at a time, neither more nor fewer."""

    batch_size = 2

    def receive(self, num_ready, timeout=None):
        assert num_ready == self.batch_size
        return super().receive(num_ready, timeout)


def test_where_the_number_is_fixed_idle_environments_play_on():
    collector = rollout.HostCollector(env=Fixed(5), policy=POLICY, num_ready=2)
    carry = collector.init(KEY)
    for num_episodes in (1, 7):
        carry, episodes = collector.collect_episodes(
            carry, None, num_episodes, max_steps=100
        )
        assert episodes.finished.all()
    with pytest.raises(ValueError, match="`batch_size` of the environment, 2, got 3"):
        rollout.HostCollector(env=Fixed(5), policy=POLICY, num_ready=3)

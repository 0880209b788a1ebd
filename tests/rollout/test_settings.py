"""Tests with settings of JAX, without `jit` and with several threads."""

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CountEnv, make_collector, quick_jit
from flax import struct

import rollout
from rollout import envs
from rollout.targets import explained_variance

first_action = rollout.stateless_policy(
    lambda params, obs, key: jnp.zeros_like(obs[:, 0], int)
)


@pytest.mark.slow
def test_empty_statistics_pass_debug_nans():
    collector = make_collector("count")
    carry = collector.init(jax.random.key(0))
    with jax.debug_nans(True):
        stats = rollout.summarize(collector.collect_steps(carry, None, 1)[1])
        assert stats.num_episodes == 0
        assert np.isnan(
            [stats.returns.mean, stats.returns.ci_low, stats.lengths.min]
        ).all()
        stream = rollout.Stream(collector, key=jax.random.key(0), steps_per_batch=16)
        assert np.isnan(next(stream).stats.returns.mean)
        assert np.isnan(stream.stats.collected.returns.mean)


def test_undefined_traced_statistics_pass_debug_nans():
    ones, no_rows = np.ones(3, np.float32), np.zeros(3, bool)
    window = rollout.EpisodeWindow.init(2)

    def compute(window, target):
        variances = [explained_variance(target, target, x) for x in (None, no_rows)]
        returns = window.returns
        return *variances, returns.mean, returns.std, returns.ci_low

    with jax.debug_nans(True):
        values = jax.device_get(quick_jit(compute)(window, ones))
        np.testing.assert_array_equal(values, -np.inf)
    assert np.isnan(window.returns.mean)


@pytest.mark.very_slow
@pytest.mark.usefixtures("key_reuse")
def test_stream_and_profile_run_without_jit():
    collector, batches = make_collector("count", 2).replace(policy=first_action), []
    for disabled in (True, False):
        with jax.disable_jit(disabled):
            stream = rollout.Stream(collector, key=jax.random.key(0), steps_per_batch=6)
            batches.append(np.asarray(next(stream).trajectory.reward))
            if disabled:
                key = jax.random.key(1)
                parts = rollout.profile(collector, None, key, 2, num_repeats=1)
                assert parts.total > 0
    np.testing.assert_array_equal(*batches)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_forward_derivative_of_the_return():
    @struct.dataclass
    class Pay(CountEnv):
        """An environment with a constant reward."""

        pay: jax.Array = 1.0

        def step(self, key, state, action):
            return super().step(key, state, action).replace(reward=self.pay * 1.0)

    def mean_return(pay):
        env = envs.vectorize(Pay(pay=pay), 4)
        collector = make_collector("count", 4).replace(env=env)
        carry = collector.init(jax.random.key(0))
        episodes = collector.collect_episodes(carry, None, 6, max_episode_steps=20)[1]
        return episodes.episode_return.mean(), episodes.episode_length.mean()

    (value, length), (derivative, _) = jax.jvp(mean_return, (2.0,), (1.0,))
    assert derivative == pytest.approx(float(length))
    assert value == pytest.approx(2.0 * float(length))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda pay: mean_return(pay)[0])(2.0)


def make_stream(record_fn=None, **options):
    collector = make_collector("count").replace(record_fn=record_fn)
    options = {"key": jax.random.key(0), "steps_per_batch": 16, **options}
    return rollout.Stream(collector, **options)


def test_params_are_set_from_several_threads():
    stream = make_stream(params=jnp.float32(0))

    def set_params():
        for _ in range(50):
            stream.set_params(jnp.float32(1))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        for _ in range(4):
            pool.submit(set_params)
    assert next(stream).params_version == 200


def test_next_waits_for_the_next_of_another_thread():
    entered, leave = threading.Event(), threading.Event()

    def wait_for_leave(transition):
        """Blocks while the first `next` traces it."""
        entered.set()
        leave.wait(30)
        return transition

    stream, batches = make_stream(record_fn=wait_for_leave), []
    threads = [
        threading.Thread(target=lambda: batches.append(next(stream))) for _ in range(2)
    ]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join()
    assert stream.steps == 32
    first_ids, second_ids = (np.asarray(x.trajectory.episode_id) for x in batches)
    assert (first_ids <= second_ids).all()
    assert not np.array_equal(*(x.trajectory.episode_length for x in batches))

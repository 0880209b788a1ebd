"""`RayCollector` with a local replacement for Ray, and with Ray."""

import functools
import itertools
import os
import pathlib
import signal
import sys
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import remote_cases as cases
from host_count import KEY
from host_envs import wait_until_gone

import rollout

SUPPORT = pathlib.Path(cases.__file__).parent
B, T = 4, 6
summarize = jax.jit(rollout.summarize)
OPTIONS = {"key": KEY, "num_actors": 2, "steps_per_batch": B * T}


@pytest.fixture
def local_ray(monkeypatch):
    ray = cases.LocalRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def make_ray_collector(make_collector=cases.on_host, **options):
    return rollout.host.RayCollector(make_collector, **{**OPTIONS, **options})


def take(collector, num_batches):
    return list(itertools.islice(collector, num_batches))


def collect(collector, num_batches, actor):
    """Returns the trajectories that an actor collects, as NumPy arrays."""
    carry, trajectories = collector.init(jax.random.fold_in(KEY, actor)), []
    for _ in range(num_batches):
        carry, trajectory = collector.collect_steps(carry, None, T)
        trajectories.append(jax.device_get(trajectory))
    return trajectories


def check_batches(batches, make_collector):
    """Checks that the batches of each actor equal a local collector with its key."""
    for actor in {batch.actor for batch in batches}:
        actor_batches = [batch for batch in batches if batch.actor == actor]
        trajectories = collect(make_collector(), len(actor_batches), actor)
        for batch, trajectory in zip(actor_batches, trajectories, strict=True):
            leaves = jax.tree.leaves((batch.trajectory, batch.stats))
            assert all(isinstance(x, np.ndarray | np.generic) for x in leaves)
            # At most 12 actors exist: two at the start, and ten replacements.
            episode_id = trajectory.episode_id * 12 + actor
            trajectory = trajectory.replace(episode_id=episode_id)
            chex.assert_trees_all_equal(batch.trajectory, trajectory)
            chex.assert_trees_all_equal(batch.stats, summarize(trajectory))
            assert batch.steps == trajectory.mask.size


@pytest.mark.usefixtures("local_ray")
class TestLocalRay:
    @pytest.mark.parametrize("make_collector", [cases.on_host, cases.in_jax])
    def test_batches_equal_local_collectors(self, make_collector, local_ray):
        with make_ray_collector(
            make_collector, ray_options={"num_cpus": 2}
        ) as collector:
            batches = take(collector, 6)
            # An actor collects one batch at a time. A slow actor does not delay others.
            assert [x.num_in_flight for x in local_ray.actors] == [1, 1]
            local_ray.actors[0].is_slow = True
            assert [batch.actor for batch in take(collector, 3)] == [1, 1, 1]
        assert local_ray.options == {"num_cpus": 2}
        assert [batch.actor for batch in batches] == [0, 1] * 3
        check_batches(batches, make_collector)
        actions = [batch.trajectory.action for batch in batches[:2]]
        assert (actions[0] != actions[1]).any()

    @pytest.mark.parametrize(
        ("make_collector", "steps", "shape"),
        [(cases.on_host, B * T + 1, (T + 1, B)), (cases.ready_collector, 10, (4, 3))],
        ids=["on_host", "num_ready"],
    )
    def test_steps_per_batch_is_rounded_up_to_rows(self, make_collector, steps, shape):
        batch = next(make_ray_collector(make_collector, steps_per_batch=steps))
        assert batch.trajectory.mask.shape == shape
        assert batch.steps == shape[0] * shape[1]

    def test_iteration_ends_after_total_steps(self, local_ray):
        collector = make_ray_collector(total_steps=3 * B * T - 1)
        assert len(list(collector)) == 3
        assert collector.stats == (3, 3 * B * T, 0, 0, 0)
        assert all(actor.is_killed for actor in local_ray.actors)
        assert list(collector) == []

    def test_set_params_applies_to_the_next_batch(self, local_ray):
        with make_ray_collector(params=jnp.zeros(3)) as collector:
            assert local_ray.num_put == 1
            collector.set_params(jnp.ones(3))
            assert local_ray.num_put == 2
            # The batches in flight have the old parameters.
            assert [x.params_version for x in take(collector, 4)] == [0, 0, 1, 1]
            np.testing.assert_array_equal(local_ray.actors[0].params, 1.0)
            assert local_ray.num_put == 2

    def test_stale_batch_is_dropped_and_counted(self):
        with make_ray_collector(max_policy_lag=1) as collector:
            collector.set_params(None)
            assert next(collector).params_version == 0  # a lag of one version
            collector.set_params(None)
            # Actor 1 has a lag of two. Actor 0 began after the first `set_params`.
            batch = next(collector)
            assert (batch.actor, batch.params_version) == (0, 1)
            assert collector.stats.stale_batches == 1
            assert collector.stats.batches == 2

    def test_replacement_of_a_lost_actor_has_a_new_key(self, local_ray):
        with make_ray_collector(total_steps=8 * B * T) as collector:
            batches = take(collector, 2)
            local_ray.actors[0].is_killed = True
            batches += list(collector)
        assert {batch.actor for batch in batches} == {0, 1, 2}
        assert collector.stats == (8, 8 * B * T, 0, 1, 1)
        check_batches(batches, cases.on_host)

    def test_actor_that_raises_after_the_first_batch_is_replaced(self, caplog):
        with make_ray_collector(
            cases.fault_collector, total_steps=6 * B * T
        ) as collector:
            assert len(list(collector)) == 6
        assert collector.stats.restarts == collector.stats.lost_batches > 0
        assert "actor 0 is replaced after EnvFault" in caplog.text
        assert "the game is gone" in caplog.text

    def test_error_after_max_restarts_names_the_cause(self, local_ray):
        collector = make_ray_collector(max_restarts=1)
        take(collector, 2)
        for actor in local_ray.actors:
            actor.is_killed = True
        with pytest.raises(
            RuntimeError,
            match=r"Actor 1 .*`max_restarts`=1 .*process ended",
        ):
            take(collector, 9)
        assert collector.stats.lost_batches == 2
        assert all(actor.is_killed for actor in local_ray.actors)

    @pytest.mark.parametrize(
        ("make_collector", "message"),
        [
            (dict, "Actor 0 .* ValueError: `make_collector` must"),
            (functools.partial(cases.fault_collector, 2), "the game is gone"),
        ],
        ids=["make_collector", "first_batch"],
    )
    def test_error_before_the_first_batch_raises(
        self, make_collector, message, local_ray
    ):
        with pytest.raises(RuntimeError, match=message):
            next(make_ray_collector(make_collector))
        assert len(local_ray.actors) == 2
        assert all(actor.is_killed for actor in local_ray.actors)


@pytest.fixture(scope="module")
def support_path():
    """Adds the support modules of the tests to the import path of the actors."""
    with pytest.MonkeyPatch.context() as patch:
        path = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        yield


@pytest.fixture(scope="module")
def ray(support_path):
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():  # Ray forks to start another program
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def read_pids(folder):
    return {int(path.name) for path in folder.iterdir()}


@pytest.mark.slow
# Ray leaves sockets and files to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
class TestRay:
    def test_batches_equal_local_collectors(self, ray):
        with make_ray_collector(cases.in_jax, total_steps=8 * B * T) as collector:
            batches = list(collector)
            assert collector.stats == (8, 8 * B * T, 0, 0, 0)
        check_batches(batches, cases.in_jax)
        assert not batches[0].trajectory.reward.flags.writeable

    def test_batch_contains_typed_keys(self, ray):
        with make_ray_collector(cases.key_collector, num_actors=1) as collector:
            key = next(collector).trajectory.extras["key"]
        expected = jax.random.split(jax.random.key(5), B)
        assert key.shape == (T, B)
        words, expected_words = map(jax.random.key_data, (key, expected))
        assert (words == expected_words[None]).all()

    def test_killed_actor_is_replaced(self, ray, tmp_path, caplog):
        make_collector = functools.partial(cases.pid_collector, tmp_path)
        with make_ray_collector(make_collector, total_steps=30 * B * T) as collector:
            batches = take(collector, 10)
            pids = read_pids(tmp_path)
            os.kill(min(pids), signal.SIGKILL)
            batches += list(collector)
            assert collector.stats.batches == 30
            assert collector.stats.lost_batches == collector.stats.restarts == 1
        assert {batch.actor for batch in batches} <= {0, 1, 2}
        check_batches(batches, cases.on_host)
        assert "is replaced after" in caplog.text
        assert wait_until_gone(pids, seconds=30)

    def test_error_in_make_collector_raises_with_message(self, ray):
        with pytest.raises(RuntimeError, match="LookupError: there is no such game"):
            next(make_ray_collector(cases.raise_error))

    def test_close_ends_the_actors_and_not_ray(self, ray, tmp_path):
        with make_ray_collector(
            functools.partial(cases.pid_collector, tmp_path)
        ) as collector:
            take(collector, 9)
            pids = read_pids(tmp_path)
        assert ray.is_initialized()
        assert wait_until_gone(pids, seconds=30)

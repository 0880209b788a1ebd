"""Batches of remote actors: their contract, in this process and with Ray itself."""

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


def start(make_collector=cases.on_host, **options):
    return rollout.host.RayCollector(make_collector, **{**OPTIONS, **options})


def take(batches, number):
    return list(itertools.islice(batches, number))


def collect(collector, number, params=None, actor=0):
    """What an actor collects, as NumPy."""
    carry, collected = collector.init(jax.random.fold_in(KEY, actor)), []
    for _ in range(number):
        carry, trajectory = collector.collect_steps(carry, params, T)
        collected.append(jax.device_get(trajectory))
    return collected


def assert_batches(batches, make_collector):
    """Each actor's batches are those of a collector with the key of its number."""
    for actor in {batch.actor for batch in batches}:
        mine = [batch for batch in batches if batch.actor == actor]
        want = collect(make_collector(), len(mine), actor=actor)
        for batch, trajectory in zip(mine, want, strict=True):
            leaves = jax.tree.leaves((batch.trajectory, batch.stats))
            assert all(isinstance(x, np.ndarray | np.generic) for x in leaves)
            number = trajectory.episode_id * 12 + actor  # of two, and ten restarts
            trajectory = trajectory.replace(episode_id=number)
            chex.assert_trees_all_equal(batch.trajectory, trajectory)
            chex.assert_trees_all_equal(batch.stats, summarize(trajectory))
            assert batch.steps == trajectory.mask.size


@pytest.mark.usefixtures("local_ray")
class TestInThisProcess:
    @pytest.mark.parametrize("make", [cases.on_host, cases.in_jax])
    def test_batches_are_those_of_collectors_with_keys_of_their_own(
        self, make, local_ray
    ):
        with start(make, ray_options={"num_cpus": 2}) as batches:
            some = take(batches, 6)
            # An actor works on one fragment at a time, and a slow one delays nobody.
            assert [x.num_in_flight for x in local_ray.actors] == [1, 1]
            local_ray.actors[0].is_slow = True
            assert [batch.actor for batch in take(batches, 3)] == [1, 1, 1]
        assert local_ray.options == {"num_cpus": 2}
        assert [batch.actor for batch in some] == [0, 1] * 3
        assert_batches(some, make)
        first, second = (batch.trajectory.action for batch in some[:2])
        assert (first != second).any()

    @pytest.mark.parametrize(
        ("make", "steps", "shape"),
        [(cases.on_host, B * T + 1, (T + 1, B)), (cases.ready_collector, 10, (4, 3))],
    )
    def test_rows_are_rounded_up(self, make, steps, shape):
        batch = next(start(make, steps_per_batch=steps))
        assert batch.trajectory.mask.shape == shape
        assert batch.steps == shape[0] * shape[1]

    def test_ends_after_total_steps_and_closes(self, local_ray):
        batches = start(total_steps=3 * B * T - 1)
        assert len(list(batches)) == 3
        assert batches.stats == (3, 3 * B * T, 0, 0, 0)
        assert all(actor.is_killed for actor in local_ray.actors)
        assert list(batches) == []

    def test_params_are_put_once_and_reach_the_next_fragment(self, local_ray):
        with start(params=jnp.zeros(3)) as batches:
            assert local_ray.num_put == 1
            batches.set_params(jnp.ones(3))
            assert local_ray.num_put == 2
            # Those that were in flight have the parameters of before.
            assert [x.params_version for x in take(batches, 4)] == [0, 0, 1, 1]
            np.testing.assert_array_equal(local_ray.actors[0].params, 1.0)
            assert local_ray.num_put == 2

    def test_batch_that_lags_too_much_is_dropped_and_counted(self):
        with start(max_policy_lag=1) as batches:
            batches.set_params(None)
            assert next(batches).params_version == 0  # one behind
            batches.set_params(None)
            # Actor 1 is two behind, actor 0 began after the first `set_params`.
            batch = next(batches)
            assert (batch.actor, batch.params_version) == (0, 1)
            assert batches.stats.stale_batches == 1
            assert batches.stats.batches == 2

    def test_lost_actor_is_replaced_by_one_that_repeats_nothing(self, local_ray):
        with start(total_steps=8 * B * T) as batches:
            some = take(batches, 2)
            local_ray.actors[0].is_killed = True
            some += list(batches)
        assert {batch.actor for batch in some} == {0, 1, 2}
        assert batches.stats == (8, 8 * B * T, 0, 1, 1)
        assert_batches(some, cases.on_host)

    def test_actor_that_raises_later_is_replaced(self, caplog):
        with start(cases.fault_collector, total_steps=6 * B * T) as batches:
            assert len(list(batches)) == 6
        assert batches.stats.restarts == batches.stats.lost_batches > 0
        assert "actor 0 is replaced after EnvFault" in caplog.text
        assert "the game is gone" in caplog.text

    def test_too_many_losses_name_the_cause(self, local_ray):
        batches = start(max_restarts=1)
        take(batches, 2)
        for actor in local_ray.actors:
            actor.is_killed = True
        with pytest.raises(
            RuntimeError,
            match=r"Actor 1 is lost, and `max_restarts`=1 are used up: .*process ended",
        ):
            take(batches, 9)
        assert batches.stats.lost_batches == 2
        assert all(actor.is_killed for actor in local_ray.actors)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (dict, "Actor 0 raised ValueError: `make_collector` must return"),
            (functools.partial(cases.fault_collector, 2), "the game is gone"),
        ],
    )
    def test_mistake_is_raised_and_not_repeated(self, make, message, local_ray):
        with pytest.raises(RuntimeError, match=message):
            next(start(make))
        assert len(local_ray.actors) == 2
        assert all(actor.is_killed for actor in local_ray.actors)


@pytest.fixture(scope="module")
def path_of_cases():
    """Actors find the modules that the tests share."""
    with pytest.MonkeyPatch.context() as patch:
        path = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        yield


@pytest.fixture(scope="module")
def ray(path_of_cases):
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():  # it forks, to execute another program
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def pids_in(folder):
    return {int(path.name) for path in folder.iterdir()}


@pytest.mark.slow
# Ray leaves sockets and files to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
class TestWithRay:
    def test_batches_are_those_of_collectors_with_keys_of_their_own(self, ray):
        with start(cases.in_jax, total_steps=8 * B * T) as batches:
            some = list(batches)
            assert batches.stats == (8, 8 * B * T, 0, 0, 0)
        assert_batches(some, cases.in_jax)
        assert not some[0].trajectory.reward.flags.writeable

    def test_typed_keys_travel(self, ray):
        with start(cases.key_collector, num_actors=1) as batches:
            key = next(batches).trajectory.extras["key"]
        want = jax.random.split(jax.random.key(5), B)
        same = jax.random.key_data(key) == jax.random.key_data(want)[None]
        assert key.shape == (T, B)
        assert same.all()

    def test_killed_actor_is_replaced_and_the_others_go_on(self, ray, tmp_path, caplog):
        make = functools.partial(cases.pid_collector, tmp_path)
        with start(make, total_steps=30 * B * T) as batches:
            some = take(batches, 10)
            before = pids_in(tmp_path)
            os.kill(min(before), signal.SIGKILL)
            some += list(batches)
            assert batches.stats.batches == 30
            assert batches.stats.lost_batches == batches.stats.restarts == 1
        assert {batch.actor for batch in some} <= {0, 1, 2}
        assert_batches(some, cases.on_host)
        assert "is replaced after" in caplog.text
        assert wait_until_gone(before, seconds=30)

    def test_mistake_is_raised_with_its_message(self, ray):
        with pytest.raises(RuntimeError, match="LookupError: there is no such game"):
            next(start(cases.raise_error))

    def test_close_leaves_no_actor_and_lets_ray_run(self, ray, tmp_path):
        with start(functools.partial(cases.pid_collector, tmp_path)) as batches:
            take(batches, 9)
            pids = pids_in(tmp_path)
        assert ray.is_initialized()
        assert wait_until_gone(pids, seconds=30)

"""`RayCollector`: batches from collectors in actors of Ray, on one machine or many.

Ray starts the processes, moves arrays, and reports lost actors. This module adds which
parameters made a batch, a limit of one waiting batch per actor, and replacements.
"""

import contextlib
import itertools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout import checks
from rollout.collector import Collector
from rollout.envs import trees
from rollout.envs.optional_import import load
from rollout.host.host_collector import HostCollector
from rollout.stats import CollectStats, summarize
from rollout.types import Transition

_LOG = logging.getLogger("rollout")
_summarize = jax.jit(summarize)


class RemoteBatch(struct.PyTreeNode, kw_only=True):
    """A batch from one actor; the fields are those of a `StreamBatch`.

    Attributes:
        trajectory: `[T, B, ...]` of NumPy, read-only: it lies in Ray's object store,
            and occupies memory there as long as one of its arrays is kept.
        stats: statistics of the episodes that ended in the batch.
        steps: environment steps of the batch over all lanes.
        params_version: version of the parameters it was made with: 0 for the first
            ones, n for those of the n-th `set_params`.
        actor: number of the actor; a replacement has a new one. An `episode_id` is that
            of one actor only, so one buffer may take the batches of all.
    """

    trajectory: Transition  # [T, B, ...]
    stats: CollectStats
    steps: int
    params_version: int
    actor: int


class RemoteStats(NamedTuple):
    """Counts over all actors so far.

    Attributes:
        batches: batches returned.
        steps: environment steps of these over all lanes.
        stale_batches: batches dropped because of `max_policy_lag`.
        lost_batches: batches lost with their actor.
        restarts: actors started in place of lost ones.
    """

    batches: int = 0
    steps: int = 0
    stale_batches: int = 0
    lost_batches: int = 0
    restarts: int = 0


class RayCollector(
    Iterator[RemoteBatch], contextlib.AbstractContextManager["RayCollector"]
):
    """Collects in actors of Ray, each with its own collector.

        with rollout.host.RayCollector(make_collector, key=key, params=params,
                                   num_actors=8, steps_per_batch=4096) as batches:
            for batch in batches:
                params = update(params, batch.trajectory)
                batches.set_params(params)

    Batches come in the order in which they are finished, so a slow actor delays no
    other. An actor begins its next batch when its last one is returned, with the
    parameters that are newest then: it works while you learn, and never has more than
    one batch waiting. If one `set_params` follows every batch, a batch is therefore
    about `num_actors` versions behind.

    An actor is lost if its process or its machine ends, or if it raises. Its batch and
    its unfinished episodes are then lost too; another actor takes its place, with new
    episodes. An error in an actor that has not returned a batch yet, in
    `make_collector` or in the first batch, counts as a mistake and is raised here.
    An actor that hangs is not lost: environments in `rollout.envs.make_worker_envs`
    have a `timeout`.

    The order of batches, and so the result of learning, depends on the actors' speed.

    It is an iterator over `RemoteBatch`es. Without a `ray.init` before, Ray starts
    itself, on this machine, and runs until the program ends.

    Attributes:
        stats: counts over all actors so far, a `RemoteStats`.

    Args:
        make_collector: makes the collector, in the actor: it does its own imports and
            sets jax's options. It is sent by `cloudpickle`.
        key: one typed key. Each actor, also a replacement, derives its own from it.
        params: whatever the policy takes as its parameters.
        num_actors: at least 1.
        steps_per_batch: environment steps of a batch over all lanes of an actor,
            rounded up to rows: T = ceil(steps_per_batch / num_envs).
        max_policy_lag: drops and counts a batch whose parameters are more than so many
            versions behind the newest when it would be returned. None keeps all, 0
            those of the newest; below `num_actors` it drops many, see above.
        total_steps: steps after which the iteration ends, None for an endless one. The
            last batch is whole; dropped and lost batches do not count.
        max_restarts: how many lost actors are replaced in all.
        ray_options: resources of each actor, as `ray.remote` takes them: `num_cpus`,
            `num_gpus`, `resources`, `runtime_env`. By default one CPU each. Where Ray
            assigns no accelerator, jax runs on the CPU. Ray waits silently until
            machines with these resources join.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if an option is not as above.
    """

    def __init__(
        self,
        make_collector: Callable[[], Collector | HostCollector],
        *,
        key: chex.PRNGKey,
        params: Any = None,
        num_actors: int,
        steps_per_batch: int,
        max_policy_lag: int | None = None,
        total_steps: int | None = None,
        max_restarts: int = 10,
        ray_options: Mapping[str, Any] | None = None,
    ) -> None:
        checks.function("make_collector", make_collector)
        checks.typed_key(key)
        num_actors = checks.int_between("num_actors", num_actors)
        steps_per_batch = checks.int_between("steps_per_batch", steps_per_batch)
        if max_policy_lag is not None:
            checks.int_between("max_policy_lag", max_policy_lag, least=0)
        if total_steps is not None:
            checks.int_between("total_steps", total_steps, most=None)
        checks.int_between("max_restarts", max_restarts, least=0)
        self._max_lag, self._total_steps = max_policy_lag, total_steps
        self._num_actors, self._max_restarts = num_actors, max_restarts
        self._ray = ray = load("ray")
        self._make_actor = ray.remote(_Actor).options(**(ray_options or {})).remote
        self._args = make_collector, steps_per_batch, str(jax.random.key_impl(key))
        self._key, self._numbers = key, itertools.count()
        self._actors: dict[int, Any] = {}  # by number
        self._proven: set[int] = set()  # actors that have returned a batch
        # By reference, the oldest first: actor, version of the parameters.
        self._in_flight: dict[Any, tuple[int, int]] = {}
        self.stats = RemoteStats()
        self._setting, self._is_closed = threading.Lock(), False
        try:
            # In NumPy, so that no actor needs the learner's devices to unpack it.
            host = _on_host(params)
            self._kind = jax.eval_shape(lambda x: x, host)
            with warnings.catch_warnings():
                # Ray may start with this, and forks only to execute another program.
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
                self._params = ray.put(host), 0
            for _ in range(num_actors):
                self._start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        """Closes the actors."""
        self.close()

    def __next__(self) -> RemoteBatch:
        """Waits for the next batch, from whichever actor has one.

        Raises:
            StopIteration: after `total_steps`; the actors are then closed.
            RuntimeError: if an actor raised before it had returned a batch, if more
                than `max_restarts` were lost, or after `close`.
        """
        total, ray = self._total_steps, self._ray
        if total is not None and self.stats.steps >= total:
            self.close()
            raise StopIteration
        if self._is_closed:
            raise RuntimeError("`next` must be called before `close`.")
        while True:
            (reference,), _ = ray.wait(list(self._in_flight), num_returns=1)
            try:
                trajectory, stats = ray.get(reference)
            except ray.exceptions.RayError as error:
                self._replace(self._in_flight.pop(reference)[0], error)
                continue
            number, version = self._in_flight[reference]
            self._proven.add(number)
            # The actor's next batch first, so that it collects while this one is used.
            newest = self._begin(number)
            del self._in_flight[reference]  # last: Ctrl-C leaves no actor without work
            if self._max_lag is not None and newest - version > self._max_lag:
                self._count(stale_batches=1)
                continue
            steps = int(np.size(trajectory.mask))
            if not isinstance(trajectory.episode_id, tuple):  # it is recorded
                # As many actors as there can ever be; int32 may wrap around.
                most = np.int32(self._num_actors + self._max_restarts)
                episode_id = np.asarray(trajectory.episode_id) * most + np.int32(number)
                trajectory = trajectory.replace(episode_id=episode_id)
            self._count(batches=1, steps=steps)
            return RemoteBatch(
                trajectory=trajectory,
                stats=stats,
                steps=steps,
                params_version=version,
                actor=number,
            )

    def set_params(self, params: Any) -> None:
        """Sets the parameters for the batches that have not begun, from any thread.

        They are put into Ray's object store once, for all actors.

        Args:
            params: of the structure, shapes and dtypes of those before. They are
                copied, so that an update may donate them.

        Raises:
            RuntimeError: after `close`.
            ValueError: if structure, a shape or a dtype differs.
        """
        if self._is_closed:
            raise RuntimeError("`set_params` must be called before `close`.")
        new = _on_host(params)
        checks.same("`params` must keep structure, shapes and dtypes", self._kind, new)
        with self._setting:  # two threads must not set the same version
            self._params = self._ray.put(new), self._params[1] + 1

    def close(self) -> None:
        """Kills the actors; there are no more batches."""
        if self._is_closed:
            return
        self._is_closed = True
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._in_flight.clear()
        self._actors.clear()

    def _start(self) -> None:
        """Starts an actor, and its first batch."""
        # Never twice: a replacement with the same key would play the same episodes.
        number = next(self._numbers)
        words = np.asarray(trees.unwrap_keys(jax.random.fold_in(self._key, number)))
        self._actors[number] = self._make_actor(*self._args, words)
        self._begin(number)

    def _begin(self, number: int) -> int:
        """Begins a batch of an actor; returns the version of the parameters."""
        # One read of both: another thread may call `set_params`.
        params, version = self._params
        reference = self._actors[number].collect.remote(params)
        self._in_flight[reference] = number, version
        return version

    def _replace(self, number: int, error: Exception) -> None:
        """Replaces a lost actor."""
        self._ray.kill(self._actors.pop(number))  # it may be alive, and have raised
        self._count(lost_batches=1)
        cause = getattr(error, "cause", None) or error
        has_raised = isinstance(error, self._ray.exceptions.RayTaskError)
        has_raised |= getattr(error, "actor_init_failed", False)
        reason = f"{type(cause).__name__}: {cause}"
        # Before the first batch it is the user's code: a replacement would fail, too.
        if has_raised and number not in self._proven:
            self.close()
            raise RuntimeError(f"Actor {number} raised {reason}") from error
        if self.stats.restarts >= self._max_restarts:
            self.close()
            raise RuntimeError(
                f"Actor {number} is lost, and `max_restarts`={self._max_restarts} are "
                f"used up: {reason}"
            ) from error
        _LOG.warning("actor %d is replaced after %s", number, reason)
        self._count(restarts=1)
        self._start()

    def _count(self, **more: int) -> None:
        old = self.stats._asdict()
        self.stats = RemoteStats(**{x: old[x] + more.get(x, 0) for x in old})


class _Actor:
    """Owns a collector, in its own process."""

    def __init__(
        self,
        make_collector: Callable[[], Collector | HostCollector],
        steps_per_batch: int,
        impl: str,
        words: np.ndarray,
    ) -> None:
        context = load("ray").get_runtime_context()
        if not any(context.get_accelerator_ids().values()):
            # Accelerators of the machine are for others. No jax array may come before.
            jax.config.update("jax_platforms", "cpu")
        self._make_collector, self._steps_per_batch = make_collector, steps_per_batch
        self._key: Any = impl, words
        self._collector: Any = None

    def collect(self, params: Any) -> tuple[Transition, CollectStats]:
        """Collects a batch, and returns it in NumPy: one object for Ray."""
        collector = self._collector
        if collector is None:  # not made before: Ray hides errors of `__init__`
            collector = self._make_collector()
            what = "`make_collector` must return a `Collector` or a `HostCollector`"
            checks.kind(what, collector, Collector | HostCollector)
            impl, words = self._key
            self._carry = collector.init(jax.random.wrap_key_data(words, impl=impl))
            self._collector = collector
        # A row has as many steps as it has columns.
        num_columns = getattr(collector, "num_ready", None) or collector.env.num_envs
        num_steps = -(-self._steps_per_batch // num_columns)
        self._carry, trajectory = collector.collect_steps(
            self._carry, jax.device_put(params), num_steps
        )
        return jax.device_get((trajectory, _summarize(trajectory)))


def _on_host(params: Any) -> Any:
    """Converts parameters to NumPy, not weakly typed; typed keys stay as they are."""

    def convert(x: Any) -> Any:
        return x if trees.has_keys(x) else np.asarray(x, jnp.result_type(x))

    return jax.tree.map(convert, jax.device_get(params))

"""`RayCollector`: collects in Ray actors, on one machine or a cluster.

Ray starts the processes, transfers arrays, and reports lost actors. This module adds
versions of the parameters, a limit of one waiting batch per actor, and replacements of
lost actors.
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

from rollout.base import checks, trees
from rollout.base.checks import import_optional
from rollout.collector import Collector
from rollout.host.host_collector import HostCollector
from rollout.stats import CollectStats, summarize
from rollout.types import Transition

_LOG = logging.getLogger("rollout")


class RemoteBatch(struct.PyTreeNode, kw_only=True):
    """A batch from one actor, similar to a `StreamBatch`.

    Attributes:
        trajectory: `[T, B, ...]` read-only NumPy arrays in Ray's object store. The
            trajectory occupies memory there while any of its arrays is referenced.
        stats: statistics of the episodes that ended in the batch.
        steps: environment steps of the batch over all lanes.
        params_version: version of the parameters that collected the batch: 0 for the
            initial parameters, n after the n-th `set_params`.
        actor: number of the actor; a replacement has a new number. No two actors share
            an `episode_id`, so one buffer may store the batches of all actors.
    """

    trajectory: Transition  # [T, B, ...]
    stats: CollectStats
    steps: int
    params_version: int
    actor: int


class RemoteStats(NamedTuple):
    """Counts batches, steps and restarts over all actors so far.

    Attributes:
        batches: number of returned batches.
        steps: environment steps of the returned batches, over all lanes.
        stale_batches: number of batches dropped because of `max_policy_lag`.
        lost_batches: number of batches lost with an actor.
        restarts: number of actors started to replace lost actors.
    """

    batches: int = 0
    steps: int = 0
    stale_batches: int = 0
    lost_batches: int = 0
    restarts: int = 0


class RayCollector(
    Iterator[RemoteBatch], contextlib.AbstractContextManager["RayCollector"]
):
    """Collects batches in Ray actors, with one collector per actor.

        with rollout.host.RayCollector(make_collector, key=key, params=params,
                                   num_actors=8, steps_per_batch=4096) as batches:
            for batch in batches:
                params = update(params, batch.trajectory)
                batches.set_params(params)

    Batches are returned in the order of completion, so a slow actor does not delay
    other actors. An actor begins its next batch when its previous batch is returned,
    with the newest parameters at that time. Actors therefore collect while the learner
    updates, and at most one batch per actor waits. If one `set_params` follows every
    batch, a batch is about `num_actors` versions old.

    An actor is lost if its process or its machine ends, or if it raises. The current
    batch and the unfinished episodes of the actor are lost, and a new actor with new
    episodes replaces it. An error before an actor has returned its first batch, in
    `make_collector` or while collecting, is treated as a bug and raised here. An actor
    that hangs is not replaced: set the `timeout` of `rollout.envs.make_worker_envs`.

    The order of batches, and therefore the result of training, depends on the speed of
    the actors.

    The collector is an iterator over `RemoteBatch`es. If `ray.init` was not called, Ray
    starts on this machine and runs until the program ends.

    Attributes:
        stats: counts over all actors so far, a `RemoteStats`.

    Args:
        make_collector: function that creates the collector in the actor. The function
            imports modules and sets JAX's options; it is sent with `cloudpickle`.
        key: one typed key. Every actor, including replacements, derives another key
            from it.
        params: parameters of the policy.
        num_actors: number of actors, at least 1.
        steps_per_batch: environment steps of a batch over all lanes of an actor,
            rounded up to rows: T = ceil(steps_per_batch / num_envs).
        max_policy_lag: maximum number of versions between the newest parameters and the
            parameters of a returned batch; older batches are dropped and counted. None
            keeps all batches, 0 keeps batches of the newest version. Values below
            `num_actors` drop many batches, see above.
        total_steps: steps after which the iteration ends; None never ends it. The last
            batch is complete; dropped and lost batches are not included.
        max_restarts: maximum number of replaced actors in total.
        ray_options: resources of each actor, as in `ray.remote`: `num_cpus`,
            `num_gpus`, `resources`, `runtime_env`. The default is one CPU per actor. If
            Ray assigns no accelerator, JAX runs on the CPU. Ray waits silently until
            these resources are available.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if an option is invalid.
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
        checks.check_key(key)
        num_actors = checks.check_int("num_actors", num_actors)
        steps_per_batch = checks.check_int("steps_per_batch", steps_per_batch)
        if max_policy_lag is not None:
            checks.check_int("max_policy_lag", max_policy_lag, least=0)
        if total_steps is not None:
            checks.check_int("total_steps", total_steps, most=None)
        checks.check_int("max_restarts", max_restarts, least=0)
        self._max_lag, self._total_steps = max_policy_lag, total_steps
        self._num_actors, self._max_restarts = num_actors, max_restarts
        self._ray = ray = import_optional("ray")
        self._make_actor = ray.remote(_Actor).options(**(ray_options or {})).remote
        self._args = make_collector, steps_per_batch, str(jax.random.key_impl(key))
        self._key, self._numbers = key, itertools.count()
        self._actors: dict[int, Any] = {}  # by number
        self._checked_actors: set[int] = set()  # actors that have returned a batch
        # By reference, oldest first: actor and version of the parameters.
        self._in_flight: dict[Any, tuple[int, int]] = {}
        self.stats = RemoteStats()
        self._params_lock, self._is_closed = threading.Lock(), False
        try:
            # Convert to NumPy: actors may lack the learner's devices.
            tree = _on_host(params)
            self._spec = jax.eval_shape(lambda x: x, tree)
            with warnings.catch_warnings():
                # Ray may start here, and forks only to execute another program.
                warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
                self._params = ray.put(tree), 0
            for _ in range(num_actors):
                self._start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        """Closes the actors."""
        self.close()

    def __next__(self) -> RemoteBatch:
        """Waits for the next batch of any actor.

        Raises:
            StopIteration: after `total_steps`, when the actors are closed.
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
            self._checked_actors.add(number)
            # Begin the actor's next batch first, to collect while the caller updates.
            newest = self._begin(number)
            del self._in_flight[reference]  # last: Ctrl-C leaves no actor without work
            if self._max_lag is not None and newest - version > self._max_lag:
                self._count(stale_batches=1)
                continue
            steps = int(np.size(trajectory.mask))
            if not isinstance(trajectory.episode_id, tuple):  # it is recorded
                # `size` is the maximum number of actors. int32 may wrap around.
                size = np.int32(self._num_actors + self._max_restarts)
                episode_id = np.asarray(trajectory.episode_id) * size + np.int32(number)
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
        """Sets the parameters for batches that begin later. Any thread may call it.

        The parameters are put into Ray's object store once, for all actors.

        Args:
            params: parameters with unchanged structure, shapes and dtypes. They are
                copied, so that an update may donate them.

        Raises:
            RuntimeError: after `close`.
            ValueError: if the structure, a shape or a dtype differs.
        """
        if self._is_closed:
            raise RuntimeError("`set_params` must be called before `close`.")
        tree = _on_host(params)
        checks.check_same_types(
            "`params` must keep structure, shapes and dtypes", self._spec, tree
        )
        with self._params_lock:  # two threads must not set the same version
            self._params = self._ray.put(tree), self._params[1] + 1

    def close(self) -> None:
        """Kills the actors and discards unfinished batches."""
        if self._is_closed:
            return
        self._is_closed = True
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._in_flight.clear()
        self._actors.clear()

    def _start(self) -> None:
        """Starts an actor and its first batch."""
        # Use each number once: a replacement with an old key would repeat episodes.
        number = next(self._numbers)
        words = np.asarray(trees.unwrap_keys(jax.random.fold_in(self._key, number)))
        self._actors[number] = self._make_actor(*self._args, words)
        self._begin(number)

    def _begin(self, number: int) -> int:
        """Begins a batch of an actor; returns the version of its parameters."""
        # Read both at once: another thread may call `set_params`.
        params, version = self._params
        reference = self._actors[number].collect.remote(params)
        self._in_flight[reference] = number, version
        return version

    def _replace(self, number: int, error: Exception) -> None:
        """Replaces a lost actor."""
        self._ray.kill(self._actors.pop(number))  # an actor that raised is alive
        self._count(lost_batches=1)
        cause = getattr(error, "cause", None) or error
        has_raised = isinstance(error, self._ray.exceptions.RayTaskError)
        has_raised |= getattr(error, "actor_init_failed", False)
        reason = f"{type(cause).__name__}: {cause}"
        # Raise errors before the first batch: a replacement would likely fail as well.
        if has_raised and number not in self._checked_actors:
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

    def _count(self, **counts: int) -> None:
        old = self.stats._asdict()
        self.stats = RemoteStats(**{x: old[x] + counts.get(x, 0) for x in old})


class _Actor:
    """Collects batches in a separate process."""

    def __init__(
        self,
        make_collector: Callable[[], Collector | HostCollector],
        steps_per_batch: int,
        impl: str,
        words: np.ndarray,
    ) -> None:
        context = import_optional("ray").get_runtime_context()
        if not any(context.get_accelerator_ids().values()):
            # Other processes own the accelerators. No JAX array may exist yet.
            jax.config.update("jax_platforms", "cpu")
        self._make_collector, self._steps_per_batch = make_collector, steps_per_batch
        self._key: Any = impl, words
        self._collector: Any = None

    def collect(self, params: Any) -> tuple[Transition, CollectStats]:
        """Collects a batch and returns NumPy arrays, as one object of Ray."""
        collector = self._collector
        if collector is None:  # created here: Ray hides errors in `__init__`
            collector = self._make_collector()
            message = "`make_collector` must return a `Collector` or a `HostCollector`"
            checks.check_type(message, collector, Collector | HostCollector)
            impl, words = self._key
            self._carry = collector.init(jax.random.wrap_key_data(words, impl=impl))
            num_columns = collector.row_shape(params).mask.shape[0]
            self._num_rows = -(-self._steps_per_batch // num_columns)
            self._collector = collector
        self._carry, trajectory = collector.collect_steps(
            self._carry, jax.device_put(params), self._num_rows
        )
        return jax.device_get((trajectory, summarize(trajectory)))


def _on_host(params: Any) -> Any:
    """Converts parameters to NumPy, not weakly typed; typed keys stay as they are."""

    def convert(x: Any) -> Any:
        return x if trees.has_keys(x) else np.asarray(x, jnp.result_type(x))

    return jax.tree.map(convert, jax.device_get(params))

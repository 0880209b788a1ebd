"""`workers`: environments in other processes, safe from crashes and hangs of others."""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import reduction
from typing import Any

import numpy as np

from rollout.envs import checks as counts
from rollout.envs.host import (
    exceptions,
    request_checks,
    saved_state,
    shared_memory,
    worker_process,
)
from rollout.envs.host.arrays import answer, answer_all, make_layout, pick, put
from rollout.envs.host.types import EnvFault, HostStep
from rollout.envs.host.worker_pool import Crew, Link, preload
from rollout.envs.types import AnySpace, ArrayTree

_START_METHODS = ("forkserver", "spawn")


def workers(
    make_fns: Sequence[Callable[[], Any]],
    num_workers: int | None = None,
    *,
    start_method: str = "forkserver",
    timeout: float | None = None,
    observe_info: Mapping[str, Any] | None = None,
    record_info: Mapping[str, Any] | None = None,
) -> "WorkerEnvs":
    """Makes environments in worker processes; each process steps several in turn.

    A script must call it under `if __name__ == "__main__":`, like everything that
    starts processes. The processes end with the main one, however that ends. Their
    environments cannot start processes by `multiprocessing`.

    Args:
        make_fns: `E` functions that make one environment each, with the methods and
            spaces of `gymnasium.Env`; picklable. With cloudpickle, which gymnasium
            installs, they may be lambdas, and classes of a notebook.
        num_workers: number of processes; by default that of the CPUs, and at most E.
        start_method: "forkserver", or "spawn", which is slower. A fork of a process
            that runs jax can block for ever.
        timeout: seconds that a worker may take for one answer: a step of all its
            environments, or of one after `send`; a reset of some. After that it is
            killed, and its environments are faulty. None for any time; a start may
            always take any time.
        observe_info: keys of `info` that become part of the observation, each with an
            example, as in `LocalEnvs`.
        record_info: keys of `info` that `HostStep.info` has, each with an example.

    Returns:
        Environments in the order of `make_fns`, the first ones in worker 0.

    Raises:
        EnvFault: if an environment could not be made.
        ValueError: if an option is not as above, a function cannot be pickled, spaces
            differ, or a space has no arrays.
    """
    make_fns = _list(make_fns)
    if num_workers is None:
        num_workers = min(len(make_fns), os.cpu_count() or 1)
    if counts.count("num_workers", num_workers) > len(make_fns):
        raise ValueError(
            f"`num_workers` must be at most the number of environments, "
            f"{len(make_fns)}, got {num_workers}."
        )
    if start_method not in _START_METHODS:
        raise ValueError(
            f'`start_method` must be "forkserver" or "spawn", got {start_method!r}.'
        )
    timeout = counts.seconds("timeout", timeout)
    _check_picklable(make_fns)
    info = {"observe_info": observe_info, "record_info": record_info}
    return WorkerEnvs(make_fns, num_workers, start_method, timeout, info)


def _list(make_fns: Any) -> list[Callable[[], Any]]:
    """Returns the functions as a list; raises unless they are functions."""
    is_series = hasattr(make_fns, "__iter__") and not isinstance(make_fns, str)
    listed: list[Any] = list(make_fns) if is_series else [None]
    if not all(map(callable, listed)):
        got = make_fns if isinstance(make_fns, str) else type(make_fns).__name__
        raise ValueError(
            "`make_fns` must be functions, one for each environment, such as "
            f"`[make_one] * 8`, got {got!r}."
        )
    if not listed:
        raise ValueError("`make_fns` must have at least one function, got none.")
    return listed


class WorkerEnvs:
    """Environments in worker processes, an `AsyncHostVectorEnv`; see `workers`.

    It can `rebuild` environments, also those of a lost worker, and `save`. The arrays
    it returns are memory that the workers write to: those of `reset` may change where
    environments are under way.
    """

    def __init__(
        self,
        make_fns: list[Callable[[], Any]],
        num_workers: int,
        start_method: str,
        timeout: float | None,
        info: Mapping[str, Any],
    ) -> None:
        self.num_envs = len(make_fns)
        self._make_fns, self._info = make_fns, info
        self._context = multiprocessing.get_context(start_method)
        cuts = np.linspace(0, self.num_envs, num_workers + 1).astype(int).tolist()
        groups = [range(a, b) for a, b in itertools.pairwise(cuts)]
        self._crew = Crew(groups, timeout)
        self._link_of = [link for link in self._crew.links for _ in link.ids]
        self._under_way: set[int] = set()
        weakref.finalize(self, self._crew.close)
        try:
            with self._crew:
                self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def observation_space(self) -> AnySpace:
        """Space of one environment's observation."""
        return self._layout.observation_space

    @property
    def action_space(self) -> AnySpace:
        """Space of one environment's action."""
        return self._layout.action_space

    @property
    def pids(self) -> list[int]:
        """The ids of the worker processes, in the order of their environments."""
        return [link.process.pid for link in self._crew.links]

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> ArrayTree:
        """Starts an episode in some environments, each from its own seed.

        Args:
            seeds: `[E]` uint32; read where `mask`.
            mask: `[E]` bool, which to reset; at least one.

        Returns:
            `[E, ...]` observations, the memory that the workers write to.

        Steps of these environments that are under way are dropped.

        Raises:
            EnvFault: if some failed, or had failed and were not made anew.
        """
        which = request_checks.reset(seeds, mask, self.num_envs)
        seeds, mask = np.asarray(seeds), np.asarray(mask)
        with self._crew as crew:
            asked = self._alive(which)
            for link in asked:
                mine = slice(link.ids.start, link.ids.stop)
                crew.ask(link, "reset", (seeds[mine], mask[mine]))
            self._gather(asked)
            self._forget(which)
            self._raise(which)
            return self._arrays.obs

    def step(self, action: ArrayTree) -> HostStep:
        """Takes one step in every environment, `[E, ...]`, and resets none."""
        request_checks.all_idle("step", self._under_way)
        with self._crew as crew:
            alive = self._alive(range(self.num_envs))
            put(self._arrays.action, slice(None), action, "action")
            for link in alive:
                crew.ask(link, "step")
            self._gather(alive)
            return answer_all(self._arrays, crew.broken)

    def send(self, action: ArrayTree, env_id: np.ndarray) -> None:
        """Begins a step in some environments.

        Args:
            action: `[R, ...]`, one action for each.
            env_id: `[R]` int, their numbers; none of them may be under way.
        """
        ids = request_checks.env_ids(env_id, self.num_envs)
        request_checks.idle(ids, self._under_way)
        with self._crew as crew:
            put(self._arrays.action, np.asarray(ids, np.intp), action, "action")
            groups: dict[Link, list[int]] = {}
            self._under_way.update(ids)
            for at in ids:
                if at in crew.broken:
                    crew.answered.append((at, crew.broken[at]))
                else:
                    link = self._link_of[at]
                    groups.setdefault(link, []).append(at - link.ids.start)
            for link, numbers in groups.items():
                crew.ask(link, "send", numbers)

    def receive(
        self, num_ready: int, timeout: float | None = None
    ) -> tuple[HostStep, np.ndarray]:
        """Waits for the first `num_ready` environments that answer.

        Args:
            num_ready: R, at least 1 and at most the number under way.
            timeout: seconds to wait, None for any time.

        Returns:
            Their answers, `[R, ...]`, in the order of answering; and their numbers,
            `[R]` int32.

        Raises:
            TimeoutError: if fewer answer within `timeout`. Nothing is lost: the next
                call hands them over.
            ValueError: if fewer are under way.
        """
        request_checks.num_ready(num_ready, len(self._under_way))
        end = None if timeout is None else time.monotonic() + timeout
        with self._crew as crew:
            while len(crew.answered) < num_ready:
                left = None if end is None else max(0.0, end - time.monotonic())
                crew.pump(left)
                if left == 0 and len(crew.answered) < num_ready:
                    raise TimeoutError(
                        f"{len(crew.answered)} of {num_ready} environments answered "
                        f"within {timeout} s."
                    )
            first = [crew.answered.popleft() for _ in range(num_ready)]
            self._under_way.difference_update(at for at, _ in first)
            return answer(self._arrays, first)

    def rebuild(self, mask: np.ndarray) -> None:
        """Makes some environments anew; each must be reset before its next step.

        Steps of these environments that are under way are dropped. If a worker is
        lost, or ends during the request, a new one is started. Its other environments
        stay faulty until they are made anew, too.

        Args:
            mask: `[E]` bool, which to make anew; at least one.

        Raises:
            EnvFault: if some could not be made; they stay faulty.
        """
        which = request_checks.masked(mask, self.num_envs)
        with self._crew as crew:
            links = list(dict.fromkeys(self._link_of[at] for at in which))
            for link in links:
                if link.pipe is not None:
                    part = np.asarray(mask)[link.ids.start : link.ids.stop]
                    crew.ask(link, "rebuild", part)
            alive = [link for link in links if link.pipe is not None]
            self._gather(alive, anew=which)
            # One environment may have ended a worker before the next was made anew.
            gone = [link for link in links if link.pipe is None]
            self._start(gone, anew=which)
            self._forget(which)
            self._raise(which)

    def save(self, *, allow_pickle: bool = False) -> list[bytes] | None:
        """Saves every environment; see `HostVectorEnv`.

        Raises:
            ValueError: if some are under way.
        """
        request_checks.all_idle("save", self._under_way)
        with self._crew as crew:
            alive = [link for link in crew.links if link.pipe is not None]
            for link in alive:
                crew.ask(link, "save", allow_pickle)
            saved: list[Any] = [None] * self.num_envs
            for link, (states_of_link, error) in crew.gather(alive):
                if error is not None:
                    raise exceptions.unpack(error)
                if states_of_link is None:
                    return None
                saved[link.ids.start : link.ids.stop] = states_of_link
            for at, cause in crew.broken.items():
                saved[at] = saved[at] or saved_state.save_fault(cause)
            return saved

    def can_load(self, saved: Sequence[bytes], *, allow_pickle: bool = False) -> bool:
        """Returns whether `load` takes these states; see `HostVectorEnv`.

        Raises:
            ValueError: if pickled environments were made with other settings.
        """
        request_checks.length("saved", saved, self.num_envs)
        can_load = True
        with self._crew as crew:
            alive = [link for link in crew.links if link.pipe is not None]
            for link in alive:
                mine = slice(link.ids.start, link.ids.stop)
                crew.ask(link, "can_load", (list(saved[mine]), allow_pickle))
            for _, (link_can_load, error) in crew.gather(alive):
                if error is not None:
                    raise exceptions.unpack(error)
                can_load &= link_can_load
        return can_load

    def load(
        self, saved: Sequence[bytes], obs: ArrayTree, *, allow_pickle: bool = False
    ) -> bool:
        """Puts every environment where it was at `save`; see `HostVectorEnv`.

        Raises:
            ValueError: if some are under way, or as `can_load` does.
        """
        request_checks.length("saved", saved, self.num_envs)
        request_checks.all_idle("load", self._under_way)
        every = range(self.num_envs)
        with self._crew as crew:
            self._start([link for link in crew.links if link.pipe is None], anew=every)
            alive = [link for link in crew.links if link.pipe is not None]
            for link in alive:
                mine = slice(link.ids.start, link.ids.stop)
                argument = list(saved[mine]), pick(obs, mine), allow_pickle
                crew.ask(link, "load", argument)
            are_loaded = True
            for link, (is_loaded, error, causes) in crew.gather(alive):
                if error is not None:
                    raise exceptions.unpack(error)
                are_loaded &= is_loaded
                self._note(link, causes, anew=every)
            return are_loaded

    def close(self) -> None:
        """Ends the processes; a second call does nothing."""
        self._crew.close()

    def _begin(self) -> None:
        """Starts every worker, and makes the arrays once their layout is known."""
        if self._context.get_start_method() == "forkserver":
            preload(self._context)
        spaces = self._launch(self._crew.links, range(self.num_envs))
        self._raise(range(self.num_envs))
        first = spaces[self._crew.links[0]]
        for link, other in spaces.items():
            request_checks.same_spaces(first, other, link.ids.start)
        self._spaces, self._layout = first, make_layout(first, **self._info)
        self._memory = shared_memory.new(self._layout, self.num_envs)
        weakref.finalize(self, os.close, self._memory)
        self._arrays = shared_memory.arrays(self._layout, self.num_envs, self._memory)
        self._share(self._crew.links)

    def _start(self, links: Collection[Link], anew: Collection[int]) -> None:
        """Starts lost workers again; those `anew` are no longer faulty."""
        for link, spaces in self._launch(links, anew).items():
            request_checks.same_spaces(self._spaces, spaces, link.ids.start)
            self._share([link])
            for at in set(link.ids) & set(anew):
                self._crew.broken.pop(at, None)

    def _launch(
        self, links: Collection[Link], anew: Collection[int]
    ) -> dict[Link, tuple[Any, Any]]:
        """Starts workers; returns the spaces of those that made their environments."""
        method = self._context.get_start_method()
        for link in links:
            start = link.ids.start
            make_fns = _dumps(self._make_fns[start : link.ids.stop])
            broken = {
                at - start: exceptions.pack(self._crew.broken[at])
                for at in link.ids
                if at in self._crew.broken and at not in anew
            }
            args = (make_fns, self._info, broken, method)
            self._crew.start(link, self._context, worker_process.serve, args)
        ready = {}
        for link, (spaces, causes, is_setup_error) in self._crew.gather(links):
            if spaces is not None:
                ready[link] = spaces
                continue
            at, packed = next(iter(causes.items()))
            cause, at = exceptions.unpack(packed), link.ids[at]
            if isinstance(cause, ValueError) and is_setup_error:
                raise ValueError(f"{cause} Counted within {link}.") from cause
            told = f"environment {at}: {type(cause).__name__}: {cause}"
            self._crew.lose(link, RuntimeError(f"{link} could not make {told}"))
            self._crew.broken[at] = cause
        return ready

    def _share(self, links: Collection[Link]) -> None:
        for link in links:
            self._crew.ask(link, "share", (link.ids.start, self.num_envs))
            if link.pipe is not None:
                with contextlib.suppress(OSError):  # `gather` finds that it is lost
                    reduction.send_handle(link.pipe, self._memory, link.process.pid)
        for link, _ in self._crew.gather(links):
            link.is_torn = False

    def _alive(self, which: Collection[int]) -> list[Link]:
        """Returns the workers of the environments that are not faulty, each once."""
        broken = self._crew.broken
        links = (self._link_of[at] for at in which if at not in broken)
        return list(dict.fromkeys(links))

    def _gather(self, links: Collection[Link], anew: Collection[int] = ()) -> None:
        """Waits for each worker's faults; those `anew` replace the old ones."""
        for link, causes in self._crew.gather(links):
            self._note(link, causes, anew)

    def _note(
        self, link: Link, causes: Mapping[int, bytes], anew: Collection[int]
    ) -> None:
        for at in set(link.ids) & set(anew):
            self._crew.broken.pop(at, None)
        for at, packed in causes.items():
            self._crew.broken[link.ids[at]] = exceptions.unpack(packed)

    def _forget(self, which: Collection[int]) -> None:
        """Drops the answers of these environments, which have stepped by now."""
        self._crew.drop(which)
        self._under_way -= set(which)

    def _raise(self, which: Collection[int]) -> None:
        broken = self._crew.broken
        causes = {at: broken[at] for at in which if at in broken}
        if causes:
            raise EnvFault(causes) from next(iter(causes.values()))


def _dumps(make_fns: Any) -> bytes:
    """Pickles functions; with cloudpickle, also lambdas and classes of a notebook."""
    try:
        import cloudpickle
    except ImportError:  # gymnasium installs it
        return pickle.dumps(make_fns)
    return cloudpickle.dumps(make_fns)


def _check_picklable(make_fns: Sequence[Callable[[], Any]]) -> None:
    for at, fn in enumerate(make_fns):
        try:
            _dumps(fn)
        except Exception as error:
            raise ValueError(
                "`make_fns` must be picklable; `functools.partial` of a function at "
                "module level takes options, and `pip install cloudpickle` allows "
                f"lambdas. Got function {at}, {fn!r}: {error}."
            ) from error

"""`serve`: the loop of a worker process, which steps its environments on request.

A request is `(method, arguments)`, a reply `(result, error)`, with the packed exception
or None. `advance` alone gets several replies, one for each environment that it names,
once that one has stepped.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from multiprocessing import connection, reduction
from typing import Any

import numpy as np

from rollout.envs.host import exceptions, shared_memory
from rollout.envs.host.gymnasium_actions import split_action
from rollout.envs.host.local_envs import LocalEnvs
from rollout.envs.host.types import EnvFault

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def serve(pipe: connection.Connection, start_method: str) -> None:
    """Obeys requests until `close`, or until the main process ends."""
    _end_with_parent(start_method)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends this one
    worker = _Worker(pipe)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            method, args = pickle.loads(pipe.recv_bytes())
            if method == "advance":
                for causes in worker.advance(args):
                    pipe.send_bytes(pickle.dumps((causes, None)))
                continue
            try:
                reply = getattr(worker, method)(*args), None
            except Exception as error:
                reply = None, exceptions.to_bytes(error)
            pipe.send_bytes(pickle.dumps(reply))
            if method == "close":
                return


class _Worker:
    """The methods that can be requested.

    Those that step, reset or make environments return the packed causes of those that
    have become faulty since the last request.
    """

    _envs: LocalEnvs

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe
        self._known: Mapping[int, BaseException] = {}

    def make(
        self,
        make_fns: bytes,
        info: Mapping[str, Any],
        ids: range,
        faulty: Collection[int],
    ) -> tuple[Any, Any]:
        """Makes the environments, some of which stay faulty; returns their spaces."""
        self._envs = LocalEnvs(pickle.loads(make_fns), **info, first=ids.start)
        for at in faulty:
            self._envs.causes[at - ids.start] = RuntimeError("not rebuilt")
        self._known = dict(self._envs.causes)
        self._ids, self._split = ids, split_action(self._envs.spaces[1])
        return self._envs.spaces

    def share(self, num_envs: int) -> None:
        """Moves the arrays to the memory whose descriptor comes after this message."""
        descriptor = reduction.recv_handle(self._pipe)
        # Arrays of all workers' environments, cut to the rows of this one.
        rows = slice(self._ids.start, self._ids.stop)
        self._arrays = shared_memory.arrays(
            self._envs.layout, num_envs, descriptor, rows
        )
        os.close(descriptor)  # the mapping stays
        self._action = self._envs.layout.action.unflatten(self._arrays.action)
        self._envs.place(self._arrays)

    def step(self) -> dict[int, bytes]:
        self._envs.step(self._action)
        return self._new_causes()

    def advance(self, numbers: Sequence[int]) -> Iterator[dict[int, bytes]]:
        index = np.asarray(numbers)
        some = [array[index] for array in self._arrays.action]
        actions = self._split(self._envs.layout.action.unflatten(some))
        for at, action in zip(numbers, actions, strict=True):
            self._envs.advance(at, action)
            yield self._new_causes()

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> dict[int, bytes]:
        with contextlib.suppress(EnvFault):
            self._envs.reset(seeds, mask)
        return self._new_causes()

    def rebuild(self, mask: np.ndarray) -> dict[int, bytes]:
        with contextlib.suppress(EnvFault):
            self._envs.rebuild(mask)
        return self._new_causes()

    def save(self, allow_pickle: bool) -> list[bytes] | None:
        return self._envs.save(allow_pickle=allow_pickle)

    def prepare(self, saved: Sequence[bytes], allow_pickle: bool) -> bool:
        return self._envs.prepare(saved, allow_pickle)

    def swap(self) -> dict[int, bytes]:
        self._envs.swap()
        return self._new_causes()

    def close(self) -> None:
        self._envs.close()

    def _new_causes(self) -> dict[int, bytes]:
        """Returns the packed causes that the main process does not know yet."""
        known, causes = self._known, self._envs.causes
        if not known and not causes:  # the usual case, kept fast
            return {}
        self._known = dict(causes)
        return {
            self._ids[at]: exceptions.to_bytes(cause)
            for at, cause in causes.items()
            if known.get(at) is not cause
        }


def _end_with_parent(start_method: str) -> None:
    """Ends this process when the main one ends, even in the middle of a step."""
    parent: Any = multiprocessing.parent_process()

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    # The thread needs the interpreter's lock, which a hanging step may hold. The parent
    # of a spawned worker is a thread, which may end before its process.
    if sys.platform == "linux" and start_method == "forkserver":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

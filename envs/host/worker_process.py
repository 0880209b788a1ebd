"""`serve`: the loop of a worker process, which steps its environments on request.

A request is `(method, arguments)`, a reply `(result, error)`: what the method returned,
or the packed exception that it raised. Each request gets one reply, in the same order.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection, reduction
from typing import Any

import numpy as np

from rollout.envs.host import exceptions, shared_memory
from rollout.envs.host.gymnasium_actions import split_action
from rollout.envs.host.local_envs import LocalEnvs
from rollout.envs.host.types import EnvFault
from rollout.envs.types import ArrayTree

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def serve(pipe: connection.Connection) -> None:
    """Obeys requests until `close`, or until the main process ends."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends this one
    worker, method = _Worker(pipe), ""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while method != "close":
            method, args = pickle.loads(pipe.recv_bytes())
            result = error = None
            try:
                result = getattr(worker, method)(*args)
            except Exception as raised:
                error = exceptions.to_bytes(raised)
            pipe.send_bytes(pickle.dumps((result, error)))


class _Worker:
    """The methods that can be requested.

    Those that step, reset or rebuild return the causes of faulty environments, packed,
    by their numbers.
    """

    _envs: Any = None  # LocalEnvs, once they are made

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe

    def make(
        self, make_fns: Sequence[bytes], info: Mapping[str, Any], ids: range
    ) -> tuple[Any, Any]:
        """Makes the environments; returns their spaces."""
        fns = [pickle.loads(fn) for fn in make_fns]
        envs = LocalEnvs(fns, **info, first=ids.start)
        self._envs, self._ids, self._split = envs, ids, split_action(envs.spaces[1])
        return envs.spaces

    def share(self, num_envs: int) -> None:
        """Moves the arrays to the memory whose descriptor comes after this message."""
        descriptor = reduction.recv_handle(self._pipe)
        layout, rows = self._envs.layout, slice(self._ids.start, self._ids.stop)
        arrays = shared_memory.arrays(layout, num_envs, descriptor, rows)
        os.close(descriptor)  # the mapping stays
        self._actions = arrays.action
        self._envs.place(arrays)

    def step(self) -> dict[int, bytes]:
        self._envs.step(self._envs.layout.action.unflatten(self._actions))
        return self._causes()

    def advance(self, at: int) -> dict[int, bytes]:
        row = [array[at : at + 1] for array in self._actions]
        (action,) = self._split(self._envs.layout.action.unflatten(row))
        self._envs.advance(at, action)
        return self._causes()

    def reset(self, seeds: np.ndarray, mask: np.ndarray) -> dict[int, bytes]:
        with contextlib.suppress(EnvFault):  # the causes tell
            self._envs.reset(seeds, mask)
        return self._causes()

    def rebuild(self, mask: np.ndarray) -> dict[int, bytes]:
        with contextlib.suppress(EnvFault):
            self._envs.rebuild(mask)
        return self._causes()

    def save(self) -> list[bytes] | None:
        return self._envs.save()

    def load(self, saved: Sequence[bytes], obs: ArrayTree) -> None:
        self._envs.load(saved, obs)

    def close(self) -> None:
        self._envs.close()

    def _causes(self) -> dict[int, bytes]:
        causes = self._envs.causes
        return {self._ids[at]: exceptions.to_bytes(x) for at, x in causes.items()}


def _end_with_parent() -> None:
    """Ends this process when the main one ends, even in the middle of a step."""
    parent: Any = multiprocessing.parent_process()

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    # The thread needs the interpreter's lock, which a hanging step may hold.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

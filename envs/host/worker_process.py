"""`serve`: the main loop of a worker process, which steps environments on request.

A request is `(method, arguments)`. A reply is `(result, error, causes)`: the result of
the method or the exception that it raised, and the exceptions of all faulty
environments by index. Each request gets one reply, in order.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection, reduction
from typing import Any

import numpy as np

from rollout.envs.host import exceptions, shared_memory
from rollout.envs.host.local_envs import LocalEnvs

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def serve(pipe: connection.Connection) -> None:
    """Handles requests until the request "close" or the end of the main process."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    envs: Any = None  # set by the request "make"
    method = ""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while method != "close":
            method, args = pickle.loads(pipe.recv_bytes())
            result = error = None
            try:
                if method == "make":
                    envs = _Envs(pipe, *args)
                    result = envs.spaces
                else:
                    result = getattr(envs, method)(*args)
            except Exception as raised:
                # Continuing is safe: after a failed method, each environment is either
                # intact or in `causes`.
                error = exceptions.portable(raised)
            causes = {}
            if envs is not None:
                for index, cause in envs.causes.items():
                    causes[envs.ids[index]] = exceptions.portable(cause)
            pipe.send_bytes(pickle.dumps((result, error, causes)))


class _Envs(LocalEnvs):
    """The environments of a worker; requests call its methods by name."""

    def __init__(
        self,
        pipe: connection.Connection,
        make_fns: Sequence[bytes],
        info: Mapping[str, Any],
        ids: range,
    ) -> None:
        self._pipe, self.ids = pipe, ids
        # Seed the generators: workers of a fork server inherit equal states.
        _seed_global_generators(random.getrandbits(31) + ids.start)
        super().__init__([pickle.loads(x) for x in make_fns], **info, first=ids.start)

    def share(self, num_envs: int) -> None:
        """Moves the arrays to the shared memory; its descriptor follows the request."""
        # The arrays of this worker are rows of the shared `[B, ...]` arrays.
        descriptor = reduction.recv_handle(self._pipe)
        rows = slice(self.ids.start, self.ids.stop)
        arrays = shared_memory.arrays(self.layout, num_envs, descriptor, rows)
        os.close(descriptor)  # the mapping remains valid
        self._actions = arrays.action
        self.place(arrays)

    def take_step(self) -> None:
        """Steps every environment with the actions in the shared memory."""
        self.step(self.layout.action.unflatten(self._actions))

    def take_step_of(self, index: int) -> None:
        """Steps a single environment with its action in the shared memory."""
        # `_split` expects a batch: pass a batch of size one.
        row = [array[index : index + 1] for array in self._actions]
        (action,) = self._split(self.layout.action.unflatten(row))
        self.advance(index, action)

    def restart(self, seeds: np.ndarray, mask: np.ndarray, numbers: np.ndarray) -> None:
        """Resets some environments and writes observations to the shared memory."""
        if mask.all():
            _seed_global_generators(int(seeds[0]))
        self.at_episodes(numbers)
        self.reset(seeds, mask)


def _seed_global_generators(seed: int) -> None:
    """Seeds the global generators of Python and NumPy."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _end_with_parent() -> None:
    """Ends this process when the main process ends, even during a step."""
    parent: Any = multiprocessing.parent_process()

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    # The thread needs the GIL, which a hanging step may hold: let the kernel end the
    # process.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

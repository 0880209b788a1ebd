"""`serve`: the loop of a worker process, which steps its environments on request.

A request is `(method, arguments)`, a reply `(result, error, causes)`: what the method
returned, or the exception that it raised; and those of all faulty environments, by
their numbers. Each request gets one reply, in the same order.
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
    """Obeys requests until `close`, or until the main process ends."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends this one
    envs: Any = None  # once they are made
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
                # To go on is safe: the environments of a method that failed are whole
                # or in `causes`.
                error = exceptions.portable(raised)
            causes = {}
            if envs is not None:
                for at, cause in envs.causes.items():
                    causes[envs.ids[at]] = exceptions.portable(cause)
            pipe.send_bytes(pickle.dumps((result, error, causes)))


class _Envs(LocalEnvs):
    """The environments of a worker; its methods can be requested."""

    def __init__(
        self,
        pipe: connection.Connection,
        make_fns: Sequence[bytes],
        info: Mapping[str, Any],
        ids: range,
    ) -> None:
        self._pipe, self.ids = pipe, ids
        # Workers of one fork server inherit the same state of these generators.
        _seed_global_generators(random.getrandbits(31) + ids.start)
        super().__init__([pickle.loads(x) for x in make_fns], **info, first=ids.start)

    def share(self, num_envs: int) -> None:
        """Moves the arrays to the memory whose descriptor comes after this message."""
        # Only the main process knows all environments; the arrays of this worker are
        # rows of those of all.
        descriptor = reduction.recv_handle(self._pipe)
        rows = slice(self.ids.start, self.ids.stop)
        arrays = shared_memory.arrays(self.layout, num_envs, descriptor, rows)
        os.close(descriptor)  # the mapping stays
        self._actions = arrays.action
        self.place(arrays)

    def take_step(self) -> None:
        """Takes a step in every environment, with the actions in the shared memory."""
        self.step(self.layout.action.unflatten(self._actions))

    def take_step_of(self, at: int) -> None:
        """Takes a step in one of them."""
        # A batch of one, as `_split` takes a batch.
        row = [array[at : at + 1] for array in self._actions]
        (action,) = self._split(self.layout.action.unflatten(row))
        self.advance(at, action)

    def restart(self, seeds: np.ndarray, mask: np.ndarray) -> None:
        """Resets some; the observations are in the shared memory."""
        if mask.all():
            _seed_global_generators(int(seeds[0]))
        self.reset(seeds, mask)


def _seed_global_generators(seed: int) -> None:
    """Seeds the generators that Python and NumPy share in this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


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

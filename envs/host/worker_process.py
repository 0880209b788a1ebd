"""`serve`: the loop of a worker process, which steps its environments on request.

A request is `(command, argument)`. The worker answers `(None, result)`, except to
`send`: it answers `(number, cause)` for each environment once that one has stepped.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing import connection, reduction
from typing import Any

import numpy as np

from rollout.envs.host import exceptions, shared_memory
from rollout.envs.host.arrays import StepArrays, pick
from rollout.envs.host.gymnasium_actions import split_action
from rollout.envs.host.local_envs import LocalEnvs
from rollout.envs.host.types import EnvFault
from rollout.envs.types import ArrayTree

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def serve(
    pipe: connection.Connection,
    make_fns: bytes,
    info: Mapping[str, Any],
    broken: Mapping[int, bytes],
    start_method: str,
) -> None:
    """Makes environments and obeys requests until `close`, or the main process ends.

    Args:
        pipe: to the main process.
        make_fns: a pickled list of functions, one for each environment.
        info: `observe_info` and `record_info` of `LocalEnvs`.
        broken: the packed fault of each environment that is faulty from the start.
        start_method: of this process.
    """
    _end_with_parent(start_method)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends this one
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        envs = _make(pipe, make_fns, info)
        if envs is None:
            pipe.recv_bytes()  # waits until the answer was read
            return
        for at, cause in broken.items():
            envs.fail(at, exceptions.from_bytes(cause))
        _answer(pipe, None, (envs.spaces, {}, False))
        worker = _Worker(pipe, envs, set(broken))
        while worker.obey(*pickle.loads(pipe.recv_bytes())):
            pass
        envs.close()


class _Worker:
    """Obeys commands; each is a method."""

    def __init__(
        self, pipe: connection.Connection, envs: LocalEnvs, reported: set[int]
    ) -> None:
        self._pipe, self._envs = pipe, envs
        self._reported = reported  # numbers whose fault the main process knows
        self._split = split_action(envs.spaces[1])

    def obey(self, command: str, argument: Any) -> bool:
        """Runs one command; returns whether to go on."""
        if command == "close":
            return False
        if command == "send":
            self.send(argument)
        else:
            _answer(self._pipe, None, getattr(self, command)(argument))
        return True

    def share(self, place: tuple[int, int]) -> None:
        """Moves the arrays to the memory whose descriptor comes after this message."""
        first, total = place
        descriptor = reduction.recv_handle(self._pipe)
        # Arrays of all workers' environments, cut to the rows of this one.
        arrays = shared_memory.arrays(self._envs.layout, total, descriptor)
        os.close(descriptor)  # the mapping stays
        mine = slice(first, first + self._envs.num_envs)
        self._arrays = StepArrays(*(pick(part, mine) for part in arrays))
        self._envs.place(self._arrays)

    def step(self, _: None) -> dict[int, bytes]:
        self._envs.step(self._arrays.action)
        return self._causes()

    def send(self, numbers: list[int]) -> None:
        actions = self._split(pick(self._arrays.action, np.asarray(numbers)))
        for at, action in zip(numbers, actions, strict=True):
            cause = self._envs.advance(at, action)
            self._reported |= set() if cause is None else {at}
            _answer(
                self._pipe, at, None if cause is None else exceptions.to_bytes(cause)
            )

    def reset(self, argument: tuple[np.ndarray, np.ndarray]) -> dict[int, bytes]:
        with contextlib.suppress(EnvFault):
            self._envs.reset(*argument)
        return self._causes()

    def rebuild(self, mask: np.ndarray) -> dict[int, bytes]:
        # A new fault of these must be reported, though an old one was.
        self._reported -= set(np.flatnonzero(mask).tolist())
        with contextlib.suppress(EnvFault):
            self._envs.rebuild(mask)
        return self._causes()

    def save(self, allow_pickle: bool) -> tuple[list[bytes] | None, bytes | None]:
        """Returns the states, or the packed error."""
        try:
            return self._envs.save(allow_pickle=allow_pickle), None
        except Exception as error:  # a method of an environment raised it
            return None, exceptions.to_bytes(error)

    def can_load(self, argument: tuple[list[bytes], bool]) -> tuple[bool, bytes | None]:
        """Returns whether the states can be loaded, and the packed error, if any."""
        saved, allow_pickle = argument
        try:
            return self._envs.can_load(saved, allow_pickle=allow_pickle), None
        except Exception as error:
            return False, exceptions.to_bytes(error)

    def load(
        self, argument: tuple[list[bytes], ArrayTree, bool]
    ) -> tuple[bool, bytes | None, dict[int, bytes]]:
        """Returns whether the states are loaded, the packed error, and new faults."""
        saved, obs, allow_pickle = argument
        try:
            is_loaded = self._envs.load(saved, obs, allow_pickle=allow_pickle)
        except Exception as error:
            return False, exceptions.to_bytes(error), {}
        self._reported = set()
        return is_loaded, None, self._causes()

    def echo(self, token: int) -> int:
        return token

    def _causes(self) -> dict[int, bytes]:
        """Returns the packed faults that the main process does not know yet."""
        causes = self._envs.causes
        new = causes.keys() - self._reported
        self._reported |= new
        return {at: exceptions.to_bytes(causes[at]) for at in new}


def _make(
    pipe: connection.Connection, make_fns: bytes, info: Mapping[str, Any]
) -> LocalEnvs | None:
    """Makes the environments, or answers with the error."""
    try:
        return LocalEnvs(pickle.loads(make_fns), **info)
    except EnvFault as error:
        causes = {at: exceptions.to_bytes(cause) for at, cause in error.causes.items()}
        is_setup_error = False
    except Exception as error:  # an import failed, or spaces differ
        causes, is_setup_error = {0: exceptions.to_bytes(error)}, True
    _answer(pipe, None, (None, causes, is_setup_error))
    return None


def _answer(pipe: connection.Connection, at: int | None, message: Any) -> None:
    pipe.send_bytes(pickle.dumps((at, message)))


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

"""Collectors that actors of Ray make, and a Ray that runs in this process."""

import os
import pathlib
import types

import jax
from host_count import OPTIONS, POLICY, HostCount, Late, in_jax, on_host

from rollout import HostCollector

__all__ = [
    "LocalRay",
    "failing",
    "in_jax",
    "keyed",
    "late",
    "noted",
    "on_host",
    "served",
]


def noted(folder, num_envs=4):
    """A collector on the host; leaves a file with the id of its process."""
    (pathlib.Path(folder) / str(os.getpid())).touch()
    return on_host(num_envs)


def served():
    """A collector with rows of the environments that are ready."""
    return HostCollector(env=Late(4), policy=POLICY, num_ready=3)


def failing():
    raise LookupError("there is no such game")


def late(number=20):
    """A collector whose environment fails in its n-th call."""

    def fail(call, env):
        return OSError("the game is gone") if call == number else None

    return HostCollector(env=HostCount(4, fault_fn=fail), **OPTIONS)


def keyed():
    """A collector in JAX that records typed keys."""

    def record(transition):
        keys = jax.random.split(jax.random.key(5), transition.mask.shape)
        return transition.replace(extras={"key": keys})

    return in_jax().replace(record_fn=record)


class _RayError(Exception):
    pass


class _RayTaskError(_RayError):
    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class LocalRay(types.ModuleType):
    """The parts of Ray that are used, in this process: calls run when waited for."""

    exceptions = types.SimpleNamespace(RayError=_RayError, RayTaskError=_RayTaskError)

    def __init__(self):
        super().__init__("ray")
        self.actors, self.num_put, self.options = [], 0, {}

    def get_runtime_context(self):
        ids = {"GPU": ["0"]}  # so that an actor leaves this process as it is
        return types.SimpleNamespace(get_accelerator_ids=lambda: ids)

    def put(self, value):
        self.num_put += 1
        return value

    def remote(self, kind):
        def make(*args):
            self.actors.append(_LocalActor(kind(*args)))
            return self.actors[-1]

        def options(**options):
            self.options = options
            return types.SimpleNamespace(remote=make)

        return types.SimpleNamespace(remote=make, options=options)

    def wait(self, references, num_returns):
        assert num_returns == 1
        # The fast ones first: those of actors that do not lag behind.
        order = sorted(references, key=lambda x: x.actor.is_slow)
        return order[:1], order[1:]

    def get(self, reference):
        if reference.actor.is_killed:
            raise _RayError("its process ended")
        try:
            return reference.make()
        except Exception as error:
            raise _RayTaskError(error) from error

    def kill(self, actor):
        actor.is_killed = True


class _LocalActor:
    def __init__(self, actor):
        self.actor, self.is_killed, self.is_slow = actor, False, False
        self.num_in_flight, self.params = 0, None

    @property
    def collect(self):
        def remote(*args):
            self.num_in_flight += 1
            return _Reference(self, lambda: self.run(*args))

        return types.SimpleNamespace(remote=remote)

    def run(self, params):
        self.num_in_flight, self.params = self.num_in_flight - 1, params
        return self.actor.collect(params)


class _Reference:
    def __init__(self, actor, make):
        self.actor, self.make = actor, make

"""Collectors that Ray actors create, and a local replacement for Ray."""

import os
import pathlib
import types

import jax
from host_count import OPTIONS, POLICY, DelayedCount, HostCount, in_jax, on_host

from rollout import HostCollector

__all__ = [
    "LocalRay",
    "fault_collector",
    "in_jax",
    "key_collector",
    "on_host",
    "pid_collector",
    "raise_error",
    "ready_collector",
]


def pid_collector(folder, num_envs=4):
    """Creates a host collector and a file named after the id of its process."""
    (pathlib.Path(folder) / str(os.getpid())).touch()
    return on_host(num_envs)


def ready_collector():
    """Creates a collector with `num_ready`."""
    return HostCollector(env=DelayedCount(4), policy=POLICY, num_ready=3)


def raise_error():
    raise LookupError("there is no such game")


def fault_collector(number=20):
    """Creates a collector whose environment fails in call `number`."""

    def fail(call, env):
        return OSError("the game is gone") if call == number else None

    return HostCollector(env=HostCount(4, fault_fn=fail), **OPTIONS)


def key_collector():
    """Creates a JAX collector that records typed keys."""

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
    """The parts of Ray that the project uses; `get` runs calls in this process."""

    exceptions = types.SimpleNamespace(RayError=_RayError, RayTaskError=_RayTaskError)

    def __init__(self):
        super().__init__("ray")
        self.actors, self.num_put, self.options = [], 0, {}

    def get_runtime_context(self):
        ids = {
            "GPU": ["0"]
        }  # so that an actor does not change the settings of this process
        return types.SimpleNamespace(get_accelerator_ids=lambda: ids)

    def put(self, value):
        self.num_put += 1
        return value

    def remote(self, actor_class):
        def make(*args):
            self.actors.append(_LocalActor(actor_class(*args)))
            return self.actors[-1]

        def options(**options):
            self.options = options
            return types.SimpleNamespace(remote=make)

        return types.SimpleNamespace(remote=make, options=options)

    def wait(self, references, num_returns):
        assert num_returns == 1
        # References of fast actors are ready first.
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

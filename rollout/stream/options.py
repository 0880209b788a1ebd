"""Options of a `Stream`, validated on construction."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from rollout import checks
from rollout.checks import INT32_MAX
from rollout.envs.types import ArrayTree
from rollout.types import Transition

Postprocess = Callable[[Transition], ArrayTree]
Destination = str | jax.Device | jax.sharding.Sharding | None  # "host"

_CHOICES = {
    "at_batch_end": ("continue", "reset", "truncate"),
    "on_fault": ("raise", "drop"),
    "prefetch": (0, 1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a `Stream`, which documents them.

    Raises:
        ValueError: if an option is invalid, or incompatible with another option.
    """

    num_envs: int
    steps_per_batch: int | None
    episodes_per_batch: int | None
    total_steps: int | None
    max_episode_steps: int | None
    at_batch_end: str
    postprocess: Postprocess | None
    device: Destination
    prefetch: int
    reuse_memory: bool
    check_finite: bool
    on_fault: str

    def __post_init__(self) -> None:
        self._check_int("steps_per_batch", whole_rows=True)
        self._check_int("episodes_per_batch")
        self._check_int("total_steps", whole_rows=True, most=None)
        if self.max_episode_steps is not None:
            limit = checks.max_episode_steps(self.max_episode_steps)
            object.__setattr__(self, "max_episode_steps", limit)
        checks.boolean("reuse_memory", self.reuse_memory)
        checks.boolean("check_finite", self.check_finite)
        if self.postprocess is not None:
            checks.function("postprocess", self.postprocess)
        for name, choices in _CHOICES.items():
            checks.choice(name, getattr(self, name), choices)
        if (self.steps_per_batch is None) == (self.episodes_per_batch is None):
            raise ValueError(
                "Either `steps_per_batch` or `episodes_per_batch` must be given, got "
                f"{self.steps_per_batch} and {self.episodes_per_batch}."
            )
        if self.episodes_per_batch is not None:
            self._check_episodes()
        self._check_device()

    def program_options(self) -> "Options":
        """Returns the options with defaults for options that the program ignores."""
        # Streams that differ only in ignored options share a program.
        unread: dict[str, Any] = {"total_steps": None, "device": None}
        unread |= {"prefetch": 0, "reuse_memory": False}
        if self.episodes_per_batch is None:
            unread["steps_per_batch"] = self.num_envs  # `num_rows` is an argument
        return dataclasses.replace(self, **unread)

    def check_processes(self) -> None:
        """Raises if lanes in several processes do not support the options."""
        if self.prefetch:
            raise ValueError(
                "`prefetch` must be 0 with lanes in several processes, got "
                f"{self.prefetch}: all processes must run programs in the same order."
            )
        if self.device == "host":
            raise ValueError(
                '`device` must not be "host" with lanes in several processes: no '
                "process has all lanes."
            )

    def check_host(self) -> None:
        """Raises if host environments do not support the options."""
        if self.on_fault == "drop":
            raise ValueError(
                '`on_fault="drop"` needs environments in JAX. For host environments '
                'use `HostCollector(on_fault="restart")`.'
            )
        if self.reuse_memory:
            raise ValueError(
                "`reuse_memory=True` needs environments in JAX: host environments "
                "write to host memory."
            )

    def _check_int(
        self, name: str, *, most: int | None = INT32_MAX, whole_rows: bool = False
    ) -> None:
        if (value := getattr(self, name)) is None:
            return
        value = checks.int_between(name, value, most=most)
        # The dataclass is frozen for its hash: equal options share programs.
        object.__setattr__(self, name, value)  # a Python int
        if whole_rows:
            checks.multiple(name, value, self.num_envs, f"num_envs={self.num_envs}")

    def _check_episodes(self) -> None:
        if self.max_episode_steps is None:
            raise ValueError(
                "`episodes_per_batch` needs `max_episode_steps`, got None."
            )
        if self.total_steps is not None:
            raise ValueError(
                "`total_steps` must not be given with `episodes_per_batch`, because "
                f"the length of episodes varies, got {self.total_steps}."
            )
        if self.on_fault == "drop":
            raise ValueError(
                '`on_fault="drop"` must not be given with `episodes_per_batch`, which '
                "returns an exact number of episodes."
            )

    def _check_device(self) -> None:
        device: Any = self.device
        is_device = isinstance(device, jax.Device | jax.sharding.Sharding)
        if device is not None and device != "host" and not is_device:
            raise ValueError(
                '`device` must be None, "host", a `jax.Device` or a '
                f"`jax.sharding.Sharding`, got {device!r}."
            )
        if self.reuse_memory and device is not None:
            raise ValueError(
                "`reuse_memory=True` needs `device=None`, because a copy on another "
                f"device cannot reuse memory, got {device!r}."
            )

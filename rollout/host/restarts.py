"""Restarts environments that fail, and counts what was lost."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rollout.envs.host.types import EnvFault

_LOG = logging.getLogger("rollout")


class FaultStats(NamedTuple):
    """Counts of faults and their costs, since the collector was made.

    Attributes:
        faulty_episodes: episodes that were given up.
        lost_steps: steps of these that were masked out, the faulty ones included. A
            call for episodes has only its last rows, at most 64, and counts those.
        restarts: number of times an environment was rebuilt.
    """

    faulty_episodes: int
    lost_steps: int
    restarts: int


class Restarts:
    """Counts faults, logs each once, and raises if there are too many."""

    def __init__(self, env: Any, on_fault: str, max_restarts: int) -> None:
        if on_fault not in ("raise", "restart"):
            raise ValueError(
                f'`on_fault` must be "raise" or "restart", got {on_fault!r}.'
            )
        if on_fault == "restart" and not hasattr(env, "rebuild"):
            raise ValueError(
                '`on_fault="restart"` needs environments that can be rebuilt one by '
                "one, as those of `rollout.envs.workers` and of "
                "`rollout.envs.from_gymnasium` with an id or a function, got "
                f"{type(env).__name__}."
            )
        self._env, self._on_fault = env, on_fault
        self._max_restarts = max_restarts
        self.stats = FaultStats(0, 0, 0)

    def report(
        self, causes: Mapping[int, BaseException], *, episodes: int, steps: int
    ) -> None:
        """Counts a fault, and logs or raises it.

        Args:
            causes: the error of each environment that failed, by its number.
            episodes: episodes that are lost with them.
            steps: steps that are masked out.

        Raises:
            EnvFault: unless `on_fault` is "restart", or beyond `max_restarts`.
        """
        self.count(episodes=episodes, steps=steps)
        old = self.stats
        cause = next(iter(causes.values()))
        if self._on_fault == "raise":
            raise EnvFault(causes) from cause
        if old.restarts + len(causes) > self._max_restarts:
            hint = f"; `max_restarts`={self._max_restarts} are used up"
            raise EnvFault(causes, hint) from cause
        for number, reason in causes.items():
            text = f"{type(reason).__name__}: {reason}"
            _LOG.warning("environment %d is rebuilt after %s", number, text)

    def count(self, *, episodes: int, steps: int) -> None:
        """Counts lost episodes, and steps that are masked out."""
        old = self.stats
        self.stats = old._replace(
            faulty_episodes=old.faulty_episodes + episodes,
            lost_steps=old.lost_steps + steps,
        )

    def rebuild(self, numbers: Iterable[int]) -> None:
        """Rebuilds these environments, whatever `on_fault` says."""
        mask = np.zeros(self._env.num_envs, bool)
        mask[list(numbers)] = True
        restarts = self.stats.restarts + int(mask.sum())
        self.stats = self.stats._replace(restarts=restarts)
        if hasattr(self._env, "rebuild"):
            self._env.rebuild(mask)

"""Lets only the carry that a host collector returned last begin its next call."""

from typing import Any

import jax
import numpy as np

from rollout import checks
from rollout.envs import prng
from rollout.envs.host.ownership import claim, is_claimed, new_user
from rollout.envs.host.types import HostVectorEnv
from rollout.types import Carry, check_carry


class LatestCarry:
    """The latest carry of a collector, known by a ticket in its `env_state`.

    The environments have the ticket, too, so that a collector notices if another one
    has stepped them since.

    Attributes:
        carry: the carry that the last call returned.
        used: the ticket of the carry of the current call, or of one cut short.
    """

    def __init__(self, env: HostVectorEnv) -> None:
        self._env: Any = env
        self._ticket: Any = np.uint32(0)  # 0 before `init`
        self.carry: Carry | None = None
        self.used: Any = None

    @property
    def is_begun(self) -> bool:
        """Whether there was a carry."""
        return bool(self._ticket)

    @property
    def is_mine(self) -> bool:
        """Whether no other collector has stepped the environments since."""
        return is_claimed(self._env, self._ticket)

    @property
    def env_state(self) -> tuple[Any, Any]:
        """The ticket, and what the environments share."""
        return self._ticket, getattr(self._env, "shared", ())

    def is_latest(self, carry: Carry) -> bool:
        """Whether a carry, or a copy of it, is the latest one."""
        return self.is_begun and np.array_equal(_ticket_of(carry), self._ticket)

    def is_used(self, carry: Carry) -> bool:
        """Whether a carry is that of a call that was cut short."""
        return np.array_equal(_ticket_of(carry), self.used)

    def take_over(self) -> None:
        """Makes all carries so far void, also those of other collectors."""
        self._ticket = np.uint32(new_user())
        claim(self._env, self._ticket)

    def use_up(self) -> None:
        """Begins a call with the latest carry."""
        self.used = self._ticket
        self.take_over()

    def check(self, carry: Carry) -> None:
        """Raises unless a call may begin with a carry."""
        checks.outside_of_jit("HostCollector")
        check_carry(carry)
        if self.is_begun and not self.is_mine:
            raise ValueError(
                "`carry` must be of the collector that stepped `env` last, but another "
                "one has stepped it since: give each its own environments, or call "
                "`init` again."
            )
        if not self.is_latest(carry):
            raise ValueError(
                "`carry` must be the one that the last call returned, for the "
                "environments have moved on; after an error `recover` returns one."
            )
        for name in ("key", "step", "next_episode", "obs", "episode"):
            given, returned = (getattr(x, name) for x in (carry, self.carry))
            what = f"`carry.{name}` must be as the last call returned it, which the "
            what += "environments have: only `policy_state` may be replaced"
            checks.same(what, returned, given)
            pairs = zip(jax.tree.leaves(returned), jax.tree.leaves(given), strict=True)
            for x, y in pairs:  # the same array is equal to itself without being read
                words = prng.words((x, y))
                if x is not y and not np.array_equal(*words, equal_nan=True):
                    raise ValueError(f"{what}.")


def _ticket_of(carry: Carry) -> Any:
    state = carry.env_state
    return state[0] if isinstance(state, tuple) and state else None

"""Lets only the carry that a host collector returned last begin its next call."""

from typing import Any

import jax
import numpy as np

from rollout import checks
from rollout.envs import trees
from rollout.envs.host.ownership import claim, is_claimed, new_user
from rollout.envs.host.types import HostVectorEnv
from rollout.types import Carry, check_carry


class LatestCarry:
    """The latest carry of a collector, known by a ticket in its `env_state`.

    The environments have the ticket, too, so that a collector notices if another one
    has stepped them since.

    Attributes:
        ticket: of the latest carry, or of the call that it began; 0 before `init`.
        carry: the carry that the last call returned.
        used: the ticket of the carry of the current call, or of one cut short.
    """

    def __init__(self, env: HostVectorEnv) -> None:
        self._env: Any = env
        self.ticket: Any = np.uint32(0)
        self.carry: Carry | None = None
        self.used: Any = None

    @property
    def is_mine(self) -> bool:
        """Whether no other collector has stepped the environments since."""
        return is_claimed(self._env, self.ticket)

    def is_latest(self, carry: Carry) -> bool:
        """Whether the environments are where they were at a carry, or a copy of it."""
        return self.is_mine and np.array_equal(_ticket_of(carry), self.ticket)

    def is_used(self, carry: Carry) -> bool:
        """Whether a carry is that of a call that was cut short."""
        return np.array_equal(_ticket_of(carry), self.used)

    def take_over(self) -> None:
        """Makes all carries so far void, also those of other collectors."""
        self.ticket = np.uint32(new_user())
        claim(self._env, self.ticket)

    def use_up(self) -> None:
        """Begins a call with the latest carry."""
        # From here on the environments move: no carry is valid until the call returns.
        self.used = self.ticket
        self.take_over()

    def check(self, carry: Carry) -> None:
        """Raises unless a call may begin with a carry."""
        checks.outside_of_jit("HostCollector")
        check_carry(carry)
        # By its ticket, which a copy of the carry has, too.
        if not self.is_latest(carry):
            raise ValueError(
                "`carry` must be the one that the last call returned, for the "
                "environments have moved on: after an error `recover` returns one; if "
                "another collector has stepped them, `init` does, or give each its own."
            )
        for name in ("key", "step", "next_episode", "obs", "episode"):
            given, returned = (getattr(x, name) for x in (carry, self.carry))
            what = f"`carry.{name}` must be as the last call returned it, which the "
            what += "environments have: only `policy_state` may be replaced"
            checks.same(what, returned, given)
            for x, y in zip(*map(jax.tree.leaves, (returned, given)), strict=True):
                if x is y:  # usually: it need not be read
                    continue
                if not np.array_equal(*trees.unwrap_keys((x, y)), equal_nan=True):
                    raise ValueError(f"{what}.")


def _ticket_of(carry: Carry) -> Any:
    state = carry.env_state
    return state[0] if isinstance(state, tuple) and state else None

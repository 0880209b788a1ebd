"""Rejects stale carries: a host collector accepts only its latest carry."""

from typing import Any

import jax
import numpy as np

from rollout import checks
from rollout.envs import trees
from rollout.envs.host.env_checks import claim, is_claimed, new_user
from rollout.envs.host.types import HostVectorEnv
from rollout.types import Carry, check_carry


class LatestCarry:
    """The latest carry of a collector, identified by a ticket in `env_state`.

    The environments also store the ticket, so that a collector notices if another
    collector has stepped them.

    Attributes:
        ticket: ticket of the latest carry, or of the running call; 0 before `init`.
        carry: carry that the latest call returned.
        used_ticket: ticket of the carry that began the running or interrupted call.
    """

    def __init__(self, env: HostVectorEnv) -> None:
        self._env: Any = env
        self.ticket: Any = np.uint32(0)
        self.carry: Carry | None = None
        self.used_ticket: Any = None

    @property
    def is_owner(self) -> bool:
        """True if no other collector has stepped the environments."""
        return is_claimed(self._env, self.ticket)

    def is_latest(self, carry: Carry) -> bool:
        """Returns whether a carry, or a copy of it, matches the environments."""
        return self.is_owner and np.array_equal(_ticket_of(carry), self.ticket)

    def is_used(self, carry: Carry) -> bool:
        """Returns whether a carry began the running or interrupted call."""
        return np.array_equal(_ticket_of(carry), self.used_ticket)

    def take_over(self) -> None:
        """Invalidates all earlier carries, including carries of other collectors."""
        self.ticket = np.uint32(new_user())
        claim(self._env, self.ticket)

    def use_up(self) -> None:
        """Begins a call, which invalidates the latest carry."""
        # The environments step during the call: no carry is valid until it returns.
        self.used_ticket = self.ticket
        self.take_over()

    def check(self, carry: Carry) -> None:
        """Raises unless a call may begin with a carry."""
        checks.outside_of_jit("HostCollector")
        check_carry(carry)
        # Compare tickets: a copy of the carry has the same ticket.
        if not self.is_latest(carry):
            raise ValueError(
                "`carry` must be the result of the latest call: the environments have "
                "been stepped since. After an error, call `recover`. If another "
                "collector steps these environments, call `init` or use separate ones."
            )
        for name in ("key", "step", "next_episode", "obs", "episode"):
            value, expected = (getattr(x, name) for x in (carry, self.carry))
            message = f"`carry.{name}` must be as the latest call returned it, since "
            message += "only `policy_state` may be replaced"
            checks.same(message, expected, value)
            for x, y in zip(*map(jax.tree.leaves, (expected, value)), strict=True):
                if x is y:  # the usual case: avoid the transfer from the device
                    continue
                if not np.array_equal(*trees.unwrap_keys((x, y)), equal_nan=True):
                    raise ValueError(f"{message}.")


def _ticket_of(carry: Carry) -> Any:
    state = carry.env_state
    return state[0] if isinstance(state, tuple) and state else None

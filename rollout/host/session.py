"""Runs the calls of a `HostCollector`: ownership of the environments, and recovery.

A session holds one `HostState`, the state after the latest complete row. A step
computes the next state, and one assignment commits it. Ctrl-C is delayed and raises
between two steps, so it loses no row. A second Ctrl-C, or an error in the code of an
environment, may raise within a step. The environments may then be ahead of the state,
so all lanes begin new episodes.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import numpy as np

from rollout.base import checks, trees
from rollout.envs.host import env_checks
from rollout.envs.host.types import EnvFault
from rollout.envs.spaces import as_space
from rollout.host import asynchronous, host_state, host_step
from rollout.host.ctrl_c import delay_ctrl_c
from rollout.host.episode_plan import EpisodePlan, EpisodeTable
from rollout.host.host_policy import HostPolicy
from rollout.host.host_state import (
    NO_LIMIT,
    Faults,
    FaultStats,
    HostSpec,
    HostState,
    make_carry,
)
from rollout.host.rows import Rows, recorder
from rollout.types import Carry, Episodes, Transition, check_carry

_LOG = logging.getLogger("rollout")


class Session:
    """Steps the environments of a collector; one call at a time.

    Args:
        collector: the `HostCollector`.

    Attributes:
        spec: constants of the collection; None before `start`.
        state: state after the latest complete row; None before `start`.
    """

    def __init__(self, collector: Any) -> None:
        self._collector, self._lock = collector, threading.Lock()
        self.spec: Any = None
        self.state: Any = None
        # The environments store the version of the latest carry or of the running
        # call, so that a collector detects if another collector has stepped them.
        self._version: Any = np.uint32(0)
        self._start_version: Any = None  # of the carry that began the call
        self._carry: Carry | None = None  # the latest carry
        # Called between two rows; raises if Ctrl-C was pressed.
        self._raise_pending: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def call(self, carry: Carry | None = None) -> Iterator[None]:
        """Delays Ctrl-C during a call, and invalidates the carry that begins it.

        Until the call returns, `recover` can continue from the last complete row.
        """
        with delay_ctrl_c() as raise_pending:
            if not self._lock.acquire(blocking=False):
                raise RuntimeError(
                    "A collector over host environments makes one call at a time, and "
                    "a batch of a `Stream` is running in another thread. Close the "
                    "stream first, or use a second collector with other environments."
                )
            try:
                # Validate the carry first: after an error the latest carry stays valid.
                if carry is not None:
                    self.check(carry)
                    self.state = _without_rows(self.state).replace(
                        policy_state=carry.policy_state
                    )
                    self._start_version = self._version
                    self._claim()
                self._raise_pending = raise_pending
                yield
            finally:
                self._lock.release()
        # Delayed Ctrl-C raises before this line, so that `recover` finds the rows.
        self.state, self._start_version = _without_rows(self.state), None

    def check(self, carry: Carry) -> None:
        """Raises unless a call may begin with a carry."""
        checks.check_outside_jit("HostCollector")
        check_carry(carry)
        if not self.is_latest(carry):
            raise ValueError(
                "`carry` must be the result of the latest call: the environments have "
                "been stepped since. After an error, call `recover`. If another "
                "collector steps these environments, call `init` or use separate ones."
            )
        for name in ("key", "step", "next_episode", "obs", "episode"):
            value, expected = vars(carry)[name], vars(self._carry)[name]
            if value is expected:  # the usual case, kept fast
                continue
            message = f"`carry.{name}` must be as the latest call returned it, since "
            message += "only `policy_state` may be replaced"
            checks.check_same_types(message, expected, value)
            for x, y in zip(*map(jax.tree.leaves, (expected, value)), strict=True):
                if x is y:  # avoid the transfer from the device
                    continue
                if not np.array_equal(*trees.unwrap_keys((x, y)), equal_nan=True):
                    raise ValueError(f"{message}.")

    def is_latest(self, carry: Carry) -> bool:
        """Returns whether a carry, or a copy of it, matches the environments."""
        is_owner = env_checks.is_claimed(self._collector.env, self._version)
        return is_owner and np.array_equal(_version_of(carry), self._version)

    def was_used(self, carry: Carry) -> bool:
        """Returns whether a carry began the running or interrupted call."""
        version = self._start_version
        return version is not None and np.array_equal(_version_of(carry), version)

    def start(self, key: chex.PRNGKey, shared: Any = None) -> None:
        """Claims the environments; all lanes then wait for their first episode."""
        collector = self._collector
        env, num_ready, record_fn = collector.env, collector.num_ready, None
        self._start_version = self._version
        self._claim()
        env.load_shared(shared)
        if collector.record_fn is not None or collector.accumulators:
            record_fn = recorder(collector.accumulators, collector.record_fn)
        action_space = as_space(env.action_space, "env.action_space")
        self.spec = HostSpec(
            env=env,
            policy=HostPolicy(collector.policy, action_space, env.num_envs, key),
            key=key,
            num_ready=num_ready,
            accumulators=collector.accumulators,
            record_fn=record_fn,
        )
        old = self.state
        stats, failed = (FaultStats(), None) if old is None else (old.stats, old.failed)
        self.state = host_state.init(self.spec, stats, failed)

    def restore(self, carry: Carry, saved: list[bytes] | None) -> None:
        """Continues from a carry; restarts its episodes unless states were saved."""
        self.start(carry.key, carry.env_state[1])
        state = host_state.load_carry(self.spec, self.state, carry)
        if saved is None:
            self.state = state
            self.begin_episodes(state.episode_id, self.spec.all_lanes)
            return
        self.state = host_state.abandon(state, has_failed=True)  # if `load` raises
        self._collector.env.load(saved, jax.tree.map(np.array, carry.obs))
        self.state = state.replace(failed=self.spec.no_lanes)

    def finish(self) -> Carry:
        """Returns the carry for the next call."""
        self._carry = make_carry(self.spec, self.state, self._version)
        return self._carry

    def run(
        self,
        params: Any,
        num_rows: int,
        block_size: int,
        limit: int = NO_LIMIT,
        *,
        cut_last: bool = False,
    ) -> Iterator[HostState]:
        """Collects up to `num_rows` rows, or until the assigned episodes have ended.

        Yields the state after each full block, with the recorded rows. Episodes are
        truncated after `limit` steps. With `cut_last`, the last row truncates all
        episodes that do not terminate in it.
        """
        spec: HostSpec = self.spec
        mode: Any = host_step if spec.num_ready is None else asynchronous
        for first in range(0, num_rows, block_size):
            if self.state.is_done:
                return
            # Allocate the full size, so that one compiled program records every block.
            size = min(block_size, num_rows - first)
            rows = Rows(spec.width, block_size)
            state = self.state = _without_rows(self.state).replace(rows=rows)
            while state.num_rows < size and not state.is_done:
                self._raise_pending()
                # An error of the policy leaves environments and state consistent.
                decision = mode.decide(spec, state, params)
                is_last = cut_last and state.num_rows == size - 1
                try:
                    lane_results = mode.take(spec, state, decision)
                    self.state, faults = host_step.advance(
                        spec,
                        state,
                        params,
                        decision,
                        lane_results,
                        limit=limit,
                        is_last=is_last,
                    )
                except BaseException:
                    self.state = host_state.abandon(self.state, has_failed=True)
                    raise
                if faults.causes:
                    self._report(faults)
                if np.count_nonzero(self.state.must_reset):  # faster than `any`
                    self.settle()
                state = self.state
            self.state = host_step.record(spec, state)
            yield self.state

    def settle(self) -> None:
        """Rebuilds failed environments and resets lanes until no lane waits."""
        while np.count_nonzero(self.state.must_reset):
            try:
                self.state, faults = host_step.restart(self.spec, self.state)
            except BaseException:
                self.state = host_state.abandon(self.state, has_failed=True)
                raise
            if faults.causes:
                self._report(faults)

    def begin_episodes(self, episode_id: np.ndarray, mask: np.ndarray) -> None:
        """Begins the episodes with these ids, `[B]`, in the lanes of `mask`."""
        self.state = host_state.mark(self.state, mask, episode_id)
        self.settle()

    def begin_plan(self, plan: EpisodePlan) -> None:
        """Begins the first assigned episode in every lane."""
        self.state = self.state.replace(plan=plan)
        self.begin_episodes(plan.episode_id, self.spec.all_lanes)

    def end_plan(self, table: EpisodeTable) -> Episodes:
        """Returns the assigned episodes; every lane begins its next episode."""
        episodes, num_used = table.read(self.state.plan)
        self.state = host_state.end_plan(self.state, num_used)
        self.settle()
        return episodes

    def recover(self) -> Transition | None:
        """Continues after an error, and returns the rows collected before it.

        All lanes begin a new episode if episodes were assigned, or if another collector
        has stepped the environments.
        """
        if self.state is None:
            raise ValueError("`recover` must follow `init`. Call `init` first.")
        is_owner = env_checks.is_claimed(self._collector.env, self._version)
        if self.state.plan is not None or not is_owner:
            self.state = host_state.abandon(self.state)
        self.settle()
        self._claim()
        if not self.state.num_rows:
            return None
        self.state = host_step.record(self.spec, self.state)
        return jax.tree.map(lambda x: x[: self.state.num_rows], self.state.recorded)

    def _claim(self) -> None:
        """Invalidates all earlier carries, including carries of other collectors."""
        self._version = np.uint32(env_checks.new_user())
        env_checks.claim(self._collector.env, self._version)

    def _report(self, faults: Faults) -> None:
        """Logs faults; raises `EnvFault` unless the environments may be rebuilt."""
        causes, collector = faults.causes, self._collector
        hint = f", at step {faults.step} of its episode" if faults.step else ""
        num_restarts = self.state.stats.restarts + len(causes)
        restarts = collector.on_fault == "restart"
        is_exhausted = restarts and num_restarts > collector.max_restarts
        if is_exhausted:
            hint += f"; `max_restarts`={collector.max_restarts} are used up"
        if is_exhausted or not restarts:
            raise EnvFault(causes, hint) from next(iter(causes.values()))
        for number, reason in causes.items():
            text = f"{type(reason).__name__}: {reason}"
            _LOG.warning("environment %d is rebuilt after %s", number, text)


def _without_rows(state: HostState) -> HostState:
    return state.replace(rows=None, num_rows=0, recorded=None)


def _version_of(carry: Carry) -> Any:
    state = carry.env_state
    return state[0] if isinstance(state, tuple) and state else None

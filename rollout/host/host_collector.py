"""`HostCollector`: a `Collector` for host environments, which are not JAX."""

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, Self, TypeVar

import chex
import jax
import numpy as np

from rollout import checks
from rollout.envs import trees
from rollout.envs.host.types import HostVectorEnv, check_host_env
from rollout.host.ctrl_c import held_back
from rollout.host.episode_plan import EpisodePlan
from rollout.host.latest_carry import LatestCarry
from rollout.host.loop import NO_LIMIT, FaultStats, Loop
from rollout.host.rows import RowBlock, fold, recorder, row_shape
from rollout.kernel.state import accumulate_nothing, checked_parts
from rollout.types import (
    NO_VALUE,
    ActionT,
    Carry,
    Episode,
    Episodes,
    ObsT,
    ParamsT,
    Policy,
    RecordFn,
    Transition,
    check_carry,
)

Acc = TypeVar("Acc")

_BLOCK = 64  # rows per fold


@dataclasses.dataclass(eq=False, repr=False)
class HostCollector(Generic[ParamsT, ObsT, ActionT]):
    """Collects the experience of a policy in host environments, which are not JAX.

    Use it like a `Collector`: methods, arguments and results are the same. A loop in
    Python steps the environments, so no method works inside `jit`. The policy is one
    jitted program, called once per step. A carry is valid for one call, because the
    call changes the environments: older carries are stale and raise. Only
    `policy_state` of a carry may be replaced.

    `mask` is False for rows in which an environment only reset itself, and for rows of
    episodes lost to a fault. Masked-out rows are zero.

    With `num_ready`, a row has the first `num_ready` of the `B` environments that
    answer, in the order of their answers. The policy acts for these environments, and
    they step while the collector waits for the next row. Trajectories are
    `[T, num_ready, ...]`. A transition is an environment's answer to its last action.
    `info` is an `AsyncInfo`; `regroup_by_env` sorts transitions by environment. Actions
    in flight at the end of a call are answered in the first rows of the next call. The
    policy receives `[num_ready, ...]` observations and the state of `B` lanes. The
    speed of the environments decides which environment is in which row, and therefore
    which random numbers the policy uses for it. `collect_episodes` plays the first N
    episodes that are *started*, so fast or short episodes are not favored.

    Attributes:
        env: vector of `B` environments.
        policy: policy that acts in the environments.
        num_ready: number of environments per row, from 1 to B. `env` must be an
            `AsyncHostVectorEnv`. None steps all environments together.
        record_fn: function that maps a transition to its recorded fields, as in
            `Collector`.
        accumulators: custom values to accumulate per episode, by name, as in
            `Collector`.
        on_fault: "raise" or "restart", the reaction to a fault. A fault is an
            environment that raises, a worker process that dies or does not answer, an
            observation or a reward that is not finite, or an observation outside of its
            space. "raise" raises `rollout.envs.EnvFault`. "restart" masks out all rows
            of the episode in this call, counts the episode in `fault_stats`, logs the
            cause and rebuilds the environment; all other environments continue.
        max_restarts: maximum number of rebuilt environments over the life of the
            collector; the next fault raises. Choose a large number for a long run.
        is_host: True, since Python steps the environments.

    Raises:
        ValueError: if an argument is invalid.
    """

    is_host: ClassVar[bool] = True

    env: HostVectorEnv
    policy: Policy[ParamsT, ObsT, ActionT]
    _: dataclasses.KW_ONLY
    num_ready: int | None = None
    record_fn: RecordFn[ObsT, ActionT] | None = None
    accumulators: Any = ()
    on_fault: str = "raise"
    max_restarts: int = 100

    def __post_init__(self) -> None:
        checks.outside_of_jit("HostCollector")
        check_host_env(self.env)
        self.accumulators = checked_parts(self)
        self._loop = Loop(self)
        self._record = recorder(self.accumulators, self.record_fn)
        self._latest = LatestCarry(self.env)
        self._next_episode = 0
        self._accumulated: Any = ()  # values of all lanes before the loop's block
        self._call_lock = threading.Lock()

    @property
    def fault_stats(self) -> FaultStats:
        """Number of faults, lost steps and restarts so far."""
        return self._loop.stats

    def replace(self, **changes: Any) -> Self:
        """Returns a new collector with some arguments of the constructor changed.

        The new collector begins with `init`. It shares the environments unless `env` is
        changed: after its `init`, carries of this collector are invalid.
        """
        return dataclasses.replace(self, **changes)

    def freeze(self, carry: Carry) -> Self:
        """Fixes the statistics of `NormalizeHostEnv`; see `Collector.freeze`.

        The new collector shares the environments, as the result of `replace` does.
        """
        check_carry(carry)
        env = self.env.freeze(carry.env_state)
        return self if env is self.env else self.replace(env=env)

    def close(self) -> None:
        """Closes the environments."""
        self.env.close()

    def init(self, key: chex.PRNGKey) -> Carry:
        """Starts the first episode of every lane; see `Collector.init`.

        Raises:
            ValueError: as in `Collector.init`.
            envs.EnvFault: if an environment failed in its reset.
        """
        checks.outside_of_jit("HostCollector")
        checks.typed_key(key)
        with self._call():
            self._start(key)
            self._loop.begin(self._loop.episode_id)
            return self._carry()

    def _start(self, key: chex.PRNGKey, shared: Any = None) -> None:
        """Claims the environments and resets all state except shared statistics."""
        self._latest.take_over()
        self.env.restart(shared)
        self._next_episode = 0
        self._accumulated = accumulate_nothing(self.accumulators, self.env.num_envs)
        self._loop.start(key)

    def step(
        self, carry: Carry, params: ParamsT
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes one step in every lane; see `Collector.step`."""
        carry, trajectory = self.collect_steps(carry, params, 1)
        with held_back():  # as in `value`
            return carry, jax.tree.map(lambda x: x[0], trajectory)

    def row_shape(self, params: ParamsT) -> Transition[ObsT, ActionT]:
        """Returns the shapes and dtypes of a row; see `Collector.row_shape`.

        The shapes of `obs` come from the observation space, and of `info` from `env`.
        """
        return row_shape(self, self.num_ready or self.env.num_envs, params)

    def value(self, carry: Carry, params: ParamsT) -> Any:
        """Evaluates the critic at the current observations; see `Collector.value`.

        Raises:
            ValueError: as in `Collector.value`, or if `carry` is stale.
        """
        if not self.policy.has_value:
            raise ValueError(NO_VALUE)
        with held_back():  # an interrupt in jax's caches raises other errors
            self._latest.check(carry)
            return self._loop.runner.evaluate(params, carry.obs, carry.policy_state)

    def collect_steps(
        self,
        carry: Carry,
        params: ParamsT,
        num_steps: int,
        *,
        max_episode_steps: int | None = None,
        at_batch_end: str = "continue",
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes `num_steps` steps in every lane; see `Collector.collect_steps`.

        `max_episode_steps` and `at_batch_end` are as in `Stream`. With `num_ready`,
        `at_batch_end` must be "continue". Ctrl-C raises between two steps.

        Raises:
            ValueError: as in `Collector.collect_steps`, or if `carry` is stale.
            envs.EnvFault: if an environment failed and may not be rebuilt. `recover`
                returns the rows collected before the fault, as after Ctrl-C.
        """
        num_steps = checks.int_between("num_steps", num_steps)
        if max_episode_steps is not None:
            max_episode_steps = checks.max_episode_steps(max_episode_steps)
        choices = ("continue", "reset", "truncate")[: 1 if self.num_ready else 3]
        checks.choice("at_batch_end", at_batch_end, choices)
        limit, loop = max_episode_steps or NO_LIMIT, self._loop
        with self._call(carry):
            # Skip lanes at the start of an episode: they are reset already if the last
            # row of the previous batch ended an episode.
            if at_batch_end == "reset":
                loop.begin(loop.next_ids, loop.episode_length > 0)
            cut_last = at_batch_end == "truncate"
            # Use a single block: its memory is the trajectory.
            blocks = self._run(params, num_steps, num_steps, limit, cut_last=cut_last)
            ((_, trajectory),) = blocks
            return self._carry(), trajectory

    def fold_steps(
        self,
        carry: Carry,
        params: ParamsT,
        fn: Callable[[Acc, Transition[ObsT, ActionT]], Acc],
        acc: Acc,
        *,
        num_steps: int,
    ) -> tuple[Carry, Acc]:
        """Folds each of `num_steps` transitions into `acc`; see `Collector.fold_steps`.

        `acc` keeps rows of a lost episode if they were folded before the fault.
        """
        num_steps = checks.int_between("num_steps", num_steps)
        checks.function("fn", fn, "acc", "transition")
        with self._call(carry):
            for block, rows in self._run(params, num_steps, min(_BLOCK, num_steps)):
                acc = fold(fn, acc, rows, block.num)
            return self._carry(), acc

    def collect_episodes(
        self,
        carry: Carry,
        params: ParamsT,
        num_episodes: int,
        *,
        max_episode_steps: int | None = None,
        min_steps: int | None = None,
        per_env: bool = False,
        return_trajectory: bool = False,
    ) -> tuple[Carry, Episodes]:
        """Plays exactly `num_episodes` episodes; see `Collector.collect_episodes`.

        An episode lost to a fault counts, with `mask` False and all other fields zero.
        """
        carry, _, episodes = self._play(
            carry,
            params,
            num_episodes,
            max_episode_steps,
            per_env=per_env,
            min_steps=checks.min_steps(min_steps, per_env),
            return_trajectory=return_trajectory,
        )
        return carry, episodes

    def fold_episodes(
        self,
        carry: Carry,
        params: ParamsT,
        fn: Callable[[Acc, Transition[ObsT, ActionT]], Acc],
        acc: Acc,
        *,
        num_episodes: int,
        max_episode_steps: int | None = None,
    ) -> tuple[Carry, Acc, Episodes]:
        """Plays episodes and folds each transition; see `Collector.fold_episodes`."""
        checks.function("fn", fn, "acc", "transition")
        return self._play(
            carry, params, num_episodes, max_episode_steps, fn=fn, acc=acc
        )

    def compile(self, carry: Carry, params: ParamsT) -> None:
        """Compiles the program of the policy; otherwise the first call compiles it."""
        self._loop.runner.compile(params, carry.obs)

    def save(self, carry: Carry) -> list[bytes]:
        """Returns the state of each environment at `carry`, for `restore`.

        All `B` states are `b""` unless every environment has `save_state` and `carry`
        is the latest carry.
        """
        saved = self.env.save() if self._latest.is_latest(carry) else None
        return saved or [b""] * self.env.num_envs

    def restore(self, carry: Carry, saved: list[bytes]) -> Carry:
        """Continues from a carry, for example of an earlier process.

        Args:
            carry: carry of a collector with the same environments and policy.
            saved: result of `save` at this carry. If all states are empty, a warning is
                issued and unfinished episodes restart with their original seeds.

        Returns:
            The carry for the next call.

        Raises:
            ValueError: if environments have no `load_state`. After an error in this
                method `recover` begins new episodes.
        """
        num_unfinished = np.count_nonzero(carry.episode.episode_length)
        is_saved = any(saved) and self.env.can_load
        if num_unfinished and not is_saved:
            warnings.warn(
                "The state of the environments was not saved: "
                f"{num_unfinished} unfinished episodes restart.",
                stacklevel=4,  # the caller of a `Stream`
            )
        # Ctrl-C raises once environments and collector are consistent. After an error
        # they are inconsistent, so `recover` begins new episodes.
        with self._call():
            if is_saved:
                self._loop.is_torn = True
                self._latest.use_up()
                self.env.load(saved, jax.tree.map(np.array, carry.obs))
            self._start(carry.key, carry.env_state[1])
            self._next_episode = int(carry.next_episode)
            if is_saved:
                self._accumulated = carry.episode.accumulated
            self._loop.resume(carry, is_loaded=is_saved)
            return self._carry()

    def recover(
        self, carry: Carry | None = None
    ) -> tuple[Carry, Transition[ObsT, ActionT] | None]:
        """Continues after an error or Ctrl-C has interrupted a call.

        Failed environments are rebuilt if possible. Lanes whose episode cannot continue
        begin a new episode; after a call for whole episodes, all lanes begin one.

        Args:
            carry: carry that was passed to the call. If the call was not interrupted,
                this carry is returned unchanged. None stands for the latest call.

        Returns:
            The carry for the next call, and the transitions that the call had
            collected, `[T, B, ...]`. After a fold or a call for whole episodes, only
            unprocessed transitions are returned. None if there are no transitions, or
            if the call had returned.

        Raises:
            ValueError: if `init` has not been called.
        """
        if carry is not None and not self._latest.is_used(carry):
            return carry, None
        if not self._latest.ticket:
            raise ValueError("`recover` must follow `init`. Call `init` first.")
        with self._call():
            # Do not play started episodes again: their ids would repeat.
            if (plan := self._loop.plan) is not None:
                self._next_episode += plan.num_used  # the next call plays later ids
            # Begin new episodes if another collector has stepped `env`.
            self._loop.recover(restart_all=not self._latest.is_owner)
            self._latest.take_over()
            block = self._loop.block
            if block is None or not block.num:
                return self._carry(), None
            rows = self._record_block(block)
            return self._carry(), jax.tree.map(lambda x: x[: block.num], rows)

    def _run(
        self,
        params: Any,
        num_rows: int,
        block_size: int,
        limit: int = NO_LIMIT,
        *,
        cut_last: bool = False,
    ) -> Iterator[tuple[RowBlock, Transition]]:
        """Collects up to `num_rows` rows, or until the assigned episodes have ended.

        Yields each block once it is full, together with its recorded rows. `limit` and
        `cut_last` are as in `Loop.play`.
        """
        width = self.num_ready or self.env.num_envs
        for first in range(0, num_rows, block_size):
            if self._loop.is_done:
                return
            # Allocate the full size, so that one compiled program records every block.
            size = min(block_size, num_rows - first)
            block = RowBlock(width, size, block_size)
            self._loop.play(params, block, limit, cut_last=cut_last)
            yield block, self._record_block(block)

    @contextlib.contextmanager
    def _call(self, carry: Carry | None = None) -> Iterator[None]:
        """Delays Ctrl-C during a call, and invalidates the carry that begins it.

        Until the call returns, `recover` can continue from the last complete row.
        """
        with held_back() as check:
            if not self._call_lock.acquire(blocking=False):
                raise RuntimeError(
                    "A collector over host environments makes one call at a time, and "
                    "a batch of a `Stream` is running in another thread. Close the "
                    "stream first, or use a second collector with other environments."
                )
            try:
                # Validate the carry first: after an error the latest carry stays valid.
                if carry is not None:
                    self._latest.check(carry)
                    self._loop.runner.state = carry.policy_state
                    self._latest.use_up()
                self._loop.check = check
                yield
            finally:
                self._call_lock.release()
        # Delayed Ctrl-C raises before this line, so that `recover` finds the rows.
        self._loop.block = self._latest.used_ticket = None

    def _record_block(self, block: RowBlock) -> Transition:
        """Returns the transitions of a block, and records them at the first call."""
        # Record once: when `recover` reads the rows, accumulators would count twice.
        if block.trajectory is None:
            rows = block.read()
            if self.record_fn is None and not self.accumulators:
                block.trajectory = jax.device_put(rows)
            else:
                result = self._record(self._accumulated, rows, block.lane)
                self._accumulated, block.trajectory = result
        return block.trajectory

    def _carry(self) -> Carry:
        """Returns the carry for the next call."""
        # Copy arrays: the loop updates them in place.
        loop, runner = self._loop, self._loop.runner
        if self.accumulators:
            initial = accumulate_nothing(self.accumulators, self.env.num_envs)
            has_begun: Any = loop.episode_length > 0
            self._accumulated = trees.select(has_begun, self._accumulated, initial)
        episode: dict[str, Any] = {
            "key": (),  # host episodes have a seed instead
            "episode_return": loop.episode_return.copy(),
            "episode_length": loop.episode_length.copy(),
            "episode_id": loop.episode_id,
            "accumulated": self._accumulated,
        }
        carry: dict[str, Any] = {
            "key": runner.key,
            "step": np.int32(runner.step),
            "next_episode": np.int32(self._next_episode),
            "env_state": (self._latest.ticket, self.env.shared),
            "obs": jax.tree.map(np.array, loop.obs),
            "policy_state": runner.reset_state(loop.is_first, loop.episode_id),
            "episode": Episode(**episode),
        }
        self._latest.carry = Carry(**carry)
        return self._latest.carry

    def _play(
        self,
        carry: Carry,
        params: Any,
        num_episodes: int,
        max_episode_steps: int | None,
        *,
        per_env: bool = False,
        min_steps: int | None = None,
        return_trajectory: bool = False,
        fn: Callable[[Any, Transition], Any] | None = None,
        acc: Any = None,
    ) -> tuple[Carry, Any, Episodes]:
        """Plays assigned episodes and folds their rows into `acc`."""
        num_episodes = checks.int_between("num_episodes", num_episodes)
        max_episode_steps = checks.max_episode_steps(
            max_episode_steps, return_trajectory
        )
        loop = self._loop
        with self._call(carry):
            plan = EpisodePlan(
                loop.next_unplayed if per_env else loop.next_ids,
                num_episodes * (self.env.num_envs if per_env else 1),
                first_queued=None if per_env else self._next_episode,
                min_steps=min_steps,
                max_length=max_episode_steps if return_trajectory else None,
            )
            loop.plan = plan
            loop.begin(plan.episode_id)
            for block, rows in self._run(params, NO_LIMIT, _BLOCK, max_episode_steps):
                acc = acc if fn is None else fold(fn, acc, rows, block.num)
                plan.record(block, rows)
            episodes, padded = plan.read()
            self._next_episode += plan.num_used
            # Each lane is in the middle of an arbitrary episode: begin the lane's next
            # episode.
            next_ids, loop.plan, loop.block = loop.next_ids, None, None
            loop.begin(next_ids)
            if return_trajectory:
                episodes = episodes.replace(trajectory=padded)
            return self._carry(), acc, episodes

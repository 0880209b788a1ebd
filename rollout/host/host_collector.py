"""`HostCollector`: the methods of `Collector` over environments that are not JAX."""

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
from rollout.kernel.recording import accumulate_nothing, checked_parts
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

_BLOCK = 64  # rows that are collected before they are folded


@dataclasses.dataclass(eq=False, repr=False)
class HostCollector(Generic[ParamsT, ObsT, ActionT]):
    """Collects experience from environments that are not JAX.

    The methods, the arguments and the results are those of `Collector`, but a loop in
    Python steps the environments, so no method works inside `jit`. The policy is one
    jitted program, called once per step. A carry is valid for one call: afterwards the
    environments have moved on. Its `policy_state` may be replaced, and nothing else.

    `mask` is False where an environment only reset itself, and where an episode was
    lost to a fault. Masked-out rows are zero.

    With `num_ready` every row has the first so many of the `B` environments that
    answered, in the order of their answers. The policy then acts for these, and they
    step while the collector waits for the next ones. Trajectories are
    `[T, num_ready, ...]`, a transition is an environment's answer to its last action,
    and `info` is an `AsyncInfo`: `regroup_by_env` sorts transitions by environment.
    Actions in flight at the end of a call are answered in the first rows of the next
    one. The policy gets `[num_ready, ...]` observations, and a state of `B` lanes. The
    speed of the environments decides which one is in which row, and so which random
    numbers the policy draws for it. `collect_episodes` plays the first N episodes that
    are *started*, so that fast or short ones are not favoured.

    Attributes:
        env: `B` environments side by side.
        policy: the policy that acts in them.
        num_ready: number of environments in a row, at least 1 and at most B, None for
            all in step. `env` must be an `AsyncHostVectorEnv`.
        record_fn: maps a transition to its recorded fields, as in `Collector`.
        accumulators: user-defined values that are accumulated per episode, as in
            `Collector`.
        on_fault: "raise" or "restart", where an environment fails: it raises, a worker
            process dies or does not answer, an observation or a reward is not finite,
            or an observation is outside of its space. "raise" raises
            `rollout.envs.EnvFault`; "restart" masks out the episode from its first row
            in this call on, counts it in `fault_stats`, logs the cause and rebuilds the
            environment; the others go on.
        max_restarts: how many times environments are rebuilt, over the life of the
            collector; the next fault raises. Set it large for a long run.
        is_host: whether Python steps the environments.

    Raises:
        ValueError: if an argument is not as above.
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
        self._accumulated: Any = ()  # of every lane before the block of the loop
        self._calling = threading.Lock()

    @property
    def fault_stats(self) -> FaultStats:
        """Counts of faults and their costs so far."""
        return self._loop.stats

    def replace(self, **changes: Any) -> Self:
        """Returns a new collector with some arguments of the constructor changed.

        The new one begins with `init`. It has the same environments unless `env` is
        changed; from its `init` on, a carry of this collector then raises.
        """
        return dataclasses.replace(self, **changes)

    def freeze(self, carry: Carry) -> Self:
        """Fixes the statistics of `NormalizeHostEnv`; see `Collector.freeze`.

        The new collector has the same environments, like that of `replace`.
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
            ValueError: as there.
            envs.EnvFault: if an environment failed at its reset.
        """
        checks.outside_of_jit("HostCollector")
        checks.typed_key(key)
        with self._call():
            self._start(key)
            self._loop.begin(self._loop.episode_id)
            return self._carry()

    def _start(self, key: chex.PRNGKey, shared: Any = None) -> None:
        """Takes the environments over, and forgets everything but what they share."""
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

        The observation is taken to be as its space says, and `info` as that of `env`.
        """
        return row_shape(self, self.num_ready or self.env.num_envs, params)

    def value(self, carry: Carry, params: ParamsT) -> Any:
        """Evaluates the critic at the current observations; see `Collector.value`.

        Raises:
            ValueError: as there, or if `carry` is not that of the last call.
        """
        if not self.policy.has_value:
            raise ValueError(NO_VALUE)
        with held_back():  # jax's caches make other errors of an interrupt
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

        `max_episode_steps` and `at_batch_end` are those of `Stream`; the latter is
        "continue" with `num_ready`.

        Raises:
            ValueError: as there, or if `carry` is not that of the last call.
            envs.EnvFault: if an environment failed, and may not be rebuilt. The rows
                until then are kept for `recover`, as after Ctrl-C, which raises between
                two steps.
        """
        num_steps = checks.int_between("num_steps", num_steps)
        if max_episode_steps is not None:
            max_episode_steps = checks.max_episode_steps(max_episode_steps)
        choices = ("continue", "reset", "truncate")[: 1 if self.num_ready else 3]
        checks.choice("at_batch_end", at_batch_end, choices)
        limit, loop = max_episode_steps or NO_LIMIT, self._loop
        with self._call(carry):
            # Lanes that have just begun an episode need no other: they would be reset
            # twice where the batch before ended with an ending.
            if at_batch_end == "reset":
                loop.begin(loop.next_own, loop.episode_length > 0)
            cut_last = at_batch_end == "truncate"
            # One block, so that its memory is the trajectory.
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

        Rows of a lost episode that were folded before the fault stay in `acc`.
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

        One that is lost to a fault counts, with `mask` False and all else zero.
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
        """Folds each transition of `num_episodes`; see `Collector.fold_episodes`."""
        checks.function("fn", fn, "acc", "transition")
        return self._play(
            carry, params, num_episodes, max_episode_steps, fn=fn, acc=acc
        )

    def compile(self, carry: Carry, params: ParamsT) -> None:
        """Compiles the program of the policy, which otherwise the first call does."""
        self._loop.runner.compile(params, carry.obs)

    def save(self, carry: Carry) -> list[bytes]:
        """Returns the state of each environment at `carry`, or `B` empty ones.

        They are `b""` unless all environments have `save_state`, and `carry` is the
        latest one.
        """
        saved = self.env.save() if self._latest.is_latest(carry) else None
        return saved or [b""] * self.env.num_envs

    def restore(self, carry: Carry, saved: list[bytes]) -> Carry:
        """Continues from a carry, in this process or another.

        Args:
            carry: of a collector of the same kind.
            saved: the result of its `save`. If it is empty, unfinished episodes
                restart, each with its own seed, and a warning says so.

        Returns:
            The carry to go on with.

        Raises:
            ValueError: if environments have no `load_state`. After an error in here
                `recover` begins new episodes.
        """
        num_unfinished = np.count_nonzero(carry.episode.episode_length)
        is_saved = any(saved) and self.env.can_load
        if num_unfinished and not is_saved:
            warnings.warn(
                "The state of the environments was not saved: "
                f"{num_unfinished} unfinished episodes restart.",
                stacklevel=4,  # of a `Stream`'s caller,
            )
        # Ctrl-C leaves only once environments and collector are at the same place. An
        # error in here leaves them torn, so that `recover` begins new episodes.
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
        """Goes on where an error or Ctrl-C has cut a call short.

        Environments that failed are rebuilt, if they can be, and lanes whose episode
        cannot go on begin new ones; after a call for whole episodes all lanes do.

        Args:
            carry: that of the call, which may not have been cut short: this carry is
                then returned as it is. None for the last call.

        Returns:
            The carry to go on with; and the transitions that the call had collected,
            `[T, B, ...]`, for a fold or whole episodes only those that it had not
            processed yet; None if there are none, or if the call had returned.

        Raises:
            ValueError: if `init` was not called yet.
        """
        if carry is not None and not self._latest.is_used(carry):
            return carry, None
        if not self._latest.ticket:
            raise ValueError("`recover` must follow `init`, which was not called yet.")
        with self._call():
            # Episodes that were begun are not played again, or their ids would return.
            if (plan := self._loop.plan) is not None:
                self._next_episode += plan.num_used  # the next call takes later ones
            # With new episodes if another collector has stepped `env`.
            self._loop.recover(restart_all=not self._latest.is_mine)
            self._latest.take_over()
            block = self._loop.block
            if block is None or not block.num:
                return self._carry(), None
            rows = self._recorded(block)
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
        """Collects rows, up to `num_rows`, or until the assigned episodes have ended.

        Yields each block as soon as it is full, and its rows as they are recorded; the
        other arguments are those of `Loop.play`.
        """
        width = self.num_ready or self.env.num_envs
        for first in range(0, num_rows, block_size):
            if self._loop.is_done:
                return
            # The memory has the full size, so that one program records every block.
            size = min(block_size, num_rows - first)
            block = RowBlock(width, size, block_size)
            self._loop.play(params, block, limit, cut_last=cut_last)
            yield block, self._recorded(block)

    @contextlib.contextmanager
    def _call(self, carry: Carry | None = None) -> Iterator[None]:
        """Surrounds a call, which uses its carry up.

        Until the call returns, `recover` can go on where it stopped.
        """
        with held_back() as check:
            if not self._calling.acquire(blocking=False):
                raise RuntimeError(
                    "A collector over host environments makes one call at a time, and "
                    "a batch of a `Stream` is running in another thread: close the "
                    "stream first, or give each its own collector and environments."
                )
            try:
                # Checked before it is used up: a refused carry costs nothing.
                if carry is not None:
                    self._latest.check(carry)
                    self._loop.runner.state = carry.policy_state
                    self._latest.use_up()
                self._loop.check = check
                yield
            finally:
                self._calling.release()
        # Ctrl-C at the end of the call leaves before this line, and loses nothing.
        self._loop.block = self._latest.used = None

    def _recorded(self, block: RowBlock) -> Transition:
        """Returns the transitions of a block, recorded once."""
        # Once: the accumulators would count the rows again when `recover` reads them.
        if block.trajectory is None:
            rows = block.read()
            if self.record_fn is None and not self.accumulators:
                block.trajectory = jax.device_put(rows)
            else:
                recorded = self._record(self._accumulated, rows, block.lane)
                self._accumulated, block.trajectory = recorded
        return block.trajectory

    def _carry(self) -> Carry:
        """Makes the carry for the next call."""
        # The loop writes to its own arrays in place, so the carry gets copies.
        loop, runner = self._loop, self._loop.runner
        if self.accumulators:
            nothing = accumulate_nothing(self.accumulators, self.env.num_envs)
            has_begun: Any = loop.episode_length > 0
            self._accumulated = trees.select(has_begun, self._accumulated, nothing)
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
            "policy_state": runner.restarted(loop.unseen, loop.episode_id),
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
        """Plays assigned episodes, and folds their rows into `acc`."""
        num_episodes = checks.int_between("num_episodes", num_episodes)
        max_episode_steps = checks.max_episode_steps(
            max_episode_steps, return_trajectory
        )
        loop = self._loop
        with self._call(carry):
            plan = EpisodePlan(
                loop.next_unplayed if per_env else loop.next_own,
                num_episodes * (self.env.num_envs if per_env else 1),
                first_queued=None if per_env else self._next_episode,
                min_steps=min_steps,
                max_length=max_episode_steps if return_trajectory else None,
            )
            loop.plan = plan
            loop.begin(plan.episode_id)
            for block, rows in self._run(params, NO_LIMIT, _BLOCK, max_episode_steps):
                acc = acc if fn is None else fold(fn, acc, rows, block.num)
                plan.note(block, rows)
            episodes, padded = plan.read()
            self._next_episode += plan.num_used
            # Lanes are wherever the last episode has left them: each begins the next
            # episode of its own.
            next_own, loop.plan, loop.block = loop.next_own, None, None
            loop.begin(next_own)
            if return_trajectory:
                episodes = episodes.replace(trajectory=padded)
            return self._carry(), acc, episodes

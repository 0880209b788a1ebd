"""`HostCollector`: a `Collector` for host environments, which are not in JAX."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Self, TypeVar

import chex
import jax
import numpy as np

from rollout.base import checks
from rollout.base.names import Hints
from rollout.envs.host.types import HostVectorEnv, check_host_env
from rollout.envs.spaces import as_space
from rollout.host.ctrl_c import delay_ctrl_c
from rollout.host.episode_plan import EpisodePlan, EpisodeTable
from rollout.host.host_state import NO_LIMIT, FaultStats
from rollout.host.rows import Rows, fold, row_shape
from rollout.host.session import Session
from rollout.kernel.state import checked_accumulators
from rollout.types import (
    NO_VALUE,
    ActionT,
    Carry,
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
class HostCollector(Hints, Generic[ParamsT, ObsT, ActionT]):
    """Collects the experience of a policy in host environments, which are not in JAX.

    Use it like a `Collector`: methods, arguments and results are the same. A loop in
    Python steps the environments, so no method works inside `jit`. The policy is one
    jitted program, called once per step. A carry is valid for one call, because the
    call changes the environments: older carries are stale and raise. Only
    `policy_state` of a carry may be replaced.

    `mask` is False for rows in which an environment only reset itself, and for rows of
    episodes lost to a fault. Masked-out rows are zero.

    With `num_ready`, environments step asynchronously. A row has the first `num_ready`
    of the `B` environments that complete a step, in this order. The policy acts for
    these environments, and they step while the collector waits for the next row.
    Trajectories are `[T, num_ready, ...]`. `info` is an `AsyncInfo`; `regroup_by_env`
    sorts transitions by environment. Steps in flight at the end of a call are returned
    in the first rows of the next call. The policy receives `[num_ready, ...]`
    observations and the state of `B` lanes. The order of environments, and therefore
    the random numbers that the policy uses for each, depends on their speed.
    `collect_episodes` plays the first N episodes that *start*, so there is no bias
    toward fast or short episodes.

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
            environment that raises, a worker process that dies or does not respond, an
            observation or a reward that is not finite, or an observation outside its
            space. "raise" raises `rollout.envs.EnvFault`. "restart" masks out all rows
            of the episode in this call, counts the episode in `fault_stats`, logs the
            cause and rebuilds the environment; all other environments continue.
        max_restarts: maximum number of rebuilt environments in the lifetime of the
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
        checks.check_outside_jit("HostCollector")
        check_host_env(self.env)
        self.accumulators = checked_accumulators(self)
        _check_options(self.env, self.num_ready, self.on_fault)
        checks.check_int("max_restarts", self.max_restarts, least=0)
        self._session = Session(self)

    @property
    def fault_stats(self) -> FaultStats:
        """Number of faults, lost steps and restarts so far."""
        state = self._session.state
        return FaultStats() if state is None else state.stats

    def replace(self, **changes: Any) -> Self:
        """Returns a new collector with some arguments of the constructor changed.

        Call `init` of the new collector first. It shares the environments unless `env`
        is changed: after its `init`, carries of this collector are invalid.
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
        session = self._session
        with session.call():  # an interrupt in JAX's caches raises other errors
            checks.check_outside_jit("HostCollector")
            checks.check_key(key)
            session.start(key)
            session.settle()
            return session.finish()

    def step(
        self, carry: Carry, params: ParamsT
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes one step in every lane; see `Collector.step`."""
        carry, trajectory = self.collect_steps(carry, params, 1)
        with delay_ctrl_c():  # as in `value`
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
        with delay_ctrl_c():  # an interrupt in JAX's caches raises other errors
            self._session.check(carry)
            policy = self._session.spec.policy
            return policy.evaluate(params, carry.obs, carry.policy_state)

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

        With `num_ready`, `at_batch_end` must be "continue". Ctrl-C raises between two
        steps.

        Raises:
            ValueError: as in `Collector.collect_steps`, or if `carry` is stale.
            envs.EnvFault: if an environment failed and may not be rebuilt. `recover`
                returns the rows collected before the fault, as after Ctrl-C.
        """
        num_steps = checks.check_int("num_steps", num_steps)
        if max_episode_steps is not None:
            max_episode_steps = checks.check_max_episode_steps(max_episode_steps)
        choices = ("continue", "reset", "truncate")[: 1 if self.num_ready else 3]
        checks.check_choice("at_batch_end", at_batch_end, choices)
        limit, session = max_episode_steps or NO_LIMIT, self._session
        with session.call(carry):
            if at_batch_end == "reset":
                # Skip lanes at the start of an episode, which are already reset.
                state = session.state
                session.begin_episodes(state.next_ids, state.episode_length > 0)
            cut_last = at_batch_end == "truncate"
            # Use a single block: its memory is the trajectory.
            (state,) = session.run(
                params, num_steps, num_steps, limit, cut_last=cut_last
            )
            return session.finish(), state.recorded

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

        Rows of a lost episode that were folded before the fault remain in `acc`.
        """
        num_steps = checks.check_int("num_steps", num_steps)
        checks.check_function("fn", fn, "acc", "transition")
        session, block_size = self._session, min(_BLOCK, num_steps)
        with session.call(carry):
            for state in session.run(params, num_steps, block_size):
                acc = fold(fn, acc, state.recorded, state.num_rows)
            return session.finish(), acc

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

        An episode lost to a fault has `mask` False and zeros in all other fields. It is
        not replaced, so the episodes may have fewer than `min_steps` steps.
        """
        carry, _, episodes = self._play(
            carry,
            params,
            num_episodes,
            max_episode_steps,
            per_env=per_env,
            min_steps=checks.check_min_steps(min_steps, per_env),
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
        per_env: bool = False,
    ) -> tuple[Carry, Acc, Episodes]:
        """Plays episodes and folds each transition; see `Collector.fold_episodes`."""
        checks.check_function("fn", fn, "acc", "transition")
        return self._play(
            carry,
            params,
            num_episodes,
            max_episode_steps,
            per_env=per_env,
            fn=fn,
            acc=acc,
        )

    def compile(self, carry: Carry, params: ParamsT) -> None:
        """Compiles the program of the policy; otherwise the first call compiles it.

        Raises:
            ValueError: if `carry` is stale.
        """
        self._session.check(carry)
        self._session.spec.policy.compile(params, carry.obs, self.num_ready)

    def save(self, carry: Carry) -> list[bytes]:
        """Returns the state of each environment at `carry`, for `restore`.

        All `B` states are `b""` unless every environment has `save_state` and `carry`
        is the latest carry.
        """
        saved = self.env.save() if self._session.is_latest(carry) else None
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
                f"{num_unfinished} unfinished episodes restart. To continue them, "
                "define `save_state` and `load_state` in the class of the environment.",
                stacklevel=3,  # the caller of `Stream.restore`
            )
        # Delay Ctrl-C until environments and collector are consistent. An error leaves
        # them inconsistent, so `recover` begins new episodes.
        session = self._session
        with session.call():
            session.restore(carry, saved if is_saved else None)
            return session.finish()

    def recover(
        self, carry: Carry | None = None
    ) -> tuple[Carry, Transition[ObsT, ActionT] | None]:
        """Continues after an error or Ctrl-C has interrupted a call.

        Failed environments are rebuilt if possible. Lanes whose episode cannot continue
        begin a new episode; after a call for whole episodes, all lanes begin one.

        Args:
            carry: carry that was passed to the call. If the call was not interrupted,
                this carry is returned unchanged. None means the latest call.

        Returns:
            The carry for the next call, and the transitions that the call had
            collected, `[T, B, ...]`. After a fold or a call for whole episodes, only
            unprocessed transitions are returned. None if there are no transitions, or
            if the call had returned.

        Raises:
            ValueError: if `init` has not been called.
            Exception: an error of `record_fn` or of an accumulator, which cannot record
                the collected transitions. Call `init` after such an error.
        """
        session = self._session
        if carry is not None and not session.was_used(carry):
            return carry, None
        with session.call():
            rows = session.recover()
            return session.finish(), rows

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
        num_episodes = checks.check_int("num_episodes", num_episodes)
        max_episode_steps = checks.check_max_episode_steps(
            max_episode_steps, return_trajectory
        )
        max_length = max_episode_steps if return_trajectory else None
        session, num_envs = self._session, self.env.num_envs
        with session.call(carry):
            state = session.state
            next_ids, first_queued = state.next_ids, state.next_episode
            if per_env:  # lanes without a step play their current episode
                has_begun = state.episode_length > 0
                next_ids = np.where(has_begun, next_ids, state.episode_id)
                num_episodes, first_queued = num_episodes * num_envs, None
            plan = EpisodePlan.init(
                next_ids, num_episodes, first_queued=first_queued, min_steps=min_steps
            )
            table = EpisodeTable(num_episodes, max_length)
            session.begin_plan(plan)
            for state in session.run(params, NO_LIMIT, _BLOCK, max_episode_steps):
                if fn is not None:
                    acc = fold(fn, acc, state.recorded, state.num_rows)
                table.add(state.plan, state.rows, state.recorded)
            if table.is_empty:  # all episodes were lost in their resets
                zeros = jax.tree.map(
                    lambda x: np.zeros((1, *x.shape), x.dtype), self.row_shape(params)
                )
                table.add(plan, Rows(zeros.mask.shape[1], 1), zeros)
            episodes = session.end_plan(table)
            return session.finish(), acc, episodes


def _check_options(env: Any, num_ready: Any, on_fault: Any) -> None:
    """Validates the spaces, and the options that only some environments support."""
    as_space(env.observation_space, "env.observation_space")
    as_space(env.action_space, "env.action_space")
    checks.check_choice("on_fault", on_fault, ("raise", "restart"))
    if on_fault == "restart" and not env.can_rebuild:
        raise ValueError(
            '`on_fault="restart"` needs environments that can be rebuilt one by one, '
            f"got {type(env).__name__}. Make them by `rollout.envs.make_worker_envs`, "
            "or by `rollout.envs.from_gymnasium` with an id or a function."
        )
    if num_ready is None:
        return
    if not env.is_async:
        raise ValueError(
            "`env` must be an `AsyncHostVectorEnv` for `num_ready`, got "
            f"{type(env).__name__}. Make it by `rollout.envs.make_worker_envs`."
        )
    checks.check_int("num_ready", num_ready, most=env.num_envs)
    if env.batch_size not in (None, num_ready):
        raise ValueError(
            f"`num_ready` must be the `batch_size` of the environment, "
            f"{env.batch_size}, got {num_ready}."
        )

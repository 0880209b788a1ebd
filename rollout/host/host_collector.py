"""`HostCollector`: the methods of `Collector` over environments that are not JAX."""

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeVar

import chex
import jax
import numpy as np

from rollout import checks
from rollout.envs.host.ownership import claim, is_claimed, new_user
from rollout.envs.host.types import HostVectorEnv
from rollout.host.episode_plan import EpisodePlan, Results, per_env, queue
from rollout.host.loop import NO_LIMIT, Loop
from rollout.host.policy_runner import PolicyRunner
from rollout.host.restarts import FaultStats, Restarts
from rollout.host.rows import Bookkeeper, RowBlock, fold, lanes_of
from rollout.types import (
    Accumulator,
    Accumulators,
    ActionT,
    Carry,
    Episodes,
    ObsT,
    ParamsT,
    Policy,
    RecordFn,
    Transition,
)

Acc = TypeVar("Acc")

_BLOCK = 64  # rows that are collected before they are folded


class HostCollector(Generic[ParamsT, ObsT, ActionT]):
    """Collects experience from environments that are not JAX.

    The methods, the arguments and the results are those of `Collector`, but a loop in
    Python steps the environments, so no method works inside `jit`. The policy is one
    jitted program, called once per step. A carry is valid for one call: afterwards the
    environments have moved on.

    `mask` is False where an environment only reset itself, and where an episode was
    lost to a fault. Masked-out rows are zero.

    Attributes:
        env: `B` environments side by side.
        policy: the policy that acts in them.
        record_fn: maps a transition to its recorded fields, as in `Collector`.
        accumulators: user-defined values that are accumulated per episode, as in
            `Collector`.
        on_fault: "raise" or "restart", see below.
        max_restarts: see below.

    Args:
        on_fault: "raise" or "restart", where an environment fails: it raises, a worker
            process dies or does not answer, an observation is not finite or outside of
            its space. "raise" raises `rollout.envs.EnvFault`; "restart" masks out the
            episode from its first row in this call on, counts it in `fault_stats`, logs
            the cause and rebuilds the environment; the others go on.
        max_restarts: how many times environments are rebuilt, over the life of the
            collector; the next fault raises. Set it large for a long run.

    Raises:
        ValueError: if an argument is not as above.
    """

    def __init__(
        self,
        *,
        env: HostVectorEnv,
        policy: Policy[ParamsT, ObsT, ActionT],
        record_fn: RecordFn[ObsT, ActionT] | None = None,
        accumulators: Mapping[str, Accumulator] | Accumulators = (),
        on_fault: str = "raise",
        max_restarts: int = 100,
    ) -> None:
        checks.outside_of_jit("HostCollector")
        checks.kind_of_env(env, is_host=True)
        checks.collector(env, policy, record_fn)
        checks.int_between("max_restarts", max_restarts, least=0)
        self.env, self.policy, self.record_fn = env, policy, record_fn
        self.accumulators = checks.accumulators(accumulators)
        self.on_fault, self.max_restarts = on_fault, max_restarts
        self._restarts = Restarts(env, on_fault, max_restarts)
        self._number, self._ticket = new_user(), 0
        self._bookkeeper = Bookkeeper(self.accumulators, record_fn, env.num_envs)
        self._runner = PolicyRunner(policy, env.action_space, env.num_envs)
        self._loop: Any = None  # the Loop, from `init` on
        self._next_episode = 0
        self._episode: Any = None  # the Episode of every lane before `_block`
        # Of the current call, or of one that was cut short: its last rows, raw and
        # finished; the mark of its carry; and whether it has returned.
        self._block: Any = None  # RowBlock
        self._trajectory: Any = None  # Transition
        self._used: Any = None  # [2] uint32
        self._is_whole = True
        self._thread: int | None = None  # the one that is in a call

    @property
    def fault_stats(self) -> FaultStats:
        """Counts of faults and their costs so far."""
        return self._restarts.stats

    def replace(self, **changes: Any) -> Self:
        """Returns a new collector with some of the arguments changed.

        The new one begins with `init`. It has the same environments unless `env` is
        changed; from its `init` on, a carry of this collector then raises.

        Args:
            **changes: arguments of the constructor.

        Raises:
            ValueError: if one is not as there.
            TypeError: if there is no such argument.
        """
        return type(self)(**(self._arguments() | changes))

    def _arguments(self) -> dict[str, Any]:
        names = ("env", "policy", "record_fn", "accumulators")
        return {x: getattr(self, x) for x in (*names, "on_fault", "max_restarts")}

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
        # Workers that died of an interrupt are rebuilt without a report.
        forgiven = None if self._is_whole else set()
        with self._call():
            self._begin(key)
            self._loop.settle(forgiven=forgiven)
            return self._carry()

    def _begin(self, key: chex.PRNGKey) -> None:
        """Makes a new loop, whose lanes must all be reset."""
        self._ticket += 1
        failed = np.zeros(self.env.num_envs, bool)
        if self._loop is not None:  # it knows which environments must be rebuilt
            failed = self._loop.state.failed
        loop = self._make_loop(key, failed)
        episode = self._bookkeeper.start(loop.state.episode_id)
        claim(self.env, self._number)
        self._next_episode, self._block, self._trajectory = 0, None, None
        self._loop, self._episode = loop, episode

    def step(
        self, carry: Carry, params: ParamsT
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes one step in every lane; see `Collector.step`."""
        with self._call(carry):
            self._loop.play(params, self._begin_block(1))
            trajectory = self._count()
            return self._carry(), jax.tree.map(lambda x: x[0], trajectory)

    def collect_steps(
        self, carry: Carry, params: ParamsT, num_steps: int
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes `num_steps` steps in every lane; see `Collector.collect_steps`.

        Raises:
            ValueError: as there, or if `carry` is not that of the last call.
            envs.EnvFault: if an environment failed, and may not be rebuilt. The rows
                until then are kept for `recover`, as after Ctrl-C, which raises between
                two steps.
        """
        num_steps = checks.int_between("num_steps", num_steps)
        with self._call(carry):
            self._loop.play(params, self._begin_block(num_steps))
            trajectory = self._count()
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
        checks.function("fn", fn)
        capacity = min(_BLOCK, num_steps)
        with self._call(carry):
            for first in range(0, num_steps, capacity):
                size = min(capacity, num_steps - first)
                block = self._begin_block(size, capacity)
                self._loop.play(params, block)
                acc = fold(fn, acc, self._count(), block.num)
            return self._carry(), acc

    def collect_episodes(
        self,
        carry: Carry,
        params: ParamsT,
        num_episodes: int,
        *,
        max_steps: int,
        min_steps: int | None = None,
    ) -> tuple[Carry, Episodes]:
        """Plays exactly `num_episodes` episodes; see `Collector.collect_episodes`.

        One that is lost to a fault counts, with `mask` False and all else zero.
        """
        num_episodes = checks.int_between("num_episodes", num_episodes)
        max_steps = checks.int_between("max_steps", max_steps, most=None)
        if min_steps is not None:
            min_steps = checks.int_between("min_steps", min_steps)
        with self._call(carry):
            return self._play(params, self._queue(num_episodes, min_steps), max_steps)

    def collect_episodes_per_env(
        self, carry: Carry, params: ParamsT, episodes_per_env: int, *, max_steps: int
    ) -> tuple[Carry, Episodes]:
        """Plays episodes of every lane; see `Collector.collect_episodes_per_env`."""
        episodes_per_env = checks.int_between("episodes_per_env", episodes_per_env)
        max_steps = checks.int_between("max_steps", max_steps, most=None)
        with self._call(carry):
            plan = per_env(self._loop.state.next_own, episodes_per_env)
            return self._play(params, plan, max_steps)

    def fold_episodes(
        self,
        carry: Carry,
        params: ParamsT,
        fn: Callable[[Acc, Transition[ObsT, ActionT]], Acc],
        acc: Acc,
        *,
        num_episodes: int,
        max_steps: int,
    ) -> tuple[Carry, Acc, Episodes]:
        """Folds each transition of `num_episodes`; see `Collector.fold_episodes`."""
        num_episodes = checks.int_between("num_episodes", num_episodes)
        max_steps = checks.int_between("max_steps", max_steps, most=None)
        checks.function("fn", fn)

        def consume(trajectory: Transition, num_rows: int) -> None:
            nonlocal acc
            acc = fold(fn, acc, trajectory, num_rows)

        with self._call(carry):
            plan = self._queue(num_episodes)
            carry, episodes = self._play(params, plan, max_steps, consume)
            return carry, acc, episodes

    def collect_padded_episodes(
        self, carry: Carry, params: ParamsT, num_episodes: int, *, max_length: int
    ) -> tuple[Carry, Transition[ObsT, ActionT], Episodes]:
        """Collects `num_episodes` whole; see `Collector.collect_padded_episodes`."""
        num_episodes = checks.int_between("num_episodes", num_episodes)
        max_length = checks.int_between("max_length", max_length)
        padded: Any = None

        def consume(trajectory: Transition, num_rows: int) -> None:
            nonlocal padded
            del num_rows  # unused: there is a mask
            rows = jax.device_get(trajectory)
            if padded is None:
                shape = max_length, num_episodes
                padded = jax.tree.map(
                    lambda x: np.zeros(shape + x.shape[2:], x.dtype), rows
                )
            # A step's column is its episode, its row its number in the episode.
            index = plan.index_of(rows.episode_id[rows.mask])
            place = rows.episode_length[rows.mask] - 1, index
            pairs = zip(*map(jax.tree.leaves, (padded, rows)), strict=True)
            for table, new in pairs:
                table[place] = new[rows.mask]

        with self._call(carry):
            plan = self._queue(num_episodes)
            carry, episodes = self._play(params, plan, max_length, consume)
            lost = ~np.asarray(episodes.mask)
            for table in jax.tree.leaves(padded):
                table[:, lost] = 0
            return carry, jax.device_put(padded), episodes

    def collect_batch(
        self,
        carry: Carry,
        params: ParamsT,
        num_steps: int,
        *,
        limit: int | None = None,
        at_end: str = "continue",
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Collects a batch of a `Stream`.

        Called again after an error, with the same carry, it goes on with the batch.

        Args:
            carry: the latest one.
            params: whatever the policy takes as its parameters.
            num_steps: rows of the trajectory.
            limit: steps after which an episode is truncated; None for no limit.
            at_end: see `Stream`'s `at_batch_end`.

        Returns:
            The next carry, and the trajectory, `[num_steps, B, ...]`.
        """
        loop: Any = self._loop
        is_mine = np.array_equal(carry.env_state, self._used)
        goes_on = self._block is not None and is_mine
        if not goes_on:
            carry = self.resumed(carry)
        with self._call(None if goes_on else carry):
            if goes_on:
                self._recover_loop()
            else:
                self._begin_block(num_steps)
                if at_end == "reset":
                    loop.begin(loop.state.length > 0, loop.state.next_own)
            block: Any = self._block
            loop.play(params, block, limit=NO_LIMIT if limit is None else limit)
            if at_end == "truncate":
                unfinished = loop.state.length > 0
                # Added, not set: after an interrupt this runs again, with new lengths.
                block.stopped[num_steps - 1] |= unfinished
                loop.begin(unfinished, loop.state.next_own)
            trajectory = self._count()
            truncated = trajectory.truncated | block.stopped
            return self._carry(), trajectory.replace(truncated=truncated)

    def compile(self, carry: Carry, params: ParamsT) -> None:
        """Compiles the program of the policy, which otherwise the first call does."""
        self._runner.compile(params, carry.obs, self._loop.state.progress)

    def save(self, carry: Carry, *, allow_pickle: bool = False) -> bytes:
        """Returns the state of the environments at `carry`, or `b""`.

        It is `b""` if the environments cannot save it, or have moved on since.

        Args:
            carry: the latest one.
            allow_pickle: whether environments without `save_state` may be pickled.
        """
        is_current = np.array_equal(carry.env_state, self._mark)
        is_current &= is_claimed(self.env, self._number)
        env: Any = self.env
        if not is_current or not hasattr(env, "save"):
            return b""
        saved = env.save(allow_pickle=allow_pickle)
        return _join(saved) if saved else b""

    def restore(
        self, carry: Carry, saved: bytes, *, allow_pickle: bool = False
    ) -> Carry:
        """Continues from a carry, in this process or another.

        Args:
            carry: of a collector of the same kind.
            saved: the result of its `save`. If it is empty, or a pickle that may not be
                read, unfinished episodes restart, each with its own seed, and a warning
                says so.
            allow_pickle: whether to unpickle environments that `save` pickled, which
                runs any code that `saved` contains.

        Returns:
            The carry to go on with.

        Raises:
            ValueError: if the environments that were pickled have other settings.
        """
        episode = jax.tree.map(np.asarray, carry.episode.replace(accumulated=()))
        unfinished, episode_id = episode.episode_length > 0, episode.episode_id
        # What may raise comes first, while nothing has changed yet.
        env: Any = self.env
        obs = jax.tree.map(np.array, carry.obs)
        is_loaded = False
        if saved and hasattr(env, "load"):
            states = _split(saved, env.num_envs)
            is_loaded = env.load(states, obs, allow_pickle=allow_pickle)
        if not is_loaded and unfinished.any():
            why = "was pickled, and `allow_pickle` is False"
            why = why if saved else "was not saved"
            warnings.warn(
                f"The state of the environments {why}: {unfinished.sum()} unfinished "
                "episodes restart.",
                stacklevel=3,
            )
        nowhere = np.zeros(env.num_envs, bool)
        with self._call():
            self._begin(carry.key)
            self._next_episode, loop = int(carry.next_episode), self._loop
            if is_loaded:
                loop.state = loop.state._replace(
                    must_begin=nowhere, unread=nowhere, failed=nowhere
                )
            loop.state = loop.state._replace(
                progress=loop.state.progress._replace(
                    step=int(carry.step), state=carry.policy_state
                ),
                episode_id=episode_id,
                own_id=episode_id,
                length=episode.episode_length,
                over=np.full(env.num_envs, not is_loaded),
            )
            if is_loaded:
                self._episode, loop.obs = carry.episode, obs
            else:
                self._episode = self._bookkeeper.start(episode_id)
                loop.begin(~nowhere, episode_id)
            return self._carry()

    def recover(self) -> tuple[Carry, Transition[ObsT, ActionT] | None]:
        """Goes on where an error or Ctrl-C has cut a call short.

        Environments that failed are rebuilt, if they can be, and lanes whose episode
        cannot go on begin new ones; after a call for whole episodes all lanes do.

        Returns:
            The carry to go on with; and the transitions that the call had collected,
            `[T, B, ...]`, for a fold or whole episodes only those that it had not
            processed yet; None if there are none, or if the call had returned.

        Raises:
            ValueError: if `init` was not called yet.
        """
        if self._loop is None:
            raise ValueError("`recover` must follow `init`, which was not called yet.")
        with self._call():
            plan = self._loop.state.plan
            # Episodes that were started are used up; the next call takes later ones.
            if plan is not None and plan.is_queue:
                started = min(plan.num_started, plan.num_episodes)
                self._next_episode = -1 - int(plan.first_id[0]) + started
            self._recover_loop()
            if self._block is None or not self._block.num:
                return self._carry(), None
            num_rows, trajectory = self._block.num, self._count()
            return self._carry(), jax.tree.map(lambda x: x[:num_rows], trajectory)

    def resumed(self, carry: Carry) -> Carry:
        """Returns `carry`, or that of `recover` if the call with it was cut short."""
        is_used = np.array_equal(carry.env_state, self._used)
        return self.recover()[0] if is_used and not self._is_whole else carry

    def _recover_loop(self) -> None:
        """Recovers the loop, with new episodes if another collector stepped `env`."""
        is_mine = is_claimed(self.env, self._number)
        self._loop.recover(self._block, restart_all=not is_mine)
        claim(self.env, self._number)

    @property
    def _num_columns(self) -> int:
        """Number of lanes in a row."""
        return self.env.num_envs

    def _make_loop(self, key: chex.PRNGKey, failed: np.ndarray) -> Loop:
        act_fn, progress = self._runner.act, self._runner.start(key)
        return Loop(self.env, act_fn, progress, key, self._restarts, failed)

    def _begin_block(self, size: int, capacity: int | None = None) -> RowBlock:
        block = RowBlock(self._num_columns, size, capacity)
        self._block, self._trajectory = block, None
        return block

    def _queue(self, num_episodes: int, min_steps: int | None = None) -> EpisodePlan:
        next_own = self._loop.state.next_own
        return queue(next_own, self._next_episode, num_episodes, min_steps)

    def _call(self, carry: Carry | None = None) -> "_Call":
        """Begins a call: checks that the carry is the latest one, and uses it up."""
        # An interrupt may leave the id of the main thread, though it is in no call.
        idle = None, threading.get_ident(), threading.main_thread().ident
        if self._thread not in idle:
            raise RuntimeError(
                "A collector over host environments makes one call at a time, and a "
                "batch of a `Stream` is running in another thread: close the stream "
                "first, or give each its own collector and environments."
            )
        if carry is None:
            return _Call(self)
        checks.host_call(carry)
        if self._loop is not None and not is_claimed(self.env, self._number):
            raise ValueError(
                "`carry` must be of the collector that stepped `env` last, but another "
                "one has stepped it since: give each its own environments, or call "
                "`init` again."
            )
        if self._loop is None or not np.array_equal(carry.env_state, self._mark):
            raise ValueError(
                "`carry` must be the one that the last call returned, for the "
                "environments have moved on; after an error `recover` returns one."
            )
        return _Call(self, carry)

    @property
    def _mark(self) -> np.ndarray:
        """The mark that only the latest carry has."""
        return np.array([self._number, self._ticket], np.uint32)

    def _count(self) -> Transition:
        """Returns the transitions of the block, computed once."""
        if self._trajectory is None:
            counted = self._bookkeeper.count(self._episode, self._block)
            self._episode, self._trajectory = counted
        return self._trajectory

    def _carry(self) -> Carry:
        """Makes the carry for the next call."""
        state = self._loop.state
        step: Any = np.int32(state.progress.step)
        next_episode: Any = np.int32(self._next_episode)
        return Carry(
            key=state.progress.key,
            step=step,
            next_episode=next_episode,
            env_state=self._mark,
            obs=jax.tree.map(np.array, self._loop.obs),
            policy_state=self._runner.restart(
                state.progress, state.over, state.episode_id
            ),
            episode=self._bookkeeper.at(self._episode, state.episode_id),
        )

    def _play(
        self,
        params: Any,
        plan: EpisodePlan,
        max_steps: int,
        consume: Callable[[Transition, int], None] = lambda trajectory, num_rows: None,
    ) -> tuple[Carry, Episodes]:
        """Plays assigned episodes; passes every block of rows to `consume`."""
        loop, results = self._loop, Results(plan)
        loop.assign(plan)
        while not loop.is_over:
            block = self._begin_block(_BLOCK)
            loop.play(params, block, limit=max_steps)
            trajectory = self._count()
            consume(trajectory, block.num)
            results.note(trajectory, lanes_of(trajectory), block.cut)
        episodes, num_queued = results.read(loop.state.lost)
        self._next_episode, self._block = self._next_episode + num_queued, None
        self._trajectory = None
        loop.dismiss(plan.after)
        return self._carry(), jax.device_put(episodes)


class _Call:
    """A call of a collector: until it returns, `recover` can go on where it stopped."""

    def __init__(self, collector: Any, carry: Carry | None = None) -> None:
        self._collector, self._carry = collector, carry

    def __enter__(self) -> Self:
        owner = self._collector
        owner._is_whole = False  # first: from here on `recover` may be called
        owner._thread = threading.get_ident()
        if self._carry is not None:
            owner._used = owner._mark
            owner._ticket += 1
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        owner = self._collector
        owner._thread = None
        if kind is not None:
            return
        # In one line, the last of a call: from here on it counts as returned.
        owner._block, owner._trajectory, owner._is_whole = None, None, True


def _join(states: list[bytes]) -> bytes:
    """Joins the states of `B` environments, after their `B` lengths."""
    lengths = np.array([len(state) for state in states], np.int64)
    return lengths.tobytes() + b"".join(states)


def _split(saved: bytes, num_envs: int) -> list[bytes]:
    lengths = np.frombuffer(saved, np.int64, num_envs)
    ends = lengths.nbytes + np.cumsum(lengths)
    pairs = zip(ends - lengths, ends, strict=True)
    return [saved[start:stop] for start, stop in pairs]

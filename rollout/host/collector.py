"""`HostCollector`: the folds of `Collector` over environments that are not JAX."""

import itertools
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import chex
import jax
import numpy as np

from envs.host.types import HostVectorEnv
from envs.types import ArrayTree
from rollout import checks
from rollout.host.faults import Faults, FaultStats
from rollout.host.figures import Figures, fold, lanes_of
from rollout.host.program import Program
from rollout.host.rows import Rows
from rollout.host.run import NO_LIMIT, Run
from rollout.host.seats import Seats
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
_NUMBERS = itertools.count(1)  # of collectors, in this process


class HostCollector(Generic[ParamsT, ObsT, ActionT]):
    """Collects experience from environments that are not JAX.

    The methods, the arguments and the results are those of `Collector`, but the
    environments are stepped by a loop in Python, so nothing of it is called inside
    `jit`. The policy is one jitted program, called once per step. A carry is good for
    one call: afterwards the environments have moved on.

    Rows whose `mask` is False are zero. Rows are void where an environment only reset
    itself, and where an episode was lost to a fault.

    Attributes:
        env: `E` environments side by side.
        policy: the policy that acts in them.
        record_fn: what is recorded of a transition, as in `Collector`.
        accumulators: figures of one's own that are kept per episode, likewise.

    Args:
        on_fault: what is done where an environment fails: it raises, a worker process
            dies or does not answer, an observation is not finite or outside of its
            space. "raise" raises `envs.EnvFault`; "restart" masks the episode from its
            first row in this call on, counts it in `fault_stats`, logs the cause and
            makes the environment anew; the others go on.
        max_restarts: how many times in all environments are made anew; then it raises.

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
        checks.kind_of_env(env, is_host=True)
        checks.collector(env, policy, record_fn)
        checks.count("max_restarts", max_restarts, least=0)
        self.env, self.policy, self.record_fn = env, policy, record_fn
        self.accumulators = checks.accumulators(accumulators)
        self._faults = Faults(env, on_fault, max_restarts)
        self._number, self._ticket = next(_NUMBERS), 0
        columns = env.num_envs, self._num_columns
        self._figures = Figures(self.accumulators, record_fn, *columns)
        self._program = Program(policy, env.action_space, env.num_envs)
        self._run: Any = None  # the Run, once there is a first carry
        self._key: Any = None
        self._next_episode = 0
        # Of the call under way, or cut short: the mark of its carry, what it has filled
        # of the block, and who plays which episode.
        self._used: Any = None  # [2] uint32
        self._rows: Any = None  # Rows
        self._seats: Seats | None = None

    @property
    def fault_stats(self) -> FaultStats:
        """Counts of faults, and of what they cost, so far."""
        return self._faults.stats

    def close(self) -> None:
        """Closes the environments."""
        self.env.close()

    def init(self, key: chex.PRNGKey) -> Carry:
        """Starts the first episode of every lane; see `Collector.init`.

        Raises:
            ValueError: as there.
            envs.EnvFault: if an environment failed at its reset.
        """
        checks.typed_key(key)
        self._ticket += 1
        self._key, self._next_episode, self._seats = key, 0, None
        self._figures.start()
        self._program.start(key)
        self._run = self._make_run(key)
        return self._snapshot()

    def step(
        self, carry: Carry, params: ParamsT
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes one step in every lane; see `Collector.step`."""
        carry, trajectory = self.collect_steps(carry, params, 1)
        return carry, jax.tree.map(lambda x: x[0], trajectory)

    def collect_steps(
        self, carry: Carry, params: ParamsT, num_steps: int
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes `num_steps` steps in every lane; see `Collector.collect_steps`.

        Raises:
            ValueError: as there, or if `carry` is not that of the last call.
            envs.EnvFault: if an environment failed, and is not to be made anew. What
                was collected until then is kept for `recover`, as after Ctrl-C, which
                raises between two steps.
        """
        rows = self._make_rows(checks.count("num_steps", num_steps))
        self._begin(carry, params, rows)
        self._run.play(params, rows)
        trajectory = self._figures.finish(rows)
        return self._snapshot(), trajectory

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

        Rows of an episode that were folded before it was lost stay so.
        """
        num_steps = checks.count("num_steps", num_steps)
        checks.function("fn", fn)
        self._begin(carry, params)
        capacity = min(_BLOCK, num_steps)
        for first in range(0, num_steps, capacity):
            self._rows = self._make_rows(min(capacity, num_steps - first), capacity)
            self._run.play(params, self._rows)
            acc = fold(fn, acc, self._figures.finish(self._rows), self._rows.num)
        return self._snapshot(), acc

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

        One that is lost to a fault is among them, with `mask` False and all else zero.
        """
        num_episodes = checks.count("num_episodes", num_episodes)
        max_steps = checks.count("max_steps", max_steps, most=None)
        if min_steps is not None:
            min_steps = checks.count("min_steps", min_steps)
        seats = self._make_queue(carry, params, num_episodes, min_steps)
        return self._play(params, seats, max_steps, self._note_figures(seats))

    def collect_episodes_per_env(
        self, carry: Carry, params: ParamsT, episodes_per_env: int, *, max_steps: int
    ) -> tuple[Carry, Episodes]:
        """Plays episodes of every lane; see `Collector.collect_episodes_per_env`."""
        episodes_per_env = checks.count("episodes_per_env", episodes_per_env)
        max_steps = checks.count("max_steps", max_steps, most=None)
        self._begin(carry, params)
        lane = np.arange(self.env.num_envs)
        seats = Seats(
            lane,
            episodes_per_env * self.env.num_envs,
            self._run.lanes.next_own() - lane,
            is_queue=False,
        )
        return self._play(params, seats, max_steps, self._note_figures(seats))

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
        num_episodes = checks.count("num_episodes", num_episodes)
        max_steps = checks.count("max_steps", max_steps, most=None)
        checks.function("fn", fn)
        seats = self._make_queue(carry, params, num_episodes, None)

        def consume(rows: Rows) -> None:
            nonlocal acc
            trajectory = self._figures.finish(rows)
            self._accumulate(seats, trajectory)
            acc = fold(fn, acc, trajectory, rows.num)

        carry, episodes = self._play(params, seats, max_steps, consume)
        return carry, acc, episodes

    def collect_padded_episodes(
        self, carry: Carry, params: ParamsT, num_episodes: int, *, max_length: int
    ) -> tuple[Carry, Transition[ObsT, ActionT], Episodes]:
        """Returns `num_episodes` whole; see `Collector.collect_padded_episodes`."""
        num_episodes = checks.count("num_episodes", num_episodes)
        max_length = checks.count("max_length", max_length)
        seats = self._make_queue(carry, params, num_episodes, None)
        padded: ArrayTree = None

        def consume(rows: Rows) -> None:
            nonlocal padded
            trajectory = jax.device_get(self._figures.finish(rows))
            self._accumulate(seats, trajectory)
            if padded is None:
                padded = _blank(trajectory, (max_length, num_episodes))
            here = trajectory.mask
            index = seats.index_of(trajectory.episode_id, lanes_of(trajectory))[here]
            place = (trajectory.episode_length[here] - 1, index)
            pairs = zip(
                jax.tree.leaves(padded), jax.tree.leaves(trajectory), strict=True
            )
            for table, new in pairs:
                table[place] = new[here]

        carry, episodes = self._play(params, seats, max_length, consume)
        for table in jax.tree.leaves(padded):
            table[:, seats.is_lost] = 0
        return carry, jax.device_put(padded), episodes

    def collect_batch(
        self,
        carry: Carry,
        params: ParamsT,
        num_steps: int,
        *,
        capacity: int,
        limit: int = NO_LIMIT,
        random_fn: Callable[[int], np.ndarray | None] = lambda row: None,
        at_end: str = "continue",
    ) -> tuple[Carry, Transition[ObsT, ActionT]]:
        """Takes steps as a `Stream` needs them.

        Called again after an error, with the same carry, it goes on with the batch.

        Args:
            carry: as ever.
            params: whatever the policy takes as its parameters.
            num_steps: rows to fill.
            capacity: rows of the trajectory, zero after those.
            limit: steps after which an episode is truncated.
            random_fn: the row to `[E]` bool, the lanes that act at random, or None.
            at_end: see `Stream`'s `at_batch_end`.

        Returns:
            The next carry, and the trajectory, `[capacity, E, ...]`.
        """
        run, rows = self._run, self._rows
        if rows is not None and np.array_equal(carry.env_state, self._used):
            run.recover(rows.num)
        else:
            rows = self._make_rows(num_steps, capacity)
            self._begin(carry, params, rows)
            if at_end == "reset":
                run.begin(run.lanes.episode_length > 0, run.lanes.next_own())
        run.play(params, rows, limit=limit, random_fn=random_fn)
        is_cut = np.zeros(rows.mask.shape, bool)
        if at_end == "truncate":
            is_cut[num_steps - 1] = run.lanes.episode_length > 0
            run.begin(is_cut[num_steps - 1], run.lanes.next_own())
        trajectory = self._figures.finish(rows)
        trajectory = trajectory.replace(truncated=trajectory.truncated | is_cut)
        return self._snapshot(), trajectory

    def compile(self, carry: Carry, params: ParamsT) -> None:
        """Compiles the program of the policy ahead of the first call."""
        self._program.compile(params, carry.obs)

    def save(self, carry: Carry) -> bytes:
        """The state of the environments, `b""` if it is not to be had.

        That of the moment at which `carry` was made: there is none any more if the
        environments have moved on, or if they cannot be pickled.
        """
        is_current = np.array_equal(carry.env_state, self._mark)
        save = getattr(self.env, "save", None)
        saved = save() if is_current and save is not None else None
        return pickle.dumps(saved) if saved else b""

    def restore(self, carry: Carry, saved: bytes) -> Carry:
        """Goes on where a carry stood, in this process or another.

        Args:
            carry: of a collector of the same kind.
            saved: what `save` returned of it. If there is nothing, the episodes under
                way begin anew, each with its own seed, and a warning says so.

        Returns:
            The carry to go on with.
        """
        self.init(carry.key)
        self._next_episode = int(carry.next_episode)
        self._figures.figures = carry.episode.accumulated
        run, under_way = self._run, np.asarray(carry.episode.episode_length) > 0
        run.lanes.put_back(carry.episode)
        self._program.step, self._program.state = int(carry.step), carry.policy_state
        run.lanes.over[:] = not saved
        if saved:
            env: Any = self.env  # one that has `save` has `load`
            env.load(pickle.loads(saved))
            run.obs = jax.tree.map(np.asarray, carry.obs)
        else:
            run.begin(np.ones(self.env.num_envs, bool), run.lanes.episode_id)
            if under_way.any():
                warnings.warn(
                    f"The state of the environments was not saved: {under_way.sum()} "
                    "episodes under way begin anew.",
                    stacklevel=3,
                )
        return self._snapshot()

    def recover(self) -> tuple[Carry, Transition[ObsT, ActionT] | None]:
        """Goes on after an error, or after Ctrl-C, that cut a call short.

        Environments that failed are made anew, if they can be, and lanes whose episode
        cannot go on begin new ones.

        Returns:
            The carry to go on with; and what the call had collected, `[T, E, ...]`, of
            a fold or of whole episodes the rows that it had not done with yet; None
            if there are none.

        Raises:
            ValueError: if no call was cut short.
        """
        if self._rows is None:
            raise ValueError(
                "`recover` must follow a call that was cut short, got none."
            )
        num_rows = self._rows.num
        trajectory = self._figures.finish(self._rows) if num_rows else None
        if self._seats is not None:
            self._next_episode += self._seats.num_queued
            self._seats = None
        self._run.recover()
        if trajectory is not None:
            trajectory = jax.tree.map(lambda x: x[:num_rows], trajectory)
        return self._snapshot(), trajectory

    @property
    def _num_columns(self) -> int:
        """Lanes of a row."""
        return self.env.num_envs

    def _make_run(self, key: chex.PRNGKey) -> Run:
        return Run(self.env, self._program.act, key, self._faults)

    def _make_rows(self, size: int, capacity: int | None = None) -> Rows:
        return Rows(self._num_columns, size, capacity)

    def _begin(self, carry: Carry, params: Any, rows: Rows | None = None) -> None:
        """Checks that the carry is the latest one, and marks it as used."""
        checks.host_call(carry, params)
        if self._run is None or not np.array_equal(carry.env_state, self._mark):
            raise ValueError(
                "`carry` must be the one that the last call returned, for the "
                "environments have moved on; after an error `recover` returns one."
            )
        self._used = self._mark
        self._ticket += 1
        self._rows = rows or self._make_rows(1)

    @property
    def _mark(self) -> np.ndarray:
        """Mark of the latest carry, which no other carry has."""
        return np.array([self._number, self._ticket], np.uint32)

    def _snapshot(self) -> Carry:
        """The carry that the next call takes."""
        run, lanes = self._run, self._run.lanes
        step: Any = np.int32(self._program.step)
        next_episode: Any = np.int32(self._next_episode)
        self._program.restart(lanes.over, lanes.episode_id)
        self._rows = None
        return Carry(
            key=self._key,
            step=step,
            next_episode=next_episode,
            env_state=self._mark,
            obs=jax.tree.map(np.array, run.obs),
            policy_state=self._program.state,
            episode=lanes.snapshot(self._figures.of(lanes)),
        )

    def _make_queue(
        self, carry: Carry, params: Any, num_episodes: int, min_steps: int | None
    ) -> Seats:
        """All lanes serve one queue: whoever is free takes the next episode."""
        self._begin(carry, params)
        num_envs = self.env.num_envs
        ids = np.full(num_envs, -1 - self._next_episode)
        options = {"is_queue": True, "min_steps": min_steps}
        return Seats(np.arange(num_envs), num_episodes, ids, **options)

    def _play(
        self,
        params: Any,
        seats: Seats,
        max_steps: int,
        consume: Callable[[Rows], None],
    ) -> tuple[Carry, Episodes]:
        """Plays the episodes of `seats`, and hands every block of rows to `consume`."""
        run, self._seats = self._run, seats
        everywhere = np.ones(self.env.num_envs, bool)
        after = seats.after(run.lanes)
        run.begin(everywhere, seats.episode_id, seats)
        while not seats.is_over:
            self._rows = self._make_rows(_BLOCK)
            run.play(params, self._rows, limit=max_steps, seats=seats)
            consume(self._rows)
        episodes = seats.read()
        self._next_episode += seats.num_queued
        self._seats = None
        run.begin(everywhere, after)
        return self._snapshot(), jax.device_put(episodes)

    def _note_figures(self, seats: Seats) -> Callable[[Rows], None]:
        """Makes the consumer of blocks that keeps only the accumulated figures."""

        def consume(rows: Rows) -> None:
            if self.accumulators:
                self._accumulate(seats, self._figures.finish(rows))

        return consume

    def _accumulate(self, seats: Seats, trajectory: Transition) -> None:
        """Notes the figures of the episodes that ended in a block."""
        if self.accumulators:
            fields = trajectory.done & trajectory.mask, trajectory.episode_id
            fields = *fields, lanes_of(trajectory), trajectory.accumulated
            ended, episode_id, lane, figures = jax.device_get(fields)
            index = seats.index_of(episode_id, lane)[ended]
            seats.accumulate(index, jax.tree.map(lambda x: x[ended], figures))


def _blank(trajectory: Transition, shape: tuple[int, int]) -> Transition:
    return jax.tree.map(lambda x: np.zeros(shape + x.shape[2:], x.dtype), trajectory)

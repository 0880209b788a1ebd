"""The state of a host collection, and the functions that change episodes.

`HostState` is to a `HostCollector` what `rollout.types.Carry` is to a `Collector`: one
value that holds everything between two rows, except for the environments. Functions
return the next state and leave the old one unchanged.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout.base import trees
from rollout.base.types import ArrayTree
from rollout.envs.host.env_checks import SpaceCheck
from rollout.host.host_policy import HostPolicy
from rollout.kernel import keys
from rollout.kernel.state import accumulate_nothing
from rollout.types import Carry, Episode

NO_LIMIT = 2**31 - 1  # steps, longer than any episode
ALL_LANES = slice(None)
_NUM_SEED_ROWS = 256  # rows of B seeds per table
_NUM_TABLES = 64  # in memory, 64 MiB with 1,024 environments


class Faults(NamedTuple):
    """Errors of environments.

    Attributes:
        causes: error of each failed environment, by lane.
        step: number of the step, from 1, in the episode of the first failed
            environment; 0 for a reset.
    """

    causes: Mapping[int, BaseException] = {}
    step: int = 0


NO_FAULTS = Faults()


class FaultStats(NamedTuple):
    """Counts faults and lost steps since the collector was created.

    Attributes:
        faulty_episodes: number of discarded episodes.
        lost_steps: number of masked-out steps of discarded episodes, including the
            faulty steps. `collect_episodes` and the folds count only steps in their
            current block of at most 64 rows.
        restarts: number of attempts to rebuild an environment.
    """

    faulty_episodes: int = 0
    lost_steps: int = 0
    restarts: int = 0


class Flight(NamedTuple):
    """Steps in flight, of environments that step asynchronously.

    Attributes:
        mask: `[B]` bool, lanes in flight.
        sent: `[B, ...]`, their observations, actions and extras; None before the first
            step. The arrays change in place.
    """

    mask: np.ndarray
    sent: ArrayTree = None


@dataclasses.dataclass(frozen=True, eq=False)
class HostState:
    """State of a host collection between two rows, like the kernel's `Carry`.

    No function writes to an array of a state, except to `obs`, `Flight.sent`, the rows
    from `num_rows` on, and the rows of lost episodes.

    Attributes:
        step: number of calls of the policy so far.
        next_episode: number of queue positions used so far.
        policy_state: `[B, ...]` state of the policy, on the device.
        obs: `[B, ...]` current observations, possibly in memory of the environments.
        episode_id: `[B]` int32, ids of the current episodes.
        episode_return: `[B]` float32, returns of the current episodes so far.
        episode_length: `[B]` int32, steps of the current episodes so far.
        is_first: `[B]` bool, True before the first action of an episode.
        must_reset: `[B]` bool, lanes that `restart` resets.
        failed: `[B]` bool, lanes whose environment `restart` rebuilds, if possible.
        accumulated: accumulated values of all lanes before the first row, or after the
            last row once the rows are recorded.
        flight: steps in flight; None if all lanes step together.
        stats: counts of faults.
        plan: assigned episodes; None while lanes play per-lane episodes.
        rows: memory for the rows of the call, or for a block of them.
        num_rows: number of complete rows in `rows`.
        recorded: `[T, ...]` recorded rows; None before `record`.
    """

    step: int
    next_episode: int
    policy_state: ArrayTree
    obs: ArrayTree
    episode_id: np.ndarray
    episode_return: np.ndarray
    episode_length: np.ndarray
    is_first: np.ndarray
    must_reset: np.ndarray
    failed: np.ndarray
    accumulated: ArrayTree
    flight: Flight | None
    stats: FaultStats
    plan: Any = None  # an `EpisodePlan`
    rows: Any = None  # a `Rows`
    num_rows: int = 0
    recorded: Any = None

    def replace(self, **changes: Any) -> Self:
        """Returns a state with other values of some attributes."""
        # Faster than `dataclasses.replace`, which would take a tenth of a cheap step.
        state = object.__new__(type(self))
        state.__dict__.update(self.__dict__, **changes)
        return state

    @property
    def is_done(self) -> bool:
        """True if all assigned episodes have ended."""
        return self.plan is not None and self.plan.is_done

    @property
    def next_ids(self) -> np.ndarray:
        """`[B]` int32, ids of the next per-lane episodes, after the plan if any."""
        if self.plan is not None:
            return self.plan.next_ids
        return self.episode_id + np.int32(len(self.episode_id))


@dataclasses.dataclass(frozen=True, eq=False)
class HostSpec:
    """The constants of a host collection: environments, compiled policy, root key.

    Attributes:
        env: vector of `B` environments.
        policy: compiled policy.
        key: root key.
        num_ready: columns of a row with asynchronous steps, else None.
        accumulators: custom values to accumulate per episode.
        record_fn: compiled function that accumulates values and records rows; None
            records all fields.
    """

    env: Any
    policy: HostPolicy
    key: chex.PRNGKey
    num_ready: int | None
    accumulators: Any
    record_fn: Any

    @property
    def width(self) -> int:
        """Number of columns of a row."""
        return self.num_ready or self.env.num_envs

    @functools.cached_property
    def all_lanes(self) -> np.ndarray:
        """`[B]` bool, True everywhere."""
        return np.ones(self.env.num_envs, bool)

    @functools.cached_property
    def no_lanes(self) -> np.ndarray:
        """`[B]` bool, False everywhere."""
        return np.zeros(self.env.num_envs, bool)

    @functools.cached_property
    def obs_check(self) -> SpaceCheck:
        """Finds invalid observations."""
        return SpaceCheck(self.env.observation_space)

    @functools.cached_property
    def _seed_table(self) -> Callable[[int], np.ndarray]:
        """Returns a table of seeds, `[_NUM_SEED_ROWS, B]`, by its number."""
        # Every lane may need a different table. If a table was evicted, it is computed
        # again with the same seeds.
        num_envs = self.env.num_envs
        return functools.lru_cache(min(num_envs + 1, _NUM_TABLES))(
            lambda table: np.asarray(_compute_seeds(self.key, num_envs, table))
        )

    def seeds(self, episode_id: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Returns the seeds of the episodes of `lanes`, `[B]` uint32; 0 elsewhere."""
        seeds = np.zeros(len(episode_id), np.uint32)
        for lane in lanes.tolist():
            # Queued ids count down from -1, so rows may be negative.
            row, column = divmod(int(episode_id[lane]), len(episode_id))
            table = self._seed_table(row // _NUM_SEED_ROWS)
            seeds[lane] = table[row % _NUM_SEED_ROWS, column]
        return seeds


def init(spec: HostSpec, stats: FaultStats, failed: np.ndarray | None) -> HostState:
    """Returns a state in which every lane waits for the reset of its first episode.

    Args:
        spec: constants of the collection.
        stats: counts of faults so far.
        failed: `[B]` bool, lanes whose environment must be rebuilt; None for none.
    """
    num_envs = spec.env.num_envs
    return HostState(
        step=0,
        next_episode=0,
        policy_state=spec.policy.initial_state,
        obs=None,
        episode_id=np.arange(num_envs, dtype=np.int32),
        episode_return=np.zeros(num_envs, np.float32),
        episode_length=np.zeros(num_envs, np.int32),
        is_first=spec.all_lanes,
        must_reset=spec.all_lanes,
        failed=spec.no_lanes if failed is None else failed,
        accumulated=accumulate_nothing(spec.accumulators, num_envs),
        flight=None if spec.num_ready is None else Flight(spec.no_lanes),
        stats=stats,
    )


def make_carry(spec: HostSpec, state: HostState, version: Any) -> Carry:
    """Returns the carry of a state; `version` identifies it."""
    accumulated = state.accumulated
    if spec.accumulators:
        initial = accumulate_nothing(spec.accumulators, spec.env.num_envs)
        has_begun: Any = state.episode_length > 0
        accumulated = trees.select(has_begun, accumulated, initial)
    episode: dict[str, Any] = {
        "key": (),  # host episodes have a seed instead
        "episode_return": state.episode_return,
        "episode_length": state.episode_length,
        "episode_id": state.episode_id,
        "accumulated": accumulated,
    }
    fields: dict[str, Any] = {
        "key": spec.key,
        "step": np.int32(state.step),
        "next_episode": np.int32(state.next_episode),
        "env_state": (version, spec.env.shared),
        "obs": jax.tree.map(np.array, state.obs),  # the environments change theirs
        "policy_state": spec.policy.reset_state(
            state.policy_state, state.is_first, state.episode_id
        ),
        "episode": Episode(**episode),
    }
    return Carry(**fields)


def load_carry(spec: HostSpec, state: HostState, carry: Carry) -> HostState:
    """Returns the state at a carry, for example of an earlier process."""
    episode = carry.episode
    return state.replace(
        step=int(carry.step),
        next_episode=int(carry.next_episode),
        policy_state=carry.policy_state,
        obs=jax.tree.map(np.array, carry.obs),
        episode_id=np.array(episode.episode_id),
        episode_return=np.array(episode.episode_return),
        episode_length=np.array(episode.episode_length),
        is_first=spec.no_lanes,
        must_reset=spec.no_lanes,
        accumulated=episode.accumulated,
    )


def mark(state: HostState, mask: np.ndarray, episode_id: np.ndarray) -> HostState:
    """Assigns episode ids, `[B]`, to the lanes in `mask`, which wait for a reset."""
    return state.replace(
        episode_id=np.where(mask, episode_id, state.episode_id),
        episode_return=put(state.episode_return, mask, 0),
        episode_length=put(state.episode_length, mask, 0),
        is_first=state.is_first | mask,
        must_reset=state.must_reset | mask,
    )


def end_plan(state: HostState, num_used: int) -> HostState:
    """Ends the plan after `num_used` queue positions; all lanes wait for a reset."""
    next_ids = state.next_ids
    state = state.replace(next_episode=state.next_episode + num_used, plan=None)
    return mark(state, np.ones(len(next_ids), bool), next_ids)


def abandon(state: HostState, *, has_failed: bool = False) -> HostState:
    """Ends the plan, if any; every lane waits for its next per-lane episode.

    If `has_failed`, all environments are rebuilt, because their states are unknown.
    """
    if has_failed:
        state = state.replace(failed=np.ones(len(state.failed), bool))
    # Do not play started episodes again: their ids would repeat.
    return end_plan(state, 0 if state.plan is None else state.plan.num_used)


def put(array: np.ndarray, lanes: Any, values: Any) -> np.ndarray:
    """Returns the `[B]` array with new values in `lanes`."""
    if lanes is ALL_LANES:
        return values
    array = array.copy()
    array[lanes] = values
    return array


@functools.partial(jax.jit, static_argnums=1)
def _compute_seeds(key: chex.PRNGKey, num_envs: int, table: jax.Array) -> jax.Array:
    """Computes a table of seeds, `[_NUM_SEED_ROWS, B]`, to avoid JAX in each reset."""
    row = table * _NUM_SEED_ROWS + jnp.arange(_NUM_SEED_ROWS, dtype=jnp.int32)
    lane = jnp.arange(num_envs, dtype=jnp.int32)[None]
    row_keys = jax.vmap(lambda ids: keys.keys_of(key, ids))
    return keys.seeds(row_keys(row[:, None] * num_envs + lane))

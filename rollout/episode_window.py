"""`EpisodeWindow`: the last K episodes, for learning curves inside `jit`.

The first episodes that end are the short ones, and their mean misleads. So a window
lists episodes when they start, and counts them in that order: as `collect_episodes`, it
settles which episodes count before any of them ends.
"""

import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from rollout import checks
from rollout.moments import Moments, by_name, is_known, moments, xp_of
from rollout.platform import choose
from rollout.stats import plural, present
from rollout.types import Episodes, Transition, check_data, check_trajectory

_BLOCK = 64  # flags that are counted together

# Of each episode: return, length and accumulated values.
_Values = tuple[jax.Array, jax.Array, dict[str, jax.Array]]


class _Listed(struct.PyTreeNode, kw_only=True):
    """The episodes that will count, in the order in which they started.

    Attributes:
        num: `()` int32, how many there are: the first ones of the arrays below.
        start: `[K]` int32, the row of the next trajectory at which the episode started:
            negative.
        lane: `[K]` int32, the lane.
        values: `[K]` each; the length is 0 until the episode has ended.
    """

    num: jax.Array  # ()
    start: jax.Array  # [K]
    lane: jax.Array  # [K]
    values: _Values


class EpisodeWindow(struct.PyTreeNode, kw_only=True):
    """The last K episodes, for the learning curve of a loop inside `jit`.

    Keep the window in the state of the loop:

        window = rollout.EpisodeWindow.init(100)  # before the loop
        window = window.add(trajectory)  # in each update

    An episode is listed when it starts, if fewer than K others wait on the list, and
    counts once all listed ones that started with it or before it have ended. So whether
    an episode counts does not depend on how it goes, and short ones are not favoured.
    The first mean is that of the first episodes of all lanes, or of the first K lanes,
    and is there when the longest of them has ended; until then it is NaN.

    A window takes every trajectory of one collector, in order. Where a listed episode
    neither goes on nor ends, as after a fault or a trajectory that was left out, it
    begins a new list. Where lanes differ, as those of `rollout.envs.vectorize_each`,
    take K above the number of lanes, so that all of them count.

    Attributes:
        episode_return: `[K]` float32, undiscounted, in the order of their starts.
        episode_length: `[K]` int32, in steps, zero where no episode counts yet.
        episode_accumulated: `[K]` float32 by name, the accumulated values of `init`.
        listed: the episodes that will count.
    """

    episode_return: jax.Array  # [K]
    episode_length: jax.Array  # [K]
    episode_accumulated: dict[str, jax.Array]  # [K] each
    listed: _Listed

    @classmethod
    def init(cls, num_episodes: int, *, accumulated: Sequence[str] = ()) -> Self:
        """Returns the window of a loop that begins.

        Args:
            num_episodes: K, at least 1.
            accumulated: names of accumulated values to show, each one number per
                episode, as in `CollectStats.accumulated`.

        Raises:
            ValueError: if `num_episodes` is not an int of at least 1.
        """
        size = checks.int_between("num_episodes", num_episodes)

        def zero(dtype: Any = jnp.float32) -> jax.Array:
            return jnp.zeros(size, dtype)  # its own buffer, so that all are donated

        def values() -> _Values:
            return zero(), zero(jnp.int32), {name: zero() for name in accumulated}

        returns, lengths, own = values()
        start, lane = zero(jnp.int32), zero(jnp.int32)
        listed = _Listed(num=jnp.int32(0), start=start, lane=lane, values=values())
        return cls(
            episode_return=returns,
            episode_length=lengths,
            episode_accumulated=own,
            listed=listed,
        )

    def add(self, data: Transition | Episodes) -> Self:
        """Moves the window on by the episodes that count after `data`. Pure.

        Args:
            data: the next trajectory, `[T, B, ...]`; its masked-out rows do not count.
                Or `Episodes`, which all count.

        Raises:
            ValueError: if `data` is neither, has other axes, is of a `HostCollector`
                with `num_ready`, or lacks an accumulated value of the window.
        """
        given = _values(data, list(self.episode_accumulated))
        slot = jnp.arange(len(self.episode_length), dtype=jnp.int32)
        if isinstance(data, Episodes):
            # Episodes that are there are numbered from 1, and the last K of them are
            # looked up by their numbers.
            number = jnp.cumsum(present(data), dtype=jnp.int32)  # 1 for the first
            num_new = jnp.minimum(number[-1], slot.size)
            at = jnp.searchsorted(number, number[-1] - num_new + 1 + slot)
            return self._append(jax.tree.map(lambda x: x[at], given), num_new)
        # First list what starts here, then find where each listed episode ends, then
        # let those in front that have ended count.
        mask, done, length = jnp.asarray(data.mask), jnp.asarray(data.done), given[1]
        listed, num_rows = _list_starts(self.listed, mask & (length == 1)), len(mask)
        # The rows of each listed episode, `[T, K]`, and the one in which it ends.
        first = jnp.arange(1, num_rows + 1, dtype=jnp.int32)[:, None] - length
        lane, start = listed.lane, listed.start
        # A row belongs to the listed episode of its lane if it counts back to its
        # start.
        is_own = mask[:, lane] & (first[:, lane] == start[None])
        is_own &= (lane < mask.shape[1])[None]  # else it is lost
        is_end = is_own & done[:, lane]
        end, ends = jnp.argmax(is_end, axis=0), jnp.any(is_end, axis=0)
        values: _Values = jax.tree.map(
            lambda old, new: jnp.where(ends, new[end, lane], old), listed.values, given
        )
        is_running = (slot < listed.num) & (values[1] == 0)
        # It neither ended nor has the last row: it was given up, or rows are missing.
        is_lost = is_running & ~is_own[-1]
        # Whoever started before the oldest that still runs counts now; those that
        # started with it wait, or the first to end would be preferred.
        oldest = jnp.min(jnp.where(is_running, start, num_rows))
        num_new = jnp.sum((slot < listed.num) & (start < oldest), dtype=jnp.int32)
        # The list moves up, and starts are counted from the next trajectory.
        start, lane, rest = jax.tree.map(
            lambda x: jnp.roll(x, -num_new), (start - num_rows, lane, values)
        )
        num = jnp.where(jnp.any(is_lost), 0, listed.num - num_new)
        listed = _Listed(num=num, start=start, lane=lane, values=rest)
        return self._append(values, num_new).replace(listed=listed)

    def _append(self, values: _Values, num_new: jax.Array) -> Self:
        """Appends the first `num_new` of `values`, and drops as many old ones."""
        size = len(self.episode_length)
        old = self.episode_return, self.episode_length, self.episode_accumulated
        returns, lengths, own = jax.tree.map(
            lambda x, new: lax.dynamic_slice_in_dim(
                jnp.concatenate((x, new)), num_new, size
            ),
            old,
            values,
        )
        return self.replace(
            episode_return=returns, episode_length=lengths, episode_accumulated=own
        )

    @property
    def num_episodes(self) -> jax.Array:
        """`()` int32, how many episodes the window has, at most K."""
        return xp_of(self).sum(self.episode_length > 0, axis=-1, dtype=np.int32)

    @property
    def returns(self) -> Moments:
        """Moments of their undiscounted returns: the mean is `window.returns.mean`."""
        return self._moments(self.episode_return)

    @property
    def lengths(self) -> Moments:
        """Moments of their lengths in steps."""
        return self._moments(self.episode_length)

    @property
    def accumulated(self) -> dict[str, Moments]:
        """Moments of their accumulated values, by name."""
        return {name: self._moments(x) for name, x in self.episode_accumulated.items()}

    def __str__(self) -> str:
        """Formats the mean return and the number of episodes."""
        if not is_known(self.num_episodes):
            return repr(self)
        if not self.num_episodes:
            return "no episode counts yet"
        last = plural(self.num_episodes, "episode")
        return f"return {self.returns.mean:.6g}, last {last}"

    def _moments(self, values: jax.Array) -> Moments:
        xp = xp_of(self)  # NumPy where nothing is traced: see `Moments`
        is_there = self.episode_length > 0
        return moments(xp.asarray(values), xp.asarray(is_there), axis=-1, xp=xp)


def _values(data: Any, names: list[str]) -> _Values:
    """Checks what is added to a window; returns the values of its episodes so far."""
    check_data(data)
    if isinstance(data, Transition):
        check_trajectory(data)
    shape = data.terminated.shape
    own = by_name(data.accumulated, shape)
    if missing := set(names) - set(own):
        raise ValueError(
            f"`data` must have the accumulated value {min(missing)!r} of the window, "
            f"one number per episode, got {', '.join(own) or 'none'}."
        )
    own = {name: jnp.asarray(own[name], jnp.float32) for name in names}
    returns = jnp.asarray(data.episode_return, jnp.float32)
    return returns, jnp.asarray(data.episode_length, jnp.int32), own


def _list_starts(listed: _Listed, is_first: jax.Array) -> _Listed:
    """Lists the episodes that start in a trajectory, as many as there is room for."""
    slot = jnp.arange(len(listed.start), dtype=jnp.int32)
    # Blocks of flags are counted, and only those with a start that is wanted looked
    # into: a running count of all flags would take longer than their episodes do.
    flags = jnp.pad(is_first.reshape(-1), (0, -is_first.size % _BLOCK))
    blocks = flags.reshape(-1, _BLOCK)
    count = jnp.cumsum(jnp.sum(blocks, axis=1, dtype=jnp.int32))
    # The new starts fill the free slots in their order.
    number = slot - listed.num + 1  # of the start, 1 for the first
    # A GPU pays for every round of a binary search, and compares all at once.
    compare_all = functools.partial(jnp.searchsorted, method="compare_all")
    block = choose(jnp.searchsorted, compare_all, count, number)
    block = jnp.minimum(block, len(count) - 1)
    number_in_block = number - jnp.where(block > 0, count[block - 1], 0)
    counts_in_block = jnp.cumsum(blocks[block], axis=1, dtype=jnp.int32)
    at = jnp.argmax(counts_in_block == number_in_block[:, None], axis=1)
    at = (_BLOCK * block + at).astype(jnp.int32)
    is_new = (slot >= listed.num) & (number <= count[-1])
    new = at // is_first.shape[1], at % is_first.shape[1]
    start, lane = jax.tree.map(
        lambda old, new: jnp.where(is_new, new, old), (listed.start, listed.lane), new
    )
    values = jax.tree.map(
        lambda x: jnp.where(is_new, jnp.zeros_like(x), x), listed.values
    )
    num = listed.num + jnp.sum(is_new, dtype=jnp.int32)
    return _Listed(num=num, start=start, lane=lane, values=values)

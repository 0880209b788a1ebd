"""Where an observation, a reward, a log-probability or a value is not finite."""

import jax
import jax.numpy as jnp
import numpy as np

from rollout.types import Transition

NONE = 2**31 - 1  # no step of a batch has this number
_SMALL = 16  # numbers per lane, below which it is fastest to ask every one
_CHECKED_EXTRAS = ("log_prob", "value", "next_value")


def checked(transition: Transition) -> dict[str, jax.Array]:
    """Picks the floats that must be finite, by name.

    Logits are not among them: those of an action that is not allowed are -inf.
    """
    fields = {
        "obs": transition.obs,
        "next_obs": transition.next_obs,
        "reward": transition.reward,
        "extras": transition.extras,
    }
    return {
        name: leaf
        for path, leaf in jax.tree.leaves_with_path(fields)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        and _is_checked(name := jax.tree_util.keystr(path, simple=True, separator="."))
    }


def not_finite(
    transition: Transition, proved: frozenset[str] = frozenset()
) -> jax.Array:
    """Tells in which lanes of one transition something is not finite; `[B]` bool.

    Args:
        transition: `[B, ...]`.
        proved: the names that need not be looked at; see `_finite.proved`.
    """
    leaves = {k: x for k, x in checked(transition).items() if k not in proved}
    bad = jnp.zeros(transition.reward.shape, bool)
    for name, x in leaves.items():
        if x.size <= _SMALL * x.shape[0]:
            # One by one, for XLA:CPU would make a kernel of its own of every reduction.
            for column in x.reshape(x.shape[0], -1).T:
                bad |= ~jnp.isfinite(column)
        elif name.removeprefix("next_") not in leaves.keys() - {name}:
            pair = leaves.get(f"next_{name}", x)  # in one pass with `obs`
            size = jnp.maximum(jnp.abs(x), jnp.abs(pair)).reshape(x.shape[0], -1)
            # A NaN or an infinity is the largest of its lane. Of many numbers, three
            # times as fast on CPU as to ask each whether it is finite.
            bad |= ~jnp.isfinite(jnp.max(size, axis=1))
    return bad


def numbers(bad: jax.Array, index: jax.Array) -> jax.Array:
    """The `index`, `[B]` int32, where `bad`, and `NONE` elsewhere."""
    return jnp.where(bad, index, NONE)


def of_same_episode(faulty: jax.Array, episode_id: jax.Array) -> jax.Array:
    """Marks, of every episode that ends at a `faulty` row, the rows before it too.

    Args:
        faulty: `[T, B]` bool, True where an episode ended as faulty.
        episode_id: `[T, B]` int32.

    Returns:
        `[T, B]` bool.
    """

    def mark(
        later: tuple[jax.Array, jax.Array], row: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        faulty, episode_id = row
        faulty = faulty | (later[0] & (later[1] == episode_id))
        return (faulty, episode_id), faulty

    start = jnp.zeros_like(faulty[0]), episode_id[-1]
    return jax.lax.scan(mark, start, (faulty, episode_id), reverse=True)[1]


def describe(trajectory: Transition, row: int, lane: int) -> str:
    """Names what is not finite in a row, as far as it is recorded."""
    one = jax.tree.map(lambda x: x[row, lane], trajectory)
    names = [
        name
        for name, leaf in checked(one).items()
        if not np.isfinite(np.asarray(leaf)).all()
    ]
    return " and ".join(f"`{name}`" for name in names) or "a field not recorded"


def _is_checked(name: str) -> bool:
    field, _, rest = name.partition(".")
    return field != "extras" or rest.rpartition(".")[2] in _CHECKED_EXTRAS

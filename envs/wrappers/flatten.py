"""`flatten_obs`, `FlattenObs`: convert observations of any space to a float array."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout.envs.spaces import (
    MASK,
    Box,
    Dict,
    Discrete,
    MultiDiscrete,
    as_space,
    get_action_mask,
    is_mask,
    one_of,
)
from rollout.envs.types import AnySpace, ArrayTree
from rollout.envs.wrappers.observations import eval_reset
from rollout.envs.wrappers.wrapper import Agent, ObsWrapper


def flatten_obs(space: AnySpace, obs: ArrayTree) -> jax.Array:
    """Flattens each observation to a float32 vector, for networks of dense layers.

    The parts of a `Dict` or `Tuple` are flattened and concatenated in the order of
    `jax.tree.leaves`. A `Discrete` part and each entry of a `MultiDiscrete` part are
    one-hot encoded; bools and other numbers become floats. An entry `action_mask` of a
    `Dict` or NamedTuple is omitted; see `rollout.envs.spaces.get_action_mask`.

    Args:
        space: space of a single observation.
        obs: `[..., *shape]`, an observation or a batch of observations.

    Returns:
        `[..., n]` float32, the flat observations.

    Raises:
        ValueError: if a part of the space cannot be flattened, or if the parts of `obs`
            do not match the space.
    """
    spaces, leaves = as_space(space).leaves(), jax.tree.leaves_with_path(obs)
    if len(leaves) != len(spaces):
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
        raise ValueError(
            f"`obs` must have the {len(spaces)} parts of its space {space!r}, got "
            f"{', '.join(names)}."
        )
    pairs = zip(leaves, spaces, strict=True)
    flat = [_flat(part, x) for (path, x), part in pairs if not is_mask(path)]
    return jnp.concatenate(flat, axis=-1)


class FlattenObs(ObsWrapper):
    """Flattens every observation to a float32 vector with `flatten_obs`.

    If the observation has an entry `action_mask`, the mask is unchanged and the
    observation becomes `{"obs": array, "action_mask": mask}`.

    Attributes:
        env: the environment.

    Raises:
        ValueError: when `observation_space` is read, also while tracing, if the space
            has a part that `flatten_obs` does not support.
    """

    def space(self, agent: Agent) -> AnySpace:
        """Space of `obs`: a box, or a dict of a box and the mask."""
        # Masks are identified by their path, which a list of spaces does not contain.
        shapes = eval_reset(self.env, lambda state, obs: obs)
        paths = [path for path, _ in jax.tree.leaves_with_path(shapes)]
        pairs = list(zip(paths, agent.observation_space.leaves(), strict=True))
        bounds = [_bounds(part) for path, part in pairs if not is_mask(path)]
        lows, highs = zip(*bounds, strict=True)
        is_known = not any(isinstance(x, jax.Array) for x in (*lows, *highs))
        xp = np if is_known else jnp
        low = xp.concatenate(lows)
        box = Box(low, xp.concatenate(highs), low.shape)
        masks = [part for path, part in pairs if is_mask(path)]
        return Dict({"obs": box, MASK: masks[0]}) if masks else box

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Flattens the observation."""
        flat, mask = flatten_obs(agent.observation_space, obs), get_action_mask(obs)
        return (flat if mask is None else {"obs": flat, MASK: mask}), ()


def _sizes(space: AnySpace) -> np.ndarray | None:
    """Returns the size of each one-hot encoding; None if the space has no encoding."""
    space = one_of(space)
    if isinstance(space, Discrete):
        return np.array([space.n])
    return np.ravel(space.nvec) if isinstance(space, MultiDiscrete) else None


def _flat(space: AnySpace, x: jax.Array) -> jax.Array:
    if space.shape is None or space.bounds is None:
        raise ValueError(
            "`env.observation_space` must consist of Box, Discrete, MultiDiscrete and "
            f"MultiBinary to be flattened, got {space!r}."
        )
    x, sizes = jnp.asarray(x), _sizes(space)
    lead = x.shape[: x.ndim - len(space.shape)]
    if sizes is None:
        return x.reshape(*lead, -1).astype(jnp.float32)
    # Subtract the lowest value: the range of an entry need not begin at 0.
    low = jnp.broadcast_to(jnp.asarray(space.bounds[0], x.dtype), space.shape)
    index = (x - jnp.expand_dims(low, range(len(lead)))).reshape(*lead, -1, len(sizes))
    hot = [
        # A number out of range is encoded as zeros.
        jax.nn.one_hot(index[..., i], n, dtype=jnp.float32)
        for i, n in enumerate(sizes.tolist())
    ]
    return jnp.concatenate(hot, axis=-1).reshape(*lead, -1)


def _bounds(space: AnySpace) -> tuple[Any, Any]:
    """Returns the bounds of a flattened part, `[n]` each."""
    flat = jax.eval_shape(lambda: _flat(space, jnp.zeros(space.shape, space.dtype)))
    if _sizes(space) is not None:
        return np.zeros(flat.shape, np.float32), np.ones(flat.shape, np.float32)
    xp = jnp if any(isinstance(x, jax.Array) for x in space.bounds) else np
    low, high = (xp.broadcast_to(x, space.shape).reshape(-1) for x in space.bounds)
    return low.astype(np.float32), high.astype(np.float32)

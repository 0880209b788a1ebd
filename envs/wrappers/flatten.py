"""`FlattenObs`: observations of any space as one array, for dense layers."""

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rollout.envs.spaces import (
    Box,
    Composite,
    Dict,
    Discrete,
    MultiDiscrete,
    Repeated,
)
from rollout.envs.types import AnySpace, ArrayTree, EnvStep
from rollout.envs.wrappers.wrapper import Wrapper

_MASK = "action_mask"


class FlattenObs(Wrapper):
    """Shows every observation as one float32 array.

    The parts of a `Dict` or `Tuple` are flattened and put one after another, in the
    order of `jax.tree.leaves`. A `Discrete` part becomes one-hot, and so does each
    entry of a `MultiDiscrete`; flags and other numbers become floats. An entry
    `action_mask` of a `Dict` stays as it is: the observation is then `{"obs": array,
    "action_mask": mask}`.

    Attributes:
        env: the environment.

    Raises:
        ValueError: where its space is read, also while tracing, if the environment's
            has a part of another kind.
    """

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`: a box, or a dict of one and the mask."""
        mask, space = self._parts(super().observation_space)
        lows, highs = zip(*map(_bounds, space.leaves()), strict=True)
        known = not any(isinstance(x, jax.Array) for x in (*lows, *highs))
        xp = np if known else jnp
        low, high = xp.concatenate(lows), xp.concatenate(highs)
        box = Box(low, high, low.shape)
        return box if mask is None else Dict({"obs": box, _MASK: mask})

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`."""
        state, obs = self.env.reset(key)
        return state, self._see(obs)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step."""
        result = self.env.step(key, state, action)
        return result.replace(obs=self._see(result.obs))

    def _see(self, obs: Any) -> ArrayTree:
        mask, obs = self._parts(obs)
        _, space = self._parts(super().observation_space)
        pairs = zip(space.leaves(), jax.tree.leaves(obs), strict=True)
        flat = jnp.concatenate([_flat(part, x) for part, x in pairs])
        return flat if mask is None else {"obs": flat, _MASK: mask}

    def _parts(self, whole: Any) -> tuple[Any, Any]:
        """Takes the mask, if there is one, from an observation or its space."""
        parts = whole.spaces if isinstance(whole, Composite) else whole
        if not isinstance(parts, Mapping) or _MASK not in parts:
            return None, whole
        rest = {name: part for name, part in parts.items() if name != _MASK}
        return parts[_MASK], Dict(rest) if parts is not whole else rest


def _sizes(space: AnySpace) -> np.ndarray | None:
    """Returns the number of values of each entry that becomes one-hot, else None."""
    while isinstance(space, Repeated):
        space = space.space
    if isinstance(space, Discrete):
        return np.array([space.n])
    if isinstance(space, MultiDiscrete):
        return np.asarray(space.nvec).reshape(-1)
    return None


def _flat(space: AnySpace, x: jax.Array) -> jax.Array:
    sizes = _sizes(space)
    if sizes is None:
        return jnp.ravel(x).astype(jnp.float32)
    low = jnp.broadcast_to(jnp.asarray(space.bounds[0], x.dtype), x.shape)
    columns = (x - low).reshape(-1, len(sizes)).T
    hot = [jax.nn.one_hot(y, n) for y, n in zip(columns, sizes.tolist(), strict=True)]
    return jnp.ravel(jnp.concatenate(hot, axis=1)).astype(jnp.float32)


def _bounds(space: AnySpace) -> tuple[Any, Any]:
    """Returns the bounds of a part after it is flattened, `[n]` each."""
    if space.shape is None or space.bounds is None:
        raise ValueError(
            "`env.observation_space` must be made of Box, Discrete, MultiDiscrete and "
            f"MultiBinary for `FlattenObs`, got {space!r}."
        )
    sizes = _sizes(space)
    if sizes is not None:
        number = int(np.prod(space.shape, dtype=int)) // len(sizes) * int(sizes.sum())
        return np.zeros(number, np.float32), np.ones(number, np.float32)
    xp = jnp if isinstance(space.bounds[0], jax.Array) else np
    low, high = (xp.broadcast_to(x, space.shape).reshape(-1) for x in space.bounds)
    return low.astype(np.float32), high.astype(np.float32)

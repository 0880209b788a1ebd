"""`RescaleAction`, `ActionRepeat`: wrappers that change actions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from rollout import checks
from rollout.envs import prng, trees
from rollout.envs.spaces import Box, Space
from rollout.envs.types import AnySpace, ArrayTree, EnvStep
from rollout.envs.wrappers.wrapper import Wrapper, cast_step

_BOUNDS = ("clip", "tanh")


class RescaleAction(Wrapper):
    """Maps actions in [-1, 1], or over the reals, to the environment's bounds.

    The map from [-1, 1] to [low, high] is affine, and rounding never takes its result
    out of the bounds. It is applied inside `step`, so the recorded action is the one
    that the policy chose, not the one that the wrapped environment receives.

    Attributes:
        env: an environment whose action space is a bounded box of floats.
        bound: `"clip"`: the policy acts in [-1, 1], and values outside are clipped;
            `"tanh"`: it acts over the reals, squashed by tanh. Drawing from that action
            space (`rollout.random_policy`) covers the environment's box uniformly.

    Raises:
        ValueError: if `bound` is unknown, or if the action space is discrete, has no
            `low` and `high`, is not of floats, or has a bound that is not finite. The
            space is not checked if the parameters are unknown, for instance in `jit`.
    """

    bound: str = struct.field(pytree_node=False, default="clip")

    def _check(self) -> None:
        checks.choice("bound", self.bound, tuple(_BOUNDS))
        # Inside `jit` the bounds are tracers, whose values nobody can check.
        if not checks.is_known(self.env):
            return
        space = super().action_space
        is_fit = isinstance(space, Box) and jnp.issubdtype(space.dtype, jnp.floating)
        if not is_fit or not np.all(
            np.isfinite([np.max(np.abs(x)) for x in space.bounds])
        ):
            raise ValueError(
                "`env.action_space` must be a box of floats with finite bounds, got "
                f"{space}."
            )

    @property
    def action_space(self) -> AnySpace:
        """Space of the policy's `action`."""
        space = super().action_space
        if self.bound == "tanh":
            return TanhSpace(space.shape, space.dtype)
        return Box(-1.0, 1.0, space.shape, space.dtype)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step with the action mapped to the environment's bounds."""
        space = super().action_space
        low, high = (
            jnp.broadcast_to(jnp.asarray(bound, space.dtype), space.shape)
            for bound in space.bounds
        )
        squash = jnp.tanh if self.bound == "tanh" else lambda x: jnp.clip(x, -1.0, 1.0)
        weight = 0.5 * (squash(action) + 1.0)
        # Not `low + (high - low) * weight`: the difference may overflow.
        scaled = low * (1.0 - weight) + high * weight
        return self.env.step(key, state, jnp.clip(scaled, low, high))


class TanhSpace(Space, struct.PyTreeNode):
    """The reals, for actions that are squashed by tanh.

    Attributes:
        shape: shape of one element.
        dtype: floating dtype of an element.
    """

    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(pytree_node=False)

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Draws an element whose tanh is uniform in (-1, 1); it is always finite."""
        # `arctanh` of 1 is infinite: draws end one rounding before it.
        largest = 1.0 - float(jnp.finfo(self.dtype).epsneg)
        uniform = jax.random.uniform(key, self.shape, self.dtype, -1.0, 1.0)
        return jnp.arctanh(jnp.clip(uniform, -largest, largest))

    def contains(self, x: jax.Array) -> jax.Array:
        """Returns whether every entry is finite, `()` bool."""
        return jnp.all(jnp.isfinite(x))


class ActionRepeat(Wrapper):
    """Repeats each action for up to `num_repeats` steps of the environment.

    The reward is the sum, and an ending stops the repetition: state, observation,
    flags and info are those of the last step taken. Inner step i (from 0) draws from
    `fold_in(key, i)`.

    Attributes:
        env: the environment.
        num_repeats: steps of the environment per action, an int of at least 1.

    Raises:
        ValueError: if `num_repeats` is not an int of at least 1.
    """

    num_repeats: int = struct.field(pytree_node=False)

    def _check(self) -> None:
        checks.int_between("num_repeats", self.num_repeats)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes up to `num_repeats` steps with the same action."""

        def step_env(number: jax.Array, state: ArrayTree) -> EnvStep:
            return cast_step(self.env.step(prng.fold_in(key, number), state, action))

        def again(last: EnvStep, number: jax.Array) -> tuple[EnvStep, None]:
            new = step_env(number, last.state)
            # A step after an ending is computed and dropped: a scan has a fixed length.
            new = new.replace(reward=last.reward + new.reward)
            return trees.select(last.terminated | last.truncated, last, new), None

        # The first step is outside of the scan: the carry has the types of its result.
        first = step_env(jnp.int32(0), state)
        numbers = jnp.arange(1, self.num_repeats, dtype=jnp.int32)
        return lax.scan(again, first, numbers)[0]

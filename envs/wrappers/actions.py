"""Wrappers of actions and rewards, for example `RescaleAction` and `NoRepeat`."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from rollout.base import checks, prng, trees
from rollout.envs.multi_agent import MultiAgentStep
from rollout.envs.spaces import Box, Dict, Discrete, Repeated, Space
from rollout.envs.types import AnySpace, ArrayTree, EnvStep
from rollout.envs.wrappers.observations import first_element
from rollout.envs.wrappers.wrapper import AgentStep, ObsWrapper, Wrapper, cast_step

_BOUNDS = ("clip", "tanh")


class RescaleAction(Wrapper):
    """Maps actions in [-1, 1], or over the reals, to the environment's bounds.

    The map from [-1, 1] to [low, high] is affine, and rounding never moves the result
    out of the bounds. The wrapper maps actions inside `step`: trajectories contain the
    action of the policy, not the action that the wrapped environment receives.

    Attributes:
        env: an environment whose action space is a bounded box of floats.
        bound: `"clip"`: the policy acts in [-1, 1], and other values are clipped;
            `"tanh"`: the policy acts over the reals, and tanh squashes the actions.
            Samples from this action space (`rollout.random_policy`) cover the
            environment's box uniformly.

    Raises:
        ValueError: if `bound` is unknown; or if the action space is not a box of floats
            with finite bounds. The space is not checked if the parameters are unknown,
            for example inside `jit`.
    """

    bound: str = struct.field(pytree_node=False, default="clip")

    def _check(self) -> None:
        checks.check_choice("bound", self.bound, tuple(_BOUNDS))
        # The bounds are tracers without values inside `jit`.
        if not checks.is_concrete(self.env):
            return
        space = super().action_space
        is_float = isinstance(space, Box) and jnp.issubdtype(space.dtype, jnp.floating)
        if not is_float or not np.all(
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
        # Avoid `low + (high - low) * weight`: the difference may overflow.
        scaled = low * (1.0 - weight) + high * weight
        return self.env.step(key, state, jnp.clip(scaled, low, high))


class TanhSpace(Space, struct.PyTreeNode):
    """The real numbers, for actions that tanh squashes.

    Attributes:
        shape: shape of one element.
        dtype: floating dtype of an element.
    """

    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: jax.typing.DTypeLike = struct.field(pytree_node=False)

    def sample(self, key: chex.PRNGKey) -> jax.Array:
        """Samples a finite element whose tanh is uniformly distributed in (-1, 1)."""
        # Clip to the largest number below 1, since `arctanh` of 1 is infinite.
        largest = 1.0 - float(jnp.finfo(self.dtype).epsneg)
        uniform = jax.random.uniform(key, self.shape, self.dtype, -1.0, 1.0)
        return jnp.arctanh(jnp.clip(uniform, -largest, largest))

    def contains(self, x: jax.Array) -> jax.Array:
        """Returns whether every entry is finite, `()` bool."""
        return jnp.all(jnp.isfinite(x))


class ActionRepeat(Wrapper):
    """Repeats each action for up to `num_repeats` steps of the environment.

    The reward is the sum over the inner steps, and an ending stops the repetition.
    State, observation, flags and info come from the last inner step. Inner step i (from
    0) uses the key `fold_in(key, i)`.

    Attributes:
        env: the environment.
        num_repeats: number of environment steps per action, an int of at least 1.

    Raises:
        ValueError: if `num_repeats` is not an int of at least 1.
    """

    num_repeats: int = struct.field(pytree_node=False)

    def _check(self) -> None:
        checks.check_int("num_repeats", self.num_repeats)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes up to `num_repeats` steps with the same action."""

        def step_env(number: jax.Array, state: ArrayTree) -> EnvStep:
            return cast_step(self.env.step(prng.fold_in(key, number), state, action))

        def repeat(last: EnvStep, number: jax.Array) -> tuple[EnvStep, None]:
            new = step_env(number, last.state)
            # Discard steps after an ending: the scan has a fixed length.
            new = new.replace(reward=last.reward + new.reward)
            return trees.select(last.terminated | last.truncated, last, new), None

        # Take the first step outside the scan: the carry needs the types of a result.
        first = step_env(jnp.int32(0), state)
        numbers = jnp.arange(1, self.num_repeats, dtype=jnp.int32)
        return lax.scan(repeat, first, numbers)[0]


class TransformReward(Wrapper):
    """Replaces every reward with `fn(reward)`, separately for each agent.

    Attributes:
        env: the environment.
        fn: pure function that maps a reward, `()` float32, to a scalar, which is cast
            to float32.
    """

    fn: Callable[[jax.Array], jax.Array] = struct.field(pytree_node=False)

    for_agents = "all"

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> Any:
        """Takes one step."""
        result = self.env.step(key, state, action)
        # `fn` takes a single reward, so map it over the rewards of several agents.
        fn = jax.vmap(self.fn) if isinstance(result, MultiAgentStep) else self.fn
        reward = fn(jnp.asarray(result.reward, jnp.float32))
        return result.replace(reward=jnp.asarray(reward, jnp.float32))


class NoRepeat(ObsWrapper):
    """Masks out actions of previous steps, for example recommended items.

    If the observation is a dict with an entry `action_mask`, the entry must be `[n]`
    bool, as in `RecommendationEnv`. The wrapper then sets the mask of previous actions
    to False. Any other observation becomes `{"obs": obs, "action_mask": mask}`. If the
    first observation is a dict with an entry `item`, for example because of
    `random_first`, that item is also masked out.

    The environment still accepts masked actions. To obey the mask, use an `item_policy`
    or an `action_mask_fn`. An episode may continue after every action is masked out.

    Attributes:
        env: an environment with discrete actions.

    Raises:
        ValueError: if the action space is not discrete; while tracing, if an entry
            `action_mask` is not `[n]` bool.
    """

    def _check(self) -> None:
        if not isinstance(self.action_space, Discrete):
            raise ValueError(
                "`env` must have a discrete action space, got "
                f"{type(self.action_space).__name__}."
            )

    def space(self, agent: AgentStep) -> AnySpace:
        """Space of `obs`."""
        space: Any = agent.observation_space
        if isinstance(space, Dict) and "action_mask" in space.spaces:
            return space
        mask = Box(False, True, (agent.action_space.n,), jnp.dtype(bool))
        return Dict({"obs": space, "action_mask": mask})

    def show(self, agent: AgentStep, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Masks out the actions of previous steps."""
        start, num = agent.action_space.start, agent.action_space.n
        if memory is not None:
            # Store the mask without the environment's mask, which may change at every
            # step.
            mask = memory.at[agent.action - start].set(False)
        else:
            mask = jnp.ones(num, bool)
            # Mask out the item that precedes the first action, if there is an item.
            if isinstance(obs, dict) and "item" in obs:
                mask = mask & (jnp.arange(num) != obs["item"] - start)
        return _with_mask(obs, mask), mask


class History(ObsWrapper):
    """Adds the last actions and rewards of the episode to the observation.

    Use it for policies without memory. The observation becomes `{"obs": obs, "actions":
    actions, "rewards": rewards, "length": length}`, with the last `window` actions,
    `[window, ...]`, and their rewards, `[window]` float32, oldest first. The first
    `length`, `()` int32, entries are valid, and the remaining entries are zero.

    Attributes:
        env: the environment.
        window: number of actions in the observation, an int of at least 1.

    Raises:
        ValueError: if `window` is not an int of at least 1.
    """

    window: int = struct.field(pytree_node=False)

    def _check(self) -> None:
        checks.check_int("window", self.window)

    def space(self, agent: AgentStep) -> AnySpace:
        """Space of `obs`; rewards are unbounded."""
        return Dict(
            {
                "obs": agent.observation_space,
                "actions": Repeated(agent.action_space, self.window),
                "rewards": Box(-jnp.inf, jnp.inf, (self.window,)),
                "length": Discrete(self.window + 1),
            }
        )

    def show(self, agent: AgentStep, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Adds the last actions and rewards."""
        if memory is None:
            memory = {
                "actions": first_element(Repeated(agent.action_space, self.window)),
                "rewards": jnp.zeros(self.window, jnp.float32),
                "length": jnp.zeros((), jnp.int32),
            }
            return {"obs": obs, **memory}, memory
        length = memory["length"]
        # Valid rows come first. A full window shifts by one row: it drops the oldest.
        is_full, index = length == self.window, jnp.minimum(length, self.window - 1)

        def append(old: jax.Array, new: jax.Array) -> jax.Array:
            shifted = jnp.where(is_full, jnp.roll(old, -1, axis=0), old)
            return shifted.at[index].set(jnp.asarray(new, old.dtype))

        memory = {
            "actions": jax.tree.map(append, memory["actions"], agent.action),
            "rewards": append(memory["rewards"], agent.reward),
            "length": index + 1,
        }
        return {"obs": obs, **memory}, memory


def _with_mask(obs: ArrayTree, mask: jax.Array) -> dict[str, ArrayTree]:
    if not isinstance(obs, dict) or "action_mask" not in obs:
        return {"obs": obs, "action_mask": mask}
    types = [(jnp.shape(x), jnp.result_type(x)) for x in (obs["action_mask"], mask)]
    if types[0] != types[1]:
        raise ValueError(
            f"`action_mask` in the observation must be bool of shape {mask.shape}, one "
            f"for each action, got {checks.describe(obs['action_mask'])}. If it is not "
            "a mask of actions, rename it."
        )
    return {**obs, "action_mask": obs["action_mask"] & mask}

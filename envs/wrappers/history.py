"""`NoRepeat`, `History`: wrappers that store the actions of an episode."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs.spaces import Box, Dict, Discrete, Repeated
from rollout.envs.types import AnySpace, ArrayTree
from rollout.envs.wrappers.observations import first_of
from rollout.envs.wrappers.wrapper import Agent, ObsWrapper


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

    def space(self, agent: Agent) -> AnySpace:
        """Space of `obs`."""
        space: Any = agent.observation_space
        if isinstance(space, Dict) and "action_mask" in space.spaces:
            return space
        mask = Box(False, True, (agent.action_space.n,), jnp.dtype(bool))
        return Dict({"obs": space, "action_mask": mask})

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
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
        checks.int_between("window", self.window)

    def space(self, agent: Agent) -> AnySpace:
        """Space of `obs`; rewards are unbounded."""
        return Dict(
            {
                "obs": agent.observation_space,
                "actions": Repeated(agent.action_space, self.window),
                "rewards": Box(-jnp.inf, jnp.inf, (self.window,)),
                "length": Discrete(self.window + 1),
            }
        )

    def show(self, agent: Agent, obs: ArrayTree, memory: Any) -> tuple[Any, Any]:
        """Adds the last actions and rewards."""
        if memory is None:
            memory = {
                "actions": first_of(Repeated(agent.action_space, self.window)),
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

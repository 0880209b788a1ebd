"""`NoRepeat`, `History`: wrappers that remember the actions of an episode."""

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
    """Masks out actions already taken in the episode, such as items already shown.

    If the observation is a dict with an `action_mask`, that must be `[n]` bool, as with
    `RecommendationEnv`, and actions already taken become False in it. Any other
    observation becomes `{"obs": obs, "action_mask": mask}`. The environment takes
    masked actions too: an `item_policy` and an `action_mask_fn` obey the mask. An
    episode may go on after every action was taken. The `item` of a first observation
    that is a dict counts as taken, such as that of `random_first`.

    Attributes:
        env: an environment with discrete actions.

    Raises:
        ValueError: if the action space is not discrete; while tracing, if there is a
            `action_mask` that is not `[n]` bool.
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
        """Masks out the actions that were taken."""
        start, num = agent.action_space.start, agent.action_space.n
        if memory is not None:
            # Before the environment's own mask is applied, which may change from step
            # to step.
            mask = memory.at[agent.action - start].set(False)
        else:
            mask = jnp.ones(num, bool)
            # The item that a user sees before the first action, if there is one.
            if isinstance(obs, dict) and "item" in obs:
                mask = mask & (jnp.arange(num) != obs["item"] - start)
        return _with_mask(obs, mask), mask


class History(ObsWrapper):
    """Shows the last actions and rewards of the episode, in the order of time.

    The observation becomes `{"obs": obs, "actions": actions, "rewards": rewards,
    "length": length}`: the last `window` actions, `[window, ...]`, with their rewards,
    `[window]` float32; the first `length`, `()` int32, are valid and the others zero.
    It serves policies without memory.

    Attributes:
        env: the environment.
        window: number of actions to show, an int of at least 1.

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
        # Valid rows come first; a full window moves by one row, and drops the oldest.
        is_full, at = length == self.window, jnp.minimum(length, self.window - 1)

        def append(old: jax.Array, new: jax.Array) -> jax.Array:
            moved = jnp.where(is_full, jnp.roll(old, -1, axis=0), old)
            return moved.at[at].set(jnp.asarray(new, old.dtype))

        memory = {
            "actions": jax.tree.map(append, memory["actions"], agent.action),
            "rewards": append(memory["rewards"], agent.reward),
            "length": at + 1,
        }
        return {"obs": obs, **memory}, memory


def _with_mask(obs: ArrayTree, mask: jax.Array) -> dict[str, ArrayTree]:
    if not isinstance(obs, dict) or "action_mask" not in obs:
        return {"obs": obs, "action_mask": mask}
    kinds = [(jnp.shape(x), jnp.result_type(x)) for x in (obs["action_mask"], mask)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"`action_mask` in the observation must be bool of shape {mask.shape}, one "
            f"for each action, got {checks.describe(obs['action_mask'])}: rename it if "
            "it is no mask of actions."
        )
    return {**obs, "action_mask": obs["action_mask"] & mask}

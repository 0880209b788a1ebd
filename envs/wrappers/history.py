"""`NoRepeat`, `History`: wrappers that remember the actions of an episode."""

import chex
import jax
import jax.numpy as jnp
from flax import struct

from rollout import checks
from rollout.envs.spaces import Box, Dict, Discrete, Repeated
from rollout.envs.types import AnySpace, ArrayTree, EnvStep
from rollout.envs.wrappers.observations import first_of
from rollout.envs.wrappers.wrapper import Wrapper, WrapperState


class NoRepeat(Wrapper):
    """Masks out actions already taken in the episode, such as items already shown.

    If the observation is a dict with a `mask`, that must be `[n]` bool, as with
    `RecommendationEnv`, and actions already taken become False in it. Any other
    observation becomes `{"obs": obs, "mask": mask}`. The environment takes masked
    actions too: an `item_policy` and an `allowed_fn` obey the mask. An episode may go
    on after every action was taken.

    Attributes:
        env: an environment with discrete actions.
        initial: whether the first `item` of a dict observation counts as shown, for
            instance with `random_first`.

    Raises:
        ValueError: if the action space is not discrete; while tracing, if there is a
            `mask` that is not `[n]` bool.
    """

    initial: bool = struct.field(pytree_node=False, default=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.boolean("initial", self.initial)
        # A placeholder that jax builds pytrees with has no `step`.
        if hasattr(self.env, "step") and not isinstance(self.action_space, Discrete):
            raise ValueError(
                "`env` must have a discrete action space, got "
                f"{type(self.action_space).__name__}."
            )

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`."""
        space, num = super().observation_space, self.action_space.n
        if isinstance(space, Dict) and "mask" in space.spaces:
            return space
        mask = Box(False, True, (num,), jnp.dtype(bool))
        return Dict({"obs": space, "mask": mask})

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`."""
        state, obs = self.env.reset(key)
        mask = jnp.ones(self.action_space.n, bool)
        if self.initial and isinstance(obs, dict) and "item" in obs:
            item = obs["item"] - self.action_space.start
            mask = mask & (jnp.arange(mask.size) != item)
        return WrapperState(env_state=state, memory=mask), _with_mask(obs, mask)

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step."""
        result = self.env.step(key, state.env_state, action)
        index = action - self.action_space.start
        mask = state.memory.at[index].set(False)
        return result.replace(
            state=WrapperState(env_state=result.state, memory=mask),
            obs=_with_mask(result.obs, mask),
        )


class History(Wrapper):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.int_between("window", self.window)

    @property
    def observation_space(self) -> AnySpace:
        """Space of `obs`; rewards are unbounded."""
        return Dict(
            {
                "obs": super().observation_space,
                "actions": Repeated(self.action_space, self.window),
                "rewards": Box(-jnp.inf, jnp.inf, (self.window,)),
                "length": Discrete(self.window + 1),
            }
        )

    def reset(self, key: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        """Starts an episode: `(state, obs)`."""
        state, obs = self.env.reset(key)
        memory = {
            "actions": first_of(Repeated(self.action_space, self.window)),
            "rewards": jnp.zeros(self.window, jnp.float32),
            "length": jnp.zeros((), jnp.int32),
        }
        return WrapperState(env_state=state, memory=memory), {"obs": obs, **memory}

    def step(self, key: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        """Takes one step."""
        result = self.env.step(key, state.env_state, action)
        length = state.memory["length"]
        # Valid rows come first; a full window moves by one row, and drops the oldest.
        is_full, at = length == self.window, jnp.minimum(length, self.window - 1)

        def append(old: jax.Array, new: jax.Array) -> jax.Array:
            moved = jnp.where(is_full, jnp.roll(old, -1, axis=0), old)
            return moved.at[at].set(jnp.asarray(new, old.dtype))

        memory = {
            "actions": jax.tree.map(append, state.memory["actions"], action),
            "rewards": append(state.memory["rewards"], result.reward),
            "length": at + 1,
        }
        return result.replace(
            state=WrapperState(env_state=result.state, memory=memory),
            obs={"obs": result.obs, **memory},
        )


def _with_mask(obs: ArrayTree, mask: jax.Array) -> dict[str, ArrayTree]:
    if not isinstance(obs, dict) or "mask" not in obs:
        return {"obs": obs, "mask": mask}
    kinds = [(jnp.shape(x), jnp.result_type(x)) for x in (obs["mask"], mask)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"`mask` in the observation must be bool of shape {mask.shape}, one for "
            f"each action, got {checks.describe(obs['mask'])}: rename it if it is no "
            "mask of actions."
        )
    return {**obs, "mask": obs["mask"] & mask}

"""Validates the carry and the environments' outputs; hashes the root keys of a call."""

import jax
import jax.numpy as jnp

from rollout import checks
from rollout.envs.types import EnvStep, place
from rollout.kernel import episode_keys
from rollout.kernel.episode_keys import Roots
from rollout.types import Carry, Parts, check_carry


def roots_of(parts: Parts, carry: Carry) -> Roots:
    """Validates a carry, and hashes the root keys from which step keys derive."""
    check_fits(parts, carry)
    return place(parts.env, episode_keys.roots(carry.key, parts.env.num_envs))


def check_fits(parts: Parts, carry: Carry) -> None:
    """Checks that a carry matches the output of this collector's `init`."""
    check_carry(carry)
    # The type of an array inside `shard_map` names the axes over which it varies.
    avals = map(jax.typeof, jax.tree.leaves(carry))
    if varying := frozenset[str]().union(*(x.mat.varying for x in avals)):
        raise ValueError(
            "a collector inside `jax.shard_map` needs `check_vma=False`, got a carry "
            f"that varies over {', '.join(map(repr, sorted(varying)))}: the branches "
            "for different platforms vary over different axes, and fail the check."
        )
    template = jax.eval_shape(parts.init, carry.key)  # from the cache after an `init`
    for name, expected in vars(template).items():
        message = f"`carry.{name}` must match the output of this collector's `init`"
        checks.same(message, expected, vars(carry)[name])


def check_env_step(carry: Carry, result: EnvStep) -> EnvStep:
    """Checks that a step returns the structure, shapes and dtypes of a reset."""
    checks.kind("`env.step` must return a `rollout.envs.EnvStep`", result, EnvStep)
    dtypes = {"reward": jnp.float32, "terminated": jnp.bool_, "truncated": jnp.bool_}
    dtypes |= {} if result.raw_reward is None else {"raw_reward": jnp.float32}
    lanes = carry.episode.episode_id.shape
    for name, dtype in dtypes.items():
        message = f"`env.step` must return `{name}` as"
        checks.shaped(message, getattr(result, name), lanes, dtype)
    message = "`env.step` must return the state as `env.reset` does"
    checks.same(message, carry.env_state, result.state)
    message = "`env.step` must return `obs` as `env.reset` does"
    checks.same(message, carry.obs, result.obs)
    return result

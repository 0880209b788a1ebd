"""Checks the carry, and what steps make of it; hashes the root keys of a call."""

import jax
import jax.numpy as jnp

from rollout import checks
from rollout.envs.types import EnvStep, place
from rollout.kernel import episode_keys
from rollout.kernel.episode_keys import Roots
from rollout.types import Carry, Parts, check_carry


def roots_of(parts: Parts, carry: Carry) -> Roots:
    """Checks a carry, and hashes the keys from which those of all its steps derive."""
    check_fits(parts, carry)
    return place(parts.env, episode_keys.roots(carry.key, parts.env.num_envs))


def check_fits(parts: Parts, carry: Carry) -> None:
    """Checks that a carry is one such as `init` of this collector makes."""
    check_carry(carry)
    # Inside of `shard_map` the types of arrays say over which axes they vary.
    kinds = map(jax.typeof, jax.tree.leaves(carry))
    if varying := frozenset[str]().union(*(x.mat.varying for x in kinds)):
        raise ValueError(
            "a collector inside of `jax.shard_map` needs `check_vma=False`, got a "
            f"carry that varies over {', '.join(map(repr, sorted(varying)))} with the "
            "check on: its branches for platforms vary over different axes."
        )
    made = jax.eval_shape(parts.init, carry.key)  # from the cache after an `init`
    for name, expected in vars(made).items():
        what = f"`carry.{name}` must be as `init` of this collector makes it"
        checks.same(what, expected, vars(carry)[name])


def check_env_step(carry: Carry, result: EnvStep) -> EnvStep:
    """Checks that a step returns the leaves of the reset, each `[B]` or `[B, ...]`."""
    checks.kind("`env.step` must return a `rollout.envs.EnvStep`", result, EnvStep)
    kinds = {"reward": jnp.float32, "terminated": jnp.bool_, "truncated": jnp.bool_}
    kinds |= {} if result.raw_reward is None else {"raw_reward": jnp.float32}
    lanes = carry.episode.episode_id.shape
    for name, dtype in kinds.items():
        what = f"`env.step` must return `{name}` as"
        checks.shaped(what, getattr(result, name), lanes, dtype)
    what = "`env.step` must return the state as `env.reset` does"
    checks.same(what, carry.env_state, result.state)
    what = "`env.step` must return `obs` as `env.reset` does"
    checks.same(what, carry.obs, result.obs)
    return result

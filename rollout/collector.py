"""The collector: folds over time of the kernel's one step."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from envs.types import VectorEnv
from rollout import checks, kernel
from rollout.types import Carry, Policy, Transition

Acc = TypeVar("Acc")


@struct.dataclass(kw_only=True)
class Collector:
    """Collects experience: a policy in a vector of environments.

    A pytree whose leaves are the environment's parameters, so it may be an argument
    of your own jitted function or closed over. Every method is a pure function of its
    arguments. `init` and `collect_steps` are jitted and give the same bits inside your
    own `jit`; `step` and `fold_steps` are not, and run operation by operation a float
    may differ from theirs in the last place.

    Attributes:
        env: `B` environments side by side.
        policy: the policy that acts in them.
    """

    env: VectorEnv
    policy: Policy = struct.field(pytree_node=False)

    def init(self, key: chex.PRNGKey) -> Carry:
        """Starts the first episode of every lane. Jitted.

        Args:
            key: one typed key; it decides all that is random in the run, and its
                implementation decides the generator.

        Returns:
            The carry to hand to the other methods.

        Raises:
            ValueError: if `key` is not one typed key, or if the policy's initial state
                lacks the lane axis.
        """
        checks.typed_key(key)
        return _init(self, key)

    def step(self, carry: Carry, params: Any) -> tuple[Carry, Transition]:
        """Takes one step in every lane and resets those whose episode ended.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: whatever the policy takes as its parameters.

        Returns:
            The next carry, and the transition, `[B, ...]`.

        Raises:
            ValueError: while tracing, if the policy or the environment returns
                something of the wrong structure, shape or dtype.
        """
        return kernel.step(self.env, self.policy, carry, params)

    def collect_steps(
        self, carry: Carry, params: Any, num_steps: int
    ) -> tuple[Carry, Transition]:
        """Takes `num_steps` steps in every lane. Jitted.

        Inside your own `jit` it is inlined: a field of the trajectory that is not read
        costs no memory there.

        Args:
            carry: the carry of `init` or of an earlier call; it is not consumed.
            params: whatever the policy takes as its parameters.
            num_steps: T, steps per lane, at least 1. Static: one trace per value.

        Returns:
            The next carry, and the trajectory, `[T, B, ...]`. One call of T steps gives
            the bits of two calls of T/2.

        Raises:
            ValueError: if `num_steps` is not an int of at least 1, or as `step` does.
        """
        checks.count("num_steps", num_steps)
        return _collect_steps(self, carry, params, num_steps)

    def fold_steps(
        self,
        carry: Carry,
        params: Any,
        fn: Callable[[Acc, Transition], Acc],
        acc: Acc,
        *,
        num_steps: int,
    ) -> tuple[Carry, Acc]:
        """Takes `num_steps` steps and folds each transition into `acc`. Not jitted.

        Nothing is stacked, so memory does not grow with `num_steps`.

        Args:
            carry: the carry of `init` or of an earlier call.
            params: whatever the policy takes as its parameters.
            fn: `(acc, transition)` to the next `acc`, of unchanged structure, shapes
                and dtypes; the transition is `[B, ...]`.
            acc: what `fn` starts from, any pytree of arrays.
            num_steps: steps per lane, at least 1.

        Returns:
            The next carry, and `acc` after the last step.

        Raises:
            ValueError: if `num_steps` is not an int of at least 1, or as `step` does.
            TypeError: if `fn` changes the structure, a shape or a dtype of `acc`.
        """
        checks.count("num_steps", num_steps)

        def step(state: tuple[Carry, Acc], _: None) -> tuple[tuple[Carry, Acc], None]:
            carry, transition = self.step(state[0], params)
            return (carry, fn(state[1], transition)), None

        return lax.scan(step, (carry, acc), length=num_steps)[0]


# Jitted, since operation by operation a first call compiles some forty programs.
@jax.jit
def _init(collector: Collector, key: chex.PRNGKey) -> Carry:
    return kernel.init(collector.env, collector.policy, key)


@functools.partial(jax.jit, static_argnames="num_steps")
def _collect_steps(
    collector: Collector, carry: Carry, params: Any, num_steps: int
) -> tuple[Carry, Transition]:
    def step(carry: Carry, _: None) -> tuple[Carry, tuple[Transition, jax.Array]]:
        carry, transition = collector.step(carry, params)
        # XLA:CPU pays for every array that a step writes: both flags go into one, and
        # the mask, a constant since no lane is ever idle here, is not written at all.
        flags = transition.terminated + 2 * transition.truncated.astype(jnp.uint8)
        rest = transition.replace(terminated=(), truncated=(), mask=())
        return carry, (rest, flags)

    carry, (trajectory, flags) = lax.scan(step, carry, length=num_steps)
    return carry, trajectory.replace(
        terminated=(flags & 1) != 0,
        truncated=flags > 1,
        mask=jnp.ones(flags.shape, bool),
    )

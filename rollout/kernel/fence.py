"""Fences the environment step, so that XLA computes it once.

XLA fuses a step into each of its consumers (the next state, the reward, the flags, the
recorded fields) and computes it once per consumer: slower, and with roundings that
depend on the consumer. `lax.optimization_barrier` keeps it in one piece, but XLA:CPU
before jaxlib 0.11 drops barriers before it fuses. There a conditional does the same,
whose predicate is always true, which XLA cannot know (measured with jax 0.10.2:
CartPole 1.5x, Acrobot 1.1x, and equal bits for both ways of auto-reset).

On a TPU only the inputs pass a barrier. Its compiler estimates a step that is fused
with its consumers at 0.87x (Pendulum) to 0.99x (Acrobot) of the cycles. We expect a TPU
to round alike for all consumers, but have not run it on one.
"""

import functools
from collections.abc import Callable

import chex
import jax
from jax import lax

from envs import keys
from envs.types import ArrayTree, EnvStep

_Step = Callable[[chex.PRNGKey, ArrayTree, ArrayTree], EnvStep]


def step_once(
    step: _Step,
    step_keys: chex.PRNGKey,
    state: ArrayTree,
    action: ArrayTree,
    *,
    counter: jax.Array,
) -> EnvStep:
    """Computes `step(step_keys, state, action)`, fenced off from the code around it.

    `counter` is any `()` int32 whose value is unknown at compile time.
    """
    operands = (step_keys, state, action)

    # Words, not keys: under `vmap` a conditional selects between both results, which
    # jax's checker of key reuse counts as a use of a key.
    #
    # Jitted, so that both fences below trace it once; inlined, since XLA:CPU rounds
    # differently in a separate function.
    @functools.partial(jax.jit, inline=True)
    def take(words: ArrayTree) -> EnvStep:
        result = step(*keys.like(words, operands))
        return result.replace(state=keys.words(result.state))

    def between_barriers(words: ArrayTree) -> EnvStep:
        result = take((words[0], *lax.optimization_barrier(words[1:])))
        # Outside the barrier XLA removes an `info` that nobody reads.
        seen = result.replace(info=())
        barred = lax.platform_dependent(
            keys.words(seen), tpu=lambda words: words, default=lax.optimization_barrier
        )
        return keys.like(barred, seen).replace(info=result.info)

    def in_a_conditional(words: ArrayTree) -> EnvStep:
        shapes = jax.eval_shape(take, words).replace(state=())

        def never(words: ArrayTree) -> EnvStep:
            return keys.blank(shapes, step_keys).replace(state=words[1])

        return lax.cond((counter | 1) != 0, take, never, words)

    words = keys.words(operands)
    if jax.__version_info__ >= (0, 11):
        result = between_barriers(words)
    else:
        result = lax.platform_dependent(
            words, cpu=in_a_conditional, default=between_barriers
        )
    return result.replace(state=keys.like(result.state, state))

"""A fence around the environment step, so that XLA computes it once.

XLA fuses a step into each of its consumers (the next state, the reward, the flags,
what is recorded) and computes it once per consumer: slower, and with roundings that
depend on who reads the result. `lax.optimization_barrier` keeps it in one piece, but
XLA:CPU before jaxlib 0.11 drops barriers before it fuses. There a conditional does the
same, whose predicate is always true and not known to be so (measured with jax 0.10.2:
CartPole 1.5x, Acrobot 1.1x, and equal bits for both ways of auto-reset).
"""

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
    """Computes `step(step_keys, state, action)`, apart from what is around it.

    `counter` is any `()` int32 that is not known when compiling.
    """
    if jax.__version_info__ >= (0, 11) or jax.default_backend() != "cpu":
        result = step(step_keys, *keys.barrier((state, action)))
        # `info` is read rarely: outside the barrier it vanishes where it is not.
        return keys.barrier(result.replace(info=())).replace(info=result.info)
    operands = (step_keys, state, action)
    shapes = jax.eval_shape(step, *operands).replace(state=())

    # Words for the keys: under `vmap` a conditional is a selection between the results,
    # which jax's checker of key reuse takes for a use of a key.
    def taken(words: ArrayTree) -> EnvStep:
        result = step(*keys.like(words, operands))
        return result.replace(state=keys.words(result.state))

    def never(words: ArrayTree) -> EnvStep:
        return keys.blank(shapes, step_keys).replace(state=words[1])

    always = (counter | 1) != 0
    result = lax.cond(always, taken, never, keys.words(operands))
    return result.replace(state=keys.like(result.state, state))

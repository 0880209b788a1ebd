"""`choose`: takes an implementation with loops, or for a GPU an equal one without.

A loop whose end depends on data costs little on a CPU or a TPU if it runs few rounds.
A GPU waits in every round while the host reads the condition. There code without such
loops is faster, even if it computes more: a launch costs the same for small arrays as
for large ones.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from buffers.types import ArrayTree


def choose(
    loop_fn: Callable[..., ArrayTree],
    straight_fn: Callable[..., ArrayTree],
    *args: ArrayTree,
) -> ArrayTree:
    """Applies `straight_fn` to `args` on a GPU, and `loop_fn` everywhere else.

    Both must return the same bits. The platform is the one that the program is compiled
    for, which may differ from the default platform of the process.
    """
    return lax.platform_dependent(
        *args, cuda=straight_fn, rocm=straight_fn, default=loop_fn
    )


def once(
    flag: jax.Array,
    write_fn: Callable[..., ArrayTree],
    memory: ArrayTree,
    *args: ArrayTree,
) -> ArrayTree:
    """Applies `write_fn` to `memory` if `flag`, `()` bool, in place.

    It is a loop of zero or one round: a conditional would copy the memory.
    """

    def body(
        loop: tuple[jax.Array, ArrayTree],
    ) -> tuple[jax.Array, ArrayTree]:
        return jnp.zeros((), bool), write_fn(loop[1], *args)

    return lax.while_loop(lambda loop: loop[0], body, (flag, memory))[1]

"""Two programs with the same result, one of which is compiled: which, and why.

A loop whose end depends on data costs nothing on a CPU or a TPU where it has little to
do. On a GPU the host reads its condition before every round, and the device waits for
that. There a program without such loops is faster, even if it computes more: of small
arrays a launch costs the same as of large ones.
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
    for, which may differ from the default one of the process.
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

    A loop of zero or one round: a conditional would copy the memory.
    """

    def body(
        loop: tuple[jax.Array, ArrayTree],
    ) -> tuple[jax.Array, ArrayTree]:
        return jnp.zeros((), bool), write_fn(loop[1], *args)

    return lax.while_loop(lambda loop: loop[0], body, (flag, memory))[1]

"""Gradients of networks of flax, in less time than `jax.grad` takes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from rollout.platform import num_cores

# Of a part of a minibatch on a CPU: what a gradient keeps of them stays in a cache of
# one core, and is enough work to divide among several.
ROWS_OF_ONE_CORE, ROWS_OF_EACH_CORE = 256, 1024
fenced = jax.lax.optimization_barrier


def differentiate(cost, params, *inputs):
    """Is `jax.grad(cost, has_aux=True)(params, *inputs)`, but for the last place.

    On a CPU every `nn.Dense` of `cost` multiplies by `product`.
    """
    options = {"cpu": multiplied(cost), "default": jax.grad(cost, has_aux=True)}
    return jax.lax.platform_dependent(params, *inputs, **options)


def multiplied(cost):
    """Returns the gradient of a cost whose layers multiply by `product`."""

    def faster(*inputs):
        with nn.intercept_methods(multiply):
            return cost(*inputs)

    return jax.grad(faster, has_aux=True)


def gradient(cost, params, t, advantage):
    """Differentiates `cost(params, t, advantage)` of rows; returns also what to log.

    On a CPU it adds up those of parts, `cost(params, *part, (t, advantage))`: of 32,768
    rows that takes half the time. How large they are, and with it the last place,
    depends on the number of cores. On a GPU it reads what the cost has computed, from
    behind a barrier: without it XLA computes each `tanh` three times.
    """
    cores, on_cpu = num_cores(), multiplied(cost)
    most = ROWS_OF_ONE_CORE if cores == 1 else ROWS_OF_EACH_CORE * cores
    num_parts = max(1, advantage.size // most)
    while advantage.size % num_parts:
        num_parts -= 1

    @jax.custom_batching.sequential_vmap  # one seed after another
    def by_parts(params, *rows):
        def add(total, part):
            return jax.tree.map(jnp.add, total, on_cpu(params, *part, rows)), ()

        parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), rows)
        start = jax.tree.map(jnp.zeros_like, jax.eval_shape(on_cpu, params, *rows))
        return jax.lax.scan(add, start, parts)[0]

    save = jax.checkpoint_policies.everything_saveable
    on_gpu = jax.grad(jax.checkpoint(cost, policy=save), has_aux=True)
    options = {"cuda": on_gpu, "rocm": on_gpu, "default": jax.grad(cost, has_aux=True)}
    if num_parts == 1:
        return jax.lax.platform_dependent(params, t, advantage, cpu=on_cpu, **options)
    chosen = functools.partial(jax.lax.platform_dependent, cpu=by_parts, **options)
    chosen = jax.custom_jvp(chosen)
    # `sequential_vmap` has no derivative in reverse mode, such as meta-gradients take.
    again = functools.partial(differentiate, cost)
    chosen.defjvp(functools.partial(jax.jvp, again))
    return chosen(params, t, advantage)


def multiply(call, inputs, options, context):
    """Lets layers of `nn.Dense` multiply by `product`, where they say nothing else.

    Not if they see one row, as under a `jax.vmap` over rows: there every row would have
    a derivative of its own.
    """
    layer = context.module
    if type(layer) is not nn.Dense or layer.dot_general or layer.dot_general_cls:
        return call(*inputs, **options)
    (x,), variables = (*inputs, *options.values()), layer.variables
    if jnp.ndim(x) == 1:
        return call(x)
    return layer.clone(dot_general=product, parent=None).apply(variables, x)


def product(inputs, kernel, *_, **options):
    """Multiplies `[..., in]` by `[in, out]`, to be differentiated on a CPU.

    XLA's derivative by the kernel, a product of two tall matrices, takes up to 20 times
    as long if the left one is the wider. If that has a multiple of 64 columns, its rows
    compete for the same places of a cache, and one column more saves a fifth.
    """
    del options  # such as the precision, which a CPU has not
    return _product(inputs, kernel)


@jax.custom_vjp
def _product(inputs, kernel):
    return inputs @ kernel


def _forward(inputs, kernel):
    return inputs @ kernel, (inputs, kernel)


def _backward(kept, change):
    inputs, kernel = kept
    (by_inputs,) = jax.vjp(lambda x: x @ kernel, inputs)[1](change)
    # By jax's own rule, which knows how arrays are divided among devices.
    if is_narrowing := len(kernel) > kernel.shape[1]:
        kernel, change = widened(kernel.T, 0), widened(change, -1)
        pull = jax.vjp(lambda x: inputs @ x.T, kernel)[1]
    else:
        kernel, inputs = widened(kernel, 0), widened(inputs, -1)
        pull = jax.vjp(lambda x: inputs @ x, kernel)[1]
    by_kernel = fenced(pull(change)[0])[: min(kept[1].shape)]
    return by_inputs, by_kernel.T if is_narrowing else by_kernel


def widened(x, axis):
    """Adds one zero to an axis of a multiple of 64."""
    if x.shape[axis] % 64:
        return x
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, 1)
    return fenced(jnp.pad(x, pads))


_product.defvjp(_forward, _backward)

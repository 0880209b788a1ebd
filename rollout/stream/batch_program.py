"""Compiles the program of a stream once, and calls it for every batch."""

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rollout import checks, multihost
from rollout.collector import Collector
from rollout.envs import prng
from rollout.envs.types import ArrayTree, sharding_of
from rollout.host.host_collector import HostCollector
from rollout.stream.batch import BatchResult, make_batch
from rollout.stream.types import BatchSpec, Options, Placement
from rollout.types import Carry


class BatchProgram(NamedTuple):
    """The program of a batch, compiled ahead: jax's settings are per thread."""

    make_batch: Callable[..., BatchResult]
    blank: Callable[[], ArrayTree]  # makes memory where there is none to reuse
    kinds: list[Any]  # of the parameters, see `kinds_of`


def make(
    options: Options, collector: Collector, carry: Carry, params: Any
) -> BatchProgram:
    """Compiles the program of a stream over environments in JAX."""
    spec = jax.ShapeDtypeStruct((len(BatchSpec._fields),), jnp.int32)
    memory: ArrayTree = ()
    if options.recycle:
        make = functools.partial(make_batch, options)
        result = jax.eval_shape(make, collector, carry, params, spec, memory)
        memory = _placed(result.output, collector)
    is_jitted = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    if not is_jitted:  # for debugging, operation by operation
        return BatchProgram(
            make_batch=functools.partial(make_batch, options),
            blank=lambda: prng.blank(memory, carry.key),
            kinds=kinds_of(params),
        )
    program = jax.jit(make_batch, static_argnums=0, donate_argnums=5, keep_unused=True)
    shardings = jax.tree.map(lambda x: x.sharding, memory)
    blank = jax.jit(lambda: prng.blank(memory, carry.key), out_shardings=shardings)
    try:
        lowered = program.lower(options, collector, carry, params, spec, memory)
    except ValueError as error:
        checks.explain_devices(error, collector=collector, carry=carry, params=params)
        raise
    sharding = sharding_of(collector.env)
    if sharding is not None and sharding.mesh.is_multi_process:
        multihost.compare("stream", _facts(options, params, lowered.as_text()))
    return BatchProgram(
        make_batch=lowered.compile(),
        blank=blank.lower().compile(),
        kinds=kinds_of(params),
    )


def _facts(options: Options, params: Any, text: str) -> dict[str, object]:
    """Describes the stream for the comparison between processes."""
    return {
        "options": options._replace(
            postprocess=options.postprocess is not None,
            mask_fn=options.mask_fn is not None,
        ),
        "`params` of": [str(jax.typeof(x)) for x in jax.tree.leaves(params)],
        "a program of checksum": zlib.crc32(text.encode()),
    }


def _placed(memory: ArrayTree, collector: Collector) -> ArrayTree:
    """Adds the shardings to the shapes of a batch, if its lanes are sharded."""
    sharding, num_envs = sharding_of(collector.env), collector.env.num_envs
    if sharding is None:
        return memory
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        memory,
        sharding.shardings(memory, num_envs, lane_axis=1),
    )


def kinds_of(params: Any) -> list[Any]:
    """Lists the types and shardings of parameters, on which a program depends."""
    return [(jax.typeof(x), x.sharding) for x in jax.tree.leaves(params)]


def run(
    program: BatchProgram,
    options: Options,
    collector: Collector | HostCollector,
    carry: Carry,
    params: Any,
    spec: np.ndarray,
    memory: ArrayTree | None,
) -> BatchResult:
    """Makes a batch and waits for it; fields that Python reads are on the host."""
    # An interrupt or the user may have deleted the memory.
    if memory is None or any(x.is_deleted() for x in jax.tree.leaves(memory)):
        memory = program.blank()
    result = program.make_batch(collector, carry, params, spec, memory)
    result = jax.block_until_ready(result)
    for x in jax.tree.leaves(memory):
        if not x.is_deleted():  # a view prevented the donation, and stays valid
            x.delete()
    read = {name: getattr(result, name) for name in ("counted", "recent", "faults")}
    output = _place(result.output, options.placement)
    return result._replace(output=output, **jax.device_get(read))


def _place(tree: ArrayTree, placement: Placement) -> ArrayTree:
    """Moves a batch to its placement; anywhere but on the device it is a copy."""
    if isinstance(placement, jax.sharding.Sharding):
        # Copied, for the memory is soon written to again, and `device_put` may alias
        # it, even with `may_alias=False`: where it replicates, on the same device.
        copied = jax.tree.map(jnp.copy, tree)
        return jax.block_until_ready(jax.device_put(copied, placement))
    return jax.tree.map(_to_host, tree) if placement == "host" else tree


def _to_host(x: jax.Array) -> np.ndarray | jax.Array:
    # NumPy has no typed keys.
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.copy(x)
    return np.array(x)  # a copy: the next batch would overwrite a view

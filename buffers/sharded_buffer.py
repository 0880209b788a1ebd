"""`shard`: shards a replay buffer over devices; each draws from its own lanes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rollout import checks, platform
from rollout.buffers.batches import SampleOptions
from rollout.buffers.replay import ReplayBuffer, jit_method
from rollout.buffers.types import Batch, RingState, Sequences
from rollout.envs.types import ArrayTree


def shard(buffer: ReplayBuffer, mesh: Mesh, axis: str = "lanes") -> ReplayBuffer:
    """Shards the lanes of a replay buffer over the devices of a mesh axis.

        buffer = buffers.shard(buffers.ReplayBuffer(capacity, num_envs), mesh)

    The state is that of `buffer`, sharded over its lanes from `init` on, with the same
    bits after `add`. `add` and samples stay on their device, except for the sum of one
    number. Each device draws its share of a sample, `batch_size` divided by the number
    of devices, evenly from its own rows, and the batch is sharded the same way. Every
    stored row has the same chance if all devices hold the same number of rows. If not,
    for instance after masked-out rows, a weight is the number of rows on the device
    divided by the mean over devices: a weighted mean of losses is then that of an even
    draw.

    The methods other than `add`, `sample`, `sample_sequences` and `can_sample` return
    the same as on one device, but may gather the rows.

    Args:
        buffer: a `ReplayBuffer` with `next_obs="stored"`.
        mesh: the devices.
        axis: the axis of the mesh that the lanes are sharded over.

    Returns:
        A buffer with the methods of `ReplayBuffer`. A `batch_size` must be a multiple
        of the number of devices.

    Raises:
        ValueError: if the mesh lacks the axis, if `num_envs` is not a multiple of its
            size, or if the buffer is of another kind.
    """
    mesh = checks.lane_mesh(mesh, axis)
    next_obs = getattr(buffer, "next_obs", None)
    if type(buffer) is not ReplayBuffer or next_obs != "stored":
        raise ValueError(
            '`buffer` must be a `ReplayBuffer` with next_obs="stored", got '
            f"{type(buffer).__name__} with next_obs={next_obs!r}."
        )
    options = {x.name: getattr(buffer, x.name) for x in dataclasses.fields(buffer)}
    sharded = _Sharded(**options, mesh=mesh, axis=axis)
    sharded._share("num_envs", buffer.num_envs)
    return sharded


class _Sharded(ReplayBuffer):
    """A `ReplayBuffer` whose lanes are sharded over devices."""

    mesh: Mesh = struct.field(pytree_node=False, kw_only=True)
    axis: str = struct.field(pytree_node=False, kw_only=True)

    @property
    def _local(self) -> ReplayBuffer:
        """The buffer of one device."""
        num_envs = self._share("num_envs", self.num_envs)
        capacity = self.num_slots * num_envs
        return ReplayBuffer(capacity, num_envs, stack=self.stack)

    @property
    def _where(self) -> tuple[Any, Any, RingState]:
        """Sharded along the first axis, along the second, and a state."""
        first: Any = PartitionSpec(self.axis)
        second: Any = PartitionSpec(None, self.axis)
        return first, second, RingState(experience=second, head=first, size=first)

    def init(self, transition: ArrayTree, params: Any = None) -> RingState:
        state = jax.eval_shape(super().init, transition, params)
        where = jax.tree.map(lambda x: NamedSharding(self.mesh, x), self._where[2])
        return platform.blank_on(state, where)

    def _add(self, state: RingState, rows: ArrayTree, mask: jax.Array) -> RingState:
        _, second, ring = self._where
        return self._map(self._local._add, (ring, second, second), ring)(
            state, rows, mask
        )

    def can_sample(self, state: RingState, batch_size: int) -> jax.Array:
        return self._can_sample(state, self._share("batch_size", batch_size))

    @jit_method()
    def _can_sample(self, state: RingState, batch_size: Any) -> jax.Array:
        first, _, ring = self._where

        def can(state: RingState, share: Any) -> jax.Array:
            return self._local._can_sample(state, share)[None]

        where = ring, PartitionSpec()
        return jnp.all(self._map(can, where, first)(state, batch_size))

    def _draw_batch(
        self, state: RingState, key: chex.PRNGKey, options: SampleOptions
    ) -> Batch | Sequences:
        """Draws on every device, with its own key and from its own rows."""
        share = self._share("batch_size", options.batch_size)
        options = options.replace(batch_size=share)
        first, second, ring = self._where
        where = first
        if options.length is not None:
            where = Sequences(
                experience=second,
                mask=second,
                indices=first,
                weights=first,
            )

        def draw(
            state: RingState, key: chex.PRNGKey, options: SampleOptions
        ) -> Batch | Sequences:
            device = lax.axis_index(self.axis)
            key = jax.random.fold_in(key, device)
            batch = self._local._draw_batch(state, key, options)
            # Row numbers count the lanes of this device: convert them to all lanes.
            slot, lane = jnp.divmod(batch.indices, state.num_envs)
            lane = lane + device * state.num_envs
            # A row of a device that holds many rows is drawn too rarely: it weighs
            # more.
            held = jnp.sum(state.size).astype(jnp.float32)
            even = lax.pmean(held, self.axis)
            return batch.replace(
                indices=slot * self.num_envs + lane,
                weights=batch.weights * held / jnp.maximum(even, 1.0),
            )

        every = PartitionSpec()
        return self._map(draw, (ring, every, every), where)(state, key, options)

    def _map(
        self, fn: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # the loops that write in place start from constants
        )

    def _share(self, name: str, number: int) -> int:
        """Returns the part of one device."""
        num_devices = self.mesh.shape[self.axis]
        if checks.int_between(name, number) % num_devices:
            raise ValueError(
                f"`{name}` must be a multiple of the {num_devices} devices, got "
                f"{number}."
            )
        return number // num_devices

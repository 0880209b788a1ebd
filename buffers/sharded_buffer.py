"""`shard`: shards a replay buffer over devices; each device samples local lanes."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rollout.base import checks, platform
from rollout.buffers.replay import ReplayBuffer, jit_method
from rollout.buffers.types import Batch, RingState, Sequences
from rollout.envs.types import ArrayTree


def shard(buffer: ReplayBuffer, mesh: Mesh, axis: str | None = None) -> ReplayBuffer:
    """Shards the lanes of a replay buffer over the devices of a mesh axis.

        buffer = buffers.shard(buffers.ReplayBuffer(capacity, num_envs), mesh)

    `init` shards the state over the lanes, and `add` writes the same bits as `buffer`
    on one device. `add` needs no communication; sampling reduces a single number over
    the devices. Each device samples `batch_size / num_devices` rows uniformly from the
    lanes that it stores, and the batch is sharded in the same way.

    If all devices store the same number of rows, every stored row is equally likely.
    Otherwise, for example after masked-out rows, `weights` is the number of rows on the
    device divided by the mean over all devices. A loss averaged with these weights has
    the same expectation as under uniform sampling.

    `add`, `sample`, `sample_sequences` and `can_sample` never gather rows. All other
    methods return the same result as on one device, but may gather rows.

    Args:
        buffer: a `ReplayBuffer` with `next_obs="stored"`.
        mesh: mesh of devices.
        axis: name of the mesh axis over which the lanes are sharded. None for the only
            axis of the mesh, or for "lanes".

    Returns:
        A buffer with the methods of `ReplayBuffer`. `batch_size` must be a multiple of
        the number of devices.

    Raises:
        ValueError: if the mesh lacks the axis, if `num_envs` is not a multiple of the
            axis size, or if `buffer` is not a `ReplayBuffer` with `next_obs="stored"`.
    """
    mesh, axis = checks.check_mesh(mesh, axis)
    if type(buffer) is not ReplayBuffer or buffer.next_obs != "stored":
        raise ValueError(
            '`buffer` must be a `ReplayBuffer` with next_obs="stored", got '
            f"{checks.describe(buffer)}."
        )
    sharded = _Sharded(**vars(buffer), mesh=mesh, axis=axis)
    sharded._share("num_envs", buffer.num_envs)
    return sharded


class _Sharded(ReplayBuffer):
    """A `ReplayBuffer` whose lanes are sharded over devices."""

    mesh: Mesh = struct.field(pytree_node=False, kw_only=True)
    axis: str = struct.field(pytree_node=False, kw_only=True)

    @property
    def _local(self) -> ReplayBuffer:
        """Buffer of one device."""
        num_envs = self._share("num_envs", self.num_envs)
        capacity = self.num_slots * num_envs
        return ReplayBuffer(
            capacity,
            num_envs,
            n_step=self.n_step,
            gamma=self.gamma,
            stack=self.stack,
            relabel_fn=self.relabel_fn,
            relabel_horizon=self.relabel_horizon,
        )

    @property
    def _specs(self) -> tuple[Any, Any, RingState]:
        """Partition specs for sharded first axes, sharded second axes, and a state."""
        first: Any = PartitionSpec(self.axis)
        second: Any = PartitionSpec(None, self.axis)
        return first, second, RingState(experience=second, head=first, size=first)

    def init(self, transition: ArrayTree, params: Any = None) -> RingState:
        state = jax.eval_shape(super().init, transition, params)
        sharding = jax.tree.map(lambda x: NamedSharding(self.mesh, x), self._specs[2])
        return platform.blank_on(state, sharding)

    def _add(self, state: RingState, rows: ArrayTree, mask: jax.Array) -> RingState:
        _, second, ring = self._specs
        return self._map(self._local._add, (ring, second, second), ring)(
            state, rows, mask
        )

    def can_sample(self, state: RingState, batch_size: int) -> jax.Array:
        return self._can_sample(state, self._share("batch_size", batch_size))

    @jit_method()
    def _can_sample(self, state: RingState, batch_size: Any) -> jax.Array:
        first, _, ring = self._specs

        def can_sample(state: RingState, share: Any) -> jax.Array:
            return self._local._can_sample(state, share)[None]

        in_specs = ring, PartitionSpec()
        return jnp.all(self._map(can_sample, in_specs, first)(state, batch_size))

    @jit_method("batch_size", "length")
    def _sample(
        self,
        state: RingState,
        key: chex.PRNGKey,
        batch_size: int,
        beta: Any,
        length: int | None = None,
    ) -> Any:
        """Samples on every device from local rows, with one key per device."""
        share = self._share("batch_size", batch_size)
        first, second, ring = self._specs
        out_specs = first
        if length is not None:
            out_specs = Sequences(
                experience=second,
                mask=second,
                indices=first,
                weights=first,
            )

        def sample(
            buffer: ReplayBuffer, state: RingState, key: chex.PRNGKey
        ) -> Batch | Sequences:
            device = lax.axis_index(self.axis)
            key = jax.random.fold_in(key, device)
            batch = buffer._sample(state, key, share, beta, length)
            # Convert local row numbers to row numbers over all lanes.
            slot, lane = jnp.divmod(batch.indices, state.num_envs)
            lane = lane + device * state.num_envs
            # Rows of a device with many rows are sampled too rarely, so their weight is
            # above 1.
            num_rows = jnp.sum(state.size).astype(jnp.float32)
            mean_rows = lax.pmean(num_rows, self.axis)
            return batch.replace(
                indices=slot * self.num_envs + lane,
                weights=batch.weights * num_rows / jnp.maximum(mean_rows, 1.0),
            )

        in_specs = PartitionSpec(), ring, PartitionSpec()
        return self._map(sample, in_specs, out_specs)(self._local, state, key)

    def _map(
        self, fn: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # in-place write loops start from unvarying constants
        )

    def _share(self, name: str, number: int) -> int:
        """Returns `number` per device; raises if the devices do not divide it."""
        num_devices = self.mesh.shape[self.axis]
        number = checks.check_int(name, number)
        checks.check_multiple(name, number, num_devices, f"the {num_devices} devices")
        return number // num_devices

"""`shard`: shards a replay buffer over devices; each draws from its own lanes."""

from collections.abc import Callable
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rollout.buffers.gather import RelabelFn
from rollout.buffers.replay import ReplayBuffer
from rollout.buffers.types import ArrayTree, Batch, RingState, Sequences

Sample = TypeVar("Sample", Batch, Sequences)


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
    if not isinstance(mesh, Mesh):
        raise ValueError(
            "`mesh` must be a `jax.sharding.Mesh`, as `jax.make_mesh` makes it, got "
            f"{type(mesh).__name__}."
        )
    if axis not in mesh.shape:
        raise ValueError(
            f"`axis` must be one of the mesh, {', '.join(mesh.shape)}, got {axis!r}."
        )
    next_obs = getattr(buffer, "next_obs", None)
    if type(buffer) is not ReplayBuffer or next_obs != "stored":
        raise ValueError(
            '`buffer` must be a `ReplayBuffer` with next_obs="stored", got '
            f"{type(buffer).__name__} with next_obs={next_obs!r}."
        )
    _divide("num_envs", buffer.num_envs, mesh.shape[axis])
    # As in `rollout.shard`: other axis types would be part of the types of arrays.
    types = (AxisType.Auto,) * mesh.devices.ndim
    return _Sharded(
        capacity=buffer.capacity,
        num_envs=buffer.num_envs,
        mesh=Mesh(mesh.devices, mesh.axis_names, axis_types=types),
        axis=axis,
    )


class _Sharded(ReplayBuffer):
    """A `ReplayBuffer` whose lanes are sharded over devices."""

    mesh: Mesh = struct.field(pytree_node=False, kw_only=True)
    axis: str = struct.field(pytree_node=False, kw_only=True)

    @property
    def _num_devices(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def _local(self) -> ReplayBuffer:
        """The buffer of one device."""
        num_envs = self.num_envs // self._num_devices
        return ReplayBuffer(self.num_slots * num_envs, num_envs)

    @property
    def _first(self) -> Any:
        """Sharded along the first axis."""
        return PartitionSpec(self.axis)

    @property
    def _second(self) -> Any:
        """Sharded along the second axis, after that of time."""
        return PartitionSpec(None, self.axis)

    @property
    def _ring(self) -> RingState:
        return RingState(experience=self._second, head=self._first, size=self._first)

    def _init(self, transition: ArrayTree, params: Any) -> RingState:
        def make() -> RingState:
            return ReplayBuffer._init(self, transition, params)

        where = jax.tree.map(
            lambda x: NamedSharding(
                self.mesh, self._second if x.ndim > 1 else self._first
            ),
            jax.eval_shape(make),
        )
        return jax.jit(make, out_shardings=where)()

    def _add(self, state: RingState, rows: ArrayTree, mask: jax.Array) -> RingState:
        specs = self._ring, self._second, self._second
        return self._map(self._local._add, specs, self._ring)(state, rows, mask)

    def _can_sample(
        self, state: RingState, batch_size: int, stack: int | None
    ) -> jax.Array:
        share = self._share(batch_size)

        def can(state: RingState) -> jax.Array:
            return self._local._can_sample(state, share, stack)[None]

        return jnp.all(self._map(can, (self._ring,), self._first)(state))

    def _sample(
        self,
        state: RingState,
        key: chex.PRNGKey,
        gamma: Any,
        beta: None,
        *,
        batch_size: int,
        stack: int | None,
        n_step: int | None,
        relabel_fn: RelabelFn | None,
        horizon: int,
    ) -> Batch:
        def draw(key: chex.PRNGKey, state: RingState, gamma: Any) -> Batch:
            return self._local._sample(
                state,
                key,
                gamma,
                beta,
                batch_size=self._share(batch_size),
                stack=stack,
                n_step=n_step,
                relabel_fn=relabel_fn,
                horizon=horizon,
            )

        return self._draw_apart(draw, self._first, state, key, gamma)

    def _sample_sequences(
        self,
        state: RingState,
        key: chex.PRNGKey,
        beta: None,
        *,
        batch_size: int,
        length: int,
    ) -> Sequences:
        share = self._share(batch_size)

        def draw(key: chex.PRNGKey, state: RingState, gamma: None) -> Sequences:
            del gamma  # unused: only for transitions
            return self._local._sample_sequences(
                state, key, beta, batch_size=share, length=length
            )

        where = Sequences(
            experience=self._second,
            mask=self._second,
            policy_state=self._first,
            indices=self._first,
            weights=self._first,
        )
        return self._draw_apart(draw, where, state, key, None)

    def _draw_apart(
        self,
        draw: Callable[..., Sample],
        where: ArrayTree,
        state: RingState,
        key: chex.PRNGKey,
        gamma: Any,
    ) -> Sample:
        """Draws on every device, with its own key and from its own rows."""

        def local(state: RingState, key: chex.PRNGKey, gamma: Any) -> Sample:
            device = lax.axis_index(self.axis)
            batch = draw(jax.random.fold_in(key, device), state, gamma)
            # Row numbers count the lanes of this device: convert them to all lanes.
            slot, lane = jnp.divmod(batch.indices, state.num_envs)
            lane = lane + device * state.num_envs
            held = jnp.sum(state.size).astype(jnp.float32)
            even = lax.pmean(held, self.axis)
            return batch.replace(
                indices=slot * self.num_envs + lane,
                weights=batch.weights * held / jnp.maximum(even, 1.0),
            )

        every = PartitionSpec()
        specs = self._ring, every, every
        return self._map(local, specs, where)(state, key, gamma)

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

    def _share(self, batch_size: int) -> int:
        _divide("batch_size", batch_size, self._num_devices)
        return batch_size // self._num_devices


def _divide(name: str, number: int, num_devices: int) -> None:
    if number % num_devices:
        raise ValueError(
            f"`{name}` must be a multiple of the {num_devices} devices, got {number}."
        )

"""`shard`: one collector over many devices, with the same calls and the same bits.

The policy, the recording and the totals are computed for all lanes, `[B, ...]`, and XLA
partitions them: so a draw for all lanes is that of one device. The steps and resets of
the environments are local, and `jax.shard_map` maps them over the devices.
"""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rollout import checks, multihost
from rollout.collector import Collector
from rollout.envs import trees
from rollout.envs.types import ArrayTree, EnvStep, LaneIndex, Lanes, Shared, VectorEnv
from rollout.envs.vectorize import _VectorizedEnv
from rollout.envs.wrappers.wrapper import BaseWrapper
from rollout.kernel.step_once import step_once
from rollout.types import ActionT, ObsT, ParamsT


def shard(
    collector: Collector[ParamsT, ObsT, ActionT], mesh: Mesh, axis: str = "lanes"
) -> Collector[ParamsT, ObsT, ActionT]:
    """Shards the lanes of a collector over the devices of a mesh axis.

        mesh = jax.make_mesh((8,), ("lanes",))
        collector = rollout.shard(collector, mesh)

    Every method works as on one device, with the same random numbers for any number of
    devices. Carry and trajectories are sharded over their lanes, from `init` on, and
    statistics cover all lanes. In your own `jit` the parameters may be replicated over
    the same devices. An axis of the type Explicit is treated as Auto: your arrays in
    that `jit` must be on a mesh of Auto axes.

    The bits are those of one device, except where XLA rounds differently, in the last
    place: sums of floats over lanes, as in the statistics of `NormalizeObs`; anything
    where a device has a single lane; and in the rows of `collect_episodes` outputs of a
    network that are only recorded. Once states differ, choices and endings do too,
    after enough steps.

    Steps and streams wait for other devices only where they sum over all lanes: for
    the statistics of `NormalizeObs` and `NormalizeReward`, or in the `fn` of
    `fold_steps`. Whole episodes come from one queue, so there the devices exchange at
    every step how many lanes are done, and each has all results.

    With `jax.distributed` the mesh may span several processes. Each runs the same
    script, makes the same calls in the same order, and holds its own lanes. This call
    waits for all of them and checks that they have as many lanes, on the same devices,
    and the same environment parameters.

    The devices may be absent ones, from `rollout.inspection.devices`: such a collector
    is for `rollout.inspect_program`.

    Args:
        collector: policy and environments, made by `rollout.envs.vectorize` or
            `rollout.envs.vectorize_each`, with wrappers around them or not.
        mesh: the devices.
        axis: the axis of the mesh that the lanes are sharded over; they are replicated
            along the others.

    Returns:
        A collector of the same lanes.

    Raises:
        ValueError: if `collector` is no `Collector` or `mesh` no `Mesh`; if the mesh
            lacks the axis; if its size does not divide the number of lanes; if the
            environment is of another kind or sharded already; if another process has
            another collector or mesh; later, if a carry lies on other devices.
    """
    checks.collects_in_jax(collector)
    mesh = checks.lane_mesh(mesh, axis)
    if mesh.is_multi_process and not _is_absent(mesh):
        # Before the checks that may raise in one process alone.
        parts = trees.unwrap_keys((collector.env, collector.policy))
        leaves = jax.tree.leaves(parts)
        here = [x for x in leaves if not multihost.is_elsewhere(x)]
        # Bits and not values: NaN parameters are equal to themselves here.
        bits = b"".join(np.asarray(x).tobytes() for x in here)
        facts = {
            "jax": jax.__version__,
            "`num_envs`": collector.env.num_envs,
            "`mesh`": [axis, *mesh.shape.items(), *(x.id for x in mesh.devices.flat)],
            "parameters of checksum": zlib.crc32(bits),
        }
        multihost.compare("collector", facts)
    num_devices = mesh.shape[axis]
    what = f"the {num_devices} devices of the axis {axis!r}"
    checks.multiple("num_envs", collector.env.num_envs, num_devices, what)
    return collector.replace(env=_shard(collector.env, LaneSharding(mesh, axis)))


class LaneSharding(NamedTuple):
    """Sharding of the lanes over one axis of a mesh."""

    mesh: Mesh
    axis: str

    @property
    def num_devices(self) -> int:
        """Number of devices that the lanes are sharded over."""
        return self.mesh.shape[self.axis]

    def place(self, tree: ArrayTree, *, lane_axis: int = 0) -> ArrayTree:
        """Shards arrays over the devices; replicates scalars, and what is `Shared`."""
        shardings = self.shardings(tree, lane_axis=lane_axis)
        return lax.with_sharding_constraint(tree, shardings)

    def replicate(self, tree: ArrayTree) -> ArrayTree:
        """Replicates a tree on every device."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return lax.with_sharding_constraint(tree, everywhere)

    def shardings(self, tree: ArrayTree, *, lane_axis: int = 0) -> ArrayTree:
        """Returns the sharding that `place` applies to each array of a tree."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        over_lanes = PartitionSpec(*[None] * lane_axis, self.axis)

        def make(x: Any) -> ArrayTree:
            if isinstance(x, Shared):
                return jax.tree.map(lambda _: everywhere, x)
            return NamedSharding(self.mesh, over_lanes) if x.ndim else everywhere

        return jax.tree.map(make, tree, is_leaf=lambda x: isinstance(x, Shared))

    def map(self, fn: Callable[..., ArrayTree], whole: ArrayTree, *lanes: Any) -> Any:
        """Calls `fn(whole, *lanes)` on each device, with its own lanes.

        Scalars among the lanes are replicated, as all of `whole` is.
        """
        own, every = PartitionSpec(self.axis), PartitionSpec()
        of_lanes = jax.tree.map(lambda x: own if jnp.ndim(x) else every, lanes)
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=(every, *of_lanes),
            out_specs=own,
            check_vma=False,  # branches of `step_once` vary over different axes
        )(whole, *lanes)


class _ShardedEnv(BaseWrapper, VectorEnv, kw_only=True):
    """A `VectorEnv` in which each device steps its own lanes."""

    env: Any  # made by `rollout.envs.vectorize` or `rollout.envs.vectorize_each`
    sharding: LaneSharding = struct.field(pytree_node=False)

    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    def reset(self, keys: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        return self._map(lambda env, keys: env.reset(keys), keys)

    def step(self, keys: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        # `step_once` on each device, so that XLA compiles the step as on one device.
        def step(env: VectorEnv, *args: ArrayTree) -> EnvStep:
            leaves = jax.tree.leaves(trees.unwrap_keys(args[1:]))
            # `step_once` needs any number that XLA does not know.
            some = next(x for x in leaves if x.size)
            counter = some.ravel()[0].astype(jnp.int32)
            return step_once(env.step, *args, counter=counter)

        return self._map(step, keys, state, action)

    def reset_done(
        self, key_fn: Callable[[LaneIndex], chex.PRNGKey], done: jax.Array, lanes: Lanes
    ) -> Lanes:
        args = key_fn, done, lanes
        return self._map(lambda env, *args: env.reset_done(*args), *args)

    def _map(self, fn: Callable[..., ArrayTree], *args: ArrayTree) -> ArrayTree:
        """Calls `fn(local_env, *args)` on each device; scalars are replicated."""
        num_local = self.num_envs // self.sharding.num_devices

        def local(env: Any, *args: ArrayTree) -> ArrayTree:
            # Lanes keep their global numbers, from which their keys and ids derive.
            first_lane = lax.axis_index(self.sharding.axis) * num_local
            return fn(trees.barrier(env.local(num_local, first_lane)), *args)

        if not self.env.each:
            return self.sharding.map(local, self.env, *args)
        # Each environment has its own parameters, which are sharded like its state.
        return self.sharding.map(lambda _, *args: local(*args), (), self.env, *args)


def _shard(env: Any, sharding: LaneSharding) -> VectorEnv:
    if isinstance(env, _VectorizedEnv):
        if not _is_absent(sharding.mesh):
            # Python numbers would be sent to every device with each call.
            spec = PartitionSpec(sharding.axis) if env.each else PartitionSpec()
            env = _device_put(env, NamedSharding(sharding.mesh, spec))
        return _ShardedEnv(env=env, sharding=sharding)
    if env.sharding is None and hasattr(env, "env"):  # a wrapper
        return env.replace(env=_shard(env.env, sharding))
    raise ValueError(
        "`collector.env` must be made by `rollout.envs.vectorize` or "
        "`rollout.envs.vectorize_each`, and not be sharded already, got "
        f"{type(env).__name__}."
    )


def _is_absent(mesh: Mesh) -> bool:
    """Returns whether the mesh has devices of `rollout.inspection.devices`."""
    return mesh.devices.flat[0].client.runtime_type == "compile_only_runtime"


def _device_put(tree: ArrayTree, where: NamedSharding) -> ArrayTree:
    """Puts numbers and arrays on a mesh, with the types that `jit` gives them.

    Over several processes `device_put` compares a Python float with the float32 that it
    becomes, and so raises for most of them; it also raises for NaN and typed keys.
    """
    if not where.mesh.is_multi_process:
        return jax.device_put(tree, where)
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, jax.jit(list, out_shardings=where)(leaves))

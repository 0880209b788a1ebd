"""`shard`: shards the lanes of a collector over devices.

The policy, the recording and the statistics are computed for all lanes, `[B, ...]`, and
XLA partitions them, so that all samples are the same as on one device. The steps and
resets of the environments are local: `jax.shard_map` maps them over the devices.
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

from rollout.base import checks, programs, trees
from rollout.collector import Collector
from rollout.envs.types import (
    ArrayTree,
    EnvStep,
    LaneIndex,
    Lanes,
    Shared,
    VectorEnv,
    wrapped_env,
)
from rollout.envs.vectorize import VectorizedEnv
from rollout.envs.wrappers.wrapper import BaseWrapper
from rollout.kernel.isolation import step_once
from rollout.types import ActionT, ObsT, ParamsT


def shard(
    collector: Collector[ParamsT, ObsT, ActionT], mesh: Mesh, axis: str | None = None
) -> Collector[ParamsT, ObsT, ActionT]:
    """Shards the lanes of a collector over the devices of a mesh axis.

        mesh = jax.make_mesh((8,), ("lanes",))
        collector = rollout.shard(collector, mesh)

    Every method works as on one device, with the same random numbers for any number of
    devices. Carry and trajectories are sharded over lanes, starting with `init`, and
    statistics cover all lanes. In an outer `jit` the parameters may be replicated over
    the same devices. An axis of type Explicit is treated as Auto: all arrays in this
    `jit` must be on a mesh of Auto axes.

    Results are bitwise equal to results on one device, unless XLA rounds differently.
    This happens for sums of floats over lanes, for example in the statistics of
    `NormalizeObs`; if a device has a single lane; and for network outputs that
    `collect_episodes` only records. If states differ, actions and the ends of episodes
    also differ after enough steps.

    Steps and streams synchronize devices only to sum over all lanes: for the statistics
    of `NormalizeObs` and `NormalizeReward`, or in the `fn` of `fold_steps`. Whole
    episodes come from one queue: at every step the devices exchange the number of
    finished lanes, and each device has all results.

    The mesh may span several processes of `jax.distributed`. Each process runs the same
    script, makes the same calls in the same order, and holds the lanes of its devices.
    This call waits for all processes and checks that they have the same number of
    lanes, the same devices and the same environment parameters.

    The mesh may contain absent devices from `rollout.inspection.devices`, to pass the
    collector to `rollout.inspect_program`.

    Args:
        collector: policy and environments, made by `rollout.envs.vectorize` or
            `rollout.envs.vectorize_each`, with or without wrappers.
        mesh: the devices.
        axis: axis of the mesh over which the lanes are sharded; lanes are replicated
            along all other axes. None for the only axis of the mesh, or for "lanes".

    Returns:
        A collector with the same lanes.

    Raises:
        ValueError: if `collector` is not a `Collector` or `mesh` is not a `Mesh`; if
            the mesh lacks the axis; if the size of the axis does not divide the number
            of lanes; if the environment has another type or is already sharded; if
            processes have different collectors or meshes; later, if a carry is on other
            devices.
    """
    checks.check_jax_collector(collector)
    mesh, axis = checks.check_mesh(mesh, axis)
    if mesh.is_multi_process and not _is_absent(mesh):
        # Compare first: the checks below may raise in only one of the processes.
        parts = trees.unwrap_keys((collector.env, collector.policy))
        leaves = jax.tree.leaves(parts)
        local_leaves = [x for x in leaves if not programs.is_elsewhere(x)]
        # Compare bits, not values: NaN parameters are then equal to themselves.
        bits = b"".join(np.asarray(x).tobytes() for x in local_leaves)
        facts = {
            "jax": jax.__version__,
            "`num_envs`": collector.env.num_envs,
            "`mesh`": [axis, *mesh.shape.items(), *(x.id for x in mesh.devices.flat)],
            "parameters of checksum": zlib.crc32(bits),
        }
        programs.compare_processes("collector", facts)
    num_devices = mesh.shape[axis]
    devices = f"the {num_devices} devices of the axis {axis!r}"
    checks.check_multiple("num_envs", collector.env.num_envs, num_devices, devices)
    return collector.replace(env=_shard(collector.env, LaneSharding(mesh, axis)))


class LaneSharding(NamedTuple):
    """Sharding of the lanes over one axis of a mesh."""

    mesh: Mesh
    axis: str

    @property
    def num_devices(self) -> int:
        """Number of devices over which the lanes are sharded."""
        return self.mesh.shape[self.axis]

    def place(self, tree: ArrayTree, *, lane_axis: int = 0) -> ArrayTree:
        """Shards arrays over the devices; replicates scalars and `Shared` trees."""
        shardings = self.shardings(tree, lane_axis=lane_axis)
        return lax.with_sharding_constraint(tree, shardings)

    def replicate(self, tree: ArrayTree) -> ArrayTree:
        """Replicates a tree on every device."""
        replicated = NamedSharding(self.mesh, PartitionSpec())
        return lax.with_sharding_constraint(tree, replicated)

    def shardings(self, tree: ArrayTree, *, lane_axis: int = 0) -> ArrayTree:
        """Returns the sharding that `place` applies to each array of a tree."""
        replicated = NamedSharding(self.mesh, PartitionSpec())
        over_lanes = PartitionSpec(*[None] * lane_axis, self.axis)

        def make(x: Any) -> ArrayTree:
            if isinstance(x, Shared):
                return jax.tree.map(lambda _: replicated, x)
            return NamedSharding(self.mesh, over_lanes) if x.ndim else replicated

        return jax.tree.map(make, tree, is_leaf=lambda x: isinstance(x, Shared))

    def map(self, fn: Callable[..., ArrayTree], shared: ArrayTree, *lanes: Any) -> Any:
        """Calls `fn(shared, *lanes)` on each device, with the lanes of the device.

        `shared` and the scalars in `lanes` are replicated.
        """
        over_lanes, replicated = PartitionSpec(self.axis), PartitionSpec()
        specs = jax.tree.map(lambda x: over_lanes if jnp.ndim(x) else replicated, lanes)
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=(replicated, *specs),
            out_specs=over_lanes,
            check_vma=False,  # branches of `step_once` vary over different axes
        )(shared, *lanes)


class _ShardedEnv(BaseWrapper, VectorEnv, kw_only=True):
    """A `VectorEnv` in which each device steps a share of the lanes."""

    env: Any  # made by `rollout.envs.vectorize` or `rollout.envs.vectorize_each`
    sharding: LaneSharding = struct.field(pytree_node=False)

    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    def reset(self, keys: chex.PRNGKey) -> tuple[ArrayTree, ArrayTree]:
        return self._map(lambda env, keys: env.reset(keys), keys)

    def step(self, keys: chex.PRNGKey, state: ArrayTree, action: ArrayTree) -> EnvStep:
        # Call `step_once` per device, so that XLA compiles the step as on one device.
        def step(env: VectorEnv, *args: ArrayTree) -> EnvStep:
            leaves = jax.tree.leaves(trees.unwrap_keys(args[1:]))
            # `step_once` needs a number that is unknown at compile time.
            leaf = next(x for x in leaves if x.size)
            counter = leaf.ravel()[0].astype(jnp.int32)
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
            # Keys and ids derive from global lane numbers.
            first_lane = lax.axis_index(self.sharding.axis) * num_local
            return fn(trees.barrier(env.local(num_local, first_lane)), *args)

        if not self.env.each:
            return self.sharding.map(local, self.env, *args)
        # Environments with different parameters: shard the parameters like the state.
        return self.sharding.map(lambda _, *args: local(*args), (), self.env, *args)


def _shard(env: Any, sharding: LaneSharding) -> VectorEnv:
    if isinstance(env, VectorizedEnv):
        if not _is_absent(sharding.mesh):
            # Put numbers on the devices once: otherwise each call would transfer them.
            spec = PartitionSpec(sharding.axis) if env.each else PartitionSpec()
            env = _device_put(env, NamedSharding(sharding.mesh, spec))
        return _ShardedEnv(env=env, sharding=sharding)
    if env.sharding is None and wrapped_env(env) is not None:
        return env.replace(env=_shard(env.env, sharding))
    raise ValueError(
        "`collector.env` must be made by `rollout.envs.vectorize` or "
        "`rollout.envs.vectorize_each`, and not be sharded already, got "
        f"{type(env).__name__}."
    )


def _is_absent(mesh: Mesh) -> bool:
    """Returns whether the mesh has devices of `rollout.inspection.devices`."""
    return mesh.devices.flat[0].client.runtime_type == "compile_only_runtime"


def _device_put(tree: ArrayTree, sharding: NamedSharding) -> ArrayTree:
    """Puts numbers and arrays on a mesh, with the types that `jit` assigns.

    Across processes, `device_put` compares a Python float with its float32 value, which
    raises for most floats. It also raises for NaN and typed keys.
    """
    if not sharding.mesh.is_multi_process:
        if not all(map(checks.is_concrete, jax.tree.leaves(tree))):
            return jax.device_put(tree, sharding)
        # Now, also while a caller is traced: a collector may outlive the trace.
        with jax.ensure_compile_time_eval():
            return jax.device_put(tree, sharding)
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, jax.jit(list, out_shardings=sharding)(leaves))

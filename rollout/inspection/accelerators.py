"""`devices`: accelerators to compile for, present or absent, and data about each."""

import contextlib
import functools
import importlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from rollout import checks

_GPU_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# Let the compilers load without a device: no check of the CUDA libraries, no query of a
# metadata server, no lock on unused chips.
_ABSENT_GPU = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_ABSENT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

Device = Any  # `jax.Device`, which type checkers do not accept as a type


class Gpu(NamedTuple):
    """Data about a GPU that XLA compiles for."""

    description: str
    compute_capability: tuple[int, int]
    memory: int  # bytes
    memory_bandwidth: int  # bytes per second
    l2_cache: int  # bytes
    num_cores: int  # streaming multiprocessors
    fpus_per_core: int
    clock_ghz: float
    shared_memory_per_core: int  # bytes
    shared_memory_per_block: int  # bytes, opt-in
    has_cost_model: bool  # whether XLA can estimate the time of a kernel
    platform: str = "cuda"


class Tpu(NamedTuple):
    """Data about a TPU that libtpu compiles for."""

    description: str
    name: str  # as libtpu spells it
    memory: int  # bytes
    slices: Mapping[int, str]  # number of chips: their layout
    has_cost_model: bool = False
    platform: str = "tpu"


# The numbers of the GPUs are those of XLA's own `target_config/specs`.
ACCELERATORS: dict[str, Gpu | Tpu] = {
    "h100": Gpu(
        description="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        memory=84_942_979_072,
        memory_bandwidth=3_352_320_000_000,
        l2_cache=52_428_800,
        num_cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        shared_memory_per_core=233_472,
        shared_memory_per_block=232_448,
        has_cost_model=True,
    ),
    "a100": Gpu(
        description="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        memory=85_100_068_864,
        memory_bandwidth=2_039_040_000_000,
        l2_cache=41_943_040,
        num_cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        shared_memory_per_core=167_936,
        shared_memory_per_block=166_912,
        has_cost_model=False,
    ),
    "tpu-v5e": Tpu(
        description="TPU v5 lite",
        name="v5e",
        memory=16 * 2**30,
        slices={4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"},
    ),
}
_ALIASES = {"v5e": "tpu-v5e"}
NAMES = (*ACCELERATORS, *_ALIASES)


def find(accelerator: str) -> tuple[str, Gpu | Tpu]:
    """Returns the canonical name and the data of an accelerator.

    Raises:
        ValueError: if there is none of this name.
    """
    name = _ALIASES.get(accelerator, accelerator)
    if name not in ACCELERATORS:
        known = ", ".join(NAMES)
        raise ValueError(f"`accelerator` must be one of {known}, got {accelerator!r}.")
    return name, ACCELERATORS[name]


def devices(accelerator: str, num_devices: int = 1) -> list[Device]:
    """Makes devices to compile programs for; no program can run on them.

    Build a `jax.sharding.Mesh` of them, and use its shardings in the arguments of
    `rollout.inspect`. The machine needs no such device, only the compiler: the extra
    `accelerators`.

    Args:
        accelerator: "h100", "a100" or "tpu-v5e" (also "v5e").
        num_devices: number of devices, at least 1.

    Returns:
        The devices; the same objects for the same arguments.

    Raises:
        ValueError: if there is no accelerator of this name, or if it cannot have that
            many devices.
        ImportError: if its compiler is not installed, or in another version than jax.
    """
    name, found = find(accelerator)
    num_devices = checks.int_between("num_devices", num_devices)
    if isinstance(found, Tpu):
        _find_slice(found, num_devices)  # raises if there is none
        _require_tpu_compiler()
    else:
        _require_gpu_compiler()
    return list(_devices(name, num_devices))


@functools.cache
def _devices(name: str, num_devices: int) -> tuple[Device, ...]:
    accelerator = ACCELERATORS[name]
    if isinstance(accelerator, Tpu):
        return _tpu_devices(accelerator, num_devices)
    topology = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=_target_config(accelerator),
        topology=f"1x1x{num_devices}",
    )
    with environment(_ABSENT_GPU):
        try:
            found = topology()
        except NotImplementedError:
            # jax has already started, without the plugin, since there is no driver.
            _initialize_plugin()
            found = topology()
    return tuple(found.devices)


def _tpu_devices(accelerator: Tpu, num_devices: int) -> tuple[Device, ...]:
    topology = f"{accelerator.name}:{_find_slice(accelerator, num_devices)}"
    with environment(_ABSENT_TPU):
        found = topologies.get_topology_desc(topology, platform="tpu")
    return tuple(found.devices[:num_devices])


def _find_slice(accelerator: Tpu, num_devices: int) -> str:
    """Returns the topology of the smallest slice with that many devices."""
    sizes = [size for size in accelerator.slices if size >= num_devices]
    if not sizes:
        most = max(accelerator.slices)
        raise ValueError(f"`num_devices` must be at most {most}, got {num_devices}.")
    return accelerator.slices[min(sizes)]


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets those environment variables that are not set, for the time of a block."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _initialize_plugin() -> None:
    for plugin in _GPU_PLUGINS:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(plugin).initialize()
            return


def _require_gpu_compiler() -> None:
    """Raises if the GPU plugin is missing, or of another version than jax."""
    jax_version = jax.__version__
    line = (
        f'pip install "jax-cuda12-plugin=={jax_version}" '
        f'"jax-cuda12-pjrt=={jax_version}"'
    )
    for name in ("jax-cuda12-plugin", "jax-cuda13-plugin"):
        version = _version(name)
        if version == jax_version:
            return
        if version is not None:
            raise ImportError(
                f"{name} {version} does not match jax {jax_version}: {line}."
            )
    raise ImportError(f"The compiler of this accelerator is not installed: {line}.")


def _require_tpu_compiler() -> None:
    """Raises if there is no libtpu; its version need not be that of jax."""
    if not _version("libtpu"):
        line = f'pip install "jax[tpu]=={jax.__version__}"'
        raise ImportError(f"The compiler of this accelerator is not installed: {line}.")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _target_config(gpu: Gpu) -> str:
    """Writes XLA's `GpuTargetConfigProto` for a GPU, as text."""
    major, minor = gpu.compute_capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {gpu.num_cores}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.memory_bandwidth}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.description}"
"""

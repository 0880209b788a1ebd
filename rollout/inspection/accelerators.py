"""`devices`: makes devices of an accelerator, present or absent, to compile for.

`accelerators.toml` describes every accelerator.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from rollout import checks

# These variables let the compilers load without a device: they disable the check of the
# CUDA libraries, the query of a metadata server, and the lock on unused chips.
_ABSENT_GPU = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_ABSENT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

ACCELERATORS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text()
)
_ALIASES = {"v5e": "tpu-v5e"}
NAMES = (*ACCELERATORS, *_ALIASES)

Device = Any  # `jax.Device`, which type checkers do not accept as a type


def find(accelerator: str) -> tuple[str, dict[str, Any]]:
    """Returns the canonical name and the description of an accelerator.

    Raises:
        ValueError: if there is no accelerator of this name.
    """
    name = _ALIASES.get(accelerator, accelerator)
    if name not in ACCELERATORS:
        names = ", ".join(NAMES)
        raise ValueError(f"`accelerator` must be one of {names}, got {accelerator!r}.")
    return name, ACCELERATORS[name]


def devices(accelerator: str, num_devices: int = 1) -> list[Device]:
    """Makes devices to compile programs for. Programs cannot run on these devices.

    Build a `jax.sharding.Mesh` of the devices, and use its shardings in the arguments
    of `rollout.inspect_program`. The machine needs only the compiler, from the extra
    `accelerators`, and no such device.

    Args:
        accelerator: "h100", "a100" or "tpu-v5e" (also "v5e").
        num_devices: number of devices, at least 1.

    Returns:
        The devices; the same objects for the same arguments.

    Raises:
        ValueError: if there is no accelerator of this name, or if `num_devices` is too
            large for it.
        ImportError: if the compiler is not installed, or does not match jax's version.
    """
    name, description = find(accelerator)
    num_devices = checks.int_between("num_devices", num_devices)
    make_fn = _tpus if description["platform"] == "tpu" else _gpus
    return list(make_fn(name, num_devices))


@functools.cache
def _gpus(name: str, num_devices: int) -> tuple[Device, ...]:
    plugin = _require_compiler("jax-cuda12-plugin", "jax-cuda13-plugin")
    make_topology = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=ACCELERATORS[name]["target_config"],
        topology=f"1x1x{num_devices}",
    )
    with environment(_ABSENT_GPU):
        try:
            topology = make_topology()
        except NotImplementedError:
            # Without a driver, jax starts without the plugin: load the plugin now.
            version = plugin.removeprefix("jax-").removesuffix("-plugin")
            importlib.import_module(f"jax_plugins.xla_{version}").initialize()
            topology = make_topology()
    return tuple(topology.devices)


@functools.cache
def _tpus(name: str, num_devices: int) -> tuple[Device, ...]:
    data = ACCELERATORS[name]
    # TPUs come in slices: take the smallest slice with enough devices.
    slices = {math.prod(map(int, x.split("x"))): x for x in data["layouts"]}
    sizes = [size for size in slices if size >= num_devices]
    if not sizes:
        limit = max(slices)
        raise ValueError(f"`num_devices` must be at most {limit}, got {num_devices}.")
    _require_compiler("libtpu")
    layout = f"{data['generation']}:{slices[min(sizes)]}"
    with environment(_ABSENT_TPU):
        topology = topologies.get_topology_desc(layout, platform="tpu")
    return tuple(topology.devices[:num_devices])


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets unset environment variables for the duration of a block."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _require_compiler(*packages: str) -> str:
    """Returns the name of the installed compiler package, and checks its version.

    Raises:
        ImportError: if no package is installed, or if the version does not match jax.
            The message has the command that installs the package.
    """
    version = jax.__version__
    hint = f'pip install "jax-cuda12-plugin=={version}" "jax-cuda12-pjrt=={version}"'
    if packages == ("libtpu",):
        hint = f'pip install "jax[tpu]=={version}"'
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.version(name)
            if name != "libtpu" and installed != version:  # libtpu has other versions
                raise ImportError(
                    f"{name} {installed} does not match jax {version}: {hint}."
                )
            return name
    raise ImportError(f"The compiler of this accelerator is not installed: {hint}.")

"""`devices`: accelerators to compile for, present or absent.

`accelerators.toml` describes each.
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

# Let the compilers load without a device: no check of the CUDA libraries, no query of a
# metadata server, no lock on unused chips.
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
    `rollout.inspect_program`. The machine needs no such device, only the compiler: the
    extra `accelerators`.

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
    make = _tpus if found["platform"] == "tpu" else _gpus
    return list(make(name, num_devices))


@functools.cache
def _gpus(name: str, num_devices: int) -> tuple[Device, ...]:
    plugin = _require_compiler("jax-cuda12-plugin", "jax-cuda13-plugin")
    make = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=ACCELERATORS[name]["target_config"],
        topology=f"1x1x{num_devices}",
    )
    with environment(_ABSENT_GPU):
        try:
            found = make()
        except NotImplementedError:
            # jax has already started, without the plugin, since there is no driver.
            version = plugin.removeprefix("jax-").removesuffix("-plugin")
            importlib.import_module(f"jax_plugins.xla_{version}").initialize()
            found = make()
    return tuple(found.devices)


@functools.cache
def _tpus(name: str, num_devices: int) -> tuple[Device, ...]:
    data = ACCELERATORS[name]
    # TPUs come in slices only: the smallest one with enough devices is taken.
    slices = {math.prod(map(int, x.split("x"))): x for x in data["layouts"]}
    sizes = [size for size in slices if size >= num_devices]
    if not sizes:
        most = max(slices)
        raise ValueError(f"`num_devices` must be at most {most}, got {num_devices}.")
    _require_compiler("libtpu")
    topology = f"{data['generation']}:{slices[min(sizes)]}"
    with environment(_ABSENT_TPU):
        found = topologies.get_topology_desc(topology, platform="tpu")
    return tuple(found.devices[:num_devices])


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


def _require_compiler(*packages: str) -> str:
    """Returns the one of these packages that is installed, in a version for jax.

    Raises:
        ImportError: if none is, with the command that installs it.
    """
    version = jax.__version__
    line = f'pip install "jax-cuda12-plugin=={version}" "jax-cuda12-pjrt=={version}"'
    if packages == ("libtpu",):
        line = f'pip install "jax[tpu]=={version}"'
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name)
            if name != "libtpu" and found != version:  # libtpu counts on its own
                raise ImportError(
                    f"{name} {found} does not match jax {version}: {line}."
                )
            return name
    raise ImportError(f"The compiler of this accelerator is not installed: {line}.")

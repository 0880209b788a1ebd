"""`inspect_program`: compiles a program for an accelerator, without the device."""

import contextlib
import functools
import importlib
import importlib.metadata
import math
import os
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from rollout.base import checks
from rollout.base.jaxprs import inner_programs
from rollout.collector import Collector
from rollout.envs.types import ArrayTree
from rollout.host.host_collector import HostCollector
from rollout.inspection import hlo
from rollout.inspection.hlo import Frame
from rollout.inspection.report import Memory, Report, find_loop

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
    Path(__file__).with_name("accelerators.toml").read_text()
)
_ALIASES = {"v5e": "tpu-v5e"}
NAMES = (*ACCELERATORS, *_ALIASES)

Device = Any  # `jax.Device`, which type checkers do not accept as a type
_NUM_STEPS = 128
_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print")
# XLA's dumps of a GPU's program. The first exists if a pass changed the sequence.
_SEQUENCES = ("thunk_sequence_after_thunk_passes", "thunk_sequence")
_METADATA = ("thunk_metadata",)


def find_accelerator(accelerator: str) -> tuple[str, dict[str, Any]]:
    """Returns the canonical name and the description of an accelerator.

    Raises:
        ValueError: if there is no accelerator of this name.
    """
    checks.check_choice("accelerator", accelerator, NAMES)
    name = _ALIASES.get(accelerator, accelerator)
    return name, ACCELERATORS[name]


def devices(accelerator: str, num_devices: int = 1) -> list[Device]:
    """Makes absent devices as compilation targets. Programs cannot run on them.

    Build a `jax.sharding.Mesh` of the devices, and use its shardings in the arguments
    of `rollout.inspect_program`. The machine needs only the compiler, from the extra
    `accelerators`.

    Args:
        accelerator: "h100", "a100" or "tpu-v5e" (also "v5e").
        num_devices: number of devices, at least 1.

    Returns:
        The devices; the same objects for the same arguments.

    Raises:
        ValueError: if there is no accelerator of this name, or if `num_devices` is too
            large.
        ImportError: if the compiler is not installed, or does not match jax's version.
    """
    name, description = find_accelerator(accelerator)
    num_devices = checks.check_int("num_devices", num_devices)
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
    with environment_variables(_ABSENT_GPU):
        try:
            topology = make_topology()
        except NotImplementedError:
            # Without a driver, JAX starts without the plugin: load the plugin now.
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
    with environment_variables(_ABSENT_TPU):
        topology = topologies.get_topology_desc(layout, platform="tpu")
    return tuple(topology.devices[:num_devices])


@contextlib.contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets unset environment variables for the duration of a block."""
    new_names = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in new_names})
    try:
        yield
    finally:
        for name in new_names:
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


def inspect_program(
    program: Any,
    *args: ArrayTree,
    accelerator: str,
    num_steps: int | None = None,
    num_devices: int | None = None,
) -> Report:
    """Compiles a program for an accelerator and reports its launches and waits.

    The program does not run. The machine needs only the accelerator's compiler, from
    the extra `accelerators`, and not the accelerator.

        print(rollout.inspect_program(collector, params, key, accelerator="h100"))
        print(rollout.inspect_program(train_step, carry, params, accelerator="tpu-v5e"))

    Args:
        program: a `Collector`, whose `collect_steps` is inspected, or any function that
            `jax.jit` takes, jitted or not.
        *args: for a collector, the parameters of its policy, and a key, whose
            implementation determines the random number generator; for a function, its
            arguments. Only shapes and dtypes of arrays matter, so you can pass
            `jax.ShapeDtypeStruct`s, with or without a sharding over
            `rollout.inspection.devices`. Static arguments are passed unchanged.
        accelerator: "h100", "a100" or "tpu-v5e" (also "v5e").
        num_steps: T, steps of every lane; 128 if None. Only for a collector.
        num_devices: number of devices on which the program runs. None takes the devices
            of the arguments' shardings, or one device. Arguments without a sharding are
            replicated.

    Returns:
        The launches, costs and memory, and the waits for the host with the lines that
        cause them.

    Raises:
        ValueError: if there is no such accelerator, if an option does not fit the
            program, or if a program for a GPU calls back into Python, which JAX cannot
            compile for an absent GPU.
        ImportError: if the accelerator's compiler is not installed; the message has the
            command that installs it.
        jax.errors.JaxRuntimeError: if XLA cannot compile the program, for example
            because it needs more memory than a TPU has.
    """
    name, data = find_accelerator(accelerator)
    fn, args, num_steps = _program(program, args, num_steps)
    targets = _argument_devices(args)
    if num_devices is not None or not targets:
        targets = devices(name, num_devices or 1)
    elif targets[0].platform != ("gpu" if data["platform"] == "cuda" else "tpu"):
        raise ValueError(
            "`accelerator` must match the devices of the arguments' shardings, "
            f"{targets[0].device_kind}, got {accelerator!r}."
        )
    is_gpu = data["platform"] == "cuda"
    lowered = _lower(fn, args, targets, allow_callbacks=not is_gpu)
    compiled, root, seconds = _compile(lowered, data["compiler_options"], is_gpu)
    loop = find_loop(root, num_steps)
    # An unrolled loop takes several steps per round; the rest runs outside of it.
    steps_per_round = None if num_steps is None else num_steps // (loop.trips or 1)
    work, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
    return Report(
        accelerator=name,
        description=targets[0].device_kind,
        num_devices=len(targets),
        jax_version=jax.__version__,
        compile_seconds=seconds,
        memory=Memory(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            capacity=data["memory"],
        ),
        flops=work.get("flops"),
        bytes_moved=work.get("bytes accessed"),
        program=root,
        loop=loop,
        steps_per_round=steps_per_round,
    )


def _program(
    program: Any, args: tuple[ArrayTree, ...], num_steps: int | None
) -> tuple[Any, tuple[Any, ...], int | None]:
    """Returns the function to compile, its arguments, and the steps of a collector."""
    if not isinstance(program, Collector):
        if isinstance(program, HostCollector):
            checks.check_jax_collector(program)
        if num_steps is not None:
            raise ValueError(
                f"`num_steps` must be None for a function, got {num_steps!r}. Set the "
                "number of steps in the function."
            )
        return program, args, None
    params, key = args
    num_steps = checks.check_int(
        "num_steps", _NUM_STEPS if num_steps is None else num_steps
    )
    carry = jax.eval_shape(Collector.init, program, key)
    sharding = program.env.sharding
    if sharding is not None:
        carry = jax.tree.map(_shape, carry, sharding.shardings(carry))
    args = program, carry, params, num_steps
    return Collector.collect_steps, args, num_steps


def _argument_devices(args: Any) -> list[Device]:
    """Returns the absent devices of the arguments' shardings, in order."""
    shardings = filter(None, map(_absent_sharding, jax.tree.leaves(args)))
    sharding: Any = next(shardings, None)
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        return list(mesh.devices.flat)
    return [] if sharding is None else list(sharding.device_set)


def _absent_sharding(leaf: Any) -> Sharding | None:
    """Returns the sharding of a `ShapeDtypeStruct`; None for arrays on real devices."""
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def _lower(fn: Any, args: Any, devices: list[Device], *, allow_callbacks: bool) -> Any:
    """Lowers a function with abstract arguments."""
    # Replicate explicitly: otherwise JAX would compile for this process's devices.
    mesh = Mesh(np.asarray(devices), ("devices",))
    replicated = NamedSharding(mesh, PartitionSpec())

    def to_shape(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return leaf  # Python numbers, and static arguments
        return _shape(leaf, _absent_sharding(leaf) or replicated)

    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    traced = jitted.trace(*jax.tree.map(to_shape, args))
    callbacks = {} if allow_callbacks else dict.fromkeys(_callbacks(traced.jaxpr))
    if callbacks:
        raise ValueError(
            "`program` must not call back into Python on a GPU, got calls at "
            f"{', '.join(callbacks)}. A GPU waits for the host at every call, and jax "
            "cannot compile it for an absent GPU. Remove them, or inspect for a TPU."
        )
    return traced.lower()


def _compile(
    lowered: Any, compiler_options: Mapping[str, Any], is_gpu: bool
) -> tuple[Any, hlo.Block, float]:
    """Compiles a lowered program; returns it, its computations and the seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rollout_inspect_") as folder:
        options = {"xla_dump_to": folder, **compiler_options}
        with _without_cache():
            compiled = lowered.compile(compiler_options=options)
        seconds = time.perf_counter() - start
        if not is_gpu:
            return compiled, hlo.read_tpu(compiled.as_text()), seconds
        dumps = (_read_dump(folder, names) for names in (_SEQUENCES, _METADATA))
        return compiled, hlo.read_gpu(compiled.as_text(), *dumps), seconds


def _shape(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(x, "weak_type", False)
    dtype = jnp.result_type(x) if isinstance(x, np.ndarray) else x.dtype
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding, weak_type=weak)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Disables writes to the persistent cache: JAX could not read the program."""
    # With an infinite minimum compile time, JAX writes no entry.
    name = "jax_persistent_cache_min_compile_time_secs"
    previous = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        with warnings.catch_warnings():
            # The cache may have an entry from another machine.
            message = "Error reading persistent compilation cache entry"
            warnings.filterwarnings("ignore", message)
            yield
    finally:
        jax.config.update(name, previous)


def _read_dump(folder: str, names: tuple[str, ...]) -> str:
    """Reads XLA's dump of the program: the first of these dumps that exists."""
    for name in names:
        # XLA also compiles smaller modules; the program is the largest module.
        if paths := list(Path(folder).glob(f"*.{name}.txt")):
            return max(paths, key=lambda path: path.stat().st_size).read_text()
    raise RuntimeError(f"XLA of jax {jax.__version__} has written no {names[-1]}.")


def _callbacks(jaxpr: Any) -> Iterator[str]:
    """Yields the callbacks into Python, each with its source line."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in _CALLBACKS:
            traceback = equation.source_info.traceback
            frames = [] if traceback is None else traceback.frames
            lines = [Frame(x.file_name, x.line_num) for x in frames]
            source = hlo.find_source(lines)
            location = f"{source.file}:{source.line}" if source else "an unknown line"
            yield f"{location} ({equation.primitive.name})"
        for inner in inner_programs(equation):
            yield from _callbacks(inner)

"""`inspect_program`: compiles for an accelerator, which may be absent, and reports."""

import contextlib
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from rollout import checks
from rollout.collector import Collector
from rollout.envs.cost_estimate import inner_programs
from rollout.envs.types import ArrayTree
from rollout.inspection import accelerators, blocks
from rollout.inspection.hlo import Frame
from rollout.inspection.report import Memory, Report, find_loop

_NUM_STEPS = 128
_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print")
# XLA's dumps of a GPU's program. The first exists if a pass changed the sequence.
_SEQUENCES = ("thunk_sequence_after_thunk_passes", "thunk_sequence")
_METADATA = ("thunk_metadata",)


def inspect_program(
    program: Any,
    *args: ArrayTree,
    accelerator: str,
    num_steps: int | None = None,
    num_devices: int | None = None,
) -> Report:
    """Compiles a program for an accelerator and reports its launches and waits.

    The program does not run. The machine needs only the accelerator's compiler, from
    the extra `accelerators`, and no accelerator.

        print(rollout.inspect_program(collector, params, key, accelerator="h100"))
        print(rollout.inspect_program(train_step, carry, params, accelerator="tpu-v5e"))

    Args:
        program: a `Collector`, whose `collect_steps` is inspected, or any function that
            `jax.jit` takes, jitted or not.
        *args: for a collector, the parameters of its policy, and a key, whose
            implementation decides the generator; for a function, its arguments. Only
            shapes and dtypes of arrays matter, so you can pass `jax.ShapeDtypeStruct`s,
            with or without a sharding over `rollout.inspection.devices`. Static
            arguments are passed on unchanged.
        accelerator: "h100", "a100" or "tpu-v5e" (also "v5e").
        num_steps: T, steps of every lane; 128 if None. Only for a collector.
        num_devices: number of devices that the program runs on. None takes the devices
            of the arguments' shardings, or one device. Arguments without a sharding are
            replicated.

    Returns:
        The launches, costs and memory, and the waits for the host with the lines that
        cause them.

    Raises:
        ValueError: if there is no such accelerator, if an option does not fit the
            program, or if a program for a GPU calls back into Python, which jax cannot
            compile for an absent GPU.
        ImportError: if the accelerator's compiler is not installed; the message has the
            command that installs it.
        jax.errors.JaxRuntimeError: if XLA cannot compile the program, for example
            because it needs more memory than a TPU has.
    """
    name, data = accelerators.find(accelerator)
    fn, args, num_steps = _program(program, args, num_steps)
    devices = _argument_devices(args)
    if num_devices is not None or not devices:
        devices = accelerators.devices(name, num_devices or 1)
    elif devices[0].platform != ("gpu" if data["platform"] == "cuda" else "tpu"):
        raise ValueError(
            "`accelerator` must match the devices of the arguments' shardings, "
            f"{devices[0].device_kind}, got {accelerator!r}."
        )
    is_gpu = data["platform"] == "cuda"
    lowered = _lower(fn, args, devices, allow_callbacks=not is_gpu)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rollout_inspect_") as folder:
        options = {"xla_dump_to": folder, **data["compiler_options"]}
        with _without_cache():
            compiled: Any = lowered.compile(compiler_options=options)
        seconds = time.perf_counter() - start
        if is_gpu:
            dumps = (_read_dump(folder, names) for names in (_SEQUENCES, _METADATA))
            root = blocks.read_gpu(compiled.as_text(), *dumps)
        else:
            root = blocks.read_tpu(compiled.as_text())
    loop = find_loop(root, num_steps)
    # An unrolled loop takes several steps per round; the rest runs outside of it.
    steps_per_round = None if num_steps is None else num_steps // (loop.trips or 1)
    work, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
    return Report(
        accelerator=name,
        description=devices[0].device_kind,
        num_devices=len(devices),
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
        if hasattr(program, "collect_steps"):
            checks.collects_in_jax(program)
        checks.function("program", program)
        if num_steps is not None:
            raise ValueError(
                f"`num_steps` must be None for a function, got {num_steps!r}. Set the "
                "number of steps in the function."
            )
        return program, args, None
    params, key = args
    num_steps = checks.int_between(
        "num_steps", _NUM_STEPS if num_steps is None else num_steps
    )
    carry = jax.eval_shape(Collector.init, program, key)
    sharding = program.env.sharding
    if sharding is not None:
        carry = jax.tree.map(_shape, carry, sharding.shardings(carry))
    args = program, carry, params, num_steps
    return Collector.collect_steps, args, num_steps


def _argument_devices(args: Any) -> list[accelerators.Device]:
    """Returns the absent devices of the arguments' shardings, in order."""
    shardings = filter(None, map(_absent_sharding, jax.tree.leaves(args)))
    sharding: Any = next(shardings, None)
    if hasattr(sharding, "mesh"):
        return list(sharding.mesh.devices.flat)
    return [] if sharding is None else list(sharding.device_set)


def _absent_sharding(leaf: Any) -> Sharding | None:
    """Returns the sharding of a `ShapeDtypeStruct`; None for arrays on real devices."""
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def _lower(
    fn: Any, args: Any, devices: list[accelerators.Device], *, allow_callbacks: bool
) -> Any:
    """Lowers a function with abstract arguments."""
    # Replicate explicitly: jax would compile for the devices of this process.
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


def _shape(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(x, "weak_type", False)
    dtype = jnp.result_type(x) if isinstance(x, np.ndarray) else x.dtype
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding, weak_type=weak)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Disables writes to the persistent cache: jax could not read the program."""
    # No program takes that long, so jax writes no entry.
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
            source = blocks.find_source(lines)
            location = f"{source.file}:{source.line}" if source else "an unknown line"
            yield f"{location} ({equation.primitive.name})"
        for inner in inner_programs(equation):
            yield from _callbacks(inner)

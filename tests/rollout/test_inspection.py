"""Tests of `rollout.inspect_program` with XLA texts and with absent accelerators.

Tests that compile need the extra `accelerators` and are skipped without it.
"""

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rollout
from rollout import envs
from rollout.inspection import Block, Memory, Report, Wait, devices, hlo
from rollout.inspection.hlo import Frame, Module
from rollout.inspection.report import find_loop

T, B = 16, 32
ROOT = Path(__file__).parents[2]
KEY = jax.random.key(0)
X = jax.ShapeDtypeStruct((B, 4), jnp.float32)

gpu = pytest.mark.compiles_for("h100")
tpu = pytest.mark.compiles_for("v5e")
slow = pytest.mark.slow

# A loop of 10 rounds with a data-dependent loop and a conditional in a graph.
HLO = """\
HloModule jit_f, is_scheduled=true

FileNames
1 "/home/me/train.py"
2 "/home/me/my_env.py"

FunctionNames
1 "train"
2 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}
2 {file_name_id=2 function_name_id=2 line=42 end_line=42 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%fused (p.0: f32[10,32], p.1: s32[]) -> f32[32] {
  %p.0 = f32[10,32]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,32]{1,0} dynamic-slice(%p.0, %p.1, %zero), dynamic_slice_sizes={1,32}
  %flat = f32[32]{0} bitcast(%row)
  ROOT %sum = f32[32]{0} add(%flat, %flat)
}

%round (c: (f32[32])) -> (f32[32]) {
  %c = (f32[32]{0}) parameter(0)
  %x.1 = f32[32]{0} get-tuple-element(%c), index=0
  %square = f32[32]{0} multiply(%x.1, %x.1), metadata={op_name="jit(f)/mul"}
  ROOT %tuple.1 = (f32[32]{0}) tuple(%square)
}

%body (carry: (s32[], f32[32])) -> (s32[], f32[32]) {
  %carry = (s32[], f32[32]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %one = s32[] constant(1)
  %copy.i = s32[] copy(%i)
  %next = s32[] add(%copy.i, %one)
  %x = f32[32]{0} get-tuple-element(%carry), index=1
  %while.2 = f32[32]{0} while(%x), condition=%more, body=%round, \
metadata={op_name="jit(f)/while/body/while" stack_frame_id=2}
  %cond.1 = f32[32]{0} conditional(%x, %x, %x), true_computation=%round, \
false_computation=%round, metadata={op_name="jit(f)/while/body/cond" stack_frame_id=2}
  ROOT %tuple.2 = (s32[], f32[32]{0}) tuple(%next, %cond.1)
}

%more (c.1: (f32[32])) -> pred[] {
  %c.1 = (f32[32]{0}) parameter(0)
  ROOT %any = pred[] compare(%c.1, %c.1), direction=GT
}

%test (carry.1: (s32[], f32[32])) -> pred[] {
  %carry.1 = (s32[], f32[32]{0}) parameter(0)
  %limit = s32[] constant(10)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  ROOT %lt = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: f32[10,32]) -> f32[32] {
  %a = f32[10,32]{1,0} parameter(0)
  %start = s32[] constant(0)
  %first = f32[32]{0} fusion(%a, %start), kind=kLoop, calls=%fused, \
backend_config={"estimated_cycles":"70","reification_cost":[{"exec_time_us":0.5}]}
  %init = (s32[], f32[32]{0}) tuple(%start, %first)
  %while.1 = (s32[], f32[32]{0}) while(%init), condition=%test, body=%body, \
metadata={op_name="jit(f)/while" stack_frame_id=1}
  ROOT %out = f32[32]{0} get-tuple-element(%while.1), index=1
}
"""
THUNKS = """\
001: kCustomKernel [source] first grid: [1, 1, 1]
002: kWhile        [prev=001]
condition:
    003: kCustomKernel [source | sink] lt
  body:
    004: kWhile         [source]
condition:
        005: kCustomKernel [source | sink] any
      body:
        006: kCustomKernel [source | sink] square
    000: kCommandBuffer [prev=004]
        007: kCopy         [source] copy
        008: kConditional  [prev=007]
          false_branch:
            009: kCustomKernel [source] square
            010: kCustomKernel [source] square
          true_branch:
            011: kCustomKernel [source] square
    012: kAsyncDone [prev=000]
"""
NAMES = {1: "first", 2: "while.1", 4: "while.2", 6: "square", 8: "cond.1"}
METADATA = "".join(
    f'thunk_metadata {{ thunk_info {{ profile_annotation: "{name}" thunk_id: {number} '
    "} }\n"
    for number, name in NAMES.items()
)


@struct.dataclass
class LoopEnv:
    """An environment whose step contains a data-dependent loop."""

    high: float = 3.0

    @property
    def observation_space(self):
        return envs.Box(-10.0, 10.0, (4,), jnp.float32)

    @property
    def action_space(self):
        return envs.Discrete(2)

    def reset(self, key):
        state = jax.random.uniform(key, (4,))
        return state, state

    def step(self, key, state, action):
        del key  # unused
        x = self.move(state + action)
        return envs.EnvStep(
            state=x,
            obs=x,
            reward=x.sum(),
            terminated=x.sum() > self.high,
            truncated=jnp.bool_(False),
            info={},
        )

    def move(self, x):
        return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x + 0.1, x)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if text in line)


def make_collector(env=None, **options):
    env = env or envs.make("CartPole-v1")
    vector = envs.vectorize(env, B, auto_reset="select")
    policy = rollout.random_policy(env.action_space)
    return rollout.Collector(env=vector, policy=policy, **options)


@functools.cache
def inspect_steps(env_type, accelerator):
    env = env_type() if env_type else None
    return rollout.inspect_program(
        make_collector(env), None, KEY, accelerator=accelerator, num_steps=T
    )


def make_report(program: Block, loop: Block, steps_per_round=None) -> Report:
    """Creates a report without compiling a program."""
    return Report(
        accelerator="h100",
        description="",
        num_devices=1,
        jax_version="",
        compile_seconds=0.0,
        memory=Memory(0, 0, 0, 0, 0),
        flops=None,
        bytes_moved=None,
        program=program,
        loop=loop,
        steps_per_round=steps_per_round,
    )


def find_waits(*args):
    return make_report(*args).waits


def waits_in_this_file(report):
    return [wait for wait in report.waits if wait.file == __file__]


def test_gpu_blocks_are_read_from_thunks():
    program = hlo.read_gpu(HLO, THUNKS, METADATA)
    (scan,) = program.blocks
    assert (program.loose_launches, program.total("launches")) == (1, 1 + 10 * (1 + 2))
    assert (scan.cause, scan.trips, scan.asks_host) == ("scan", 10, False)
    climb, choice = scan.blocks
    # A data-dependent loop evaluates its predicate in every round.
    assert (climb.trips, climb.loose_launches, climb.asks_host) == (None, 2, True)
    assert (choice.kind, choice.asks_host) == ("conditional", False)
    assert [x.graph_launches for x in choice.blocks] == [2, 1]
    assert (scan.graph_launches, scan.loose_launches) == (1, 0)
    assert program.seconds == pytest.approx(0.5e-6)


def test_wait_names_its_source_line():
    program = hlo.read_gpu(HLO, THUNKS, METADATA)
    loop = find_loop(program)
    assert loop is program.blocks[0]
    (wait,) = find_waits(program, loop, 1)
    assert wait == Wait("while_loop", "/home/me/my_env.py", 42, 1, "step", True)
    text = "1 per step + 1 per round of it   /home/me/my_env.py:42 while_loop"
    assert str(wait) == text


def test_conditional_outside_a_graph_waits():
    thunks = THUNKS.replace("000: kCommandBuffer", "000: kSequential")
    program = hlo.read_gpu(HLO, thunks, METADATA)
    waits = find_waits(program, find_loop(program), 1)
    assert {(x.cause, x.count, x.per) for x in waits} == {
        ("while_loop", 1, "step"),
        ("cond", 1, "step"),
    }


def test_tpu_blocks_have_cycles_and_no_waits():
    program = hlo.read_tpu(HLO)
    assert program.total("cycles") == 70
    (scan,) = program.blocks
    assert scan.trips == 10  # the counter goes from 0 to 10 in steps of 1
    assert find_waits(program, scan) == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%next = s32[] add(%copy.i, %one)", "%next = s32[] add(%copy.i, %copy.i)"),
        ("direction=LT", "direction=NE"),
        ("%limit = s32[] constant(10)", "%limit = s32[] parameter(1)"),
    ],
)
def test_trip_count_needs_a_constant_limit(old, new):
    assert old in HLO
    assert hlo.read_tpu(HLO.replace(old, new)).blocks[0].trips is None


# Operation names of JAX contain the scopes of the step.
WHILE = "jit(f)/while/body/"
SCOPED = (
    *("closed_call/policy/dot_general", "closed_call/env_step/cond/branch_0_fun/ge"),
    *("dynamic_update_slice", "closed_call/bookkeeping/dynamic_update_slice", "add"),
)
FUSION = """\
%fused (p.0: f32[4]) -> f32[4] {
  %p.0 = f32[4]{0} parameter(0)
  %negated = f32[4]{0} negate(%p.0), metadata={op_name="f/policy/neg"}
  ROOT %sum = f32[4]{0} add(%negated, %negated), metadata={op_name="f/env_step/add"}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %unnamed = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused
  ROOT %copied = f32[4]{0} copy(%unnamed)
}
"""


def report(step: Block, steps_per_round: int | None = None) -> Report:
    program = Block(kind="program", blocks=(step,))
    return make_report(program, find_loop(program), steps_per_round)


def block(block_kind, *names, **fields) -> Block:
    operations = tuple((WHILE + name, 1) for name in names)
    totals = {"graph_launches": len(names), "operations": operations}
    return Block(kind=block_kind, **totals, **fields)


def counts(step: Block) -> dict:
    return {part: n for part, n in report(step).by_scope().items() if n}


def test_launches_are_counted_by_innermost_scope():
    step = block("loop", *SCOPED, "auto_reset/while/body/policy/add", trips=8)
    want = {"policy": 2, "env_step": 1, "bookkeeping": 1, "writing": 1, "other": 1}
    assert counts(step) == want
    assert sum(want.values()) == report(step).per_step("launches")


def test_inner_blocks_are_multiplied_by_trips():
    short_branch, long_branch = (
        block("branch", *["auto_reset/add"]),
        block("branch", *SCOPED[:2] * 2),
    )
    choice = Block(kind="conditional", blocks=(short_branch, long_branch))
    counted_loop = block("loop", "env_step/mul", trips=3)
    dynamic_loop = block("loop", "auto_reset/mul")
    step = block("loop", "add", trips=8, blocks=(choice, counted_loop, dynamic_loop))
    assert counts(step) == {"policy": 2, "env_step": 5, "other": 1}
    assert sum(counts(step).values()) == report(step).per_step("launches")


def test_cycles_are_counted_by_scope():
    step = Block(kind="loop", trips=8, cycles=70, operations=(("f/policy/add", 70),))
    assert counts(step) == {"policy": 70}


def test_unrolled_round_is_counted_per_step():
    step = block("loop", *SCOPED, trips=8)
    unrolled = report(step, steps_per_round=2)
    assert unrolled.by_scope()["policy"] == 0.5
    assert sum(unrolled.by_scope().values()) == unrolled.per_step("launches") == 2.5


def test_unnamed_fusion_has_the_name_of_its_root():
    module = Module(FUSION)

    names = {name: module.op_name(x) for name, x in module.instructions.items()}
    assert names["unnamed"] == "f/env_step/add"
    assert names["negated"] == "f/policy/neg"
    assert names["copied"] == ""


LIBRARY = Frame(str(ROOT / "rollout" / "envs" / "auto_reset.py"), 1)
KERNEL = Frame(str(ROOT / "rollout" / "kernel" / "step.py"), 2)
INSPECTION = Frame(str(ROOT / "rollout" / "inspection" / "compilation.py"), 3)
JAX = Frame(str(Path(jax.__file__).parent / "_src" / "api.py"), 4)
ENV, SCRIPT = Frame("/home/me/my_env.py", 5), Frame("/home/me/train.py", 6)


@pytest.mark.parametrize(
    ("frames", "source"),
    [
        ([LIBRARY, KERNEL, INSPECTION, SCRIPT], LIBRARY),
        # A training step of the script.
        ([JAX, LIBRARY, KERNEL, SCRIPT, INSPECTION, SCRIPT], LIBRARY),
        # An environment that calls a library function.
        ([LIBRARY, ENV, KERNEL, INSPECTION, SCRIPT], ENV),
        ([SCRIPT, INSPECTION], SCRIPT),
        ([JAX], None),
    ],
)
def test_source_is_the_innermost_user_frame(frames, source):
    assert hlo.find_source(frames) == source


def test_time_loop_has_the_most_launches():
    short = Block(kind="loop", trips=2, loose_launches=9)
    long = Block(kind="loop", trips=100, loose_launches=3)
    program = Block(kind="program", loose_launches=1, blocks=(short, long))
    assert find_loop(program) is long
    assert find_loop(program, num_steps=50) is short
    assert program.total("launches") == 1 + 2 * 9 + 100 * 3
    assert find_loop(Block(kind="program")).kind == "program"
    dynamic = Block(kind="program", blocks=(Block(kind="loop"),))
    assert find_loop(dynamic, num_steps=1) is dynamic


def test_waits_in_inner_loops_are_multiplied():
    conditional = Block(
        kind="conditional", cause="cond", asks_host=True, file="a", line=1
    )
    inner = Block(kind="loop", trips=3, blocks=(conditional,))
    step = Block(kind="loop", trips=5, blocks=(inner,), loose_launches=1)
    program = Block(kind="program", blocks=(step, conditional))
    waits = find_waits(program, step, 1)
    assert [(x.count, x.per) for x in waits] == [(3, "step"), (1, "program")]
    waits = find_waits(program, step, 2)  # a round has two steps
    assert [(x.count, x.per) for x in waits] == [(1.5, "step"), (1, "program")]
    waits = find_waits(program, step)  # a function without steps
    assert [(x.count, x.per) for x in waits] == [(3, "round"), (1, "program")]


def test_data_dependent_time_loop_waits_once_per_round():
    step = Block(kind="loop", cause="while_loop", asks_host=True, loose_launches=1)
    program = Block(kind="program", blocks=(step,))
    (wait,) = find_waits(program, step)
    assert wait == Wait("while_loop", "", 0, 1, "round", False)


def test_donated_memory_is_counted_once():
    memory = Memory(arguments=6, outputs=5, aliased=4, temporaries=3, capacity=10)
    assert memory.total == 10
    assert memory.fits
    assert not memory._replace(temporaries=4).fits


def raise_not_found(name):
    raise importlib.metadata.PackageNotFoundError(name)


GPU = f'pip install "jax-cuda12-plugin=={jax.__version__}" "jax-cuda12-pjrt=='


@pytest.mark.parametrize(
    ("accelerator", "version", "line"),
    [
        ("h100", raise_not_found, GPU),
        ("h100", lambda name: "0.9.1", "0.9.1 does not match jax"),
    ],
)
def test_missing_or_wrong_compiler_raises(accelerator, version, line, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match=re.escape(line)):
        devices(accelerator, 7)  # not cached by another test


@slow
@gpu
def test_loop_in_an_environment_is_a_wait():
    report = inspect_steps(LoopEnv, "h100")
    (wait,) = waits_in_this_file(report)
    line = line_of("return jax.lax.while_loop(")
    assert wait == Wait("while_loop", __file__, line, 1, "step", True)
    assert f"test_inspection.py:{line} while_loop\n" in f"{report}\n"
    assert report.loop.trips * report.steps_per_round == T
    assert report.loop.cause == "scan"


@slow
@tpu
def test_tpu_program_has_cycles_and_no_waits():
    report = inspect_steps(LoopEnv, "tpu-v5e")
    assert report.waits == ()
    assert report.per_step("launches") == 0
    assert report.loop.trips * report.steps_per_round == T
    cycles = report.program.total("cycles")
    assert T * report.per_step("cycles") < cycles < 2 * T * report.per_step("cycles")


@slow
@tpu
def test_tpu_flops_count_one_round_per_loop():
    def fn(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=T)[0]

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    report = rollout.inspect_program(fn, x, accelerator="v5e")
    assert report.flops == pytest.approx(2 * 256**3, rel=0.01)
    assert report.bytes_moved >= 3 * 4 * 256**2
    assert "33.55 Mflop" in str(report)


@slow
@gpu
def test_jitted_function_keeps_static_and_donated_arguments():
    def fn(num_times, x, key, scale):
        for _ in range(num_times):
            x = jnp.tanh(x @ x) * scale
        return x + jax.random.normal(key, x.shape)

    x = jnp.ones((64, 64))
    jitted = jax.jit(fn, static_argnums=0, donate_argnums=1)
    assert jax.jit(lambda x: x + 1)(1) == 2  # JAX is initialized
    key = jax.random.key(0)
    report = rollout.inspect_program(jitted, 6, x, key, 2.0, accelerator="h100")
    assert report.memory.aliased == x.nbytes
    assert report.loop is report.program
    assert report.steps_per_round is None
    assert not x.is_deleted()
    plain = functools.partial(fn, 6)
    report = rollout.inspect_program(
        plain, np.ones((64, 64)), key, 2.0, accelerator="a100"
    )
    assert report.memory.aliased == 0


def run_callback(x):
    def step(x, _):
        io_callback(lambda x: None, None, x)
        return x + 1, x.sum()

    return jax.lax.scan(step, x, length=T)


@slow
@gpu
def test_gpu_callback_raises_with_its_line():
    line = line_of("io_callback(lambda")
    with pytest.raises(ValueError, match=rf"inspection\.py:{line} \(io_callback\)"):
        rollout.inspect_program(run_callback, X, accelerator="h100")


@slow
@tpu
def test_tpu_callback_is_a_wait():
    (wait,) = rollout.inspect_program(run_callback, X, accelerator="v5e").waits
    line = line_of("io_callback(lambda")
    assert wait == Wait("io_callback", __file__, line, 1, "round", False)


@slow
@gpu
@tpu
@pytest.mark.parametrize("accelerator", ["h100", "v5e"])
def test_collectives_of_absent_devices_are_reported(accelerator):
    mesh = Mesh(np.asarray(devices(accelerator, 8)), ("lanes",))
    assert devices(accelerator, 8) == devices(accelerator, 8)
    sharding = NamedSharding(mesh, PartitionSpec("lanes"))
    x = jax.ShapeDtypeStruct((64, 4), jnp.float32, sharding=sharding)

    def fn(x):
        return jax.lax.scan(
            lambda x, _: (x - x.mean(0, keepdims=True), x[0]), x, length=T
        )

    report = rollout.inspect_program(fn, x, accelerator=accelerator)
    assert report.num_devices == 8
    assert "all-reduce" in report.collectives_per_round
    assert report.loop.trips == T
    other_name = "a100" if accelerator == "v5e" else "v5e"
    with pytest.raises(ValueError, match="`accelerator` must match the devices of the"):
        rollout.inspect_program(fn, x, accelerator=other_name)


@slow
@gpu
@tpu
def test_inspection_prints_nothing_without_an_accelerator():
    """The plugin prints only notes, and JAX keeps its default device."""
    code = (
        "import jax, jax.numpy as jnp, rollout\n"
        "x = jax.ShapeDtypeStruct((8, 8), jnp.float32)\n"
        "for name in ('v5e', 'h100', 'v5e'):\n"
        "    print(rollout.inspect_program(jnp.sin, x, accelerator=name).accelerator)\n"
        "print(jax.devices()[0].platform)"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.stdout.split() == ["tpu-v5e", "h100", "tpu-v5e", "cpu"], run.stderr
    lines = [x for x in run.stderr.splitlines() if "cuda drivers" not in x]
    assert all("InitializeLog" in line for line in lines), run.stderr

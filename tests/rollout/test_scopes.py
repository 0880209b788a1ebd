"""Launches by the part of the step, from the names that jax gives operations."""

import dataclasses

from reports import make_report

from rollout.inspection import Block, Report
from rollout.inspection.hlo import Module
from rollout.inspection.report import find_loop

WHILE = "jit(f)/while/body/"
NAMES = (
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


def block(kind, *names, **more) -> Block:
    operations = tuple((WHILE + name, 1) for name in names)
    return Block(kind=kind, graph_launches=len(names), operations=operations, **more)


def counts(step: Block) -> dict:
    return {part: n for part, n in report(step).by_scope().items() if n}


def test_every_launch_counts_for_the_innermost_part_of_its_name():
    step = block("loop", *NAMES, "auto_reset/while/body/policy/add", trips=8)
    want = {"policy": 2, "env_step": 1, "bookkeeping": 1, "writing": 1, "other": 1}

    assert counts(step) == want
    assert sum(want.values()) == report(step).per_step("launches")


def test_inner_blocks_count_as_often_as_they_run():
    few, many = block("branch", *["auto_reset/add"]), block("branch", *NAMES[:2] * 2)
    choice = Block(kind="conditional", blocks=(few, many))
    known = block("loop", "env_step/mul", trips=3)
    unknown = block("loop", "auto_reset/mul")
    step = block("loop", "add", trips=8, blocks=(choice, known, unknown))

    assert counts(step) == {"policy": 2, "env_step": 5, "other": 1}
    assert sum(counts(step).values()) == report(step).per_step("launches")


def test_cycles_are_counted_by_part_too():
    step = Block(kind="loop", trips=8, cycles=70, operations=(("f/policy/add", 70),))

    assert counts(step) == {"policy": 70}


def test_round_of_several_steps_is_counted_per_step():
    step = block("loop", *NAMES, trips=8)
    whole = report(step, steps_per_round=2)

    assert whole.by_scope()["policy"] == 0.5
    assert sum(whole.by_scope().values()) == whole.per_step("launches") == 2.5


def test_fusion_without_a_name_has_that_of_its_last_operation():
    module = Module(FUSION)

    names = {name: module.op_name(x) for name, x in module.instructions.items()}
    assert names["unnamed"] == "f/env_step/add"
    assert names["negated"] == "f/policy/neg"
    assert names["copied"] == ""


def test_names_of_launches_are_not_shown():
    assert "policy" not in repr(block("loop", *NAMES))
    assert dataclasses.fields(Block)[-1].name == "blocks"

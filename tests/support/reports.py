"""Shared by tests of `inspect_program`: reports of programs that nobody compiled."""

from rollout.inspection import Block, Memory, Report


def make_report(program: Block, loop: Block, steps_per_round=None) -> Report:
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

"""Compiles a program for an accelerator and reports its launches and waits.

`compilation` compiles the program, `accelerators` describes the devices, `hlo` and
`blocks` parse the text that XLA writes, and `report` counts and prints.
"""

from rollout.inspection.accelerators import devices
from rollout.inspection.compilation import inspect_program
from rollout.inspection.report import Block, Memory, Report, Wait

__all__ = ["Block", "Memory", "Report", "Wait", "devices", "inspect_program"]

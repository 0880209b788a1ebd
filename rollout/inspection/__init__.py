"""Compiles a program for an accelerator and reports its launches and waits.

`compilation` describes the devices and compiles the program, `hlo` parses the text
that XLA writes, and `report` counts and prints.
"""

from rollout.inspection.compilation import devices, inspect_program
from rollout.inspection.report import Block, Memory, Report, Wait

__all__ = ["Block", "Memory", "Report", "Wait", "devices", "inspect_program"]

"""Shows what a program does on an accelerator, present or not, by compiling it.

`program` has `inspect`; `accelerators` the data of those that are known, and their
devices; `hlo` and `blocks` read what XLA writes; `report` is what comes of it.
"""

from rollout.inspection.accelerators import devices
from rollout.inspection.program import inspect
from rollout.inspection.report import Block, Memory, Report, Wait

__all__ = ["Block", "Memory", "Report", "Wait", "devices", "inspect"]

"""What a benchmark ran on."""

import os
import platform
from importlib import metadata

import jax

LOOP_FLAG = (
    "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000000"
)


def machine() -> str:
    """Says what this runs on."""
    device = jax.devices()[0]
    flag = "on" if LOOP_FLAG in os.environ.get("XLA_FLAGS", "") else "off"
    return (
        f"{device.device_kind} ({device.platform}), {_processor()}, "
        f"{os.cpu_count()} cores; Python {platform.python_version()}, "
        f"jax {jax.__version__}, gymnax {metadata.version('gymnax')}; "
        f"XLA loop flag {flag}"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(": ")[1] for line in lines if "model name" in line]
        return names[0].strip()
    except (OSError, IndexError):
        return platform.processor() or platform.machine()

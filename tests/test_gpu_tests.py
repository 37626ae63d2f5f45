"""The tests for a GPU, where there is none: those of a step, the optimizer off the device and FSDP run on the CPU, so that they
follow the code between two visits to a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILES = ("test_step.py", "test_offload.py", "test_collectives.py")
LEFT_OUT = "not (compiled or counted or fp16 or selective or zero1 or zero2 or hsdp or nvme)"
"""Compilation is tested elsewhere; gloo ends a collective of one rank before anybody waits. Of parameters that other tests have on
the CPU, one is left for each test."""


def test_they_pass_on_the_cpu() -> None:
    root = Path(__file__).parents[1]
    files = [str(root / "tests/gpu" / name) for name in FILES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *files, "-k", LEFT_OUT],
        cwd=root, env=os.environ | {"RAYDIST_GPU_TESTS": "cpu"}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

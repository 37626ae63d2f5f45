"""Shared by the benchmarks: the versions and the machine of each result, results as JSON, and ranks on hosts of their own."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Versions and processor, without host or user names."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    packages = {}
    for name in ("raydist", "torch", "ray", "pyarrow"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), **packages}


def write(name: str, result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes FOLDER/NAME.json: the machine, then the result."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    return path


def on_hosts(script: str, world: int, rate: str, given: Sequence[str]) -> dict[str, Any]:
    """The JSON that rank 0 of SCRIPT prints. Each rank is on a host of its own, a network namespace whose link has the rate
    ("none": no limit), with the options `given`, `--master` and `--rank`. Needs root."""
    from tests.hosts import Hosts

    with Hosts(world, None if rate == "none" else rate) as hosts:
        command = [sys.executable, script, *given, "--master", hosts[0].ip, "--rank"]
        others = [hosts[i].popen([*command, str(i)]) for i in range(1, world)]
        done = hosts[0].run([*command, "0"], timeout=7200)
        for other in others:
            other.wait(60)
        if done.returncode:
            sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found

"""Shared by the benchmarks: the versions and the machine of each result, and writing results as JSON."""

from __future__ import annotations

import json
import os
import platform
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

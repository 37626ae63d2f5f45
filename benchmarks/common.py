"""Shared by the benchmarks: versions and machine of a result, results as JSON, interleaved steps, ranks on hosts of their own."""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import count
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


def write(name: str, result: dict[str, Any], folder: Path = RESULTS, merge: bool = False) -> Path:
    """Writes FOLDER/NAME.json: the machine, then the result. `merge`: a run of some cases leaves the file's other cases, and of a
    case the variants that it has not run. Figures of another machine, other versions or another number of steps stay, too: the
    first of NAME.json, NAME_2.json ... without such is written."""
    folder.mkdir(parents=True, exist_ok=True)
    path, here = folder / f"{name}.json", machine()
    for number in count(2):
        if not merge or not path.exists():
            break
        before = json.loads(path.read_text())
        if before.pop("machine") == here and before.get("steps") == result.get("steps"):
            both = {k: {**before[k], **v} for k, v in result.items() if {type(v), type(before.get(k))} == {dict}}
            result = {**before, **result, **both}
            break
        path = folder / f"{name}_{number}.json"
    path.write_text(json.dumps({"machine": here, **result}, indent=1) + "\n")
    return path


Seconds = dict[str, list[float]]
"""Name of a variant -> the time of a step in each round."""


def interleaved(
    variants: Mapping[str, Callable[[], Any]], rounds: int, barrier: Callable[[], Any]
) -> tuple[Seconds, Seconds]:
    """Wall-clock and processor time of a step of each variant, in random order: one step to warm up, then the mean of two. Every
    rank calls it."""
    order = random.Random(0)
    wall: Seconds = {name: [] for name in variants}
    processor: Seconds = {name: [] for name in variants}
    for _ in range(rounds):
        for name in order.sample(list(variants), len(variants)):
            variants[name]()
            barrier()
            begun, busy = time.perf_counter(), time.process_time()
            for _ in range(2):
                variants[name]()
            processor[name].append((time.process_time() - busy) / 2)
            barrier()
            wall[name].append((time.perf_counter() - begun) / 2)
    return wall, processor


def on_hosts(script: str, world: int, rate: str, given: Sequence[str], burst: str = "128kb") -> dict[str, Any]:
    """The JSON that rank 0 of SCRIPT prints. Each rank is on a host of its own, a network namespace whose link has the rate
    ("none": no limit) and `burst` (tests/hosts.py), with the options `given`, `--master` and `--rank`. Needs root."""
    from tests.hosts import Hosts

    with Hosts(world, None if rate == "none" else rate, burst) as hosts:
        command = [sys.executable, script, *given, "--master", hosts[0].ip, "--rank"]
        others = [hosts[i].popen([*command, str(i)]) for i in range(1, world)]
        done = hosts[0].run([*command, "0"], timeout=7200)
        for other in others:
            other.wait(60)
        if done.returncode:
            sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found

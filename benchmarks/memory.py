"""Peak memory of a step on meshes of 2 and 4 ranks, over the forecast of `raydist plan`.

    python benchmarks/memory.py ["zero3 of 3" ...]

The meshes of tests/planner/test_ranks.py, or those named, whose results replace theirs in the file. Measured as there: the bytes
that malloc has given to a rank, looked at after every operator of a step, above what the process had before the model was built. A
ratio is of the rank with the largest one. Asked: at most 1.1. It measures no time, so other load does not matter.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import write

from raydist.planner.estimate import estimates
from raydist.planner.facts import Machine
from raydist.spec import JobSpec
from raydist.worker.distributed import Rank
from tests.planner.test_ranks import MESHES, figures, planner_of


def measure(number: int, spec: JobSpec, folder: str) -> None:
    """One rank; rank 0 saves the peaks of all."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    world = spec.cluster.most
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=number, world_size=world)
    rank = Rank(number, world, number, torch.device("cpu"), "gloo", "127.0.0.1", dist.new_group(backend="gloo"), ())
    peaks = torch.zeros(world, dtype=torch.int64)
    peaks[number] = int(figures(rank, spec)["whole_peak"])
    dist.all_reduce(peaks)
    if number == 0:
        torch.save(peaks, f"{folder}/peaks")
    dist.barrier()
    dist.destroy_process_group()


def main(names: list[str]) -> None:
    """Measures, prints a line for each mesh, writes results/memory.json."""
    result: dict[str, Any] = {}
    for name in names or MESHES:
        spec = MESHES[name]
        world, strategy = spec.cluster.most, spec.parallel.strategy
        planner = planner_of(spec)
        planned = estimates(strategy, spec, Machine(world, world, "cpu"), planner.model(), planner.measure)
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (spec, folder), nprocs=world)
            peaks = torch.load(f"{folder}/peaks", weights_only=True).tolist()
        forecasts = [planned[number * len(planned) // world].total for number in range(world)]
        ratio, peak, forecast = max((p / f, p, f) for p, f in zip(peaks, forecasts, strict=True))
        result[name] = {"ranks": world, "peak": peak, "forecast": forecast, "ratio": round(ratio, 4)}
        print(f"{name:24s} {world} ranks  {peak / 2**20:7.1f} MiB  {ratio:.3f} of the forecast", flush=True)
    worst = max(result, key=lambda name: result[name]["ratio"])
    print(f"at most {result[worst]['ratio']:.3f}: {worst}")
    print(write("memory", {"meshes": result}, merge=bool(names)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MESH", help="as tests/planner/test_ranks.py names it")
    main(parser.parse_args().names)

"""Peak memory of a step on meshes of 2 and 4 ranks, over the forecast of `raydist plan`.

    python benchmarks/memory.py ["zero3 of 3" ...]

The meshes of tests/planner/test_ranks.py, or those named, whose results replace theirs in the file. Measured as there: the bytes
that malloc has given to a rank, looked at after every operator of a step, above what the process had before the model was built. A
ratio is of the rank with the largest one. Asked: at most 1.1. It measures no time, so other load does not matter.

Width and context are twice those of the test, and tensors of activations four times as large. Besides tensors, which a plan counts,
a rank has autograd's nodes and tensors' headers, about 0.4 KiB for each operator between its forward and its backward pass, and the
objects of its modules and groups: 0.2 to 1 MiB in all on these meshes, whatever the width. Of the test's 8 MiB that is an eighth.

With experts on several ranks `rows` is how many times the mean of the ranks' rows the experts of that rank had, and `for_rows` the
ratio over a forecast with as many: a plan takes tokens to be spread evenly, and random routers do not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import write
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from raydist.planner.estimate import estimates
from raydist.planner.facts import Machine
from raydist.planner.measure import Planner
from raydist.planner.tensor import EvenExchange
from raydist.spec import JobSpec
from raydist.worker.distributed import Rank
from raydist.worker.model._moe import Experts
from tests.planner.jobs import VOCAB
from tests.planner.test_ranks import MESHES, figures, planner_of


def larger(spec: JobSpec) -> JobSpec:
    """See above."""
    return spec.with_fields({f"model.{name}": 2 * getattr(spec.model, name) for name in ("width", "context")})


def measure(number: int, spec: JobSpec, folder: str) -> None:
    """One rank; rank 0 saves the peaks of all, and the rows that the experts of each have computed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    world = spec.cluster.most
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=number, world_size=world)
    rank = Rank(number, world, number, torch.device("cpu"), "gloo", "127.0.0.1", dist.new_group(backend="gloo"), ())
    rows: list[int] = []
    register_module_forward_pre_hook(lambda made, given: rows.append(len(given[0])) if type(made) is Experts else None)
    found = torch.zeros(2, world, dtype=torch.int64)
    found[0, number] = int(figures(rank, spec)["whole_peak"])
    of_step = spec.batches(world)[1] * spec.model.layers // spec.parallel.pipeline
    found[1, number] = sum(rows[-of_step:])  # of the step whose peak is measured
    dist.all_reduce(found)
    if number == 0:
        torch.save(found, f"{folder}/found")
    dist.barrier()
    dist.destroy_process_group()


def with_rows(spec: JobSpec, times: float) -> list[int]:
    """The forecast of each stage, for ranks whose experts get so many times as many rows as a rank sends."""

    class Uneven(EvenExchange):
        def sizes(self, rows_RD: Tensor, counts_E: Tensor) -> tuple[Tensor, list[int], list[int]]:
            counts, out, into = super().sizes(rows_RD, counts_E)
            return counts, out, [round(times * n) for n in into]

    planner = Planner(spec, VOCAB, "cpu")
    with patch("raydist.planner.measure.EvenExchange", Uneven):
        world = spec.cluster.most
        machine = Machine(world, world, "cpu")
        return [e.total for e in estimates(spec.parallel.strategy, spec, machine, planner.model(), planner.measure)]


def main(names: list[str]) -> None:
    """Measures, prints a line for each mesh, writes results/memory.json."""
    result: dict[str, Any] = {}
    for name in names or MESHES:
        spec = larger(MESHES[name])
        world, strategy = spec.cluster.most, spec.parallel.strategy
        planner = planner_of(spec)
        planned = estimates(strategy, spec, Machine(world, world, "cpu"), planner.model(), planner.measure)
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (spec, folder), nprocs=world)
            peaks, rows = torch.load(f"{folder}/found", weights_only=True).tolist()
        forecasts = [planned[number * len(planned) // world].total for number in range(world)]
        ratio, number = max((p / f, n) for n, (p, f) in enumerate(zip(peaks, forecasts, strict=True)))
        result[name] = {
            "ranks": world, "width": spec.model.width, "peak": peaks[number], "forecast": forecasts[number],
            "ratio": round(ratio, 4),
        }  # fmt: skip
        told = f"{name:24s} {world} ranks  {peaks[number] / 2**20:7.1f} MiB  {ratio:.3f} of the forecast"
        if spec.parallel.expert > 1:
            stage = number * len(planned) // world
            every = rows[stage * world // len(planned) : (stage + 1) * world // len(planned)]
            times = rows[number] / (sum(every) / len(every))
            of_rows = peaks[number] / with_rows(spec, times)[stage]
            result[name] |= {"rows": round(times, 3), "for_rows": round(of_rows, 4)}
            told += f", {of_rows:.3f} of one with its {times:.2f} times the mean of rows"
        print(told, flush=True)
        path = write("memory", {"meshes": {name: result[name]}}, merge=bool(names) or len(result) > 1)
    worst = max(result, key=lambda name: result[name]["ratio"])
    print(f"at most {result[worst]['ratio']:.3f}: {worst}")
    print(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MESH", help="as tests/planner/test_ranks.py names it")
    main(parser.parse_args().names)

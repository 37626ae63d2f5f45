"""Cost of sum and gather by direct point-to-point sends between gloo ranks, relative to gloo's own, in one interleaved run.

    python benchmarks/exchange.py [--rounds 15]

2 and 4 ranks of one thread each sum and gather fp32 arrays with raydist.worker.comm.gloo_p2p and with torch.distributed,
alternately. `processor`: rank 0's processor time over torch's, the median of the rounds; `wall`: the same for wall-clock time. If
four ranks share fewer cores, only the processor time is meaningful.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import write

from raydist.worker.comm import gloo_p2p

SIZES = (100_000, 600_000, 7_000_000)
CALLS = 4


def spent(call: Callable[[], object]) -> tuple[float, float]:
    """Processor and wall seconds of a few calls."""
    dist.barrier()
    processor, wall = time.process_time(), time.perf_counter()
    for _ in range(CALLS):
        call()
    return time.process_time() - processor, time.perf_counter() - wall


def main(rank: int, world: int, port: int, rounds: int, told: Any) -> None:
    """One rank; rank 0 sends {size: {collective: {"processor", "wall"}}}."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    found: dict[str, Any] = {}
    for size in SIZES:
        whole, parts, mine = torch.randn(size), torch.empty(size), torch.empty(size // world)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "reduce_scatter": (
                lambda w=whole, p=parts, m=mine: gloo_p2p.reduce_scatter(m, w, p, group).wait(),
                lambda w=whole, m=mine: dist.reduce_scatter_tensor(m, w),
            ),
            "all_gather": (
                lambda p=parts, m=mine: gloo_p2p.all_gather(p, m, group).wait(),
                lambda p=parts, m=mine: dist.all_gather_into_tensor(p, m),
            ),
        }
        found[str(size)] = {}
        for name, (ours, theirs) in pairs.items():
            for call in (ours, theirs):
                call()
            ratios = []
            for _ in range(rounds):
                a, b = spent(ours), spent(theirs)
                ratios.append((a[0] / b[0], a[1] / b[1]))
            processor, wall = (statistics.median(column) for column in zip(*ratios, strict=True))
            found[str(size)][name] = {"processor": processor, "wall": wall}
    if rank == 0:
        told.put(found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    result = {}
    for world in (2, 4):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        told = mp.get_context("spawn").SimpleQueue()
        mp.spawn(main, (world, port, options.rounds, told), nprocs=world)
        result[str(world)] = told.get()
        for size, of in result[str(world)].items():
            line = ", ".join(f"{n} {f['processor']:.2f} ({f['wall']:.2f} of the time)" for n, f in of.items())
            print(f"{world} ranks, {int(size):>9,} numbers: {line}", flush=True)
    print(write("exchange", {"rounds": options.rounds, "over_torch": result}))

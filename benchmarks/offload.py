"""Throughput of an optimizer update from a swap file, relative to the disk's own, in one interleaved run.

    python benchmarks/offload.py [--rounds 9] [--millions 64] [--chunk-mb 8] [--folder DIR]

An update of N parameters reads 8N bytes of AdamW's state and writes as many. The disk's own rate is for the same bytes without
arithmetic: threads read a whole file with O_DIRECT while as many others write it, in blocks of 1, 4 and 8 MiB, from buffers like
the update's (huge pages). The shape with the highest median stands for the disk. Each round measures every shape and the update,
in a changing order; `over_disk` is the median of update over disk.

Also measured: the update with buffers in small pages, as in the first version; and torch's fused AdamW in memory.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import write
from torch import nn

from raydist.spec.running import OffloadSpec
from raydist.worker.optim.offload.adamw import OffloadedAdamW
from raydist.worker.optim.offload.swapfile import SwapFile

MIB = 2**20
SHAPES = [(1, 1), (1, 4), (1, 8), (2, 1), (2, 4), (2, 8)]
"""Reading threads (and as many writing ones), and MiB per block."""


def disk(file: SwapFile, nbytes: int, threads: int, block: int, huge: bool) -> float:
    """Bytes/s of reading and writing the whole file simultaneously."""
    buffers = mmap.mmap(-1, 2 * threads * block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffers.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    memory = memoryview(buffers)
    torch.frombuffer(buffers, dtype=torch.uint8).random_()

    def work(call: Callable[[memoryview, int], None], lane: int, first: int) -> None:
        mine = memory[lane * block : (lane + 1) * block]
        for offset in range(first * block, nbytes, threads * block):
            call(mine[: nbytes - offset], offset)

    lanes = [threading.Thread(target=work, args=(file.read, i, i)) for i in range(threads)]
    lanes += [threading.Thread(target=work, args=(file.write, threads + i, i)) for i in range(threads)]
    begun = time.perf_counter()
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    return 2 * nbytes / (time.perf_counter() - begun)


def made(parameters: list[nn.Parameter], folder: str, mode: str, chunk_mb: float) -> OffloadedAdamW:
    """The optimizer as a job builds it."""
    return OffloadedAdamW(
        [{"name": "decay", "params": parameters, "weight_decay": 0.1}], lr=1e-4, betas=(0.9, 0.95), eps=1e-8,
        offload=OffloadSpec(optimizer=mode, path=folder, chunk_mb=chunk_mb), tag="benchmark",
    )  # fmt: skip


def main(rounds: int, millions: float, chunk_mb: float, folder: str) -> None:
    torch.set_num_threads(1)
    count = int(millions * 1e6) // 16 // 1024 * 1024
    parameters = [nn.Parameter(torch.randn(count)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.randn(count)
    nbytes = 8 * 16 * count
    file = SwapFile(folder, nbytes, "the benchmark's own")
    optimizer = made(parameters, folder, "nvme", chunk_mb)
    memory = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    cpu: list[float] = []

    def update() -> float:
        begun, used = time.perf_counter(), time.process_time()
        optimizer.step()
        cpu.append(time.process_time() - used)
        return 2 * nbytes / (time.perf_counter() - begun)

    def in_memory() -> float:
        begun = time.perf_counter()
        memory.step()
        return 2 * nbytes / (time.perf_counter() - begun)

    tasks: dict[str, Callable[[], float]] = {"update": update, "in_memory": in_memory}
    for threads, mib in SHAPES:
        tasks[f"disk_{threads}x{mib}MiB"] = lambda t=threads, b=mib * MIB: disk(file, nbytes, t, b, True)  # type: ignore[misc]
    tasks["disk_small_pages_1x4MiB"] = lambda: disk(file, nbytes, 1, 4 * MIB, False)
    for task in tasks.values():
        task()  # warm-up: all blocks of both files are written once, all memory pages are touched
    cpu.clear()
    order, rows = random.Random(0), []
    for _ in range(rounds):
        names = list(tasks)
        order.shuffle(names)
        row = {name: tasks[name]() for name in names}
        rows.append({name: row[name] for name in tasks})
    median = {name: statistics.median(row[name] for row in rows) for name in tasks}
    best = max((n for n in tasks if n.startswith("disk_") and "small" not in n), key=median.__getitem__)
    ratios = sorted(row["update"] / row[best] for row in rows)
    result = {
        "parameters": 16 * count,
        "state_bytes": nbytes,
        "chunk_mb": chunk_mb,
        "rounds": rounds,
        "o_direct": file.direct,
        "load_average": os.getloadavg()[0],
        "over_disk": round(statistics.median(ratios), 3),
        "over_disk_each_round": [round(r, 3) for r in ratios],
        "over_disk_with_small_pages": round(median["update"] / median["disk_small_pages_1x4MiB"], 3),
        "update_over_in_memory_seconds": round(median["in_memory"] / median["update"], 1),
        "disk_is": best,
        "cpu_s_an_update": round(statistics.median(cpu), 3),
        "median_gb_s": {name: round(rate / 1e9, 3) for name, rate in median.items()},
        "every_round_gb_s": [{name: round(rate / 1e9, 3) for name, rate in row.items()} for row in rows],
    }
    print(write("offload", result).read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--millions", type=float, default=64, help="of parameters")
    parser.add_argument("--chunk-mb", type=float, default=8)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    asked = parser.parse_args()
    main(asked.rounds, asked.millions, asked.chunk_mb, str(asked.folder))

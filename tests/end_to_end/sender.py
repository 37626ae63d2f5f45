"""A rank on one of two hosts: for each collective and strategy, the bytes by its counters and the bytes that its network
interface sent."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from raydist import registry
from raydist.worker.distributed import Rank
from raydist.worker.metrics.collective_counters import CollectiveCounters
from tests.training import CONTEXT, MODEL, VARIANTS, Trainer, counted, job, mine, samples

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
N, TIMES = 1 << 20, 4
WIDTH = 256
"""The width of a model with megabytes of gradients, so that the small messages of a step do not matter."""


def steps(rank: Rank, strategy: str) -> Callable[[], object]:
    """Runs a step of two micro-batches, then a forward pass, after which no message is in flight."""
    trainer = Trainer(rank, job(strategy, {**MODEL, "width": WIDTH}), full=4 * CONTEXT)
    batches = mine(rank, *samples(4), 1)

    def step() -> None:
        trainer.step(1, batches, counted(batches), 1e-3, want_stop=False)
        with torch.no_grad():
            trainer.strategy.module(batches[0].tokens)

    return step


def wire(log: CollectiveCounters) -> float:
    """Bytes sent, according to the counters."""
    dist.barrier()  # after it no rank has unsent data in its socket buffers
    return sum(total.wire_bytes for total in log.totals().values())


def main(rank: int, head: str) -> None:
    """Prints {kind or strategy: [bytes on the wire by the counters, bytes that the interface sent]}."""
    os.environ |= {"MASTER_ADDR": head, "MASTER_PORT": "29500", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    control = dist.new_group(backend="gloo")
    me = Rank(rank, 2, 0, torch.device("cpu"), "gloo", head, control, ())
    # With shard 1 hsdp sends all-reduces between the hosts; with 2 it would be the same as zero3.
    VARIANTS["hsdp"] = {"strategy": "hsdp", "shard": 1}
    x, whole = torch.ones(N), torch.ones(2 * N)
    log = CollectiveCounters(torch.device("cpu"))
    log.install()
    sending: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, whole),
        "all_to_all": lambda: dist.all_to_all_single(whole, whole.clone()),
        "send_recv": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0),
        **{strategy: steps(me, strategy) for strategy in registry.names("parallel")},
    }
    found = {}
    for name, send in sending.items():
        send()
        before, sent = wire(log), int(SENT.read_text())
        for _ in range(TIMES):
            send()
        found[name] = [wire(log) - before, int(SENT.read_text()) - sent]
    print(json.dumps(found))
    log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

"""A rank on one of two hosts: what its commlog has of each collective, beside what its network interface has sent."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from raydist.worker.commlog import CommLog

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
N, TIMES = 1 << 20, 4


def main(rank: int, head: str) -> None:
    """Prints {kind: [bytes on the wire by the commlog, bytes that the interface sent]}."""
    os.environ |= {"MASTER_ADDR": head, "MASTER_PORT": "29500", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x, whole = torch.ones(N), torch.ones(2 * N)
    collectives = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, whole),
        "all_to_all": lambda: dist.all_to_all_single(whole, whole.clone()),
        "send_recv": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0),
    }
    log = CommLog(torch.device("cpu"))
    log.install()
    found = {}
    for op, collective in collectives.items():
        collective()
        dist.barrier()  # whoever has come by here has nothing left in its sockets' buffers
        before, sent = log.totals()[op].wire_bytes, int(SENT.read_text())
        for _ in range(TIMES):
            collective()
        dist.barrier()
        found[op] = [log.totals()[op].wire_bytes - before, int(SENT.read_text()) - sent]
    print(json.dumps(found))
    log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

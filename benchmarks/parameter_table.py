"""The cost of the table of all parameters: at the start, at a save, at a commit.

    torchrun --nproc-per-node 2 benchmarks/parameter_table.py [--out benchmarks/results/parameter_table.json]

A GPT's parameter names and shapes with AdamW's state, split by rows (DTensors) and plain. Median of ROUNDS, on the slowest rank;
milliseconds. `joined_256`: the part of a gather that grows with the ranks, parsing and joining what 256 ranks sent, in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from raydist.checkpoint import coverage
from raydist.worker import distributed, parameter_table
from raydist.worker.parallel import ParamShard
from raydist.worker.parameter_table import TableCache, gather_parameters

ROUNDS = 15
LAYERS = 32
"""Of 9 parameters each, as Llama 7B has; 16 wide, for bytes of the tensors cost nothing here."""


def names() -> list[str]:
    """Of all parameters."""
    inner = (
        "attention_norm",
        "attention.q",
        "attention.k",
        "attention.v",
        "attention.out",
        "mlp_norm",
        "mlp.gate",
        "mlp.up",
    )
    blocks = [f"blocks.{i}.{name}.weight" for i in range(LAYERS) for name in (*inner, "mlp.down")]
    return ["embedding.weight", *blocks, "norm.weight"]


def measured(call: Callable[[], Any], group: Any) -> float:
    """Milliseconds: the median over rounds of the slowest rank."""
    times = []
    for _ in range(ROUNDS):
        dist.barrier(group=group)
        begun = time.perf_counter()
        call()
        taken = torch.tensor([time.perf_counter() - begun])
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
        times.append(1e3 * float(taken))
    return round(statistics.median(times), 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rank = distributed.start(gpus=0, threads=1, timeout_s=120)
    assert rank.control is not None, "start it with torchrun, on two ranks or more"
    mesh = init_device_mesh("cpu", (rank.world_size,))
    found: dict[str, Any] = {"ranks": rank.world_size, "parameters": len(names()), "torch": torch.__version__}
    for kind in ("plain", "split"):
        tensors: dict[str, Tensor] = {}
        shards = {}
        for name in names():
            whole = torch.zeros(16, 16)
            tensor = distribute_tensor(whole, mesh, [Shard(0)]) if kind == "split" else whole
            local = tensor.to_local() if kind == "split" else tensor
            shards[name] = ParamShard(nn.Parameter(local), tensor if kind == "split" else None)
            tensors |= {
                f"model/{name}": tensor,
                f"optim/{name}/exp_avg": tensor.clone(),
                f"optim/{name}/exp_avg_sq": tensor.clone(),
            }
            tensors[f"optim/{name}/step"] = torch.zeros(())
        every = json.dumps(parameter_table._described(tensors, {}))
        table = parameter_table.gather_tensors(tensors, rank.rank, rank.control)
        wanted = {name: row.shape for name, row in table.items()}
        saved = {name: (row.shape, [((0,) * len(row.shape), row.shape)]) for name, row in table.items()}
        cache = TableCache(rank.rank, rank.control)
        cache.of(tensors, {})
        found[kind] = {
            "tensors": len(tensors),
            "bytes_sent": len(every),
            "at_start": measured(lambda: gather_parameters(shards, rank), rank.control),  # noqa: B023
            "first_save": measured(lambda: TableCache(rank.rank, rank.control).of(tensors, {}), rank.control),  # noqa: B023
            "each_save": measured(lambda: cache.of(tensors, {}), rank.control),  # noqa: B023
            "commit": measured(lambda: coverage.uncovered(wanted, saved), rank.control),  # noqa: B023
        }
        if rank.first:
            begun = time.perf_counter()
            # Of split tensors every rank's text differs by its boxes; of plain ones all are the same, and parsed once.
            copies = 256 if kind == "split" else 1
            texts = [every.replace(":8,16", f":{8 + i},16") for i in range(copies)]
            parsed = [json.loads(text) for text in texts]
            parameter_table._joined(parsed * (256 // copies))
            found[kind]["joined_256"] = round(1e3 * (time.perf_counter() - begun), 1)
        dist.barrier(group=rank.control)
    if rank.first:
        found["cores"] = os.cpu_count()
        text = json.dumps(found, indent=2)
        print(text)
        if options.out:
            options.out.write_text(text + "\n")
    distributed.stop(rank)


if __name__ == "__main__":
    main()

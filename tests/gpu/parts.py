"""Trains with virtual ranks: the jobs of test_virtual_ranks.py. As a program, one of several ranks that share the device:

    python -m tests.gpu.parts RANK WORLD FOLDER

NCCL refuses two ranks on one GPU: see staged.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raydist.spec import JobSpec
from raydist.worker import distributed
from raydist.worker.distributed import Rank
from tests.gpu import staged
from tests.gpu.device import CUDA, DEVICE, Trainer, job

PARTS = 4
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, bf16": {"precision": "bf16"},
    "ddp, small buckets": {"parallel": {"bucket_mb": 0.2}},
    "zero1": {"parallel": {"strategy": "zero1"}},
    "zero2, bf16": {"precision": "bf16", "parallel": {"strategy": "zero2"}},
    "zero3": {"parallel": {"strategy": "zero3"}},
    "optimizer in host memory": {"offload": {"optimizer": "cpu"}},
}
"""Sections of each job."""
PLAIN = {"ddp, small buckets": "ddp", "zero1": "ddp", "zero3": "ddp", "zero2, bf16": "ddp, bf16"}
"""Jobs whose bits on one rank are those of another job."""


def spec_of(case: str, world: int) -> JobSpec:
    """Two micro-batches a part, of one sample each; dropout, and clipping in every step."""
    train = {"micro_batch": 1, "virtual_ranks": PARTS}
    sections = {"optim": {"lr": 1e-3, "eps": 1e-6, "clip": 0.1}, "cluster": {"workers": world}, **CASES[case]}
    return job(train=train, model={"dropout": 0.1}, **sections)


def trained(case: str, rank: Rank | None = None) -> dict[str, Any]:
    """Loss and norm of each step in all their digits, and a hash of the weights of this rank, which are whole but for zero3's."""
    torch.set_num_threads(1)  # ranks share the cores
    trainer = Trainer(spec_of(case, rank.world_size if rank else 1), DEVICE, rank)
    try:
        found = [[report.loss.hex(), report.grad_norm.hex()] for report in trainer(3)]
        digest = hashlib.blake2b(digest_size=12)
        trainer.strategy.gather() if hasattr(trainer.strategy, "gather") else None
        for name, p in trainer.model.named_parameters():
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            digest.update(name.encode() + whole.detach().cpu().contiguous().numpy().tobytes())
        return {"steps": found, "weights": digest.hexdigest()}
    finally:
        if hasattr(trainer.optimizer, "close"):
            trainer.optimizer.close()


def main(number: int, world: int, folder: Path) -> None:
    """All jobs, one after another; their results go to a file."""
    if CUDA:
        torch.cuda.set_device(DEVICE)
    distributed.be_deterministic()
    store = dist.FileStore(str(folder / "store"), world)
    staged.register()
    dist.init_process_group(staged.NAME, store=store, rank=number, world_size=world, timeout=timedelta(minutes=3))
    rank = Rank(number, world, 0, DEVICE, staged.NAME, "127.0.0.1", dist.new_group(backend="gloo"), ())
    found = {case: trained(case, rank) for case in CASES}
    (folder / f"rank-{number}.json").write_text(json.dumps(found))
    dist.barrier(group=rank.control)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

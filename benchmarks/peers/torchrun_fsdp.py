"""Plain PyTorch under torchrun: FSDP2 on gloo. Arguments: out, t0 (see peer_model.meter), and zero3 (blocks resharded
after forward) or zero2 (not).
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from peer_model import GPT, meter, train
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT(meter(*sys.argv[1:3]))
for block in model.blocks:
    fully_shard(block, reshard_after_forward=sys.argv[3] == "zero3")
fully_shard(model, reshard_after_forward=sys.argv[3] == "zero3")
train(model, dist.get_rank())
dist.barrier()
dist.destroy_process_group()

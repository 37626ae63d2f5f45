"""Plain PyTorch under torchrun: DDP on gloo. Arguments: out, t0 (see peer_model.meter)."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from peer_model import GPT, meter, train
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
train(DistributedDataParallel(GPT(meter(*sys.argv[1:3]))), dist.get_rank())
dist.barrier()
dist.destroy_process_group()

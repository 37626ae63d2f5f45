"""Plain PyTorch under torchrun: DDP on gloo. Arguments: out, t0."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from peer_model import GPT, Meter, train
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
train(DistributedDataParallel(GPT(Meter(sys.argv[1], float(sys.argv[2])))), dist.get_rank())
dist.barrier()
dist.destroy_process_group()

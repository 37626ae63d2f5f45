"""DeepSpeed under torchrun, on its CPU accelerator and gloo. Arguments: out, t0 (see peer_model.meter), and zero2 or
zero3.

With torch's AdamW, so that no operator is compiled, and without clipping (DeepSpeed's default is 1.0).
"""

from __future__ import annotations

import itertools
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from peer_model import BATCH, ENDLESS, GPT, batches, meter
from torch.nn import functional as F

torch.set_num_threads(1)
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = GPT(meter(*sys.argv[1:3]))
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "steps_per_print": 10**9,
    "zero_optimization": {"stage": int(sys.argv[3][-1]), "overlap_comm": False},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
made = batches(dist.get_rank())
for tokens_BT, targets_BT in itertools.cycle(made) if sys.argv[2] == ENDLESS else made:
    loss = F.cross_entropy(engine(tokens_BT).flatten(0, 1), targets_BT.flatten())
    engine.backward(loss)
    engine.step()
dist.barrier()
dist.destroy_process_group()

"""A user's own loop on raydist's ranks. Arguments: its steps, and what happens to rank 1.

killed MARKS: SIGKILL, once, in the data of a step after the file `go` is in that folder; then it hangs, once, in step 350.
raises: an exception in step 3. leaves: it leaves its loop in step 3. sound: nothing. Each time the collectives of the first
backward pass must be told from others, so that waits for them count as exposed communication.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import raydist.own as rd
from raydist.launch import script

steps, what, marks = int(sys.argv[1]), sys.argv[2], Path(sys.argv[-1])
torch.manual_seed(3)
x = torch.randn(1003, 6)
data = torch.utils.data.TensorDataset(torch.arange(1003), x, x.sum(1, keepdim=True).sin())
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def once(name: str) -> bool:
    """Whether this is the first call with that name, over all processes."""
    mark = marks / name
    if mark.exists():
        return False
    mark.touch()
    return True


counters, within = script.current.telemetry._comm, []
with rd.session(model, optimizer, data, steps=steps, batch=10, micro_batch=3, every=1000, clip=1.0) as s:
    second = s.rank.rank == 1
    for _, features, wanted in s:
        if second and s.number == 3 and what == "raises":
            raise ValueError("a bug")
        if second and s.number == 3 and what == "leaves":
            break
        if second and s.number == 350 and what == "killed" and once("hung"):
            threading.Event().wait()
        error = (s.model(features) - wanted).square().mean()
        if s.number == 1:
            error.register_hook(lambda grad: within.append(counters._backward is not None))
        s.backward(error, weight=len(features))
        assert all(within)
        if s.step() and second and what == "killed" and s.number >= 20:
            while s.number == 300 and not (marks / "go").exists():
                time.sleep(0.02)  # the test waits for a copy in memory
            if (marks / "go").exists() and once("killed"):
                os.kill(os.getpid(), signal.SIGKILL)

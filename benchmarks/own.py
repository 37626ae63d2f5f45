"""Tokens/s of a session of raydist.own over those of a plain torchrun script, in one interleaved run.

    python benchmarks/own.py [--steps 60] [--strategy ddp] [--keep]

Two gloo ranks of one thread each hold both at once: the session's loop, and a second model under DDP with a DataLoader, a
DistributedSampler and AdamW, as torch's tutorial has it. Each round makes a step of either, in a new order, of the same GPT and as
many tokens. Both clip the gradient; the session also records the step and checks that all ranks are there. The figures are medians
of the rounds' ratios, in wall time and in processor time of the process, whose mean over the ranks counts. A busy machine disturbs
the wall time more. `import_s`: processor seconds of `import raydist` and of its first call in a process, above those of an empty
one. `--keep` writes results/own.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.multiprocessing as mp
from common import write
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import raydist.own as rd
from raydist.spec import JobSpec
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.model import gpt

WORLD, VOCAB, BATCH, CONTEXT = 2, 2048, 8, 128
WARM = 4
"""Rounds before the first that counts."""


def model() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"layers": 4, "width": 256, "heads": 4, "context": CONTEXT}
    spec = JobSpec.model_validate({"data": {"source": "any"}, "train": {"steps": 1}, "model": sizes})
    return gpt.build(spec.model, VOCAB)


def loss_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """tokens [B, T + 1] -> the mean loss."""
    return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def plain_steps(dataset: TensorDataset) -> Iterator[None]:
    """A step each time. Within a session, whose process group it uses."""
    made = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=BATCH // WORLD, sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            loss_of(made, tokens).backward()
            clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield
        epoch += 1


def session_steps(s: rd.Session) -> Iterator[None]:
    for (tokens,) in s:
        s.backward(loss_of(s.model, tokens), weight=len(tokens))
        s.step()
        yield


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds: wall, processor."""
    wall, processor = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - processor


def imported(code: str) -> float:
    """Processor seconds of a process with this code, the median of nine."""
    found = []
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(found)


def main(number: int, port: int, rounds: int, strategy: str, storage: str, keep: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    tokens = torch.randint(VOCAB, (512, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(tokens)
    ours = model()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    steps = rounds + WARM
    with rd.session(
        ours, optimizer, dataset, steps=steps, batch=BATCH, clip=1.0, strategy=strategy, storage=storage, every=steps
    ) as s:
        both = {"session": session_steps(s), "plain": plain_steps(dataset)}
        order = random.Random(0)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
        for _ in range(steps):
            for name in order.sample([*both], 2):
                times[name].append(timed(lambda steps=both[name]: next(steps)))
        every = gather_json(
            {name: found[WARM:-1] for name, found in times.items()}, s.rank.control
        )  # the last one saves
        next(both["session"], None)
    if number:
        return
    figures: dict[str, Any] = {}
    for place, clock in enumerate(("wall", "processor")):
        means = {name: [statistics.mean(r[name][i][place] for r in every) for i in range(rounds - 1)] for name in both}
        ratios = [p / o for p, o in zip(means["plain"], means["session"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures[clock] = {
            "tokens_per_s_over_plain": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)],
            "seconds": {name: round(statistics.median(found), 5) for name, found in means.items()},
        }  # fmt: skip
    empty, codes = imported("pass"), {"raydist": "import raydist", "raydist.train": "import raydist; raydist.train"}
    imports = {name: round(max(imported(code) - empty, 0.0), 3) for name, code in codes.items()}
    result = {"rounds": rounds - 1, "ranks": WORLD, "strategy": strategy, **figures, "import_s": imports}
    print(json.dumps(result, indent=1))
    if keep:
        write("own", result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    with socket.socket() as probe, tempfile.TemporaryDirectory() as storage:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        mp.spawn(main, (port, given.steps, given.strategy, storage, given.keep), nprocs=WORLD)

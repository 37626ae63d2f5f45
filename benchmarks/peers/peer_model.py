"""The model that every peer trains. Its forward records the time, so all peers are measured in the same way.

A 4-layer GPT of 3.4M parameters (width 256, sequence 128, vocabulary 512). `model.name: peer_model:build`
calls `build`; plain scripts construct `GPT` directly.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, SEQUENCE, BATCH, VOCAB = 4, 256, 4, 128, 8, 512
WARM, STEPS = 6, int(os.environ.get("PEER_STEPS", "100"))
ENDLESS = "-"
"""Instead of t0: forwards are only logged, for an unlimited number of steps."""


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """x_BTD -> x_BTD."""
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(self.norm_1(x_BTD)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    """The model. With `meter`, each training forward of a whole batch is recorded."""

    def __init__(self, meter: Meter | Trace | None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.meter = meter
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """tokens_BT -> logits_BTV."""
        if self.meter and self.training and len(tokens_BT) == BATCH:
            self.meter.tick()
        x_BTD = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class Meter:
    """Times from one forward to the next, which is one step; written to `out` after WARM + STEPS steps.

    `t0`: Unix time of the command's start. The second forward marks the end of the first step.
    """

    def __init__(self, out: str, t0: float) -> None:
        self.out, self.t0 = out, t0
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.first_step = 0.0

    def tick(self) -> None:
        """Called at the start of each forward."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        if len(self.wall) == 2:
            self.first_step = time.time() - self.t0
        if len(self.wall) == WARM + STEPS + 1:
            steps = sorted(b - a for a, b in zip(self.wall[WARM:], self.wall[WARM + 1 :], strict=False))
            with open("/proc/self/status") as status:
                rss = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
            result = {
                "step_ms": steps[len(steps) // 2] * 1e3,
                "cpu_ms": (self.cpu[-1] - self.cpu[WARM]) / STEPS * 1e3,
                "first_step_s": self.first_step,
                "rss_mb": rss,
            }
            path = f"{self.out}.{os.environ.get('RANK', '0')}.json"
            with open(path + ".part", "w") as file:
                json.dump(result, file)
            os.replace(path + ".part", path)


class Trace:
    """For steady.py and recovery.py in benchmarks/: appends time and pid of each forward to OUT.RANK.forwards."""

    def __init__(self, out: str) -> None:
        self.fd = os.open(f"{out}.{os.environ.get('RANK', '0')}.forwards", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tick(self) -> None:
        """Called at the start of each forward."""
        os.write(self.fd, f"{time.time():.6f} {os.getpid()}\n".encode())


def build(model: Any, vocab_size: int) -> GPT:
    """The model for raydist. `options`: `out`, and `t0` for a Meter."""
    if "t0" not in model.options:
        return GPT(Trace(model.options["out"]))
    return GPT(Meter(model.options["out"], float(model.options["t0"])))


def meter(out: str, t0: str) -> Meter | Trace:
    """The meter for plain scripts, from their arguments."""
    return Trace(out) if t0 == ENDLESS else Meter(out, float(t0))


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets of all steps, generated in advance."""
    g = torch.Generator().manual_seed(99 + rank)
    texts = [torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=g) for _ in range(WARM + STEPS + 2)]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in texts]


def train(model: nn.Module, rank: int) -> None:
    """The plain loop: forward, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    made = batches(rank)
    endless = any(isinstance(getattr(module, "meter", None), Trace) for module in model.modules())
    for tokens_BT, targets_BT in itertools.cycle(made) if endless else made:
        loss = F.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

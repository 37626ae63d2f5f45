"""A small GPT on one text, in the style of nanoGPT's train.py: random windows, a cosine rate with warm-up, AdamW in two groups."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import raydist.own as rd

STEPS, BATCH, BLOCK = 20, 16, 32
WIDTH, HEADS, LAYERS = 32, 2, 2
PEAK, WARMUP = 1e-2, 4


class Block(nn.Module):
    """Causal attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, WIDTH] -> the same."""
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.ln_1(x)).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Embedding and head share their weights."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """[B, T] each -> the mean loss."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def get_lr(step: int) -> float:
    """A linear warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return PEAK * (0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


torch.manual_seed(0)
text = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
windows = data.unfold(0, BLOCK + 1, 1)
model = GPT(len(letters))
decay = [p for p in model.parameters() if p.dim() >= 2]
other = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=PEAK)

with rd.session(model, optimizer, windows, steps=STEPS, batch=BATCH, clip=1.0, name="gpt") as s:
    for step, batch in enumerate(s, s.number):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        loss = model(batch[:, :-1], batch[:, 1:])
        s.backward(loss, weight=len(batch))
        s.step()
        print(f"loss {loss.item():.4f}")

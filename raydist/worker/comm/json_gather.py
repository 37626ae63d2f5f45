"""Gathers plain values from all ranks as JSON in bytes: a rank parses what another rank sent, and never unpickles it.

Runs in: each train worker. Torch, never ray. torch's `all_gather_object` unpickles, so whoever reaches the port can run code.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's `value`, by rank, on every rank. A collective of `group`, which carries CPU tensors; None: one rank.

    `value`: None, bools, numbers, strings, lists, and dicts with string keys. Tuples come back as lists.
    Sends the lengths, then the bytes, padded to the longest.
    """
    data = json.dumps(value, separators=(",", ":")).encode()
    if group is None:
        return [json.loads(data)]
    world_size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    sent = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
    received = [torch.empty(longest, dtype=torch.uint8) for _ in range(world_size)]
    dist.all_gather(received, sent, group=group)
    parsed: dict[bytes, Any] = {}  # ranks often send the same: parsed once, and shared
    every = []
    for bytes_of_rank, length in zip(received, lengths, strict=True):
        text = bytes_of_rank[: int(length)].numpy().tobytes()
        if text not in parsed:
            parsed[text] = json.loads(text)
        every.append(parsed[text])
    return every

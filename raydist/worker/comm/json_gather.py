"""Sends plain values between ranks as JSON in bytes: a rank parses what another rank sent, and never unpickles it.

Runs in: each train worker. Torch, never ray. torch's `all_gather_object` and its like unpickle, so whoever reaches the port can
run code. A group carries CPU tensors; None is a group of one rank.

A value: None, bools, numbers, strings, lists, and dicts with string keys. Tuples come back as lists.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST_BYTES = 1 << 30
"""The longest value in bytes. A length comes from the network, and memory is allocated for it."""


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's `value`, by rank, on every rank. A collective. Sends the lengths, then the bytes, padded to the longest."""
    data = _encoded(value)
    if group is None:
        return [json.loads(data)]
    lengths = _lengths(data, group)
    received = [torch.empty(max(lengths), dtype=torch.uint8) for _ in lengths]
    dist.all_gather(received, _padded(data, max(lengths)), group=group)
    return _decoded(received, lengths)


def gather_json_on_first(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """Every rank's `value`, by rank, on rank 0 of the group; None on the others. A collective."""
    data = _encoded(value)
    if group is None:
        return [json.loads(data)]
    lengths = _lengths(data, group)
    first = dist.get_rank(group) == 0
    received = [torch.empty(max(lengths), dtype=torch.uint8) for _ in lengths] if first else None
    dist.gather(_padded(data, max(lengths)), received, group=group, group_dst=0)
    return None if received is None else _decoded(received, lengths)


def broadcast_json(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The `value` of rank 0 of the group, on every rank. A collective. The other ranks' `value` is ignored."""
    if group is None:
        return json.loads(_encoded(value))
    data = _encoded(value) if dist.get_rank(group) == 0 else b""
    length = torch.tensor([len(data)])
    dist.broadcast(length, group=group, group_src=0)
    buffer = _padded(data, _checked(int(length)))
    dist.broadcast(buffer, group=group, group_src=0)
    return json.loads(buffer.numpy().tobytes())


def _encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _padded(data: bytes, length: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(length)), dtype=torch.uint8)


def _lengths(data: bytes, group: dist.ProcessGroup) -> list[int]:
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    return [_checked(int(length)) for length in lengths]


def _checked(length: int) -> int:
    if not 0 < length <= MOST_BYTES:
        raise ConnectionError(f"a rank sent a value of {length} bytes: not 1 to {MOST_BYTES:,}")
    return length


def _decoded(received: list[Tensor], lengths: list[int]) -> list[Any]:
    parsed: dict[bytes, Any] = {}  # ranks often send the same: parsed once, and shared
    every = []
    for bytes_of_rank, length in zip(received, lengths, strict=True):
        text = bytes_of_rank[:length].numpy().tobytes()
        if text not in parsed:
            parsed[text] = json.loads(text)
        every.append(parsed[text])
    return every

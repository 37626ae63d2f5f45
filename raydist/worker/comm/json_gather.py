"""Sends plain values between ranks as JSON in bytes: a rank parses what another rank sent, and never unpickles it.

Runs in: each train worker. Torch, never ray. torch's `all_gather_object` and its like unpickle, so a process that reaches the port
can run code. A group carries CPU tensors; None is a group of one rank.

Each message has its hash, so one that was damaged on its way is an error and not another value.

A value: None, bools, numbers, strings, lists, and dicts with string keys. Tuples come back as lists.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

MOST_BYTES = 1 << 30
"""The longest value in bytes. A length comes from the network, and memory is allocated for it."""


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's `value`, by rank, on every rank. A collective. Sends lengths and hashes, then the padded bytes."""
    data = _encoded(value)
    if group is None:
        return [json.loads(data)]
    heads = _heads(data, group)
    longest = max(length for length, _ in heads)
    received = [torch.empty(longest, dtype=torch.uint8) for _ in heads]
    dist.all_gather(received, _padded(data, longest), group=group)
    return _decoded(received, heads)


def gather_json_on_first(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """Every rank's `value`, by rank, on rank 0 of the group; None on the others. A collective."""
    data = _encoded(value)
    if group is None:
        return [json.loads(data)]
    heads = _heads(data, group)
    longest = max(length for length, _ in heads)
    first = dist.get_rank(group) == 0
    received = [torch.empty(longest, dtype=torch.uint8) for _ in heads] if first else None
    dist.gather(_padded(data, longest), received, group=group, group_dst=0)
    return None if received is None else _decoded(received, heads)


def broadcast_json(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The `value` of rank 0 of the group, on every rank. A collective. The other ranks' `value` is ignored."""
    if group is None:
        return json.loads(_encoded(value))
    data = _encoded(value) if dist.get_rank(group) == 0 else b""
    head = _head(data)
    dist.broadcast(head, group=group, group_src=0)
    length, hashed = _checked(head)
    buffer = _padded(data, length)
    dist.broadcast(buffer, group=group, group_src=0)
    return json.loads(_verified(buffer.numpy().tobytes(), hashed, 0))


def _encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _padded(data: bytes, length: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(length)), dtype=torch.uint8)


def _head(data: bytes) -> Tensor:
    """Length and hash."""
    return torch.tensor([len(data), xxhash.xxh3_64_intdigest(data) - (1 << 63)])


def _heads(data: bytes, group: dist.ProcessGroup) -> list[tuple[int, int]]:
    heads = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(heads, _head(data), group=group)
    return [_checked(head) for head in heads]


def _checked(head: Tensor) -> tuple[int, int]:
    length, hashed = head.tolist()
    if not 0 < length <= MOST_BYTES:
        raise ConnectionError(f"a rank sent a value of {length} bytes: not 1 to {MOST_BYTES:,}")
    return length, hashed + (1 << 63)


def _verified(data: bytes, hashed: int, rank: int) -> bytes:
    """The data, if it has that hash: TCP's checksum misses one of 65,536 errors. Raises ConnectionError."""
    if xxhash.xxh3_64_intdigest(data) != hashed:
        raise ConnectionError(f"a value of rank {rank} of the group was damaged on its way: hash mismatch")
    return data


def _decoded(received: list[Tensor], heads: list[tuple[int, int]]) -> list[Any]:
    parsed: dict[bytes, Any] = {}  # ranks often send the same: parsed once, and shared
    every = []
    for rank, (bytes_of_rank, (length, hashed)) in enumerate(zip(received, heads, strict=True)):
        text = _verified(bytes_of_rank[:length].numpy().tobytes(), hashed, rank)
        if text not in parsed:
            parsed[text] = json.loads(text)
        every.append(parsed[text])
    return every

"""Pins memory for CUDA where it is: torch's own allocator would round up to a power of two, which may be twice as much.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


def pin(memory: Tensor, device: torch.device) -> int:
    """Pins whole pages until the tensor is freed. Returns 0, or CUDA's error code. No page may be pinned twice."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    if not code:
        weakref.finalize(memory, _unpin, memory.data_ptr(), device).atexit = False
    return code


def _unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # no copy may be under way
    with torch.cuda.device(device):  # a finalizer runs in any thread
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

"""Storage of exp_avg and exp_avg_sq, and passes over them in chunks: in memory, or in a file through a few buffers.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from raydist.worker.optim.offload.hostcopy import host_zeros
from raydist.worker.optim.offload.layout import Layout
from raydist.worker.optim.offload.swapfile import SwapFile

BUFFERS = 4
"""Chunks of a file in memory: one is updated, one is written, and two are read ahead."""


class Moments(Protocol):
    """A pass is: `start`, then `get` and `put` for each chunk of its plan in turn, then `finish`. One thread at a time."""

    def tensors(self, start: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Both moments of the parameter whose values start at `start`: the state itself, not a copy."""

    def start(self, plan: Sequence[int]) -> None:
        """Begins a pass over these chunks. Continues a pass with the same plan that has begun, if `get` was not called yet.

        Until `finish`, no other code may write the state.
        """

    def get(self) -> tuple[Tensor, Tensor]:
        """The plan's next chunk of both moments, to be updated in place."""

    def put(self) -> None:
        """The chunk from `get` has its new values."""

    def finish(self) -> None:
        """Returns when all chunks from `put` are stored. Raises StorageError."""

    def cancel(self) -> None:
        """Drops the pass that has begun."""

    def close(self) -> None:
        """Releases threads and files; `tensors` are valid as long as there are references to them."""


class InMemory:
    """Two flat arrays on the host; `device`: pinned for copies to it."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._size = layout.size
        self._arrays = host_zeros(layout.total, device), host_zeros(layout.total, device)
        self._plan: list[int] = []

    def tensors(self, start: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """See Moments."""
        first, second = (a[start : start + shape.numel()].view(shape) for a in self._arrays)
        return first, second

    def start(self, plan: Sequence[int]) -> None:
        """See Moments."""
        self._plan = list(plan)[::-1]

    def get(self) -> tuple[Tensor, Tensor]:
        """See Moments."""
        chunk = self._plan.pop() * self._size
        first, second = (a[chunk : chunk + self._size] for a in self._arrays)
        return first, second

    def put(self) -> None:
        """Nothing to do."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def cancel(self) -> None:
        """See Moments."""
        self._plan = []

    def close(self) -> None:
        """Nothing to release: memory is freed with the last reference."""


class InFile:
    """A swap file in `folder`: exp_avg of all parameters, then exp_avg_sq.

    A buffer in a pass: a thread reads a chunk into it; `get`, the update, `put`; a thread writes it, and then reads the chunk that
    is BUFFERS further on into it. So several reads and writes are in progress at any time. An error of a thread is raised by the
    `get` or `finish` that needs the chunk. Raises UserError if the folder or its disk is unusable.
    """

    def __init__(self, layout: Layout, folder: str, tag: str) -> None:
        self._bytes, self._chunk = layout.total * 4, layout.size * 4
        self._file = SwapFile(folder, 2 * self._bytes, tag)
        # Private, because shared memory does not get huge pages. Aligned to pages, as O_DIRECT needs it.
        memory = mmap.mmap(-1, BUFFERS * 2 * self._chunk, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory, self._floats = memoryview(memory), torch.frombuffer(memory, dtype=torch.float32)
        self._threads = ThreadPoolExecutor(BUFFERS, thread_name_prefix="raydist-swap")
        self._plan: list[int] = []
        self._ready: dict[int, Future[None]] = {}
        self._next = 0

    def tensors(self, start: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """See Moments."""
        return self._file.tensor(start * 4, shape), self._file.tensor(self._bytes + start * 4, shape)

    def start(self, plan: Sequence[int]) -> None:
        """See Moments. Begins to read."""
        self._file.sync()  # writes a restore's changes to the file, and frees pages that a checkpoint has read
        if self._plan == list(plan) and self._next == 0:
            return
        self.cancel()
        self._plan = list(plan)
        for index in range(min(BUFFERS, len(plan))):
            self._turn(index, None)

    def get(self) -> tuple[Tensor, Tensor]:
        """See Moments. Raises StorageError."""
        self._ready.pop(self._next).result()
        first, second = (self._floats[m.start // 4 : m.stop // 4] for m, _ in self._spans(self._next))
        return first, second

    def put(self) -> None:
        """See Moments."""
        self._turn(self._next + BUFFERS, self._next)
        self._next += 1

    def finish(self) -> None:
        """See Moments."""
        assert self._next == len(self._plan), "chunks of the pass are left"
        for future in self._ready.values():
            future.result()
        self.cancel()

    def cancel(self) -> None:
        """See Moments."""
        for future in self._ready.values():
            future.exception()  # waits
        self._plan, self._ready, self._next = [], {}, 0

    def close(self) -> None:
        """See Moments."""
        self._threads.shutdown(cancel_futures=True)  # waits
        self._file.close()

    def _turn(self, read: int, write: int | None) -> None:
        """In the background: writes the plan's chunk number `write`, then reads number `read` into its buffer, if there is one."""

        def work() -> None:
            for memory, offset in () if write is None else self._spans(write):
                self._file.write(self._memory[memory], offset)
            for memory, offset in () if read >= len(self._plan) else self._spans(read):
                self._file.read(self._memory[memory], offset)

        self._ready[read] = self._threads.submit(work)

    def _spans(self, index: int) -> tuple[tuple[slice, int], tuple[slice, int]]:
        """For both moments of the plan's chunk number `index`: the slice in memory, and the offset in the file, in bytes."""
        offset = self._plan[index] * self._chunk
        length = min(self._chunk, self._bytes - offset)
        first = index % BUFFERS * 2 * self._chunk
        second = first + self._chunk
        return (slice(first, first + length), offset), (slice(second, second + length), self._bytes + offset)

"""Copies a rank's part of the state into a buffer, while the next forward and backward pass run.

Runs in: each train worker. Torch, never ray.

The buffer is allocated once and kept: a copy into fresh memory is mostly page faults (1.1 GiB: 6.2 s against 0.17 s).
It has the layout of the shard, which is the buffer written to a file.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from raydist.worker.checkpoint.save_plan import Part, aligned
from raydist.worker.distributed import use_device
from raydist.worker.pinned import pin


class Stage:
    """A kept buffer in host memory. `device`: of the state; for CUDA the buffer is pinned.

    One thread uses it at a time; `ready` and `hold_update` are for the thread that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._layout: list[tuple[int, int]] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.unpinned = ""
        """Why the buffer is not pinned, if it is not and nobody has said so yet."""
        self._before: torch.cuda.Event | None = None
        self._after: torch.cuda.Event | None = None

    @property
    def memory(self) -> memoryview:
        """The buffer's bytes."""
        return memoryview(self._buffer.numpy())  # type: ignore[arg-type]

    def reserve(self, nbytes: int) -> None:
        """The side thread, first: allocates and touches every page. Slow the first time; does nothing afterwards."""
        use_device(self.device)
        if nbytes > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old buffer before the new one is allocated
            self._buffer = _pages(nbytes)
            if self._stream:
                self.pin_buffer()

    def pin_buffer(self) -> None:
        """Where CUDA refuses, copies are slower, and training waits for them."""
        if code := pin(self._buffer, self.device):
            self.unpinned = (
                f"{self._buffer.nbytes:,} bytes for copies of the state could not be pinned (CUDA error {code}): each copy stops "
                "training for several times as long; look at the limits of the container or of the account"
            )

    def tell(self, say: Callable[..., None]) -> None:
        """Calls `say` once, with an event's kind and text, if the buffer could not be pinned."""
        if self.unpinned:
            say("note", text=self.unpinned)
            self.unpinned = ""

    def ready(self) -> None:
        """The training thread: kernels launched on its stream before this call are part of the state to copy."""
        if self._stream:
            self._before = torch.cuda.current_stream(self.device).record_event()

    def copy(self, parts: Sequence[Part]) -> None:
        """The side thread: copies all parts. From CUDA it only enqueues the copies; `finish` waits for them."""
        self.reserve(aligned(parts[-1].start + parts[-1].length) if parts else 0)
        layout = [(p.start, p.length) for p in parts]
        if layout != self._layout:
            # The bytes between the parts are part of the file: zeros, not data of an earlier layout.
            self._buffer.zero_()
            self._layout = layout
        if self._stream is None:
            for part in parts:
                self.view(part).copy_(part.source)
            return
        assert self._before is not None, "ready() comes first"
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._before)
            for part in parts:
                self.view(part).copy_(part.source, non_blocking=True)
            self._after = self._stream.record_event()

    def hold_update(self) -> None:
        """The training thread, after `copy` has returned: kernels that it launches from now on wait for the copies."""
        if self._after is not None:
            torch.cuda.current_stream(self.device).wait_event(self._after)

    def finish(self) -> None:
        """The side thread: returns once all copies are done."""
        if self._after is not None:
            self._after.synchronize()

    def view(self, part: Part) -> Tensor:
        """A part's place in the buffer, with its dtype and shape."""
        flat = self._buffer[part.start : part.start + part.length]
        return flat.view(part.source.dtype).view(part.source.shape)


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """The CUDA device that some of the tensors are on, or the CPU."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors.values())
    return next((t.device for t in local if t.device.type == "cuda"), torch.device("cpu"))


def _pages(nbytes: int) -> Tensor:
    """Zeroed, touched memory, in huge pages if the kernel has them: 512 times fewer faults, and for O_DIRECT fewer pages.

    Private: the kernel treats a shared mapping as a file, and mostly gives it small pages.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).zero_()

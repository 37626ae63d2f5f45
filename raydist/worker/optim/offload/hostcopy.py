"""Parameters and gradients of a device in host memory, chunk by chunk, and their way there and back.

Runs in: each train worker. Torch, never ray.

    compute stream   backward ......................... | next forward ...
    down stream          gradients, as they become final |  ^ waits for the last new value
    host                                                  update chunk 0 | update chunk 1 | ...
    up stream                                                            new values of 0 | of 1 ...

Nobody waits for the device but the host for gradients that it is about to use. On a device that is not CUDA the copies are plain.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from raydist.errors import UserError
from raydist.worker.optim.offload.layout import Layout

WINDOW = 4
"""Chunks on their way at once, where the host keeps no copy of all."""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device

Pairs = Iterable[tuple[Tensor, Tensor]]


def host_zeros(count: int, device: torch.device) -> Tensor:
    """`count` fp32 zeros in host memory, pinned for CUDA. Raises UserError if that much cannot be pinned.

    Pinned in place: torch's own allocator would round up to a power of two, which may be twice as much.
    """
    if device.type != "cuda" or not count:
        return torch.zeros(count)
    # Whole pages of its own: none may be pinned twice.
    pages = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    zeros = torch.frombuffer(pages, dtype=torch.float32)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(zeros.data_ptr(), zeros.nbytes, _PORTABLE))
    if code:
        raise UserError(
            f"offload.optimizer: {zeros.nbytes:,} bytes of host memory could not be pinned (CUDA error {code})",
            "allow more locked memory (ulimit -l), or set offload.optimizer: nvme",
        )
    weakref.finalize(zeros, _unpin, zeros.data_ptr(), device).atexit = False
    return zeros


def _unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # no copy may be under way
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class HostCopy:
    """Host memory beside these parameters. A pass is: `start`, then (`get`, `put`) for each chunk of its plan, `finish`.

    `keep`: the host holds all parameters, a master copy that is read from the device only when something else has changed
    them there, and all gradients, so that these can come early (`gradients_final`). Else a few chunks of both, which come and
    go with their state.
    """

    def __init__(self, parameters: Sequence[Tensor], layout: Layout, device: torch.device, keep: bool) -> None:
        self._parameters, self._layout, self._device, self._keep = parameters, layout, device, keep
        self._slots = len(layout.chunks) if keep else min(len(layout.chunks), WINDOW)
        self._values = host_zeros(self._slots * layout.size, device)
        self._grads = host_zeros(self._slots * layout.size, device)
        cuda = device.type == "cuda"
        self._down = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._seen: dict[int, int] = {}  # of each parameter, the version that `_values` has
        self._final: dict[int, tuple[int, int]] = {}  # of each gradient that is here or on its way, which one it is
        self._plan: Sequence[int] = ()
        self._gradients: Mapping[int, Tensor] = {}
        self._down_for: set[int] = set()
        self._arrived: dict[int, torch.cuda.Event | None] = {}
        self._gone: dict[int, torch.cuda.Event | None] = {}

    def begin(self) -> None:
        """The last backward pass of a step begins: gradients that came before are another step's, weights stay as they are."""
        self._final.clear()
        if self._keep:
            self._follow()
            for number, first in self._layout.starts.items():
                value, version = self._flat(number), self._parameters[number]._version
                if self._seen.get(number) != version:
                    self._copy(self._down, [(self._values[first : first + value.numel()], value)])
                    self._seen[number] = version

    def gradients_final(self, gradients: Mapping[int, Tensor]) -> None:
        """Fetches these gradients, flat ones by parameter number, in the background. They may still be changed: see `start`."""
        if not self._keep:
            return
        self._follow()
        for number, gradient in gradients.items():
            if self._final.get(number) == _identity(gradient):
                continue  # told twice
            first = self._layout.starts[number]
            self._copy(self._down, [(self._grads[first : first + gradient.numel()], gradient)])
            if self._down is not None:
                gradient.record_stream(self._down)  # should the step be skipped, it is freed before it has been copied
            self._final[number] = _identity(gradient)

    def start(self, plan: Sequence[int], gradients: Mapping[int, Tensor]) -> None:
        """A pass over these chunks begins; their gradients, flat ones by parameter number, are final.

        Gradients that came early come again if they were changed since: scaled, for example.
        """
        self._plan, self._gradients = plan, gradients
        # A version counts the changes in place. Through `.data` a tensor can be changed past it: see docs/offload.md.
        self._down_for = {n for n in gradients if not self._keep or self._seen.get(n) != self._parameters[n]._version}
        self._final = {n: i for n, i in self._final.items() if n in gradients and i == _identity(gradients[n])}
        self._follow()
        for index in range(min(self._slots, len(plan))):
            self._fetch(index)

    def get(self, index: int) -> tuple[Tensor, Tensor]:
        """Values and gradients of the plan's chunk number `index`. Waits for their arrival."""
        event = self._arrived.pop(index)
        if event is not None:
            event.synchronize()
        place = self._place(index)
        return self._values[place], self._grads[place]

    def put(self, index: int) -> None:
        """That chunk has its new values: they go to the device, and another chunk may come in its place."""
        values = self._values[self._place(index)]
        pieces = [p for p in self._layout.chunks[self._plan[index]] if p.parameter in self._gradients]
        self._gone[index] = self._copy(self._up, [(self._flat(p.parameter)[p.there], values[p.here]) for p in pieces])
        if index + self._slots < len(self._plan):
            self._fetch(index + self._slots)

    def finish(self) -> None:
        """What is launched on the device from now on sees the new values. Does not wait for it."""
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)
        self._seen |= {n: self._parameters[n]._version for n in self._gradients}
        self._plan, self._gradients = (), {}
        self._gone.clear()
        self._final.clear()

    def _fetch(self, index: int) -> None:
        place = self._place(index)
        values, grads = self._values[place], self._grads[place]
        pairs = []
        for piece in self._layout.chunks[self._plan[index]]:
            number = piece.parameter
            if number in self._down_for:
                pairs.append((values[piece.here], self._flat(number)[piece.there]))
            if number in self._gradients and number not in self._final:
                pairs.append((grads[piece.here], self._gradients[number][piece.there]))
        self._arrived[index] = self._copy(self._down, pairs, after=self._gone.pop(index - self._slots, None))

    def _place(self, index: int) -> slice:
        slot = self._plan[index] if self._keep else index % self._slots
        return slice(slot * self._layout.size, (slot + 1) * self._layout.size)

    def _flat(self, number: int) -> Tensor:
        return self._parameters[number].detach().view(-1)

    def _follow(self) -> None:
        """Copies from the device come after what is launched on the current stream; so do those to it, for the host waits."""
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self._device))

    def _copy(
        self, stream: torch.cuda.Stream | None, pairs: Pairs, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """(to, from) pairs, on that stream, after that event. The event that they are done."""
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if stream is not None and after is not None:
                stream.wait_event(after)
            for to, source in pairs:
                to.copy_(source, non_blocking=stream is not None)
            return stream.record_event() if stream is not None else None


def _identity(gradient: Tensor) -> tuple[int, int]:
    return gradient.data_ptr(), gradient._version

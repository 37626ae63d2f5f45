"""Copies of a device's parameters and gradients in host memory, chunk by chunk, in both directions.

Runs in: each train worker. Torch, never ray.

    compute stream   backward ......................... | next forward ...
    down stream          gradients, as they become final |  ^ waits for the last new value
    host                                                  update chunk 0 | update chunk 1 | ...
    up stream                                                            new values of 0 | of 1 ...

The host waits for the device only for gradients that it needs next. On a device that is not CUDA the copies are synchronous.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from raydist.errors import UserError
from raydist.worker.optim.offload.layout import Layout
from raydist.worker.pinned import pin

WINDOW = 4
"""Chunks that are copied at once if the host does not keep copies of all."""

Pairs = Iterable[tuple[Tensor, Tensor]]


def host_zeros(count: int, device: torch.device) -> Tensor:
    """`count` fp32 zeros in host memory, pinned for CUDA. Raises UserError if that much cannot be pinned."""
    if device.type != "cuda" or not count:
        return torch.zeros(count)
    # Separate whole pages, because no page may be pinned twice.
    pages = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    zeros = torch.frombuffer(pages, dtype=torch.float32)
    if code := pin(zeros, device):
        raise UserError(
            f"offload.optimizer: {zeros.nbytes:,} bytes of host memory could not be pinned (CUDA error {code})",
            "allow more locked memory (ulimit -l), or set offload.optimizer: nvme",
        )
    return zeros


class HostCopy:
    """Host memory for copies of these parameters. A pass is: `start`, then (`get`, `put`) for each chunk of its plan, `finish`.

    `keep`: the host holds all parameters, which are copied from the device again only if other code has changed them there, and
    all gradients, so that these can be copied early (`gradients_final`). Otherwise it holds a few chunks of both at a time.
    """

    def __init__(self, parameters: Sequence[Tensor], layout: Layout, device: torch.device, keep: bool) -> None:
        self._parameters, self._layout, self._device, self._keep = parameters, layout, device, keep
        self._slots = len(layout.chunks) if keep else min(len(layout.chunks), WINDOW)
        self._values = host_zeros(self._slots * layout.size, device)
        self._grads = host_zeros(self._slots * layout.size, device)
        cuda = device.type == "cuda"
        self._down = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._seen: dict[int, int] = {}  # number of a parameter -> its version in `_values`
        self._final: dict[int, tuple[int, int]] = {}  # number of a gradient that is copied -> its identity
        self._plan: Sequence[int] = ()
        self._gradients: Mapping[int, Tensor] = {}
        self._down_for: set[int] = set()
        self._arrived: dict[int, torch.cuda.Event | None] = {}
        self._gone: dict[int, torch.cuda.Event | None] = {}

    def begin(self) -> None:
        """The last backward pass of a step begins: earlier gradients belong to another step; weights do not change any more."""
        self._final.clear()
        if self._keep:
            self._follow()
            for number, first in self._layout.starts.items():
                value, version = self._flat(number), self._parameters[number]._version
                if self._seen.get(number) != version:
                    self._copy(self._down, [(self._values[first : first + value.numel()], value)])
                    self._seen[number] = version

    def gradients_final(self, gradients: Mapping[int, Tensor]) -> None:
        """Copies these gradients, by parameter number and flat, in the background. They may still change: see `start`."""
        if not self._keep:
            return
        self._follow()
        for number, gradient in gradients.items():
            if self._final.get(number) == _identity(gradient):
                continue  # already copied
            first = self._layout.starts[number]
            self._copy(self._down, [(self._grads[first : first + gradient.numel()], gradient)])
            if self._down is not None:
                gradient.record_stream(self._down)  # if the step is skipped, it may be freed before the copy is done
            self._final[number] = _identity(gradient)

    def start(self, plan: Sequence[int], gradients: Mapping[int, Tensor]) -> None:
        """A pass over these chunks begins; their gradients, by parameter number and flat, are final.

        Gradients that were copied early are copied again if they have changed since: if they were scaled, for example.
        """
        self._plan, self._gradients = plan, gradients
        # A version counts changes in place. Changes through `.data` do not count: see docs/how-to/offload.md.
        self._down_for = {n for n in gradients if not self._keep or self._seen.get(n) != self._parameters[n]._version}
        self._final = {n: i for n, i in self._final.items() if n in gradients and i == _identity(gradients[n])}
        self._follow()
        for index in range(min(self._slots, len(plan))):
            self._fetch(index)

    def get(self, index: int) -> tuple[Tensor, Tensor]:
        """Values and gradients of the plan's chunk number `index`. Waits for the copies."""
        event = self._arrived.pop(index)
        if event is not None:
            event.synchronize()
        span = self._span(index)
        return self._values[span], self._grads[span]

    def put(self, index: int) -> None:
        """That chunk is updated: copies the new values to the device, and starts to fetch another chunk into its slot."""
        values = self._values[self._span(index)]
        pieces = [p for p in self._layout.chunks[self._plan[index]] if p.parameter in self._gradients]
        self._gone[index] = self._copy(self._up, [(self._flat(p.parameter)[p.there], values[p.here]) for p in pieces])
        if index + self._slots < len(self._plan):
            self._fetch(index + self._slots)

    def finish(self) -> None:
        """Kernels launched from now on see the new values. The host does not wait for them."""
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)
        self._seen |= {n: self._parameters[n]._version for n in self._gradients}
        self._plan, self._gradients = (), {}
        self._gone.clear()
        self._final.clear()

    def _fetch(self, index: int) -> None:
        span = self._span(index)
        values, grads = self._values[span], self._grads[span]
        pairs = []
        for piece in self._layout.chunks[self._plan[index]]:
            number = piece.parameter
            if number in self._down_for:
                pairs.append((values[piece.here], self._flat(number)[piece.there]))
            if number in self._gradients and number not in self._final:
                pairs.append((grads[piece.here], self._gradients[number][piece.there]))
        self._arrived[index] = self._copy(self._down, pairs, after=self._gone.pop(index - self._slots, None))

    def _span(self, index: int) -> slice:
        slot = self._plan[index] if self._keep else index % self._slots
        return slice(slot * self._layout.size, (slot + 1) * self._layout.size)

    def _flat(self, number: int) -> Tensor:
        return self._parameters[number].detach().view(-1)

    def _follow(self) -> None:
        """Orders copies from the device after the work on the current stream; copies to it follow, because the host waits."""
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self._device))

    def _copy(
        self, stream: torch.cuda.Stream | None, pairs: Pairs, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Copies (to, from) pairs on that stream, after that event. Returns the event of their end."""
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if stream is not None and after is not None:
                stream.wait_event(after)
            for to, source in pairs:
                to.copy_(source, non_blocking=stream is not None)
            return stream.record_event() if stream is not None else None


def _identity(gradient: Tensor) -> tuple[int, int]:
    return gradient.data_ptr(), gradient._version

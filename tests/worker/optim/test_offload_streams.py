"""The offloaded optimizer's CUDA streams, simulated without a GPU: every copy runs as late as its stream allows.

A stream here is a queue. An operation runs when something waits for it, so a missing wait shows as an old value.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raydist.spec.running import OffloadSpec
from raydist.worker.optim.offload import adamw
from raydist.worker.optim.offload.adamw import OffloadedAdamW

COUNTS = (3000, 1, 2500, 700)


class Stream:
    """Runs its operations in order, up to the given event."""

    def __init__(self, device: Any = None) -> None:
        self.queue: list[Callable[[], None]] = []
        self.done = 0

    def record_event(self) -> Event:
        return Event(self, len(self.queue))

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event:
    """A position in a stream's queue."""

    def __init__(self, stream: Stream, place: int) -> None:
        self.stream, self.place = stream, place

    def synchronize(self) -> None:
        while self.stream.done < self.place:
            self.stream.done += 1
            self.stream.queue[self.stream.done - 1]()


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """The stream of forward and backward; `copy_` with non_blocking goes to the current one."""
    current = [Stream()]
    copy_ = torch.Tensor.copy_

    @contextmanager
    def stream(other: Stream) -> Iterator[None]:
        current.append(other)
        yield
        current.pop()

    def late(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return copy_(to, source)
        with torch.no_grad():
            to.mul_(1.0)  # as on a device, its version counts from the launch on
        current[-1].queue.append(lambda: (copy_(to.data, source.data), None)[1])
        return to

    library = SimpleNamespace(cudaHostRegister=lambda *a: 0, cudaHostUnregister=lambda *a: 0)
    monkeypatch.setattr(adamw, "_device_of", lambda parameters: torch.device("cuda"))
    monkeypatch.setattr(torch.Tensor, "copy_", late)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *a: None)
    for name, fake in (("Stream", Stream), ("stream", stream), ("current_stream", lambda device: current[-1]),
                       ("cudart", lambda: library), ("synchronize", lambda device: None),
                       ("device", nullcontext)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    yield current[0]
    current.pop().queue.clear()
    gc.collect()  # pinned memory is given back to this library


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("mode", ["cpu", "nvme"])
def test_nothing_is_read_too_early_or_written_too_soon(mode: str, early: bool, tmp_path: Path, compute: Stream) -> None:
    """Gradients that backward has not computed yet, weights that it still reads, buffers that a copy still needs."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=generator) for n in COUNTS]
    ours, theirs = ([nn.Parameter(s.clone()) for s in start] for _ in range(2))
    plain = torch.optim.AdamW(theirs, lr=1e-2, fused=True, weight_decay=0.1)
    optimizer = OffloadedAdamW(
        [{"name": "decay", "params": ours, "weight_decay": 0.1}],
        lr=1e-2,
        betas=(0.9, 0.999),
        eps=1e-8,
        offload=OffloadSpec(optimizer=mode, path=str(tmp_path), chunk_mb=8192 / 2**20),  # type: ignore[arg-type]
        tag="rank0",
    )
    assert len(optimizer._layout.chunks) > 6  # more than are in flight at once
    with optimizer:
        for _ in range(4):
            grads = [torch.randn(n, generator=generator) for n in COUNTS]
            before = [p.detach().clone() for p in theirs]
            used = [torch.zeros(n) for n in COUNTS]
            optimizer.prefetch()
            for parameter, grad, seen in zip(ours[::-1], grads[::-1], used[::-1], strict=True):
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad.copy_(grad, non_blocking=True)  # backward, on the compute stream
                if early:
                    optimizer.gradients_final([parameter])
                seen.copy_(parameter.detach(), non_blocking=True)
            optimizer.step()
            for parameter, grad in zip(theirs, grads, strict=True):
                parameter.grad = grad
            plain.step()
            after = [torch.zeros(n) for n in COUNTS]
            for parameter, value in zip(ours, after, strict=True):
                value.copy_(parameter.detach(), non_blocking=True)  # the next forward
            compute.record_event().synchronize()
            assert all(torch.equal(a, b) for a, b in zip(used, before, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(after, theirs, strict=True))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(optimizer.state[a]["exp_avg_sq"], plain.state[b]["exp_avg_sq"])

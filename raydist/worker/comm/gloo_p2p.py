"""Reduce-scatter, all-gather and all-to-all: torch's own, and on gloo directly from rank to rank.

Runs in: each train worker. Torch, never ray.

gloo's reduce-scatter is an all-reduce that discards all but this rank's part: twice the bytes. Its all-gather uses a buffer of its
own, which is then copied. Its all-to-all uses a link in one direction at a time: the message that a receive is ready waits behind
the data that this rank sends on the same connection. Here, on gloo, each rank posts all receives, then sends. A reduce-scatter is
an all-to-all of parts, which each rank sums in the order of ranks (docs/adr/0005).

A rank that waits for its exchange at once, in a layer, uses torch's between ranks of one node (`within_node`): there a link has no
limit, and what counts is the processor. The thread that trains holds gloo's lock of a connection while it sends; when the system
suspends it meanwhile, gloo's own thread asks for that lock again and again (docs/adr/0015).

Counters, timers and traces see each of them as one collective.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.profiler import record_function

from raydist.worker.comm import collectives
from raydist.worker.metrics import collective_counters

RANGE = "raydist::"
"""In a profile, all messages within a range of this name and the kind are one collective."""
_TAG = 0x5A
"""The tag of these messages, so that a model's own receives do not match them."""


_pending: WeakKeyDictionary[ProcessGroup, dict[int, tuple[ref[_Exchange], object]]] = WeakKeyDictionary()
"""Exchanges that have not been waited for, and their buffers. If the buffer of a message is freed before the message arrives, gloo
reads nothing more from that peer (torch 2.13: the next exchange of the two times out). A strategy may be dropped while it gathers
weights. The entry is freed with the group.
"""
_numbers = itertools.count()
_within_node: WeakSet[ProcessGroup] = WeakSet()


class Work(Protocol):
    """A collective that has been started."""

    def wait(self) -> object:
        """Returns once the result has arrived."""


def direct(group: ProcessGroup) -> bool:
    """Whether the ranks of this group send directly to each other."""
    return group.size() > 1 and dist.get_backend(group) == "gloo"


def within_node(group: ProcessGroup) -> None:
    """All ranks of this group are on one node, as each of them knows: see `all_gather_now`."""
    _within_node.add(group)


def reduce_scatter(mine: Tensor, whole: Tensor, parts: Tensor | None, group: ProcessGroup) -> Work:
    """The sum over all ranks of row `rank` of `whole`, [W * S], into `mine`, [S]. Do not change any of them until it has arrived.

    `parts`: a receive buffer like `whole`; needed if `direct(group)`.
    """
    if not direct(group):
        work: Work = collectives.reduce_scatter(mine, whole, group=group, async_op=True)
        return work
    assert parts is not None
    rows = parts.view(group.size(), -1)

    def add() -> None:
        total = rows[0]
        for row in rows[1:]:
            total = torch.add(total, row, out=mine)

    sent = whole.view(group.size(), -1)
    return _Exchange("reduce_scatter", whole, group, lambda: _exchange(list(rows), list(sent), group), add)


def all_gather(whole: Tensor, mine: Tensor, group: ProcessGroup) -> Work:
    """All ranks' `mine`, [S], into `whole`, [W * S]; `mine` may be this rank's row of it."""
    if not direct(group):
        work: Work = collectives.all_gather(whole, mine, group=group, async_op=True)
        return work
    rows, own = list(whole.view(group.size(), -1)), mine.view(-1)
    return _Exchange("all_gather", whole, group, lambda: _exchange(rows, [own] * len(rows), group))


def all_gather_rows(whole: Tensor, rows: Sequence[Tensor], group: ProcessGroup) -> Work:
    """All ranks' row into `rows`, views of `whole` that may differ in length; this rank's is there."""
    own = rows[group.rank()]
    if not direct(group):
        # In place: of a list torch makes a copy in a buffer of its own.
        if all(row.numel() == own.numel() for row in rows):
            even: Work = collectives.all_gather(whole, own, group=group, async_op=True)
            return even
        work: Work = dist.all_gather(list(rows), own, group=group, async_op=True)
        return work
    return _Exchange("all_gather", whole, group, lambda: _exchange(rows, [own] * len(rows), group))


def all_to_all(
    came: Tensor,
    sent: Tensor,
    group: ProcessGroup,
    into: Sequence[int] | None = None,
    out: Sequence[int] | None = None,
) -> Work:
    """Rows of `sent` to all ranks, into rows of `came`, both contiguous: `out[r]` to rank r, and `into[r]` from rank r; None: as
    many for each. Do not change any of them until they have arrived."""
    if not direct(group):
        work: Work = dist.all_to_all_single(
            came, sent, into and list(into), out and list(out), group=group, async_op=True
        )
        return work
    size = group.size()
    theirs = torch.split(came, list(into) if into is not None else len(came) // size)
    ours = torch.split(sent, list(out) if out is not None else len(sent) // size)
    return _Exchange("all_to_all", sent, group, lambda: _exchange(theirs, ours, group))


def all_gather_now(whole: Tensor, mine: Tensor, group: ProcessGroup) -> None:
    """See `all_gather`; returns once all parts have arrived. Between ranks of one node it is torch's."""
    if group in _within_node:
        collectives.all_gather(whole, mine, group=group)
    else:
        all_gather(whole, mine, group).wait()


def all_to_all_now(
    came: Tensor,
    sent: Tensor,
    group: ProcessGroup,
    into: Sequence[int] | None = None,
    out: Sequence[int] | None = None,
) -> None:
    """See `all_to_all`; returns once all rows have arrived. Between ranks of one node it is torch's."""
    if group in _within_node:
        dist.all_to_all_single(came, sent, into and list(into), out and list(out), group=group)
    else:
        all_to_all(came, sent, group, into, out).wait()


def _exchange(came: Sequence[Tensor], sent: Sequence[Tensor], group: ProcessGroup) -> list[Work]:
    """Element r of `sent` to rank r, element r of `came` from rank r; this rank's own is copied."""
    rank, world = group.rank(), group.size()
    # Each rank starts with another peer, so that not all send to the same one first.
    others = [(rank + i) % world for i in range(1, world)]
    works: list[Work] = [group.recv([came[r]], r, _TAG) for r in reversed(others) if came[r].numel()]
    works += [group.send([sent[r]], r, _TAG) for r in others if sent[r].numel()]
    if came[rank].data_ptr() != sent[rank].data_ptr():
        came[rank].copy_(sent[rank])
    return works


class _Exchange:
    """See `Work`."""

    def __init__(
        self,
        kind: str,
        whole: Tensor,
        group: ProcessGroup,
        send: Callable[[], Sequence[Work]],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._kind, self._whole, self._group, self._then = kind, whole, group, then
        self._number = next(_numbers)
        self._begun = time.perf_counter()
        self._works: Sequence[Work] = ()
        self._failure: RuntimeError | None = None
        try:
            with _as_one(kind):
                self._works = send()
            _pending.setdefault(group, {})[self._number] = (ref(self), (self._works, whole))
        except RuntimeError as error:
            self._failure = error  # a lost peer: raised by `wait`, as torch does
        self._sending = time.perf_counter() - self._begun  # gloo writes to the socket at once, as much as it accepts

    def wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._number not in _pending.get(self._group, {}):
            return  # `settle` has waited
        waiting = time.perf_counter()
        with collective_counters.uncounted():
            for work in self._works:
                work.wait()
        _pending[self._group].pop(self._number)
        now = time.perf_counter()
        nbytes = self._whole.numel() * self._whole.element_size()
        collective_counters.count(
            self._kind, nbytes, self._group.size(), now - self._begun, self._sending + now - waiting
        )
        self._then()


def settle() -> None:
    """Waits for all exchanges that this process has started and still may wait for."""
    for started in list(_pending.values()):
        for exchange, _ in list(started.values()):
            if (made := exchange()) is not None:
                made.wait()


@contextmanager
def _as_one(kind: str) -> Iterator[None]:
    ranged = torch.autograd.profiler._is_profiler_enabled  # otherwise a range takes 0.1 ms of each exchange for nothing
    with collective_counters.uncounted(), record_function(RANGE + kind) if ranged else nullcontext():
        yield


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for FSDP2, made as FSDP2 makes it."""
        return torch.empty(*size, dtype=dtype, device=device)


class DirectReduceScatter(_Allocates):
    """For FSDP2's `set_custom_reduce_scatter`. All modules can share one: its buffer is free after each call."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Returns once the result has arrived: FSDP2 would wait for gloo anyway."""
        if not direct(group):
            collectives.reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return
        assert op in (ReduceOp.SUM, ReduceOp.AVG), op
        if self._buffer.numel() < input_tensor.numel() or self._buffer.dtype is not input_tensor.dtype:
            self._buffer = torch.empty_like(input_tensor)
        reduce_scatter(output_tensor, input_tensor, self._buffer[: input_tensor.numel()], group).wait()
        if op == ReduceOp.AVG:
            output_tensor.div_(group.size())


class DirectAllGather(_Allocates):
    """For FSDP2's `set_custom_all_gather`, if `direct`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Returns once the result has arrived: FSDP2 would wait for gloo anyway."""
        all_gather(output_tensor, input_tensor, group).wait()

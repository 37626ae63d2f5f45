"""What this process sends to others: count, bytes, seconds and exposed seconds of each kind of collective, whoever starts it.

Runs in: each train worker. Torch, never ray.

All collectives of torch.distributed, DDP's reducer and FSDP2 pass torch's dispatcher, as operators of the library `c10d`. A kernel
of ours stands there before the backend's: it notes the call, and hands it on. Nothing is changed, waited for or sent.

Seconds are those from the call until its work is done, as kineto has them: two that are on their way together count both. Exposed
is what the training thread (on CUDA: its stream) waits: in `Work.wait`, in `wait_tensor`, on CUDA in `Stream.wait_event`, and, for
work that only autograd's engine waits for (DDP's buckets), from the start of a pass's last one until all are done: then there is
nothing left to compute.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from raydist.worker.metrics.collective_timing import Call, Clock, DeviceClock, HostClock

T = TypeVar("T")

KEY = "ADInplaceOrView"
"""Where ours stands: below autograd, which functional collectives leave out, and above the backends."""
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_AUTOGRAD = torch._C.DispatchKey.AutogradCPU
_MANY = 1024
"""Calls that are kept until somebody asks for the totals; then they are added up."""
_OPEN = 64
"""Calls that a later `Work.wait` is still taken to be for."""


def _ring(n: int) -> float:
    return (n - 1) / n


def _once(n: int) -> float:
    return 1.0


def _never(n: int) -> float:
    return 0.0


OPERATORS: dict[str, tuple[str, int | None, int, Callable[[int], float]]] = {
    "allreduce_": ("all_reduce", 0, 1, lambda n: 2 * _ring(n)),
    "allreduce_coalesced_": ("all_reduce", 0, 1, lambda n: 2 * _ring(n)),
    "allgather_": ("all_gather", 0, 2, _ring),
    "_allgather_base_": ("all_gather", 0, 2, _ring),
    "allgather_coalesced_": ("all_gather", 0, 2, _ring),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 2, _ring),
    "reduce_scatter_": ("reduce_scatter", 1, 2, _ring),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2, _ring),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 2, _ring),
    "broadcast_": ("broadcast", 0, 1, _once),
    "alltoall_": ("all_to_all", 1, 2, _ring),
    "alltoall_base_": ("all_to_all", 1, 2, _ring),
    "send": ("send_recv", 0, 1, _once),
    "recv_": ("send_recv", 0, 1, _never),
    "recv_any_source_": ("send_recv", 0, 1, _never),
    "reduce_": ("other", 0, 1, _once),
    "gather_": ("other", 1, 2, _once),
    "scatter_": ("other", 0, 2, _once),
    "barrier": ("other", None, 1, _never),
}
"""Operator of c10d -> (kind, in raydist.run.telemetry_schema.OPS; which argument has nccl-tests' size; which one is the group; the
bus factor of n ranks). Conventions and factors: nccl-tests, doc/PERFORMANCE.md; a receiver sends nothing.
"""


@dataclass(slots=True)
class Total:
    """Of one kind. `bytes`: size by nccl-tests' conventions; `wire_bytes`: what this rank sends for them, round a ring."""

    count: int = 0
    bytes: int = 0
    wire_bytes: float = 0.0
    seconds: float = 0.0
    exposed_seconds: float = 0.0


_installed: CollectiveCounters | None = None
_here = threading.local()


@contextmanager
def uncounted() -> Iterator[None]:
    """What this thread sends and waits for in the block is no collective of its own: `count` tells of it."""
    before = getattr(_here, "uncounted", False)
    _here.uncounted = True
    try:
        yield
    finally:
        _here.uncounted = before


def count(op: str, nbytes: int, ranks: int, seconds: float, exposed_seconds: float) -> None:
    """One collective among so many ranks that was `uncounted`, is done, and sent what a ring sends; `nbytes`: see `Total`.

    `exposed_seconds`: how long this thread waited for it.
    """
    log = _installed
    if log is not None:
        log._safely(log._told, op, nbytes, ranks, seconds, exposed_seconds)


class CollectiveCounters:
    """Counts from `install` until `close`, in this whole process; one at a time. `device`: that which this rank trains on.

    The thread that installs it is the training thread: only where that one waits is anything exposed.
    """

    def __init__(self, device: torch.device) -> None:
        self._totals: dict[str, Total] = {}
        self._new: deque[tuple[str, int, int, bool]] = deque()
        """Calls that are not in the totals yet: operator, bytes, ranks, whether on the host."""
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._clocks: dict[str, Clock] = {"cpu": HostClock(self._spend, self._expose)}
        if device.type == "cuda":
            self._clocks["cuda"] = DeviceClock(self._spend, self._expose)
        self._timed: set[str] = set()
        self._open: OrderedDict[int, Call] = OrderedDict()
        """Calls on the host's clock that nobody has waited for, by the id of their work: whoever may wait for it keeps it alive."""
        self._backward: list[tuple[Clock, Call]] | None = None
        self.problem: str | None = None
        """Why nothing is counted any more: what went wrong here, and cost the run nothing."""
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """From now on every collective of this process is counted."""
        global _installed
        assert not self._undo, "installed already"
        self._thread = threading.get_ident()
        library: Any = torch.library.Library
        c10d, functional = library("c10d", "IMPL"), library("_c10d_functional", "IMPL")
        self._undo += [c10d._destroy, functional._destroy]
        for name in OPERATORS:
            c10d.impl(name, self._counted(name), KEY)
        functional.impl("wait_tensor", self._wait_tensor, KEY)
        self._patch(dist.Work, "wait")
        if "cuda" in self._clocks:
            self._patch(torch.cuda.Stream, "wait_event")
        _installed = self

    def close(self) -> None:
        """Takes all of it away again. What was counted stays."""
        global _installed
        if _installed is self:
            _installed = None
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass whose engine waits for what it has sent, before it returns."""
        issued: list[tuple[Clock, Call]] = []
        self._backward = issued
        try:
            yield
        finally:
            self._backward = None
        for clock in self._clocks.values():
            self._safely(clock.backward, [call for its, call in issued if its is clock and not call.waited])

    def totals(self) -> dict[str, Total]:
        """What there is so far, by kind. From any thread."""
        for clock in self._clocks.values():
            self._safely(clock.settle)
        self._add_up()
        with self._lock:
            return {op: replace(total) for op, total in self._totals.items()}

    def _counted(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.c10d, name).default

        def counted(*args: Any) -> Any:
            begun = None if getattr(_here, "uncounted", False) else self._safely(self._begin, name, args)
            with torch._C._ExcludeDispatchKeyGuard(_BELOW):
                made = operator(*args)
            if begun is not None:
                self._safely(self._count, name, args, made, *begun)
            return made

        return counted

    def _begin(self, name: str, args: tuple[Any, ...]) -> tuple[Clock, Call, int]:
        op, _, group, _ = OPERATORS[name]
        host = self._clocks["cpu"]
        clock = self._clocks.get(_device(args[0]), host) if len(self._clocks) > 1 else host
        pg: Any = dist.ProcessGroup.unbox(args[group])
        if isinstance(clock, DeviceClock) and pg.group_name not in self._timed:
            self._timed.add(pg.group_name)
            pg._enable_collectives_timing()
        return clock, Call(op, pg.group_name, clock.now()), pg.size()

    def _count(self, name: str, args: tuple[Any, ...], made: Any, clock: Clock, call: Call, size: int) -> None:
        sized = OPERATORS[name][1]
        self._new.append((name, _bytes(args[sized]) if sized is not None else 0, size, clock is self._clocks["cpu"]))
        if len(self._new) > _MANY:
            self._add_up()
        work = made[-1] if isinstance(made, tuple) else made
        if work is not None:  # else a coalescing manager has it
            call.work = dist.Work.unbox(work)
            self._follow(clock, call)

    def _add_up(self) -> None:
        with self._lock:
            while self._new:
                name, nbytes, size, host = self._new.popleft()
                op, _, _, factor = OPERATORS[name]
                total = self._totals.setdefault(op, Total())
                total.count += 1
                total.bytes += nbytes
                if size > 1:
                    # gloo's reduce-scatter is an all-reduce of which most is thrown away.
                    twice = 2 if op == "reduce_scatter" and host else 1
                    total.wire_bytes += twice * nbytes * factor(size)

    def _told(self, op: str, nbytes: int, ranks: int, seconds: float, exposed_seconds: float) -> None:
        with self._lock:
            total = self._totals.setdefault(op, Total())
            total.count += 1
            total.bytes += nbytes
            total.wire_bytes += nbytes * _ring(ranks)
            total.seconds += seconds
            total.exposed_seconds += exposed_seconds if self._training() else 0.0

    def _follow(self, clock: Clock, call: Call) -> None:
        # Below autograd are the functional collectives, whose works nobody outside of C++ ever waits for.
        waitable = not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
        if self._backward is not None and waitable and self._training():
            self._backward.append((clock, call))
        if waitable and isinstance(clock, HostClock):
            self._open[id(call.work)] = call
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        clock.follow(call)

    def _wait_tensor(self, tensor: Tensor) -> Any:
        clock = self._clocks.get(tensor.device.type, self._clocks["cpu"])
        begun = self._safely(clock.wait, None, self._training())
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            made = torch.ops._c10d_functional.wait_tensor.default(tensor)
        self._safely(clock.waited, begun)
        return made

    def _patch(self, owner: type, name: str) -> None:
        """Has `owner.name` measured: a wait for the call that its first argument is the work of, or on the device."""
        original = getattr(owner, name)

        def wait(first: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._open.pop(id(first), None)
            clock = self._clocks["cpu"] if call is not None else self._clocks.get("cuda")
            if clock is None:
                return original(first, *args, **kwargs)
            if call is not None:
                call.waited = True
            begun = self._safely(clock.wait, call, self._training())
            made = original(first, *args, **kwargs)
            self._safely(clock.waited, begun)
            return made

        setattr(owner, name, wait)
        self._undo.append(lambda: setattr(owner, name, original))

    def _safely(self, what: Callable[..., T], *args: Any) -> T | None:
        """`what(*args)`. One that raises is the last one: whoever counts must not be what a run fails of."""
        if self.problem is not None:
            return None
        try:
            return what(*args)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            return None

    def _training(self) -> bool:
        return threading.get_ident() == self._thread

    def _spend(self, op: str, seconds: float) -> None:
        with self._lock:
            self._totals.setdefault(op, Total()).seconds += seconds

    def _expose(self, op: str, seconds: float) -> None:
        with self._lock:
            self._totals.setdefault(op, Total()).exposed_seconds += seconds


def _device(tensors: Any) -> str:
    while not isinstance(tensors, Tensor):
        if not tensors:
            return "cpu"
        tensors = tensors[0]
    return tensors.device.type


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))

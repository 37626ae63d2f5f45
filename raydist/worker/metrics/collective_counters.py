"""Counts the collectives of this process: number, bytes, seconds and exposed seconds of each kind, whatever code starts them.

Runs in: each train worker. Torch, never ray.

All collectives of torch.distributed, DDP's reducer and FSDP2 go through torch's dispatcher, as operators of the library `c10d`. A
kernel of this module runs there before the backend's: it records the call and passes it on. It changes, awaits and sends nothing.

Seconds are from the call until its work is done, as in kineto: if two collectives overlap, both count. Exposed seconds are the time
that the training thread (on CUDA: its stream) waits: in `Work.wait`, in `wait_tensor`, on CUDA in `Stream.wait_event`. If only
autograd's engine waits for work (DDP's buckets), they are the time from the start of the last one of a pass until all are done:
nothing is left to compute then.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from raydist.worker.metrics.collective_timing import Call, Clock, DeviceClock, HostClock

T = TypeVar("T")

KEY = "ADInplaceOrView"
"""The dispatch key of this module's kernels: below autograd, which functional collectives skip, and above the backends."""
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_AUTOGRAD = torch._C.DispatchKey.AutogradCPU
_MANY = 1024
"""Calls to keep before they are added to the totals."""
_OPEN = 64
"""Newest calls that a later `Work.wait` is matched with."""


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
"""Operator of c10d -> (kind, in raydist.run.telemetry_schema.OPS; index of the argument with the size by nccl-tests; index of the
group argument; bus factor for n ranks). Conventions and factors: nccl-tests, doc/PERFORMANCE.md; a receiver sends nothing.
"""


def sent_by(operator: str, args: Sequence[Any]) -> float:
    """Bytes that a rank sends in a call of an operator of c10d with these arguments, with a ring."""
    _, sized, group, factor = OPERATORS[operator]
    size = dist.ProcessGroup.unbox(args[group]).size()
    return _bytes(args[sized]) * factor(size) if sized is not None and size > 1 else 0.0


@dataclass(slots=True)
class Total:
    """Totals of one kind. `bytes`: size by nccl-tests' conventions; `wire_bytes`: bytes that this rank sends, with a ring."""

    count: int = 0
    bytes: int = 0
    wire_bytes: float = 0.0
    seconds: float = 0.0
    exposed_seconds: float = 0.0


_installed: CollectiveCounters | None = None
_here = threading.local()


@contextmanager
def uncounted() -> Iterator[None]:
    """Calls and waits of this thread in the block are not counted: report them together with `count`."""
    before = getattr(_here, "uncounted", False)
    _here.uncounted = True
    try:
        yield
    finally:
        _here.uncounted = before


def beside(device: torch.device) -> AbstractContextManager[None]:
    """For a lane's work beside the training thread: on CPU its exchanges are uncounted, and who makes them counts them. On CUDA
    they are NCCL's, which are timed as all others."""
    return uncounted() if device.type == "cpu" else nullcontext()


def count(op: str, nbytes: int, ranks: int, seconds: float, exposed_seconds: float) -> None:
    """Counts one complete collective of `ranks` ranks that was `uncounted` and sent as much as a ring. `nbytes`: see `Total`.

    `exposed_seconds`: the time that this thread waited for it.
    """
    log = _installed
    if log is not None:
        log._safely(log._add, op, nbytes, ranks, seconds, exposed_seconds)


def expose(op: str, seconds: float) -> None:
    """Adds time that the training thread waited for collectives of a kind that another thread has counted."""
    log = _installed
    if log is not None:
        log._safely(log._expose, op, seconds)


class CollectiveCounters:
    """Counts from `install` until `close`, in the whole process; one at a time. `device`: the device that this rank trains on.

    Call `install` in the training thread: only its waits, and those of its backward passes, count as exposed.
    """

    def __init__(self, device: torch.device) -> None:
        self._totals: dict[str, Total] = {}
        self._new: deque[tuple[str, int, int, bool]] = deque()
        """Calls that are not in the totals yet: operator, bytes, ranks, whether they run on the host."""
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._clocks: dict[str, Clock] = {"cpu": HostClock(self._spend, self._expose)}
        self._device = device
        self._stream: object = None
        """On CUDA: the stream that trains."""
        if device.type == "cuda":
            self._clocks["cuda"] = DeviceClock(self._spend, self._expose)
        self._timed: set[str] = set()
        self._open: OrderedDict[int, Call] = OrderedDict()
        """Calls on the host's clock that have not been waited for, by the id of their work, which is alive while code may wait."""
        self._backward: list[tuple[Clock, Call]] | None = None
        self._usual = 0
        """Calls of the newest backward pass that made any."""
        self._shown: dict[str, float] = {}
        self.problem: str | None = None
        """The error after which counting stopped; it does not affect the run."""
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Starts to count every collective of this process."""
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
            self._stream = torch.cuda.current_stream(self._device)
            self._patch(torch.cuda.Stream, "wait_event")
        _installed = self

    def close(self) -> None:
        """Removes the kernels and patches. The totals stay."""
        global _installed
        if _installed is self:
            _installed = None
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context around a backward pass whose engine waits for its collectives before it returns."""
        issued: list[tuple[Clock, Call]] = []
        self._backward = issued
        try:
            yield
        finally:
            self._backward = None
        self._usual = len(issued) or self._usual
        for clock in self._clocks.values():
            self._safely(clock.backward, [call for its, call in issued if its is clock and not call.waited])

    def totals(self) -> dict[str, Total]:
        """The totals so far, by kind, on the host with the wait that has not ended: else the time that a rank waits for a slow one
        would show as computing until it is over. May be called in any thread."""
        for clock in self._clocks.values():
            self._safely(clock.settle)
        self._add_up()
        with self._lock:
            made = {op: replace(total) for op, total in self._totals.items()}
            waits = self._safely(self._exposing)
            if waits is not None:
                made.setdefault(waits[0], Total()).exposed_seconds += waits[1]
            for op, total in made.items():  # a pass with more collectives than the last one was taken to wait too early
                self._shown[op] = total.exposed_seconds = max(total.exposed_seconds, self._shown.get(op, 0.0))
            return made

    def _exposing(self) -> tuple[str, float] | None:
        host, issued = self._clocks["cpu"], list(self._backward or ())
        assert isinstance(host, HostClock)
        calls = [call for clock, call in issued if clock is host and not call.waited]
        return host.exposing(calls if 0 < self._usual <= len(issued) else [])

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
        if work is not None:  # else a coalescing manager holds it
            call.work = dist.Work.unbox(work)  # None: NCCL runs a call that the caller waits for in the current stream
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
                    # gloo's reduce-scatter is an all-reduce that discards most of the result.
                    twice = 2 if op == "reduce_scatter" and host else 1
                    total.wire_bytes += twice * nbytes * factor(size)

    def _add(self, op: str, nbytes: int, ranks: int, seconds: float, exposed_seconds: float) -> None:
        with self._lock:
            total = self._totals.setdefault(op, Total())
            total.count += 1
            total.bytes += nbytes
            total.wire_bytes += nbytes * _ring(ranks) * (2 if op == "all_reduce" else 1)
            total.seconds += seconds
            total.exposed_seconds += exposed_seconds if self._training() else 0.0

    def _follow(self, clock: Clock, call: Call) -> None:
        # Functional collectives run below autograd. Only C++ code waits for their work.
        waitable = not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
        if self._backward is not None and waitable and self._training(clock):
            self._backward.append((clock, call))
        if waitable and isinstance(clock, HostClock):
            self._open[id(call.work)] = call
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        clock.follow(call)

    def _wait_tensor(self, tensor: Tensor) -> Any:
        clock = self._clocks.get(tensor.device.type, self._clocks["cpu"])
        begun = self._safely(clock.wait, None, self._training(clock))
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            made = torch.ops._c10d_functional.wait_tensor.default(tensor)
        self._safely(clock.waited, begun)
        return made

    def _patch(self, owner: type, name: str) -> None:
        """Replaces `owner.name` by a measured wait: for the call whose work is the first argument, else of the stream that trains;
        others, as those of lanes and copies, wait beside it."""
        original = getattr(owner, name)

        def wait(first: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._open.pop(id(first), None)
            clock = self._clocks["cpu"] if call is not None else self._clocks.get("cuda")
            if clock is None or (call is None and not self._trains(first)):
                return original(first, *args, **kwargs)
            training = self._training(clock)
            if call is not None:
                call.waited = True
            elif training:  # the stream waits for what it was given so far
                for its, before in self._backward or ():
                    before.waited = before.waited or its is clock
            begun = self._safely(clock.wait, call, training)
            made = original(first, *args, **kwargs)
            self._safely(clock.waited, begun)
            return made

        setattr(owner, name, wait)
        self._undo.append(lambda: setattr(owner, name, original))

    def _trains(self, waits: Any) -> bool:
        """Whether a wait is one of the stream that trains. `waits`: a stream, or a work, for which the current one waits."""
        stream = waits if isinstance(waits, torch.cuda.Stream) else torch.cuda.current_stream(self._device)
        return bool(stream == self._stream)

    def _safely(self, what: Callable[..., T], *args: Any) -> T | None:
        """Calls `what(*args)`. After an exception it calls nothing any more: counting must not make a run fail."""
        if self.problem is not None:
            return None
        try:
            return what(*args)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            return None

    def _training(self, clock: Clock | None = None) -> bool:
        """Whether this thread trains. Backward passes on CUDA run in threads of autograd's engine."""
        if threading.get_ident() == self._thread:
            return True
        return self._backward is not None and clock is not None and clock is not self._clocks["cpu"]

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

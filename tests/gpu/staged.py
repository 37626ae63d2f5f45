"""A process group for several ranks on one GPU: tensors go through the host's memory and gloo. NCCL refuses ranks that share a
device, so this is how tests run meshes, compression and checkpoints of several ranks with CUDA tensors on one device.

Each collective is complete when it returns, as NCCL with CUDA_LAUNCH_BLOCKING: order and devices are tested, streams are not.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

NAME = "staged"


class _Done(dist._Work):
    """What a collective returns; `finish` runs in the first `wait`."""

    def __init__(self, result: Any, finish: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._future: Future[Any] = Future()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
            self._future.set_result(self._result)
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    def get_future(self) -> Any:
        self.wait()
        return self._future


class Staged(dist.ProcessGroup):
    """Copies tensors of a device to the host, calls gloo, and copies the results back."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _call(self, name: str, out: list[Any], given: list[Any], *more: Any, same: bool = False) -> _Done:
        """gloo's `name` with host copies of `out` and `given`, lists of tensors or lists of lists; `same`: `out` is given, too."""
        host_out = _host(out)
        arguments = [host_out] if same else [host_out, _host(given)]
        getattr(self._gloo, name)(*arguments, *more).wait()
        _back(out, host_out)
        work = _Done(out)
        work.wait()
        return work

    def allreduce(self, tensors: list[Any], *more: Any) -> _Done:
        return self._call("allreduce", tensors, [], *more, same=True)

    def allreduce_coalesced(self, tensors: list[Any], *more: Any) -> _Done:
        for tensor in tensors:
            work = self._call("allreduce", [tensor], [], *more, same=True)
        return work

    def broadcast(self, tensors: list[Any], *more: Any) -> _Done:
        return self._call("broadcast", tensors, [], *more, same=True)

    def reduce(self, tensors: list[Any], *more: Any) -> _Done:
        return self._call("reduce", tensors, [], *more, same=True)

    def allgather(self, out: list[Any], given: list[Any], *more: Any) -> _Done:
        """By broadcasts, since gloo refuses parts of different lengths, which NCCL takes."""
        mine, parts = _host(given)[0], _host(out)[0]
        parts[self.rank()].copy_(mine)
        for root, part in enumerate(parts):
            options = dist.BroadcastOptions()
            options.rootRank = root
            if part.numel():
                self._gloo.broadcast([part], options).wait()
        _back(out, [parts])
        work = _Done(out)
        work.wait()
        return work

    def gather(self, out: list[Any], given: list[Any], *more: Any) -> _Done:
        return self._call("gather", out, given, *more)

    def scatter(self, out: list[Any], given: list[Any], *more: Any) -> _Done:
        return self._call("scatter", out, given, *more)

    def reduce_scatter(self, out: list[Any], given: list[Any], *more: Any) -> _Done:
        return self._call("reduce_scatter", out, given, *more)

    def alltoall(self, out: list[Any], given: list[Any], *more: Any) -> _Done:
        return self._call("alltoall", out, given, *more)

    def all_gather_single(self, out: Any, given: Any, *more: Any) -> _Done:
        return self._single("_allgather_base", out, given, *more)

    def reduce_scatter_single(self, out: Any, given: Any, *more: Any) -> _Done:
        return self._single("_reduce_scatter_base", out, given, *more)

    def all_to_all_single(self, out: Any, given: Any, *more: Any) -> _Done:
        return self._single("alltoall_base", out, given, *more)

    # torch 2.11's names
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def all_gather_single_coalesced(self, outs: list[Any], givens: list[Any], *more: Any) -> _Done:
        return [self.all_gather_single(out, given, *more) for out, given in zip(outs, givens, strict=True)][-1]

    def reduce_scatter_single_coalesced(self, outs: list[Any], givens: list[Any], *more: Any) -> _Done:
        return [self.reduce_scatter_single(out, given, *more) for out, given in zip(outs, givens, strict=True)][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _single(self, name: str, out: Any, given: Any, *more: Any) -> _Done:
        host = _host([out])[0]
        getattr(self._gloo, name)(host, _host([given])[0].contiguous(), *more).wait()
        _back([out], [host])
        work = _Done([out])
        work.wait()
        return work

    def barrier(self, *more: Any) -> _Done:
        self._gloo.barrier().wait()
        work = _Done(None)
        work.wait()
        return work

    def send(self, tensors: list[Any], to: int, tag: int) -> _Done:
        host = _host(tensors)
        work = self._gloo.send(host, to, tag)

        def finish(keep: Any = host) -> None:
            work.wait()

        return _Done(None, finish)

    def recv(self, tensors: list[Any], origin: int, tag: int) -> _Done:
        host = _host(tensors)
        work = self._gloo.recv(host, origin, tag)

        def finish() -> None:
            work.wait()
            _back(tensors, host)

        return _Done(tensors, finish)


def _host(tensors: list[Any]) -> list[Any]:
    """Copies on the host; a list of lists stays one."""
    return [_host(t) if isinstance(t, (list, tuple)) else t.detach().cpu().contiguous() for t in tensors]


def _back(tensors: list[Any], host: list[Any]) -> None:
    """Copies what is not the same tensor."""
    for tensor, made in zip(tensors, host, strict=True):
        if isinstance(tensor, (list, tuple)):
            _back(list(tensor), made)
        elif tensor.data_ptr() != made.data_ptr() or tensor.device != made.device:
            with torch.no_grad():
                tensor.copy_(made)


def register() -> None:
    """Makes the backend known to torch; `init_process_group(NAME)` then takes it for all devices."""
    dist.Backend.register_backend(NAME, Staged, devices=["cpu", "cuda"])

"""The sum of gradients along a tree, on all ranks of a group: with `train.virtual_ranks` of ddp's buckets and hsdp's copies, with
`comm.topology` direct and two_level of ddp's buckets.

Runs in: each train worker. Torch, never ray.

    exchange   each rank gets its stretch of every rank's nodes, and adds it up in their order     lane 1
    across     (two_level) an all-reduce of the stretch with the ranks that have it elsewhere      lane 2
    gather     all ranks get all stretches                                                         lane 3

So a rank sends as much as in a ring. All buckets share one buffer for what arrives, as large as the largest bucket if each rank has
one node: the next exchange begins when the stretch is added up, while the one before is gathered. Each lane has a group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from raydist.worker.comm import gloo_p2p
from raydist.worker.comm.compression.lane import Lane
from raydist.worker.comm.groups import another
from raydist.worker.comm.tree import Exchange, Node, Tree, room_for
from raydist.worker.metrics import collective_counters


class TreeAllReduce:
    """All ranks of `group` make one, and call it with the same buckets in the same order.

    `nodes`: of each rank. `aside` False: a call returns with the sum, on CUDA in the caller's stream. `shared`: others send over
    `group` at the same time. `across`: ranks of several such groups that have the same place in theirs; the sum is then over all
    groups.
    """

    def __init__(
        self,
        tree: Tree,
        nodes: Sequence[Sequence[Node]],
        group: dist.ProcessGroup,
        device: torch.device,
        aside: bool = True,
        shared: bool = False,
        across: dist.ProcessGroup | None = None,
    ) -> None:
        self._tree, self._nodes, self._device, self._across = tree, nodes, device, across
        self._room = torch.empty(0, device=device)
        ranks = dist.get_process_group_ranks(group)
        made = [another(ranks, alone=True) for _ in range(1 + shared)]
        self._groups = made if shared else [group, *made]
        stream = torch.cuda.Stream(device) if device.type == "cuda" and aside else None  # type: ignore[no-untyped-call]
        self._lanes = [Lane(f"tree-{name}", stream, aside) for name in ("exchange", "across", "gather")]
        self._put_at = self._done_at = 0.0

    def __call__(self, nodes: Sequence[Tensor], then: Callable[[], object] = lambda: None) -> Future[Tensor]:
        """This rank's nodes, flat; the sum of all ranks' replaces the last one, which is the result. Leave it alone until it is
        done. `then` is called when it is."""
        done: Future[Tensor] = Future(devices=[self._device]) if self._device.type == "cuda" else Future()
        self._put_at = time.perf_counter()

        group, across = self._groups[0], self._across

        def put(lane: int, task: Callable[[], None]) -> None:
            def guarded() -> None:
                try:
                    task()
                except Exception as error:  # of a lost peer, for example: raised where the sum is needed
                    done.set_exception(error)  # type: ignore[arg-type]

            self._lanes[lane].put(guarded)

        def exchange() -> None:
            rows = self._exchange(nodes)
            if across is None:
                send(rows)
            else:
                put(1, lambda: add_across(rows, rows[group.rank()], across))

        def add_across(rows: list[Tensor], mine: Tensor, across: dist.ProcessGroup) -> None:
            if mine.numel():  # fewer numbers than ranks: some have none, here as elsewhere
                dist.all_reduce(mine, group=across)
            send(rows)

        def send(rows: list[Tensor]) -> None:
            work = gloo_p2p.all_gather_rows(nodes[-1], rows, self._groups[1])
            put(2, lambda: gather(work))

        def gather(work: gloo_p2p.Work) -> None:
            work.wait()
            then()
            self._done_at = time.perf_counter()
            done.set_result(nodes[-1])

        put(0, exchange)
        return done

    def _exchange(self, nodes: Sequence[Tensor]) -> list[Tensor]:
        """The stretches of the result, of which this rank's has the sum."""
        group = self._groups[0]
        into = nodes[-1].view(-1)
        rows = list(into.tensor_split(group.size()))
        sizes = [row.numel() for row in rows]
        if self._device.type == "cuda":
            for node in nodes:  # the caller drops it when the lane has only been told of it
                node.record_stream(torch.cuda.current_stream(self._device))
        needed = room_for(self._nodes, sizes[group.rank()])
        if self._room.numel() < needed:
            self._room = torch.empty(needed, dtype=into.dtype, device=self._device)
        work = Exchange(self._tree, self._nodes, [node.view(-1) for node in nodes], sizes, self._room, group)
        ((_, value),) = work.wait()
        rows[group.rank()].copy_(value)
        return rows

    @property
    def room(self) -> int:
        """Bytes of the buffer for what arrives."""
        return self._room.nbytes

    def messages(self, numbers: int) -> list[tuple[str, int]]:
        """The collectives of a sum of so many numbers: (kind, numbers that this rank puts in)."""
        group = self._groups[0]
        each, more = divmod(numbers, group.size())
        mine = each + (group.rank() < more)
        between = [("all_reduce", mine)] if self._across is not None else []
        return [("all_to_all", numbers), *between, ("all_gather", numbers)]

    def finish(self) -> None:
        """After the last backward of a step, when all has arrived: counts the time in which the caller had nothing left to do."""
        if self._device.type == "cpu":
            kind = "all_to_all" if self._across is None else "all_reduce"
            collective_counters.expose(kind, max(0.0, self._done_at - self._put_at))

"""The sum of gradients along a tree, on all ranks of a group: with `train.virtual_ranks` of ddp's buckets and hsdp's copies, with
`comm.topology` direct and two_level of ddp's buckets.

Runs in: each train worker. Torch, never ray.

    exchange   each rank gets its stretch of every rank's nodes, and adds it up in their order     lane 1
    across     (two_level) an all-reduce of the stretch with the ranks that have it elsewhere      lane 2
    gather     all ranks get all stretches                                                         lane 3

So a rank sends as much as in a ring. On CPU a large bucket is sent in slices: the next one is exchanged while one is added up and
gathered, so that no link is idle while a rank waits for the last of its peers. All buckets share one buffer for what arrives, as
large as the largest bucket if each rank has one node. Each lane has a group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from raydist.worker.comm import gloo_p2p
from raydist.worker.comm.compression.lane import Lane
from raydist.worker.comm.groups import another
from raydist.worker.comm.tree import Exchange, Node, Tree, room_for
from raydist.worker.metrics import collective_counters

SLICE = 4 << 20
"""Bytes of a bucket that are sent at a time: smaller slices cost more processor time than the wait that they hide."""


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
                    with suppress(RuntimeError):  # another slice has failed before
                        done.set_exception(error)  # type: ignore[arg-type]

            self._lanes[lane].put(guarded)

        def exchange() -> None:
            slices = list(zip(*(node.view(-1).tensor_split(self._slices(node.numel())) for node in nodes), strict=True))
            last, begun = len(slices) - 1, [self._begin(slices, 0)]
            for number, part in enumerate(slices):
                if number < last:
                    begun.append(self._begin(slices, number + 1))
                rows = self._end(part[-1], begun.pop(0))
                if across is None:
                    send(part[-1], rows, number == last)
                else:
                    put(1, partial(add_across, part[-1], rows, across, number == last))

        def add_across(whole: Tensor, rows: list[Tensor], across: dist.ProcessGroup, last: bool) -> None:
            mine = rows[group.rank()]
            if mine.numel():  # fewer numbers than ranks: some have none, here as elsewhere
                dist.all_reduce(mine, group=across)
            send(whole, rows, last)

        def send(whole: Tensor, rows: list[Tensor], last: bool) -> None:
            work = gloo_p2p.all_gather_rows(whole, rows, self._groups[1])
            put(2, lambda: gather(work, last))

        def gather(work: gloo_p2p.Work, last: bool) -> None:
            work.wait()
            if not last or done.done():  # a slice before has failed
                return
            then()
            self._done_at = time.perf_counter()
            done.set_result(nodes[-1])

        put(0, exchange)
        return done

    def _slices(self, numbers: int) -> int:
        """Of a bucket, which are sent one by one. On CUDA a stream would send no slice before the one before is gathered."""
        return 1 if self._device.type == "cuda" else max(-(-4 * numbers // SLICE), 1)

    def _begin(self, slices: Sequence[Sequence[Tensor]], number: int) -> Exchange:
        """Starts the exchange of a slice. The two that are under way have a half of the buffer each."""
        group, nodes = self._groups[0], slices[number]
        if self._device.type == "cuda":
            for node in nodes:  # the caller drops it when the lane has only been told of it
                node.record_stream(torch.cuda.current_stream(self._device))
        sizes = [row.numel() for row in nodes[-1].tensor_split(group.size())]
        half = room_for(self._nodes, -(-slices[0][-1].numel() // group.size()))
        needed = half * min(len(slices), 2)
        if self._room.numel() < needed:
            self._room = torch.empty(needed, dtype=nodes[-1].dtype, device=self._device)
        room = self._room[number % 2 * half :][: room_for(self._nodes, sizes[group.rank()])]
        return Exchange(self._tree, self._nodes, nodes, sizes, room, group)

    def _end(self, whole: Tensor, exchange: Exchange) -> list[Tensor]:
        """The stretches of a slice of the result, of which this rank's has the sum."""
        group = self._groups[0]
        rows = list(whole.tensor_split(group.size()))
        ((_, value),) = exchange.wait()
        rows[group.rank()].copy_(value)
        return rows

    @property
    def room(self) -> int:
        """Bytes of the buffer for what arrives."""
        return self._room.nbytes

    def messages(self, numbers: int) -> list[tuple[str, int]]:
        """The collectives of a sum of so many numbers: (kind, numbers that this rank puts in)."""
        group = self._groups[0]
        between = ["all_reduce"] if self._across is not None else []
        made: list[tuple[str, int]] = []
        count = self._slices(numbers)
        for number in range(count):
            whole = numbers // count + (number < numbers % count)
            each, more = divmod(whole, group.size())
            mine = each + (group.rank() < more)
            made += [("all_to_all", whole), *((kind, mine) for kind in between), ("all_gather", whole)]
        return made

    def finish(self) -> None:
        """After the last backward of a step, when all has arrived: counts the time in which the caller had nothing left to do."""
        if self._device.type == "cpu":
            kind = "all_to_all" if self._across is None else "all_reduce"
            collective_counters.expose(kind, max(0.0, self._done_at - self._put_at))

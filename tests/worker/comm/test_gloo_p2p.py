"""Direct reduce-scatter, all-gather and all-to-all between gloo ranks: their results, and how they are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from raydist.worker.comm import gloo_p2p
from raydist.worker.distributed import Rank
from raydist.worker.metrics.collective_counters import CollectiveCounters

S = 1001
"""Elements of a rank's part: odd, and more than fit into one gloo message."""


def dropped(rank: Rank) -> Any:
    """A gather that rank 0 starts and drops before rank 1 has sent; and the next one."""
    group = dist.group.WORLD
    assert group is not None
    if rank.first:
        gloo_p2p.all_gather(torch.empty(2 * S), torch.ones(S), group)
    dist.barrier(group=rank.control)
    if not rank.first:
        gloo_p2p.all_gather(torch.empty(2 * S), torch.ones(S), group)
    whole = torch.empty(2 * S)
    gloo_p2p.all_gather(whole, torch.full((S,), 2.0 + rank.rank), group).wait()
    return whole.tolist()


def of(rank: int, world: int, dtype: torch.dtype) -> torch.Tensor:
    """The input of that rank, [W * S]."""
    return torch.randn(world * S, generator=torch.Generator().manual_seed(rank)).to(dtype)


def exchanged(rank: Rank, dtype: torch.dtype) -> Any:
    """Two sums and two gathers in flight at once: the first result of each, and the counts."""
    world, group = rank.world_size, dist.group.WORLD
    assert group is not None
    assert gloo_p2p.direct(group)
    log = CollectiveCounters(rank.device)
    log.install()
    whole, sums = of(rank.rank, world, dtype), [torch.empty(S, dtype=dtype) for _ in range(2)]
    gathered, own = torch.empty(world * S, dtype=dtype), torch.empty(world * S, dtype=dtype)
    mine = own.view(world, S)[rank.rank].copy_(whole[:S])
    works = [
        gloo_p2p.reduce_scatter(sums[0], whole, torch.empty_like(whole), group),
        gloo_p2p.all_gather(gathered, whole[:S], group),
        gloo_p2p.reduce_scatter(sums[1], -whole, torch.empty_like(whole), group),
        gloo_p2p.all_gather(own, mine, group),  # its part is already in place
    ]
    for work in reversed(works):
        work.wait()
    log.close()
    totals = {
        op: (t.count, t.bytes, t.wire_bytes, t.seconds >= t.exposed_seconds > 0) for op, t in log.totals().items()
    }
    assert torch.equal(sums[0], -sums[1])
    assert torch.equal(gathered, own)
    return sums[0].float().tolist(), gathered.float().tolist(), totals


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_what_arrives(ranks: Any, world: int, dtype: torch.dtype) -> None:
    """Sums are in rank order, gathered parts unchanged, bit for bit; each operation counts as one collective."""
    given = [of(rank, world, dtype) for rank in range(world)]
    nbytes = given[0].nbytes
    for rank, (found, gathered, totals) in enumerate(ranks.run(exchanged, world, dtype)):
        rows = [whole.view(world, S)[rank] for whole in given]
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        assert found == total.float().tolist()
        assert gathered == torch.cat([whole[:S] for whole in given]).float().tolist()
        expected = (2, 2 * nbytes, 2 * nbytes * (world - 1) / world, True)
        assert totals == {"reduce_scatter": expected, "all_gather": expected}


def test_nobody_waits_for_it(ranks: Any) -> None:
    """A result that is no longer needed may be dropped: the next operation is unaffected."""
    assert ranks.run(dropped, 2) == [[2.0] * S + [3.0] * S] * 2


def at_once(rank: Rank, near: bool) -> Any:
    """What a rank has after a gather and an uneven all-to-all that it waits for, and how they count."""
    world, group = rank.world_size, dist.new_group()
    if near:
        gloo_p2p.within_node(group)
    log = CollectiveCounters(rank.device)
    log.install()
    whole, mine = torch.empty(world * S), torch.full((S,), float(rank.rank))
    gloo_p2p.all_gather_now(whole, mine, group)
    out = into = [max(rank.rank + other - 1, 0) for other in range(world)]
    came = torch.empty(sum(into), 2)
    gloo_p2p.all_to_all_now(came, torch.arange(2.0 * sum(out)).view(-1, 2), group, into, out)
    log.close()
    return whole.tolist(), came.tolist(), {op: (t.count, t.bytes, t.wire_bytes) for op, t in log.totals().items()}


def test_ranks_of_one_node_receive_the_same(ranks: Any) -> None:
    """The same values and counts, whichever way."""
    assert ranks.run(at_once, 3, True) == ranks.run(at_once, 3, False)


def uneven(rank: Rank, ahead: int) -> Any:
    """Rank r sends r + s - 1 rows to rank s (at least none), `ahead` exchanges at a time: the rows that came, and the counts."""
    world, group = rank.world_size, dist.group.WORLD
    assert group is not None
    log = CollectiveCounters(rank.device)
    log.install()
    out = into = [max(rank.rank + other - 1, 0) for other in range(world)]
    sent = torch.tensor([[rank.rank, other] for other in range(world) for _ in range(out[other])]).view(-1, 2)
    came = [torch.empty(sum(into), 2, dtype=torch.int64) for _ in range(ahead)]
    for work in [gloo_p2p.all_to_all(each, sent, group, into, out) for each in came]:
        work.wait()
    log.close()
    return [each.tolist() for each in came], {op: (t.count, t.bytes) for op, t in log.totals().items()}


@pytest.mark.parametrize("world", [2, 3])
def test_rows_of_uneven_parts(ranks: Any, world: int) -> None:
    """Each rank has the rows that the others have for it, in the order of the ranks; empty parts send nothing."""
    for rank, (came, totals) in enumerate(ranks.run(uneven, world, 2)):
        rows = [[other, rank] for other in range(world) for _ in range(max(rank + other - 1, 0))]
        assert came == [rows, rows]
        assert totals == {"all_to_all": (2, 2 * 16 * len(rows))}

"""The coordinator, without Ray: orders, reports, and when an attempt ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from raydist.cluster.run import coordinator
from raydist.cluster.run.coordinator import Coordinator
from raydist.cluster.run.root_cause import rank_error, root_cause
from raydist.ipc import RENDEZVOUS_SECRET

OUTCOME = {"outcome": {"status": "finished"}, "at": 1.0}
DIED = {"died": {"pid": 7, "node_ip": "10.0.0.1", "how": "SIGKILL", "starved": "", "ordered": False}, "at": 2.0}


def error(message: str, at: float = 1.0) -> dict[str, Any]:
    """A report of an exception."""
    facts = {
        "rank": 0,
        "type_name": "RuntimeError",
        "message": message,
        "traceback": "",
        "at": at,
        "bases": ["RuntimeError"],
    }
    return {"error": facts, "at": 1.0}


def offer(number: int, node: str | None = None) -> dict[str, Any]:
    """What agent `number` reports about itself; each is on its own node unless `node` is given."""
    return {
        "node": node or f"node{number}",
        "local_rank": 0,
        "host": f"h{number}",
        "port": number,
        "placement_group": "p",
    }


async def ready(group: int = 1, size: int = 2) -> tuple[Coordinator, list[asyncio.Task[Any]]]:
    """A coordinator whose agents wait for their first order."""
    made = Coordinator()
    await made.open(group, size)
    waiting = [asyncio.create_task(made.next(group, number, 1, offer(number))) for number in range(size)]
    await made.gathered()
    return made, waiting


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 240))


def test_an_attempt_that_ends_well() -> None:
    """The group forms when all agents are present; ranks meet at rank 0's address; the attempt ends when all have reported."""

    async def test() -> None:
        made = Coordinator()
        await made.open(1, 2)
        gathered = asyncio.create_task(made.gathered())
        first = asyncio.create_task(made.next(1, 0, 1, offer(0)))
        await asyncio.sleep(0)
        assert not gathered.done()
        second = asyncio.create_task(made.next(1, 1, 1, offer(1)))
        await gathered
        await made.begin(5, {"a": 1}, 2, "m")
        env = {"MASTER_ADDR": "h0", "MASTER_PORT": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        orders = [await first, await second]
        secrets = {order["env"].pop(RENDEZVOUS_SECRET) for order in orders}
        assert len(secrets) == 1
        assert len(secrets.pop()) == 64
        for rank, order in enumerate(orders):
            mine = env | {"RANK": str(rank), "NODE_RANK": str(rank)}
            assert 0 <= order.pop("waited_s") < 240
            assert order == {"number": 2, "do": "train", "attempt": 5, "job": '{"a": 1}', "env": mine}
        assert [await made.monitor(1, attempt) for attempt in (5, 4)] == ["m", None]
        result = asyncio.create_task(made.result(5))
        await made.ended(1, 0, 5, OUTCOME)
        await asyncio.sleep(0)
        assert not result.done()
        await made.ended(1, 1, 5, OUTCOME)
        assert {rank: report["outcome"] for rank, report in (await result).items()} == dict.fromkeys(
            range(2), OUTCOME["outcome"]
        )
        await made.leave()
        assert (await made.next(1, 0, 2, offer(0)))["do"] == "leave"

    run(test())


def test_an_order_to_train_that_was_lost_on_the_way() -> None:
    """An agent that asks again, when its rank is to be killed, gets both orders: without the first it would have no rank that ends,
    and the attempt would not be over."""

    async def test() -> None:
        made, waiting = await ready()
        await made.begin(1, {}, 2)
        first = [await task for task in waiting]
        result = asyncio.create_task(made.result(1))
        await made.ended(1, 0, 1, DIED)
        while made._order["do"] != "kill":
            await asyncio.sleep(0)
        again = await made.next(1, 1, 1, offer(1))
        assert {**again, "waited_s": 0} == {**first[1], "waited_s": 0}
        assert (await made.next(1, 1, again["number"], offer(1)))["do"] == "kill"
        await made.ended(1, 1, 1, DIED)
        assert list(await result) == [0]

    run(test())


def test_ranks_on_nodes() -> None:
    """Two agents on each node: local ranks are the agents', and nodes are numbered in the order of the ranks."""

    async def test() -> None:
        made = Coordinator()
        await made.open(1, 4)
        offers = [{**offer(n, f"node{n // 2}"), "local_rank": n % 2} for n in range(4)]
        waiting = [asyncio.create_task(made.next(1, n, 1, offers[n])) for n in range(4)]
        await made.gathered()
        await made.begin(1, {}, 3)
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "WORLD_SIZE")
        orders = [await task for task in waiting[:3]]
        found = [tuple(order["env"][name] for name in names) for order in orders]
        assert found == [("0", "0", "2", "0", "3"), ("1", "1", "2", "0", "3"), ("2", "0", "1", "1", "3")]
        assert (await waiting[3])["do"] == "wait"

    run(test())


def test_a_lost_agents_place_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reports agent 0 dead, or it stops answering: its rank has failed and the other is killed. In the next attempt the spare
    gets a rank. If the lost agent returns, it is told to exit."""

    async def test() -> None:
        for silent in (False, True):
            monkeypatch.setattr(coordinator, "BEAT_S", 0.02)
            monkeypatch.setattr(coordinator, "LOST_S", 0.1 if silent else 1000.0)
            made, _ = await ready(size=3)
            await made.begin(1, {}, 2)
            result = asyncio.create_task(made.result(1))
            on = asyncio.create_task(made.silent(1, set()))
            killed = asyncio.create_task(made.next(1, 1, 2, offer(1)))
            if silent:
                while not killed.done():
                    assert all([await made.beat(1, 1), await made.beat(1, 2)])
                    await asyncio.sleep(0.01)
            else:
                await made.agent_died(1, 0, {"type_name": "WorkerDied", "message": "gone", "kind": "worker_died"})
            assert (await killed)["do"] == "kill"
            assert (await on, result.done()) == ({"node0"}, False)
            on = asyncio.create_task(made.silent(1, {"node0"}))
            await made.ended(1, 1, 1, DIED)
            reports = await result
            assert await on is None
            lost = rank_error(0, reports[0])
            assert lost is not None
            assert (lost.rank, lost.kind) == (0, "node_died" if silent else "worker_died")
            assert reports[0]["node"] == "node0"
            assert await made.nodes() == [("node0", False), ("node1", True), ("node2", True)]
            assert await made.beat(1, 0) == 0.0
            assert (await made.next(1, 0, 2, offer(0)))["do"] == "leave"
            again = [asyncio.create_task(made.next(1, number, 3, offer(number))) for number in (1, 2)]
            await made.begin(2, {}, 2)
            assert [(await task)["env"]["RANK"] for task in again] == ["0", "1"]

    run(test())


def test_ranks_that_were_killed_for_it_are_no_cause() -> None:
    """Whatever the clocks of their hosts say: neither of a rank that died, nor of one that only lost a peer."""
    killed = {"died": {**DIED["died"], "ordered": True}, "at": 1.5}

    async def test() -> None:
        lost_a_peer = error("Connection closed by peer [10.0.0.2]:5", at=2.0)
        for number, (first, kind, message) in enumerate(
            (
                (DIED, "worker_died", "exited without reporting an error (SIGKILL)"),
                (lost_a_peer, "user_error", "closed by peer"),
            )
        ):
            made, _ = await ready(size=3)
            await made.begin(number + 1, {}, 3)
            for rank in range(3):
                await made.ended(1, rank, number + 1, first if rank == 1 else killed)
            reports = await made.result(number + 1)
            found = [failed for rank, report in reports.items() if (failed := rank_error(rank, report)) is not None]
            cause = root_cause(found)
            assert (len(found), cause.rank) == (2, 1 if first is DIED else 0)
            assert message in cause.cause
            assert sum(report["ranks"] for report in reports.values()) == 3
            assert found[0].kind in (kind, "communication")

    run(test())


def test_a_rank_that_does_not_end_after_a_kill_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in the kernel, or its fork server does: the attempt is over without it, and its agent is told to exit. The cause
    remains. So it is when the driver cancels the attempt."""

    async def test() -> None:
        monkeypatch.setattr(coordinator, "KILL_S", 0.1)
        for cancelled in (False, True):
            made, waiting = await ready(size=3)
            await made.begin(1, {}, 3)
            await asyncio.gather(*waiting)
            result = asyncio.create_task(made.result(1))
            await asyncio.sleep(0)
            if cancelled:
                await made.cancel()
            else:
                await made.ended(1, 0, 1, error("no such column"))
                await made.ended(1, 2, 1, DIED)
            reports = await result
            found = [failed for rank, report in reports.items() if (failed := rank_error(rank, report)) is not None]
            assert "rank 1 on node node1 (h1) has not ended" in str(found) or cancelled
            assert root_cause(found).cause.startswith("NotKilled" if cancelled else "RuntimeError: no such column")
            assert [lives for _, lives in await made.nodes()] == ([False] * 3 if cancelled else [True, False, True])
            assert (await made.next(1, 1, 3, offer(1)))["do"] == "leave"

    run(test())


def test_a_node_that_is_heard_again_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found out about it while it was silent does not count later."""

    async def test() -> None:
        monkeypatch.setattr(coordinator, "BEAT_S", 0.02)
        made, _ = await ready()
        await made.begin(1, {}, 2)
        result = asyncio.create_task(made.result(1))
        made._agents[1].beat = time.monotonic() - 0.6 * coordinator.LOST_S
        assert await made.silent(1, set()) == {"node1"}
        await made.beat(1, 1)
        assert await made.silent(1, {"node1"}) == set()
        result.cancel()

    run(test())


def test_after_a_silence_no_lost_peers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of eight nodes sends no beat: the ranks of the others, which have reported nothing in that time, are killed at once."""

    async def test() -> None:
        monkeypatch.setattr(coordinator, "BEAT_S", 0.02)
        monkeypatch.setattr(coordinator, "LOST_S", 0.1)
        monkeypatch.setattr(coordinator, "_ECHO_S", 1e6)
        made, waiting = await ready(size=64)
        await made.begin(1, {}, 64)
        await asyncio.gather(*waiting)
        result = asyncio.create_task(made.result(1))
        orders = asyncio.create_task(made.many([["next", 1, number, 2, offer(number)] for number in range(8, 64)]))
        while not orders.done():
            for number in range(8, 64):
                await made.beat(1, number)
            await asyncio.sleep(0.01)
        assert [order["do"] for order in orders.result().values()] == ["kill"] * 56
        for rank in range(8, 64):
            await made.ended(1, rank, 1, DIED)
        assert {rank for rank, report in (await result).items() if "lost" in report} == {*range(8)}

    run(test())


def test_many_nodes_beat_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them send BEATS a second, also before the first attempt, and each may be silent for longer."""

    async def test() -> None:
        monkeypatch.setattr(coordinator, "BEAT_S", 0.02)
        monkeypatch.setattr(coordinator, "BEATS", 4 / 500)
        made, _ = await ready(size=6)
        assert await made.beat(1, 0) == pytest.approx(15.0)  # from the nodes that have joined
        await made.begin(1, {}, 4)
        assert await made.beat(1, 0) == pytest.approx(10.0)
        for number, silent_s in enumerate((20.0, 30.0, 30.0, 0.0)):  # 8 s, and twice the 10
            made._agents[number].beat = time.monotonic() - silent_s
        await made.ended(1, 2, 1, OUTCOME)  # a sign of life, too
        result = asyncio.create_task(made.result(1))
        while not made._reports.failed:
            await asyncio.sleep(0.01)
        assert [lives for _, lives in await made.nodes()] == [True, False, True, True, True, True]
        assert await made.beat(1, 1) == 0.0
        result.cancel()
        await made.open(2, 1)
        joined = asyncio.create_task(made.many([["next", 2, 0, 0, offer(0)]]))
        await made.gathered()
        assert await made.beat(2, 0) == pytest.approx(2.5)
        await made.begin(1, {}, 1)
        assert (await joined)[0]["do"] == "train"  # its first answer: nobody is told to wait

    run(test())


@pytest.mark.parametrize("agents", [2, 64])
def test_a_coordinator_that_did_not_run_loses_no_agent(agents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for longer than an agent may be silent; or its queue is so long that the beats of all agents are late."""

    async def test() -> None:
        monkeypatch.setattr(coordinator, "BEAT_S", 0.02)
        monkeypatch.setattr(coordinator, "LOST_S", 0.4)
        made, _ = await ready(size=agents)
        await made.begin(1, {}, agents)
        result = asyncio.create_task(made.result(1))
        for _ in range(10):
            await asyncio.sleep(0)
        now = time.monotonic()  # before the first look, a pause of this process counts as the agents' silence
        for agent in made._agents.values():
            agent.beat = now
        if agents == 2:
            time.sleep(0.6)
        else:
            await asyncio.sleep(0.6)
        for number in range(1, agents):
            assert await made.beat(1, number)
        assert not result.done()
        assert all(lives for _, lives in await made.nodes())
        while not made._reports.failed:  # agent 0 alone is silent
            await asyncio.sleep(0.01)
            for number in range(1, agents):
                assert await made.beat(1, number)
        assert [lives for _, lives in await made.nodes()] == [False, *[True] * (agents - 1)]
        result.cancel()

    run(test())


def test_calls_of_a_node_in_one_message() -> None:
    """Those that are done are answered; a call of `next` that still waits is made again, and gets its order then."""

    async def test() -> None:
        made = Coordinator()
        await made.open(1, 2)
        agents = [["next", 1, number, 1, offer(number)] for number in range(2)]
        both = asyncio.create_task(made.many(agents))
        await made.gathered()
        await made.retire(["node0"])
        answers = await both
        assert answers[0]["do"] == "leave"
        assert set(answers) == {0}
        again = asyncio.create_task(made.many(agents[1:]))
        await asyncio.sleep(0)
        await made.begin(1, {}, 1)
        assert (await again)[0]["env"]["RANK"] == "0"
        assert await made.many([["beat", 1, 1], ["next", 1, 1, 2, offer(1)], ["beat", 1, 0]]) == {0: 1.0, 2: 0.0}
        with pytest.raises(AssertionError):
            await made.many([["leave"]])

    run(test())


def test_too_few_agents() -> None:
    """An attempt without enough agents fails before it begins, with the reason; that a node is no longer used is none."""

    async def test() -> None:
        made, _ = await ready(size=3)
        await made.retire(["node0"])
        await made.agent_died(1, 1, {"type_name": "WorkerDied", "message": "gone", "kind": "worker_died"})
        await made.begin(1, {}, 2)
        (report,) = (await made.result(1)).values()
        assert report["lost"]["message"] == "gone"

    run(test())


def test_a_retired_node_leaves() -> None:
    """Its agents exit, and do not count as lost."""

    async def test() -> None:
        made, waiting = await ready()
        await made.retire(["node1"])
        assert (await waiting[1])["do"] == "leave"
        assert await made.nodes() == [("node0", True)]

    run(test())


def test_a_death_ends_the_others_at_once() -> None:
    """Rank 1 died: rank 0, which may not know it, is to be killed. The attempt ends after that."""

    async def test() -> None:
        made, waiting = await ready()
        await made.begin(1, {}, 2)
        for order in asyncio.as_completed(waiting):
            assert (await order)["do"] == "train"
        result = asyncio.create_task(made.result(1))
        killed = asyncio.create_task(made.next(1, 0, 2, offer(0)))
        await made.ended(1, 1, 1, DIED)
        assert (await killed)["do"] == "kill"
        assert not result.done()
        await made.ended(1, 0, 1, error("Connection closed by peer"))
        assert set(await result) == {0, 1}

    run(test())


def test_rank_0_may_finish_what_it_has_to_say() -> None:
    """If a rank ended with an exception, rank 0 is not killed before its own report; after that all are that have not ended. Those
    that have get no order before the next attempt."""

    async def test() -> None:
        made, waiting = await ready(size=3)
        await made.begin(1, {}, 3)
        await asyncio.gather(*waiting)
        result = asyncio.create_task(made.result(1))
        orders = [asyncio.create_task(made.next(1, number, 2, offer(number))) for number in (0, 2)]
        await made.ended(1, 1, 1, error("storage takes nothing"))
        for _ in range(100):  # turns of the event loop, in which an order would have been given
            await asyncio.sleep(0)
        assert not any(order.done() for order in orders)
        await made.ended(1, 0, 1, error("storage takes nothing"))
        assert (await orders[1])["do"] == "kill"
        await made.ended(1, 2, 1, DIED)
        assert len(await result) == 3
        assert not orders[0].done()
        await made.begin(2, {}, 3)
        assert (await orders[0])["attempt"] == 2

    run(test())


def test_of_thousands_of_lost_peers_one_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ranks lose a peer: none of those that report it within a time gets an order to be killed, the others do. Of those
    that lost a peer, and of those that died, the driver gets the first report, with their number."""

    async def test() -> None:
        monkeypatch.setattr(coordinator, "_ECHO_S", 1.0)
        made, waiting = await ready(size=64)
        await made.begin(1, {}, 64)
        await asyncio.gather(*waiting)
        result = asyncio.create_task(made.result(1))
        asked = [["next", 1, number, 2, offer(number)] for number in range(64)]
        orders = [asyncio.create_task(made.many(asked[at : at + 8])) for at in range(0, 64, 8)]
        await made.ended(1, 9, 1, DIED)
        for _ in range(100):  # turns of the event loop, in which an order would have been given
            await asyncio.sleep(0)
        assert not any(order.done() for order in orders)
        for rank in range(56):
            await made.ended(1, rank, 1, error("Connection closed by peer", at=1.0 + (rank - 5) ** 2))
        killed = await orders[7]
        assert [order["do"] for order in killed.values()] == ["kill"] * 8
        assert not any(order.done() for order in orders[:7])
        for rank in range(56, 64):
            await made.ended(1, rank, 1, DIED)
        reports = await result
        assert {rank: report["ranks"] for rank, report in reports.items()} == {5: 55, 9: 9}
        await made.begin(2, {}, 64)
        assert {order["attempt"] for some in orders[:7] for order in (await some).values()} == {2}

    run(test())


def test_lost_peers_are_no_cause_to_stop_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 lost a peer: the others have time to report the cause. After that, or after the time limit, all are killed."""

    async def test() -> None:
        for late in (False, True):
            monkeypatch.setattr(coordinator, "CAUSE_S", 0.05 if late else 1000.0)
            made, _ = await ready(size=3)
            await made.begin(1, {}, 3)
            result = asyncio.create_task(made.result(1))
            killed = asyncio.create_task(made.next(1, 2, 2, offer(2)))
            await made.ended(1, 0, 1, error("Connection closed by peer"))
            if not late:
                await asyncio.sleep(0.1)
                assert not killed.done()
                await made.ended(1, 1, 1, DIED)
            assert (await killed)["do"] == "kill"
            await made.ended(1, 1, 1, DIED)
            await made.ended(1, 2, 1, DIED)
            assert set(await result) == {0, 1}

    run(test())


def test_a_hung_rank_is_the_cause_not_those_that_were_killed_for_it() -> None:
    """Rank 1 hangs: all agents dump stacks, all ranks are killed, and the only report is that rank 1 hung."""

    async def test() -> None:
        made, _ = await ready()
        await made.begin(1, {}, 2)
        result = asyncio.create_task(made.result(1))
        await asyncio.sleep(0)
        await made.late(1, 1)
        assert (await made.next(1, 0, 2, offer(0)))["do"] == "look"
        sight = {"state": "S", "step": 4, "phase": "backward", "seconds": 11.0, "where": "", "answers": True}
        await made.seen(1, 0, 1, {**sight, "collectives": []})
        await made.seen(1, 1, 1, {**sight, "state": "T", "phase": "forward", "collectives": []})
        assert (await made.next(1, 0, 3, offer(0)))["do"] == "kill"
        await made.ended(1, 0, 1, DIED)
        await made.ended(1, 1, 1, DIED)
        reports = await result
        assert set(reports) == {1}
        hung = rank_error(1, reports[1])
        assert hung is not None
        assert (hung.rank, hung.kind) == (1, "worker_hung")

    run(test())


def test_who_is_late_is_not_heard() -> None:
    """Reports of an earlier attempt or group are ignored; agents of an earlier group are told to exit."""

    async def test() -> None:
        made, waiting = await ready(group=1)
        await made.begin(1, {}, 2)
        await made.open(2, 2)
        assert (await made.next(1, 0, 2, offer(0)))["do"] == "leave"
        news = [asyncio.create_task(made.next(2, number, 3, offer(number))) for number in range(2)]
        await made.gathered()
        await made.begin(2, {}, 2)
        assert (await news[0])["attempt"] == 2
        await made.ended(1, 0, 2, DIED)
        await made.ended(2, 0, 1, DIED)
        assert await made.reports() == {}
        for task in waiting:
            assert (await task)["do"] in ("train", "leave")

    run(test())


@pytest.mark.parametrize("off", [-3600.0, 3600.0])
def test_a_clock_that_is_wrong_changes_no_cause(off: float) -> None:
    """The clock of one host is an hour off, either way: the rank that failed first is the cause, as with good clocks, and its time
    is the coordinator's."""

    async def test() -> None:
        made, waiting = await ready()
        await made.begin(1, {}, 2)
        await asyncio.gather(*waiting)
        now = time.time()
        bad, well = error("first"), error("second")
        ahead = 0 if off < 0 else 1  # of the two, the one that would seem to be the later one
        for rank, report, at in ((0, bad, now + off * (ahead == 1)), (1, well, now + 0.01 + off * (ahead == 0))):
            report["at"], report["error"]["at"], report["error"]["rank"] = at, at - 0.5, rank
            await made.ended(1, rank, 1, report)
        found = [found for rank, report in (await made.reports()).items() if (found := rank_error(rank, report))]
        assert root_cause(found).cause == "RuntimeError: first"
        for each in found:
            assert each.at is not None
            assert now - 1 < each.at <= time.time()

    run(test())


def test_reports_as_errors() -> None:
    """Reports become the failures on which recovery decides."""
    assert rank_error(0, OUTCOME) is None
    died = rank_error(1, DIED)
    assert died is not None
    assert (died.rank, died.kind, died.at) == (1, "worker_died", 2.0)
    assert died.cause == "WorkerDied: process 7 on 10.0.0.1 exited without reporting an error (SIGKILL)"
    raised = rank_error(0, error("no"))
    assert raised is not None
    assert (raised.kind, raised.cause, raised.bases) == ("user_error", "RuntimeError: no", ("RuntimeError",))


def test_a_cancelled_attempt_costs_no_agent() -> None:
    """Cancelled before an agent has received the attempt: the agent receives it, then its end; the next attempt has all agents.
    After its end there is nothing to cancel."""

    async def test() -> None:
        made = Coordinator()
        await made.open(1, 2)
        waiting = asyncio.create_task(made.next(1, 0, 1, offer(0)))
        away = asyncio.create_task(made.next(1, 1, 1, offer(1)))
        await made.gathered()
        away.cancel()
        await made.begin(1, {}, 2)
        result = asyncio.create_task(made.result(1))
        seen = [(await waiting)["number"]]
        cancelled = asyncio.create_task(made.cancel())
        await asyncio.sleep(0)
        late = await made.next(1, 1, 1, offer(1))
        assert late["do"] == "train"
        while made._order["do"] != "kill":
            await asyncio.sleep(0)
        for number, heard in enumerate([*seen, late["number"]]):
            assert (await made.next(1, number, heard, offer(number)))["do"] == "kill"
            await made.ended(1, number, 1, DIED)
        assert {rank: (report["died"], report["ranks"]) for rank, report in (await result).items()} == {
            0: (DIED["died"], 2)
        }
        await cancelled
        await made.cancel()  # there is nothing to end any more
        assert await made.nodes() == [("node0", True), ("node1", True)]
        again = [asyncio.create_task(made.next(1, number, 3, offer(number))) for number in (0, 1)]
        await made.begin(2, {}, 2)
        assert [(await order)["do"] for order in again] == ["train", "train"]

    run(test())

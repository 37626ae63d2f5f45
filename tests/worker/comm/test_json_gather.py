"""Values between ranks: what was damaged on its way is an error, on the ranks that received it so."""

from __future__ import annotations

from typing import Any

from raydist.worker.checkpoint.agreement import RankFailure, on_first
from raydist.worker.comm.json_gather import broadcast_json, gather_json
from raydist.worker.distributed import Rank
from raydist.worker.faults.injector import _damage_message


def exchange(rank: Rank, victim: int) -> list[Any]:
    """A gather, a broadcast and an agreement, each with and without a damaged message at the victim."""
    calls = (
        lambda: gather_json([rank.rank, "ü"], rank.control),
        lambda: broadcast_json({"of": rank.rank}, rank.control),
        lambda: on_first(rank.rank, None, sum, rank.control),
    )
    found: list[Any] = []
    for call in calls:
        for damage in (True, False):
            if damage and rank.rank == victim:
                _damage_message()
            try:
                found.append(call())
            except (ConnectionError, RankFailure) as error:
                found.append(str(error.error if isinstance(error, RankFailure) else error))
    return found


def test_a_damaged_message_is_an_error(ranks: Any) -> None:
    """Rank 1 receives a flipped bit: it raises, the others have the value, and the next exchange is whole."""
    good = [[[rank, "ü"] for rank in range(3)], {"of": 0}, 3]
    told = ranks.run(exchange, 3, 1)
    for rank in (0, 2):
        assert told[rank] == [value for value in good for _ in range(2)]
    assert [told[1][place] for place in (1, 3, 5)] == good
    assert all("a value of rank 0 of the group was damaged on its way" in told[1][place] for place in (0, 2, 4))


def test_an_agreement_on_a_damaged_value_fails_on_every_rank(ranks: Any) -> None:
    """Rank 0 merges what all have sent: none waits for an answer that never comes."""
    for of_rank in ranks.run(exchange, 3, 0):
        assert "damaged on its way" in of_rank[4]
        assert of_rank[5] == 3

"""What ranks tell each other while they save and load: plain values and errors, as JSON.

Runs in: each train worker. Torch, never ray.

torch.distributed.checkpoint sends plans, results and exceptions between ranks as pickles, which run code: it is not used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from raydist.errors import CheckpointError, RaydistError, error_facts, error_from
from raydist.worker.comm.json_gather import broadcast_json, gather_json, gather_json_on_first


class RankFailure(Exception):
    """The first rank that failed, and its error; raised on every rank."""

    def __init__(self, rank: int, error: RaydistError) -> None:
        super().__init__(rank, error)
        self.rank, self.error = rank, error


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns foreign exceptions into a CheckpointError of text."""
    try:
        yield
    except RaydistError:
        raise
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


def on_first(
    value: Any, failure: BaseException | None, merge: Callable[[list[Any]], Any], group: dist.ProcessGroup | None
) -> Any:
    """Rank 0's `merge(values)` of all ranks' `value`, on every rank. A collective.

    `failure`: why this rank has no value. Raises RankFailure on every rank if one failed, or `merge` did.
    """
    answer: dict[str, Any] = {}
    every = None
    try:
        every = gather_json_on_first({"value": value} if failure is None else {"failed": _facts(failure)}, group)
    except ConnectionError as error:  # a value was damaged: the others wait for the answer
        answer = {"failed": (0, _facts(error))}
    if every is not None:
        failed = next(((rank, sent["failed"]) for rank, sent in enumerate(every) if "failed" in sent), None)
        if failed is None:
            try:
                answer = {"value": merge([sent["value"] for sent in every])}
            except Exception as error:
                failed = (0, _facts(error))
        if failed is not None:
            answer = {"failed": failed}
    answer = broadcast_json(answer, group)
    if "failed" in answer:
        rank, facts = answer["failed"]
        raise RankFailure(rank, error_from(facts, CheckpointError))
    return answer["value"]


def none_failed(failure: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Raises RankFailure on every rank if one has a `failure`. A collective."""
    every = gather_json(None if failure is None else _facts(failure), group)
    for rank, facts in enumerate(every):
        if facts is not None:
            raise RankFailure(rank, error_from(facts, CheckpointError))


def _facts(error: BaseException) -> list[str]:
    """Class, message and hint."""
    if isinstance(error, RaydistError):
        return error_facts(error)
    return ["CheckpointError", f"{type(error).__name__}: {error}", ""]

"""Choices that a run makes once, by measurement, and keeps: every restart has the same, and so the same bits.

Runs in: each train worker. Torch, never ray. Rank 0 writes a choice to the run's folder; every attempt reads it there. A choice
about links is made anew by the first restart after the doctor has found a link that became slow.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any, TypeVar

from raydist.parsing import parse_json
from raydist.run.directory import COMM, RunDir
from raydist.run.log import read_events
from raydist.worker.comm.json_gather import broadcast_json
from raydist.worker.distributed import Rank

T = TypeVar("T", bound=Any)
"""A dataclass of plain values."""


def links_file(run: RunDir, what: str) -> str:
    """Rank 0. The file of a choice about links: another one after each finding of a slow link."""
    slow = sum(
        event.kind == "finding" and event.data["rule"] == "slow_link" and event.data.get("state", "new") == "new"
        for event in read_events(run)
    )
    return f"{COMM}/{what}{f'-slow-{slow}' if slow else ''}.json"


def keep(run: RunDir, name: str, chosen: T) -> T:
    """Rank 0. Written once: an earlier choice, of an interrupted attempt, takes precedence. Raises StorageError."""
    if run.storage.write_new(name, to_json(chosen)):
        return chosen
    return read(run, name, type(chosen)) or chosen


def read(run: RunDir, name: str, made: type[T]) -> T | None:
    """The choice that was kept under this name; None if there is none."""
    if not run.storage.exists(name):
        return None
    return made(**parse_json(run.storage.read(name))["chosen"])


def to_json(chosen: Any) -> bytes:
    """The file of a choice."""
    return json.dumps({"v": 1, "at": time.time(), "chosen": asdict(chosen)}).encode()


def from_first(rank: Rank, made: type[T], value: T | None) -> T | None:
    """Rank 0's value on every rank."""
    fields = broadcast_json(asdict(value) if value is not None else None, rank.control)
    return None if fields is None else made(**fields)

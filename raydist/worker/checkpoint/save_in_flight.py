"""One save in flight on one rank, and its result.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from raydist.worker.checkpoint.save_plan import Part
from raydist.worker.checkpoint.shard_writer import ShardWriter
from raydist.worker.parameter_table import TensorTable

SAVED, FAILED, DELETING, WAITING, WRITING, FENCED = range(6)
"""The state of a save on one rank; among ranks the largest counts. Deleting: it is committed, and old checkpoints are being
deleted. Waiting: this rank has written, others have not."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save ended; true if it was committed. `cause`: the failure's, and `failed_rank` its rank; else None.

    `bytes`: of all shards (rank 0 only; 0 on others). `seconds`: from start to commit; for `stalled` of them the loop waited.
    `cpu_seconds`: of this rank's side thread.
    """

    step: int
    committed: bool
    bytes: int = 0
    seconds: float = 0.0
    stalled: float = 0.0
    cpu_seconds: float = 0.0
    failed_rank: int | None = None
    cause: str | None = None

    def __bool__(self) -> bool:
        return self.committed


@dataclass(slots=True)
class Save:
    """One save in flight. `table`: the tensors of all ranks."""

    step: int
    parts: list[Part]
    table: TensorTable
    plain: dict[str, Any]
    begun: float
    stalled: float = 0.0
    bytes: int = 0
    staged: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    writer: ShardWriter | None = None
    result: SaveResult | None = None

    def state(self) -> int:
        """All but FENCED."""
        if self.done.is_set():
            return SAVED if self.result else FAILED
        if self.result:
            return DELETING
        return WRITING if self.writer is None or self.writer.busy else WAITING

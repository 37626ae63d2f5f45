"""What a rank says of itself once a second: phases, memory, communication; to the mailbox of its node, beside the loop.

Runs in: each train worker, in a thread of its own. Torch, never ray. The loop never waits for it, and nobody else does.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch

from raydist.ipc.heartbeat import Heartbeat
from raydist.ipc.mailbox import Mailbox
from raydist.records import Event
from raydist.run.telemetry_schema import PHASES
from raydist.worker.distributed import Rank
from raydist.worker.metrics.collective_counters import CollectiveCounters


class Telemetry:
    """A context around an attempt's training. `interval_s`: None says nothing, and measures nothing.

    `tell` hears once why nothing can be said. The thread that enters is the one that trains.
    """

    def __init__(
        self,
        run_uri: str,
        rank: Rank,
        attempt: int,
        heartbeat: Heartbeat,
        interval_s: float | None,
        tell: Callable[[Event], None],
    ) -> None:
        self._run_uri, self._rank, self._heartbeat, self._tell = run_uri, rank, heartbeat, tell
        self._interval_s = interval_s
        self.memory: Callable[[], Mapping[str, int | None]] | None = None
        """Columns of this rank's memory, once somebody knows."""
        self._who: dict[str, Any] = {
            "kind": "rank",
            "host": socket.gethostname(),
            "node": rank.node_ip,
            "rank": rank.rank,
            "attempt": attempt,
            "pid": os.getpid(),
        }
        if rank.device.type == "cuda":
            self._who["gpu_uuid"] = str(torch.cuda.get_device_properties(rank.device).uuid)
        self._comm = CollectiveCounters(rank.device) if interval_s is not None and rank.world_size > 1 else None
        self._complained = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Telemetry:
        if self._interval_s is None:
            return self
        if self._comm is not None:
            self._comm.install()
        self._thread = threading.Thread(target=self._say, name="raydist-telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._comm is not None:
            self._comm.close()

    def backward(self) -> AbstractContextManager[None]:
        """Around a backward pass, whose engine waits for what it has sent."""
        return self._comm.backward() if self._comm is not None else nullcontext()

    def row(self) -> dict[str, Any]:
        """This rank now: columns of raydist.run.telemetry_schema, and what its node's agent needs."""
        spent = self._heartbeat.seconds()
        made: dict[str, Any] = {"at": time.time(), **self._who, "step": self._heartbeat.number}
        made |= {f"{phase}_seconds": spent[phase] for phase in PHASES}
        for op, total in (self._comm.totals() if self._comm is not None else {}).items():
            made |= {
                f"{op}_count": total.count,
                f"{op}_bytes": total.bytes,
                f"{op}_wire_bytes": total.wire_bytes,
                f"{op}_seconds": total.seconds,
                f"{op}_exposed_seconds": total.exposed_seconds,
            }
        if self.memory is not None:
            made |= {name: value for name, value in self.memory().items() if value is not None}
        return made

    def _complain(self) -> None:
        if self._comm is not None and self._comm.problem is not None and not self._complained:
            self._complained = True
            text = f"rank {self._rank.rank} counts no more communication: {self._comm.problem}"
            self._tell(Event("note", time.time(), {"text": text}))

    def _say(self) -> None:
        try:
            mailbox = Mailbox(self._run_uri, self._rank.node_ip, self._rank.rank)
            try:
                while not self._ended.wait(self._interval_s):
                    mailbox.write(self.row())
                    self._complain()
            finally:
                mailbox.close()
        except OSError as error:
            text = f"rank {self._rank.rank} tells its node nothing of memory and communication: {error}"
            self._tell(Event("note", time.time(), {"text": text}))

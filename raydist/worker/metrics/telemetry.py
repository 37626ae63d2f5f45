"""Writes a rank's phases, memory and communication to its node's mailbox, once per interval (`observe.interval_s`).

Runs in: each train worker, in its own thread. Torch, never ray. Nothing waits for it, the loop included.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from raydist.ipc.heartbeat import Heartbeat
from raydist.ipc.mailbox import Mailbox
from raydist.records import Event
from raydist.run.telemetry_schema import PHASES
from raydist.worker.distributed import Rank, use_device
from raydist.worker.metrics.collective_counters import CollectiveCounters
from raydist.worker.metrics.held import HeldClock
from raydist.worker.step_hooks import StepHook


class Telemetry(StepHook):
    """A context around an attempt's training. `interval_s`: None disables it.

    `tell` gets one note if telemetry fails. Enter the context in the training thread.
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
        self.sources: list[Callable[[], Mapping[str, float | None]]] = []
        """Each returns more columns of this rank's row: the loop adds memory, loader and hooks."""
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
        self._reported_problem = False
        self._collecting_since, self._gc_seconds = 0.0, 0.0
        self._ended = threading.Event()
        self._clock: HeldClock | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Telemetry:
        if self._interval_s is None:
            return self
        if self._comm is not None:
            self._comm.install()
        gc.callbacks.append(self._collecting)
        self._thread = threading.Thread(target=self._write_rows, name="raydist-telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            gc.callbacks.remove(self._collecting)
        if self._comm is not None:
            self._comm.close()

    def around_backward(self, index: int) -> AbstractContextManager[None]:
        """A context around the backward pass, whose engine waits for the collectives that it starts."""
        return self._comm.backward() if self._comm is not None else nullcontext()

    def row(self) -> dict[str, Any]:
        """The current row of this rank: columns of raydist.run.telemetry_schema, and those that its node's agent needs."""
        spent = self._heartbeat.seconds()
        made: dict[str, Any] = {"monotonic": time.monotonic(), **self._who, "step": self._heartbeat.number}
        made |= {f"{phase}_seconds": spent[phase] for phase in PHASES}
        made["gc_seconds"] = self._gc_seconds
        if self._clock is not None and self._clock.seconds is not None:
            made["held_seconds"] = self._clock.seconds
        for op, total in (self._comm.totals() if self._comm is not None else {}).items():
            made |= {
                f"{op}_count": total.count,
                f"{op}_bytes": total.bytes,
                f"{op}_wire_bytes": total.wire_bytes,
                f"{op}_seconds": total.seconds,
                f"{op}_exposed_seconds": total.exposed_seconds,
            }
        for source in self.sources:
            made |= {name: value for name, value in source().items() if value is not None}
        return made

    def _collecting(self, phase: str, info: dict[str, Any]) -> None:
        """Python calls it before and after each garbage collection, in the thread that collects, which holds the GIL."""
        if phase == "start":
            self._collecting_since = time.perf_counter()
        else:
            self._gc_seconds += time.perf_counter() - self._collecting_since

    def _report_problem(self) -> None:
        if self._comm is not None and self._comm.problem is not None and not self._reported_problem:
            self._reported_problem = True
            text = f"rank {self._rank.rank} has stopped counting communication: {self._comm.problem}"
            self._tell(Event("note", time.time(), {"text": text}))

    def _write_rows(self) -> None:
        assert self._interval_s is not None
        use_device(self._rank.device)  # collectives are timed by events
        self._clock = HeldClock()
        try:
            mailbox = Mailbox(self._run_uri, self._rank.node_ip, self._rank.rank)
            try:
                mailbox.write(
                    self.row()
                )  # totals are differences: what happens in the first interval needs a row before it
                while not self._clock.wait(self._ended, self._interval_s):
                    mailbox.write(self.row())
                    self._report_problem()
            finally:
                mailbox.close()
        except OSError as error:
            text = f"rank {self._rank.rank} cannot report memory and communication to its node: {error}"
            self._tell(Event("note", time.time(), {"text": text}))
        finally:
            self._clock.close()

"""Traces the next steps of a live run on every rank, with torch's profiler (kineto), between two steps.

Runs in: each train worker. Torch, never ray. raydist/run/requests.py describes how a request gets here, raydist/report/trace.py
how the parts of the ranks are merged.

    rank 0's reporter: trace 7 is requested -> a number among the step's sums -> all ranks know it after the same step
      -> the next step: profiler on, phases as ranges -> ... -> nothing more is recorded
      -> a step later: profiler off -> a thread writes this rank's part to storage

Why a step later: the profiler frees its events when it stops. A message or collective of gloo records its end when it is waited
for, or in gloo's own thread after that has woken the waiting one; if the profiler has stopped by then, it writes into freed memory
(torch 2.13: SIGSEGV, or other data changes). zero1 and zero2 begin to gather the weights at the end of a step, and wait for them in
the next one. At the end of a run the tracer waits instead. The trace of an attempt that fails is not stopped.

Without a request a step compares one number, and a phase reads one attribute. An error here is reported, and training continues.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from raydist.ipc.heartbeat import Heartbeat
from raydist.private_files import temporary_folder
from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.run.requests import part_name
from raydist.worker.comm import gloo_p2p
from raydist.worker.distributed import Rank

VERSION = 1
STEP = "ProfilerStep#"
"""The range of a step, with its number: tools for kineto traces search for this name."""
RANGES = {"data": "data wait", "update": "optimizer", "save": "checkpoint"}
"""Phases (raydist/ipc/heartbeat.py) whose range has another name."""
CLOSE_S = 60.0
"""How long the end of a run waits for a part to be written."""

Message = tuple[str, int, str]
"""A collective of a step: (kind, elements that this rank puts in, name)."""


@dataclass(slots=True)
class _Trace:
    """One trace on this rank. Steps before `first` only warm up the profiler."""

    number: int
    first: int
    last: int
    profile: profile
    recording: bool = False
    complete: bool = False
    """The last step is over."""


_unfinished: list[profile] = []
"""Of attempts that failed during a trace, whose collectives may end later in gloo's threads. The next trace of this process stops
them."""


class _Ranges:
    """Nested ranges in the training thread: a step, and in it one phase after another; on CUDA also NVTX ranges."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._open: list[record_function] = []
        self._phase = ""

    def step(self, number: int) -> None:
        """A step begins."""
        self._enter(f"{STEP}{number}")
        self._phase = ""

    def phase(self, phase: str) -> None:
        """The phase that `Heartbeat.enter` got."""
        if len(self._open) > 1:
            self._leave()
        # Here the update waits for the copy of an earlier state; a save after the step is the checkpoint.
        name = "checkpoint copy" if (self._phase, phase) == ("backward", "save") else RANGES.get(phase, phase)
        self._phase = phase
        self._enter(name)

    def close(self) -> None:
        """Ends all open ranges."""
        while self._open:
            self._leave()

    def _enter(self, name: str) -> None:
        made = record_function(name)
        made.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(made)
        if self._cuda:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        if self._cuda:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        self._open.pop().__exit__(None, None, None)


class Tracer:
    """The traces of one rank in one attempt. Its methods are for the training thread, and raise nothing.

    `heartbeat` reports the phases while a trace is recorded. `tell` must not block. `messages`: the strategy's collectives in their
    order, if it names them. `all_threads`: collectives are started by other threads than those of the backward pass, too.
    """

    def __init__(
        self,
        run: RunDir,
        rank: Rank,
        attempt: int,
        heartbeat: Heartbeat,
        tell: Callable[[Event], None],
        messages: Callable[[], Sequence[Message]] = lambda: (),
        all_threads: bool = False,
    ) -> None:
        self._run, self._rank, self._attempt, self._heartbeat, self._tell = run, rank, attempt, heartbeat, tell
        self._messages, self._all_threads = messages, all_threads
        self._cuda = rank.device.type == "cuda"
        self._ranges = _Ranges(self._cuda)
        self._trace: _Trace | None = None
        self._begun: set[int] = set()
        self._newest = 0
        self._writing: list[threading.Thread] = []

    def requested(self, waiting: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Rank 0, before a step: (number, steps) of the oldest trace that has not begun, for a sum over the ranks; else (0, 0)."""
        if self._trace is not None:
            return 0, 0
        return next(((int(n), int(steps)) for n, steps in waiting if n not in self._begun), (0, 0))

    def step(self, number: int, asked: tuple[int, int], *, ends: bool) -> None:
        """Between two steps, every rank. `number`: the next step, also if training ends here. `asked`: the sum over the ranks of
        `requested`, so that all ranks start and stop at the same step.
        """
        try:
            trace = self._trace
            if trace is None:
                if asked[0] and asked[0] not in self._begun and not ends:
                    self._begin(number, *asked)
            elif trace.complete:
                self._finish()
            else:
                self._ranges.close()
                if number > trace.last or ends:
                    self._complete(trace, number - 1, ends)
            if self._trace is not None and not self._trace.complete and number >= self._trace.first:
                self._record(number)
        except Exception as error:  # of kineto, or because the user's own profiler is active
            self._abandon(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Stops a trace whose last step is over, abandons one that is being recorded, and waits until parts are written."""
        if self._trace is not None and self._trace.complete:
            self.step(self._trace.last + 1, (0, 0), ends=True)
        elif self._trace is not None:
            if self._trace.recording:
                _unfinished.append(self._trace.profile)
                self._trace = None
            self._abandon("the attempt ended")
        for thread in self._writing:
            thread.join(CLOSE_S)

    def _begin(self, number: int, trace: int, steps: int) -> None:
        self._begun.add(trace)
        self._newest = trace
        while _unfinished:
            _unfinished.pop().stop_trace()
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise RuntimeError("another profiler is on in this process")
        # CUPTI's first step is slow, so the profiler observes one step before it records.
        first = number + self._cuda
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._cuda
        self._heartbeat.enter("save")  # a phase without a deadline: CUPTI's first start takes seconds
        config = _ExperimentalConfig(profile_all_threads=self._all_threads)
        made = profile(activities=activities, record_shapes=True, experimental_config=config)
        made.prepare_trace()
        self._trace = _Trace(trace, first, first + steps - 1, made)
        if self._rank.first:
            about = {"trace": trace, "attempt": self._attempt, "first_step": first, "steps": steps}
            self._tell(Event("trace_started", time.time(), {**about, "world_size": self._rank.world_size}))

    def _record(self, number: int) -> None:
        assert self._trace is not None
        if not self._trace.recording:
            self._trace.profile.start_trace()
            self._trace.recording = True
            self._heartbeat.on_phase = self._ranges.phase
        self._ranges.step(number)

    def _complete(self, trace: _Trace, last: int, ends: bool) -> None:
        """The last step to trace is over; what it has begun may be in progress."""
        if not trace.recording:
            return self._abandon("the run ended")
        trace.complete = True
        self._heartbeat.on_phase = None
        trace.profile.add_metadata_json("raydist", json.dumps(self._about(trace, last)))
        # NCCL's work ends its record at its launch. With all threads, a record that ends after the stop is left out.
        if self._cuda or self._all_threads:
            return self._finish()
        torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
        if ends:
            gloo_p2p.settle()
        return None

    def _finish(self) -> None:
        trace = self._trace
        assert trace is not None
        self._stop()
        thread = threading.Thread(target=self._write, args=(trace,), name="raydist-trace", daemon=True)
        self._writing = [t for t in self._writing if t.is_alive()] + [thread]
        thread.start()

    def _stop(self) -> None:
        """Removes the trace from this process, except what it has recorded."""
        trace, self._trace = self._trace, None
        self._heartbeat.on_phase = None
        self._ranges.close()
        torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]
        if trace is None:
            return
        self._heartbeat.enter("save")  # a phase without a deadline: kineto may have millions of events to process
        if not trace.recording:  # only warmed up: kineto frees it when a trace stops
            trace.profile.start_trace()
        trace.profile.stop_trace()

    def _abandon(self, cause: str) -> None:
        try:
            self._stop()
        except Exception as error:
            cause += f"; {type(error).__name__}: {error}"
        self._failed(self._newest, cause)

    def _failed(self, trace: int, cause: str) -> None:
        data = {"trace": trace, "rank": self._rank.rank, "attempt": self._attempt, "cause": cause}
        self._tell(Event("trace_failed", time.time(), data))

    def _about(self, trace: _Trace, last: int) -> dict[str, Any]:
        """Facts about this part, for the merge."""
        return {
            "v": VERSION,
            "run": self._run.name,
            "trace": trace.number,
            "attempt": self._attempt,
            "rank": self._rank.rank,
            "world_size": self._rank.world_size,
            "first_step": trace.first,
            "last_step": last,
            "host": socket.gethostname(),
            "clock": _clock(),
            "device": str(self._rank.device),
            "pid": os.getpid(),
            "thread": threading.get_native_id(),
            "one_group": _one_group(self._rank.world_size),
            "messages": [list(message) for message in self._messages()],
        }

    def _write(self, trace: _Trace) -> None:
        """In its own thread, because storage may be slow."""
        try:
            with temporary_folder() as folder:
                path = folder / "trace.json"
                trace.profile.export_chrome_trace(str(path))
                data = gzip.compress(path.read_bytes(), compresslevel=6)
            name = part_name(trace.number, self._attempt, self._rank.rank, self._rank.world_size)
            self._run.storage.write(name, data)
        except Exception as error:
            self._failed(trace.number, f"{type(error).__name__}: {error}")


def _one_group(world_size: int) -> bool:
    """Whether all groups of this rank have all ranks: in a trace, gloo's collectives do not name their group."""
    groups = dist.distributed_c10d._world.pg_group_ranks.values() if dist.is_initialized() else ()
    return all(len(ranks) == world_size for ranks in groups)


def _clock() -> str:
    """An id of the clock that the processes of this host share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()

"""Does to a rank what `raydist.faults` says, where its loop comes by: for tests, and to see a job survive.

Runs in: a rank of a run with faults; no other imports this. Torch, never ray: what only the driver can do it is asked for, by
the note that every fault leaves before it happens (cluster/run/fault_injector.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raydist import faults, registry
from raydist.checkpoint import manifest
from raydist.data.batches import Batches, StepBatch
from raydist.faults import Fault
from raydist.ipc import AGENT_PID
from raydist.ipc.heartbeat import Heartbeat
from raydist.run.directory import RunDir
from raydist.worker.distributed import Rank
from raydist.worker.faults.faulty_storage import Illness, ill_storage
from raydist.worker.parallel._model_graph import plain_name

_WAIT_S = 60.0
"""How long to wait for the driver to do what it was asked for, and for a checkpoint to be committed that is to be damaged."""
_POLL_S = 0.02
_HOG_BYTES = 64 << 20


class InjectedError(Exception):
    """What `fault: raise` raises, as if the user's code had a bug; or why a fault could not be injected."""


class Injector:
    """The faults of one rank in one attempt, whose loop calls these methods. `asked`: those of the run, plain.

    If storage is to fail, then `run.storage` does, from now on.
    """

    def __init__(self, asked: Sequence[Mapping[str, Any]], run: RunDir, rank: Rank, attempt: int) -> None:
        every = faults.parse(asked)
        self._due = [
            (name, fault)
            for name, fault in zip(faults.names(every), every, strict=True)
            if fault.rank in (None, rank.rank) or isinstance(fault, faults.SkipCollective)
        ]
        self._run, self._rank, self._attempt = RunDir(run.storage), rank, attempt
        self._passed: set[str] = set()
        self._model: nn.Module | None = None
        self._tampering: Fault | None = None
        self._slow: list[tuple[int, float]] = []
        """(last step, seconds) of slow ranks."""
        self._slept = 0
        self._ill = Illness()
        if any(isinstance(fault, faults.StorageFault) for _, fault in self._due):
            run.storage = ill_storage(run.full_uri, self._ill)

    def watch(self, heartbeat: Heartbeat) -> Heartbeat:
        """The heartbeat that the loop is to have instead: where it goes by, faults happen."""
        return _Wire(heartbeat, self._reached)

    def attach(self, model: nn.Module) -> None:
        """The model, whose numbers may go wrong."""
        self._model = model
        if any(isinstance(fault, faults.BadNumber | faults.LossSpike) for _, fault in self._due):
            model.register_forward_hook(self._tamper)

    def data(self, batches: Batches, made: Callable[[StepBatch], StepBatch]) -> Callable[[StepBatch], StepBatch]:
        """For the loader's thread: `made`, which may take long, or for ever."""

        def slowly(batch: StepBatch) -> StepBatch:
            step = batch.cursor.epoch * batches.steps_per_epoch + batch.cursor.offset // batches.global_batch + 1
            for name, fault in self._due:
                if fault.step == step and isinstance(fault, faults.SlowData | faults.StuckData):
                    if not self._claim(name, fault):
                        continue
                    if isinstance(fault, faults.SlowData):
                        time.sleep(fault.seconds)
                    else:
                        threading.Event().wait()
            return made(batch)

        return slowly

    def _reached(self, step: int, phase: str) -> None:
        if phase == "data":
            self._tampering = None
        for name, fault in self._due:
            here = fault.step == step and fault.at == phase and name not in self._passed
            if here and not isinstance(fault, faults.SlowData | faults.StuckData):
                self._passed.add(name)  # forward and eval come more than once in a step
                if isinstance(fault, faults.SkipCollective):
                    self._skip(name, fault)
                elif (note := self._claim(name, fault)) is not None:
                    self._do(fault, note)
        if phase == "forward" and self._slept != step:
            self._slept = step
            time.sleep(sum(seconds for last, seconds in self._slow if step <= last))

    def _claim(self, name: str, fault: Fault) -> str | None:
        """Its note, which is there for good before it happens; None if it has happened as often as it is to."""
        rank = self._rank
        body = {
            "fault": fault.fault,
            "by": fault.by,
            "rank": rank.rank,
            "step": fault.step,
            "attempt": self._attempt,
            "at": time.time(),
            "node_ip": rank.node_ip,
            "pid": os.getpid(),
            "asked": fault.model_dump(mode="json"),
        }
        notes = (faults.note(name, rank.rank, time) for time in range(1, fault.times + 1))
        return next((note for note in notes if self._run.storage.write_new(note, json.dumps(body).encode())), None)

    def _do(self, fault: Fault, note: str) -> None:
        print(f"raydist: injecting {fault!r}", file=sys.stderr, flush=True)
        match fault:
            case faults.Kill():
                os.kill(os.getpid(), signal.SIGKILL)
            case faults.Segfault():
                _no_core()
                ctypes.string_at(0)
            case faults.Abort():
                _no_core()
                os.abort()
            case faults.Exit(code=code):
                sys.exit(code)
            case faults.Raise(message=message):
                raise InjectedError(message)
            case faults.Suspend():
                os.kill(os.getpid(), signal.SIGSTOP)
            case faults.HoldGil(seconds=seconds):
                _hold_gil(seconds)
            case faults.Deadlock():
                lock = threading.Lock()
                with lock:
                    lock.acquire()
            case faults.OutOfMemory():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 EiB (injected)")
            case faults.MemoryHog(limit_mb=limit_mb):
                _hog(limit_mb)
            case faults.KillAgent():
                _agent().kill()
            case faults.KillNode():
                _kill_node()
            case faults.BadNumber() | faults.LossSpike():
                self._tampering = fault
            case faults.FlipBit(parameter=parameter, bit=bit):
                self._flip(parameter, bit)
            case faults.SlowRank(seconds=slow, steps=steps):
                self._slow.append((fault.step + steps - 1, slow))
            case faults.DamageCheckpoint():
                self._damage(fault)
            case faults.StorageFault():
                self._ill.catch(fault)
            case _ if fault.by == "driver":
                self._await_driver(fault, note)
            case _:
                raise AssertionError(f"nobody does {fault!r}")

    def _skip(self, name: str, fault: Fault) -> None:
        """All ranks come by: they agree whether it happens, and then all but one meet in a collective."""
        claimed: list[str | None] = [None] * self._rank.world_size
        mine = self._claim(name, fault) if self._rank.rank == fault.rank else None
        dist.all_gather_object(claimed, mine, group=self._rank.control)
        if any(claimed) and self._rank.rank != fault.rank:
            dist.all_reduce(torch.zeros(1), group=self._rank.control)

    def _tamper(self, module: nn.Module, arguments: Any, logits: Tensor) -> Tensor | None:
        """The model's forward hook."""
        fault = self._tampering
        if fault is None or not module.training:
            return None
        match fault:
            case faults.LossSpike(factor=factor):
                return logits * factor
            case faults.BadNumber(where="loss", value=value):
                return logits * float(value)
            case faults.BadNumber(value=value):
                logits.register_hook(lambda gradient: gradient * float(value))  # type: ignore[no-untyped-call]
        return None

    def _flip(self, parameter: str | None, bit: int) -> None:
        assert self._model is not None, "attach() comes first"
        named = {plain_name(name): p for name, p in self._model.named_parameters()}
        name = parameter or next(iter(named))
        if name not in named:
            raise InjectedError(f"flip_bit: parameter: {name!r} is not in the model; {_near(name, named)}")
        local = named[name].data  # which autograd does not see change, as it sees no cell of a memory do so
        local = local.to_local() if hasattr(local, "to_local") else local
        with torch.no_grad():
            local.view(-1)[:1].view(torch.uint8)[bit // 8] ^= 1 << bit % 8

    def _damage(self, fault: faults.DamageCheckpoint) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not (steps := [s for s in self._run.committed() if fault.checkpoint in (None, s)]):
            if time.monotonic() > deadline:
                which = "no checkpoint" if fault.checkpoint is None else f"no checkpoint of step {fault.checkpoint}"
                raise InjectedError(f"damage_checkpoint: checkpoint: {which} was committed in {_WAIT_S:.0f} s")
            time.sleep(_POLL_S)
        found = manifest.read(self._run, steps[-1])
        file = self._run.manifest(found.step) if fault.what == "manifest" else min(found.files)
        assert file is not None
        name, storage = manifest.path(found.step, file), self._run.storage
        data = bytearray(storage.read(name))
        half = len(data) // 2
        match fault.what:
            case "missing":
                storage.delete(name)
                return
            case "truncated":
                del data[half:]
            case "torn":
                data[half:] = bytes(len(data) - half)
            case "flipped" | "manifest":
                data[half] ^= 1
        storage.write(name, bytes(data))

    def _await_driver(self, fault: Fault, note: str) -> None:
        """The driver does it when it sees the note; until then training stands still, so that it happens in this step."""
        deadline = time.monotonic() + _WAIT_S
        while self._run.storage.size(faults.done(note)) is None:
            if time.monotonic() > deadline:
                raise InjectedError(f"{fault.fault}: the driver has not done it in {_WAIT_S:.0f} s")
            time.sleep(_POLL_S)


class _Wire(Heartbeat):
    """A heartbeat that tells where the loop is, after the agent can see it."""

    def __init__(self, heartbeat: Heartbeat, reached: Callable[[int, str], None]) -> None:
        self._heartbeat, self._reached = heartbeat, reached
        self._step, self._phase = 0, "start"

    def step(self, number: int) -> None:
        self._step, self._phase = number, "data"
        self._heartbeat.step(number)
        self._reached(number, "data")

    def enter(self, phase: str) -> None:
        self._heartbeat.enter(phase)
        # "save" behind "backward" is where the update waits for the copy of an earlier state.
        passing = (self._phase, phase) == ("backward", "save")
        self._phase = phase
        if self._step and not passing:
            self._reached(self._step, phase)

    def stepped(self, seconds: float) -> None:
        self._heartbeat.stepped(seconds)

    def compiling(self, now: bool) -> None:
        self._heartbeat.compiling(now)


def _no_core() -> None:
    """This crash is no news: nobody will want to look at its memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _hold_gil(seconds: int) -> None:
    # A signal would end the sleep, and the interpreter would then let the other threads run.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(seconds)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hog(limit_mb: int | None) -> NoReturn:
    before = resource.getrlimit(resource.RLIMIT_AS)
    if limit_mb is not None:
        now = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (now + (limit_mb << 20), before[1]))
    held = []
    try:
        while True:
            held.append(b"\1" * _HOG_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _agent() -> psutil.Process:
    """The process that asked for the fork server that started this rank."""
    if AGENT_PID not in os.environ:
        raise InjectedError("kill_agent: this rank has no agent")
    return psutil.Process(int(os.environ[AGENT_PID]))


def _kill_node() -> None:
    above = _agent().parents() if AGENT_PID in os.environ else []
    raylet = next((p for p in above if p.name() == "raylet"), None)
    if raylet is None:
        raise InjectedError("kill_node: this rank is below no raylet")
    raylet.suspend()  # it starts nobody any more, and tells of no death before its own
    below, mine = raylet.children(recursive=True), [process.pid for process in psutil.Process().parents()]
    # Those above this process last: it dies with them.
    for process in (*(p for p in below if p.pid not in mine), raylet, *(p for p in below if p.pid in mine)):
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):  # some die with others
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _near(name: str, named: Mapping[str, object]) -> str:
    return registry.did_you_mean(name, list(named))

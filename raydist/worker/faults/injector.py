"""Injects the faults of `raydist.faults` on a rank, at points of its loop: for tests, and to test how a job recovers.

Runs in: a rank of a run with faults; other runs do not import this. Torch, never ray. Every fault writes a note before it happens;
for faults that only the driver can inject, the note is the request to the driver (cluster/run/fault_injector.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raydist import faults
from raydist.checkpoint import manifest, memory_layout
from raydist.data.batches import Batches, StepBatch
from raydist.faults import Fault, clock
from raydist.ipc.heartbeat import Heartbeat
from raydist.run.directory import CHECKPOINTS, RunDir
from raydist.worker.comm import json_gather
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.faults import InjectedError, host_pressure, links, numbers, run_processes
from raydist.worker.faults.faulty_storage import Illness, ill_storage
from raydist.worker.faults.readings import Readings

_WAIT_S = 60.0
"""The time to wait for the driver to inject a fault, and for the commit of a checkpoint to damage."""
_POLL_S = 0.02
_HOG_BYTES = 64 << 20
_FEW, _SLOTS = 8, 2


class Injector:
    """The faults of one rank in one attempt, whose loop calls these methods. `requested`: the faults of the run, as plain values.
    `memory`: the folder of the node's memory store. `agent(what, **data)`: calls the rank's agent.

    If the rank has a storage fault, replaces `run.storage` by one that can fail.
    """

    def __init__(
        self,
        requested: Sequence[Mapping[str, Any]],
        run: RunDir,
        rank: Rank,
        attempt: int,
        memory: str | None = None,
        agent: Callable[..., object] | None = None,
    ) -> None:
        every = faults.parse(requested)
        self._due = [
            (name, fault)
            for name, fault in zip(faults.names(every), every, strict=True)
            if fault.rank in (None, rank.rank) or isinstance(fault, faults.SkipCollective)
        ]
        self._run, self._rank, self._attempt, self._memory = RunDir(run.storage), rank, attempt, memory
        self._agent = agent
        self._passed: set[str] = set()
        self._model: nn.Module | None = None
        self._numbers = numbers.Numbers()
        self._slow: list[tuple[int, float, str]] = []
        """(last step, seconds, phase) of slow ranks."""
        self._entered: tuple[int, set[str]] = (0, set())
        """A step, and its phases so far."""
        self.readings = Readings()
        self._lasting: threading.Thread | None = None
        """Ends with the lack of descriptors or processes, in which no note can be written."""
        self._slow_data: list[tuple[int, float]] = []
        self._garbage: list[tuple[int, list[Any]]] = []
        """(last step, objects that are kept) of faults of the garbage collector."""
        self._leaks: list[tuple[int, int, torch.device]] = []
        """(last step, bytes in each step, where)."""
        self._leaked: list[Tensor] = []
        self._ill = Illness()
        if any(isinstance(fault, faults.StorageFault) for _, fault in self._due):
            run.storage = ill_storage(run.storage, self._ill)

    def watch(self, heartbeat: Heartbeat) -> Heartbeat:
        """A heartbeat for the loop that injects faults at the loop's phases."""
        return _InjectingHeartbeat(heartbeat, self._reached)

    def attach(self, model: nn.Module) -> None:
        """Registers the model, for faults in its numbers."""
        self._model = model
        self._numbers.attach(model, [fault for _, fault in self._due])

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Registers the optimizer, for faults in its updates."""
        self._numbers.attach_optimizer(optimizer, [fault for _, fault in self._due])

    def data(self, batches: Batches, made: Callable[[StepBatch], StepBatch]) -> Callable[[StepBatch], StepBatch]:
        """Wraps `made`, which the loader's thread calls, with faults: it may sleep, or block forever."""

        def slowly(batch: StepBatch) -> StepBatch:
            step = batches.number(batch.cursor)
            for name, fault in self._due:
                if fault.step == step and isinstance(fault, faults.SlowData | faults.StuckData):
                    if not self._claim(name, fault):
                        continue
                    if isinstance(fault, faults.SlowData):
                        self._slow_data.append((step + fault.steps - 1, fault.seconds))
                    else:
                        threading.Event().wait()
            time.sleep(sum(seconds for last, seconds in self._slow_data if step <= last))
            return made(batch)

        return slowly

    def _reached(self, step: int, phase: str) -> None:
        if phase == "data":
            self._numbers.step(step)
        if step != self._entered[0]:
            self._entered = step, set()
        for name, fault in self._due:
            here = fault.step == step and fault.at == phase and name not in self._passed
            if here and not isinstance(fault, faults.SlowData | faults.StuckData):
                self._passed.add(name)  # forward and eval may occur several times in a step
                if isinstance(fault, faults.SkipCollective):
                    self._skip(name, fault)
                elif (note := self._claim(name, fault)) is not None:
                    self._do(fault, note)
        if phase in self._entered[1]:
            return
        self._entered[1].add(phase)
        if slow := sum(seconds for last, seconds, at in self._slow if step <= last and phase == at):
            time.sleep(slow)
        if phase == "forward":
            self._garbage = [one for one in self._garbage if step <= one[0]]
            if self._garbage:
                gc.collect()
            self._leaked += [
                torch.ones(size, dtype=torch.uint8, device=at) for last, size, at in self._leaks if step <= last
            ]

    def _claim(self, name: str, fault: Fault) -> str | None:
        """Writes the note of a fault, which is durable before the fault happens; None if it has happened `times` times."""
        if self._lasting is not None:
            self._lasting.join()
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
            case faults.Pause(seconds=stop, gap=gap, stops=stops):
                host_pressure.pause(stop, gap, stops)
            case faults.CpuHog(seconds=hog, processes=processes):
                host_pressure.hog(hog, processes)
            case faults.CpuQuota(seconds=held, cpus=cpus):
                host_pressure.quota(held, cpus)
            case faults.Garbage(objects=objects, steps=steps):
                self._garbage.append((fault.step + steps - 1, [[] for _ in range(objects)]))
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
            case faults.Leak(mib=mib, steps=steps, where=where):
                device = self._rank.device if where == "device" else torch.device("cpu")
                self._leaks.append((fault.step + steps - 1, int(mib * 2**20), device))
            case faults.KillAgent():
                run_processes.find("agent", fault.fault).kill()
            case faults.KillNode():
                run_processes.kill_node(fault.fault)
            case faults.KillProcess(process=process, lack_of_memory=True):
                host_pressure.starve(fault.fault, run_processes.find(process, fault.fault).pid)
            case faults.KillProcess(process=process):
                run_processes.find(process, fault.fault).kill()
            case faults.SuspendProcess(process=process, seconds=seconds):
                run_processes.suspend(run_processes.find(process, fault.fault), seconds)
            case faults.NoDescriptors(seconds=lasting):
                self._lasting = _open_all(lasting)
            case faults.NoProcesses(seconds=lasting):
                self._lasting = host_pressure.no_processes(lasting)
            case faults.FullSharedMemory(seconds=lasting, limit_mb=limit):
                host_pressure.fill_shared_memory(lasting, limit)
            case faults.SlowNetwork(seconds=lasting, bytes_per_s=rate):
                links.slow(lasting, rate)
            case faults.OneWayCut(seconds=lasting, share=share):
                links.deaf(lasting, share)
            case faults.ClockJump(process="agent", seconds=ahead):
                if self._agent is None:
                    raise InjectedError("clock_jump: process: this rank has no agent")
                self._agent("clock", seconds=ahead)
            case faults.ClockJump(seconds=ahead):
                clock.jump(ahead)
            case faults.BadNumber() | faults.ExpertImbalance() | faults.ScaleGradient() | faults.ScaleActivations():
                self._numbers.begin(fault, fault.step + fault.steps - 1)
            case faults.LearningRate():
                self._numbers.begin(fault, fault.step + fault.steps - 1)
            case faults.LossSpike():
                self._numbers.begin(fault, fault.step)
            case faults.FlipBit():
                assert self._model is not None, "attach() comes first"
                numbers.flip(self._model, fault)
            case faults.SlowRank(seconds=slow, steps=steps):
                self._slow.append((fault.step + steps - 1, slow, fault.phase))
            case faults.Reading():
                self.readings.begin(fault)
            case faults.DamageCheckpoint():
                self._damage(fault)
            case faults.DamageMessage():
                _damage_message()
            case faults.DamageCopy():
                self._damage_copy()
            case faults.StorageFault():
                self._ill.catch(fault)
            case _ if fault.by == "driver":
                self._await_driver(fault, note)
            case _:
                raise AssertionError(f"no code injects {fault!r}")

    def _skip(self, name: str, fault: Fault) -> None:
        """Every rank: they agree whether the fault happens, and then all but one call a collective."""
        claim = self._claim(name, fault) if self._rank.rank == fault.rank else None
        if any(gather_json(claim, self._rank.control)) and self._rank.rank != fault.rank:
            dist.all_reduce(torch.zeros(1), group=self._rank.control)

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

    def _damage_copy(self) -> None:
        name = f"shard-{self._rank.rank:05d}-of-{self._rank.world_size:05d}-*.bin"
        deadline = time.monotonic() + _WAIT_S
        found: list[Path] = []
        # A rank has two slots: with two copies none is being made, which would have a hash of the changed bytes.
        while self._memory is not None and len(found) < _SLOTS and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found = [file for file in memory_layout.files(Path(self._memory, CHECKPOINTS)) if file.match(name)]
        if len(found) < _SLOTS:
            raise InjectedError(
                f"damage_copy: step: there are {len(found)} copies of this rank in memory, not {_SLOTS}; give a later step"
            )
        for path in found:
            with path.open("r+b") as file:
                first = file.read(1)
                file.seek(0)
                file.write(bytes(byte ^ 1 for byte in first))

    def _await_driver(self, fault: Fault, note: str) -> None:
        """Waits until the driver, which reads the note, has injected the fault, so that it happens in this step."""
        deadline = time.monotonic() + _WAIT_S
        while self._run.storage.size(faults.done(note)) is None:
            if time.monotonic() > deadline:
                raise InjectedError(f"{fault.fault}: the driver has not injected it in {_WAIT_S:.0f} s")
            time.sleep(_POLL_S)


class _InjectingHeartbeat(Heartbeat):
    """A heartbeat that calls `reached(step, phase)`, after the agent can see the phase."""

    def __init__(self, heartbeat: Heartbeat, reached: Callable[[int, str], None]) -> None:
        self._heartbeat, self._reached = heartbeat, reached
        self._step, self._phase = 0, "start"

    def step(self, number: int) -> None:
        self._step, self._phase = number, "data"
        self._heartbeat.step(number)
        self._reached(number, "data")

    def enter(self, phase: str) -> None:
        self._heartbeat.enter(phase)
        # "save" after "backward" is the wait of the update for the copy of an earlier state, not a save.
        waiting = (self._phase, phase) == ("backward", "save")
        self._phase = phase
        if self._step and not waiting:
            self._reached(self._step, phase)

    def stepped(self, seconds: float) -> None:
        self._heartbeat.stepped(seconds)

    def compiling(self, now: bool) -> None:
        self._heartbeat.compiling(now)


def _no_core() -> None:
    """Disables core dumps: the crash is injected."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _hold_gil(seconds: int) -> None:
    # A signal would end the sleep, and the interpreter would then release the GIL.
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


def _open_all(seconds: float) -> threading.Thread:
    """Opens files until no descriptor is left. Returns a thread that closes them after that time."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    full = threading.Event()
    held: list[int] = []

    def close() -> None:
        full.wait()
        time.sleep(seconds)
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    closer = threading.Thread(target=close, name="raydist-fault", daemon=True)
    closer.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + _FEW, before[1]))
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    full.set()
    return closer


def _damage_message() -> None:
    verified = json_gather._verified

    def damaged(data: bytes, hashed: int, rank: int) -> bytes:
        json_gather._verified = verified
        return verified(bytes([data[0] ^ 1]) + data[1:], hashed, rank)

    json_gather._verified = damaged

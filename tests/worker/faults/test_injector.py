"""The fault injector in a single rank, without Ray: when faults happen, how often, and effects that tests/faults cannot observe
from outside."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import xxhash
from torch import nn

from raydist import faults
from raydist.cgroups import cgroup
from raydist.errors import StorageError
from raydist.faults import (
    BadNumber,
    BusyStorage,
    ClockJump,
    CutUpload,
    DamageCopy,
    DiskFull,
    ExpertImbalance,
    Fault,
    FlipBit,
    Garbage,
    HangingStorage,
    KillAgent,
    KillNode,
    KillProcess,
    Leak,
    LearningRate,
    NoDescriptors,
    NoInodes,
    OneWayCut,
    Raise,
    ReadOnly,
    ScaleActivations,
    ScaleGradient,
    SlowDisk,
    SlowNetwork,
    SlowRank,
    SlowStorage,
    StaleStorage,
    StorageGone,
    SuspendProcess,
    UnmountedStorage,
)
from raydist.ipc.heartbeat import Heartbeat
from raydist.launch.oom_detector import MemoryWatch
from raydist.run.directory import RunDir
from raydist.spec.experts import Experts
from raydist.worker.faults import InjectedError, host_pressure, run_processes
from raydist.worker.faults.injector import Injector
from raydist.worker.model._moe import MixtureOfExperts
from tests.needs import MAP_ROOT, require
from tests.processes import command_line
from tests.training import alone


def injector(run: RunDir, *asked: Fault, attempt: int = 1) -> tuple[Injector, Heartbeat]:
    """The injector of the only rank, and the heartbeat that its loop uses."""
    made = Injector([fault.model_dump(mode="json") for fault in asked], run, alone(), attempt)
    return made, made.watch(Heartbeat())


def steps(heartbeat: Heartbeat, first: int, last: int) -> list[tuple[int, str]]:
    """Runs these steps, with two micro-batches each; returns where an exception was raised."""
    raised = []
    for step in range(first, last + 1):
        enter: list[tuple[str, Callable[[], None]]] = [("data", lambda step=step: heartbeat.step(step))]  # type: ignore[misc]
        phases = ("forward", "backward", "forward", "backward", "save", "update", "eval", "eval", "save")
        enter += [(phase, lambda phase=phase: heartbeat.enter(phase)) for phase in phases]  # type: ignore[misc]
        for number, (phase, enter_it) in enumerate(enter):
            try:
                enter_it()
            except InjectedError:
                raised.append((number, phase))
    return raised


@pytest.mark.parametrize(
    ("phase", "where"), [("data", 0), ("forward", 1), ("backward", 2), ("update", 6), ("eval", 7), ("save", 9)]
)
def test_a_fault_happens_where_its_phase_begins_first(tmp_path: Path, phase: Any, where: int) -> None:
    """Once in its step, and in no other; "save" is the checkpoint, not the snapshot before the update."""
    _, heartbeat = injector(RunDir(tmp_path), Raise(rank=0, step=2, phase=phase))
    assert steps(heartbeat, 1, 3) == [(where, phase)]


@pytest.mark.parametrize("times", [1, 2])
def test_as_often_as_asked_for_in_a_run(tmp_path: Path, times: int) -> None:
    """Each attempt trains the step again, and counts only the notes of earlier attempts."""
    asked = Raise(rank=0, step=2, times=times)
    raised = []
    for attempt in (1, 2, 3):
        _, heartbeat = injector(RunDir(tmp_path), asked, attempt=attempt)
        raised.append(len(steps(heartbeat, 1, 3)))
    assert raised == ([1, 0, 0] if times == 1 else [1, 1, 0])
    notes = faults.read_notes(RunDir(tmp_path)).values()
    assert [(note["fault"], note["attempt"], note["asked"]["message"]) for note in notes] == [
        ("raise", attempt, "a bug in the user's code") for attempt in range(1, times + 1)
    ]


def test_what_is_another_ranks_is_left_alone(tmp_path: Path) -> None:
    """A fault of another rank leaves no note and raises no error."""
    _, heartbeat = injector(RunDir(tmp_path), Raise(rank=1, step=2))
    assert steps(heartbeat, 1, 3) == []
    assert faults.read_notes(RunDir(tmp_path)) == {}


def test_a_flipped_bit_is_one_bit(tmp_path: Path) -> None:
    """The bit is in the first element of the named parameter, flipped before the update; for a wrong name the error suggests the
    right one."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    before = [p.detach().clone() for p in model.parameters()]
    made, heartbeat = injector(RunDir(tmp_path), FlipBit(rank=0, step=1, parameter="1.weight", bit=3))
    made.attach(model)
    assert steps(heartbeat, 1, 2) == []
    changed = [name for (name, p), old in zip(model.named_parameters(), before, strict=True) if not torch.equal(p, old)]
    assert changed == ["1.weight"]
    words = [t.detach().reshape(-1).view(torch.int32) for t in (model[1].weight, before[2])]
    assert [int(n) for n in words[0] ^ words[1]] == [8, 0, 0, 0]
    made, heartbeat = injector(RunDir(tmp_path), FlipBit(rank=0, step=1, parameter="1.weigth"))
    made.attach(model)
    heartbeat.step(1)
    with pytest.raises(InjectedError, match=r"1\.weigth.*did you mean \"1\.weight\""):
        heartbeat.enter("update")


def test_a_slow_rank_sleeps_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per step for `steps` steps, for any number of micro-batches, or of batches of an evaluation."""
    slept: list[float] = []
    slow = [SlowRank(rank=0, step=2, seconds=7.0, steps=3), SlowRank(rank=0, step=3, seconds=5.0, phase="eval")]
    _, heartbeat = injector(RunDir(tmp_path), *slow)
    monkeypatch.setattr("raydist.worker.faults.injector.time.sleep", slept.append)
    steps(heartbeat, 1, 6)
    assert [s for s in slept if s] == [7.0, 7.0, 5.0, 7.0]


def test_a_gradient_and_a_rate_are_multiplied_for_a_time(tmp_path: Path) -> None:
    """That of one parameter, also over several passes; the optimizer has its own rate back after each update."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    for p in model.parameters():
        nn.init.constant_(p, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    asked = [ScaleGradient(step=2, parameter="1.weight", factor=4.0, steps=2), LearningRate(step=4, factor=3.0)]
    made, heartbeat = injector(RunDir(tmp_path), *asked)
    made.attach(model)
    made.attach_optimizer(optimizer)
    found = []
    for step in range(1, 6):
        assert steps(heartbeat, step, step) == []
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        moved = [(was - p.detach()) / g for was, p, g in zip(before, model.parameters(), grads, strict=True)]
        with torch.no_grad():
            for p, was in zip(model.parameters(), before, strict=True):
                p.copy_(was)
        rates = {round(float(n), 3) for one in moved for n in one.flatten()}
        found.append((grads, rates, optimizer.param_groups[0]["lr"]))
    plain, *_, last = [[g.tolist() for g in grads] for grads, _, _ in found]
    assert plain == last
    for step, factor in ((2, 4.0), (3, 4.0), (4, 1.0)):
        grads = found[step - 1][0]
        assert [g.tolist() for g in grads[:2]] == plain[:2]
        assert grads[2].tolist() == (factor * torch.tensor(plain[2])).tolist()
    assert [(rates, lr) for _, rates, lr in found] == [({1.0}, 1.0)] * 3 + [({3.0}, 1.0), ({1.0}, 1.0)]
    made, _ = injector(RunDir(tmp_path), ScaleGradient(step=1, parameter="1.weigth"))
    with pytest.raises(InjectedError, match=r"scale_gradient: parameter: '1\.weigth'.*did you mean \"1\.weight\""):
        made.attach(model)


def test_the_output_of_a_layer_is_multiplied_for_a_time(tmp_path: Path) -> None:
    """In training, not in evaluations; a hook that was there before reads what comes out. A layer that is not there is named."""
    model, seen = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False)), list[float]()
    for p in model.parameters():
        nn.init.constant_(p, 0.5)
    model[0].register_forward_hook(lambda module, arguments, output: seen.append(float(output.detach()[0])))
    made, heartbeat = injector(RunDir(tmp_path), ScaleActivations(step=2, layer="0", factor=4.0, steps=2))
    made.attach(model)
    for step in range(1, 5):
        assert steps(heartbeat, step, step) == []
        assert model.train()(torch.ones(2)).item() == seen[-1]
        assert model.eval()(torch.ones(2)).item() == 1.0
    assert seen[::2] == [1.0, 4.0, 4.0, 1.0]
    made, _ = injector(RunDir(tmp_path), ScaleActivations(step=1, layer="1"))
    with pytest.raises(InjectedError, match="scale_activations: layer: '1' is not in the model"):
        made.attach(model)


def refused(act: Callable[[], object]) -> str | None:
    """The operating system's error text, or None if the call succeeds."""
    try:
        act()
    except StorageError as error:
        return error.message.rpartition(": ")[2]
    return None


@pytest.mark.parametrize(
    ("fault", "number", "writes", "reads", "deletes"),
    [
        (DiskFull(step=2, operations=1), errno.ENOSPC, True, False, False),
        (ReadOnly(step=2, operations=1), errno.EROFS, True, False, True),
        (StorageGone(step=2, operations=1), errno.EIO, True, True, True),
        (StaleStorage(step=2, operations=1), errno.ESTALE, True, True, True),
        (NoInodes(step=2, operations=1), errno.ENOSPC, True, False, False),
        (CutUpload(step=2, operations=1), errno.EPIPE, True, False, False),
        (BusyStorage(step=2, operations=1), "503 Slow Down", True, True, True),
    ],
)
def test_storage_fails_as_it_would(
    tmp_path: Path, fault: Fault, number: int | str, writes: bool, reads: bool, deletes: bool
) -> None:
    """Nothing fails before its step; in it, the affected operations fail, as often as asked; a file is whole or absent."""
    reason, data = number if isinstance(number, str) else os.strerror(number), b"x" * 100
    acts: list[tuple[Callable[[RunDir], object], bool]] = [
        (lambda run: run.storage.write("a/b", data), writes),
        (lambda run: run.storage.write_new("a/c", data), writes),
        (lambda run: run.storage.read("there"), reads),
        (lambda run: run.storage.files(), reads),
        (lambda run: run.storage.size("there"), reads),
        (lambda run: run.storage.open("there").close(), reads),
        (lambda run: run.storage.delete("gone"), deletes),
    ]
    for place, (act, meant) in enumerate(acts):
        run = RunDir(tmp_path / str(place))
        run.storage.write("there", data)
        _, heartbeat = injector(run, fault)
        heartbeat.step(1)
        assert run.storage.read("there") == data
        heartbeat.step(2)
        assert refused(lambda: act(run)) == (reason if meant else None)  # noqa: B023
        if meant:
            assert run.storage.files(unfinished=True) == {"there": 100}
            assert run.storage.files("a", unfinished=True) == {}
        assert refused(lambda: run.storage.write("a/d", data)) == (None if meant else (reason if writes else None))  # noqa: B023


def test_slow_storage_is_slow_for_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation sleeps until the fault is over."""
    now, slept = [100.0], []
    monkeypatch.setattr("raydist.worker.faults.faulty_storage.time.monotonic", lambda: now[0])
    monkeypatch.setattr("raydist.worker.faults.injector.time.sleep", slept.append)
    run = RunDir(tmp_path)
    _, heartbeat = injector(run, SlowStorage(step=1, seconds=5.0, delay=0.5))
    heartbeat.step(1)
    run.storage.write("a", b"1")
    assert run.storage.read("a") == b"1"
    assert slept == [0.5, 0.5]
    now[0] += 5.1
    assert run.storage.read("a") == b"1"
    assert slept == [0.5, 0.5]


def test_a_slow_disk_takes_its_time_by_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For files that are written, however many pieces they are written in; reading is as before."""
    slept: list[float] = []
    monkeypatch.setattr("raydist.worker.faults.faulty_storage.time.sleep", slept.append)
    run = RunDir(tmp_path)
    _, heartbeat = injector(run, SlowDisk(step=1, seconds=1000.0, bytes_per_s=2048))
    heartbeat.step(1)
    with run.storage.create("a") as sink:
        sink.write(bytes(1024))
        sink.write(memoryview(bytes(4096)))
    assert (run.storage.size("a"), slept) == (5120, [0.5, 2.0])
    assert (run.storage.read("a"), slept) == (bytes(5120), [0.5, 2.0])


def test_hanging_storage_answers_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that begins in between waits for the rest of it, and then works."""
    now, slept = [100.0], []
    monkeypatch.setattr("raydist.worker.faults.faulty_storage.time.monotonic", lambda: now[0])
    monkeypatch.setattr("raydist.worker.faults.faulty_storage.time.sleep", slept.append)
    run = RunDir(tmp_path)
    _, heartbeat = injector(run, HangingStorage(step=1, seconds=5.0))
    heartbeat.step(1)
    now[0] += 2.0
    run.storage.write("a", b"1")
    assert slept == [3.0]
    now[0] += 3.1
    assert run.storage.read("a") == b"1"
    assert slept == [3.0]


def test_unmounted_storage_is_an_empty_folder(tmp_path: Path) -> None:
    """Nothing is there, nothing is written and nothing deleted; all is as before when it is back."""
    run = RunDir(tmp_path)
    run.storage.write("there", b"1")
    _, heartbeat = injector(run, UnmountedStorage(step=1, operations=7))
    heartbeat.step(1)
    assert (run.storage.files(), run.storage.size("there"), run.storage.exists("there")) == ({}, None, False)
    for act in (lambda: run.storage.write("a", b""), lambda: run.storage.write_new("b", b"")):
        with pytest.raises(StorageError, match="its run's folder is gone"):
            act()
    with pytest.raises(FileNotFoundError):
        run.storage.read("there")
    run.storage.delete("there")
    assert run.storage.files(unfinished=True) == {"there": 1}


def open_files(folder: Path) -> list[str]:
    """What this process has open there, and /dev/null: other descriptors are of other tests' threads."""
    found = []
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has been closed
            found.append(os.readlink(f"/proc/self/fd/{file}"))
    return sorted(path for path in found if path == os.devnull or path.startswith(str(folder)))


def test_no_descriptor_is_left_for_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EMFILE, and a save that fails with it leaves nothing; then all is as before."""
    slept, over = [], threading.Event()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        over.wait(240)

    monkeypatch.setattr("raydist.worker.faults.injector.time", SimpleNamespace(**{**vars(time), "sleep": sleep}))
    run = RunDir(tmp_path)
    open_before = open_files(tmp_path)
    made, heartbeat = injector(run, NoDescriptors(rank=0, step=1, seconds=1.0))
    heartbeat.step(1)
    try:
        heartbeat.enter("forward")
        assert refused(lambda: run.storage.write("a", b"1")) == os.strerror(errno.EMFILE)
    finally:
        over.set()
    assert made._lasting is not None
    made._lasting.join(240)
    assert slept == [1.0]
    assert refused(lambda: run.storage.write("a", b"1")) is None
    assert set(run.storage.files(unfinished=True)) == {"a"}
    assert open_files(tmp_path) == open_before


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The ends of a TCP connection. Both are in this process."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def test_a_connection_is_deaf_for_its_time(tmp_path: Path, connection: tuple[socket.socket, socket.socket]) -> None:
    """What is sent to it arrives once the fault is over, whole; a connection that is made meanwhile works."""
    one, other = connection
    _, heartbeat = injector(RunDir(tmp_path), OneWayCut(rank=0, step=1, seconds=1.0))
    begun = time.monotonic()
    heartbeat.step(1)
    heartbeat.enter("forward")
    one.sendall(b"late")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as new:
        peer, _ = server.accept()
        with peer:
            new.sendall(b"new")
            assert peer.recv(3) == b"new"
    assert other.recv(4, socket.MSG_WAITALL) == b"late"
    assert time.monotonic() - begun >= 1.0


def test_packets_out_of_order_are_put_in_order(tmp_path: Path, connection: tuple[socket.socket, socket.socket]) -> None:
    """Of a connection that loses a fifth of its packets, the kernel puts the later ones aside, and the bytes arrive in order."""

    def aside() -> int:
        """Segments of this host that arrived before an earlier one."""
        names, values = (line.split() for line in Path("/proc/net/netstat").read_text().splitlines()[:2])
        return int(values[names.index("TCPOFOQueue")])

    one, other = connection
    for end in connection:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _, heartbeat = injector(RunDir(tmp_path), OneWayCut(rank=0, step=1, seconds=5.0, share=0.2))
    heartbeat.step(1)
    heartbeat.enter("forward")
    before, sent = aside(), [n.to_bytes(4, "big") * 16 for n in range(1000)]
    sending = threading.Thread(target=lambda: [one.sendall(part) for part in sent])
    sending.start()
    assert other.recv(64 * len(sent), socket.MSG_WAITALL) == b"".join(sent)
    sending.join()
    assert aside() > before


def test_connections_send_slowly_for_a_time(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has the rate of each connection; then none again."""
    over: list[Callable[[], None]] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            over.append(self.run)
            self.finished.wait = lambda timeout=None: False  # type: ignore[method-assign]

    monkeypatch.setattr("raydist.worker.faults.links.threading.Timer", Timer)
    pacing, none = 47, -1  # 2^32 - 1 as Python reads it
    _, heartbeat = injector(RunDir(tmp_path), SlowNetwork(rank=0, step=1, seconds=1000.0, bytes_per_s=4096))
    heartbeat.step(1)
    assert [end.getsockopt(socket.SOL_SOCKET, pacing) for end in connection] == [none] * 2
    heartbeat.enter("forward")
    assert [end.getsockopt(socket.SOL_SOCKET, pacing) for end in connection] == [4096] * 2
    over[0]()
    assert [end.getsockopt(socket.SOL_SOCKET, pacing) for end in connection] == [none] * 2


def test_a_damaged_copy_has_another_hash(tmp_path: Path) -> None:
    """One bit of each copy of this rank's part, and of no other's. Without copies in memory the fault is an error."""
    folder = tmp_path / "memory" / "checkpoints"
    names = {rank: f"shard-0000{rank}-of-00001-0001-{xxhash.xxh3_128_hexdigest(b'0' * 99)}.bin" for rank in (0, 1)}
    for step in ("step-000001", "step-000002"):
        (folder / step).mkdir(parents=True)
        for name in names.values():
            (folder / step / name).write_bytes(b"0" * 99)
    asked = [DamageCopy(rank=0, step=1).model_dump(mode="json")]
    heartbeat = Injector(asked, RunDir(tmp_path), alone(), 1, str(folder.parent)).watch(Heartbeat())
    heartbeat.step(1)
    for rank, content in ((0, b"1" + b"0" * 98), (1, b"0" * 99)):
        assert [path.read_bytes() for path in folder.glob(f"*/{names[rank]}")] == [content] * 2
    _, heartbeat = injector(RunDir(tmp_path / "other"), DamageCopy(rank=0, step=1))
    with pytest.raises(InjectedError, match="there are 0 copies of this rank in memory, not 2"):
        heartbeat.step(1)


def test_a_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unix time, of this process alone; the monotonic clock does not. Its agent's clock jumps in that process."""
    monkeypatch.setattr(time, "time", before := time.time)
    _, heartbeat = injector(RunDir(tmp_path), ClockJump(rank=0, step=1, seconds=-3600.0))
    heartbeat.step(1)
    now = time.monotonic()
    heartbeat.enter("forward")
    assert before() - 3700 < time.time() < before() - 3500
    assert time.monotonic() - now < 1800
    fault = ClockJump(rank=0, step=1, seconds=60.0, process="agent")
    asked: list[Any] = []
    made = Injector(
        [fault.model_dump(mode="json")],
        RunDir(tmp_path),
        alone(),
        1,
        agent=lambda what, **data: asked.append((what, data)),
    )
    heartbeat = made.watch(Heartbeat())
    heartbeat.step(1)
    heartbeat.enter("forward")
    assert asked == [("clock", {"seconds": 60.0})]
    _, heartbeat = injector(RunDir(tmp_path / "other"), fault)
    heartbeat.step(1)
    with pytest.raises(InjectedError, match="this rank has no agent"):
        heartbeat.enter("forward")


def test_a_suspended_process_goes_on(tmp_path: Path) -> None:
    """It is stopped, and continued by a process that does not belong to the rank."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            run_processes.suspend(psutil.Process(process.pid), 600)
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                pass
            helper = None
            while helper is None:  # while it becomes a shell it has no command line
                # Another test's helper may stop a process whose pid begins with this one.
                mine = (p for p in psutil.process_iter() if command_line(p).endswith(f"; kill -CONT {process.pid}"))
                helper = next(mine, None)
            while os.getsid(helper.pid) == os.getsid(0):
                pass
            while not (sleep := helper.children()):
                pass
            sleep[0].kill()  # its time is over
            while psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                pass
        finally:
            process.kill()


def test_the_kernel_kills_a_process_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as it opens a file. Who watches it knows the cause; the group is removed when the process has been reaped."""
    script = "import time\nwhile True: open('/dev/null').close(); time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        try:
            memory, ended, noticed = MemoryWatch(process.pid), threading.Event(), threading.Event()

            def look() -> None:
                while not ended.wait(0.05):
                    memory.look()
                    if "raydist-fault" in memory._groups:
                        noticed.set()

            def sleep(seconds: float) -> None:
                noticed.wait(240) if seconds == host_pressure._NOTICED_S else time.sleep(seconds)

            monkeypatch.setattr(host_pressure, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
            watch = threading.Thread(target=look)
            watch.start()
            host_pressure.starve("kill_process", process.pid)
            assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL
            assert f"the kernel killed process {process.pid} for lack of memory" in memory.why()
        finally:
            ended.set()
            process.kill()
    watch.join()
    found = cgroup("memory")
    assert found is not None
    while (found.mount / f"raydist-fault-{process.pid}").exists():
        time.sleep(0.05)


@pytest.mark.parametrize(
    "fault",
    [
        KillAgent(rank=0, step=1),
        KillNode(rank=0, step=1),
        KillProcess(rank=0, step=1, process="gcs"),
        SuspendProcess(rank=0, step=1, process="agent"),
    ],
)
def test_nobody_elses_process_is_killed(tmp_path: Path, fault: Fault) -> None:
    """A rank that was not started by an agent or a raylet reports an error: its parent processes belong to the test."""
    _, heartbeat = injector(RunDir(tmp_path), fault)
    heartbeat.step(1)
    with pytest.raises(InjectedError, match=fault.fault):
        heartbeat.enter("forward")


HOST = """
import os
import subprocess
import threading
from raydist.observe.hardware.cgroup import CpuGroups
from raydist.worker.faults import InjectedError, host_pressure

before = os.sched_getaffinity(0)
end = host_pressure.hog(1000, 2)
print(len(os.sched_getaffinity(0)), flush=True)
input()
end()
assert os.sched_getaffinity(0) == before
try:
    over = host_pressure.no_processes(1000)
except InjectedError as error:
    print(error)
else:
    failed = []
    for begin in (lambda: threading.Thread(target=int).start(), lambda: subprocess.Popen("true")):
        try:
            begin()
        except (RuntimeError, BlockingIOError) as error:
            failed.append(type(error).__name__)
    print(failed, flush=True)
    over.function()
    subprocess.run("true", check=True)
groups, own = CpuGroups(), os.getpid()
try:
    end = host_pressure.quota(1000, 0.05)
except InjectedError as error:
    print(error)
    raise SystemExit
while not groups.throttled_seconds(own):
    pass
end()
print("held, and back" if not groups.throttled_seconds(own) else "still held")
"""


def test_the_pressure_of_a_host_ends() -> None:
    """The hogs have the rank's only processor; no process and no thread is started while there are no pids; the quota holds the
    process back, which then is in its group again. Nothing is left when the process has ended."""
    run = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdin is not None
    assert run.stdout.readline() == "1\n"
    hogs = psutil.Process(run.pid).children()
    assert len(hogs) == 2
    run.stdin.write("\n")
    run.stdin.flush()
    for told in ("['RuntimeError', 'BlockingIOError']\n", "held, and back\n"):
        said = run.stdout.readline()
        # In a container root may have no writable control groups.
        assert said == told or "it needs root and a writable" in said or "no control groups" in said
    run.communicate(timeout=300)
    _, alive = psutil.wait_procs(hogs, timeout=240)
    assert not alive
    until = (
        time.monotonic() + 240
    )  # a busy kernel may refuse to remove it at once: the helper then tries after a second
    while left := list(Path("/sys/fs/cgroup").glob(f"**/raydist-fault-{run.pid}")):
        assert time.monotonic() < until, left
        time.sleep(0.1)


FULL_SHM = """
import errno
import os
from pathlib import Path
from raydist.worker.faults import InjectedError, host_pressure

own = Path("/dev/shm/own")


def full(seconds, limit):
    try:
        return host_pressure.fill_shared_memory(seconds, limit)
    except InjectedError as error:
        print(error)


def room():
    try:
        own.write_bytes(bytes(1 << 20))
        return "room"
    except OSError as error:
        return errno.errorcode[error.errno]


print(room())
own.unlink()
full(600.0, 1)
end = full(600.0, 8)
print(room(), os.listdir("/dev/shm"))
end()
print(room(), os.listdir("/dev/shm"))
if os.geteuid() == 0:
    os.chown(own, 12345, -1)
    full(600.0, 8)
"""


def test_a_full_shared_memory_is_given_back() -> None:
    """In a mount namespace with 8 MiB in /dev/shm: nothing is taken where more are free than the limit, or a file is another
    user's. Then nothing is free, and no name is left. At its end all is free again; the machine's own is not touched."""
    require("util-linux")
    mounted = 'mount -t tmpfs -o size=8m,mode=1777 tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", *MAP_ROOT, "sh", "-c", mounted, "sh", sys.executable, "-c", FULL_SHM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    told = done.stdout.splitlines()
    assert told[0] == "room"
    assert told[1] == "full_shared_memory: limit_mb: 1, but 8 MiB of /dev/shm are free"
    assert told[2:4] == ["ENOSPC ['own']", "room ['own']"]
    if not MAP_ROOT:
        assert told[4] == "full_shared_memory: /dev/shm/own is another user's, who needs that memory, too"


def test_memory_leaks_in_each_step(tmp_path: Path) -> None:
    """Resident memory grows by so much in each of that many steps, once a step, and stays."""
    _, heartbeat = injector(RunDir(tmp_path), Leak(rank=0, step=2, mib=64.0, steps=3))
    sizes = []
    for step in range(1, 7):
        assert steps(heartbeat, step, step) == []
        sizes.append(psutil.Process().memory_info().rss >> 20)
    grown = [after - before for before, after in itertools.pairwise(sizes)]
    assert [60 < n < 100 for n in grown] == [True, True, True, False, False]


def test_a_bad_number_lasts_for_its_steps(tmp_path: Path) -> None:
    """The loss is not finite in these steps alone."""
    model = nn.Linear(2, 2)
    made, heartbeat = injector(RunDir(tmp_path), BadNumber(rank=0, step=2, where="loss", steps=2))
    made.attach(model)
    finite = []
    for step in range(1, 5):
        assert steps(heartbeat, step, step) == []
        finite.append(bool(model(torch.ones(2)).isfinite().all()))
    assert finite == [True, False, False, True]


def test_routers_prefer_experts_for_a_time(tmp_path: Path) -> None:
    """That share of the tokens goes to the first experts, in these steps and in training alone; no bias stays."""
    layer = MixtureOfExperts(4, Experts(count=4, hidden=4, chosen=1))
    router = layer.router
    nn.init.zeros_(router.weight)
    made, heartbeat = injector(RunDir(tmp_path), ExpertImbalance(step=2, experts=2, tokens=0.5, steps=2))
    made.attach(nn.Sequential(layer))
    x_ND = torch.ones(8, 4)
    with torch.no_grad():
        router.weight[3] = 1.0  # all tokens would take the last expert
    chosen = []
    for step in range(1, 5):
        assert steps(heartbeat, step, step) == []
        chosen.append([int((router(x_ND)[1] == expert).sum()) for expert in range(4)])
        router.eval()
        assert router(x_ND)[1].eq(3).all()
        router.train()
    assert chosen[0] == chosen[3] == [0, 0, 0, 8]
    assert chosen[1] == chosen[2]
    assert (sum(chosen[1][:2]), chosen[1][2:]) == (4, [0, 4])
    assert router.bias is None


def test_garbage_is_collected_in_each_step(tmp_path: Path) -> None:
    """Once in a step, of that many steps."""
    collected: list[int] = []
    _, heartbeat = injector(RunDir(tmp_path), Garbage(rank=0, step=2, objects=10, steps=3))

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            collected.append(1)

    gc.callbacks.append(count)
    try:
        gc.disable()
        steps(heartbeat, 1, 6)
    finally:
        gc.enable()
        gc.callbacks.remove(count)
    assert len(collected) == 3

"""The driver's look at the processes of its private Ray: here processes of this test, which it kills, stops and continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raydist.cluster.private_head import MONITOR_S, ZYGOTE, PrivateHead, well
from raydist.cluster.run.head_outage import ASKED_S, HeadOutage
from raydist.run.directory import RunDir
from tests.launch import test_oom_detector

RAYLET = """
import os, subprocess, sys
for name in sys.argv[1:]:
    subprocess.Popen(["bash", "-c", f"exec -a {name} sleep 600"])
print("up", flush=True)
sys.stdin.read()
for name in sys.argv[1:]:
    os.wait()
"""


@pytest.fixture
def ray() -> Iterator[tuple[PrivateHead, dict[str, int]]]:
    """A watch whose thread looks at nothing more, and the pids: a GCS, a raylet that has started a coordinator, and a zygote from
    which a monitor was forked."""
    gcs = subprocess.Popen(["sleep", "600"])
    parents = {}
    pids = {"GCS": gcs.pid}
    for parent, actor, title in (
        ("raylet", "coordinator", "ray::Coordinator"),
        (ZYGOTE, "monitor", "ray::RunMonitor.flush"),
    ):
        process = subprocess.Popen([sys.executable, "-c", RAYLET, title], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (pid,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        until(lambda pid=pid, title=title: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()))  # type: ignore[misc]
        parents[parent] = process
        pids |= {parent: process.pid, actor: pid}
    head = PrivateHead("10.0.0.1:6379", {name: pids[name] for name in ("GCS", *parents)})
    head.close()
    yield head, pids
    for pid in pids.values():
        if well(pid) or Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    gcs.wait()
    for process in parents.values():
        process.communicate()


def until(true: Callable[[], bool]) -> None:
    """Waits for the kernel, which delivers a signal a moment after the call."""
    while not true():
        pass


def send(pid: int, number: signal.Signals) -> None:
    """Sends it, and waits until it has its effect."""
    os.kill(pid, number)
    until(lambda: well(pid) == (number == signal.SIGCONT))


@pytest.mark.parametrize(("name", "patience"), [("GCS", 5.0), ("raylet", 0.0)])
def test_a_process_that_was_killed(
    ray: tuple[PrivateHead, dict[str, int]], tmp_path: Path, name: str, patience: float
) -> None:
    """It is dead for good, with the signal as the cause; without the GCS the ranks have time for a checkpoint."""
    head, pids = ray
    outage = HeadOutage(head, 40.0, RunDir(tmp_path))
    head._look(head._well)
    assert (outage.look(), outage.dead, outage.cut_off) == ("same", False, False)
    send(pids[name], signal.SIGKILL)
    head._look(head._well)
    assert (head.dead, head.patience_s, outage.cut_off) == (True, patience, not patience)
    assert outage.look() == ("silent" if patience else "gone")
    ending = outage.ending()
    assert ending is not None
    assert (
        f"Ray's {name} (process {pids[name]}) has exited, killed by SIGKILL; run the same command again" in ending.cause
    )


cgroup = test_oom_detector.cgroup


def test_a_process_that_the_kernel_kills_for_lack_of_memory(cgroup: Path, tmp_path: Path) -> None:
    """The cause of the run says so: a larger container helps, and the same command again does not."""
    with test_oom_detector.started() as process:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        head = PrivateHead("10.0.0.1:6379", {"GCS": process.pid, "raylet": os.getpid()})
        head.close()
        head._look(head._well)
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        until(lambda: not well(process.pid))
        head._look(head._well)
        ending = HeadOutage(head, 40.0, RunDir(tmp_path))
        assert ending.look() == "silent"
        cause = f"GCS (process {process.pid}) has exited, killed by SIGKILL: the kernel killed process {process.pid} for lack"
        assert cause in ending.why()


def test_a_monitor_of_a_dead_head_is_ended(ray: tuple[PrivateHead, dict[str, int]], tmp_path: Path) -> None:
    """So that it cannot replace the end that the driver writes. While the head lives it is let be."""
    head, pids = ray
    outage = HeadOutage(head, 40.0, RunDir(tmp_path))
    head._look(head._well)
    outage.end_monitors()
    assert well(pids["monitor"])
    send(pids["raylet"], signal.SIGKILL)
    head._look(head._well)
    outage.end_monitors()
    assert not well(pids["monitor"])
    assert well(pids["coordinator"])


def test_the_zygote_is_not_needed(ray: tuple[PrivateHead, dict[str, int]]) -> None:
    """Without it Ray starts its workers by itself."""
    head, pids = ray
    send(pids[ZYGOTE], signal.SIGKILL)
    head._look(head._well)
    assert not head.dead


@pytest.mark.parametrize("name", ["GCS", "raylet", "coordinator", ZYGOTE])
def test_a_process_that_is_stopped(ray: tuple[PrivateHead, dict[str, int]], tmp_path: Path, name: str) -> None:
    """It may go on: the run ends after the limit, or soon if the user has asked for its end."""
    head, pids = ray
    outage = HeadOutage(head, 40.0, RunDir(tmp_path))
    send(pids[name], signal.SIGSTOP)
    begun = head._well
    for later, look in ((ASKED_S + 1, "same"), (21.0, "silent"), (41.0, "gone")):
        head._well = begun - later
        head._look(begun)
        assert outage.look() == look
    assert f"Ray's {name} (process {pids[name]}) has been stopped, as by SIGSTOP, for 41 s" in head.why(41.0)
    head._well = begun - ASKED_S - 1
    assert outage.look(asked=True) == "gone"
    send(pids[name], signal.SIGCONT)
    head._look(begun)
    assert (head._well, head.dead) == (begun, False)


def test_a_monitor_that_is_stopped(ray: tuple[PrivateHead, dict[str, int]]) -> None:
    """It is no outage, and is killed after MONITOR_S: Ray starts it again."""
    head, pids = ray
    send(pids["monitor"], signal.SIGSTOP)
    now = head._well
    head._look(now)
    head._look(now + MONITOR_S - 1)
    assert head._well == now + MONITOR_S - 1
    assert Path(f"/proc/{pids['monitor']}/stat").read_text().rpartition(") ")[2][0] == "T"
    head._look(now + MONITOR_S + 1)
    until(lambda: Path(f"/proc/{pids['monitor']}/stat").read_text().rpartition(") ")[2][0] == "Z")
    assert not head.dead

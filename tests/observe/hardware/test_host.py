"""A node's counters, compared with bytes that were sent, memory that was allocated, and psutil."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from raydist.observe.hardware import host
from raydist.observe.hardware.host import FreeSpace, Host, process, training_interface
from raydist.run import telemetry_schema
from tests import needs

ALONE = ("unshare", "--net", *needs.MAP_ROOT)

SEND = """
import json, socket, subprocess, sys
from raydist.observe.hardware.host import Host

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
seen, sender = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
seen.bind(("127.0.0.1", 0))
watch = Host("127.0.0.1", "/")
before = watch.read()
for _ in range(500):
    sender.sendto(bytes(1000), seen.getsockname())
    seen.recv(2000)
print(json.dumps([before, watch.read()]))
"""


def test_bytes_and_packets_of_the_interface() -> None:
    """In a network namespace without other traffic, the counters grow by the datagrams that were sent, with their headers."""
    needs.require(*needs.HOSTS)
    run = subprocess.run([*ALONE, sys.executable, "-c", SEND], capture_output=True, text=True, check=True)
    before, after = json.loads(run.stdout)
    grown = {
        name: after[name] - before[name] for name in telemetry_schema.NODE if name.startswith("nic_") and name in after
    }
    size = 1000 + 8 + 20  # with UDP and IP headers; on a loopback Ethernet's 14 bytes are not counted
    assert after["nic"] == "lo"
    assert grown == {
        "nic_in_bytes": 500 * size, "nic_out_bytes": 500 * size, "nic_in_packets": 500, "nic_out_packets": 500, "nic_errors": 0,
    }  # fmt: skip


HOLD = """
import os, sys, time
print(flush=True)
input()
held = b"x" * (64 << 20)
begun = time.process_time()
while time.process_time() < begun + 0.3:
    pass
print(time.process_time(), flush=True)
input()
"""


def test_memory_and_time_of_a_process() -> None:
    """64 MiB more memory, and the CPU seconds that the process measures itself; a process that has exited has no values."""
    child = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    before = process(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    seconds = float(child.stdout.readline())
    after = process(child.pid)
    assert 64 << 20 <= after["rss_bytes"] - before["rss_bytes"] < 72 << 20
    assert after["cpu_seconds"] == pytest.approx(seconds, abs=0.05)
    child.communicate("\n")
    assert process(child.pid) == {}


def test_against_another_reader(tmp_path: Path) -> None:
    """Counters lie between two readings of psutil; used memory is below the total."""
    name = next(n for n in psutil.net_if_addrs() if n != "lo")
    watch = Host("127.0.0.1", str(tmp_path), {"GLOO_SOCKET_IFNAME": name})
    disks = {path.parent.name for path in Path("/sys/block").glob("*/device")}

    def counters() -> list[int]:
        nic = psutil.net_io_counters(pernic=True)[name]
        disk = [count for disk, count in psutil.disk_io_counters(perdisk=True).items() if disk in disks]
        read, written = sum(d.read_bytes for d in disk), sum(d.write_bytes for d in disk)
        return [nic.bytes_recv, nic.bytes_sent, nic.packets_recv, nic.packets_sent, read, written]

    before, row, after = counters(), watch.read(), counters()
    columns = [f"nic_{way}_{what}" for what in ("bytes", "packets") for way in ("in", "out")]
    told = [row[column] for column in columns] + [row.get(f"disk_{way}_bytes", 0) for way in ("read", "write")]
    assert all(low <= value <= high for low, value, high in zip(before, told, after, strict=True))
    assert row["nic"] == name
    assert row["cpu_count"] == psutil.cpu_count()
    assert 0 < row["memory_used_bytes"] < row["memory_total_bytes"] <= psutil.virtual_memory().total
    assert row.keys() <= telemetry_schema.NODE.keys()


TREE = {
    "proc/stat": "cpu  1000 100 300 5000 500 20 80 0 0 0\ncpu0 1000 100 300 5000 500 20 80 0 0 0\n",
    "proc/loadavg": "3.25 2.10 1.05 4/800 4242\n",
    "proc/meminfo": "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nBuffers: 1 kB\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n",
    "proc/diskstats": (
        "   8       0 sda 10 0 1000 5 20 0 3000 9 0 14 14\n   8       1 sda1 10 0 1000 5 20 0 3000 9 0 14 14\n"
        " 259       0 nvme0n1 1 0 8 5 2 0 16 9 0 14 14 0 0 0 0 1 2\n 253       0 dm-0 11 0 1008 5 22 0 3016 9 0 14 14\n"
    ),
    "sys/block/sda/device": "", "sys/block/nvme0n1/device": "", "sys/block/dm-0/size": "",
    "proc/net/dev": (
        "Inter-|   Receive                      |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed\n"
        "    lo:1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n  nope: 1 1 1 1 0 0 0 0 1 1 1 1 0 0 0 0\n"
    ),
    "sys/class/net/lo/speed": "200000\n",
    "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": "25\n",
    "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": "50\n",
    "sys/class/infiniband/mlx5_1/ports/1/counters/port_rcv_data": "75\n",
    "sys/class/infiniband/mlx5_1/ports/1/counters/port_xmit_data": "100\n",
    "dev/shm/.": "",
}  # fmt: skip
"""The files of a Linux node with two disks, a volume on one of them, a fast link and two InfiniBand ports."""


def test_units_of_what_the_kernel_says(tmp_path: Path) -> None:
    """CPU times, sectors, kB, megabits and lanes become fractions and bytes; no byte is counted twice."""
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/."):
            path.write_text(text)
    watch = Host("127.0.0.1", str(tmp_path), root=tmp_path)
    assert "cpu_util" not in watch.read()
    (tmp_path / "proc/stat").write_text("cpu  1060 100 310 5020 505 20 85 0 50 0\n")
    row = watch.read()
    for name in ("cpu_count", "shm_used_bytes", "disk_free_bytes"):  # values of this machine
        row.pop(name, None)
    assert row == {
        "cpu_util": pytest.approx(0.75), "steal_seconds": 0.0, "load": 3.25,
        "memory_used_bytes": 600 * 1024, "memory_total_bytes": 1000 * 1024,
        "disk_read_bytes": 1008 * 512, "disk_write_bytes": 3016 * 512, "nic": "lo", "nic_in_bytes": 1, "nic_in_packets": 2,
        "nic_out_bytes": 9, "nic_out_packets": 10, "nic_errors": 3 + 4 + 11 + 12, "nic_limit_bytes_per_second": 25e9,
        "rdma_in_bytes": 400, "rdma_out_bytes": 600,
    }  # fmt: skip


def test_many_sockets_are_read_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With twice as many sockets as are read at once, every third reading reads them; those between repeat what it found."""
    monkeypatch.setattr(host, "_SOCKETS", 2)
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/snmp").write_text("Tcp: RtoMin RetransSegs\nTcp: 200 7\n")

    def wait(queue: int) -> None:
        line = f"0: 0100000A:1F90 0200000A:C350 01 {queue:08X}:00000000 00:00000000 00000000 0 0 1\n"
        (tmp_path / "proc/net/tcp").write_text("header\n" + 4 * line)

    wait(1000)
    watch = Host("203.0.113.9", "/nowhere", root=tmp_path)
    found = [watch.read()]
    wait(2000)
    found += [watch.read() for _ in range(3)]
    assert [row["link_queue_bytes"] for row in found] == [4000, 4000, 4000, 8000]
    assert {(row["link_queue_peer"], row["retransmits_count"]) for row in found} == {("10.0.0.2", 7)}


def test_what_is_not_there_stays_empty(tmp_path: Path) -> None:
    """Counters that the kernel does not provide are missing; the rest of the row is there."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text(TREE["proc/loadavg"])
    watch = Host("203.0.113.9", "/nowhere", root=tmp_path)
    assert watch.read() == {"cpu_count": os.cpu_count(), "load": 3.25}


def test_storage_that_hangs_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While storage does not answer, the value is None and no second request starts; an outdated value is None too."""
    answer, begun, asked = threading.Event(), threading.Event(), []

    def ask() -> int:
        asked.append(threading.current_thread())
        begun.set()
        answer.wait(240)
        return 77

    space = FreeSpace(ask)
    assert [space.newest() for _ in range(3)] == [None] * 3
    assert begun.wait(240)
    answer.set()
    (thread,) = asked
    thread.join(240)
    assert space.newest() == 77
    monkeypatch.setattr(host, "_SPACE_S", 0.0)
    assert space.newest() is None


def test_free_space_of_a_folder() -> None:
    """Free space of the folder's file system, as `df` reports it to a user."""
    space = FreeSpace(lambda: shutil.disk_usage(tempfile.gettempdir()).free)
    space.newest()
    assert space._thread is not None
    space._thread.join(240)
    told = space.newest()
    assert told is not None
    assert 0 < told <= psutil.disk_usage(tempfile.gettempdir()).total


def test_the_interface_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface that the user named, else the one with the address; a pattern names none."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert training_interface("127.0.0.1", {}) == "lo"
    assert training_interface("203.0.113.9", {}) is None
    assert training_interface("203.0.113.9", {"NCCL_SOCKET_IFNAME": "=lo"}) == "lo"
    assert training_interface("127.0.0.1", {"NCCL_SOCKET_IFNAME": "^docker", "GLOO_SOCKET_IFNAME": "lo,eth"}) == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert training_interface("203.0.113.9", {}) == "lo"

"""A node's resource usage from its kernel: processors, memory, disks, and the network interface used for training.

Runs in: the monitor of each node. Reads files of /proc and /sys directly: psutil takes several times as long.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raydist.ipc.network_interface import interface_of
from raydist.observe.hardware.cgroup import MemoryGroup

_SPEED_READS = 60
"""Readings between two reads of the interface's speed: some drivers take milliseconds, and it seldom changes."""
_SECTOR_BYTES = 512  # unit of /proc/diskstats, for every disk
_LANES = 4  # InfiniBand counts data in units of four bytes
_SPACE_S = 10.0
_SOCKETS = 1000
"""Sockets of a host that are read in each reading; with N times as many, in every Nth."""
_LOOPBACK = "7F"
"""Of 127.0.0.0/8, at this place on a machine with the least significant byte first."""


class Host:
    """Reads a node's row. `node_ip`: its address in the cluster; `folder`: where the run is stored, if that is a folder.

    `env`: the ranks' environment, in which the user may have named the interface; `root`: the parent of /proc and /sys.
    """

    def __init__(self, node_ip: str, folder: str, env: Mapping[str, str] | None = None, root: Path = Path("/")) -> None:
        self._root = root
        self._ticks: tuple[int, int] | None = None
        self._group = MemoryGroup(root)
        self._space = FreeSpace(lambda: shutil.disk_usage(folder).free)
        self._nic = training_interface(node_ip, env or {})
        self._limit: float | None = None
        self._reads = 0
        self._queue_reads = 1
        self._queue: dict[str, Any] = {}
        # Partitions, volumes and RAIDs count the same I/O as their disks; only disks have a `device` entry.
        self._disks = {path.parent.name for path in (root / "sys/block").glob("*/device")}
        self._rdma = sorted((root / "sys/class/infiniband").glob("*/ports/*/counters"))

    def read(self) -> dict[str, Any]:
        """Values of `raydist.run.telemetry_schema.NODE`; those that this kernel does not provide are left out."""
        row: dict[str, Any] = {"cpu_count": os.cpu_count(), "disk_free_bytes": self._space.newest()}
        for what in (
            self._cpu,
            self._load,
            self._memory,
            self._shm,
            self._disk,
            self._pressure,
            self._interface,
            self._remote,
            self._tcp,
        ):
            with _skip_missing():
                row.update(what())
        self._reads += 1
        return {name: value for name, value in row.items() if value is not None}

    # --- inside

    def _text(self, path: str) -> str:
        return _text(f"{self._root}/{path}")

    def _cpu(self) -> dict[str, Any]:
        # cpu user nice system idle iowait irq softirq steal ...: the fields after these are part of user and nice.
        ticks = [int(n) for n in self._text("proc/stat").partition("\n")[0].split()[1:9]]
        before, self._ticks = self._ticks, (sum(ticks), ticks[3] + ticks[4])
        stolen = {"steal_seconds": ticks[7] / _TICKS_PER_S}
        if before is None or self._ticks[0] <= before[0]:
            return stolen
        passed, idle = self._ticks[0] - before[0], self._ticks[1] - before[1]
        return {"cpu_util": min(max(1 - idle / passed, 0.0), 1.0), **stolen}  # iowait may decrease by a tick

    def _load(self) -> dict[str, Any]:
        return {"load": float(self._text("proc/loadavg").split()[0])}

    def _memory(self) -> dict[str, Any]:
        # The kernel's kB are 1024 bytes.
        lines = (line.split() for line in self._text("proc/meminfo").splitlines()[:5])
        fields = {line[0]: int(line[1]) * 1024 for line in lines}
        total = fields["MemTotal:"]
        used = total - fields["MemAvailable:"]
        of_group = self._group.read()
        if of_group is not None and of_group[1] < total:
            used, total = of_group
        return {"memory_used_bytes": used, "memory_total_bytes": total}

    def _shm(self) -> dict[str, Any]:
        stat = os.statvfs(self._root / "dev/shm")
        return {"shm_used_bytes": (stat.f_blocks - stat.f_bfree) * stat.f_frsize}

    def _disk(self) -> dict[str, Any]:
        if not self._disks:
            return {}
        read = written = 0
        for line in self._text("proc/diskstats").splitlines():
            _, _, name, *counts = line.split()
            if name in self._disks:
                read, written = read + int(counts[2]), written + int(counts[6])
        return {"disk_read_bytes": read * _SECTOR_BYTES, "disk_write_bytes": written * _SECTOR_BYTES}

    def _pressure(self) -> dict[str, Any]:
        # some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS
        return {"disk_waited_seconds": int(self._text("proc/pressure/io").split()[4].partition("=")[2]) / 1e6}

    def _interface(self) -> dict[str, Any]:
        if self._nic is None:
            return {}
        for line in self._text("proc/net/dev").splitlines()[2:]:
            name, _, rest = line.partition(":")
            if name.strip() == self._nic:
                n = [int(count) for count in rest.split()]
                return {
                    "nic": self._nic,
                    "nic_in_bytes": n[0],
                    "nic_in_packets": n[1],
                    "nic_out_bytes": n[8],
                    "nic_out_packets": n[9],
                    "nic_errors": n[2] + n[3] + n[10] + n[11],
                    "nic_limit_bytes_per_second": self._speed(),
                }
        return {}

    def _speed(self) -> float | None:
        if self._reads % _SPEED_READS == 0:
            self._limit = None
            with _skip_missing():  # a loopback has no speed, a link that is down reports an error, a virtual one -1
                megabits = int(self._text(f"sys/class/net/{self._nic}/speed"))
                self._limit = megabits * 1e6 / 8 if megabits > 0 else None
        return self._limit

    def _tcp(self) -> dict[str, Any]:
        names, values = (line.split() for line in self._text("proc/net/snmp").splitlines() if line.startswith("Tcp:"))
        row: dict[str, Any] = {"retransmits_count": int(values[names.index("RetransSegs")])}
        # The kernel takes about a microsecond for each socket of the host: on one with thousands it is read less often. The
        # readings between repeat the newest value: without one they would say that nothing waits.
        if self._reads % self._queue_reads:
            return row | self._queue
        self._queue = {}
        lines = self._text("proc/net/tcp").splitlines()[1:]
        self._queue_reads = 1 + len(lines) // _SOCKETS
        waiting: dict[str, int] = {}
        for line in lines:
            _, _, peer, state, queues, *_ = line.split(None, 5)
            # Established, and something waits to be sent.
            if state == "01" and not queues.startswith("00000000:") and not peer.startswith(_LOOPBACK, 6):
                waiting[peer[:8]] = waiting.get(peer[:8], 0) + int(queues[:8], 16)
        most = max(waiting, key=lambda peer: waiting[peer], default="")
        # The kernel prints addresses in the order of this machine's bytes.
        address = socket.inet_ntoa(int(most, 16).to_bytes(4, sys.byteorder)) if most else ""
        self._queue = {"link_queue_bytes": waiting.get(most, 0), "link_queue_peer": address}
        return row | self._queue

    def _remote(self) -> dict[str, Any]:
        if not self._rdma:
            return {}
        sums = [sum(int((port / name).read_text()) for port in self._rdma) * _LANES for name in _RDMA]
        return dict(zip(("rdma_in_bytes", "rdma_out_bytes"), sums, strict=True))


_RDMA = ("port_rcv_data", "port_xmit_data")


class FreeSpace:
    """The free bytes of a folder, read in a thread every 10 s, so that storage that hangs does not delay the other readings."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask
        self._at, self._value = 0.0, 0
        self._thread: threading.Thread | None = None

    def newest(self) -> int | None:
        """The newest value if it is at most 30 s old, else None."""
        age = time.monotonic() - self._at
        if (self._thread is None or not self._thread.is_alive()) and (age >= _SPACE_S or not self._at):
            self._thread = threading.Thread(target=self._look, name="raydist-free", daemon=True)
            self._thread.start()
        return self._value if self._at and age < 3 * _SPACE_S else None

    def _look(self) -> None:
        with _skip_missing():
            self._value = self._ask()
            self._at = time.monotonic()


def training_interface(node_ip: str, env: Mapping[str, str]) -> str | None:
    """The interface that ranks on this node use: the one that the user named, else the interface with the address `node_ip`.

    The same choice as in raydist.worker.distributed. NCCL's name patterns (`^docker`, `eth,ib`) are ignored.
    """
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        name = env.get(variable, os.environ.get(variable, "")).removeprefix("=")
        if name and Path("/sys/class/net", name).exists():
            return name
    return interface_of(node_ip)


def process(pid: int) -> dict[str, Any]:
    """Memory and processor time of a process: columns of a rank's row, and `state`, the letter of its state.

    {} if there is no process with that id; values that this kernel does not provide are left out.
    """
    try:
        pages = int(_text(f"/proc/{pid}/statm").split()[1])
        # The name, in parentheses, may contain any character: the numbers begin after the last ")", with the third field.
        stat = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except (OSError, IndexError):
        return {}
    row: dict[str, Any] = {
        "rss_bytes": pages * _PAGE_BYTES,
        "cpu_seconds": (int(stat[11]) + int(stat[12])) / _TICKS_PER_S,
        "major_faults_count": int(stat[9]),
        "state": stat[0],
    }
    with _skip_missing():
        row["run_delay_seconds"] = int(_text(f"/proc/{pid}/schedstat").split()[1]) / 1e9
    return row


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _text(path: str) -> str:
    # Not with Path: that doubles the time of a read.
    with open(path) as file:
        return file.read()


@contextmanager
def _skip_missing() -> Iterator[None]:
    """Skips values that this kernel does not have, or that a container may not read."""
    with suppress(OSError, ValueError, KeyError, IndexError):
        yield

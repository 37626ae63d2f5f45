"""Faults of a rank's host: its processors, processes, clock and links, and the storage of the run.

Runs anywhere. The help texts are defined only here.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raydist import registry
from raydist.faults.base import AtPhase, Fault
from raydist.run.telemetry_schema import GPU, NODE, RANK
from raydist.spec.parts import problem


class Pause(AtPhase):
    """SIGSTOP and SIGCONT from another process, again and again."""

    fault: Literal["pause"] = "pause"
    seconds: float = Field(0.5, gt=0, description="Duration of each stop.")
    gap: float = Field(0.5, gt=0, description="Seconds between two stops.")
    stops: int = Field(20, ge=1, description="Number of stops.")


class CpuHog(AtPhase):
    """Processes that compute on the one processor that the rank is then limited to."""

    fault: Literal["cpu_hog"] = "cpu_hog"
    seconds: float = Field(30, gt=0, description="Duration.")
    processes: int = Field(2, ge=1, description="Number of processes.")


class CpuQuota(AtPhase):
    """A CPU quota of a control group for the rank alone. Needs root, and a writable /sys/fs/cgroup."""

    fault: Literal["cpu_quota"] = "cpu_quota"
    seconds: float = Field(30, gt=0, description="Duration.")
    cpus: float = Field(0.2, ge=0.01, description="Processors that the rank may use.")


class Reading(Fault):
    """Telemetry has another reading of the rank, its node or its GPU than there is; without a GPU, readings of one."""

    fault: Literal["reading"] = "reading"
    column: str = Field(description="A column of telemetry (docs/reference/observe.md).")
    value: float | str = Field(
        description="What is read instead; of a total, what is added to it each second, whole numbers where it has those."
    )
    seconds: float = Field(30, gt=0, description="Duration.")

    @model_validator(mode="after")
    def _fits(self) -> Reading:
        columns = {**RANK, **NODE, **GPU}
        if self.column not in columns:
            raise problem("column", self.column, "is not a column", registry.did_you_mean(self.column, list(columns)))
        text = str(columns[self.column][0]) == "string"
        if text != isinstance(self.value, str):
            raise problem("value", self.value, f"does not fit {self.column}", f"give {'text' if text else 'a number'}")
        return self


class NoDescriptors(AtPhase):
    """The rank has no file descriptor left: EMFILE for every file, socket and pipe that it opens."""

    fault: Literal["no_descriptors"] = "no_descriptors"
    seconds: float = Field(1.0, gt=0, description="Duration.")


class ClockJump(AtPhase):
    """The clock of the rank's process or of its agent's jumps, and stays so until that process ends."""

    fault: Literal["clock_jump"] = "clock_jump"
    process: Literal["rank", "agent"] = Field("rank", description="Whose clock.")
    seconds: float = Field(3600.0, description="By how much; negative: backwards.")


class NoProcesses(AtPhase):
    """The rank can start neither a process nor a thread: EAGAIN, as where all pids are in use."""

    fault: Literal["no_processes"] = "no_processes"
    seconds: float = Field(1.0, gt=0, description="Duration. For root it needs a writable pids control group.")


class FullSharedMemory(AtPhase):
    """No page of the host's /dev/shm is free, as where another job has filled it. Not where other users have files there."""

    fault: Literal["full_shared_memory"] = "full_shared_memory"
    seconds: float = Field(10.0, gt=0, le=600, description="Duration; the rank's end ends it, too.")
    limit_mb: int = Field(1024, ge=1, description="Most MiB that it takes: not injected where more are free.")


class SlowNetwork(AtPhase):
    """The rank's TCP connections send slowly, as over a faulty network card."""

    fault: Literal["slow_network"] = "slow_network"
    seconds: float = Field(30, gt=0, description="Duration.")
    bytes_per_s: int = Field(
        1 << 20, ge=1024, description="Of each connection that the rank has when the fault begins."
    )


class OneWayCut(AtPhase):
    """The rank's TCP connections send, but receive nothing, or only a share: a network that is cut in one direction, or loses and
    reorders packets.
    """

    fault: Literal["one_way_cut"] = "one_way_cut"
    seconds: float = Field(30, gt=0, description="Duration; of the connections that the rank has when it begins.")
    share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Of the packets, at random, that are lost; below 1 those after them arrive first: out of order.",
    )


class StorageFault(Fault):
    """A storage fault for a rank's access to the run's folder: checkpoints, ledger. The monitor writes the records itself."""

    seconds: float | None = Field(
        None, gt=0, description="Duration from the beginning of the step; or give `operations`."
    )
    operations: int | None = Field(None, ge=1, description="Number of operations that fail; or give `seconds`.")

    @model_validator(mode="after")
    def _one(self) -> StorageFault:
        if (self.seconds is None) == (self.operations is None):
            raise problem("seconds", self.seconds, "and operations: exactly one of them is needed", "give one of them")
        return self


class DiskFull(StorageFault):
    """ENOSPC in the middle of a file."""

    fault: Literal["disk_full"] = "disk_full"


class NoInodes(StorageFault):
    """ENOSPC for every new file, as where all inodes are in use."""

    fault: Literal["no_inodes"] = "no_inodes"


class CutUpload(StorageFault):
    """The connection to storage is closed in the middle of a file."""

    fault: Literal["cut_upload"] = "cut_upload"


class BusyStorage(StorageFault):
    """503 (Slow Down) for every operation, as from an object store after the client has tried again in vain."""

    fault: Literal["busy_storage"] = "busy_storage"


class ReadOnly(StorageFault):
    """EROFS for every write and delete."""

    fault: Literal["read_only"] = "read_only"


class StorageGone(StorageFault):
    """EIO for every operation, including reads."""

    fault: Literal["storage_gone"] = "storage_gone"


class StaleStorage(StorageFault):
    """ESTALE for every operation, as from NFS whose server has exported another file system."""

    fault: Literal["stale_storage"] = "stale_storage"


class UnmountedStorage(StorageFault):
    """The run's folder is not there, as below the mount point of a file system that was unmounted."""

    fault: Literal["unmounted_storage"] = "unmounted_storage"


class HangingStorage(StorageFault):
    """Every operation waits until storage answers again, after `seconds`."""

    fault: Literal["hanging_storage"] = "hanging_storage"
    seconds: float = Field(gt=0, description="Duration from the beginning of the step.")
    operations: Literal[None] = Field(None, description="Not with this fault.")


class SlowStorage(StorageFault):
    """Every operation takes longer."""

    fault: Literal["slow_storage"] = "slow_storage"
    delay: float = Field(1.0, gt=0, description="Delay in seconds.")


class SlowDisk(StorageFault):
    """Files are written slowly, as to a disk that fails soon."""

    fault: Literal["slow_disk"] = "slow_disk"
    bytes_per_s: int = Field(1 << 20, ge=1024, description="Of each file that is written.")

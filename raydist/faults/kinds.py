"""All faults that can be injected, as data: the fault, its rank and its step.

Runs anywhere. The help texts are defined only here: `raydist faults` and the error messages use them.
"""

from __future__ import annotations

import inspect
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from raydist.spec.parts import problem

Phase = Literal["data", "forward", "backward", "update", "eval", "save"]
By = Literal["rank", "driver"]


class Fault(BaseModel):
    """The fields of all faults."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    by: ClassVar[By] = "rank"
    """Which process injects it."""

    fault: str
    rank: int | None = Field(None, ge=0, description="The rank to inject it on; null: every rank separately.")
    step: int = Field(ge=1, description="The step in which it happens.")
    times: int = Field(
        1, ge=1, description="How often it happens in the whole run: at most once each time the step is trained."
    )

    @property
    def at(self) -> Phase:
        """The phase of the step in which it happens."""
        return "data"


class OfRank(Fault):
    """A fault of one rank."""

    rank: int = Field(ge=0, description="The rank to inject it on.")


class AtPhase(OfRank):
    """A fault of a rank at the start of a phase of the step."""

    phase: Phase = Field(
        "forward",
        description="data: before the step's batch is ready; save: before the loop starts a checkpoint; eval and save: only in "
        "steps with an evaluation or a checkpoint.",
    )

    @property
    def at(self) -> Phase:
        """The phase as given."""
        return self.phase


class InForward(OfRank):
    """A fault in the model."""

    @property
    def at(self) -> Phase:
        """The first forward pass."""
        return "forward"


class Kill(AtPhase):
    """SIGKILL, as the kernel's out-of-memory killer sends it."""

    fault: Literal["kill"] = "kill"


class Segfault(AtPhase):
    """A read of address 0: SIGSEGV."""

    fault: Literal["segfault"] = "segfault"


class Abort(AtPhase):
    """abort(3), as after a failed check in native code: SIGABRT."""

    fault: Literal["abort"] = "abort"


class Exit(AtPhase):
    """sys.exit() in the user's code."""

    fault: Literal["exit"] = "exit"
    code: int = Field(1, ge=0, le=255, description="The exit code.")


class Raise(AtPhase):
    """An exception, as from a bug in the user's code."""

    fault: Literal["raise"] = "raise"
    message: str = Field("a bug in the user's code", description="The exception's text.")


class Suspend(AtPhase):
    """SIGSTOP: the process exists, but does not run."""

    fault: Literal["suspend"] = "suspend"


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


class Garbage(AtPhase):
    """Python's garbage collector runs in each step, with many objects."""

    fault: Literal["garbage"] = "garbage"
    objects: int = Field(1_000_000, ge=1, description="Objects that are kept.")
    steps: int = Field(1, ge=1, description="Number of steps.")


class HoldGil(AtPhase):
    """Native code that holds Python's GIL: no other thread of the rank runs."""

    fault: Literal["hold_gil"] = "hold_gil"
    seconds: int = Field(3600, ge=1, description="Duration.")


class Deadlock(AtPhase):
    """The training thread waits for a lock that is never released; the other threads run."""

    fault: Literal["deadlock"] = "deadlock"


class SkipCollective(InForward):
    """All ranks except this one start an all-reduce of the control group."""

    fault: Literal["skip_collective"] = "skip_collective"


class OutOfMemory(AtPhase):
    """torch.OutOfMemoryError, as CUDA's allocator raises it."""

    fault: Literal["out_of_memory"] = "out_of_memory"


class MemoryHog(AtPhase):
    """Allocates host memory until none is left."""

    fault: Literal["memory_hog"] = "memory_hog"
    limit_mb: int | None = Field(
        None, ge=1, description="Limit of the process in MiB; null: all memory of the host or container."
    )


class KillAgent(AtPhase):
    """SIGKILL to the rank's agent, the Ray Train worker that started the rank's process."""

    fault: Literal["kill_agent"] = "kill_agent"


class KillNode(AtPhase):
    """SIGKILL to the rank's raylet and all its child processes."""

    fault: Literal["kill_node"] = "kill_node"


class SuspendProcess(AtPhase):
    """SIGSTOP to another process of the run on the rank's host, and SIGCONT after some seconds."""

    fault: Literal["suspend_process"] = "suspend_process"
    process: Literal["agent", "monitor", "coordinator", "raylet", "gcs"] = Field(
        description="agent and raylet: the rank's own; coordinator and monitor: only on the driver's node; gcs: only of a private "
        "Ray."
    )
    seconds: float = Field(5.0, gt=0, description="Duration.")


class KillProcess(AtPhase):
    """SIGKILL to another process of the run on the rank's host."""

    fault: Literal["kill_process"] = "kill_process"
    process: Literal["coordinator", "raylet", "gcs"] = Field(
        description="raylet: the rank's own; coordinator: only on the driver's node; gcs: only of a private Ray."
    )


class NoDescriptors(AtPhase):
    """The rank has no file descriptor left: EMFILE for every file, socket and pipe that it opens."""

    fault: Literal["no_descriptors"] = "no_descriptors"
    seconds: float = Field(1.0, gt=0, description="Duration.")


class ClockJump(AtPhase):
    """The clock of the rank's process jumps, and stays so until that process ends."""

    fault: Literal["clock_jump"] = "clock_jump"
    seconds: float = Field(3600.0, description="By how much; negative: backwards.")


class BadNumber(InForward):
    """NaN or infinity in the loss, or only in the gradient, in all of this rank's forward passes of the step."""

    fault: Literal["bad_number"] = "bad_number"
    where: Literal["loss", "gradient"] = Field("gradient", description="loss: the logits; gradient: their gradient.")
    value: Literal["nan", "inf"] = Field("nan", description="The factor.")


class LossSpike(InForward):
    """Logits far too large, in all of this rank's forward passes of the step."""

    fault: Literal["loss_spike"] = "loss_spike"
    factor: float = Field(1000.0, gt=1, description="The factor.")


class FlipBit(AtPhase):
    """Flips one bit of a parameter, on this rank only."""

    fault: Literal["flip_bit"] = "flip_bit"
    phase: Literal["backward", "update"] = Field(
        "update",
        description="backward: before the step's comparison of replicas; update: after it, while no copy of the state is being "
        "made, and before the optimizer step.",
    )
    parameter: str | None = Field(None, description="Its name in the model; null: the first parameter.")
    bit: int = Field(
        20, ge=0, le=7 + 3 * 8, description="The bit's number in the first four bytes that this rank holds."
    )


class SlowRank(InForward):
    """The rank sleeps in each step."""

    fault: Literal["slow_rank"] = "slow_rank"
    seconds: float = Field(gt=0, description="Seconds per step.")
    steps: int = Field(1, ge=1, description="Number of steps.")


class SlowData(OfRank):
    """The loader's thread is slow to make the step's batch."""

    fault: Literal["slow_data"] = "slow_data"
    seconds: float = Field(gt=0, description="Delay in seconds.")
    steps: int = Field(1, ge=1, description="Number of steps.")


class StuckData(OfRank):
    """The loader's thread never returns the step's batch."""

    fault: Literal["stuck_data"] = "stuck_data"


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


class DamageCheckpoint(Fault):
    """Damages the newest committed checkpoint."""

    fault: Literal["damage_checkpoint"] = "damage_checkpoint"
    rank: int = Field(0, ge=0, description="The rank that damages it.")
    checkpoint: int | None = Field(
        None, ge=1, description="The checkpoint's step, damaged once committed; null: the newest committed one."
    )
    what: Literal["torn", "truncated", "flipped", "missing", "manifest"] = Field(
        "flipped",
        description="A shard: second half zeroed, cut off, one bit flipped, or deleted; manifest: one bit of the manifest flipped.",
    )


class KillDriver(Fault):
    """SIGKILL to the driver, while rank 0 waits for it."""

    fault: Literal["kill_driver"] = "kill_driver"
    by: ClassVar[By] = "driver"
    rank: Literal[0] = Field(0, description="Rank 0 requests it.")


class KillMonitor(Fault):
    """SIGKILL to the RunMonitor, while rank 0 waits for it."""

    fault: Literal["kill_monitor"] = "kill_monitor"
    by: ClassVar[By] = "driver"
    rank: Literal[0] = Field(0, description="Rank 0 requests it.")


class Drain(OfRank):
    """A drain notice for the rank's node, as from `ray drain-node` before a preemption."""

    fault: Literal["drain"] = "drain"
    by: ClassVar[By] = "driver"
    deadline_s: float = Field(60.0, gt=0, description="Seconds until the node's removal, as given in the notice.")


def _kinds(root: type[Fault]) -> dict[str, type[Fault]]:
    found: dict[str, type[Fault]] = {}
    for cls in root.__subclasses__():
        if isinstance(name := cls.model_fields["fault"].default, str):
            found[name] = cls
        found |= _kinds(cls)
    return found


KINDS = _kinds(Fault)
"""All faults by name."""


def fields(kind: type[Fault]) -> dict[str, str]:
    """The fields of a fault, except its name -> their help, with the default if there is one."""
    texts = {}
    for name, info in kind.model_fields.items():
        if name != "fault":
            default = "" if info.is_required() or info.default is None else f" Default: {info.default}."
            texts[name] = f"{info.description}{default}"
    return texts


def summary(kind: type[Fault]) -> str:
    """A one-line description."""
    return (inspect.getdoc(kind) or "").splitlines()[0]

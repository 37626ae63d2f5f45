"""Every fault that can be injected, as data: what happens, on which rank, at which step.

Runs anywhere. The help is written here once: `raydist faults` and the error messages come from it.
"""

from __future__ import annotations

import inspect
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from raydist.spec.parts import problem

Phase = Literal["data", "forward", "backward", "update", "eval", "save"]
By = Literal["rank", "driver"]


class Fault(BaseModel):
    """What all faults have."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    by: ClassVar[By] = "rank"
    """Who does it."""

    fault: str
    rank: int | None = Field(None, ge=0, description="The rank that it happens to; null: every rank, each by itself.")
    step: int = Field(ge=1, description="The step in which it happens.")
    times: int = Field(
        1, ge=1, description="How often it happens in the whole run: once each time that its step is trained."
    )

    @property
    def at(self) -> Phase:
        """The phase of its step in which it happens."""
        return "data"


class OfRank(Fault):
    """What one rank does to itself, or has done to it."""

    rank: int = Field(ge=0, description="The rank that it happens to.")


class AtPhase(OfRank):
    """What a rank does where its loop enters a phase of the step."""

    phase: Phase = Field(
        "forward",
        description="data: before the step's batch is there; save: before the loop starts a checkpoint; eval and save: in steps "
        "that have one.",
    )

    @property
    def at(self) -> Phase:
        """As asked."""
        return self.phase


class InForward(OfRank):
    """What happens in the model."""

    @property
    def at(self) -> Phase:
        """The first pass."""
        return "forward"


class Kill(AtPhase):
    """SIGKILL, as the kernel's out-of-memory killer sends it."""

    fault: Literal["kill"] = "kill"


class Segfault(AtPhase):
    """A read of address 0: SIGSEGV."""

    fault: Literal["segfault"] = "segfault"


class Abort(AtPhase):
    """abort(3), as a failed check in native code ends: SIGABRT."""

    fault: Literal["abort"] = "abort"


class Exit(AtPhase):
    """sys.exit() in the user's code."""

    fault: Literal["exit"] = "exit"
    code: int = Field(1, ge=0, le=255, description="The exit code.")


class Raise(AtPhase):
    """An exception, as a bug in the user's code raises it."""

    fault: Literal["raise"] = "raise"
    message: str = Field("a bug in the user's code", description="Its text.")


class Suspend(AtPhase):
    """SIGSTOP: the process is there, and does nothing."""

    fault: Literal["suspend"] = "suspend"


class HoldGil(AtPhase):
    """Native code that keeps Python's lock: no other thread of the rank runs."""

    fault: Literal["hold_gil"] = "hold_gil"
    seconds: int = Field(3600, ge=1, description="For how long.")


class Deadlock(AtPhase):
    """The thread that trains waits for a lock that nobody gives back; the others run."""

    fault: Literal["deadlock"] = "deadlock"


class SkipCollective(InForward):
    """All ranks but this one start an all-reduce of the control group."""

    fault: Literal["skip_collective"] = "skip_collective"


class OutOfMemory(AtPhase):
    """torch.OutOfMemoryError, as CUDA's allocator raises it."""

    fault: Literal["out_of_memory"] = "out_of_memory"


class MemoryHog(AtPhase):
    """Takes host memory until it gets no more."""

    fault: Literal["memory_hog"] = "memory_hog"
    limit_mb: int | None = Field(
        None, ge=1, description="MiB that the process may take; null: what the host or its container has, all of it."
    )


class KillAgent(AtPhase):
    """SIGKILL to the rank's agent, the Ray Train worker that the rank's process is started by."""

    fault: Literal["kill_agent"] = "kill_agent"


class KillNode(AtPhase):
    """SIGKILL to the rank's raylet and every process below it."""

    fault: Literal["kill_node"] = "kill_node"


class BadNumber(InForward):
    """NaN or infinity in the loss, or only in the gradient, in all of this rank's passes of the step."""

    fault: Literal["bad_number"] = "bad_number"
    where: Literal["loss", "gradient"] = Field("gradient", description="The logits, or their gradient.")
    value: Literal["nan", "inf"] = Field("nan", description="What they are multiplied by.")


class LossSpike(InForward):
    """Logits far too large, in all of this rank's passes of the step."""

    fault: Literal["loss_spike"] = "loss_spike"
    factor: float = Field(1000.0, gt=1, description="What they are multiplied by.")


class FlipBit(OfRank):
    """One bit of a parameter changes on this rank alone."""

    fault: Literal["flip_bit"] = "flip_bit"
    phase: Literal["backward", "update"] = Field(
        "update",
        description="backward: before replicas are compared in the step; update: after that, where no copy of the state is being "
        "made, and before the optimizer has its turn.",
    )
    parameter: str | None = Field(None, description="Its name in the model; null: the first.")
    bit: int = Field(20, ge=0, le=7 + 3 * 8, description="Of the first four bytes that this rank has of it.")

    @property
    def at(self) -> Phase:
        """As asked."""
        return self.phase


class SlowRank(InForward):
    """The rank sleeps in each step for a while."""

    fault: Literal["slow_rank"] = "slow_rank"
    seconds: float = Field(gt=0, description="In each step.")
    steps: int = Field(1, ge=1, description="In how many steps.")


class SlowData(OfRank):
    """The loader's thread takes long to make the step's batch."""

    fault: Literal["slow_data"] = "slow_data"
    seconds: float = Field(gt=0, description="How long.")


class StuckData(OfRank):
    """The loader's thread never comes back with the step's batch."""

    fault: Literal["stuck_data"] = "stuck_data"


class StorageFault(Fault):
    """What storage does to a rank that uses the run's folder: checkpoints, ledger. Records are the monitor's."""

    seconds: float | None = Field(
        None, gt=0, description="For how long from the beginning of the step; or `operations`."
    )
    operations: int | None = Field(None, ge=1, description="For how many operations; or `seconds`.")

    @model_validator(mode="after")
    def _one(self) -> StorageFault:
        if (self.seconds is None) == (self.operations is None):
            raise problem("seconds", self.seconds, "and operations: exactly one of them is needed", "give one of them")
        return self


class DiskFull(StorageFault):
    """ENOSPC in the middle of a file."""

    fault: Literal["disk_full"] = "disk_full"


class ReadOnly(StorageFault):
    """EROFS for whatever writes or deletes."""

    fault: Literal["read_only"] = "read_only"


class StorageGone(StorageFault):
    """EIO for everything, reading too."""

    fault: Literal["storage_gone"] = "storage_gone"


class SlowStorage(StorageFault):
    """Every operation takes longer."""

    fault: Literal["slow_storage"] = "slow_storage"
    delay: float = Field(1.0, gt=0, description="Seconds.")


class DamageCheckpoint(Fault):
    """Spoils the newest committed checkpoint."""

    fault: Literal["damage_checkpoint"] = "damage_checkpoint"
    rank: int = Field(0, ge=0, description="The rank that does it.")
    checkpoint: int | None = Field(
        None, ge=1, description="Of which step, once it is committed; null: the newest that is committed then."
    )
    what: Literal["torn", "truncated", "flipped", "missing", "manifest"] = Field(
        "flipped",
        description="A shard whose second half is zeros, or is cut off; a bit of a shard; the shard itself; a bit of the manifest.",
    )


class KillDriver(Fault):
    """SIGKILL to the driver, while rank 0 waits for it."""

    fault: Literal["kill_driver"] = "kill_driver"
    by: ClassVar[By] = "driver"
    rank: Literal[0] = Field(0, description="Rank 0 asks for it.")


class KillMonitor(Fault):
    """The RunMonitor's process is killed, while rank 0 waits for it."""

    fault: Literal["kill_monitor"] = "kill_monitor"
    by: ClassVar[By] = "driver"
    rank: Literal[0] = Field(0, description="Rank 0 asks for it.")


class Drain(OfRank):
    """A drain notice for the rank's node, as `ray drain-node` gives it for a preemption."""

    fault: Literal["drain"] = "drain"
    by: ClassVar[By] = "driver"
    deadline_s: float = Field(60.0, gt=0, description="Seconds after which the notice says that the node will be gone.")


def _kinds(root: type[Fault]) -> dict[str, type[Fault]]:
    found: dict[str, type[Fault]] = {}
    for cls in root.__subclasses__():
        if isinstance(name := cls.model_fields["fault"].default, str):
            found[name] = cls
        found |= _kinds(cls)
    return found


KINDS = _kinds(Fault)
"""Every fault by its name."""


def fields(kind: type[Fault]) -> dict[str, str]:
    """A fault's fields but for its name -> their help, with the default where there is one."""
    told = {}
    for name, info in kind.model_fields.items():
        if name != "fault":
            default = "" if info.is_required() or info.default is None else f" Default: {info.default}."
            told[name] = f"{info.description}{default}"
    return told


def summary(kind: type[Fault]) -> str:
    """What it does, in a line."""
    return (inspect.getdoc(kind) or "").splitlines()[0]

"""All faults that can be injected, as data: the fault, its rank and its step.

Runs anywhere. The help texts are defined only here and in host_kinds.py: `raydist faults` and the error messages use them.
"""

from __future__ import annotations

import inspect
from typing import ClassVar, Literal

from pydantic import Field

from raydist.faults import host_kinds  # noqa: F401 - its faults are subclasses, too
from raydist.faults.base import AtPhase, By, Fault, InForward, OfRank


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


class SkipCollective(OfRank, InForward):
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


class Leak(AtPhase):
    """Memory is allocated in each step, and kept until the rank ends."""

    fault: Literal["leak"] = "leak"
    mib: float = Field(1.0, gt=0, description="MiB in each step.")
    steps: int = Field(1_000_000, ge=1, description="Number of steps.")
    where: Literal["host", "device"] = Field("host", description="device: the rank's GPU, or the host if it has none.")


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
    """SIGKILL to another process of the run on the rank's host, from the rank or from the kernel for lack of memory."""

    fault: Literal["kill_process"] = "kill_process"
    process: Literal["agent", "monitor", "coordinator", "raylet", "gcs"] = Field(
        description="agent and raylet: the rank's own; coordinator and monitor: only on the driver's node; gcs: only of a private "
        "Ray."
    )
    lack_of_memory: bool = Field(
        False,
        description="The kernel kills it, in a memory control group in which nothing is left. Needs root, and a writable "
        "/sys/fs/cgroup.",
    )


class BadNumber(OfRank, InForward):
    """NaN or infinity in the loss, or only in the gradient, in all of this rank's forward passes of each step."""

    fault: Literal["bad_number"] = "bad_number"
    where: Literal["loss", "gradient"] = Field("gradient", description="loss: the logits; gradient: their gradient.")
    value: Literal["nan", "inf"] = Field("nan", description="The factor.")
    steps: int = Field(1, ge=1, description="Number of steps.")


class LossSpike(OfRank, InForward):
    """Logits far too large, in all of this rank's forward passes of the step."""

    fault: Literal["loss_spike"] = "loss_spike"
    factor: float = Field(1000.0, gt=1, description="The factor.")


class ExpertImbalance(InForward):
    """Routers send many tokens to the first experts of each layer, in the training passes of each step."""

    fault: Literal["expert_imbalance"] = "expert_imbalance"
    experts: int = Field(1, ge=1, description="How many experts get them; of a layer with fewer, all.")
    tokens: float = Field(
        0.5, gt=0, le=1, description="Share of each micro-batch's tokens; of 1 the other experts get none."
    )
    steps: int = Field(1, ge=1, description="Number of steps.")


class ScaleGradient(InForward):
    """The gradient of one parameter is multiplied in each step."""

    fault: Literal["scale_gradient"] = "scale_gradient"
    parameter: str | None = Field(None, description="Its name in the model; null: the first parameter.")
    factor: float = Field(1e-6, description="The factor; below 1 the gradient vanishes, above it explodes.")
    steps: int = Field(1, ge=1, description="Number of steps.")


class ScaleActivations(InForward):
    """The output of one layer is multiplied in each step."""

    fault: Literal["scale_activations"] = "scale_activations"
    layer: str | None = Field(None, description="Its name in the model; null: that of the first parameter.")
    factor: float = Field(1e-6, description="The factor; below 1 the output vanishes, above it explodes.")
    steps: int = Field(1, ge=1, description="Number of steps.")


class LearningRate(Fault):
    """The optimizer's learning rate is multiplied in each step; records have that of the schedule."""

    fault: Literal["learning_rate"] = "learning_rate"
    factor: float = Field(100.0, gt=0, description="The factor.")
    steps: int = Field(1, ge=1, description="Number of steps.")


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


class SlowRank(AtPhase):
    """The rank sleeps in each step, or in each evaluation."""

    fault: Literal["slow_rank"] = "slow_rank"
    seconds: float = Field(gt=0, description="Seconds in each step that has the phase.")
    steps: int = Field(1, ge=1, description="Number of steps.")


class SlowData(OfRank):
    """The loader's thread is slow to make the step's batch."""

    fault: Literal["slow_data"] = "slow_data"
    seconds: float = Field(gt=0, description="Delay in seconds.")
    steps: int = Field(1, ge=1, description="Number of steps.")


class StuckData(OfRank):
    """The loader's thread never returns the step's batch."""

    fault: Literal["stuck_data"] = "stuck_data"


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


class DamageCopy(OfRank):
    """Flips one bit in each of the two copies of the rank's state in its node's memory, once there are two."""

    fault: Literal["damage_copy"] = "damage_copy"


class DamageMessage(AtPhase):
    """Flips one bit of the next value, such as a manifest or an agreement, that this rank receives from a rank; not of tensors."""

    fault: Literal["damage_message"] = "damage_message"


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


class DriverClockJump(Fault):
    """The clocks of the driver and of the RunMonitor jump, and stay so until these processes end, while rank 0 waits for it."""

    fault: Literal["driver_clock_jump"] = "driver_clock_jump"
    by: ClassVar[By] = "driver"
    rank: Literal[0] = Field(0, description="Rank 0 requests it.")
    seconds: float = Field(3600.0, description="By how much; negative: backwards.")


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

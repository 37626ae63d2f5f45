"""Every error that a user can see, in one tree. Each says what is wrong, and how to mend it.

Runs anywhere. Imports nothing of raydist but the function that takes secrets out of a message.

    RaydistError                      message, hint; `exit_code` is what the command ends with
    ├── UserError (ValueError)        2: what was asked cannot be done
    │   ├── SpecError                 a job file or an override is wrong; all its problems at once
    │   ├── UsageError                a command's options do not fit together
    │   ├── DataError                 a corpus, a tokenizer or a prepared dataset cannot be used
    │   ├── ExtensionNotFound         no model, strategy, ... of that name (also a LookupError)
    │   ├── RunNotFound               no run of that name or at that place (also a LookupError)
    │   ├── PreflightError            the cluster cannot run this job
    │   └── ClusterUnreachable        no Jobs API answers at that address; one may do so later
    ├── StorageError (OSError)        3: storage refused a read or a write
    ├── CheckpointError               3
    │   ├── CheckpointCorrupt         a file is missing, cut short, or has another hash than its manifest says
    │   ├── CheckpointNotFound        nothing committed that can be read (also a LookupError)
    │   └── SpecChanged               2: a resumed run would compute other numbers than the one it continues
    ├── TraceFailed                   3: a live run gave no trace, or not all of it
    ├── StopFailed                    3: a run that was asked to stop has not ended in time, or its driver died on the way
    ├── Rollback                      3: the attempt ended in order to go on from a checkpoint
    └── TrainingStopped               3: the run ended before its last step, and a restart would not help
        ├── NonFinite                 NaN or Inf in the loss or in the gradients (also an ArithmeticError)
        ├── LossSpike                 a loss far above those before it (also an ArithmeticError)
        ├── SuspectHardware           replicas drifted on the same device again and again
        ├── GraphMismatch             parameters without a gradient, or ranks whose graphs differ
        ├── WorkerFailed              a rank died or raised, and the budget of restarts is spent
        ├── SavesFailed               too many saves in a row failed (also a CheckpointError)
        └── Fenced                    a newer attempt has begun: this one may not commit (also a CheckpointError)

    RankFailed                        what one rank ended with, as plain facts, on its way to the driver

Errors cross Ray by pickle: arguments are positional and all go to `super().__init__`.
"""

from __future__ import annotations

from typing import ClassVar

from raydist.redact import redact


class RaydistError(Exception):
    """The base of all. `message` says what and where; `hint` says how to mend it (may be empty). Neither keeps a URI's secrets."""

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, hint: str = "") -> None:
        message, hint = redact(message), redact(hint)
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UserError(RaydistError, ValueError):
    """What was asked cannot be done; nothing was started."""

    exit_code = 2


class SpecError(UserError):
    """A job file or a `--set` is wrong. `message` has one line a problem: file, field, value, remedy."""


class UsageError(UserError):
    """The options of a command do not fit together."""


class DataError(UserError):
    """A corpus, a tokenizer or a prepared dataset cannot be used."""


class ExtensionNotFound(UserError, LookupError):
    """No model, strategy or other extension has that name."""


class RunNotFound(UserError, LookupError):
    """There is no run of that name, or no run folder at that place."""


class PreflightError(UserError):
    """The cluster cannot run this job: resources, versions or storage."""


class ClusterUnreachable(UserError):
    """No Jobs API of Ray answers at that address; one may do so later."""


class StorageError(RaydistError, OSError):
    """Storage refused a read or a write."""

    # OSError.__new__ would read two arguments as (errno, strerror); its __str__ likewise.
    __str__ = RaydistError.__str__


class CheckpointError(RaydistError):
    """A checkpoint could not be saved or restored."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint's file is missing, cut short, or differs from the hash in its manifest."""


class CheckpointNotFound(CheckpointError, LookupError):
    """No committed checkpoint can be read."""


class SpecChanged(CheckpointError):
    """The spec differs from the checkpoint's in what changes the numbers."""

    exit_code = 2


class TraceFailed(RaydistError):
    """A run that trains did not give the trace that it was asked for; its training goes on."""


class StopFailed(RaydistError):
    """A run, or a sweep, that was asked to stop has not ended in time, or its driver died before it could."""


class Rollback(RaydistError):
    """The attempt ended on purpose: a restart goes on from the newest checkpoint, and leaves a bad batch, if it was one, out."""


class TrainingStopped(RaydistError):
    """The run ended before its last step, and a restart would not help."""


class NonFinite(TrainingStopped, ArithmeticError):
    """NaN or Inf in the loss or the gradients; the update was not applied."""


class LossSpike(TrainingStopped, ArithmeticError):
    """A loss far above those before it, by recovery.spike; the update was not applied."""


class SuspectHardware(TrainingStopped):
    """The weights on one device drifted away from their replicas three times in a run; see train.check_replicas."""


class GraphMismatch(TrainingStopped):
    """Parameters took no part in the loss, or not the same ones on every rank."""


class WorkerFailed(TrainingStopped):
    """A rank died or raised, and the budget of restarts is spent."""


class SavesFailed(CheckpointError, TrainingStopped):
    """checkpoint.max_failures saves in a row failed, or the last one of a run hangs."""


class Fenced(CheckpointError, TrainingStopped):
    """A newer attempt of the run has begun; this one was given up, and may not commit."""


class RankFailed(Exception):
    """What one rank ended with, as plain facts: it crosses Ray where torch, or the user's own module, is not there.

    `at` is Unix time in seconds on that rank's host; `bases` the names of the exception's classes; `traceback` text.
    """

    def __init__(
        self, rank: int, type_name: str, message: str, traceback: str, at: float, bases: tuple[str, ...]
    ) -> None:
        super().__init__(rank, type_name, message, traceback, at, bases)
        self.rank, self.type_name, self.message = rank, type_name, message
        self.traceback, self.at, self.bases = traceback, at, bases

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type_name}: {self.message}"

"""All errors that users see, in one tree. Each says what is wrong, and how to fix it.

Runs anywhere. Imports nothing of raydist except what removes secrets and control characters from a message.

    RaydistError                      message, hint; `exit_code` of the command
    ├── UserError (ValueError)        2: the request cannot be carried out
    │   ├── SpecError                 a job file or an override is wrong; lists all problems
    │   ├── UsageError                a command's options do not fit together
    │   ├── DataError                 a corpus, a tokenizer or a prepared dataset cannot be used
    │   ├── ExtensionNotFound         no model, strategy, ... of that name (also a LookupError)
    │   ├── RunNotFound               no run of that name or in that folder (also a LookupError)
    │   ├── PreflightError            the cluster cannot run this job
    │   └── ClusterUnreachable        no Ray cluster answers at that address; it may answer later
    ├── StorageError (OSError)        3: storage refused a read or a write
    ├── CheckpointError               3
    │   ├── CheckpointCorrupt         a file is missing or truncated, or its hash differs from the manifest
    │   │   └── CheckpointTooNew      the manifest's version is newer than this raydist knows
    │   ├── CheckpointNotFound        2: no committed checkpoint, or none of that step (also a LookupError)
    │   └── SpecChanged               2: a resumed run would give other results than the original
    ├── QuantizationRefused           3: quantised weights lose more than was allowed
    ├── TraceFailed                   3: a running job returned no trace, or only a part
    ├── SaveFailed                    3: a running job did not save a checkpoint that was asked for
    ├── StopFailed                    3: a run did not stop in time, or its driver died
    ├── RankRefused                   3: a process that is not of this attempt has taken a rank's place
    ├── HeadReplaced                  3: Ray's head was started again, as another cluster
    ├── Rollback                      3: the attempt ended in order to resume from a checkpoint
    └── TrainingStopped               3: the run ended before its last step, and a restart would not help
        ├── NonFinite                 NaN or Inf in the loss or in the gradients (also an ArithmeticError)
        ├── LossSpike                 a loss far above the previous ones (also an ArithmeticError)
        ├── SuspectHardware           replicas drifted on the same device several times
        ├── GraphMismatch             parameters without a gradient, or different graphs on the ranks
        ├── WorkerFailed              a rank died or raised, and no restarts are left
        ├── HookFailed                a hook of the job raised, or changed weights
        ├── SavesFailed               too many saves in a row failed (also a CheckpointError)
        └── Fenced                    a newer attempt has started: this one may not commit (also a CheckpointError)

    RankFailed                        the error of one rank as plain data, sent to the driver

Errors cross Ray by pickle: arguments are positional and all go to `super().__init__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from raydist.printable import printable
from raydist.redact import redact

SIGNALLED = (129, 130, 143)
"""Exit codes of a driver that SIGHUP, SIGINT or SIGTERM has ended."""


class RaydistError(Exception):
    """The base class. `message` says what and where; `hint` how to fix it (may be empty). Secrets of URIs and control
    characters are removed from both.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, hint: str = "") -> None:
        message, hint = printable(redact(message)), printable(redact(hint))
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UserError(RaydistError, ValueError):
    """The request cannot be carried out; nothing was started."""

    exit_code = 2


class SpecError(UserError):
    """A job file or a `--set` is wrong. `message` has one line per problem: file, field, value, remedy."""


class UsageError(UserError):
    """The options of a command do not fit together."""


class DataError(UserError):
    """A corpus, a tokenizer or a prepared dataset cannot be used."""


class ExtensionNotFound(UserError, LookupError):
    """There is no model, strategy or other extension of that name."""


class RunNotFound(UserError, LookupError):
    """There is no run of that name, or no run in that folder."""


class PreflightError(UserError):
    """The cluster cannot run this job: resources, versions or storage."""


class ClusterUnreachable(UserError):
    """No Ray cluster, or no Jobs API, answers at that address; it may answer later."""


class StorageError(RaydistError, OSError):
    """Storage refused a read or a write."""

    # OSError.__new__ would read two arguments as (errno, strerror); its __str__ likewise.
    __str__ = RaydistError.__str__


class CheckpointError(RaydistError):
    """A checkpoint could not be saved or restored."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint's file is missing or truncated, or its hash differs from the manifest."""


class CheckpointTooNew(CheckpointCorrupt):
    """A manifest has a version that this raydist does not know: a newer one has written it."""


class CheckpointNotFound(CheckpointError, LookupError):
    """No checkpoint is committed, or none of the step that was asked for."""

    exit_code = 2


class SpecChanged(CheckpointError):
    """The spec differs from the checkpoint's in fields that change the results."""

    exit_code = 2


class QuantizationRefused(RaydistError):
    """Quantised weights have a held-out loss above the bound; nothing was written."""


class TraceFailed(RaydistError):
    """A running job did not return the requested trace; its training continues."""


class SaveFailed(RaydistError):
    """A running job did not save the checkpoint that a user has asked for; its training continues."""


class StopFailed(RaydistError):
    """A run or a sweep did not stop in time after a request, or its driver died first."""


class RankRefused(RaydistError):
    """A process that this run's driver has not started has taken the place of a rank; nothing that it sent was used."""


class Rollback(RaydistError):
    """The attempt ended on purpose: a restart resumes from the newest checkpoint, and skips the bad batch if there was one."""


class HeadReplaced(RaydistError):
    """Another cluster answers at the address of Ray's head. Many calls of Ray abort this process then."""


class TrainingStopped(RaydistError):
    """The run ended before its last step, and a restart would not help."""


class NonFinite(TrainingStopped, ArithmeticError):
    """NaN or Inf in the loss or the gradients; the update was not applied."""


class LossSpike(TrainingStopped, ArithmeticError):
    """A loss far above the previous ones, by recovery.spike; the update was not applied."""


class SuspectHardware(TrainingStopped):
    """The weights on one device differed from their replicas three times in a run; see train.check_replicas."""


class GraphMismatch(TrainingStopped):
    """Some parameters were not used in the loss, or different ones on different ranks."""


class WorkerFailed(TrainingStopped):
    """A rank died or raised, and no restarts are left."""


class HookFailed(TrainingStopped):
    """A hook of the job (raydist/worker/hooks) raised and was to end the run, or it changed weights."""


class SavesFailed(CheckpointError, TrainingStopped):
    """checkpoint.max_failures saves in a row failed, or the last save of a run hangs."""


class Fenced(CheckpointError, TrainingStopped):
    """A newer attempt of the run has started; this one was abandoned, and may not commit."""


class RankFailed(Exception):
    """The error of one rank as plain data: it crosses Ray to processes without torch or the user's own modules.

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


def error_facts(error: RaydistError) -> list[str]:
    """Class, message and hint: plain values, of which `error_from` makes the same error in another process."""
    return [type(error).__name__, error.message, error.hint]


def error_from(facts: Sequence[str], otherwise: type[RaydistError]) -> RaydistError:
    """The error of `error_facts`; of the class `otherwise` if this module has no error of that name."""
    name, message, hint = map(str, facts)
    known = globals().get(name)
    return (known if isinstance(known, type) and issubclass(known, RaydistError) else otherwise)(message, hint)

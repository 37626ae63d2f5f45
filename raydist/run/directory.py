"""A run on storage: the paths of its files, and which of its checkpoints are committed.

Runs anywhere.

    RUN/spec.yaml                             the resolved job
        state.json                            the last state written by the run's monitor, with a heartbeat
        events.jsonl                          events, one per line
        metrics/*.parquet                     one row per step
        tensorboard/                          the same for TensorBoard
        samples/*.parquet                     telemetry besides the steps: memory, communication, GPUs, hosts
        logs/                                 output of Ray and the workers
        ledger/*.json                         the batches that are left out of training
        faults/*.json                         the injected faults (`raydist train --faults`)
        requests/trace-0001.json              requests to the run while it trains (raydist/run/requests.py)
        traces/0001.json.gz                   the result of `raydist trace`; traces/0001/ has each rank's part
        buckets/*.json                        the size of DDP's buckets, for each number of ranks (parallel.bucket_mb: auto)
        comm/*.json                           what comm left to measurement, for each number of ranks (docs/how-to/communication.md)
        report.html                           the result of `raydist report`
        checkpoints/step-00000200/MANIFEST-0001.json and shards; 0001 is the attempt that saved it
        attempts/0002.json                    attempt 2 has started: earlier attempts may not commit any more
        attempts/0002-from-00000200.json      and the step from which it resumed
        journals/*.jsonl                      events of a killed driver, for the next one (raydist/observe/write_ahead_log.py)
        mirrors/*.json                        the replicas in local folders that the run has had (raydist/checkpoint/mirrors.py)
        drivers/000007.json                   the run's driver, and its lease (raydist/run/lease.py)
        drivers/000007.stop                   `raydist stop` has asked that driver to end

**Fencing.** An attempt that is cut off may still run while a newer one trains, and must not commit. Each attempt writes its number
before its workers start; before a commit, it checks that its number is still the newest. On no storage are this check and the
commit atomic, so a manifest may still be written too late. Therefore its name contains its attempt, so that it overwrites no
other manifest, and each attempt notes the step from which it resumed: **manifests of earlier attempts after that step do not
count**. docs/explanation/checkpoints.md has the details.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Self

from raydist.errors import RunNotFound, StorageError, UsageError
from raydist.parsing import parse_json, quoted
from raydist.run import storage_choice
from raydist.storage import GONE, Storage

_SHOWN, _LOOKED, _SIMILAR = 10, 60, 0.6
"""Of a storage's runs in an error: how many are named, of how many folders; difflib's ratio of similar names."""
SPEC, STATE, EVENTS, METRICS, LOGS, TENSORBOARD, LEDGER, REPORT = (
    "spec.yaml", "state.json", "events.jsonl", "metrics", "logs", "tensorboard", "ledger", "report.html",
)  # fmt: skip
CHECKPOINTS, ATTEMPTS, DRIVERS, JOURNALS = "checkpoints", "attempts", "drivers", "journals"
FAULTS, DRIFT = "faults", "drift"
BUCKETS, COMM, SAMPLES, REQUESTS, TRACES, MIRRORS = "buckets", "comm", "samples", "requests", "traces", "mirrors"
DATA = ".data"
"""In the folder of the runs: corpora that raydist prepared automatically."""
SWEEP_CELLS = "cells.jsonl"
"""A folder with this file is a sweep (raydist/run/sweep_directory.py); a folder with SPEC is a run."""
TUNED = ".tuned"
"""In the folder of the runs: measurements of one run that are reused by later runs."""

_MARKS = SPEC, SWEEP_CELLS, ATTEMPTS, DRIVERS
"""Each folder of a run or a sweep has one of them from its first moment on."""
_DELETED = frozenset([
    SPEC, STATE, EVENTS, METRICS, LOGS, TENSORBOARD, LEDGER, CHECKPOINTS, FAULTS, DRIFT, BUCKETS, SAMPLES, REQUESTS, TRACES,
    REPORT, COMM, JOURNALS, "export.jsonl", "mlflow.json", "wandb", "wandb.json",
])  # fmt: skip
"""What `start_anew` deletes: all that raydist writes into a run's folder, but ATTEMPTS, DRIVERS and MIRRORS."""
_UNFINISHED = tuple(f".tmp-{name}" for name in (SPEC, STATE, EVENTS, REPORT))

NOTE_S = 60.0
"""How long a note that one node has written may take to be seen on another."""
_LOOK_S = 1.0
LONGEST_NAME = 1024
"""Characters of the name, path or URI of a run."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STEP = re.compile(r"step-(\d+)")
_MANIFEST = re.compile(r"MANIFEST-(\d+)\.json")
_ATTEMPT = re.compile(r"(\d+)(?:-from-(\d+))?\.json")


def check_name(name: str) -> str:
    """Returns `name` if it is a valid run name. Raises UsageError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):  # a script may give anything
        raise UsageError(
            f"run name {quoted(name) if isinstance(name, str) else name!r}",
            "use letters, digits, '.', '_' and '-', at most 100, beginning with a letter or digit",
        )
    return name


def step_folder(step: int) -> str:
    """The folder of a checkpoint, relative to the run."""
    return f"{CHECKPOINTS}/step-{step:08d}"


def manifest_name(attempt: int) -> str:
    """The manifest's name in its checkpoint's folder."""
    return f"MANIFEST-{attempt:04d}.json"


def manifest_attempt(name: str) -> int | None:
    """The attempt that wrote the manifest of that name; None if it is not a manifest's name."""
    match = _MANIFEST.fullmatch(PurePosixPath(name).name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Lineage:
    """The attempts of a run that have started -> the step from which each resumed; None if it is not noted (yet)."""

    begun: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """The highest attempt number; 0 if none has started."""
        return max(self.begun, default=0)

    def voided_by(self, attempt: int, step: int) -> int | None:
        """The later attempt that voids `attempt`'s checkpoint of `step`, because it resumed from an earlier step; None if none."""
        later = (b for b, start in sorted(self.begun.items()) if b > attempt and start is not None and start < step)
        return next(later, None)

    def joined(self, other: Lineage) -> Lineage:
        """Both lineages combined."""
        begun = dict(self.begun)
        for attempt, start in other.begun.items():
            begun[attempt] = begun.get(attempt) if start is None else start
        return Lineage(begun)


class Folder:
    """A folder of a run or of a sweep, by path or URI. Opening it neither creates nor checks anything.

    A local folder is created with mode 0700, and its files with mode 0600: they have texts of the training data and the
    environment. To share it, change its mode; raydist does not change it again, and new files get its permissions for others.
    """

    def __init__(self, uri: str | os.PathLike[str] | Storage) -> None:
        self.storage = uri if isinstance(uri, Storage) else Storage(uri)
        self.storage.private = True

    @property
    def uri(self) -> str:
        """Path or URI of the folder, without secrets."""
        return self.storage.uri

    @property
    def full_uri(self) -> str:
        """The URI that opens it, including secrets: do not show or store it."""
        return self.storage.full_uri

    @property
    def name(self) -> str:
        """The folder's last part."""
        return str(self.storage.root).rstrip("/").rsplit("/", 1)[-1]

    def guard(self) -> Self:
        """From now on this folder, of a run or sweep that has begun, is written only where it is there.

        The empty folder below the mount point of an unmounted file system looks like that of a new run.
        """
        if self.storage.local is not None:
            self.storage.marks = tuple(self.storage.local / name for name in _MARKS)
        return self

    def expect(self, wait_s: float = 0.0) -> Self:
        """`guard`, and waits until the folder is there. Raises StorageError after `wait_s`."""
        self.guard()
        if self.storage.local is None:
            return self
        deadline = time.monotonic() + wait_s
        while True:
            with suppress(OSError):  # such as a stale NFS handle
                if any(mark.exists() for mark in self.storage.marks):
                    return self
            if time.monotonic() > deadline:
                raise StorageError(f"cannot write {self.uri} on {socket.gethostname()}: {GONE}", "mount it again")
            time.sleep(_LOOK_S)


class RunDir(Folder):
    """The folder of one run."""

    @property
    def home(self) -> Storage:
        """The folder that contains all runs, including this one."""
        above = self.storage.above()
        above.marks = self.storage.marks
        return above

    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.storage.size(SPEC) is not None

    def lineage(self) -> Lineage:
        """The attempts that have started, and their resume steps, from the names in attempts/."""
        begun: dict[int, int | None] = {}
        for name in self.storage.files(ATTEMPTS):
            match = _ATTEMPT.fullmatch(PurePosixPath(name).name)
            if match:
                number = int(match[1])
                begun[number] = int(match[2]) if match[2] else begun.get(number)
        return Lineage(begun)

    def committed(self) -> list[int]:
        """Steps of the committed checkpoints, ascending: those with a valid manifest."""
        return sorted(self.manifests())

    def newest_step(self) -> int:
        """The step of the newest committed checkpoint; 0 if there is none."""
        return max(self.manifests(), default=0)

    def manifests(self, lineage: Lineage | None = None) -> dict[int, str]:
        """Committed step -> the name of its valid manifest; ascending. `lineage`: the run's, if the caller has a newer one."""
        lineage = self.lineage() if lineage is None else lineage
        found = {}
        for folder in self.storage.folders(CHECKPOINTS):
            match = _STEP.fullmatch(folder)
            name = self._counting(int(match[1]), lineage) if match else None
            if match and name:
                found[int(match[1])] = name
        return dict(sorted(found.items()))

    def manifest(self, step: int) -> str | None:
        """The name of the valid manifest of a step; None if that step is not committed."""
        return self._counting(step, self.lineage())

    def _counting(self, step: int, lineage: Lineage) -> str | None:
        attempts = [a for a in self.attempts_of(step) if lineage.voided_by(a, step) is None]
        return manifest_name(attempts[-1]) if attempts else None

    def attempts_of(self, step: int) -> list[int]:
        """The attempts that have a manifest at that step, valid or not; ascending."""
        found = (manifest_attempt(n) for n in self.storage.files(step_folder(step)))
        return sorted(a for a in found if a is not None)

    def void(self) -> list[tuple[int, int, int]]:
        """(step, attempt, the attempt that voids it) of each manifest that was written too late."""
        lineage, found = self.lineage(), []
        for folder in self.storage.folders(CHECKPOINTS):
            match = _STEP.fullmatch(folder)
            for attempt in self.attempts_of(int(match[1])) if match else ():
                by = lineage.voided_by(attempt, int(match[1])) if match else None
                if match and by is not None:
                    found.append((int(match[1]), attempt, by))
        return found


def begin_attempt(run: RunDir, number: int) -> None:
    """Starts attempt `number`: after this returns, no earlier attempt commits. Call it before its workers start.

    Raises UsageError if that number, or a higher one, has started already: another driver runs this run.
    """
    who = {"host": socket.gethostname(), "pid": os.getpid()}
    body = {"attempt": number, "at": time.time(), "newest_checkpoint": run.newest_step(), **who}
    newest = run.lineage().newest
    if newest >= number or not run.storage.write_new(f"{ATTEMPTS}/{number:04d}.json", json.dumps(body).encode()):
        raise UsageError(
            f"run {run.name}: attempt {max(newest, number)} has already started, so attempt {number} cannot start",
            "another driver trains this run; `raydist runs` shows whether it is alive",
        )


def resume_attempt(run: RunDir, number: int, step: int) -> None:
    """Attempt `number` resumes from `step`, 0 for the start: later steps committed by earlier attempts do not count.

    Call it once the step is decided, and before the first commit. Raises UsageError if the attempt is fenced.
    """
    if fenced(run, number):
        raise UsageError(
            f"run {run.name}: attempt {run.lineage().newest} has started, so attempt {number} may not continue",
            "another driver trains this run",
        )
    body = {"attempt": number, "step": step, "at": time.time()}
    run.storage.write(f"{ATTEMPTS}/{number:04d}-from-{step:08d}.json", json.dumps(body).encode())


def await_attempt(run: RunDir, number: int, first: bool = False, wait_s: float = NOTE_S) -> None:
    """Returns once the note of attempt `number`, which the driver has written, can be seen from here. For the `first` rank, whose
    step to resume from voids later ones, also the newest checkpoint that the driver has seen by then.

    If a node has not mounted the storage, or mounts another one, its folder looks like that of a new run. Raises StorageError after
    `wait_s`; NFS may show a new file that late.
    """
    deadline, name = time.monotonic() + wait_s, f"{ATTEMPTS}/{number:04d}.json"

    def wait(seen: Callable[[], bool], what: str) -> None:
        while not seen():
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{run.uri} on {socket.gethostname()} does not have {what}: it is another folder",
                    "is its file system mounted there? All nodes need the same --storage",
                )
            time.sleep(min(_LOOK_S, wait_s))

    wait(lambda: run.storage.size(name) is not None, f"{name}, which the driver has written")
    if first:
        newest = int(parse_json(run.storage.read(name))["newest_checkpoint"])
        wait(lambda: run.newest_step() >= newest, f"the checkpoint of step {newest}, which the driver has seen")
    run.expect()


def start_anew(run: RunDir) -> None:
    """Deletes what raydist has written of a run, and no file of the user's. Attempt and driver numbers stay: they continue, so that
    an attempt that was cut off stays fenced.

    Uses one attempt number, which resumes from step 0: no earlier checkpoint counts any more, including copies elsewhere.
    """
    number = run.lineage().newest + 1
    begin_attempt(run, number)
    resume_attempt(run, number, 0)
    for name in [*run.storage.folders(), *run.storage.files(unfinished=True)]:
        if name in _DELETED or name.startswith(_UNFINISHED):
            run.storage.delete(name)


def fenced(run: RunDir, number: int) -> bool:
    """Whether attempt `number` may no longer commit, because another one is the newest. A run without notes has no fence."""
    newest = run.lineage().newest
    return newest not in (0, number)


def is_place(name: str) -> bool:
    """Whether what a user names is a folder's path or URI, and not only a name under the storage. Raises UsageError."""
    if not name or "\0" in name or len(name) > LONGEST_NAME:
        raise UsageError(
            f"{quoted(name)!r} is not the name of a run or a folder", f"give 1 to {LONGEST_NAME} characters"
        )
    return "/" in name or "://" in name or Path(name).is_dir()


def resolve(run: str, storage: str | None = None) -> RunDir:
    """The run that a user names: a run folder's path or URI, or a name under `storage`.

    Raises RunNotFound, which says where it looked, why there, and which runs exist.
    """
    looked, candidate = [], None
    if is_place(run):
        candidate = RunDir(run)
        looked.append(candidate.uri)
        if candidate.exists():
            return candidate
    if "://" in run or run.startswith(("/", ".", "~")):
        raise not_found("run", run, looked, [], "give a run folder's path or URI, or a name with --storage")
    place = storage_choice.choose(storage)
    stored = Storage(place.uri)
    named = RunDir(stored.at(run))
    if named.exists():
        return named
    looked.append(f"{named.uri} ({place.because})")
    if stored.size(f"{run}/{SWEEP_CELLS}") is not None:
        raise RunNotFound(
            f"{run!r} is a sweep, at {named.uri}",
            f"`raydist sweep results {run}` lists its runs, which are {named.uri}/runs/CELL",
        )
    known = existing(stored, run, lambda n: stored.size(f"{n}/{SPEC}") is not None)
    raise not_found("run", run, looked, known, elsewhere(place))


def existing(home: Storage, name: str, there: Callable[[str], bool]) -> list[str]:
    """Some folders of `home` for which `there` is true: those whose names are similar to `name`, and the first others. Looks
    at _LOOKED folders at most, since each takes a request to an object store. Raises StorageError.
    """
    folders = [folder for folder in home.folders() if not folder.startswith(".")]
    near = difflib.get_close_matches(name, folders, n=3, cutoff=_SIMILAR)
    others = [folder for folder in folders if folder not in near]
    found = [folder for folder in near if there(folder)]
    return sorted([*found, *islice(filter(there, others[: _LOOKED - len(near)]), _SHOWN + 1)])


def not_found(what: str, name: str, looked: Sequence[str], known: Sequence[str], hint: str) -> RunNotFound:
    """The error for a run or sweep that does not exist: where it was searched, similar names, those of `existing`, and `hint`."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=_SIMILAR)
    more = ", ..." if len(known) > _SHOWN else ""
    hints = [
        f"did you mean {' or '.join(map(repr, near))}?" if near else "",
        f"{what.replace(' or ', 's or ')}s there: {', '.join(known[:_SHOWN])}{more}" if known else "",
        hint,
    ]
    return RunNotFound(f"no {what} {name!r}: looked at {' and '.join(looked)}", "\n  ".join(filter(None, hints)))


def elsewhere(place: storage_choice.StorageChoice) -> str:
    """Other places that contain runs, and how to choose another storage."""
    also = storage_choice.others(place)
    there = f"there are runs in {' and '.join(also)}: " if also else ""
    return there + storage_choice.how_to_set()


def default_storage() -> str:
    """The storage of runs without `--storage`: see raydist.run.storage_choice. Raises UserError for a bad configuration file."""
    return storage_choice.choose().uri

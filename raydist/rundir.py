"""One run on storage: where its files are, and which of its checkpoints are committed.

Runs anywhere.

    RUN/spec.yaml                             the resolved job
        state.json                            the last word of the run's monitor, with a heartbeat
        events.jsonl                          what happened, a line each
        metrics/*.parquet                     one row a step
        tensorboard/                          the same for TensorBoard
        logs/                                 what Ray and the workers printed
        ledger/*.json                         the batches that were left out of training
        checkpoints/step-00000200/MANIFEST.json and shards
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from raydist.errors import RunNotFound, UsageError
from raydist.storage import Storage

DEFAULT_STORAGE = "~/raydist"
SPEC, STATE, EVENTS, METRICS, LOGS, TENSORBOARD, LEDGER = (
    "spec.yaml", "state.json", "events.jsonl", "metrics", "logs", "tensorboard", "ledger",
)  # fmt: skip
CHECKPOINTS, MANIFEST = "checkpoints", "MANIFEST.json"
DATA = ".data"
"""Beside the runs: corpora that raydist prepared by itself."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STEP = re.compile(r"step-(\d+)")


def check_name(name: str) -> str:
    """`name`, if a run may have it. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"run name {name!r}", "use letters, digits, '.', '_' and '-', 100 at most, no leading sign")
    return name


def step_folder(step: int) -> str:
    """The folder of a checkpoint, relative to the run."""
    return f"{CHECKPOINTS}/step-{step:08d}"


class RunDir:
    """The folder of one run, by path or URI. Opening it neither creates nor checks anything."""

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        self.storage = Storage(uri)

    @property
    def uri(self) -> str:
        """Path or URI of the folder."""
        return self.storage.uri

    @property
    def name(self) -> str:
        """The folder's last part."""
        return str(self.storage.root).rstrip("/").rsplit("/", 1)[-1]

    def exists(self) -> bool:
        """Whether a run was ever started here."""
        return self.storage.size(SPEC) is not None

    def committed(self) -> list[int]:
        """Steps of the committed checkpoints, ascending. One without a manifest does not exist."""
        found = []
        for folder in self.storage.folders(CHECKPOINTS):
            match = _STEP.fullmatch(folder)
            if match and self.storage.size(f"{CHECKPOINTS}/{folder}/{MANIFEST}") is not None:
                found.append(int(match[1]))
        return sorted(found)


def resolve(run: str, storage: str | None = None) -> RunDir:
    """RUN as a user gives it: a run folder's path or URI, or a name under `storage`.

    Raises RunNotFound, naming where it looked and what is there.
    """
    looked = []
    if "/" in run or "://" in run or Path(run).is_dir():
        candidate = RunDir(run)
        looked.append(candidate.uri)
        if candidate.exists():
            return candidate
    if "://" not in run and not run.startswith(("/", ".", "~")):
        home = Storage(storage or default_storage())
        candidate = RunDir(home.at(run).uri)
        looked.append(candidate.uri)
        if candidate.exists():
            return candidate
        known = [n for n in home.folders() if not n.startswith(".")]
        hint = f"runs there: {', '.join(known[:10])}" if known else "give its folder, or --storage"
    else:
        hint = "give a run folder's path or URI, or a name with --storage"
    raise RunNotFound(f"no run {run!r}: looked at {' and '.join(looked)}", hint)


def default_storage() -> str:
    """Where runs go unless `--storage` says otherwise: $RAYDIST_STORAGE, or ~/raydist."""
    return os.environ.get("RAYDIST_STORAGE") or DEFAULT_STORAGE

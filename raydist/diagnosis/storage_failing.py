"""Checkpoints are not written: the storage fails, hangs, or is too slow. A failure of the run then loses all since the last one.

Runs anywhere: plain python. The ranks' own errors are in the events.
"""

from __future__ import annotations

from collections.abc import Iterator

from raydist.diagnosis._symptoms import figure
from raydist.diagnosis._window import Window
from raydist.records import Event, Finding

CAUSE = "the storage takes no checkpoint"
LOOKS = "the events checkpoint_failed since the newest checkpoint_saved, and their causes"
THRESHOLDS = {
    "failed": ("1, or 2 steps passed over; critical from 2 in a row on", "a checkpoint that is written ends it")
}
_CAUSES = (
    ("No space left", "the storage is full", "free space there, or lower checkpoint.keep"),
    ("Disk quota exceeded", "the quota of the storage is used up", "free space there, or lower checkpoint.keep"),
    ("Read-only file system", "the storage is mounted read-only", "mount it for writing; dmesg says why the kernel did not"),
    ("Permission denied", "the user may not write there", "give the user of the ranks the right to write to the run's folder"),
    ("Stale file handle", "the file server has lost the folder", "mount it again on that host"),
    ("Input/output error", "the storage fails", "check the disk or the mount of that host (dmesg)"),
    ("not mounted", "the storage is not mounted", "mount it on that host"),
    ("still ", "the storage does not answer, or is too slow", "check its speed, or raise checkpoint.every"),
    ("time", "the storage does not answer in time", "check it, or raise checkpoint.timeout_s"),
)  # fmt: skip
"""Part of the error -> cause and remedy; the first that fits."""
_OTHER = ("the storage fails", "check the storage: free space, permissions, whether each host reaches it")


def check(window: Window) -> Iterator[Finding]:
    """One finding, until a checkpoint is written."""
    failed: list[Event] = []
    for event in window.events if window.of("checkpoint_failed") else ():
        if event.kind == "checkpoint_failed":
            failed.append(event)
        elif event.kind == "checkpoint_saved":
            failed.clear()
    # One step is passed over whenever a save takes longer than `checkpoint.every`, and the next one is written.
    if not failed or (len(failed) == 1 and failed[0].data.get("skipped")):
        return
    last = failed[-1]
    error, rank = str(last.data["cause"]), last.data.get("rank")
    cause, remedy = next(((c, r) for part, c, r in _CAUSES if part in error), _OTHER)
    many = f"the newest {len(failed)} checkpoints were" if len(failed) > 1 else "the newest checkpoint was"
    yield Finding(
        rule="storage_failing",
        rank=rank,
        severity="critical" if len(failed) > 1 else "warning",
        what=f"{many} not written, at step {last.data['step']}: {error}",
        figures={"failed": len(failed), "step": last.data["step"]},
        remedy=remedy,
        cause=cause,
        culprit={**window.culprit(rank), "setting": "storage"},
        evidence=[figure("checkpoints in a row that were not written", len(failed), "events: checkpoint_failed")],
        confidence=0.9,
    )

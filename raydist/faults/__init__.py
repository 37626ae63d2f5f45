"""Faults as data: what is to go wrong in a run, on which rank, at which step. For tests, and to see one's own job survive.

Runs anywhere. Imports neither torch nor ray: a rank does to itself what is a rank's (worker/faults/injector.py), and the driver
what is the driver's (cluster/run/fault_injector.py).

    faults.yaml --load--> [Kill(rank=1, step=7), ...] --> job --> Injector --note--> RUN/faults/*.json --> event `fault`

A fault happens once in a run, also across restarts and new drivers: before it does, its note is in the run's folder, for
good. `times` asks for more.
"""

from raydist.faults.kinds import (
    KINDS,
    Abort,
    BadNumber,
    DamageCheckpoint,
    Deadlock,
    DiskFull,
    Drain,
    Exit,
    Fault,
    FlipBit,
    HoldGil,
    Kill,
    KillAgent,
    KillDriver,
    KillMonitor,
    KillNode,
    LossSpike,
    MemoryHog,
    OutOfMemory,
    Raise,
    ReadOnly,
    Segfault,
    SkipCollective,
    SlowData,
    SlowRank,
    SlowStorage,
    StorageFault,
    StorageGone,
    StuckData,
    Suspend,
    fields,
    summary,
)
from raydist.faults.load import load, parse
from raydist.faults.notes import done, names, note, read_notes

__all__ = [
    "KINDS",
    "Abort",
    "BadNumber",
    "DamageCheckpoint",
    "Deadlock",
    "DiskFull",
    "Drain",
    "Exit",
    "Fault",
    "FlipBit",
    "HoldGil",
    "Kill",
    "KillAgent",
    "KillDriver",
    "KillMonitor",
    "KillNode",
    "LossSpike",
    "MemoryHog",
    "OutOfMemory",
    "Raise",
    "ReadOnly",
    "Segfault",
    "SkipCollective",
    "SlowData",
    "SlowRank",
    "SlowStorage",
    "StorageFault",
    "StorageGone",
    "StuckData",
    "Suspend",
    "done",
    "fields",
    "load",
    "names",
    "note",
    "parse",
    "read_notes",
    "summary",
]

"""Fault injection: faults as data, each with a rank and a step. For tests, and to check that your own job survives them.

Runs anywhere. Imports neither torch nor ray: faults of a rank are injected by the rank itself (worker/faults/injector.py), faults
of the driver by the driver (cluster/run/fault_injector.py).

    faults.yaml --load--> [Kill(rank=1, step=7), ...] --> job --> Injector --note--> RUN/faults/*.json --> event `fault`

A fault happens once in a run, even across restarts and new drivers: a note in the run's folder is written before it happens, and
is kept. `times` allows more.
"""

from raydist.faults.base import Fault
from raydist.faults.host_kinds import *  # noqa: F403  # each fault is a class
from raydist.faults.kinds import *  # noqa: F403  # each fault is a class
from raydist.faults.kinds import KINDS, fields, summary
from raydist.faults.load import load, parse
from raydist.faults.notes import done, failed, names, note, read_notes

__all__ = ["KINDS", "Fault", "done", "failed", "fields", "load", "names", "note", "parse", "read_notes", "summary"]

"""Sweeps: many jobs that differ in a few fields, asked for in one file.

Runs anywhere.

    models.py   what the file may say
    names.py    short names of parameters
    space.py    axes and points: grids, zips, lists, draws
    extent.py   how far a space reaches: how many points it has, and its ends
    equal.py    what makes cells comparable: steps by tokens, held-out batches, micro-batches
    cells.py    a point and a seed -> a whole job spec with an id
    load.py     the file, checked as a whole
    store.py    the sweep in its folder, and whether a later start still asks for the same

`load_sweep(path).cells()` are all cells, in order; `check` raises what is wrong with them.
"""

from raydist.spec.sweep.cells import Cell, Sweep, check
from raydist.spec.sweep.load import LIVE, load_sweep
from raydist.spec.sweep.models import SweepSpec
from raydist.spec.sweep.space import Axis, Point
from raydist.spec.sweep.store import note, read_stored, store

__all__ = ["LIVE", "Axis", "Cell", "Point", "Sweep", "SweepSpec", "check", "load_sweep", "note", "read_stored", "store"]

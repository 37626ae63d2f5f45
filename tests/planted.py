"""Modules in a folder with the names of all of Python's and all installed ones, which leave a mark when they are imported."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

_MARK = ".imported"


def plant(folder: Path, but: Collection[str] = ()) -> list[Path]:
    """Writes them, where the folder has no module of that name, and returns their files. `but`: names that are left out."""
    names = {*sys.stdlib_module_names, *packages_distributions()} - {"raydist", "tests", *but}
    # Not those of other systems, such as msvcrt: importing them would have to fail.
    files = [folder / f"{name}.py" for name in sorted(names) if name.isidentifier() and PathFinder.find_spec(name)]
    new = [file for file in files if not file.exists()]
    for file in new:
        mark = str(file.with_suffix(_MARK))
        file.write_text(f"open({mark!r}, 'w').close()\nraise ImportError('this is not the module')\n")
    return new


def imported(folder: Path) -> list[str]:
    """The names of those that were imported."""
    return sorted(file.stem for file in folder.glob(f"*{_MARK}"))
